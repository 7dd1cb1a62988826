"""A run of `adapt.py` as a picture: ready replicas over time, and how many requests kept their objective."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parts.adapt_rig import Rig
from potluck.core.values.types import Slo

WIDTH, HEIGHT, LEFT, GAP = 560, 120, 46, 44
BIN_S = 4.0


@dataclass(frozen=True)
class Panel:
    """One scenario."""

    name: str
    ends_s: float
    happens_s: float
    copies: tuple[tuple[float, int], ...]
    """(when, how many were ready)"""
    kept: tuple[tuple[float, float], ...]
    """(from when, the share of requests of BIN_S that kept their objective)"""


def panel(name: str, rig: Rig, happens_s: float, slo: Slo) -> Panel:
    ends_s = max((shot.at_s for shot in rig.shots), default=1.0) + 1.0
    bins = [place * BIN_S for place in range(int(ends_s / BIN_S) + 1)]
    asked = [at_s for at_s in bins if any(at_s <= shot.at_s < at_s + BIN_S for shot in rig.shots)]
    kept = tuple((at_s, rig.attainment(slo, at_s, at_s + BIN_S)) for at_s in asked)
    copies = tuple((look.at_s, look.ready()) for look in rig.looks if 0 <= look.at_s <= ends_s)
    return Panel(name, ends_s, happens_s, copies, kept)


def draw(panels: list[Panel], path: Path) -> None:
    """All of them below each other, in one SVG."""
    height = len(panels) * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * LEFT}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, each in enumerate(panels):
        parts += _panel(each, GAP + place * (HEIGHT + GAP))
    path.write_text("\n".join([*parts, "</svg>", ""]), "utf-8")


def _panel(each: Panel, top: float) -> list[str]:
    most = max((count for _, count in each.copies), default=1) or 1

    def x(at_s: float) -> float:
        return LEFT + WIDTH * min(1.0, max(0.0, at_s / each.ends_s))

    def y(share: float) -> float:
        return top + HEIGHT * (1.0 - share)

    bars = [
        f'<rect x="{x(at_s):.1f}" y="{y(share):.1f}" width="{max(1.0, x(at_s + BIN_S) - x(at_s) - 1):.1f}" '
        f'height="{HEIGHT * share:.1f}" fill="#cfe3f5"/>'
        for at_s, share in each.kept
    ]
    corners = []
    for place, (at_s, count) in enumerate(each.copies):
        if place:
            corners.append(f"{x(at_s):.1f},{y(each.copies[place - 1][1] / most):.1f}")
        corners.append(f"{x(at_s):.1f},{y(count / most):.1f}")
    return [
        f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{each.name}</text>',
        f'<text x="{LEFT + WIDTH}" y="{top - 8}" text-anchor="end">line: ready replicas (top: {most}); '
        "bars: share within the objective</text>",
        *bars,
        f'<polyline points="{" ".join(corners)}" fill="none" stroke="#1f4e79" stroke-width="1.5"/>',
        f'<line x1="{x(each.happens_s):.1f}" y1="{top}" x2="{x(each.happens_s):.1f}" y2="{top + HEIGHT}" '
        'stroke="#c00000" stroke-dasharray="4 3"/>',
        f'<line x1="{LEFT}" y1="{top + HEIGHT}" x2="{LEFT + WIDTH}" y2="{top + HEIGHT}" stroke="black"/>',
        *(
            f'<text x="{x(at_s):.1f}" y="{top + HEIGHT + 13}" text-anchor="middle">{at_s:g} s</text>'
            for at_s in range(0, int(each.ends_s) + 1, 20)
        ),
    ]
