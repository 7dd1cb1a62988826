"""A run as one HTML file that needs nothing else: no network, no library, no server."""

from potluck.sim.results.report.page import html, page

__all__ = ["html", "page"]
