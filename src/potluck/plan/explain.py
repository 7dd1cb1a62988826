"""Why a plan is as it is: what each node type is worth, what a change would cost, and the next best plan.

Questions about changes are answered by planning again with the change made, not by a derivative: counts are
whole, so a shadow price tells the direction and seldom the amount.
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
    """A term of a model, in words, and what it adds to the plan."""

    model: str
    term: str
    words: str
    extra_usd_per_h: float | None
    """None where not all demand is met or a plan was not found in time, so that costs do not compare."""
    extra_fraction: float  # Of the demand, what more would be served without it.
    exact: bool  # Whether both plans were proven cheapest; else the difference may be of the search.
    unknown: str = ""  # Why the cost is not known, where planning again failed.


@dataclass(frozen=True, slots=True)
class SpotRisk:
    model: str
    spot_nodes: int
    nodes: int
    preemptions_per_h: float  # Of all of them together.
    served_without: float  # Share of its demand that is served when all are gone.


def term_prices(
    factory: TemplateFactory, outcome: PlanOutcome, planner: Planner, settings: SolveSettings
) -> tuple[TermPrice, ...]:
    """By planning again without each; `outcome` is the plan with all of them."""
    prices = []
    for demand in factory.problem.demands:
        for term, words, changed in _changes(demand):
            fresh = changed.slo != demand.slo or changed.origins != demand.origins  # templates are timed anew
            there = _with(factory.problem, changed)
            shop = TemplateFactory(there) if fresh else replace(factory, problem=there)
            other_outcome = _planned(planner, shop, settings)
            if isinstance(other_outcome, Unanswered):
                prices.append(TermPrice(demand.name, term, words, None, 0.0, False, other_outcome.reason))
                continue
            answer, less = _change(outcome, other_outcome)
            extra = None if less is None or outcome.plan.fraction < 1 else -less
            exact = (
                answer == "costs"
                and max(outcome.plan.gap, other_outcome.plan.gap) < settings.gap_target + 1e-9
            )
            more = max(0.0, other_outcome.plan.fraction - outcome.plan.fraction)
            prices.append(TermPrice(demand.name, term, words, extra, more, exact))
    return tuple(prices)


def order_price(base_outcome: PlanOutcome) -> tuple[TermPrice, ...]:
    """What it costs that who crosses a link is no shorter than who stays, where some would not be."""
    price = base_outcome.allocation.order
    if price is None:
        return ()
    models = ", ".join(base_outcome.columns.problem.demands[m].name for m in price.models)
    words, exact = "who is computed in another region is longer than who stays", base_outcome.allocation.found
    return (TermPrice(models, "order", words, price.usd_per_h, price.fraction, exact),)


def crossing_lines(
    factory: TemplateFactory, base_outcome: PlanOutcome, settings: SolveSettings
) -> tuple[str, ...]:
    """Why nothing crosses: what it would cost to send a model's longest prompts over each link, by planning again."""
    problem, allocation, lines = factory.problem, base_outcome.allocation, []
    if base_outcome.plan.strategy != "prfaas" or any(flow.source != flow.target for flow in allocation.flows):
        return ()
    phased = {demand.name: factory.phased(demand) for demand in problem.demands}
    smallest = dict.fromkeys(phased, problem.codecs[-1])
    try:
        program = columns(problem, phased, codecs=smallest, rate_caches=factory.rate_caches).program
    except PotluckError as error:
        return (f"nothing crosses; what it would cost is not known: {error}",)
    regions = program.fleet.regions
    pairs = frozenset((r, s) for r in range(len(regions)) for s in range(len(regions)))
    for link, (m, model) in product(program.links, enumerate(program.models)):
        ends, buckets = (link.source, link.target), list(model.buckets)
        last = max((place for place, bucket in enumerate(buckets) if bucket.rate_per_s > 0), default=0)
        buckets[last] = replace(buckets[last], barred=buckets[last].barred | pairs - {ends})
        models = (*program.models[:m], replace(model, buckets=tuple(buckets)), *program.models[m + 1 :])
        there, limit_s = replace(program, models=models), settings.time_limit_s
        answer = solve(there, time_limit_s=limit_s, clock=settings.clock, in_part=False)
        why = "GPUs, the objective, the budget or the link do not allow it"
        if answer.found:
            why = f"that costs ${answer.cost_usd_per_h - allocation.cost_usd_per_h:.2f}/h more"
        way = f"from {regions[ends[0]]} to {regions[ends[1]]}"
        lines.append(f"nothing crosses: the longest prompts of {model.name} could be sent {way}, but {why}")
    return tuple(lines)


def _changes(demand: ModelDemand) -> Iterator[tuple[str, str, ModelDemand]]:
    for term, words in demand.terms.asked.items():
        yield term, words, replace(demand, terms=demand.terms.without(term))
    for class_demand in demand.classes:
        if (left := demand.without_class(class_demand.name)).slo != demand.slo:
            yield "class", f"what class {class_demand.name} was promised", left
    if demand.origins:
        places = ", ".join(f"{origin.share:.0%} {origin.name}" for origin in demand.origins)
        yield "origins", f"users have places: {places}", replace(demand, origins=())


def _with(problem: PlanningProblem, demand: ModelDemand) -> PlanningProblem:
    return replace(
        problem,
        demands=tuple(
            demand if model_demand.name == demand.name else model_demand for model_demand in problem.demands
        ),
    )


def spot_risks(problem: PlanningProblem, plan: Plan) -> tuple[SpotRisk, ...]:
    """Models with spot nodes, how often these go, and what is left without them."""
    offers, risks = offers_of(problem), []
    cells = [cell for _, item in domains(problem)["spot"] for cell in item]
    for demand in problem.demands if cells else ():
        copies, nodes, spot, often = _copies(plan, demand.name), 0, 0, 0.0
        for deployment in plan.deployments:
            template = plan.template(deployment.template)
            for node_count in template.nodes if template.model == demand.name else ():
                held, offer = (
                    node_count.count * deployment.count,
                    offers.get((deployment.region, node_count.node)),
                )
                nodes += held
                if offer is not None and offer.spot:
                    spot += held
                    often += held * offer.preemptions_per_h
        if spot:
            left = served_share(problem, plan, demand, copies_without(plan, copies, cells))
            risks.append(SpotRisk(demand.name, spot, nodes, often, left))
    return tuple(risks)


def _copies(plan: Plan, model: str) -> dict[tuple[str, str], int]:
    mine = (d for d in plan.deployments if plan.template(d.template).model == model)
    return {(deployment.template, deployment.region): deployment.count for deployment in mine}


def single_copies(problem: PlanningProblem, plan: Plan) -> tuple[tuple[str, str], ...]:
    """(model, copy) of those without which nothing at all is served of a model."""
    result = []
    for demand in problem.demands:
        copies = _copies(plan, demand.name) if demand.rate_per_s > 0 else {}
        for (template, region), count in copies.items():
            left = {key: n for key, n in copies.items() if key != (template, region)}
            if count == 1 and served_share(problem, plan, demand, left) < NOUGHT:
                result.append((demand.name, f"{template.split(': ', 1)[-1]} in {region}"))
    return tuple(result)


def risk_lines(problem: PlanningProblem, plan: Plan) -> tuple[tuple[str, str], ...]:
    """(model, what it depends on, in words): spot nodes, and copies that it has one of."""
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
    """The plan with what will be: all that its copies could do, and models' TTFT and TPOT as simulations had them."""
    predictions = []
    for prediction in plan.predictions:
        demand = problem.ask(prediction.model)
        if demand is not None and demand.rate_per_s > 0 and prediction.capacity_per_s > 0:
            more = capacity_per_s(problem, plan, demand) / prediction.capacity_per_s
            served = plan.fraction_of(demand.name)
            prediction = replace(
                prediction,
                prompt_tokens_per_s=served
                * sum(bucket.rate_per_s * bucket.input_tokens for bucket in demand.buckets),
                answer_tokens_per_s=served
                * sum(bucket.rate_per_s * bucket.output_tokens for bucket in demand.buckets),
                capacity_per_s=prediction.capacity_per_s * more,
                slowest_per_s=prediction.slowest_per_s * more,
                fastest_per_s=prediction.fastest_per_s * more,
            )
        if (times_s := seen_s.get(prediction.model)) is not None:
            prediction = replace(prediction, ttft_s=times_s[0], tpot_s=times_s[1], simulated=True)
        predictions.append(prediction)
    return replace(plan, predictions=tuple(predictions))


BAR_DEVIATIONS, DOUBT = 2 * NormalDist().inv_cdf(0.9), 0.2
"""What a bar of 80 % spans, and how likely the dearer of two is the cheaper one before they count as alike."""
NOUGHT = 1e-6
ASKING_SHARE = 0.5  # Of the time limit, for all questions about what else there was.


Answer = Literal["costs", "not enough", "not known", "not asked"]
"""What planning again with a change said: what it costs, that the demand cannot be met, or nothing in time."""
SURE_GAP = 0.01  # A plan that may be dearer than need be by more says nothing of what a change costs.


@dataclass(frozen=True, slots=True)
class NodeValue:
    region: str
    node: str
    rented: int
    available: int
    price_usd_per_h: float
    one_more: Answer  # Asked where all that there are may be wanted.
    one_more_usd_per_h: float | None
    """What a plan costs less with one more of them on offer; None where that is not known."""
    one_fewer: Answer
    one_fewer_usd_per_h: float | None
    """What a plan costs more with one fewer on offer than is rented; None where none serves all, or none is known."""
    unknown: str = ""  # Why an answer is not known, where that is not for want of time.


@dataclass(frozen=True, slots=True)
class ModelReason:
    model: str
    served_by: tuple[str, ...]
    usd_per_million_tokens: float
    without: tuple[str, ...]  # The node types of the template that serves the most of it.
    next_best_usd_per_h: float | None
    """Extra cost of the best plan that keeps this model off them; None where none serves all, or none is known."""
    next_best: tuple[str, ...]
    answer: Answer = "not asked"
    unsure: str = ""
    """Where errors of predictions leave open which of both is cheaper: that, and what would decide it."""
    unknown: str = ""  # Why the answer is not known, where that is not for want of time.


@dataclass(frozen=True, slots=True)
class Explanation:
    models: tuple[ModelReason, ...]
    nodes: tuple[NodeValue, ...]
    terms: tuple[TermPrice, ...] = ()
    formats: tuple[FormatPrice, ...] = ()
    """What it would cost in each combination of formats, where there was a choice."""
    engine: EngineCost | None = None
    """What the limits of the engine cost, where they may leave something out."""
    crossings: tuple[str, ...] = ()  # Why a plan of `prfaas` has no use for links.
    on_averages: bool = False
    """Whether costs of changes are between plans on averages, as the plan itself was chosen by more than that."""


def explain(
    factory: TemplateFactory, outcome: PlanOutcome, planner: Planner, settings: SolveSettings
) -> Explanation:
    """Reasons for every model and every node type that is rented or scarce; all in half of the time limit.

    Changes are compared with what the same planner makes of the problem as it is. Where the plan is another one, as
    cheaper ones missed in a rehearsal, it is asked for that first.
    """
    factory = factory.with_formats_of(outcome.plan)
    problem, plan = factory.problem, outcome.plan
    questions = len(problem.demands) + 2 * sum(1 for count in plan.nodes.values() if count) + 1
    each_s = settings.time_limit_s * ASKING_SHARE / questions
    known = (plan, *outcome.alternatives)  # where they are plans of the changed problem too
    settings = replace(settings, time_limit_s=each_s, start_s=None, start_plans=known, what_if=True)
    base_outcome, same = outcome, outcome.allocation.rent_usd_per_h
    if plan.fraction >= 1 and abs(plan.cost_usd_per_h - same) > 1e-6 * max(plan.cost_usd_per_h, 1e-9):
        again = _planned(planner, factory, settings)
        base_outcome, planner = (
            (outcome, _failing(again)) if isinstance(again, Unanswered) else (again, planner)
        )
    return Explanation(
        tuple(
            _model(factory, plan, base_outcome, planner, settings, demand.name) for demand in problem.demands
        ),
        tuple(_nodes(factory, plan, base_outcome, planner, settings)),
        (
            *order_price(base_outcome),
            *term_prices(factory, base_outcome, planner, replace(settings, what_if=plan.fraction >= 1)),
        ),
        outcome.tried,
        crossings=crossing_lines(factory, base_outcome, settings),
        on_averages=base_outcome is not outcome,
    )


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A question that planning again does not answer, and why."""

    reason: str


def _planned(planner: Planner, factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome | Unanswered:
    """The plan of a changed problem. A failure concerns this question alone: the plan itself was made before."""
    try:
        return planner(factory, settings)
    except PotluckError as error:
        return Unanswered(str(error))


def _failing(unanswered: Unanswered) -> Planner:
    """A planner for questions that have nothing to be compared with."""

    def planner(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        raise CapacityError(unanswered.reason)

    return planner


def _pinned_nodes(plan: Plan, settings: SolveSettings) -> dict[tuple[str, str], int]:
    """(region, node type) to how many the pinned copies need."""
    known = {template.name for template in plan.templates}
    pinned = tuple(deployment for deployment in settings.pins if deployment.template in known)
    return replace(plan, deployments=pinned).nodes


def _change(base_outcome: PlanOutcome, other_outcome: PlanOutcome) -> tuple[Answer, float | None]:
    """What the plan of a changed problem costs more."""
    if other_outcome.allocation.status == "infeasible":
        return "not enough", None
    if (
        min(base_outcome.plan.fraction, other_outcome.plan.fraction) < 1
        or max(base_outcome.plan.gap, other_outcome.plan.gap) > SURE_GAP
    ):
        return "not known", None
    return "costs", other_outcome.plan.total_usd_per_h - base_outcome.plan.total_usd_per_h


def describe(plan: Plan, model: str) -> tuple[str, ...]:
    """`3 x prefill 4xL40S tp1 in us-east`, busiest first."""
    result = []
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        if template.model == model:
            short = template.name.split(": ", 1)[-1]
            result.append((-deployment.count, f"{deployment.count} x {short} in {deployment.region}"))
    return tuple(text for _, text in sorted(result))


def _model(
    factory: TemplateFactory,
    plan: Plan,
    base_outcome: PlanOutcome,
    planner: Planner,
    settings: SolveSettings,
    model: str,
) -> ModelReason:
    main = _main(plan, model)
    barred = () if main is None else tuple(node_count.node for node_count in main.nodes)
    # With less on offer no more is served: where that falls short already, there is nothing to ask.
    ask = bool(barred) and plan.fraction >= 1
    reason = (model, describe(plan, model), usd_per_million_tokens(factory.problem, plan, model), barred)
    pinned = sorted({node for _, node in _pinned_nodes(plan.of_models([model]), settings)} & set(barred))
    other_outcome: PlanOutcome | Unanswered | None = None
    if ask and pinned:
        other_outcome = Unanswered(f"pinned copies need {', '.join(pinned)}")
    elif ask:
        other_outcome = _without_nodes(factory, planner, settings, model, barred)
    if isinstance(other_outcome, Unanswered):
        return ModelReason(*reason, None, (), "not known", unknown=other_outcome.reason)
    answer, extra = ("not asked", None) if other_outcome is None else _change(base_outcome, other_outcome)
    return ModelReason(
        *reason,
        extra,
        () if other_outcome is None or extra is None else describe(other_outcome.plan, model),
        answer,
        ""
        if other_outcome is None or extra is None
        else _unsure(factory.problem, model, base_outcome.plan, other_outcome.plan),
    )


def _main(plan: Plan, model: str) -> Template | None:
    """The template that serves the most of a model."""
    rates: dict[str, float] = {}
    for share in plan.shares:
        if plan.template(share.template).model == model:
            rates[share.template] = rates.get(share.template, 0.0) + share.rate_per_s
    return plan.template(max(rates, key=lambda name: rates[name])) if rates else None


def _unsure(problem: PlanningProblem, model: str, *plans: Plan) -> str:
    """What of two plans cannot be told by their bars, which are taken to be normal and to err apart.

    The GPU with the wider bar is the one to measure: that takes the most of the doubt away.
    """
    sides = []
    for plan in plans:
        main, cost = _main(plan, model), usd_per_million_tokens(problem, plan, model)
        bars = [range_of(prediction) for prediction in plan.predictions if prediction.model == model]
        if main is None or not bars or not cost > 0:
            return ""
        place = main.replicas[0].layout.stages[0].nodes[0]
        dollars = [f"${digits(cost * times)}" for times in (1.0, *bars[0])]
        text = f"{place.node} ({dollars[0]} a million tokens, {dollars[1]} to {dollars[2]})"
        deviation = log(bars[0][1] / bars[0][0]) / BAR_DEVIATIONS
        sides.append((deviation, log(cost), text, problem.by_name[place.node].gpu.name, place.tp))
    if sides[0][3:] == sides[1][3:]:
        return ""
    apart, deviation = sides[1][1] - sides[0][1], hypot(sides[0][0], sides[1][0])
    if not deviation > 0 or erfc(apart / deviation / 2**0.5) / 2 <= DOUBT:
        return ""
    _, _, _, gpu, tp = max(sides)
    told = f"{sides[0][2]} and {sides[1][2]} cannot be told apart by what is known"
    return f"{told}; `potluck profile URL --gpu {gpu} --tp {tp}` on such a node would decide most"


def usd_per_million_tokens(problem: PlanningProblem, plan: Plan, model: str) -> float:
    """What the nodes that serve a model cost per million of its tokens."""
    cost = _usd_per_h(problem, plan, model)
    demand = next(demand for demand in problem.demands if demand.name == model)
    tokens_per_h = demand.tokens_per_s * plan.fraction_of(model) * 3600
    return cost / tokens_per_h * 1e6 if tokens_per_h > 0 else 0.0


def range_of(prediction: Prediction) -> tuple[float, float]:
    """(least, most) of what a model's tokens cost, as a share of what is expected: if its replicas are as fast, or as
    slow, as eight in ten are, so many fewer or more of them do the same.
    """
    middle, fast, slow = prediction.capacity_per_s, prediction.fastest_per_s, prediction.slowest_per_s
    return (middle / fast, middle / slow) if fast > 0 and slow > 0 and middle > 0 else (1.0, 1.0)


def usd_range(problem: PlanningProblem, plan: Plan) -> tuple[float, float]:
    """The same of a whole plan, in USD an hour; models are taken to err alike."""
    costs = [(_usd_per_h(problem, plan, each.model), range_of(each)) for each in plan.predictions]
    return sum(cost * low for cost, (low, _) in costs), sum(cost * high for cost, (_, high) in costs)


def tokens_per_usd(problem: PlanningProblem, plan: Plan, model: str) -> tuple[float, float]:
    """CAUCHY's cost efficiency of a plan: prompt and answer tokens that a dollar buys; 0 where nothing is paid."""
    cost = _usd_per_h(problem, plan, model)
    demand = next(demand for demand in problem.demands if demand.name == model)
    served = plan.fraction_of(model) * 3600 / cost if cost > 0 else 0.0
    prompts = sum(bucket.rate_per_s * bucket.input_tokens for bucket in demand.buckets)
    answers = sum(bucket.rate_per_s * bucket.output_tokens for bucket in demand.buckets)
    return prompts * served, answers * served


def copy_tokens_per_usd(problem: PlanningProblem, plan: Plan, deployment: Deployment) -> tuple[float, float]:
    """The same of one deployment: tokens of the prompts it computes and of the answers it makes, as planned."""
    template = plan.template(deployment.template)
    model_demand = next(
        model_demand for model_demand in problem.demands if model_demand.name == template.model
    )
    prices = {(r.name, o.node): o.price_usd_per_h for r in problem.regions for o in r.offers}
    cost = sum(prices[deployment.region, n.node] * n.count for n in template.nodes) * deployment.count
    prompts = answers = 0.0
    for share in plan.shares:
        if (share.template, share.region) == (deployment.template, deployment.region):
            demand = model_demand.buckets[share.bucket]
            prompts += share.rate_per_s * demand.input_tokens * (share.phase != "decode")
            answers += share.rate_per_s * demand.output_tokens * (share.phase != "prefill")
    return (prompts * 3600 / cost, answers * 3600 / cost) if cost > 0 else (0.0, 0.0)


def tokens_json(problem: PlanningProblem, plan: Plan) -> dict[str, object]:
    """Prompt and answer tokens per dollar: of the whole plan, of each model and of each deployment."""
    models = {each.model: tokens_per_usd(problem, plan, each.model) for each in plan.predictions}
    served = 3600 / plan.total_usd_per_h if plan.total_usd_per_h > 0 else 0.0
    shares = [
        (bucket, plan.fraction_of(demand.name)) for demand in problem.demands for bucket in demand.buckets
    ]
    prompts = sum(d.rate_per_s * d.input_tokens * share for d, share in shares)
    answers = sum(d.rate_per_s * d.output_tokens * share for d, share in shares)
    copies = [(deployment, copy_tokens_per_usd(problem, plan, deployment)) for deployment in plan.deployments]
    return {
        "plan": {"prompt": prompts * served, "answer": answers * served},
        "models": {name: {"prompt": item[0], "answer": item[1]} for name, item in models.items()},
        "deployments": [
            {"template": d.template, "region": d.region, "prompt": item[0], "answer": item[1]}
            for d, item in copies
        ],
    }


def _usd_per_h(problem: PlanningProblem, plan: Plan, model: str) -> float:
    """A model's part of all that is paid, by the prices of its nodes: of reserved nodes and charges each has some."""
    prices = {(r.name, o.node): o.price_usd_per_h for r in problem.regions for o in r.offers}
    rents: dict[str, float] = {}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        copy = sum(prices[deployment.region, n.node] * n.count for n in template.nodes)
        rents[template.model] = rents.get(template.model, 0.0) + copy * deployment.count
    whole = sum(rents.values())
    return plan.total_usd_per_h * rents.get(model, 0.0) / whole if whole > 0 else 0.0


def _without_nodes(
    factory: TemplateFactory, planner: Planner, settings: SolveSettings, model: str, barred: tuple[str, ...]
) -> PlanOutcome | Unanswered:
    problem = factory.problem
    demands = tuple(
        _off(problem, demand, barred) if demand.name == model else demand for demand in problem.demands
    )
    return _planned(planner, replace(factory, problem=replace(problem, demands=demands)), settings)


def _off(problem: PlanningProblem, demand: ModelDemand, barred: tuple[str, ...]) -> ModelDemand:
    allowed = (
        demand.terms.nodes if demand.terms.nodes is not None else tuple(node.name for node in problem.nodes)
    )
    left = tuple(name for name in allowed if name not in barred)
    return replace(demand, terms=replace(demand.terms, nodes=left))


def _nodes(
    factory: TemplateFactory, plan: Plan, base_outcome: PlanOutcome, planner: Planner, settings: SolveSettings
) -> list[NodeValue]:
    problem = factory.problem
    node_supply, rented, pinned = (
        base_outcome.columns.program.fleet,
        plan.nodes,
        _pinned_nodes(plan, settings),
    )

    def changed(region: str, node: str, available: int) -> tuple[Answer, float | None, str]:
        if available < (least := pinned.get((region, node), 0)):
            return "not known", None, f"pinned copies need {least} {node} in {region}"
        there = without_nodes(problem, region, node, available)
        known = TemplateFactory(
            there,
            factory.templates_by_kind,
            rate_caches=factory.rate_caches,
            relaxation_columns=factory.relaxation_columns,
        )
        other_outcome = _planned(planner, known, settings)
        return (
            ("not known", None, other_outcome.reason)
            if isinstance(other_outcome, Unanswered)
            else (*_change(base_outcome, other_outcome), "")
        )

    node_values = []
    for row, region in enumerate(problem.regions):
        for offer in region.offers:
            shadow = float(
                base_outcome.allocation.node_prices_usd_per_h[row, node_supply.nodes.index(offer.node)]
            )
            count = rented.get((region.name, offer.node), 0)
            if not count and shadow <= 1e-9:
                continue
            more: tuple[Answer, float | None] = ("not asked", None)
            fewer, unknown = more, ""
            if plan.fraction >= 1 and problem.pool is None and (count == offer.available or shadow > 1e-9):
                answer, extra, unknown = changed(region.name, offer.node, offer.available + 1)
                more = (answer, None if extra is None else -extra)
            if count and plan.fraction >= 1:
                if _last_node(problem, offer, count):
                    fewer = ("not enough", None)
                else:
                    answer, extra, why = changed(region.name, offer.node, count - 1)
                    fewer = (answer, extra)
                    unknown = "; ".join(dict.fromkeys(filter(None, (unknown, why))))
            known = (offer.node, count, offer.available, offer.price_usd_per_h)
            node_values.append(NodeValue(region.name, *known, *more, *fewer, unknown))
    return node_values


def _last_node(problem: PlanningProblem, offer: NodeOffer, rented: int) -> bool:
    """Whether nothing at all would be left on offer with one fewer than is rented of this one."""
    others = sum(each.available for region in problem.regions for each in region.offers if each is not offer)
    return rented == 1 and others == 0


def why_not(problem: PlanningProblem, model: str) -> str:
    demand = next(model_demand for model_demand in problem.demands if model_demand.name == model)
    fastest: list[tuple[float, float]] = []
    for node in problem.offered:
        most = min(node.gpus, problem.engine.most_tensor or node.gpus)
        for tp in (d for d in range(most, 0, -1) if node.gpus % d == 0):
            layout = single(node.name, tp, demand.model.layer_count)
            try:
                check_tp(demand.model, node, tp)
            except InputError:
                continue
            if fits(demand, layout, problem.by_name):
                timer = layout_timer(demand, layout, problem.by_name)
                prompt, context = demand.buckets[0].new_tokens, float(demand.buckets[0].input_tokens)
                alone = float(prefill_s(timer, prompt)[0]), float(decode_step_s(timer, 1.0, context)[0])
                fastest.append(alone)
                break
    if not fastest:
        return f"{model}: {_fits_nowhere(problem, demand)}"
    ttft_s, tpot_s = min(item[0] for item in fastest), min(item[1] for item in fastest)
    wanted = f"TTFT {demand.slo.ttft_s * 1e3:.4g} ms, TPOT {demand.slo.tpot_s * 1e3:.4g} ms"
    if demand.slo.e2e_s is not None:
        wanted += f", E2E {demand.slo.e2e_s * 1e3:.4g} ms"
    wait, kept = wait_factor(problem.headroom), f"{HANDOVER_SHARE:.0%} of TTFT kept for handing KV over"
    waiting = f"{ttft_s * wait * 1e3:.4g} ms with others before it, as busy as planned, {kept}"
    best = (
        f"{ttft_s * 1e3:.4g} ms to prefill its shortest prompts ({waiting}) and {tpot_s * 1e3:.4g} ms a token"
    )
    reach = f"is out of reach; the fastest node alone takes {best}; allow more, or offer faster nodes"
    return f"{model}: its objective ({wanted}) {reach}"


def _fits_nowhere(problem: PlanningProblem, demand: ModelDemand) -> str:
    engine, layers = problem.engine, demand.model.layer_count
    line = "its weights with one prompt fit on no node on offer"
    if engine.pipelines:
        line += ", nor on a pipeline of them within the objective"
    if engine == UNLIMITED:
        return line
    line += f", as {engine.title} runs it"
    sharded = any(
        fits(demand, single(node.name, largest_tp(demand.model, node), layers), problem.by_name)
        for node in problem.offered
    )
    if engine.most_tensor is not None and sharded:
        line += "; `engine: vllm` shards it over the GPUs of a node"
    elif not engine.pipelines:
        line += "; `engine: vllm` has pipelines"
    return line


TRIES = 3


def planned_rest(
    planner: Planner, factory: TemplateFactory, settings: SolveSettings
) -> tuple[TemplateFactory, PlanOutcome, tuple[str, ...]]:
    """(the workshop with what is planned for, its plan, a line for everything that was left out)."""
    problem, notes = within_context(factory.problem)
    factory = replace(factory, problem=problem)
    outcome = planner(factory, settings)
    for _ in range(TRIES):
        shortfall = outcome.allocation.shortfall
        if shortfall is None or not shortfall.unserved or outcome.plan.fraction > 0:
            break
        rest, more = without_demands(factory.problem, shortfall.unserved)
        if not any(demand.rate_per_s > 0 for demand in rest.demands):
            break
        notes += more
        factory = replace(factory, problem=rest)
        outcome = planner(factory, settings)
    return factory, outcome, notes


def within_context(problem: PlanningProblem) -> tuple[PlanningProblem, tuple[str, ...]]:
    """Without requests that are longer than their model's context: every engine refuses them."""

    def too_long(model_demand: ModelDemand, demand: BucketDemand) -> bool:
        return demand.input_tokens + demand.output_tokens > model_demand.model.max_context_tokens

    rest = _left_out(problem, too_long)
    notes = []
    for previous_demand, next_demand in zip(problem.demands, rest.demands, strict=True):
        if share := _share(previous_demand, next_demand):
            limit = f"{previous_demand.model.max_context_tokens:,} tokens"
            notes.append(
                f"{previous_demand.name}: {share:.2g} % of its requests are longer than its context of {limit}; "
                "they are left out of the plan, and refused when they come"
            )
    return rest, tuple(notes)


def without_demands(
    problem: PlanningProblem, unserved: Collection[str]
) -> tuple[PlanningProblem, tuple[str, ...]]:
    """Without the demands of these names, as `Shortfall.unserved` has them."""

    def named(model_demand: ModelDemand, demand: BucketDemand) -> bool:
        return f"{model_demand.name}/{model_demand.name} up to {demand.longest_tokens} tokens" in unserved

    rest = _left_out(problem, named)
    notes = []
    for previous_demand, next_demand in zip(problem.demands, rest.demands, strict=True):
        if not (share := _share(previous_demand, next_demand)):
            continue
        if next_demand.rate_per_s > 0:
            left = [
                bucket
                for bucket, e in zip(previous_demand.buckets, next_demand.buckets, strict=True)
                if bucket.rate_per_s > e.rate_per_s
            ]
            lengths = ", ".join(f"up to {demand.longest_tokens:,}" for demand in left)
            notes.append(
                f"{previous_demand.name}: no template on offer serves its prompts of {lengths} tokens within the "
                f"objective; {share:.2g} % of its requests are left out"
            )
        else:
            notes.append(f"{why_not(problem, previous_demand.name)}. It is left out, the others are planned")
    return rest, tuple(notes)


def _left_out(
    problem: PlanningProblem, which: Callable[[ModelDemand, BucketDemand], bool]
) -> PlanningProblem:
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


def _share(previous_demand: ModelDemand, next_demand: ModelDemand) -> float:
    """Percent of requests that are gone."""
    asked = previous_demand.rate_per_s
    return (
        100.0 * (1.0 - next_demand.rate_per_s / asked)
        if asked > 0 and next_demand.rate_per_s < asked
        else 0.0
    )


def budget_that_would_do(planner: Planner, factory: TemplateFactory, settings: SolveSettings) -> float | None:
    """USD an hour of a plan for all of the demand if money were no matter; None where other things bind too."""
    if factory.problem.budget_usd_per_h is None:
        return None
    free = replace(factory, problem=replace(factory.problem, budget_usd_per_h=None))
    other_outcome = planner(free, settings)
    return other_outcome.plan.cost_usd_per_h if other_outcome.allocation.found else None
