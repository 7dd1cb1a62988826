"""A run as one HTML file that needs nothing else: no network, no library, no server."""

from potluck.sim.results.report.html_report import THEME, html, page, sheet

__all__ = ["THEME", "html", "page", "sheet"]
