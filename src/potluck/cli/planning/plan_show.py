"""Terminal output of plans, explanations and strategy comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from potluck.cli.common.render import bold, paragraph, percent, short, table, table_of, usd
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
    """Demand served by priority, charges beside rent, and savings from reserved nodes."""
    if any(prediction.fraction is not None for prediction in plan.predictions):
        names = [prediction.model for prediction in plan.predictions]
        parts = ", ".join(f"{name} {percent(plan.fraction_of(name))}" for name in names)
        _say(f"Demand served, by priority: {parts}.")
    if plan.charges:
        parts = ", ".join(f"{charge.what} {usd(charge.usd_per_h)}" for charge in plan.charges)
        rent = f"rent {usd(plan.cost_usd_per_h)}, {parts}"
        _say(f"Total {usd(plan.total_usd_per_h)}/h: {rent}.")
    for region in problem.regions:
        for offer in region.offers:
            used = min(plan.nodes.get((region.name, offer.node), 0), offer.reserved)
            if used:
                nodes = f"{used} of {offer.reserved} {offer.node} in {region.name} used"
                _say(f"Reserved nodes: {nodes}, {usd(used * offer.price_usd_per_h)}/h less rent.")


def show_classes(problem: PlanningProblem) -> None:
    """The SLO of each request class, where a model has several: the plan meets the strictest for all."""
    for demand in problem.demands:
        if len(demand.classes) > 1:
            parts = ", ".join(
                f"{item.name} {percent(item.share)} ({_times(item.slo)})" for item in demand.classes
            )
            _say(f"{demand.name}: classes {parts}; planned for the strictest SLO, {_times(demand.slo)}.")


def _times(slo: Slo) -> str:
    return f"TTFT {seconds(slo.ttft_s)}, TPOT {seconds(slo.tpot_s)}"


def show_thresholds(plan: Plan) -> None:
    """From which prompt length on a request is prefilled in another region."""
    for threshold in plan.thresholds:
        regions = f"prefilled in {threshold.prefill_region} and decoded in {threshold.decode_region}"
        prompts = f"prompts with more than {threshold.tokens:,.0f} uncached tokens"
        _say(f"{threshold.model}: {prompts} are {regions}; shorter ones are served in their own region.")


def show_terms(prices: Sequence[TermPrice]) -> None:
    """What each term of the spec adds to the plan's cost."""
    if not prices:
        return
    rows = []
    for price in prices:
        if price.extra_fraction > 1e-6:
            cost = f"{percent(price.extra_fraction)} of demand not served"
        elif price.extra_usd_per_h is None:
            cost = f"unknown: {price.unknown}" if price.unknown else "unknown"
        else:
            cost = ("" if price.exact else "about ") + _more(price.extra_usd_per_h)
        rows.append((price.model, cost, price.words))
    table("Cost of each term (planned again without it)", ("model", "extra cost", "term"), rows)


def _say(text: str) -> None:
    paragraph(f"{text}\n")


@dataclass(frozen=True, slots=True)
class ComparedStrategy:
    """A row of `potluck compare`: the plan of one strategy."""

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
    """Simulated SLO attainment of the model furthest below its target; None: not simulated."""
    promised: float | None = None
    model: str = ""
    requests: int = 0
    """Simulated requests behind `attained`."""
    range_usd_per_million_tokens: tuple[float, float] | None = None
    """80 % interval of the cost, from that of step times."""
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
        "SLO attainment": _attained,
        "demand served": lambda compared: percent(compared.served_fraction),
        "$/M tokens": lambda compared: (
            "-" if (cost := compared.usd_per_million_tokens) is None else usd(cost)
        ),
        "80 % interval": lambda compared: (
            "-" if (ends := compared.range_usd_per_million_tokens) is None else _usd_between(ends)
        ),
        **({"weights": weights} if any(compared.formats for compared in rows) else {}),
        "nodes": lambda compared: compared.nodes,
        "cost gap": lambda compared: percent(compared.gap),
        "CPU s": lambda compared: f"{compared.cpu_s:.2f}",
    }
    table_of("Strategies compared", rows, columns)
    for compared in rows:
        if compared.violations:
            paragraph(f"the plan of {compared.strategy} failed verification: {compared.violations[0]}.")
    tried = max((compared.requests for compared in rows), default=0)
    if not tried:
        paragraph("SLO attainment: not simulated (--averages); the plans are for mean traffic.")
        return
    several = len({compared.model for compared in rows if compared.model}) > 1
    model = " of the model furthest below its target" if several else ""
    paragraph(
        f'SLO attainment: share of {tried:,} simulated requests within the SLO{model}; "<" marks a missed target. '
        "Cost gap: upper bound on what a cheaper plan from the same templates could save."
    )


def _attained(compared: ComparedStrategy) -> str:
    if compared.attained is None or compared.promised is None:
        return "-"
    if compared.attained >= compared.promised:
        return percent(compared.attained)
    return f"{percent(compared.attained, compared.promised)} < {percent(compared.promised)}"


def show_plan(
    problem: PlanningProblem,
    outcome: PlanOutcome,
    verdict: str = "",
    proof: Sequence[str] = (),
) -> None:
    """The plan: cost, SLO attainment, cost bound and risks first, then copies and predictions.

    `verdict` says whether SLOs were met in simulation, `proof` has a line of evidence for each model.
    """
    if not any(demand.rate_per_s > 0 for demand in problem.demands):
        paragraph("Nothing to plan: all request rates are 0. Give a model a rate_per_s.")
        return
    _show_summary(problem, outcome, verdict, proof)
    _show_deployments(problem, outcome)
    show_groups(outcome.plan)
    _show_predictions(problem, outcome)
    show_classes(problem)
    show_money(problem, outcome.plan)
    show_thresholds(outcome.plan)


def _show_summary(problem: PlanningProblem, outcome: PlanOutcome, verdict: str, proof: Sequence[str]) -> None:
    """What the plan costs, whether it meets its SLOs, how far it is from the cheapest, what fails alone."""
    from potluck.plan.explain import risk_lines, single_copies

    plan = outcome.plan
    cost = f"{usd(plan.total_usd_per_h)}/h"
    if problem.init_penalty > 0:
        cost += f" and {usd(plan.start_usd_per_h)}/h for starts (K = {problem.init_penalty:.2g})"
    paragraph(bold(f"Plan ({plan.strategy}): {', '.join(filter(None, (cost, verdict)))}"))
    if outcome.allocation.shortfall is not None:
        paragraph(f"Demand cannot be met in full: {outcome.allocation.shortfall}.", " ")
    for line in (*proof, f"Cost: {_cost_bound(problem, plan)}"):
        paragraph(f"{line}.", " ")
    for model, line in risk_lines(problem, plan):
        paragraph(f"{model}: {line}.", " ")
    if not single_copies(problem, plan):
        paragraph(
            "No single point of failure: every model is still served after the loss of any one copy.", " "
        )
    click.echo()


def _cost_bound(problem: PlanningProblem, plan: Plan) -> str:
    """How far the plan is from the cheapest one of the templates it was chosen from."""
    columns = _columns(plan)
    if plan.fraction < 1:
        bound = f"for {percent(plan.fraction) if plan.fraction > 0 else 'a part'} of the demand"
    elif plan.gap >= 1e-6:
        bound = f"no plan from {columns} is over {percent(plan.gap)} cheaper for mean traffic"
    else:
        bound = f"proven cheapest plan from {columns} for mean traffic"
    if problem.complexity_share:
        bound += f" (each extra component counts as {100 * problem.complexity_share:g} % of rent)"
    return bound


def show_groups(plan: Plan) -> None:
    """A row per replica of a plan over named machines, its pipeline stages as GPUs:layers."""
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
    """The templates that a strategy chooses from, which its cost bound is about."""
    from potluck.plan.strategies import STRATEGIES

    if plan.strategy == "cauchy-ce" and any(template.ce_tokens_per_usd <= 0 for template in plan.templates):
        return STRATEGIES["cauchy"].chooses_from  # its fallback
    known = STRATEGIES.get(plan.strategy)
    return "its own templates" if known is None else known.chooses_from


def _show_deployments(problem: PlanningProblem, outcome: PlanOutcome) -> None:
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
                *map(short, copy_tokens_per_usd(problem, result, deployment)),
                template.confidence,
            )
        )
    tokens = ("prompt tokens/$", "output tokens/$")
    weights = ("weights",) if result.formats else ()
    names = ("model", "region", "copies", "template", *weights, "req/s", "USD/h", *tokens, "confidence")
    table("Deployments", names, rows)


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
        "demand req/s": lambda p: f"{p.demand_per_s:.3g}",
        "capacity req/s": lambda p: f"{p.capacity_per_s:.3g}",
        "utilization": lambda p: percent(planned_load(result, p).load),
        "capacity 80 % interval": lambda p: (
            f"{p.slowest_per_s:.3g} to {p.fastest_per_s:.3g}" if p.fastest_per_s > 0 else "-"
        ),
        "prompt tokens/s": lambda p: short(p.prompt_tokens_per_s),
        "output tokens/s": lambda p: short(p.answer_tokens_per_s),
        "mean TTFT": lambda p: seconds(p.ttft_s),
        "mean TPOT": lambda p: seconds(p.tpot_s),
        "$/M tokens": lambda p: usd(cost[p.model]),
        "$/M tokens 80 % interval": lambda p: _usd_between(range_of(p), cost[p.model]),
        "prompt tokens/$": lambda p: short(per_usd[p.model][0]),
        "output tokens/$": lambda p: short(per_usd[p.model][1]),
        "confidence": lambda p: p.confidence,
    }
    table_of("Predictions", result.predictions, columns)
    _show_waits(result)


def _show_waits(plan: Plan) -> None:
    """Where TTFT and TPOT come from, and whether TTFT contains queueing for prefill."""
    if any(prediction.simulated for prediction in plan.predictions):
        paragraph("TTFT and TPOT: means over the simulated requests.\n")
        return
    apart: dict[str, set[bool]] = {}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        queued = template.kind == "pair" or any(replica.role != "mixed" for replica in template.replicas)
        apart.setdefault(template.model, set()).add(queued)
    separate = ", ".join(model for model, kinds in apart.items() if kinds == {True})
    mixed = ", ".join(model for model, kinds in apart.items() if kinds == {False})
    both = ", ".join(model for model, kinds in apart.items() if len(kinds) > 1)
    notes = (
        (separate, "including the mean queueing time at its prefill replicas"),
        (mixed, "without queueing, as mixed replicas batch prefill with decode"),
        (both, "including the mean queueing time at prefill replicas, without any at mixed ones"),
    )
    means = (
        "TTFT and TPOT: analytic means at the highest planned utilization (--headroom), not at the demand: "
    )
    paragraph(means + "; ".join(f"{models} {note}" for models, note in notes if models) + ".\n")


def show_reasons(explanation: Explanation | None) -> None:
    """Why these GPUs, and the value of one node more or less; nothing without an explanation."""
    if explanation is None:
        return
    show_terms(explanation.terms)
    _show_formats(explanation.formats)
    for line in explanation.crossings:
        _say(f"{line}.")
    rows = []
    for reason in explanation.models:
        extra = f"unknown: {reason.unknown}" if reason.unknown else ANSWERS.get(reason.answer, "-")
        if not reason.served_by:
            extra = "no demand"
        elif reason.next_best_usd_per_h is not None:
            extra = f"{_more(reason.next_best_usd_per_h)}: {'; '.join(reason.next_best)}"
        rows.append((reason.model, "; ".join(reason.served_by), ", ".join(reason.without), extra))
    basis = " (compared for mean traffic)" if explanation.on_averages else ""
    table(f"Why these GPUs{basis}", ("model", "served by", "without", "best alternative"), rows)
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
    table_of(f"Value of one node more or less, per hour{basis}", explanation.nodes, columns)
    for value in explanation.nodes:
        if value.unknown:
            _say(f"{value.node} in {value.region}: unknown: {value.unknown}.")


ANSWERS = {"not enough": "none meets the demand", "not known": "unknown: out of time (--time-limit)"}


def _worth(answer: Answer, usd_per_h: float | None, sign: str) -> str:
    if usd_per_h is None:
        return "-" if answer == "not asked" else answer
    if abs(usd_per_h) < CENT:
        return "nothing"
    return f"{sign}{usd(usd_per_h)}" if usd_per_h > 0 else f"-{usd(-usd_per_h)}, more components"


def _more(usd_per_h: float) -> str:
    """What a change costs; negative where the cheaper plan has more components."""
    if abs(usd_per_h) < CENT:
        return "same cost"
    if usd_per_h > 0:
        return f"+{usd(usd_per_h)}/h"
    return f"-{usd(-usd_per_h)}/h, with more components"


CENT = 0.005


def _show_formats(tried: Sequence[FormatPrice]) -> None:
    """The cost of each weight format, where the spec allows several."""
    columns: dict[str, Callable[[FormatPrice], object]] = {
        "weights": lambda price: ", ".join(f"{model} in {weights}" for model, weights in price.formats),
        "demand served": lambda price: percent(price.served_fraction),
        "USD/h": lambda price: usd(price.usd_per_h),
    }
    if tried:
        table_of("Cost by weight format", tried, columns)


def show_engine(cost: EngineCost | None) -> None:
    """What the engine's limits cost, where they cost something or that is unknown."""
    if cost is not None and cost.line:
        _say(f"{cost.line[0].upper()}{cost.line[1:]}.")


def show_search(searched: Mapping[str, SearchResult]) -> None:
    """A line per region: the SLO attainment that the group search predicts for mean lengths, and its effort."""
    if not searched:
        return  # without importing the search
    from potluck.plan.search.search_templates import attainment_trace

    for region, search_result in searched.items():
        best_s, attained = attainment_trace(search_result)[-1]
        ended = "converged" if search_result.converged else "out of time"
        _say(
            f"Group search in {region}: predicted SLO attainment {percent(attained)} at mean lengths, best state "
            f"after {seconds(best_s)}, {search_result.evaluated:,} states evaluated, {ended}."
        )
