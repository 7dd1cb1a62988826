"""How plans, their reasons and comparisons are printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.cli.common.render import paragraph, percent, short, table, table_of, usd
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from potluck.core.values.model import Format
    from potluck.core.values.plan import Plan, Prediction
    from potluck.core.values.types import Slo
    from potluck.plan.engine_costs import EngineCost
    from potluck.plan.explain import Answer, Explanation, NodeValue, TermPrice
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.search.tabu import SearchResult
    from potluck.plan.strategies import PlanOutcome
    from potluck.plan.strategies.template_factory import FormatPrice


def show_money(problem: PlanningProblem, plan: Plan) -> None:
    """Who gets how much where not all fits, charges beside rent, nodes that are paid for already."""
    if any(prediction.fraction is not None for prediction in plan.predictions):
        names = [prediction.model for prediction in plan.predictions]
        parts = ", ".join(f"{name} {percent(plan.fraction_of(name))}" for name in names)
        _say(f"Of the demand is served, by priority: {parts}.")
    if plan.charges:
        parts = ", ".join(f"{charge.what} {usd(charge.usd_per_h)}" for charge in plan.charges)
        rent = f"rent {usd(plan.cost_usd_per_h)}, {parts}"
        _say(f"Of {usd(plan.total_usd_per_h)} an hour: {rent}.")
    for region in problem.regions:
        for offer in region.offers:
            used = min(plan.nodes.get((region.name, offer.node), 0), offer.reserved)
            if used:
                what = f"{used} of {offer.reserved} reserved {offer.node} in {region.name}"
                _say(f"{what} used: {usd(used * offer.price_usd_per_h)}/h less.")


def show_classes(problem: PlanningProblem) -> None:
    """What requests of each class were promised, where there are several: all are planned for the strictest."""
    for demand in problem.asks:
        if len(demand.classes) > 1:
            parts = ", ".join(
                f"{item.name} {percent(item.share)} ({_times(item.slo)})" for item in demand.classes
            )
            _say(f"{demand.name}: {parts}; planned for the strictest of all, {_times(demand.slo)}.")


def _times(slo: Slo) -> str:
    return f"TTFT {seconds(slo.ttft_s)}, TPOT {seconds(slo.tpot_s)}"


def show_thresholds(plan: Plan) -> None:
    for each in plan.thresholds:
        where = f"prefilled in {each.prefill_region} and answered in {each.decode_region}, shorter ones stay"
        _say(f"{each.model}: prompts with more than {each.tokens:,.0f} tokens to compute are {where}.")


def show_risk(problem: PlanningProblem, plan: Plan) -> None:
    from potluck.plan.explain import risk_lines

    for model, line in risk_lines(problem, plan):
        _say(f"{model}: {line}.")


def show_terms(prices: Sequence[TermPrice]) -> None:
    if not prices:
        return
    rows = []
    for price in prices:
        if price.extra_fraction > 1e-6:
            cost = f"{percent(price.extra_fraction)} of demand"
        elif price.extra_usd_per_h is None:
            cost = f"not known: {price.unknown}" if price.unknown else "not known"
        else:
            cost = ("" if price.exact else "about ") + _more(price.extra_usd_per_h)
        rows.append((price.model, cost, price.words))
    table("What was asked costs (by planning again without it)", ("model", "costs", "asked"), rows)


def _say(text: str) -> None:
    paragraph(f"{text}\n")


@dataclass(frozen=True, slots=True)
class ComparedStrategy:
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
    def weights(compared: ComparedStrategy) -> str:
        return ", ".join(f"{model} {weights}" for model, weights in compared.formats)

    columns: dict[str, Callable[[ComparedStrategy], object]] = {
        "strategy": lambda compared: compared.strategy,
        "USD/h": lambda compared: usd(compared.cost_usd_per_h),
        "attained": _attained,
        "served": lambda compared: percent(compared.served_fraction),
        "$/M tokens": lambda compared: (
            "-" if (cost := compared.usd_per_million_tokens) is None else usd(cost)
        ),
        "8 in 10": lambda compared: (
            "-" if (ends := compared.range_usd_per_million_tokens) is None else _usd_between(ends)
        ),
        **({"weights": weights} if any(compared.formats for compared in rows) else {}),
        "nodes": lambda compared: compared.nodes,
        "gap": lambda compared: percent(compared.gap),
        "CPU s": lambda compared: f"{compared.cpu_s:.2f}",
    }
    table_of("Strategies on the same templates", rows, columns)
    for compared in rows:
        if compared.violations:
            paragraph(f"the plan of {compared.strategy} failed its own check: {compared.violations[0]}.")
    tried = max((compared.requests for compared in rows), default=0)
    if not tried:
        paragraph("attained: not rehearsed; costs are of plans on averages.")
        return
    several = len({compared.model for compared in rows if compared.model}) > 1
    of = "the model that is worst off" if several else "the model"
    paragraph(
        f"attained: share of the requests in time, rehearsed with {tried:,} requests, of {of}; "
        "a plan that misses is not cheaper but less."
    )


def _attained(compared: ComparedStrategy) -> str:
    if compared.attained is None or compared.promised is None:
        return "-"
    if compared.attained >= compared.promised:
        return percent(compared.attained)
    return f"{percent(compared.attained, compared.promised)} < {percent(compared.promised)}"


def show_plan(problem: PlanningProblem, outcome: PlanOutcome, basis: str = "on averages") -> None:
    if not any(demand.rate_per_s > 0 for demand in problem.asks):
        paragraph("Nothing is rented, as nothing is asked of it: all rates are 0. Give a model a rate_per_s.")
        return
    if outcome.allocation.shortfall is not None:
        paragraph(f"Demand cannot be met: {outcome.allocation.shortfall}. This is the plan for that much.\n")
    _show_deployments(problem, outcome, basis)
    show_groups(outcome.plan)
    _show_predictions(problem, outcome)
    show_classes(problem)
    show_money(problem, outcome.plan)
    show_thresholds(outcome.plan)
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
    if problem.complexity_share:
        proof += f" (each further moving part counts {100 * problem.complexity_share:g} %)"
    if result.fraction < 1:
        part = percent(result.fraction) if result.fraction > 0 else "what can be served"
        proof = f"for {part} of the demand"
    title = f"Plan ({result.strategy}): {usd(result.total_usd_per_h)}/h, {proof}"
    if problem.init_penalty > 0:
        starts = f"{usd(result.start_usd_per_h)}/h for starts (K = {problem.init_penalty:.2g})"
        title = f"Plan ({result.strategy}): {usd(result.total_usd_per_h)}/h and {starts}, {proof}"
    tokens = ("prompt tokens/$", "answer tokens/$")
    weights = ("weights",) if result.formats else ()
    names = ("model", "region", "copies", "template", *weights, "req/s", "USD/h", *tokens, "confidence")
    table(title, names, rows)


def _usd_between(ends: tuple[float, float], unit_usd: float = 1.0) -> str:
    return f"{usd(ends[0] * unit_usd)} to {usd(ends[1] * unit_usd)}"


def _show_predictions(problem: PlanningProblem, outcome: PlanOutcome) -> None:
    from potluck.plan.explain import range_of, tokens_per_usd, usd_per_million_tokens
    from potluck.plan.load import planned_load

    result = outcome.plan
    cost = {p.model: usd_per_million_tokens(problem, result, p.model) for p in result.predictions}
    per_usd = {p.model: tokens_per_usd(problem, result, p.model) for p in result.predictions}
    columns: dict[str, Callable[[Prediction], object]] = {
        "model": lambda p: p.model,
        "demand/s": lambda p: f"{p.demand_per_s:.3g}",
        "if always busy/s": lambda p: f"{p.capacity_per_s:.3g}",
        "load": lambda p: percent(planned_load(result, p).load),
        "8 in 10 do": lambda p: (
            f"{p.slowest_per_s:.3g} to {p.fastest_per_s:.3g}" if p.fastest_per_s > 0 else "-"
        ),
        "prompt tokens/s": lambda p: short(p.prompt_tokens_per_s),
        "answer tokens/s": lambda p: short(p.answer_tokens_per_s),
        "TTFT": lambda p: seconds(p.ttft_s),
        "TPOT": lambda p: seconds(p.tpot_s),
        "$/M tokens": lambda p: usd(cost[p.model]),
        "8 in 10": lambda p: _usd_between(range_of(p), cost[p.model]),
        "prompt tokens/$": lambda p: short(per_usd[p.model][0]),
        "answer tokens/$": lambda p: short(per_usd[p.model][1]),
        "confidence": lambda p: p.confidence,
    }
    table_of("What to expect", result.predictions, columns)
    _show_waits(result)


def _show_waits(plan: Plan) -> None:
    """Where TTFT and TPOT come from, and whether TTFT has waiting behind other prompts in it."""
    if any(prediction.simulated for prediction in plan.predictions):
        paragraph("TTFT and TPOT are means of the simulated runs, at the demand.\n")
        return
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
    full = "TTFT and TPOT are means with replicas as busy as they may be, not at the demand: "
    paragraph(full + "; ".join(f"{who} {what}" for who, what in words if who) + ".\n")


def show_reasons(explanation: Explanation | None) -> None:
    """Why these GPUs, and what a node is worth; nothing where nobody asked."""
    if explanation is None:
        return
    show_terms(explanation.terms)
    _show_formats(explanation.formats)
    for line in explanation.crossings:
        _say(f"{line}.")
    rows = []
    for reason in explanation.models:
        extra = f"not known: {reason.unknown}" if reason.unknown else ANSWERS.get(reason.answer, "-")
        if not reason.served_by:
            extra = "nothing is asked of it"
        elif reason.next_best_usd_per_h is not None:
            extra = f"{_more(reason.next_best_usd_per_h)}: {'; '.join(reason.next_best)}"
        rows.append((reason.model, "; ".join(reason.served_by), ", ".join(reason.without), extra))
    basis = " (plans on averages compared)" if explanation.on_averages else ""
    table(f"Why these GPUs{basis}", ("model", "served by", "without", "the next best"), rows)
    for reason in explanation.models:
        if reason.unsure:
            _say(f"{reason.model}: {reason.unsure}.")
    columns: dict[str, Callable[[NodeValue], object]] = {
        "region": lambda n: n.region,
        "node": lambda n: n.node,
        "rented": lambda n: f"{n.rented} of {n.available}",
        "price": lambda n: usd(n.price_usd_per_h),
        "one more saves": lambda n: _worth(n.one_more, n.one_more_usd_per_h, ""),
        "one fewer costs": lambda n: _worth(n.one_fewer, n.one_fewer_usd_per_h, "+"),
    }
    table_of(f"What a node is worth, per hour{basis}", explanation.nodes, columns)
    for value in explanation.nodes:
        if value.unknown:
            _say(f"{value.node} in {value.region}: not known: {value.unknown}.")


ANSWERS = {"not enough": "demand cannot be met", "not known": "not known: no time (--time-limit)"}


def _worth(answer: Answer, usd_per_h: float | None, sign: str) -> str:
    if usd_per_h is None:
        return "-" if answer == "not asked" else answer
    if abs(usd_per_h) < CENT:
        return "nothing"
    return f"{sign}{usd(usd_per_h)}" if usd_per_h > 0 else f"-{usd(-usd_per_h)}, other parts"


def _more(usd_per_h: float) -> str:
    """What a change costs; less where the plan has fewer moving parts than what would be cheaper."""
    if abs(usd_per_h) < CENT:
        return "as much"
    if usd_per_h > 0:
        return f"+{usd(usd_per_h)}/h"
    return f"-{usd(-usd_per_h)}/h, with more moving parts"


CENT = 0.005


def _show_formats(tried: Sequence[FormatPrice]) -> None:
    """What each format would cost, where the spec leaves a choice."""
    columns: dict[str, Callable[[FormatPrice], object]] = {
        "weights": lambda price: ", ".join(f"{model} in {weights}" for model, weights in price.formats),
        "served": lambda price: percent(price.served_fraction),
        "USD/h": lambda price: usd(price.usd_per_h),
    }
    if tried:
        table_of("Weights in the formats that the spec allows", tried, columns)


def show_engine(cost: EngineCost | None) -> None:
    """What the engine's limits cost, where they cost something or nobody knows."""
    if cost is not None and cost.line:
        _say(f"{cost.line[0].upper()}{cost.line[1:]}.")


def show_search(searched: Mapping[str, SearchResult]) -> None:
    """A line per region: what the search expects for mean lengths, and how it got there."""
    if not searched:
        return  # nor is the search loaded
    from potluck.plan.search.search_templates import attainment_trace

    for region, search_result in searched.items():
        best_s, attained = attainment_trace(search_result)[-1]
        ended = "converged" if search_result.converged else "out of time"
        _say(
            f"search in {region}: {percent(attained)} of requests within the objective at mean lengths "
            f"(on averages), best after {seconds(best_s)}, {search_result.evaluated:,} states, {ended}"
        )
