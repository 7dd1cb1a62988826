"""SVG by hand: axes, lines and cells. Colours and fonts are the style sheet's; here are only classes and places.

Every plot has the same width in its own units and is stretched to the page by the browser. What a pointer should
show is put beside the plot as JSON, for the script to read; without the script the plot is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

Points = Sequence[tuple[float, float]]
FULL_WIDTH, HALF_WIDTH, THIRD_WIDTH = 1120.0, 550.0, 364.0


@dataclass(frozen=True, slots=True)
class PlotFrame:
    """A plot's place and its axes' ranges; `log_x` for a logarithmic x axis."""

    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float = 56.0
    right: float = 14.0
    top: float = 12.0
    bottom: float = 34.0
    log_x: bool = False

    def x(self, value: float) -> float:
        low, high = self.x_range
        if self.log_x:
            low, high, value = log10(low), log10(high), log10(max(value, low))
        share = (value - low) / (high - low) if high > low else 0.0
        return self.left + min(max(share, 0.0), 1.0) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_range
        share = (value - low) / (high - low) if high > low else 0.0
        return self.height - self.bottom - min(max(share, 0.0), 1.0) * (self.height - self.top - self.bottom)


@dataclass(frozen=True, slots=True)
class AxisTick:
    at: float
    label: str


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers within a range: steps of 1, 2 or 5 times a power of ten."""
    if not (isfinite(low) and isfinite(high) and high > low):
        return [low]
    raw = (high - low) / max(about, 1)
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within a range; only the powers when there are many, its ends when none."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    found = [f * 10.0**p for p in powers for f in factors if low * 0.999 <= f * 10.0**p <= high * 1.001]
    return found or [low, high]


def time_ticks(end_s: float, about: int = 10) -> list[AxisTick]:
    """Times at round numbers of seconds, minutes, hours or days."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
    if end_s < about:
        return [AxisTick(at, f"{at:g} s") for at in nice_ticks(0.0, end_s, about)]
    step = next((s for s in steps if end_s / s <= about), 86400 * ceil(end_s / about / 86400))
    return [AxisTick(i * step, moment(i * step)) for i in range(int(end_s // step) + 1)]


def moment(at_s: float) -> str:
    """`0`, `45 s`, `2:30 min`, `5 h`."""
    if at_s < 60:
        return f"{at_s:g} s" if at_s else "0"
    for unit_s, name, minor_s in ((86400, "d", 3600), (3600, "h", 60), (60, "min", 1)):
        if at_s >= unit_s:
            whole, rest = divmod(round(at_s), unit_s)
            return f"{whole} {name}" if rest == 0 else f"{whole}:{rest // minor_s:02d} {name}"
    return f"{at_s:g} s"


def short(text: str) -> str:
    """A figure or duration without zeros at its end: `50.0 ms` is `50 ms` on an axis."""
    number, space, unit = text.partition(" ")
    if "." in number and "e" not in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number}{space}{unit}"


def axes(
    frame: PlotFrame, x_ticks: Iterable[AxisTick], y_ticks: Iterable[AxisTick], y_title: str = ""
) -> str:
    """Grid lines, labels and the title of the y axis, which stands above it."""
    parts = []
    right, base = frame.width - frame.right, frame.height - frame.bottom
    for tick in y_ticks:
        y = frame.y(tick.at)
        parts.append(f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{right:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{frame.left - 7:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick.label}</text>'
        )
    for tick in x_ticks:
        x = frame.x(tick.at)
        anchor = "end" if x > right - 12 else "middle"
        parts.append(f'<path class="mark" d="M{x:.1f} {base:.1f}v4"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{base + 18:.1f}" text-anchor="{anchor}">{tick.label}</text>'
        )
    parts.append(f'<path class="axis" d="M{frame.left:.1f} {base:.1f}H{right:.1f}"/>')
    if y_title:
        parts.append(
            f'<text class="title" x="{frame.left:.1f}" y="{frame.top - 4:.1f}">{escape(y_title)}</text>'
        )
    return "".join(parts)


def line(frame: PlotFrame, points: Points, name: str) -> str:
    """A line through the points."""
    path = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)
    return f'<path class="line {name}" d="M{path}"/>' if points else ""


def area(frame: PlotFrame, points: Points, name: str) -> str:
    """What lies between a line and the x axis."""
    if not points:
        return ""
    base = frame.height - frame.bottom
    path = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)
    first, last = frame.x(points[0][0]), frame.x(points[-1][0])
    return f'<path class="area {name}" d="M{first:.1f} {base:.1f}L{path}L{last:.1f} {base:.1f}Z"/>'


def stairs(edges: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of a line that holds each value between two edges."""
    points = []
    for i, value in enumerate(values):
        points += [(edges[i], value), (edges[i + 1], value)]
    return points


def limit(frame: PlotFrame, at: float, label: str, name: str, place: int = 0) -> str:
    """A vertical line with a word at its foot, where curves are low; several lines' words stand above each other."""
    x = frame.x(at)
    anchor, shift = ("end", -5) if x > frame.width * 0.75 else ("start", 5)
    where = f'x="{x + shift:.1f}" y="{frame.height - frame.bottom - 8 - 13 * place:.1f}"'
    return (
        f'<path class="limit {name}" d="M{x:.1f} {frame.top:.1f}V{frame.height - frame.bottom:.1f}"/>'
        f'<text class="tick" {where} text-anchor="{anchor}">{escape(label)}</text>'
    )


def svg(frame: PlotFrame, body: str, label: str, hover: object = None) -> str:
    """The whole plot. `hover` is what the script shows under the pointer."""
    data = "" if hover is None else f" data-hover='{attribute(hover)}'"
    size = f"0 0 {frame.width:g} {frame.height:g}"
    name = "plot full" if frame.width == FULL_WIDTH else "plot"
    return f'<svg class="{name}" viewBox="{size}" role="img" aria-label="{escape(label)}"{data}>{body}</svg>'


def attribute(value: object) -> str:
    """JSON that may stand between single quotes in HTML."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;").replace(">", "&gt;")


def clipped(text: str, most: int) -> str:
    """A name that fits, its middle left out, since ends tell names apart."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"
