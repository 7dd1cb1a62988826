"""How a search on a pool went: attainment over seconds, as a line in the terminal, a drawing or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.common.render import paragraph, percent
from potluck.core.errors import InputError
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from potluck.plan.search.tabu import SearchResult

KINDS = (".html", ".svg", ".json")
LEVELS = "▁▂▃▄▅▆▇█"
LETTERS = 24
WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 48
COLOURS = ("#1f5fa8", "#b3541e", "#2e7d4f", "#7a4a9e", "#8a6d00", "#5a5a5a")

Points = Sequence[tuple[float, float]]


def require_kind(path: Path) -> None:
    """Complain of another ending before anything is searched."""
    if path.suffix not in KINDS:
        raise InputError("trace", f"{path.name!r} must end in {', '.join(KINDS)}")


def show_search(searched: Mapping[str, SearchResult]) -> None:
    """A line per region: what the search expects for mean lengths, and how it got there."""
    if not searched:
        return  # nor is the search loaded
    from potluck.plan.search.search_templates import attainment_trace

    for region, found in searched.items():
        points = attainment_trace(found)
        ended = "converged" if found.converged else "out of time"
        paragraph(
            f"search in {region}: {sparkline(points)} {percent(points[-1][1])} of requests within the objective "
            f"at mean lengths (on averages), best after {seconds(points[-1][0])}, {found.evaluated:,} states, {ended}"
        )
    click.echo()


def write_trace(path: Path | None, searched: Mapping[str, SearchResult]) -> None:
    """The drawing, or the numbers, of every region's search; where a file is named."""
    from potluck.plan.search.search_templates import attainment_trace

    if path is None:
        return
    if not searched:
        problem = "nothing was searched; only thunderserve, and auto on a spec with `pool:`, search"
        raise InputError("trace", problem)
    series = {region: attainment_trace(found) for region, found in searched.items()}
    if path.suffix == ".json":
        rows = [
            {"region": region, "trace": [{"time_s": t, "attainment": a} for t, a in points]}
            for region, points in series.items()
        ]
        text = json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
    else:
        text = svg(series)
        if path.suffix == ".html":
            head = '<meta charset="utf-8"><title>Search</title>'
            text = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{text}</body></html>\n'
    path.write_text(text, encoding="utf-8")


def sparkline(points: Points, letters: int = LETTERS) -> str:
    """The course in so many letters, from nothing to everything attained."""
    end_s = points[-1][0]
    found = []
    for i in range(letters):
        now = [value for at_s, value in points if at_s <= end_s * (i + 1) / letters]
        value = now[-1] if now else 0.0
        found.append(LEVELS[min(len(LEVELS) - 1, int(value * len(LEVELS)))])
    return "".join(found)


def svg(series: Mapping[str, Points]) -> str:
    """Steps, one line per region: the best stays the best until a better one is found."""
    end_s = max((points[-1][0] for points in series.values()), default=0.0) * 1.05 or 1.0
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(at_s: float) -> float:
        return LEFT + inner_w * at_s / end_s

    def y(value: float) -> float:
        return TOP + inner_h * (1.0 - value)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">Requests within the objective, best state found so far</text>',
    ]
    for i in range(5):
        value = i / 4
        parts.append(
            f'<line x1="{LEFT}" y1="{y(value):.1f}" x2="{WIDTH - RIGHT}" y2="{y(value):.1f}" stroke="#dddddd"/>'
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value * 100:.0f} %</text>'
        )
    for at_s in ticks(end_s):
        place = f'x="{x(at_s):.1f}" y="{HEIGHT - BOTTOM + 18}"'
        parts.append(f'<text {place} text-anchor="middle">{at_s:g}</text>')
    label = "seconds of the search"
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{label}</text>')
    for line, (region, points) in enumerate(series.items()):
        colour = COLOURS[line % len(COLOURS)]
        path = f"M{x(points[0][0]):.1f},{y(points[0][1]):.1f}"
        for at_s, value in points[1:]:
            path += f"H{x(at_s):.1f}V{y(value):.1f}"
        path += f"H{x(end_s):.1f}"
        label = f"{escape(region)} {percent(points[-1][1])}"
        row = y(points[-1][1]) + 18 + 16 * line
        parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{WIDTH - RIGHT - 4}" y="{row:.1f}" text-anchor="end" fill="{colour}">{label}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def ticks(end: float) -> list[float]:
    """Round numbers from 0 to `end`, four to ten of them."""
    size: float = 10.0 ** floor(log10(end / 4))
    step = next(size * factor for factor in (5, 2, 1) if end / (size * factor) >= 4)
    return [step * i for i in range(floor(end / step) + 1)]
