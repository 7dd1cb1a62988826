"""The planning problem of a running fleet (CORAL 4.3, 5.1): current demand, prices, nodes, and the cost of starts.

    K = node initialisation time / cluster adjustment interval

so that a copy that is not running yet costs its price times 1 + K for one interval.

The templates that scaling may start beside the deployed ones are a short list of the strategy's: those with nodes on
offer that no other template dominates on the same or fewer nodes. The best of each set of node types come first,
ranked by the cost of 1 request/s as the strategy's program weights it.

The observed speed of a node type scales all its steps by one factor (observed step = modelled step x pace). It is
bounded, and applied only where the model is clearly off.
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

INTERVAL_S = 3600.0  # CORAL amortises initialisation over 60 minutes (its 6.1).
MIN_LENGTH_DRIFT = 0.2  # Relative change of mean lengths from which observed lengths replace the spec's.
MAX_FACTORIES = 4  # Template factories kept, so that prices which return find their templates made.


Startups = Mapping[str, StartupCosts]
"""Start-up costs by model, for models with their own weight storage."""


def start_share(
    problem: PlanningProblem, interval_s: float = INTERVAL_S, startups: Startups | None = None
) -> float:
    """CORAL's K: the longest start-up of any model over the interval."""
    return longest_start_s(problem, startups) / interval_s


def longest_start_s(problem: PlanningProblem, startups: Startups | None = None) -> float:
    """Seconds of the longest start-up of any model."""
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
    """The problem with observed rates and lengths, current prices and nodes, and the start-up penalty K."""
    lengths_by_model = {length.model: length for length in lengths}
    demands = tuple(
        demand_now(demand, rates_per_s.get(demand.name), lengths_by_model.get(demand.name))
        for demand in problem.demands
    )
    regions = problem.regions if regions is None else regions
    if not any(offer.available for region in regions for offer in region.offers):
        raise CapacityError("no region has any node at present")
    start_penalty = start_share(problem, interval_s, startups)
    return replace(problem, demands=demands, regions=regions, init_penalty=start_penalty)


def demand_now(known_demand: ModelDemand, rate_per_s: float | None, seen: SeenLengths | None) -> ModelDemand:
    """A model's demand at the observed rate, and with observed lengths where they have drifted."""
    rate = known_demand.rate_per_s if rate_per_s is None else rate_per_s
    if seen is not None and drifted(known_demand, seen):
        observed_demand = model_demand(
            known_demand.name,
            known_demand.model,
            known_demand.slo,
            _traffic(known_demand, rate, seen),
            known_demand.terms,
        )
        return replace(known_demand, slo=observed_demand.slo, buckets=observed_demand.buckets)
    if known_demand.rate_per_s <= 0:
        return known_demand
    factor = rate / known_demand.rate_per_s
    buckets = tuple(replace(bucket, rate_per_s=bucket.rate_per_s * factor) for bucket in known_demand.buckets)
    return replace(known_demand, buckets=buckets)


def drifted(known_demand: ModelDemand, seen: SeenLengths) -> bool:
    """Whether observed mean lengths differ from the planned ones by more than MIN_LENGTH_DRIFT."""
    count = sum(value for _, value in seen.prompts)
    if count <= 0 or known_demand.rate_per_s <= 0:
        return False
    mean_prompt = sum(tokens * value for tokens, value in seen.prompts) / count
    planned_prompt = (
        sum(bucket.new_tokens * bucket.rate_per_s for bucket in known_demand.buckets)
        / known_demand.rate_per_s
    )
    planned_output = (
        sum(bucket.output_tokens * bucket.rate_per_s for bucket in known_demand.buckets)
        / known_demand.rate_per_s
    )
    drift = max(abs(mean_prompt / planned_prompt - 1), abs(seen.output_tokens / planned_output - 1))
    return drift > MIN_LENGTH_DRIFT


def _traffic(known_demand: ModelDemand, rate_per_s: float, seen: SeenLengths) -> Traffic:
    count = sum(value for _, value in seen.prompts)
    bins = tuple(
        LengthBin(max(1.0, tokens), max(1.0, seen.output_tokens), value / count)
        for tokens, value in seen.prompts
    )
    return Traffic(known_demand.name, rate_per_s, bins)


@dataclass(slots=True)
class TemplateFactories:
    """Template factories by prices and lengths: templates depend on these, not on rates or node counts."""

    _factories: dict[object, TemplateFactory] = field(default_factory=dict)
    _timed: tuple[object, Timed] = field(default_factory=lambda: ((), {}))
    """(lengths, rates of timed pipelines) for the last lengths."""

    def at(self, problem: PlanningProblem) -> TemplateFactory:
        """The factory for a problem, with the templates made before at the same prices and lengths."""
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
        cached = self._factories.pop((prices, lengths), None)
        template_factory = cached or TemplateFactory(problem, timed_pipelines=self._timed[1])
        self._factories[prices, lengths] = template_factory
        for oldest in list(self._factories)[:-MAX_FACTORIES]:
            del self._factories[oldest]
        return replace(template_factory, problem=problem)


MAX_CANDIDATES = 24  # Templates of a model: all pairs of six node types, and some more.


def with_candidates(factory: TemplateFactory, plan: Plan) -> Plan:
    """The plan with the templates that scaling may start beside its own."""
    factory = factory.with_formats_of(plan)
    planned_names = {template.name for template in plan.templates}
    candidates: list[Template] = []
    for demand in factory.problem.demands:
        strategy = STRATEGIES.get(plan.strategy)
        if strategy is None or strategy.templates is None:
            continue
        templates = [
            template for template in strategy.templates(factory, demand) if template.name not in planned_names
        ]
        candidates += shortlist(factory, plan.strategy, demand, templates)
    return replace(plan, candidates=tuple(candidates))


def shortlist(
    factory: TemplateFactory, strategy: str, demand: ModelDemand, templates: Sequence[Template]
) -> list[Template]:
    """At most MAX_CANDIDATES templates, best first; the best of each set of node types before any second one."""
    prices = factory.prices
    offered = [
        template for template in templates if not template.machines and _on_offer(factory, demand, template)
    ]
    ranked = sorted(
        _undominated(offered), key=lambda t: (_usd_per_request_rate(strategy, demand, t, prices), t.name)
    )
    count_by_kind: dict[tuple[tuple[str, ...], str], int] = {}
    ranking = []
    for rank, template in enumerate(ranked):
        kind = (tuple(sorted(template.node_counts)), _phase(template))
        count_by_kind[kind] = count_by_kind.get(kind, 0) + 1
        ranking.append((count_by_kind[kind] > 1, rank, template))
    chosen = [template for *_, template in sorted(ranking, key=lambda item: item[:2])[:MAX_CANDIDATES]]
    return sorted(chosen, key=ranked.index)


def _on_offer(factory: TemplateFactory, demand: ModelDemand, template: Template) -> bool:
    """Whether some region has enough nodes for a copy, and the model may run in all such regions."""
    regions = [
        region.name
        for region in factory.problem.regions
        if all(
            (offer := region.offer(node_count.node)) is not None and offer.available >= node_count.count
            for node_count in template.nodes
        )
    ]
    return bool(regions) and all(runs_in(demand, template, region) for region in regions)


def _undominated(templates: Sequence[Template]) -> list[Template]:
    """Templates that no other one on the same node types dominates."""
    ordered = sorted(templates, key=lambda template: sorted(template.node_counts))
    undominated: list[Template] = []
    for _, group in groupby(ordered, key=lambda template: sorted(template.node_counts)):
        same_types = list(group)
        undominated += [
            template
            for template in same_types
            if not any(
                _dominates(other_template, template)
                for other_template in same_types
                if other_template is not template
            )
        ]
    return undominated


def _dominates(template: Template, other_template: Template) -> bool:
    """Whether `template` serves no less of anything on no more nodes, and is better in at least one."""
    counts, others = template.node_counts, other_template.node_counts
    pairs = [
        (a, b)
        for own, other in zip(template.capacity, other_template.capacity, strict=True)
        for a, b in (
            (own.closed_per_s, other.closed_per_s),
            (own.prefill_per_s, other.prefill_per_s),
            (own.decode_per_s, other.decode_per_s),
        )
    ]
    fewer = all(counts[node] <= others[node] for node in counts)
    if not fewer or any(a < b for a, b in pairs):
        return False
    return counts != others or any(a > b for a, b in pairs) or template.name < other_template.name


def _phase(template: Template) -> str:
    roles = {replica.role for replica in template.replicas}
    return roles.pop() if len(roles) == 1 else "mixed"


def _usd_per_request_rate(
    strategy: str, demand: ModelDemand, template: Template, prices: Mapping[str, float]
) -> float:
    """Cost of 1 request/s as the strategy's program weights it."""
    rates = rates_of(template, {bucket.bucket: bucket.rate_per_s or 1.0 for bucket in demand.buckets})
    largest_rate = max(rates)
    if largest_rate <= 0:
        return inf
    usd_per_h = 0.0
    for node_count in template.nodes:
        usd_per_h += node_count.count * prices.get(node_count.node, inf)
    return copy_weight(strategy, template, usd_per_h, largest_rate) / largest_rate


OBSERVED_ENGINE = "observed"
CHUNKS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
CACHED = (0, 1024, 8192)
BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (64, 512, 4096)
MIXED = ((256, 16), (1024, 64), (2048, 4), (512, 256))


def observed(problem: PlanningProblem, paces: Sequence[ObservedSpeed], day: str) -> PlanningProblem:
    """The problem with profiles for the observed speeds that differ clearly from the model's."""
    relevant_models = {speed.model for speed in paces if speed.matters}
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
        if demand.name in relevant_models
        else demand
        for demand in problem.demands
    )
    return replace(problem, demands=demands)


def profile_of(
    problem: PlanningProblem, demand: ModelDemand, observed_speed: ObservedSpeed, day: str
) -> Profile:
    """Step times of a model on a node type, scaled to the observed speed."""
    if observed_speed.node not in problem.by_name:
        raise UnknownNameError("node", observed_speed.node, problem.by_name)
    layout = single(observed_speed.node, observed_speed.tp, len(demand.model.layers))
    timer = layout_timer(demand, layout, problem.by_name)
    node = problem.node(observed_speed.node)
    points = tuple(_points(timer, observed_speed.believed, demand.model.max_context_tokens))
    return Profile(node.gpu.name, demand.model.name, observed_speed.tp, OBSERVED_ENGINE, {}, day, points)


def _points(timer: StepTimer, pace: float, max_tokens: int) -> list[ProfilePoint]:
    """Step times of typical steps, each scaled by `pace`."""
    shapes = [(new, cached, 0, 0) for new, cached in product(CHUNKS, CACHED) if new + cached <= max_tokens]
    for batch, context in product(BATCHES, CONTEXTS):
        shapes.append((0, 0, batch, batch * min(context, max_tokens)))
    for (new, batch), context in product(MIXED, CONTEXTS):
        shapes.append((min(new, max_tokens), 0, batch, batch * min(context, max_tokens)))
    unique = list(dict.fromkeys(shapes))
    step_s = timer.step_s(steps(*zip(*unique, strict=True)))
    return [ProfilePoint(*shape, float(time_s) * pace) for shape, time_s in zip(unique, step_s, strict=True)]
