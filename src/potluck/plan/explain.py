"""Explain a plan: the value of each node type, the cost of changes and terms, the next best plan.

The cost of a change is found by planning again with the change, not from dual prices: counts are whole, so a shadow
price gives the direction and seldom the amount.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import erfc, hypot, log
from statistics import NormalDist
from typing import Literal

from potluck.core.errors import CapacityError, InputError, PotluckError
from potluck.core.figures import digits
from potluck.core.values.engine_abilities import UNLIMITED
from potluck.core.values.layout import single
from potluck.core.values.plan import Deployment, Plan, Prediction, Template
from potluck.core.values.types import NodeOffer
from potluck.perf.phases import decode_step_s, prefill_s
from potluck.perf.timers.roofline import check_tp
from potluck.plan.allocate.solve import solve
from potluck.plan.assemble.columns import columns
from potluck.plan.assemble.term_rows import domains, offers_of
from potluck.plan.engine_costs import EngineCost
from potluck.plan.load import capacity_per_s
from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem, without_nodes
from potluck.plan.strategies.template_factory import (
    FormatPrice,
    Planner,
    PlanOutcome,
    SolveSettings,
    TemplateFactory,
)
from potluck.plan.timing.replica_rates import HANDOVER_SHARE, fits, layout_timer, wait_factor
from potluck.plan.timing.stage_rates import largest_tp
from potluck.plan.verify import copies_without, served_share


@dataclass(frozen=True, slots=True)
class TermPrice:
    """The cost of one term of a model."""

    model: str
    term: str
    words: str
    extra_usd_per_h: float | None
    """None where not all demand is met or no plan was found in time, so that costs are not comparable."""
    extra_fraction: float  # Additional fraction of the demand that is served without the term.
    exact: bool  # Whether both plans are proven cheapest; else the difference may come from the search.
    unknown: str = ""  # Reason why the cost is unknown, where planning again failed.


@dataclass(frozen=True, slots=True)
class SpotRisk:
    """How far a model's plan depends on spot nodes."""

    model: str
    spot_nodes: int
    nodes: int
    preemptions_per_h: float  # Of all its spot nodes together.
    served_without: float  # Share of its demand that is served without any spot node.


def term_prices(
    factory: TemplateFactory, outcome: PlanOutcome, planner: Planner, settings: SolveSettings
) -> tuple[TermPrice, ...]:
    """The cost of each term, by planning again without it; `outcome` is the plan with all terms."""
    prices = []
    for demand in factory.problem.demands:
        for term, description, changed_demand in _without_each_term(demand):
            needs_timing = (
                changed_demand.slo != demand.slo or changed_demand.origins != demand.origins
            )  # Templates depend on these.
            changed_problem = _replace_demand(factory.problem, changed_demand)
            changed_factory = (
                TemplateFactory(changed_problem)
                if needs_timing
                else replace(factory, problem=changed_problem)
            )
            other_outcome = _try_planning(planner, changed_factory, settings)
            if isinstance(other_outcome, FailedPlan):
                prices.append(
                    TermPrice(demand.name, term, description, None, 0.0, False, other_outcome.reason)
                )
                continue
            change_status, saving = _extra_cost(outcome, other_outcome)
            extra_usd = None if saving is None or outcome.plan.fraction < 1 else -saving
            is_exact = (
                change_status == "costs"
                and max(outcome.plan.gap, other_outcome.plan.gap) < settings.gap_target + 1e-9
            )
            extra_fraction = max(0.0, other_outcome.plan.fraction - outcome.plan.fraction)
            prices.append(TermPrice(demand.name, term, description, extra_usd, extra_fraction, is_exact))
    return tuple(prices)


def order_price(base_outcome: PlanOutcome) -> tuple[TermPrice, ...]:
    """The cost of sending only the longest prompts over links, where cheaper routing would send others."""
    price = base_outcome.allocation.order
    if price is None:
        return ()
    models = ", ".join(base_outcome.columns.problem.demands[m].name for m in price.models)
    description, is_exact = (
        "only the longest prompts are prefilled in another region",
        base_outcome.allocation.found,
    )
    return (TermPrice(models, "order", description, price.usd_per_h, price.fraction, is_exact),)


def crossing_lines(
    factory: TemplateFactory, base_outcome: PlanOutcome, settings: SolveSettings
) -> tuple[str, ...]:
    """Why a `prfaas` plan uses no links: the cost of sending each model's longest prompts over each link."""
    problem, allocation, lines = factory.problem, base_outcome.allocation, []
    if base_outcome.plan.strategy != "prfaas" or any(flow.source != flow.target for flow in allocation.flows):
        return ()
    phased = {demand.name: factory.phased(demand) for demand in problem.demands}
    smallest = dict.fromkeys(phased, problem.codecs[-1])
    try:
        program = columns(problem, phased, codecs=smallest, rate_caches=factory.rate_caches).program
    except PotluckError as error:
        return (f"no requests cross a link; the cost of doing so is unknown: {error}",)
    regions = program.fleet.regions
    pairs = frozenset((r, s) for r in range(len(regions)) for s in range(len(regions)))
    for link, (m, model) in product(program.links, enumerate(program.models)):
        regions_of_link, buckets = (link.source, link.target), list(model.buckets)
        longest = max(
            (bucket_index for bucket_index, bucket in enumerate(buckets) if bucket.rate_per_s > 0), default=0
        )
        buckets[longest] = replace(
            buckets[longest], barred=buckets[longest].barred | pairs - {regions_of_link}
        )
        models = (*program.models[:m], replace(model, buckets=tuple(buckets)), *program.models[m + 1 :])
        changed_program, limit_s = replace(program, models=models), settings.time_limit_s
        allocation_with_crossing = solve(
            changed_program, time_limit_s=limit_s, clock=settings.clock, in_part=False
        )
        result = "is infeasible within the GPUs, the SLO, the budget and the link"
        if allocation_with_crossing.found:
            result = f"would cost ${allocation_with_crossing.cost_usd_per_h - allocation.cost_usd_per_h:.2f}/h more"
        direction = f"from {regions[regions_of_link[0]]} to {regions[regions_of_link[1]]}"
        lines.append(
            f"no requests cross a link: sending the longest prompts of {model.name} {direction} {result}"
        )
    return tuple(lines)


def _without_each_term(demand: ModelDemand) -> Iterator[tuple[str, str, ModelDemand]]:
    """(term, description, the demand without it) for all terms, class objectives and user locations."""
    for term, description in demand.terms.asked.items():
        yield term, description, replace(demand, terms=demand.terms.without(term))
    for class_demand in demand.classes:
        if (changed_demand := demand.without_class(class_demand.name)).slo != demand.slo:
            yield "class", f"SLO of class {class_demand.name}", changed_demand
    if demand.origins:
        origins = ", ".join(f"{origin.share:.0%} {origin.name}" for origin in demand.origins)
        yield "origins", f"user locations: {origins}", replace(demand, origins=())


def _replace_demand(problem: PlanningProblem, demand: ModelDemand) -> PlanningProblem:
    return replace(
        problem,
        demands=tuple(
            demand if model_demand.name == demand.name else model_demand for model_demand in problem.demands
        ),
    )


def spot_risks(problem: PlanningProblem, plan: Plan) -> tuple[SpotRisk, ...]:
    """The dependence on spot nodes of each model that has some."""
    offers, risks = offers_of(problem), []
    cells = [cell for _, named_domains in domains(problem)["spot"] for cell in named_domains]
    for demand in problem.demands if cells else ():
        copies, nodes, spot_nodes, preemptions_per_h = _copies(plan, demand.name), 0, 0, 0.0
        for deployment in plan.deployments:
            template = plan.template(deployment.template)
            for node_count in template.nodes if template.model == demand.name else ():
                count, offer = (
                    node_count.count * deployment.count,
                    offers.get((deployment.region, node_count.node)),
                )
                nodes += count
                if offer is not None and offer.spot:
                    spot_nodes += count
                    preemptions_per_h += count * offer.preemptions_per_h
        if spot_nodes:
            served_without = served_share(problem, plan, demand, copies_without(plan, copies, cells))
            risks.append(SpotRisk(demand.name, spot_nodes, nodes, preemptions_per_h, served_without))
    return tuple(risks)


def _copies(plan: Plan, model: str) -> dict[tuple[str, str], int]:
    """(template, region) to the number of copies of a model."""
    deployments = (d for d in plan.deployments if plan.template(d.template).model == model)
    return {(deployment.template, deployment.region): deployment.count for deployment in deployments}


def single_copies(problem: PlanningProblem, plan: Plan) -> tuple[tuple[str, str], ...]:
    """(model, copy) for each copy without which none of the model's demand can be served."""
    result = []
    for demand in problem.demands:
        copies = _copies(plan, demand.name) if demand.rate_per_s > 0 else {}
        for (template, region), count in copies.items():
            remaining = {key: n for key, n in copies.items() if key != (template, region)}
            if count == 1 and served_share(problem, plan, demand, remaining) < SHARE_TOLERANCE:
                result.append((demand.name, f"{template.split(': ', 1)[-1]} in {region}"))
    return tuple(result)


def risk_lines(problem: PlanningProblem, plan: Plan) -> tuple[tuple[str, str], ...]:
    """(model, sentence) for dependence on spot nodes and for single points of failure."""
    lines = []
    for risk in spot_risks(problem, plan):
        often = "no preemptions expected"
        if risk.preemptions_per_h > 0:
            often = f"a preemption every {1 / risk.preemptions_per_h:.3g} h on average"
        left = f"without all of them {digits(risk.served_without * 100)} % of its demand is served"
        nodes = f"{risk.spot_nodes} of {risk.nodes} nodes are spot"
        lines.append((risk.model, f"{nodes}; {often}; {left}"))
    for model, copy in single_copies(problem, plan):
        lines.append((model, f"single point of failure: {copy}; `redundancy: node` adds a spare"))
    return tuple(lines)


def expected(problem: PlanningProblem, plan: Plan, seen_s: Mapping[str, tuple[float, float]]) -> Plan:
    """The plan with predictions of full capacity, and with TTFT and TPOT from simulation where `seen_s` has them."""
    predictions = []
    for prediction in plan.predictions:
        demand = problem.demand_of(prediction.model)
        if demand is not None and demand.rate_per_s > 0 and prediction.capacity_per_s > 0:
            capacity_ratio = capacity_per_s(problem, plan, demand) / prediction.capacity_per_s
            served_fraction = plan.fraction_of(demand.name)
            prediction = replace(
                prediction,
                prompt_tokens_per_s=served_fraction
                * sum(bucket.rate_per_s * bucket.input_tokens for bucket in demand.buckets),
                answer_tokens_per_s=served_fraction
                * sum(bucket.rate_per_s * bucket.output_tokens for bucket in demand.buckets),
                capacity_per_s=prediction.capacity_per_s * capacity_ratio,
                slowest_per_s=prediction.slowest_per_s * capacity_ratio,
                fastest_per_s=prediction.fastest_per_s * capacity_ratio,
            )
        if (simulated_s := seen_s.get(prediction.model)) is not None:
            prediction = replace(prediction, ttft_s=simulated_s[0], tpot_s=simulated_s[1], simulated=True)
        predictions.append(prediction)
    return replace(plan, predictions=tuple(predictions))


INTERVAL_DEVIATIONS = 2 * NormalDist().inv_cdf(0.9)  # Width of an 80 % interval in standard deviations.
MAX_REVERSAL_PROBABILITY = 0.2
"""Probability that the dearer of two plans is in truth cheaper, above which the order is reported as uncertain."""
SHARE_TOLERANCE = 1e-6
WHAT_IF_TIME_SHARE = 0.5  # Share of the time limit for all what-if plans together.


Answer = Literal["costs", "not enough", "not known", "not asked"]
"""Result of planning again with a change: its cost, that the demand cannot be met, or no result in time."""
MAX_COMPARABLE_GAP = 0.01  # Costs of plans with a larger gap are not compared.


@dataclass(frozen=True, slots=True)
class NodeValue:
    """What one node more or less of a type in a region changes."""

    region: str
    node: str
    rented: int
    available: int
    price_usd_per_h: float
    one_more: Answer  # Planned where all available nodes may be wanted.
    one_more_usd_per_h: float | None
    """Saving with one more of them available; None where unknown."""
    one_fewer: Answer
    one_fewer_usd_per_h: float | None
    """Extra cost with one fewer than rented; None where no plan serves all demand, or the cost is unknown."""
    unknown: str = ""  # Reason why a result is unknown, unless it is lack of time.


@dataclass(frozen=True, slots=True)
class ModelReason:
    """What serves a model, and the cost of its next best plan."""

    model: str
    served_by: tuple[str, ...]
    usd_per_million_tokens: float
    without: tuple[str, ...]  # Node types of its main template, which the next best plan avoids.
    next_best_usd_per_h: float | None
    """Extra cost of the best plan without them; None where no plan serves all demand, or the cost is unknown."""
    next_best: tuple[str, ...]
    answer: Answer = "not asked"
    unsure: str = ""
    """Where prediction errors leave open which plan is cheaper: a sentence with the measurement that would decide."""
    unknown: str = ""  # Reason why the result is unknown, unless it is lack of time.


@dataclass(frozen=True, slots=True)
class Explanation:
    """All explanations of one plan."""

    models: tuple[ModelReason, ...]
    nodes: tuple[NodeValue, ...]
    terms: tuple[TermPrice, ...] = ()
    formats: tuple[FormatPrice, ...] = ()
    """Cost in each combination of weight formats, where the spec allows several."""
    engine: EngineCost | None = None
    """Cost of the engine's limits, where they may exclude templates."""
    crossings: tuple[str, ...] = ()  # Why a `prfaas` plan uses no links.
    on_averages: bool = False
    """Whether costs of changes are relative to the cheapest plan for mean traffic, not to the simulated plan."""


def explain(
    factory: TemplateFactory, outcome: PlanOutcome, planner: Planner, settings: SolveSettings
) -> Explanation:
    """Explain every model and every node type that is rented or scarce, within half of the time limit.

    Changes are compared with the planner's own plan for the unchanged problem. Where the given plan is another one,
    because cheaper ones missed their SLOs in simulation, that base plan is made first.
    """
    factory = factory.with_formats_of(outcome.plan)
    problem, plan = factory.problem, outcome.plan
    plan_count = len(problem.demands) + 2 * sum(1 for count in plan.nodes.values() if count) + 1
    each_s = settings.time_limit_s * WHAT_IF_TIME_SHARE / plan_count
    start_plans = (plan, *outcome.alternatives)  # Used where they are feasible for the changed problem too.
    settings = replace(settings, time_limit_s=each_s, start_s=None, start_plans=start_plans, what_if=True)
    base_outcome, allocation_rent = outcome, outcome.allocation.rent_usd_per_h
    if plan.fraction >= 1 and abs(plan.cost_usd_per_h - allocation_rent) > 1e-6 * max(
        plan.cost_usd_per_h, 1e-9
    ):
        replanned = _try_planning(planner, factory, settings)
        base_outcome, planner = (
            (outcome, _failing(replanned)) if isinstance(replanned, FailedPlan) else (replanned, planner)
        )
    return Explanation(
        tuple(
            _explain_model(factory, plan, base_outcome, planner, settings, demand.name)
            for demand in problem.demands
        ),
        tuple(_explain_nodes(factory, plan, base_outcome, planner, settings)),
        (
            *order_price(base_outcome),
            *term_prices(factory, base_outcome, planner, replace(settings, what_if=plan.fraction >= 1)),
        ),
        outcome.tried,
        crossings=crossing_lines(factory, base_outcome, settings),
        on_averages=base_outcome is not outcome,
    )


@dataclass(frozen=True, slots=True)
class FailedPlan:
    """The error of a what-if plan."""

    reason: str


def _try_planning(
    planner: Planner, factory: TemplateFactory, settings: SolveSettings
) -> PlanOutcome | FailedPlan:
    """The plan of a changed problem, or its error, which must not fail the explanation as a whole."""
    try:
        return planner(factory, settings)
    except PotluckError as error:
        return FailedPlan(str(error))


def _failing(unanswered: FailedPlan) -> Planner:
    """A planner that always fails, for when there is no base plan to compare with."""

    def planner(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        raise CapacityError(unanswered.reason)

    return planner


def _pinned_nodes(plan: Plan, settings: SolveSettings) -> dict[tuple[str, str], int]:
    """(region, node type) to the number of nodes that the pinned copies need."""
    known = {template.name for template in plan.templates}
    pinned = tuple(deployment for deployment in settings.pins if deployment.template in known)
    return replace(plan, deployments=pinned).nodes


def _extra_cost(base_outcome: PlanOutcome, other_outcome: PlanOutcome) -> tuple[Answer, float | None]:
    """(status, extra cost in USD/h) of the plan of a changed problem."""
    if other_outcome.allocation.status == "infeasible":
        return "not enough", None
    if (
        min(base_outcome.plan.fraction, other_outcome.plan.fraction) < 1
        or max(base_outcome.plan.gap, other_outcome.plan.gap) > MAX_COMPARABLE_GAP
    ):
        return "not known", None
    return "costs", other_outcome.plan.total_usd_per_h - base_outcome.plan.total_usd_per_h


def describe(plan: Plan, model: str) -> tuple[str, ...]:
    """Deployments of a model such as `3 x prefill 4xL40S tp1 in us-east`, most copies first."""
    result = []
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        if template.model == model:
            template_name = template.name.split(": ", 1)[-1]
            result.append((-deployment.count, f"{deployment.count} x {template_name} in {deployment.region}"))
    return tuple(text for _, text in sorted(result))


def _explain_model(
    factory: TemplateFactory,
    plan: Plan,
    base_outcome: PlanOutcome,
    planner: Planner,
    settings: SolveSettings,
    model: str,
) -> ModelReason:
    """The explanation of one model, with the next best plan that avoids its main node types."""
    main_template = _main_template(plan, model)
    excluded_nodes = (
        () if main_template is None else tuple(node_count.node for node_count in main_template.nodes)
    )
    # A plan that falls short already serves no more with fewer nodes.
    is_planned = bool(excluded_nodes) and plan.fraction >= 1
    common_fields = (
        model,
        describe(plan, model),
        usd_per_million_tokens(factory.problem, plan, model),
        excluded_nodes,
    )
    pinned_nodes = sorted(
        {node for _, node in _pinned_nodes(plan.of_models([model]), settings)} & set(excluded_nodes)
    )
    other_outcome: PlanOutcome | FailedPlan | None = None
    if is_planned and pinned_nodes:
        other_outcome = FailedPlan(f"pinned copies need {', '.join(pinned_nodes)}")
    elif is_planned:
        other_outcome = _without_nodes(factory, planner, settings, model, excluded_nodes)
    if isinstance(other_outcome, FailedPlan):
        return ModelReason(*common_fields, None, (), "not known", unknown=other_outcome.reason)
    answer, extra_usd = (
        ("not asked", None) if other_outcome is None else _extra_cost(base_outcome, other_outcome)
    )
    return ModelReason(
        *common_fields,
        extra_usd,
        () if other_outcome is None or extra_usd is None else describe(other_outcome.plan, model),
        answer,
        ""
        if other_outcome is None or extra_usd is None
        else _uncertain_order(factory.problem, model, base_outcome.plan, other_outcome.plan),
    )


def _main_template(plan: Plan, model: str) -> Template | None:
    """The template that serves the most of a model."""
    rates: dict[str, float] = {}
    for share in plan.shares:
        if plan.template(share.template).model == model:
            rates[share.template] = rates.get(share.template, 0.0) + share.rate_per_s
    return plan.template(max(rates, key=lambda name: rates[name])) if rates else None


def _uncertain_order(problem: PlanningProblem, model: str, *plans: Plan) -> str:
    """A sentence when the cost intervals of two plans leave their order uncertain; else empty.

    Errors are taken as normal and independent. The GPU with the wider interval is the one to measure, as that reduces
    the uncertainty most.
    """
    estimates = []
    for plan in plans:
        main_template, cost = _main_template(plan, model), usd_per_million_tokens(problem, plan, model)
        intervals = [range_of(prediction) for prediction in plan.predictions if prediction.model == model]
        if main_template is None or not intervals or not cost > 0:
            return ""
        node = main_template.replicas[0].layout.stages[0].nodes[0]
        costs = [f"${digits(cost * times)}" for times in (1.0, *intervals[0])]
        label = f"{node.node} ({costs[0]} per million tokens, {costs[1]} to {costs[2]})"
        deviation = log(intervals[0][1] / intervals[0][0]) / INTERVAL_DEVIATIONS
        estimates.append((deviation, log(cost), label, problem.by_name[node.node].gpu.name, node.tp))
    if estimates[0][3:] == estimates[1][3:]:
        return ""
    log_ratio, deviation = estimates[1][1] - estimates[0][1], hypot(estimates[0][0], estimates[1][0])
    if not deviation > 0 or erfc(log_ratio / deviation / 2**0.5) / 2 <= MAX_REVERSAL_PROBABILITY:
        return ""
    _, _, _, gpu, tp = max(estimates)
    order = (
        f"{estimates[0][2]} and {estimates[1][2]} cost the same within the uncertainty of their predictions"
    )
    return f"{order}; `potluck profile URL --gpu {gpu} --tp {tp}` on such a node would reduce the uncertainty most"


def usd_per_million_tokens(problem: PlanningProblem, plan: Plan, model: str) -> float:
    """A model's cost per million of its prompt and answer tokens."""
    cost = _usd_per_h(problem, plan, model)
    demand = next(demand for demand in problem.demands if demand.name == model)
    tokens_per_h = demand.tokens_per_s * plan.fraction_of(model) * 3600
    return cost / tokens_per_h * 1e6 if tokens_per_h > 0 else 0.0


def range_of(prediction: Prediction) -> tuple[float, float]:
    """80 % interval of a model's cost per token, relative to the expected cost, from the interval of its capacity."""
    expected_per_s, fastest_per_s, slowest_per_s = (
        prediction.capacity_per_s,
        prediction.fastest_per_s,
        prediction.slowest_per_s,
    )
    return (
        (expected_per_s / fastest_per_s, expected_per_s / slowest_per_s)
        if fastest_per_s > 0 and slowest_per_s > 0 and expected_per_s > 0
        else (1.0, 1.0)
    )


def usd_range(problem: PlanningProblem, plan: Plan) -> tuple[float, float]:
    """80 % interval of a plan's cost in USD/h; the errors of its models are taken as fully correlated."""
    costs = [
        (_usd_per_h(problem, plan, prediction.model), range_of(prediction)) for prediction in plan.predictions
    ]
    return sum(cost * low for cost, (low, _) in costs), sum(cost * high for cost, (_, high) in costs)


def tokens_per_usd(problem: PlanningProblem, plan: Plan, model: str) -> tuple[float, float]:
    """CAUCHY's cost efficiency: (prompt tokens, answer tokens) per USD of a model; 0 where it costs nothing."""
    cost = _usd_per_h(problem, plan, model)
    demand = next(demand for demand in problem.demands if demand.name == model)
    served_s_per_usd = plan.fraction_of(model) * 3600 / cost if cost > 0 else 0.0
    prompt_tokens_per_s = sum(bucket.rate_per_s * bucket.input_tokens for bucket in demand.buckets)
    answer_tokens_per_s = sum(bucket.rate_per_s * bucket.output_tokens for bucket in demand.buckets)
    return prompt_tokens_per_s * served_s_per_usd, answer_tokens_per_s * served_s_per_usd


def copy_tokens_per_usd(problem: PlanningProblem, plan: Plan, deployment: Deployment) -> tuple[float, float]:
    """(prompt tokens, answer tokens) per USD of one deployment, for the phases that it runs."""
    template = plan.template(deployment.template)
    demand = next(demand for demand in problem.demands if demand.name == template.model)
    prices = {(r.name, o.node): o.price_usd_per_h for r in problem.regions for o in r.offers}
    cost = sum(prices[deployment.region, n.node] * n.count for n in template.nodes) * deployment.count
    prompt_tokens_per_s = answer_tokens_per_s = 0.0
    for share in plan.shares:
        if (share.template, share.region) == (deployment.template, deployment.region):
            bucket = demand.buckets[share.bucket]
            prompt_tokens_per_s += share.rate_per_s * bucket.input_tokens * (share.phase != "decode")
            answer_tokens_per_s += share.rate_per_s * bucket.output_tokens * (share.phase != "prefill")
    return (prompt_tokens_per_s * 3600 / cost, answer_tokens_per_s * 3600 / cost) if cost > 0 else (0.0, 0.0)


def tokens_json(problem: PlanningProblem, plan: Plan) -> dict[str, object]:
    """Prompt and answer tokens per dollar: of the whole plan, of each model and of each deployment."""
    models = {
        prediction.model: tokens_per_usd(problem, plan, prediction.model) for prediction in plan.predictions
    }
    served_s_per_usd = 3600 / plan.total_usd_per_h if plan.total_usd_per_h > 0 else 0.0
    shares = [
        (bucket, plan.fraction_of(demand.name)) for demand in problem.demands for bucket in demand.buckets
    ]
    prompt_tokens_per_s = sum(d.rate_per_s * d.input_tokens * share for d, share in shares)
    answer_tokens_per_s = sum(d.rate_per_s * d.output_tokens * share for d, share in shares)
    copies = [(deployment, copy_tokens_per_usd(problem, plan, deployment)) for deployment in plan.deployments]
    return {
        "plan": {
            "prompt": prompt_tokens_per_s * served_s_per_usd,
            "answer": answer_tokens_per_s * served_s_per_usd,
        },
        "models": {name: {"prompt": item[0], "answer": item[1]} for name, item in models.items()},
        "deployments": [
            {"template": d.template, "region": d.region, "prompt": item[0], "answer": item[1]}
            for d, item in copies
        ],
    }


def _usd_per_h(problem: PlanningProblem, plan: Plan, model: str) -> float:
    """A model's part of the plan's total cost, in proportion to the list prices of its nodes."""
    prices = {(r.name, o.node): o.price_usd_per_h for r in problem.regions for o in r.offers}
    rents: dict[str, float] = {}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        copy_usd_per_h = sum(prices[deployment.region, n.node] * n.count for n in template.nodes)
        rents[template.model] = rents.get(template.model, 0.0) + copy_usd_per_h * deployment.count
    total_rent = sum(rents.values())
    return plan.total_usd_per_h * rents.get(model, 0.0) / total_rent if total_rent > 0 else 0.0


def _without_nodes(
    factory: TemplateFactory, planner: Planner, settings: SolveSettings, model: str, barred: tuple[str, ...]
) -> PlanOutcome | FailedPlan:
    """The plan in which a model uses none of these node types."""
    problem = factory.problem
    demands = tuple(
        _barred_from(problem, demand, barred) if demand.name == model else demand
        for demand in problem.demands
    )
    return _try_planning(planner, replace(factory, problem=replace(problem, demands=demands)), settings)


def _barred_from(problem: PlanningProblem, demand: ModelDemand, barred: tuple[str, ...]) -> ModelDemand:
    """The demand with a term that excludes these node types."""
    allowed = (
        demand.terms.nodes if demand.terms.nodes is not None else tuple(node.name for node in problem.nodes)
    )
    remaining = tuple(name for name in allowed if name not in barred)
    return replace(demand, terms=replace(demand.terms, nodes=remaining))


def _explain_nodes(
    factory: TemplateFactory, plan: Plan, base_outcome: PlanOutcome, planner: Planner, settings: SolveSettings
) -> list[NodeValue]:
    """The value of one node more and less, for each node type that is rented or has a shadow price."""
    problem = factory.problem
    node_supply, rented, pinned = (
        base_outcome.columns.program.fleet,
        plan.nodes,
        _pinned_nodes(plan, settings),
    )

    def plan_with(region: str, node: str, available: int) -> tuple[Answer, float | None, str]:
        if available < (pinned_count := pinned.get((region, node), 0)):
            return "not known", None, f"pinned copies need {pinned_count} {node} in {region}"
        changed_problem = without_nodes(problem, region, node, available)
        known = TemplateFactory(
            changed_problem,
            factory.templates_by_kind,
            rate_caches=factory.rate_caches,
            relaxation_columns=factory.relaxation_columns,
        )
        other_outcome = _try_planning(planner, known, settings)
        return (
            ("not known", None, other_outcome.reason)
            if isinstance(other_outcome, FailedPlan)
            else (*_extra_cost(base_outcome, other_outcome), "")
        )

    node_values = []
    for row, region in enumerate(problem.regions):
        for offer in region.offers:
            shadow_price = float(
                base_outcome.allocation.node_prices_usd_per_h[row, node_supply.nodes.index(offer.node)]
            )
            count = rented.get((region.name, offer.node), 0)
            if not count and shadow_price <= 1e-9:
                continue
            one_more: tuple[Answer, float | None] = ("not asked", None)
            one_fewer, unknown = one_more, ""
            if (
                plan.fraction >= 1
                and problem.pool is None
                and (count == offer.available or shadow_price > 1e-9)
            ):
                answer, extra_usd, unknown = plan_with(region.name, offer.node, offer.available + 1)
                one_more = (answer, None if extra_usd is None else -extra_usd)
            if count and plan.fraction >= 1:
                if _last_node(problem, offer, count):
                    one_fewer = ("not enough", None)
                else:
                    answer, extra_usd, reason = plan_with(region.name, offer.node, count - 1)
                    one_fewer = (answer, extra_usd)
                    unknown = "; ".join(dict.fromkeys(filter(None, (unknown, reason))))
            known = (offer.node, count, offer.available, offer.price_usd_per_h)
            node_values.append(NodeValue(region.name, *known, *one_more, *one_fewer, unknown))
    return node_values


def _last_node(problem: PlanningProblem, offer: NodeOffer, rented: int) -> bool:
    """Whether this is the only node on offer."""
    others = sum(o.available for region in problem.regions for o in region.offers if o is not offer)
    return rented == 1 and others == 0


def why_not(problem: PlanningProblem, model: str) -> str:
    """A sentence on why no single node serves a model: memory, or the fastest TTFT and TPOT against the SLO."""
    demand = next(model_demand for model_demand in problem.demands if model_demand.name == model)
    latencies: list[tuple[float, float]] = []
    for node in problem.offered:
        max_tp = min(node.gpus, problem.engine.most_tensor or node.gpus)
        for tp in (degree for degree in range(max_tp, 0, -1) if node.gpus % degree == 0):
            layout = single(node.name, tp, demand.model.layer_count)
            try:
                check_tp(demand.model, node, tp)
            except InputError:
                continue
            if fits(demand, layout, problem.by_name):
                timer = layout_timer(demand, layout, problem.by_name)
                prompt, context = demand.buckets[0].new_tokens, float(demand.buckets[0].input_tokens)
                idle_latencies = (
                    float(prefill_s(timer, prompt)[0]),
                    float(decode_step_s(timer, 1.0, context)[0]),
                )
                latencies.append(idle_latencies)
                break
    if not latencies:
        return f"{model}: {_fits_nowhere(problem, demand)}"
    ttft_s, tpot_s = min(item[0] for item in latencies), min(item[1] for item in latencies)
    objective = f"TTFT {demand.slo.ttft_s * 1e3:.4g} ms, TPOT {demand.slo.tpot_s * 1e3:.4g} ms"
    if demand.slo.e2e_s is not None:
        objective += f", E2E {demand.slo.e2e_s * 1e3:.4g} ms"
    wait, reserved = wait_factor(problem.headroom), f"{HANDOVER_SHARE:.0%} of TTFT reserved for KV transfer"
    with_queueing = f"{ttft_s * wait * 1e3:.4g} ms at planned utilization, {reserved}"
    prefill = f"{ttft_s * 1e3:.4g} ms to prefill its shortest prompts ({with_queueing})"
    fastest = f"{prefill} and {tpot_s * 1e3:.4g} ms per token"
    conclusion = f"cannot be met; the fastest idle node takes {fastest}; relax the SLO, or offer faster nodes"
    return f"{model}: its SLO ({objective}) {conclusion}"


def _fits_nowhere(problem: PlanningProblem, demand: ModelDemand) -> str:
    """A sentence on why a model's weights fit nowhere, with a better engine where there is one."""
    engine, layers = problem.engine, demand.model.layer_count
    reason = "its weights and the KV of one prompt fit on no node on offer"
    if engine.pipelines:
        reason += ", nor on a pipeline of nodes within its SLO"
    if engine == UNLIMITED:
        return reason
    reason += f" with {engine.title}"
    fits_sharded = any(
        fits(demand, single(node.name, largest_tp(demand.model, node), layers), problem.by_name)
        for node in problem.offered
    )
    if engine.most_tensor is not None and fits_sharded:
        reason += "; `engine: vllm` shards it over the GPUs of a node"
    elif not engine.pipelines:
        reason += "; `engine: vllm` has pipelines"
    return reason


MAX_RETRIES = 3  # Plans without the demands that no template serves.


def planned_rest(
    planner: Planner, factory: TemplateFactory, settings: SolveSettings
) -> tuple[TemplateFactory, PlanOutcome, tuple[str, ...]]:
    """(factory of the demand that is planned, its plan, a note for each part of the demand that was left out)."""
    problem, notes = within_context(factory.problem)
    factory = replace(factory, problem=problem)
    outcome = planner(factory, settings)
    for _ in range(MAX_RETRIES):
        shortfall = outcome.allocation.shortfall
        if shortfall is None or not shortfall.unserved or outcome.plan.fraction > 0:
            break
        remaining_problem, more_notes = without_demands(factory.problem, shortfall.unserved)
        if not any(demand.rate_per_s > 0 for demand in remaining_problem.demands):
            break
        notes += more_notes
        factory = replace(factory, problem=remaining_problem)
        outcome = planner(factory, settings)
    return factory, outcome, notes


def within_context(problem: PlanningProblem) -> tuple[PlanningProblem, tuple[str, ...]]:
    """The problem without requests that exceed their model's context window, with a note for each model."""

    def too_long(model_demand: ModelDemand, demand: BucketDemand) -> bool:
        return demand.input_tokens + demand.output_tokens > model_demand.model.max_context_tokens

    remaining_problem = _without_buckets(problem, too_long)
    notes = []
    for previous_demand, next_demand in zip(problem.demands, remaining_problem.demands, strict=True):
        if percent := _percent_removed(previous_demand, next_demand):
            limit = f"{previous_demand.model.max_context_tokens:,} tokens"
            notes.append(
                f"{previous_demand.name}: {percent:.2g} % of its requests exceed its context window of {limit}; "
                "they are left out of the plan, and engines reject them"
            )
    return remaining_problem, tuple(notes)


def without_demands(
    problem: PlanningProblem, unserved: Collection[str]
) -> tuple[PlanningProblem, tuple[str, ...]]:
    """The problem without the demands named in `Shortfall.unserved`, with a note for each model."""

    def is_unserved(model_demand: ModelDemand, demand: BucketDemand) -> bool:
        return f"{model_demand.name}/{model_demand.name} up to {demand.longest_tokens} tokens" in unserved

    remaining_problem = _without_buckets(problem, is_unserved)
    notes = []
    for previous_demand, next_demand in zip(problem.demands, remaining_problem.demands, strict=True):
        if not (percent := _percent_removed(previous_demand, next_demand)):
            continue
        if next_demand.rate_per_s > 0:
            left_out = [
                bucket
                for bucket, next_bucket in zip(previous_demand.buckets, next_demand.buckets, strict=True)
                if bucket.rate_per_s > next_bucket.rate_per_s
            ]
            lengths = ", ".join(f"up to {demand.longest_tokens:,}" for demand in left_out)
            notes.append(
                f"{previous_demand.name}: no template on offer serves its prompts of {lengths} tokens within its "
                f"SLO; {percent:.2g} % of its requests are left out"
            )
        else:
            notes.append(f"{why_not(problem, previous_demand.name)}. It is left out of the plan")
    return remaining_problem, tuple(notes)


def _without_buckets(
    problem: PlanningProblem, which: Callable[[ModelDemand, BucketDemand], bool]
) -> PlanningProblem:
    """The problem with the rates of these buckets set to 0."""
    demands = tuple(
        replace(
            demand,
            buckets=tuple(
                replace(bucket, rate_per_s=0.0) if which(demand, bucket) else bucket
                for bucket in demand.buckets
            ),
        )
        for demand in problem.demands
    )
    return replace(problem, demands=demands)


def _percent_removed(previous_demand: ModelDemand, next_demand: ModelDemand) -> float:
    """Percentage of a model's requests that the next demand lacks."""
    previous_rate = previous_demand.rate_per_s
    return (
        100.0 * (1.0 - next_demand.rate_per_s / previous_rate)
        if previous_rate > 0 and next_demand.rate_per_s < previous_rate
        else 0.0
    )


def budget_that_would_do(planner: Planner, factory: TemplateFactory, settings: SolveSettings) -> float | None:
    """Cost in USD/h of serving all demand without the budget; None where other limits bind too."""
    if factory.problem.budget_usd_per_h is None:
        return None
    factory_without_budget = replace(factory, problem=replace(factory.problem, budget_usd_per_h=None))
    other_outcome = planner(factory_without_budget, settings)
    return other_outcome.plan.cost_usd_per_h if other_outcome.allocation.found else None
