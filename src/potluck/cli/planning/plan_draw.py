"""Plans as drawings: who runs where with layers to scale, what it costs, what to expect, what binds. One HTML file.

The file stands alone: no scripts, nothing loaded. Every name is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.common.render import paragraph, percent, usd
from potluck.core.errors import InputError
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from potluck.cli.planning.plan_show import ComparedStrategy
    from potluck.core.values.layout import Layout
    from potluck.core.values.plan import Plan, Template
    from potluck.plan.explain import Explanation
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.search.tabu import SearchResult


LEAST_PART = 0.01
"""Of a bar that is not empty; thinner ones cannot be seen."""
STYLE = """
:root { color-scheme: light dark; --ink: #16191d; --dim: #545b64; --paper: #f4f5f7; --card: #fff; --line: #d5d9de;
  --prefill: #0072b2; --decode: #e69f00; --mixed: #009e73; --bar: #56b4e9; --bad: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --ink: #eef1f4; --dim: #aab2bb; --paper: #14171b; --card: #1d2126;
  --line: #3a4149; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1080px;
  margin: 24px auto; padding: 0 16px; }
h1 { font-size: 20px; } h2 { font-size: 16px; margin: 28px 0 8px; } h3 { font-size: 14px; margin: 0 0 6px; }
p, td, th { color: var(--ink); } .note { color: var(--dim); font-size: 13px; }
.regions { display: flex; flex-wrap: wrap; gap: 12px; }
.region, .copy { border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; background: var(--card); }
.region { flex: 1 1 320px; } .copy { margin: 8px 0; background: var(--paper); }
.replica { display: grid; grid-template-columns: 74px 1fr; gap: 8px; align-items: center; margin: 4px 0; }
.role { font-size: 12px; padding: 1px 6px; border-radius: 4px; color: #000; text-align: center; }
.prefill { background: var(--prefill); color: #fff; } .decode { background: var(--decode); }
.mixed { background: var(--mixed); }
.stages { display: flex; gap: 2px; } .stage { border: 1px solid var(--line); border-radius: 4px; padding: 0 6px;
  background: var(--card); font-size: 12px; overflow-wrap: anywhere; min-width: 0; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 5px 12px 5px 0; font-weight: 400;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { color: var(--dim); font-size: 13px; }
.right { text-align: right; font-variant-numeric: tabular-nums; }
.track { position: relative; height: 14px; min-width: 180px; background: var(--line); border-radius: 3px; }
.fill { height: 100%; background: var(--bar); border-radius: 3px; } .over { background: var(--bad); }
"""


def require_html(path: Path | None) -> None:
    """Complain of another ending before anything is planned."""
    if path is not None and path.suffix != ".html":
        raise InputError("html", f"{path.name!r} must end in .html")


def draw_plan(path: Path | None, problem: PlanningProblem, plan: Plan, reasons: Explanation | None) -> None:
    """Into a file, where one is named."""
    if path is not None:
        path.write_text(plan_html(problem, plan, reasons), encoding="utf-8")


def plan_html(problem: PlanningProblem, plan: Plan, reasons: Explanation | None) -> str:
    proof = (
        "Proven cheapest of its kind"
        if plan.gap < 1e-6
        else f"At most {percent(plan.gap)} above the cheapest"
    )
    served = "" if plan.fraction >= 1 else f" It serves {percent(plan.fraction)} of what is asked for."
    return _page(
        f"Plan ({plan.strategy}): {usd(plan.cost_usd_per_h)}/h",
        (
            f"<p>{_text(proof)}.{_text(served)}</p>",
            _where(problem, plan),
            _expected(problem, plan),
            "" if reasons is None else _reasons(reasons),
        ),
    )


def compared_html(rows: Sequence[ComparedStrategy], problem: PlanningProblem, plans: dict[str, Plan]) -> str:
    """The strategies side by side, then where each would have what run."""
    most = max((row.cost_usd_per_h for row in rows), default=0.0)
    cells = [
        (
            row.strategy,
            _bar(row.cost_usd_per_h, most, usd(row.cost_usd_per_h)),
            "-" if row.usd_per_million_tokens is None else usd(row.usd_per_million_tokens),
            percent(row.served_fraction),
            str(row.nodes),
            percent(row.gap),
        )
        for row in rows
    ]
    columns = ("strategy", "USD/h", "$/M tokens", "served", "nodes", "gap")
    parts = [_table(columns, cells, right=(2, 3, 4, 5))]
    for name, plan in plans.items():
        parts.append(
            f"<h2>{_text(name)}: {_text(usd(plan.cost_usd_per_h))}/h</h2>{_where(problem, plan, head='')}"
        )
    return _page("Strategies on the same templates", parts)


# Who runs where.


def _where(problem: PlanningProblem, plan: Plan, head: str = "<h2>Who runs where</h2>") -> str:
    prices = {(r.name, o.node): o.price_usd_per_h for r in problem.regions for o in r.offers}
    boxes = []
    for region in problem.regions:
        held = [item for item in plan.deployments if item.region == region.name and item.count]
        if not held:
            continue
        copies = ""
        for deployment in held:
            template = plan.template(deployment.template)
            cost = (
                sum(prices.get((deployment.region, n.node), 0.0) * n.count for n in template.nodes)
                * deployment.count
            )
            title = f"{deployment.count} × {template.model}: {template.kind}, {usd(cost)}/h"
            copies += f'<div class="copy"><h3>{_text(title)}</h3>{_replicas(template)}</div>'
        boxes.append(f'<section class="region"><h3>{_text(region.name)}</h3>{copies}</section>')
    note = '<p class="note">Each box is one kind of copy; a replica\'s stages are as wide as they have layers.</p>'
    return f'{head}{note if head else ""}<div class="regions">{"".join(boxes)}</div>'


def _replicas(template: Template) -> str:
    return "".join(
        f'<div class="replica"><span class="role {replica.role}">{replica.role}</span>{_stages(replica.layout)}</div>'
        for replica in template.replicas
    )


def _stages(layout: Layout) -> str:
    parts = "".join(
        f'<span class="stage" style="flex: {stage.layers} 1 0">'
        + _text(
            f"{stage.layers} layers on "
            + ", ".join(
                f"{node.node}" + (f" (over {node.tp} GPUs)" if node.tp > 1 else "") for node in stage.nodes
            )
        )
        + "</span>"
        for stage in layout.stages
    )
    return f'<span class="stages">{parts}</span>'


# What to expect, and why.


def _expected(problem: PlanningProblem, plan: Plan) -> str:
    from potluck.plan.explain import usd_per_million_tokens

    slos = {ask.name: ask.slo for ask in problem.asks}
    rows = []
    for prediction in plan.predictions:
        slo = slos[prediction.model]
        rows.append(
            (
                prediction.model,
                _bar(
                    prediction.demand_per_s,
                    prediction.capacity_per_s,
                    f"{prediction.demand_per_s:.3g} of {prediction.capacity_per_s:.3g} requests/s",
                ),
                _bar(prediction.ttft_s, slo.ttft_s, f"{seconds(prediction.ttft_s)} of {seconds(slo.ttft_s)}"),
                _bar(prediction.tpot_s, slo.tpot_s, f"{seconds(prediction.tpot_s)} of {seconds(slo.tpot_s)}"),
                usd(usd_per_million_tokens(problem, plan, prediction.model)),
                prediction.confidence,
            )
        )
    columns = (
        "model",
        "demand of capacity",
        "TTFT of objective",
        "TPOT of objective",
        "$/M tokens",
        "figures are",
    )
    return f"<h2>What to expect</h2>{_table(columns, rows, right=(4,))}"


def _reasons(reasons: Explanation) -> str:
    models = [
        (
            model_reason.model,
            "; ".join(model_reason.served_by) or "nothing is asked of it",
            "; ".join(model_reason.next_best) or "-",
            "-"
            if model_reason.next_best_usd_per_h is None
            else f"+{usd(max(0.0, model_reason.next_best_usd_per_h))}/h",
        )
        for model_reason in reasons.models
    ]
    most = max((node_value.shadow_usd_per_h for node_value in reasons.nodes), default=0.0)
    nodes = [
        (
            node_value.region,
            node_value.node,
            _bar(node_value.rented, node_value.available, f"{node_value.rented} of {node_value.available}"),
            usd(node_value.price_usd_per_h),
            _bar(node_value.shadow_usd_per_h, most, usd(node_value.shadow_usd_per_h)),
        )
        for node_value in reasons.nodes
    ]
    terms = [
        (
            term.model,
            term.words,
            "-" if term.extra_usd_per_h is None else f"{usd(max(0.0, term.extra_usd_per_h))}/h",
        )
        for term in reasons.terms
    ]
    table = _table(("model", "served by", "the next best", "costs more"), models, right=(3,))
    binds = _table(("region", "node", "rented", "price", "one more saves up to"), nodes, right=(3,))
    priced = f"<h2>What each condition costs</h2>{_table(('model', 'condition', 'costs'), terms, right=(2,))}"
    return f"<h2>Why these GPUs</h2>{table}<h2>What binds</h2>{binds}{priced if terms else ''}"


# HTML.


class _Safe(str):
    """Markup of our own; all other text is escaped."""

    __slots__ = ()


def _text(value: str) -> str:
    return value if isinstance(value, _Safe) else escape(value)


def _bar(value: float, whole: float, words: str) -> _Safe:
    part = value / whole if whole > 0 else 0.0
    kind = "fill over" if part > 1 + 1e-9 else "fill"
    width = min(1.0, max(LEAST_PART, part)) * 100 if part > 0 else 0.0
    return _Safe(
        f'<div class="track"><div class="{kind}" style="width: {width:.1f}%"></div></div>'
        f'<span class="note">{escape(words)}</span>'
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: tuple[int, ...] = ()) -> str:
    def cell(tag: str, place: int, value: str) -> str:
        kind = ' class="right"' if place in right else ""
        return f"<{tag}{kind}>{_text(value)}</{tag}>"

    head = "".join(cell("th", place, value) for place, value in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(cell("td", place, value) for place, value in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _page(title: str, parts: Iterable[str]) -> str:
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{STYLE}</style>'
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head += f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    body = f"<h1>{_text(title)}</h1>{''.join(parts)}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


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

    for region, search_result in searched.items():
        points = attainment_trace(search_result)
        ended = "converged" if search_result.converged else "out of time"
        paragraph(
            f"search in {region}: {sparkline(points)} {percent(points[-1][1])} of requests within the objective "
            f"at mean lengths (on averages), best after {seconds(points[-1][0])}, "
            f"{search_result.evaluated:,} states, {ended}"
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
    series = {region: attainment_trace(search_result) for region, search_result in searched.items()}
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
    texts = []
    for i in range(letters):
        now = [value for at_s, value in points if at_s <= end_s * (i + 1) / letters]
        value = now[-1] if now else 0.0
        texts.append(LEVELS[min(len(LEVELS) - 1, int(value * len(LEVELS)))])
    return "".join(texts)


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
