"""A plan as one HTML page that loads nothing: who runs where with layers to scale, what to expect, what binds."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from potluck.cli.common.render import percent, usd
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan, Template
    from potluck.plan.explain import Explanation
    from potluck.plan.problem import PlanningProblem

STYLE = """<style>
.copy { margin: 10px 0; padding: 8px 12px; border: 1px solid var(--rule); border-radius: 8px; }
.replica { display: grid; grid-template-columns: 70px 1fr; gap: 8px; align-items: center; margin: 4px 0; }
.stages { display: flex; gap: 2px; }
.stage { border: 1px solid var(--rule); border-radius: 4px; padding: 0 6px; min-width: 0; overflow-wrap: anywhere; }
meter { width: 160px; display: block; margin-left: auto; }
</style>"""


def plan_html(problem: PlanningProblem, plan: Plan, explanation: Explanation | None) -> str:
    from potluck.plan.explain import risk_lines
    from potluck.sim.results.report.html_report import sheet, table_section

    title = f"Plan ({plan.strategy}): {usd(plan.total_usd_per_h)}/h"
    proof = f"at most {percent(plan.gap)} above the cheapest" if plan.gap >= 1e-6 else "proven cheapest"
    proof += " on averages"
    parts = [_where(plan, region.name) for region in problem.regions]
    slos = {demand.name: demand.slo for demand in problem.demands}
    expected = [
        (
            escape(prediction.model),
            _meter(prediction.demand_per_s, prediction.capacity_per_s, "{:.3g} of {:.3g} requests/s".format),
            _meter(prediction.ttft_s, slos[prediction.model].ttft_s, _of_seconds),
            _meter(prediction.tpot_s, slos[prediction.model].tpot_s, _of_seconds),
            prediction.confidence,
        )
        for prediction in plan.predictions
    ]
    columns = ("model", "demand of capacity", "TTFT of objective", "TPOT of objective", "figures are")
    simulated = any(prediction.simulated for prediction in plan.predictions)
    when = "as simulated at the demand" if simulated else "with replicas as busy as they may be"
    parts.append(table_section(f"What to expect, {when}", columns, expected))
    if explanation is not None:
        nodes = [
            (
                escape(f"{value.region}: {value.node}"),
                _meter(value.rented, value.available, "{:g} of {:g}".format),
                usd(value.price_usd_per_h),
                value.one_more if (saves := value.one_more_usd_per_h) is None else usd(saves),
            )
            for value in explanation.nodes
        ]
        parts.append(table_section("What binds", ("node", "rented", "price", "one more saves"), nodes))
    risks = [f"<p><b>{escape(model)}</b>: {escape(line)}.</p>" for model, line in risk_lines(problem, plan)]
    if risks:
        parts.append(f"<section><h2>What it depends on</h2>{''.join(risks)}</section>\n")
    words = f"{proof}; {percent(plan.fraction)} of the demand is served"
    head = f"<header><h1>{escape(title)}</h1><p>{escape(words)}</p></header>"
    return sheet(title, f"{STYLE}{head}\n<main>\n{''.join(parts)}</main>\n")


def _where(plan: Plan, region: str) -> str:
    copies = [
        (deployment.count, plan.template(deployment.template))
        for deployment in plan.deployments
        if deployment.region == region and deployment.count
    ]
    boxes = "".join(
        f'<div class="copy"><b>{count} × {escape(template.model)}: {template.kind}</b>{_replicas(template)}</div>'
        for count, template in copies
    )
    return f"<section><h2>{escape(region)}</h2>{boxes}</section>" if copies else ""


def _replicas(template: Template) -> str:
    """Stages are as wide as they have layers."""
    html = ""
    for replica in template.replicas:
        html += f'<div class="replica"><span>{replica.role}</span><span class="stages">'
        for stage in replica.layout.stages:
            nodes = ", ".join(f"{node.node} tp{node.tp}" for node in stage.nodes)
            words = escape(f"{stage.layers} layers on {nodes}")
            html += f'<span class="stage" style="flex: {stage.layers} 1 0">{words}</span>'
        html += "</span></div>"
    return html


def _of_seconds(value_s: float, limit_s: float) -> str:
    return f"{seconds(value_s)} of {seconds(limit_s)}"


def _meter(value: float, most: float, words: Callable[[float, float], str]) -> str:
    text = escape(words(value, most))
    return f'<meter max="{most:g}" high="{most * 0.999:g}" value="{value:g}">{text}</meter>{text}'
