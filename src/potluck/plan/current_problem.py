"""Planning again while a fleet runs (CORAL 4.3, 5.1): the demand, prices and nodes of now, and what starts cost.

    K = node initialisation time / cluster adjustment interval

so that a copy that is not there yet costs its price times 1 + K for one interval.

What scaling may start beside what a plan deploys is a short list of its strategy's templates, made, timed and ranked
with the plan: those whose nodes are on offer and beside which no other does as much on the same nodes or fewer; for
every set of node types the best, then the others, as the strategy's program weighs a request a second.

The observed pace of a kind of node makes all steps longer alike (observed step = step of the facts x pace). It is
believed within bounds, and only where facts are not nearly right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from math import inf

from potluck.core.errors import CapacityError, UnknownNameError
from potluck.core.scaling.cauchy_scaling import copy_weight
from potluck.core.scaling.copy_capacity import rates_of
from potluck.core.state.actions import SeenLengths
from potluck.core.state.facts import ObservedSpeed
from potluck.core.values.layout import single
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import LengthBin, Region, Traffic
from potluck.perf.memory import weight_bytes
from potluck.perf.startup import DEFAULT_COSTS, StartupCosts, startup_s
from potluck.perf.step_timer import StepTimer, steps
from potluck.perf.timers.profile import Profile, ProfilePoint
from potluck.plan.assemble.term_rows import runs_in
from potluck.plan.problem import ModelDemand, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES
from potluck.plan.strategies.template_factory import TemplateFactory
from potluck.plan.templates.placement_table import Timed
from potluck.plan.timing.replica_rates import layout_timer

INTERVAL_S = 3600.0  # Over which starts are spread: CORAL amortises initialisation over 60 minutes (its 6.1).
DRIFT = 0.2  # Mean lengths that differ by more from the spec's are planned by.
KEPT = 4  # TemplateFactories; prices that come back find their templates made.


Startups = Mapping[str, StartupCosts]
"""What a start costs, by model, where its weights lie in some place of their own."""


def start_share(
    problem: PlanningProblem, interval_s: float = INTERVAL_S, startups: Startups | None = None
) -> float:
    """CORAL's K: the longest start-up of any model over the interval."""
    return longest_start_s(problem, startups) / interval_s


def longest_start_s(problem: PlanningProblem, startups: Startups | None = None) -> float:
    costs = startups or {}
    return max(
        startup_s(weight_bytes(demand.model), costs=costs.get(demand.name, DEFAULT_COSTS)).total_s
        for demand in problem.demands
    )


def problem_now(
    problem: PlanningProblem,
    rates_per_s: Mapping[str, float],
    lengths: Sequence[SeenLengths] = (),
    regions: tuple[Region, ...] | None = None,
    interval_s: float = INTERVAL_S,
    startups: Startups | None = None,
) -> PlanningProblem:
    """A problem for the rates and lengths now seen, at the prices and with the nodes of now; starts cost K."""
    seen = {length.model: length for length in lengths}
    demands = tuple(
        ask_now(demand, rates_per_s.get(demand.name), seen.get(demand.name)) for demand in problem.demands
    )
    regions = problem.regions if regions is None else regions
    if not any(offer.available for region in regions for offer in region.offers):
        raise CapacityError("no region has any node at present")
    share = start_share(problem, interval_s, startups)
    return replace(problem, demands=demands, regions=regions, init_penalty=share)


def ask_now(known_demand: ModelDemand, rate_per_s: float | None, seen: SeenLengths | None) -> ModelDemand:
    """One model's demand at the rate that is seen, and with lengths that are, where they have drifted."""
    rate = known_demand.rate_per_s if rate_per_s is None else rate_per_s
    if seen is not None and drifted(known_demand, seen):
        made = model_demand(
            known_demand.name,
            known_demand.model,
            known_demand.slo,
            _traffic(known_demand, rate, seen),
            known_demand.terms,
        )
        return replace(known_demand, slo=made.slo, buckets=made.buckets)
    if known_demand.rate_per_s <= 0:
        return known_demand
    factor = rate / known_demand.rate_per_s
    buckets = tuple(replace(bucket, rate_per_s=bucket.rate_per_s * factor) for bucket in known_demand.buckets)
    return replace(known_demand, buckets=buckets)


def drifted(known_demand: ModelDemand, seen: SeenLengths) -> bool:
    """Whether requests are so much longer or shorter than the spec has them that plans must follow."""
    count = sum(value for _, value in seen.prompts)
    if count <= 0 or known_demand.rate_per_s <= 0:
        return False
    prompt = sum(tokens * value for tokens, value in seen.prompts) / count
    planned_prompt = (
        sum(bucket.new_tokens * bucket.rate_per_s for bucket in known_demand.buckets)
        / known_demand.rate_per_s
    )
    planned_output = (
        sum(bucket.output_tokens * bucket.rate_per_s for bucket in known_demand.buckets)
        / known_demand.rate_per_s
    )
    off = max(abs(prompt / planned_prompt - 1), abs(seen.output_tokens / planned_output - 1))
    return off > DRIFT


def _traffic(known_demand: ModelDemand, rate_per_s: float, seen: SeenLengths) -> Traffic:
    count = sum(value for _, value in seen.prompts)
    bins = tuple(
        LengthBin(max(1.0, tokens), max(1.0, seen.output_tokens), value / count)
        for tokens, value in seen.prompts
    )
    return Traffic(known_demand.name, rate_per_s, bins)


@dataclass(slots=True)
class TemplateFactories:
    """One for each market and lengths that were seen: templates depend on these, not on rates or how many nodes."""

    _kept: dict[object, TemplateFactory] = field(default_factory=dict)
    _timed: tuple[object, Timed] = field(default_factory=lambda: ((), {}))
    """Rates of pipelines for the lengths last seen."""

    def at(self, problem: PlanningProblem) -> TemplateFactory:
        lengths = tuple(
            (demand.name, bucket.input_tokens, bucket.longest_tokens, bucket.output_tokens, bucket.promised)
            for demand in problem.demands
            for bucket in demand.buckets
        )
        prices = tuple(
            (r.name, o.node, o.price_usd_per_h) for r in problem.regions for o in r.offers if o.available
        )
        if self._timed[0] != lengths:
            self._timed = (lengths, {})
        kept = self._kept.pop((prices, lengths), None)
        template_factory = kept or TemplateFactory(problem, timed_pipelines=self._timed[1])
        self._kept[prices, lengths] = template_factory
        for old in list(self._kept)[:-KEPT]:
            del self._kept[old]
        return replace(template_factory, problem=problem)


MOST = 24  # Templates of a model: all pairs of six node types, and some more.


def with_candidates(factory: TemplateFactory, plan: Plan) -> Plan:
    factory = factory.with_formats_of(plan)
    used = {template.name for template in plan.templates}
    result: list[Template] = []
    for demand in factory.problem.demands:
        strategy = STRATEGIES.get(plan.strategy)
        if strategy is None or strategy.templates is None:
            continue
        made = [item for item in strategy.templates(factory, demand) if item.name not in used]
        result += shortlist(factory, plan.strategy, demand, made)
    return replace(plan, candidates=tuple(result))


def shortlist(
    factory: TemplateFactory, strategy: str, demand: ModelDemand, made: Sequence[Template]
) -> list[Template]:
    """At most MOST of them, the best first, with each set of node types before a second of any."""
    prices = factory.prices
    able = [entry for entry in made if not entry.machines and _on_offer(factory, demand, entry)]
    ranked = sorted(
        _undominated(able), key=lambda each: (_per_request(strategy, demand, each, prices), each.name)
    )
    seen: dict[tuple[tuple[str, ...], str], int] = {}
    order = []
    for place, template in enumerate(ranked):
        kind = (tuple(sorted(template.node_counts)), _phase(template))
        seen[kind] = seen.get(kind, 0) + 1
        order.append((seen[kind] > 1, place, template))
    chosen = [entry for *_, entry in sorted(order, key=lambda item: item[:2])[:MOST]]
    return sorted(chosen, key=ranked.index)


def _on_offer(factory: TemplateFactory, demand: ModelDemand, template: Template) -> bool:
    """Whether some region has nodes enough for a copy, and none has where the model may not run."""
    there = [
        region.name
        for region in factory.problem.regions
        if all(
            (offer := region.offer(node_count.node)) is not None and offer.available >= node_count.count
            for node_count in template.nodes
        )
    ]
    return bool(there) and all(runs_in(demand, template, region) for region in there)


def _undominated(templates: Sequence[Template]) -> list[Template]:
    """Of those on the same node types; a pair of types that prefills the one way seldom does as well the other."""
    ordered = sorted(templates, key=lambda each: sorted(each.node_counts))
    kept: list[Template] = []
    for _, group in groupby(ordered, key=lambda each: sorted(each.node_counts)):
        mine = list(group)
        kept += [
            each
            for each in mine
            if not any(
                _dominates(other_template, each) for other_template in mine if other_template is not each
            )
        ]
    return kept


def _dominates(template: Template, other_template: Template) -> bool:
    """Whether it does at least as much of everything on no more nodes, and one of these is really better."""
    counts, others = template.node_counts, other_template.node_counts
    pairs = [
        (a, b)
        for mine, theirs in zip(template.capacity, other_template.capacity, strict=True)
        for a, b in (
            (mine.closed_per_s, theirs.closed_per_s),
            (mine.prefill_per_s, theirs.prefill_per_s),
            (mine.decode_per_s, theirs.decode_per_s),
        )
    ]
    fewer = all(counts[node] <= others[node] for node in counts)
    if not fewer or any(a < b for a, b in pairs):
        return False
    return counts != others or any(a > b for a, b in pairs) or template.name < other_template.name


def _phase(template: Template) -> str:
    roles = {replica.role for replica in template.replicas}
    return roles.pop() if len(roles) == 1 else "mixed"


def _per_request(
    strategy: str, demand: ModelDemand, template: Template, prices: Mapping[str, float]
) -> float:
    """What the strategy has a request a second cost."""
    rates = rates_of(template, {bucket.bucket: bucket.rate_per_s or 1.0 for bucket in demand.buckets})
    serves = max(rates)
    if serves <= 0:
        return inf
    price = 0.0
    for node_count in template.nodes:
        price += node_count.count * prices.get(node_count.node, inf)
    return copy_weight(strategy, template, price, serves) / serves


ENGINE = "observed"
CHUNKS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
CACHED = (0, 1024, 8192)
BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (64, 512, 4096)
MIXED = ((256, 16), (1024, 64), (2048, 4), (512, 256))


def observed(problem: PlanningProblem, paces: Sequence[ObservedSpeed], day: str) -> PlanningProblem:
    """The problem with the paces that matter; of models and nodes that it does not have, none does."""
    known = {(each.model, each.node) for each in paces if each.matters}
    demands = tuple(
        replace(
            demand,
            profiles=(
                *demand.profiles,
                *(
                    profile_of(problem, demand, observed_speed, day)
                    for observed_speed in paces
                    if observed_speed.matters
                    and observed_speed.model == demand.name
                    and observed_speed.node in problem.by_name
                ),
            ),
        )
        if any(model == demand.name for model, _ in known)
        else demand
        for demand in problem.demands
    )
    return replace(problem, demands=demands)


def profile_of(
    problem: PlanningProblem, demand: ModelDemand, observed_speed: ObservedSpeed, day: str
) -> Profile:
    """Step times of a model on a kind of node, as long as they really are."""
    if observed_speed.node not in problem.by_name:
        raise UnknownNameError("node", observed_speed.node, problem.by_name)
    layout = single(observed_speed.node, observed_speed.tp, len(demand.model.layers))
    timer = layout_timer(demand, layout, problem.by_name)
    node = problem.node(observed_speed.node)
    points = tuple(_points(timer, observed_speed.believed, demand.model.max_context_tokens))
    return Profile(node.gpu.name, demand.model.name, observed_speed.tp, ENGINE, {}, day, points)


def _points(timer: StepTimer, pace: float, most_tokens: int) -> list[ProfilePoint]:
    shapes = [(new, cached, 0, 0) for new, cached in product(CHUNKS, CACHED) if new + cached <= most_tokens]
    for batch, context in product(BATCHES, CONTEXTS):
        shapes.append((0, 0, batch, batch * min(context, most_tokens)))
    for (new, batch), context in product(MIXED, CONTEXTS):
        shapes.append((min(new, most_tokens), 0, batch, batch * min(context, most_tokens)))
    unique = list(dict.fromkeys(shapes))
    taken_s = timer.step_s(steps(*zip(*unique, strict=True)))
    return [ProfilePoint(*shape, float(item) * pace) for shape, item in zip(unique, taken_s, strict=True)]
