"""The report's plots: each takes plain data and gives SVG."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log2, log10

from potluck.core.figures import digits, seconds
from potluck.sim.results.series import HeatMap, LatencyCurve, PlotLine, ReplicaBand

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


Ticks = Iterable[tuple[float, str]]
"""Where each is, and its label."""


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
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
    values = [f * 10.0**p for p in powers for f in factors if low * 0.999 <= f * 10.0**p <= high * 1.001]
    return values or [low, high]


def time_ticks(end_s: float, about: int = 10) -> list[tuple[float, str]]:
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
    if end_s < about:
        return [(at, f"{at:g} s") for at in nice_ticks(0.0, end_s, about)]
    step = next((s for s in steps if end_s / s <= about), 86400 * ceil(end_s / about / 86400))
    return [(i * step, moment(i * step)) for i in range(int(end_s // step) + 1)]


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


def axes(frame: PlotFrame, x_ticks: Ticks, y_ticks: Ticks, y_title: str = "") -> str:
    parts = []
    right, base = frame.width - frame.right, frame.height - frame.bottom
    left = frame.left
    for at, label in y_ticks:
        y = frame.y(at)
        parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
        place = f'x="{left - 7:.1f}" y="{y + 4:.1f}"'
        parts.append(f'<text class="tick" {place} text-anchor="end">{label}</text>')
    for at, label in x_ticks:
        x = frame.x(at)
        anchor = f'text-anchor="{"end" if x > right - 12 else "middle"}"'
        parts.append(f'<path class="mark" d="M{x:.1f} {base:.1f}v4"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 18:.1f}" {anchor}>{label}</text>')
    parts.append(f'<path class="axis" d="M{left:.1f} {base:.1f}H{right:.1f}"/>')
    if y_title:
        parts.append(f'<text class="title" x="{left:.1f}" y="{frame.top - 4:.1f}">{escape(y_title)}</text>')
    return "".join(parts)


def line(frame: PlotFrame, points: Points, name: str) -> str:
    path = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)
    return f'<path class="line {name}" d="M{path}"/>' if points else ""


def area(frame: PlotFrame, points: Points, name: str) -> str:
    if not points:
        return ""
    base = frame.height - frame.bottom
    path = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)
    first, last = frame.x(points[0][0]), frame.x(points[-1][0])
    return f'<path class="area {name}" d="M{first:.1f} {base:.1f}L{path}L{last:.1f} {base:.1f}Z"/>'


def stairs(edges: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
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


GUTTER = 204.0
LEVELS = 10
EXTREMES = 0.001
"""Share of requests at either end for which an axis is not stretched."""
LABEL_LETTERS = 31


def over_time(
    edges_s: Sequence[float],
    lines: Sequence[PlotLine],
    y_title: str,
    *,
    percent: bool = False,
    fill: bool = True,
) -> str:
    """Values that hold between two moments each; the first one is filled."""
    top = 1.0 if percent else max((max(one.values, default=0.0) for one in lines), default=0.0) * 1.05 or 1.0
    frame = PlotFrame(FULL_WIDTH, 220, (0.0, edges_s[-1]), (0.0, top), top=22)
    scale, unit = (100.0, " %") if percent else (1.0, "")
    y_ticks = [(at, short(digits(at * scale)) + unit) for at in nice_ticks(0.0, top, 4)]
    parts = [axes(frame, time_ticks(edges_s[-1]), y_ticks, y_title)]
    for index, one in enumerate(lines):
        points = stairs(edges_s, one.values)
        if fill and index == 0:
            parts.append(area(frame, points, f"c{index}"))
        parts.append(line(frame, points, f"c{index}"))
    shown = [[one.label, [round(v * scale, 3) for v in one.values]] for one in lines]
    hover = _hover("time", {"end": edges_s[-1]}, frame, {"unit": unit.strip(), "lines": shown})
    names = legend([(f"c{i}", one.label) for i, one in enumerate(lines)])
    return names + svg(frame, "".join(parts), y_title, hover)


def _hover(kind: str, axis: dict[str, float], frame: PlotFrame, more: dict[str, object]) -> dict[str, object]:
    return {"kind": kind} | axis | {"left": frame.left, "right": frame.width - frame.right} | more


def cost(edges_s: Sequence[float], paid_usd: Sequence[float], usd_per_h: Sequence[float]) -> str:
    half = []
    for values, title, name in ((usd_per_h, "USD an hour", "c1"), (paid_usd, "USD in all", "c0")):
        top = max(values, default=0.0) * 1.08 or 1.0
        frame = PlotFrame(HALF_WIDTH, 210, (0.0, edges_s[-1]), (0.0, top), top=22, left=62)
        held = len(values) < len(edges_s)
        points = stairs(edges_s, values) if held else list(zip(edges_s, values, strict=True))
        y_ticks = [(at, f"${short(digits(at))}") for at in nice_ticks(0.0, top, 4)]
        body = axes(frame, time_ticks(edges_s[-1], 5), y_ticks, title) + area(frame, points, name)
        shown = [[title, [round(v, 4) for v in values[: len(edges_s) - 1]]]]
        hover = _hover("time", {"end": edges_s[-1]}, frame, {"unit": "", "lines": shown})
        half.append(svg(frame, body + line(frame, points, name), title, hover))
    return f'<div class="pair">{"".join(half)}</div>'


def distribution(curves: Sequence[LatencyCurve], title: str) -> str:
    """The share of requests that took at most so long, on a logarithmic axis, with objectives as lines."""
    lows = [max(_at(curve, EXTREMES), 1e-6) for curve in curves]
    highs = [max(_at(curve, 1 - EXTREMES), (curve.limit_s or 0.0) * 1.1) for curve in curves]
    low, high = min(lows), max(max(highs), min(lows) * 1.5)
    frame = PlotFrame(THIRD_WIDTH, 240, (low, high), (0.0, 1.0), top=22, left=46, log_x=True)
    ticks = log_ticks(low, high)
    x_ticks = [(at, short(seconds(at))) for at in ticks[:: -(-len(ticks) // 5)]]
    parts = [axes(frame, x_ticks, [(at / 4, f"{at * 25} %") for at in range(5)], title)]
    for index, curve in enumerate(curves):
        if curve.limit_s is not None:
            text = f"≤ {short(seconds(curve.limit_s))}"
            parts.append(limit(frame, curve.limit_s, text, f"c{index % 6}", index))
    for index, curve in enumerate(curves):
        parts.append(line(frame, [(max(x, low), y) for x, y in curve.points], f"c{index % 6}"))
    lines = [
        [one.model, [float(f"{x:.4g}") for x, _ in one.points], [round(y, 4) for _, y in one.points]]
        for one in curves
    ]
    hover = _hover("cdf", {"low": low, "high": high}, frame, {"lines": lines})
    return svg(frame, "".join(parts), title, hover)


def timeline(bands: Sequence[ReplicaBand], end_s: float, faults: Sequence[tuple[float, str]]) -> str:
    """A row per replica: its states and roles; a cross where it was lost, a mark above for each fault."""
    row = _row_height(len(bands))
    frame = PlotFrame(FULL_WIDTH, 22 + row * len(bands) + 34, (0.0, end_s), (0.0, 1.0), left=GUTTER, top=22)
    parts = [axes(frame, time_ticks(end_s), ())]
    for index, band in enumerate(bands):
        y = frame.top + index * row
        parts.append(_row_label(band.label, band.what, y, row))
        for from_s, to_s, state, role in band.spans:
            x, width = frame.x(from_s), max(frame.x(to_s) - frame.x(from_s), 0.8)
            message = escape(f"{band.label}: {state}, {role}, {seconds(to_s - from_s)} ({band.what})")
            parts.append(
                f'<rect class="span {escape(state)} {escape(role)}" x="{x:.1f}" y="{y + 1:.1f}" '
                f'width="{width:.1f}" height="{row - 2:.1f}"><title>{message}</title></rect>'
            )
        if band.lost_s is not None:
            x, middle, arm = frame.x(band.lost_s), y + row / 2, min(row / 2 - 1, 5.0)
            span = 2 * arm
            cross = f"M{x - arm:.1f} {middle - arm:.1f}l{span:g} {span:g}m{-span:g} 0l{span:g} {-span:g}"
            parts.append(f'<path class="lost" d="{cross}"><title>{escape(band.label)}: lost</title></path>')
    for at_s, what in faults:
        x = frame.x(at_s)
        parts.append(f'<path class="fault" d="M{x:.1f} 20V{frame.height - frame.bottom:.1f}"/>')
        parts.append(f'<path class="flag" d="M{x - 5:.1f} 8h10l-5 9z"><title>{escape(what)}</title></path>')
    spans = {(state, role) for band in bands for _, _, state, role in band.spans}
    states = {state for state, _ in spans}
    roles = [role for role in ("prefill", "decode", "mixed") if ("ready", role) in spans]
    keys = [(f"span ready {role}", role) for role in roles]
    keys += [(f"span {each} mixed", each) for each in ("starting", "draining") if each in states]
    keys += [("lost", "lost")] if any(band.lost_s is not None for band in bands) else []
    keys += [("flag", "fault")] if faults else []
    return legend(keys) + svg(frame, "".join(parts), "Replicas over time")


def heat(heat_map: HeatMap, end_s: float, title: str, *, percent: bool) -> str:
    """Rows of replicas, columns of time; darker is more. Counts are on a scale of powers of two."""
    row = _row_height(len(heat_map.labels))
    height = 10 + row * len(heat_map.labels) + 34
    frame = PlotFrame(FULL_WIDTH, height, (0.0, end_s), (0.0, 1.0), left=GUTTER, top=10)
    columns = len(heat_map.cells[0]) if heat_map.cells else 1
    cell = (frame.width - frame.left - frame.right) / columns
    most = max((value for cells in heat_map.cells for value in cells if value is not None), default=0.0)
    paths: list[list[str]] = [[] for _ in range(LEVELS)]
    parts = [axes(frame, time_ticks(end_s), ())]
    for index, cells in enumerate(heat_map.cells):
        y = frame.top + index * row
        parts.append(_row_label(heat_map.labels[index], heat_map.labels[index], y, row))
        start, level = 0, _level(cells[0], most, percent) if cells else None
        for column in range(1, len(cells) + 1):
            here = _level(cells[column], most, percent) if column < len(cells) else -1
            if here != level:
                if level is not None:
                    x = frame.left + start * cell
                    paths[level].append(f"M{x:.1f} {y + row / 2:.1f}h{(column - start) * cell:.1f}")
                start, level = column, here
    for level, runs in enumerate(paths):
        if runs:
            parts.append(f'<path class="cells h{level}" stroke-width="{row - 1:g}" d="{"".join(runs)}"/>')
    scale, places, unit = (100, 1, " %") if percent else (1, 2, "")
    shown = [[None if v is None else round(v * scale, places) for v in cells] for cells in heat_map.cells]
    more = {"top": frame.top, "row": row, "unit": unit, "labels": heat_map.labels, "cells": shown}
    hover = _hover("heat", {"end": end_s}, frame, more)
    return _heat_legend(most, percent) + svg(frame, "".join(parts), title, hover)


def legend(keys: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 14 14" aria-hidden="true">{_key(name)}</svg>{escape(text)}</li>'
        for name, text in keys
    )
    return f'<ul class="legend">{items}</ul>'


def _key(name: str) -> str:
    if name == "lost":
        return '<path class="lost" d="M3 3l8 8m-8 0l8-8"/>'
    if name == "flag":
        return '<path class="flag" d="M2 3h10l-5 9z"/>'
    if name.startswith("span"):
        return f'<rect class="{name}" x="1" y="1" width="12" height="12"/>'
    return f'<path class="line {name}" d="M0 7h14"/>'


def _heat_legend(most: float, percent: bool) -> str:
    high = "100 %" if percent else short(digits(most))
    cells = "".join(f'<path class="cells h{i}" stroke-width="12" d="M{i * 12} 7h12"/>' for i in range(LEVELS))
    scale = f'<svg class="scale" viewBox="0 0 {LEVELS * 12} 14" aria-hidden="true">{cells}</svg>'
    return f'<ul class="legend"><li>0</li><li>{scale}</li><li>{high}</li></ul>'


def _level(value: float | None, most: float, percent: bool) -> int | None:
    if value is None:
        return None
    share = value if percent else (log2(1 + value) / log2(1 + most) if most > 0 else 0.0)
    return min(int(share * LEVELS), LEVELS - 1)


def _row_height(rows: int) -> float:
    return 18.0 if rows <= 16 else 14.0 if rows <= 32 else 10.0


def _row_label(label: str, what: str, y: float, row: float) -> str:
    size = min(11.5, row - 1.0)
    message = f"<title>{escape(label)}: {escape(what)}</title>"
    place = f'x="{GUTTER - 8:g}" y="{y + row / 2 + size * 0.35:.1f}"'
    text = escape(clipped(label, LABEL_LETTERS))
    return f'<text class="row" style="font-size:{size:g}px" {place} text-anchor="end">{text}{message}</text>'


def _at(curve: LatencyCurve, level: float) -> float:
    """The lowest of the curve's lengths that this share does not exceed."""
    return next((x for x, share in curve.points if share >= level), curve.points[-1][0])
