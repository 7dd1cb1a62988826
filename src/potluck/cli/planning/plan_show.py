"""How plans, their reasons and comparisons are printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.cli.common.render import listing, paragraph, percent, short, table, usd
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from potluck.core.values.model import Format
    from potluck.core.values.plan import Plan
    from potluck.core.values.types import Slo
    from potluck.plan.explain import Explanation, NodeValue, TermPrice
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.strategies import PlanOutcome
    from potluck.plan.strategies.template_factory import FormatPrice


def show_money(problem: PlanningProblem, plan: Plan) -> None:
    """Who gets how much where not all fits, charges beside rent, nodes that are paid for already."""
    if any(prediction.fraction is not None for prediction in plan.predictions):
        parts = ", ".join(
            f"{prediction.model} {percent(plan.fraction_of(prediction.model))}"
            for prediction in plan.predictions
        )
        _say(f"Of the demand is served, by priority: {parts}.")
    if plan.charges:
        parts = ", ".join(f"{charge.what} {usd(charge.usd_per_h)}" for charge in plan.charges)
        _say(f"Beside rent, per hour: {parts}; {usd(plan.total_usd_per_h)} in all.")
    for region in problem.regions:
        for offer in region.offers:
            used = min(plan.nodes.get((region.name, offer.node), 0), offer.reserved)
            if used:
                saved = usd(used * offer.price_usd_per_h)
                _say(
                    f"{used} of {offer.reserved} reserved {offer.node} in {region.name} used: {saved}/h less."
                )


def show_classes(problem: PlanningProblem) -> None:
    """What requests of each class were promised, where there are several: all are planned for the strictest."""
    for ask in problem.asks:
        if len(ask.classes) > 1:
            parts = [
                f"{class_demand.name} {percent(class_demand.share)} ({_times(class_demand.slo)})"
                for class_demand in ask.classes
            ]
            _say(f"{ask.name}: {', '.join(parts)}; planned for the strictest of all, {_times(ask.slo)}.")


def _times(slo: Slo) -> str:
    return f"TTFT {seconds(slo.ttft_s)}, TPOT {seconds(slo.tpot_s)}"


def show_risk(problem: PlanningProblem, plan: Plan) -> None:
    """How often spot nodes go, and what is left without them."""
    from potluck.plan.explain import spot_risks

    for spot_risk in spot_risks(problem, plan):
        often = f"one is taken away every {1 / spot_risk.preemptions_per_h:.3g} h"
        if spot_risk.preemptions_per_h <= 0:
            often = "none is expected to be taken away"
        line = f"{spot_risk.model}: {spot_risk.spot_nodes} of {spot_risk.nodes} nodes are spot; {often} on average"
        _say(f"{line}, and without all of them {percent(spot_risk.served_without)} of its demand is served.")


def show_terms(prices: Sequence[TermPrice]) -> None:
    """Each term with its price."""
    if not prices:
        return
    rows = []
    for price in prices:
        if price.extra_fraction > 1e-6:
            cost = f"{percent(price.extra_fraction)} of demand"
        elif price.extra_usd_per_h is None:
            cost = "nothing"
        else:
            cost = ("" if price.exact else "about ") + f"{usd(max(0.0, price.extra_usd_per_h))}/h"
        rows.append((price.model, cost, price.words))
    listing("What was asked costs (by planning again without it)", ("model", "costs", "asked"), rows)


def _say(text: str) -> None:
    paragraph(f"{text}\n")


@dataclass(frozen=True, slots=True)
class ComparedStrategy:
    """One strategy's row."""

    strategy: str
    cost_usd_per_h: float
    usd_per_million_tokens: float | None
    served_fraction: float
    goodput_per_s: float
    nodes: int
    gap: float
    cpu_s: float
    violations: tuple[str, ...]
    attained: float | None = None
    """Share of the requests in time of the model that is worst off, in simulation; None: not tried."""
    promised: float | None = None
    model: str = ""
    requests: int = 0
    """That the plan was tried with."""
    range_usd_per_million_tokens: tuple[float, float] | None = None
    """What it costs if replicas are as fast, or as slow, as eight in ten are."""
    formats: tuple[tuple[str, Format], ...] = ()


def show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        paragraph(f"note: {note}.")


def show_compared(rows: Sequence[ComparedStrategy]) -> None:
    """The table of `potluck compare`."""
    chosen = any(row.formats for row in rows)
    cells = [
        (
            row.strategy,
            usd(row.cost_usd_per_h),
            _attained(row),
            percent(row.served_fraction),
            "-" if row.usd_per_million_tokens is None else usd(row.usd_per_million_tokens),
            "-"
            if row.range_usd_per_million_tokens is None
            else _usd_between(row.range_usd_per_million_tokens),
            *([", ".join(f"{model} {weights}" for model, weights in row.formats)] if chosen else []),
            row.nodes,
            percent(row.gap),
            f"{row.cpu_s:.2f}",
        )
        for row in rows
    ]
    weights = ("weights",) if chosen else ()
    columns = (
        "strategy",
        "USD/h",
        "attained",
        "served",
        "$/M tokens",
        "8 in 10",
        *weights,
        "nodes",
        "gap",
        "CPU s",
    )
    table("Strategies on the same templates", columns, cells)
    for row in rows:
        if row.violations:
            paragraph(f"the plan of {row.strategy} failed its own check: {row.violations[0]}.")
    tried = max((row.requests for row in rows), default=0)
    if not tried:
        paragraph("attained: not rehearsed; costs are of plans on averages.")
        return
    several = len({row.model for row in rows if row.model}) > 1
    of = "the model that is worst off" if several else "the model"
    paragraph(
        f"attained: share of the requests in time, rehearsed with {tried:,} requests, of {of}; "
        "a plan that misses is not cheaper but less."
    )


def _attained(row: ComparedStrategy) -> str:
    if row.attained is None or row.promised is None:
        return "-"
    if row.attained >= row.promised:
        return percent(row.attained)
    return f"{percent(row.attained, row.promised)} < {percent(row.promised)}"


def show_plan(
    problem: PlanningProblem, outcome: PlanOutcome, standby: int = 0, basis: str = "on averages"
) -> None:
    """What is deployed where, what stands by, and what to expect of it."""
    from potluck.core.scaling.standby import spoken

    if not any(ask.rate_per_s > 0 for ask in problem.asks):
        paragraph("Nothing is rented, as nothing is asked of it: all rates are 0. Give a model a rate_per_s.")
        return
    if outcome.allocation.shortfall is not None:
        paragraph(f"Demand cannot be met: {outcome.allocation.shortfall}. This is the plan for that much.\n")
    _show_deployments(problem, outcome, basis)
    if line := spoken(outcome.plan, standby, problem.regions):
        paragraph(f"{line}\n")
    show_groups(outcome.plan)
    _show_predictions(problem, outcome)
    show_classes(problem)
    show_money(problem, outcome.plan)
    show_risk(problem, outcome.plan)


def show_groups(plan: Plan) -> None:
    """Which machines do what, where a plan names them: a row per replica, its stages as GPUs:layers."""
    rows = []
    for template in plan.templates:
        if template.kind != "group":
            continue
        group = template.name.split(": group ", 1)[-1].split(" ", 1)[0]
        for replica in template.replicas:
            machines = ", ".join(f"{gpus} of {name}" for name, gpus in replica.layout.machines.items())
            stages = " ".join(f"{stage.nodes[0].tp}:{stage.layers}" for stage in replica.layout.stages)
            rows.append((template.model, group, replica.role, machines, stages))
    if rows:
        table("Groups of machines", ("model", "group", "role", "GPUs", "stages (GPUs:layers)"), rows)


def _columns(plan: Plan) -> str:
    """What a strategy chooses from: of these its proof is, and of no others."""
    from potluck.plan.strategies import STRATEGIES

    if plan.strategy == "cauchy-ce" and any(template.ce_tokens_per_usd <= 0 for template in plan.templates):
        return STRATEGIES["cauchy"].chooses_from  # its fallback
    known = STRATEGIES.get(plan.strategy)
    return "its own columns" if known is None else known.chooses_from


def _show_deployments(problem: PlanningProblem, outcome: PlanOutcome, basis: str) -> None:
    from potluck.plan.explain import copy_tokens_per_usd

    result = outcome.plan
    prices = {(r.name, o.node): o.price_usd_per_h for r in problem.regions for o in r.offers}
    rows = []
    for deployment in result.deployments:
        template = result.template(deployment.template)
        rate = sum(
            s.rate_per_s
            for s in result.shares
            if (s.template, s.region) == (deployment.template, deployment.region)
        )
        cost = sum(prices[deployment.region, n.node] * n.count for n in template.nodes) * deployment.count
        rows.append(
            (
                template.model,
                deployment.region,
                deployment.count,
                template.name.split(": ", 1)[-1],
                *([result.format_of(template.model) or "as stored"] if result.formats else []),
                f"{rate:.3g}",
                usd(cost),
                *(short(copy_token) for copy_token in copy_tokens_per_usd(problem, result, deployment)),
                template.confidence,
            )
        )
    columns = _columns(result)
    proof = f"{basis} proven cheapest of {columns}"
    if result.gap >= 1e-6:
        proof = f"{basis} of {columns} none is more than {percent(result.gap)} cheaper"
    if result.strategy == "thunderserve" and result.gap < 1e-6:
        proof = "the cheapest use of the groups found"  # a search proves nothing about others
    if result.fraction < 1:
        part = percent(result.fraction) if result.fraction > 0 else "what can be served"
        proof = f"for {part} of the demand"
    title = f"Plan ({result.strategy}): {usd(result.cost_usd_per_h)}/h, {proof}"
    if problem.init_penalty > 0:
        starts = f"{usd(result.start_usd_per_h)}/h for starts (K = {problem.init_penalty:.2g})"
        title = f"Plan ({result.strategy}): {usd(result.cost_usd_per_h)}/h of rent and {starts}, {proof}"
    tokens = ("prompt tokens/$", "answer tokens/$")
    weights = ("weights",) if result.formats else ()
    names = ("model", "region", "copies", "template", *weights, "req/s", "USD/h", *tokens, "confidence")
    table(title, names, rows)


def _usd_between(ends: tuple[float, float], unit_usd: float = 1.0) -> str:
    return f"{usd(ends[0] * unit_usd)} to {usd(ends[1] * unit_usd)}"


def _between(low: float, high: float) -> str:
    return f"{low:.3g} to {high:.3g}" if high > 0 else "-"


def _show_predictions(problem: PlanningProblem, outcome: PlanOutcome) -> None:
    from potluck.plan.explain import range_of, tokens_per_usd, usd_per_million_tokens

    result = outcome.plan
    cost = {p.model: usd_per_million_tokens(problem, result, p.model) for p in result.predictions}
    rows = [
        (
            p.model,
            f"{p.demand_per_s:.3g}",
            f"{p.capacity_per_s:.3g}",
            _between(p.slowest_per_s, p.fastest_per_s),
            short(p.prompt_tokens_per_s),
            short(p.answer_tokens_per_s),
            seconds(p.ttft_s),
            seconds(p.tpot_s),
            usd(cost[p.model]),
            _usd_between(range_of(p), cost[p.model]),
            *(short(token) for token in tokens_per_usd(problem, result, p.model)),
            p.confidence,
        )
        for p in result.predictions
    ]
    table(
        "What to expect",
        (
            "model",
            "demand/s",
            "if always busy/s",
            "8 in 10 do",
            "prompt tokens/s",
            "answer tokens/s",
            "TTFT",
            "TPOT",
            "$/M tokens",
            "8 in 10",
            "prompt tokens/$",
            "answer tokens/$",
            "confidence",
        ),
        rows,
    )
    _show_waits(result)


def _show_waits(plan: Plan) -> None:
    """Whether TTFT has waiting behind other prompts in it: where prompts are computed apart, it has."""
    apart: dict[str, set[bool]] = {}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        queued = template.kind == "pair" or any(replica.role != "mixed" for replica in template.replicas)
        apart.setdefault(template.model, set()).add(queued)
    behind = ", ".join(model for model, kinds in apart.items() if kinds == {True})
    alone = ", ".join(model for model, kinds in apart.items() if kinds == {False})
    both = ", ".join(model for model, kinds in apart.items() if len(kinds) > 1)
    words = (
        (behind, "with a mean queue before it, as prompts are computed apart"),
        (alone, "without a queue, as prompts go into the next step beside answers"),
        (both, "with a mean queue where prompts are computed apart, else without"),
    )
    paragraph("TTFT and TPOT are means: " + "; ".join(f"{who} {what}" for who, what in words if who) + ".\n")


def show_reasons(reasons: Explanation | None) -> None:
    """Why these GPUs, and what a node is worth; nothing where nobody asked."""
    if reasons is None:
        return
    show_terms(reasons.terms)
    _show_formats(reasons.formats)
    rows = []
    for model_reason in reasons.models:
        if not model_reason.served_by:
            extra = "nothing is asked of it"
        elif model_reason.next_best_usd_per_h is None:
            extra = "demand could not be met"
        else:
            extra = (
                f"+{usd(max(0.0, model_reason.next_best_usd_per_h))}/h: {'; '.join(model_reason.next_best)}"
            )
        rows.append(
            (model_reason.model, "; ".join(model_reason.served_by), ", ".join(model_reason.without), extra)
        )
    table("Why these GPUs", ("model", "served by", "without", "the next best"), rows)
    values = [
        (
            n.region,
            n.node,
            f"{n.rented} of {n.available}",
            usd(n.price_usd_per_h),
            usd(n.shadow_usd_per_h),
            _fewer(n),
        )
        for n in reasons.nodes
    ]
    columns = ("region", "node", "rented", "price", "one more saves up to", "one fewer costs")
    table("What a node is worth, per hour", columns, values)


def _fewer(node: NodeValue) -> str:
    """A plan that was taken since cheaper ones missed in a rehearsal costs more than need be on averages."""
    if not node.rented:
        return "-"
    if node.one_fewer_usd_per_h is None:
        return "not enough"
    return _signed(node.one_fewer_usd_per_h) + (" on averages" if node.one_fewer_usd_per_h < 0 else "")


def _show_formats(tried: Sequence[FormatPrice]) -> None:
    """What each format would cost, where the spec leaves a choice."""
    rows = [
        (
            ", ".join(f"{model} in {weights}" for model, weights in format_price.formats),
            percent(format_price.served_fraction),
            usd(format_price.usd_per_h),
        )
        for format_price in tried
    ]
    if rows:
        table("Weights in the formats that the spec allows", ("weights", "served", "USD/h"), rows)


def _signed(value_usd: float) -> str:
    return f"+{usd(value_usd)}" if value_usd >= 0 else f"-{usd(-value_usd)}"
