"""What all strategies share: the template factory, the settings of a solve, and the outcome of a solve."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from potluck.core.values.model import Format
from potluck.core.values.plan import Deployment, Plan, Template
from potluck.core.values.types import Role
from potluck.plan.allocate.allocation import Allocation
from potluck.plan.assemble.codecs import solve_with_codecs
from potluck.plan.assemble.columns import ProgramColumns, plan_of
from potluck.plan.assemble.even_shares import balance_load
from potluck.plan.assemble.term_rows import suits
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.pool_strategy import ALL_PHASES, machines_key, phases_of, search_groups
from potluck.plan.templates.combo import SHORTLIST, RankedPair, combos, gpu_combos, ranked
from potluck.plan.templates.homogeneous import also_decoding, fewest_gpus, homogeneous
from potluck.plan.templates.pair import pairs
from potluck.plan.templates.placement_table import PlacementTable, Timed, aggregated, placement_table_of
from potluck.plan.templates.runnable import phase_degree, runnable
from potluck.plan.timing.rate_cache import RateCache, RateCaches
from potluck.plan.verify import retimed

if TYPE_CHECKING:
    from potluck.plan.search.search_templates import Estimate
    from potluck.plan.search.tabu import SearchResult
from potluck.plan.allocate.highs import Deadline
from potluck.plan.allocate.program import ColumnKey, Floats, FlowProgram, NodeSupply
from potluck.plan.allocate.relaxation import Duals, Pricer, relax_flow
from potluck.plan.assemble.columns import columns
from potluck.plan.assemble.term_rows import limit_prices, losses_usd_per_h

MIN_LEFT_SHARE = 0.05  # Of the time limit: what `left_s` reports at least, for writing down the answer.
LATE_SHARE = 0.1  # Of the time limit: with less left, no further program is solved.
INITIAL_PIPELINES = 3
"""Pipelines per bucket and phase that are timed before any dual price is known."""
PIPELINES_PER_ROUND = 4
"""Pipelines per model, bucket and phase that are timed in one round of column generation."""
MAX_ROUNDS = 40
VALUE_TOLERANCE = 1e-7  # Relative to the relaxation's value: a smaller reduced cost counts as none.
MIN_SAVING_SHARE = 1e-4  # Of a plan's cost: a smaller saving does not justify timing another pipeline.
TemplatesByModel = Mapping[str, Sequence[Template]]
TEMPLATE_TIME_SHARE = 0.5
"""Share of the time limit for making templates. Kinds not made by then are skipped, except single nodes."""


@dataclass(frozen=True, slots=True)
class SolveSettings:
    """Time limit and gap target of a solve, with the running plan, the pins and the plans to start from."""

    time_limit_s: float = 30.0
    gap_target: float = 1e-4
    running: Plan | None = None
    pins: tuple[Deployment, ...] = ()
    clock: Callable[[], float] = time.process_time
    """Measures the time limit: CPU time, so that the load of the machine does not change the plan."""
    start_s: float | None = None  # When planning began, template making included; None: now.
    start_plans: tuple[Plan, ...] = ()
    """Warm starts: the outcome serves no less than any of them, and costs no more where it serves as much."""
    what_if: bool = False
    """Solve for the whole demand only: no other strategy is compared and no partial plan is made."""
    seed: int = 0  # Of the tabu search on a pool; the integer program needs none.
    estimate: Estimate | None = None
    """Evaluates a pair of a pool's replicas by simulation; None: in closed form."""

    @property
    def started(self) -> SolveSettings:
        return replace(self, start_s=self.clock()) if self.start_s is None else self

    @property
    def left_s(self) -> float:
        """CPU time left of the limit; never less than the share it takes to write down an answer."""
        spent_s = 0.0 if self.start_s is None else self.clock() - self.start_s
        return max(self.time_limit_s - spent_s, MIN_LEFT_SHARE * self.time_limit_s)

    @property
    def is_late(self) -> bool:
        """Whether too little time is left for another solve."""
        return self.start_s is not None and self.clock() - self.start_s > (1 - LATE_SHARE) * self.time_limit_s

    def with_time_share(self, share: float) -> SolveSettings:
        """The same settings, started now, with a share of the time left as their limit."""
        return replace(self, time_limit_s=share * self.left_s, start_s=None).started


@dataclass(frozen=True, slots=True)
class FormatPrice:
    """Cost and served fraction of the plan for one combination of the models' weight formats."""

    formats: tuple[tuple[str, Format], ...]
    served_fraction: float
    usd_per_h: float


@dataclass(frozen=True, slots=True, eq=False)
class PlanOutcome:
    """A plan, the allocation it was made from, and the columns that the allocation chose from."""

    plan: Plan
    allocation: Allocation
    columns: ProgramColumns
    tried: tuple[FormatPrice, ...] = ()
    """Cost of the plan in each combination of weight formats, where the spec allows several."""
    alternatives: tuple[Plan, ...] = ()  # Plans of other strategies over the same columns or a part of them.

    @property
    def weighted_usd_per_h(self) -> float:
        """Cost by which plans are compared: all charges plus the complexity penalty."""
        return self.plan.total_usd_per_h + self.columns.complexity_usd_per_h(self.plan)


@dataclass(slots=True)
class TemplateFactory:
    """Makes the templates of a problem and caches them by kind and model."""

    problem: PlanningProblem
    templates_by_kind: dict[tuple[str, str], list[Template]] = field(default_factory=dict)
    """(kind, key of a model) to templates."""
    report_progress: Callable[[str], None] = lambda _: (
        None
    )  # Receives what is being made, for a progress bar.
    search_results: dict[str, SearchResult] = field(default_factory=dict)
    """Region to the result of the tabu search on its pool."""
    running: tuple[Template, ...] = ()  # Groups of the running plan, offered beside those the search finds.
    timed_pipelines: Timed = field(default_factory=dict)
    """Pipelines whose rates are known for these prompt and output lengths, at any price."""
    by_distance: dict[float, TemplateFactory] = field(default_factory=dict)
    """Longest allowed network distance to the factory of that variant of the problem (`choose_distance`)."""
    placement_tables: dict[str, PlacementTable] = field(default_factory=dict)
    """Key of a model to all its pipelines, timed or not."""
    out_of_time: Callable[[], bool] = lambda: False
    """Checked before each kind of templates is made: true skips the kind."""
    rate_caches: RateCaches = field(default_factory=RateCaches)  # Rates of layouts, also of earlier plans.
    skipped_kinds: set[tuple[str, str]] = field(
        default_factory=set
    )  # (kind, model) skipped for lack of time.
    shortened_strategies: dict[str, str] = field(default_factory=dict)
    """Strategies that ran out of time, and which part of their work was skipped."""
    excluded: frozenset[str] = frozenset()  # Names of templates that must not be chosen.
    relaxation_columns: set[tuple[str, str]] = field(default_factory=set)
    """(template, region) of the columns of the last relaxation: the start of the next one."""

    def with_time_limit(self, settings: SolveSettings, time_s: float) -> TemplateFactory:
        """The same factory, which makes no further kinds after `time_s` from now."""
        end_s = settings.clock() + time_s
        return replace(self, out_of_time=lambda: settings.clock() > end_s)

    def with_formats_of(self, plan: Plan) -> TemplateFactory:
        """The same factory for the problem in which each model has the weight format that the plan chose."""
        return replace(self, problem=self.problem.in_formats(plan.formats))

    @property
    def prices(self) -> dict[str, float]:
        """Lowest price of each node type over the regions that offer it, for comparing cost efficiency."""
        values: dict[str, float] = {}
        for region in self.problem.regions:
            for offer in region.offers:
                if offer.available > 0:
                    values[offer.node] = min(values.get(offer.node, float("inf")), offer.price_usd_per_h)
        return values

    def rate_cache(self, demand: ModelDemand) -> RateCache:
        return self.rate_caches.of(self.problem, demand)

    def homogeneous(self, demand: ModelDemand) -> list[Template]:
        return self._cached(
            "homogeneous", demand, lambda: homogeneous(self.problem, demand, self.rate_cache(demand))
        )

    def mixed(self, demand: ModelDemand) -> list[Template]:
        return [t for t in self.homogeneous(demand) if t.replicas[0].role == "mixed"]

    def data_parallel(self, demand: ModelDemand) -> list[Template]:
        return self._cached(
            "data parallel", demand, lambda: fewest_gpus(self.problem, demand, self.rate_cache(demand))
        )

    def also_decoding(self, demand: ModelDemand) -> list[Template]:
        """Mixed single-node templates that may decode for others too."""
        single = self.homogeneous(demand)
        return self._cached(
            "also decoding",
            demand,
            lambda: also_decoding(self.problem, demand, single, self.rate_cache(demand)),
        )

    def phased(self, demand: ModelDemand) -> list[Template]:
        """Single-node templates that do one phase."""
        return [t for t in self.homogeneous(demand) if t.replicas[0].role != "mixed"]

    def combos(self, demand: ModelDemand) -> list[Template]:
        return self._cached(
            "combo", demand, lambda: combos(self.problem, demand, self.homogeneous(demand), self.prices)
        )

    def ranked(self, demand: ModelDemand) -> list[RankedPair]:
        """Pairs of node types by CAUCHY's equation 15, the most cost-efficient first."""
        return ranked(self.problem, demand, self.homogeneous(demand), self.prices, self.rate_cache(demand))

    def gpu_combos(self, demand: ModelDemand) -> list[Template]:
        """Combos, counted in GPUs, of the pairs that equation 15 shortlists, and aggregated combos of their types."""

        def make() -> list[Template]:
            pairs = self.ranked(demand)[:SHORTLIST]
            same_type = {pair.prefill for pair in pairs if pair.prefill == pair.decode}
            single = [t for t in self.combos(demand) if len(t.nodes) == 1 and t.nodes[0].node in same_type]
            aggregated_combos = [t for t in single if t.replicas[0].role == "mixed"]
            return [*aggregated_combos, *gpu_combos(self.problem, demand, pairs, self.rate_cache(demand))]

        return self._cached("gpu combo", demand, make)

    def pairs(self, demand: ModelDemand) -> list[Template]:
        return self._cached(
            "pair",
            demand,
            lambda: pairs(self.problem, demand, self.homogeneous(demand), self.rate_cache(demand)),
        )

    def pipelines(self, demand: ModelDemand) -> list[Template]:
        """Pipelines timed so far: first the cheapest of each bucket, then those that `grow` adds."""

        def make() -> list[Template]:
            degree = phase_degree(self.problem, demand, self.homogeneous(demand))
            placement_table = placement_table_of(
                self.problem,
                demand,
                timed=self.timed_pipelines,
                rate_caches=self.rate_caches,
                degree=degree,
                out_of_time=self.out_of_time,
            )
            prices = np.array([self.prices.get(node.name, 0.0) for node in self.problem.nodes])
            placement_table.take(placement_table.cheapest(prices, INITIAL_PIPELINES))
            self.placement_tables[demand.key] = placement_table
            return placement_table.templates

        return self._cached("pipeline", demand, make)

    def time_pipeline(self, name: str) -> None:
        """Time the pipeline of this name, however promising its price, so that the program can choose it."""
        for demand in self.problem.demands:
            table = self.placement_tables.get(demand.key)
            if table is not None and " pipeline " in name and name.startswith(f"{demand.name}: "):
                table.take(table.named(name))
                self.templates_by_kind["pipeline", demand.key] = table.templates

    def aggregated(self, demand: ModelDemand) -> list[Template]:
        """Mixed replicas on the pipelines timed so far; made anew when more pipelines are timed."""
        pipelines = self.pipelines(demand)
        return self._cached(
            f"mixed pipeline of {len(pipelines)}",
            demand,
            lambda: list(aggregated(self.problem, demand, pipelines, self.rate_cache(demand))),
        )

    def groups(
        self, demand: ModelDemand, settings: SolveSettings, may_do: tuple[Role, ...] = ALL_PHASES
    ) -> list[Template]:
        """Groups of the pool's machines, each with one role of `may_do`, found by tabu search in each region.

        The first search gets half of the time left. Later ones only answer what-if questions (a machine fewer,
        another engine) and get a tenth.
        """
        phases = phases_of(self.problem.engine, may_do)
        key = f"group of {machines_key(self.problem)} {phases}"
        is_first = not any(
            kind.startswith("group of ") for kind, name in self.templates_by_kind if name == demand.key
        )
        time_share = 0.5 if is_first and not settings.what_if else 0.1

        def make() -> list[Template]:
            groups, search_results = search_groups(
                self.problem, demand, phases, settings.left_s * time_share, settings.seed, settings.estimate
            )
            if may_do == ALL_PHASES or not self.search_results:
                self.search_results.clear()
                self.search_results.update(search_results)
            names = {template.name for template in groups}
            return groups + [t for t in self.running if t.model == demand.name and t.name not in names]

        return self._cached(key, demand, make)

    def _cached(self, kind: str, demand: ModelDemand, make: Callable[[], list[Template]]) -> list[Template]:
        key = (kind, demand.key)
        if key not in self.templates_by_kind and kind != "homogeneous" and self.out_of_time():
            self.skipped_kinds.add(key)
            return []
        if key not in self.templates_by_kind:
            self.skipped_kinds.discard(key)
            self.report_progress(f"{kind.split(' of ')[0]} templates of {demand.name}")
            self.templates_by_kind[key] = runnable(self.problem, demand, make())
            self.rate_caches.keep()
        # Cached templates may come from a problem with more node types than this one.
        offered = self.prices
        templates = [
            template
            for template in self.templates_by_kind[key]
            if template.name not in self.excluded and all(count.node in offered for count in template.nodes)
        ]
        if not demand.terms.asked:
            return templates
        if not any(demand.terms.allows(region.name) for region in self.problem.regions):
            return []
        return [template for template in templates if suits(demand, template)]


Planner = Callable[[TemplateFactory, SolveSettings], PlanOutcome]
TemplateMaker = Callable[[TemplateFactory, ModelDemand], list[Template]]


def solve_over(
    factory: TemplateFactory,
    settings: SolveSettings,
    strategy: str,
    templates: Mapping[str, Sequence[Template]],
) -> PlanOutcome:
    """Solve the integer program over the given templates and turn its allocation into a plan.

    Templates of the running plan are added where the given ones lack them.
    """
    program_columns, allocation = solve_with_codecs(
        factory.problem,
        with_running(factory.problem, templates, settings.running),
        running_plan=settings.running,
        pins=settings.pins,
        starts=settings.start_plans,
        time_limit_s=settings.left_s,
        gap_target=settings.gap_target,
        clock=settings.clock,
        rate_caches=factory.rate_caches,
        in_part=not settings.what_if,
    )
    factory.rate_caches.keep()
    plan = plan_of(program_columns, allocation, strategy)
    has_spares = program_columns.program.guarded or any(
        demand.terms.min_copies for demand in factory.problem.demands
    )
    if has_spares and allocation.found:  # an idle spare copy would be cold when it is needed
        plan = balance_load(factory.problem, plan, settings.time_limit_s, settings.clock)
    return PlanOutcome(plan, allocation, program_columns)


def with_running(
    problem: PlanningProblem, templates: Mapping[str, Sequence[Template]], running_plan: Plan | None
) -> Mapping[str, Sequence[Template]]:
    """The templates plus those of the running plan, timed again for the present demand; without groups.

    Running groups are offered by `TemplateFactory.running` instead.
    """
    if running_plan is None:
        return templates
    deployed = {deployment.template for deployment in running_plan.deployments}
    merged = {model: list(group) for model, group in templates.items()}
    for template in running_plan.templates:
        demand = next(
            (model_demand for model_demand in problem.demands if model_demand.name == template.model), None
        )
        templates_of_model = merged.setdefault(template.model, [])
        is_known = template.name in {item.name for item in templates_of_model}
        all_offered = all(node in problem.by_name for node in template.node_counts)
        if (
            demand is None
            or is_known
            or not all_offered
            or template.kind == "group"
            or template.name not in deployed
        ):
            continue
        if not runnable(problem, demand, [template]):
            continue
        capacity = retimed(problem, demand, template)
        if not any(c.prefill_per_s + c.decode_per_s for c in template.capacity):  # serves whole requests only
            capacity = tuple(replace(each, prefill_per_s=0.0, decode_per_s=0.0) for each in capacity)
        templates_of_model.append(replace(template, capacity=capacity))
    return merged


@dataclass(slots=True)
class ColumnGrowth:
    """How far column generation over pipelines got."""

    rounds: int = 0
    added: int = 0
    complete: bool = False  # Whether no pipeline left untimed can lower the bound.


def grow(
    factory: TemplateFactory,
    settings: SolveSettings,
    others: TemplatesByModel,
    plan_usd_per_h: float | None = None,
    rounds: int = MAX_ROUNDS,
) -> ColumnGrowth:
    """Time the pipelines that could improve the program over `others` and the pipelines timed so far.

    The relaxation's duals price every pipeline of the placement tables; pipelines of negative reduced cost are timed
    and added. When none is left, the bound holds for all pipelines, timed or not. Copies are whole, so with the cost
    of a plan (`plan_usd_per_h`) those below the gap between the plan and the relaxation are added too.
    """
    problem, growth = factory.problem, ColumnGrowth()
    deadline = Deadline(settings.left_s, settings.clock)
    while growth.rounds < rounds and not factory.out_of_time():
        templates = {
            demand.name: [*others.get(demand.name, ()), *factory.pipelines(demand)]
            for demand in problem.demands
        }
        smallest = dict.fromkeys((demand.name for demand in problem.demands), problem.codecs[-1])
        program_columns = columns(
            problem, templates, pins=(), codecs=smallest, rate_caches=factory.rate_caches
        )
        program = program_columns.program
        relaxation = _solve_relaxation(program, deadline, program_columns.keys(factory.relaxation_columns))
        if relaxation is None:
            return growth
        keys, duals, factor, value = relaxation
        factory.relaxation_columns.update(map(program_columns.name, keys))
        ceiling = -VALUE_TOLERANCE * max(abs(value), 1.0)
        # When the served fraction is maximised, cost plays no part: only columns that raise it are added.
        if plan_usd_per_h is not None and factor > 0:
            ceiling = max(plan_usd_per_h * (1 - MIN_SAVING_SHARE) - value, ceiling)
        added = _add_priced_pipelines(factory, program, duals, factor, ceiling)
        growth.rounds += 1
        growth.added += added
        if not added:
            growth.complete = True
            return growth
    return growth


def _solve_relaxation(
    program: FlowProgram, deadline: Deadline, keys: list[ColumnKey]
) -> tuple[list[ColumnKey], Duals, float, float] | None:
    """(columns, duals, cost factor, value) of the relaxation; None where time ran out.

    The cost factor is 1 + K where cost is minimised, and 0 where the served fraction is maximised.
    """
    pricer = Pricer(program)
    start_keys = sorted({*pricer.first_keys(), *keys})
    cheapest = relax_flow(pricer, deadline, at_cost=True, keys=start_keys)
    if cheapest is None:  # usually because not all demand can be met
        largest = relax_flow(pricer, deadline, at_cost=False, keys=start_keys)
        if largest is None or largest.theta < 1 - 1e-6:
            return None if largest is None else (largest.keys, largest.duals, 0.0, largest.value)
        cheapest = relax_flow(pricer, deadline, at_cost=True, keys=largest.keys)
        if cheapest is None:
            return None
    return cheapest.keys, cheapest.duals, 1.0 + program.init_penalty, cheapest.value


def _add_priced_pipelines(
    factory: TemplateFactory, program: FlowProgram, duals: Duals, factor: float, ceiling: float
) -> int:
    """Time the pipelines whose reduced cost may be below `ceiling`; their number."""
    problem, added, first = factory.problem, 0, 0
    for m, demand in enumerate(problem.demands):
        buckets = len(demand.buckets)
        placement_table = factory.placement_tables.get(demand.key)
        if placement_table is not None:
            phase_duals = duals.phase[:, first : first + buckets]
            uses, phase = placement_table.uses, placement_table.phase
            costs = copy_costs(problem, m, uses, phase, program.fleet, duals, factor)
            rows = placement_table.worth(problem, demand, costs, phase_duals, PIPELINES_PER_ROUND, ceiling)
            if placement_table.take(rows):
                added += len(rows)
                factory.templates_by_kind["pipeline", demand.key] = placement_table.templates
            elif len(rows):
                added += len(rows)  # these cannot serve, but the next ones might
        first += buckets
    return added


def copy_costs(
    problem: PlanningProblem,
    m: int,
    uses: NDArray[np.integer],
    phase: NDArray[np.integer],
    node_supply: NodeSupply,
    duals: Duals,
    factor: float,
) -> Floats:
    """[regions, placements]: cost of one copy at the dual prices, before its earnings (see `Pricer.reduced`).

    `uses` is [placements, node types of the problem]. Reserved nodes, limits and spot losses are included.
    """
    columns_of_nodes = [node_supply.nodes.index(node.name) for node in problem.nodes]
    price = node_supply.price_usd_per_h * (factor + duals.budget) + duals.nodes - duals.paid
    per_copy, per_node = limit_prices(problem, node_supply, duals.limits)[m]
    losses = losses_usd_per_h(problem, problem.demands[m], uses, node_supply) * (
        float(factor > 0) + duals.budget
    )
    costs = per_copy.T[:, phase] + losses
    for c, column in enumerate(columns_of_nodes):
        # One node type at a time: as floats the table would be eight times as large.
        costs += (price + per_node)[:, column, None] * uses[:, c]
    return np.asarray(costs, np.float64)
