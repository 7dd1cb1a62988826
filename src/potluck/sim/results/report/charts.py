"""The report's plots: functions from plain data to SVG, dressed by base.css and style.css."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, isfinite, log2, log10

from potluck.core.figures import digits, seconds
from potluck.sim.results.series import HeatMap, LatencyCurve, PlotLine, ReplicaBand

Points = Sequence[tuple[float, float]]
"""(x, y), each from 0 to 1."""
Ticks = Sequence[tuple[float, str]]
"""(share of the axis, label)."""
FULL_WIDTH, HALF_WIDTH, THIRD_WIDTH = 1120, 550, 364
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 220, 56, 14, 22, 34
HEAT_LEVELS = 10
TAIL_SHARE = 0.001
"""Share of requests at either end of a distribution that its axis leaves out."""


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    if not (isfinite(low) and isfinite(high) and high > low):
        return [low]
    raw = (high - low) / max(about, 1)
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    return [number * step for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within a range; only the powers when there are many, its ends when none."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    values = [f * 10.0**p for p in powers for f in factors if low * 0.999 <= f * 10.0**p <= high * 1.001]
    return values or [low, high]


def time_ticks(end_s: float, about: int = 10) -> list[tuple[float, str]]:
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
    if end_s < about:
        return [(at_s, f"{at_s:g} s") for at_s in nice_ticks(0.0, end_s, about)]
    step = next((s for s in steps if end_s / s <= about), 86400 * ceil(end_s / about / 86400))
    return [(i * step, moment(i * step)) for i in range(int(end_s // step) + 1)]


def moment(at_s: float) -> str:
    """`0`, `45 s`, `2:30 min`, `5 h`."""
    for unit_s, name, minor_s in ((86400, "d", 3600), (3600, "h", 60), (60, "min", 1)):
        if at_s >= unit_s:
            whole, rest = divmod(round(at_s), unit_s)
            return f"{whole} {name}" if rest == 0 else f"{whole}:{rest // minor_s:02d} {name}"
    return f"{at_s:g} s" if at_s else "0"


def short(text: str) -> str:
    """A figure without trailing zeros: `50.0 ms` is `50 ms` on an axis."""
    number, space, unit = text.partition(" ")
    if "." in number and "e" not in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number}{space}{unit}"


def plot(
    width: int, title: str, x_ticks: Ticks, y_ticks: Ticks, lines: Sequence[Points], body: str = ""
) -> str:
    """A line for each sequence of points, in the colours c0 to c5."""
    right, base = width - RIGHT, HEIGHT - BOTTOM
    parts = [f'<text class="title" x="{LEFT}" y="{TOP - 8}">{escape(title)}</text>']
    for share, label in y_ticks:
        y = base - share * (base - TOP)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    for share, label in x_ticks:
        x = LEFT + share * (right - LEFT)
        anchor = "end" if x > right - 12 else "middle"
        parts.append(f'<path class="mark" d="M{x:.1f} {base}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 18}" text-anchor="{anchor}">{escape(label)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {base}H{right}"/>')
    for index, points in enumerate(lines):
        path = "L".join(f"{LEFT + x * (right - LEFT):.1f} {base - y * (base - TOP):.1f}" for x, y in points)
        parts.append(f'<path class="line c{index % 6}" d="M{path}"/>' if points else "")
    return (
        f'<svg class="plot{" full" * (width == FULL_WIDTH)}" viewBox="0 0 {width} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}{body}</svg>'
    )


def time_plot(
    title: str, edges_s: Sequence[float], lines: Sequence[PlotLine], unit: str = "", width: int = FULL_WIDTH
) -> str:
    """Values that hold between two edges each, or at each edge; shares where the unit is %."""
    end_s, scale = edges_s[-1], 100.0 if unit == " %" else 1.0
    top = (
        1.0
        if unit == " %"
        else max((max(one.values, default=0.0) for one in lines), default=0.0) * 1.05 or 1.0
    )
    paths = []
    for one in lines:
        steps = [(edge, value) for i, value in enumerate(one.values) for edge in edges_s[i : i + 2]]
        paths.append([(at_s / end_s, min(value / top, 1.0)) for at_s, value in steps])
    x_ticks = [(at_s / end_s, label) for at_s, label in time_ticks(end_s, 10 if width == FULL_WIDTH else 5)]
    y_ticks = [(at / top, short(digits(at * scale)) + unit) for at in nice_ticks(0.0, top, 4)]
    keys = [(f"c{index % 6}", one.label) for index, one in enumerate(lines)]
    return (legend(keys) if len(lines) > 1 else "") + plot(width, title, x_ticks, y_ticks, paths)


def distribution(curves: Sequence[LatencyCurve], title: str) -> str:
    """Share of requests that took at most so long, on a logarithmic axis; dashed lines are SLOs."""
    low = min(max(_at(curve, TAIL_SHARE), 1e-6) for curve in curves)
    high = max(max(_at(curve, 1 - TAIL_SHARE), (curve.limit_s or 0.0) * 1.1, low * 1.5) for curve in curves)
    log_low, span = log10(low), log10(high) - log10(low)

    def place(value: float) -> float:
        return min(max((log10(max(value, low)) - log_low) / span, 0.0), 1.0)

    ticks = log_ticks(low, high)
    x_ticks = [(place(value), short(seconds(value))) for value in ticks[:: -(-len(ticks) // 5)]]
    body = ""
    for index, curve in enumerate(curves):
        if curve.limit_s is not None:
            x, y = (
                LEFT + place(curve.limit_s) * (THIRD_WIDTH - RIGHT - LEFT),
                HEIGHT - BOTTOM - 8 - 13 * index,
            )
            body += f'<path class="limit c{index % 6}" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
            side = 'text-anchor="end" dx="-5"' if x > THIRD_WIDTH * 0.75 else 'dx="5"'
            body += f'<text x="{x:.1f}" y="{y}" {side}>≤ {escape(short(seconds(curve.limit_s)))}</text>'
    lines = [[(place(value), share) for value, share in curve.points] for curve in curves]
    y_ticks = [(at / 4, f"{at * 25} %") for at in range(5)]
    return plot(THIRD_WIDTH, title, x_ticks, y_ticks, lines, body)


def timeline(bands: Sequence[ReplicaBand], end_s: float, faults: Sequence[tuple[float, str]]) -> str:
    """A row per replica: its states and roles; a cross after the name of one that was lost, a row of all faults."""
    rows = []
    for band in bands:
        marks = ""
        for from_s, to_s, state, role in band.spans:
            text = escape(f"{band.label}: {state}, {role}, {seconds(to_s - from_s)} ({band.what})")
            marks += _span(f"span {escape(state)} {escape(role)}", from_s, to_s, end_s, text)
        lost = "" if band.lost_s is None else " ✗"
        rows.append(_row(f"{band.label}{lost}", band.what, 1000, marks))
    if faults:
        fault_marks = "".join(_span("fault", at_s, at_s, end_s, escape(what)) for at_s, what in faults)
        rows.append(_row("faults", "when faults began", 1000, fault_marks))
    spans = {(state, role) for band in bands for _, _, state, role in band.spans}
    keys = [(f"ready {role}", role) for role in ("prefill", "decode", "mixed") if ("ready", role) in spans]
    states = {state for state, _ in spans}
    keys += [(f"{state} mixed", state) for state in ("starting", "draining") if state in states]
    boxes = "".join(f'<li><b class="span {name}"></b>{text}</li>' for name, text in keys)
    return f'<ul class="legend">{boxes}</ul>{_rows(rows, end_s)}'


def heat(heat_map: HeatMap, end_s: float, unit: str) -> str:
    """Rows of replicas, columns of time; darker is more. Counts are on a scale of powers of two."""
    largest = max((value for cells in heat_map.cells for value in cells if value is not None), default=0.0)
    percent = unit == "%"
    rows = []
    for label, cells in zip(heat_map.labels, heat_map.cells, strict=True):
        levels = [_level(value, largest, percent) for value in cells]
        runs = [""] * HEAT_LEVELS
        start = 0
        for end in range(1, len(levels) + 1):
            if end == len(levels) or levels[end] != levels[start]:
                if levels[start] is not None:
                    runs[levels[start] or 0] += f"M{start} .5h{end - start}"
                start = end
        paths = "".join(f'<path class="h{level}" d="{run}"/>' for level, run in enumerate(runs) if run)
        rows.append(_row(label, label, len(cells), paths))
    high = "100 %" if percent else short(digits(largest))
    scale = "".join(f'<path class="h{level}" d="M{level} .5h1"/>' for level in range(HEAT_LEVELS))
    bar = f'<svg class="scale" viewBox="0 0 {HEAT_LEVELS} 1" preserveAspectRatio="none">{scale}</svg>'
    return f'<ul class="legend"><li>0</li><li>{bar}</li><li>{high}</li></ul>{_rows(rows, end_s)}'


def legend(keys: Sequence[tuple[str, str]]) -> str:
    mark = '<svg viewBox="0 0 14 14" aria-hidden="true"><path class="line {}" d="M0 7h14"/></svg>'
    return f'<ul class="legend">{"".join(f"<li>{mark.format(name)}{escape(text)}</li>" for name, text in keys)}</ul>'


def _span(name: str, from_s: float, to_s: float, end_s: float, title: str) -> str:
    x, width = 1000 * from_s / end_s, max(1000 * (to_s - from_s) / end_s, 1.5)
    return (
        f'<rect class="{name}" x="{x:.1f}" y="0" width="{width:.1f}" height="1"><title>{title}</title></rect>'
    )


def _row(label: str, title: str, width: int, marks: str) -> str:
    bar = f'<svg viewBox="0 0 {width} 1" preserveAspectRatio="none">{marks}</svg>'
    return f'<span title="{escape(title)}">{escape(label)}</span>{bar}'


def _rows(rows: Sequence[str], end_s: float) -> str:
    ticks = "".join(
        f'<i style="left:{100 * at_s / end_s:.2f}%">{text}</i>' for at_s, text in time_ticks(end_s)
    )
    return f'<div class="rows">{"".join(rows)}<span></span><div class="ticks">{ticks}</div></div>'


def _level(value: float | None, largest: float, percent: bool) -> int | None:
    if value is None:
        return None
    share = value if percent else (log2(1 + value) / log2(1 + largest) if largest > 0 else 0.0)
    return min(int(share * HEAT_LEVELS), HEAT_LEVELS - 1)


def _at(curve: LatencyCurve, level: float) -> float:
    """The least duration that at least this share of requests did not exceed."""
    return next((x for x, share in curve.points if share >= level), curve.points[-1][0])
