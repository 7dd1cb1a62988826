"""What strategies share: templates made once per problem, the settings of a solve, and its outcome."""

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
from potluck.plan.assemble.codecs import solved
from potluck.plan.assemble.columns import ProgramColumns, plan_of
from potluck.plan.assemble.even_shares import evened
from potluck.plan.assemble.term_rows import suits
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.pool_strategy import ALL_PHASES, machines_key, phases_of, search_groups
from potluck.plan.templates.combo import SHORTLIST, RankedPair, combos, gpu_combos, ranked
from potluck.plan.templates.homogeneous import also_decoding, fewest_gpus, homogeneous
from potluck.plan.templates.pair import pairs
from potluck.plan.templates.placement_table import PlacementTable, Timed, aggregated, shelf_of
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

LEAST_SHARE = 0.05
LATE_SHARE = 0.1  # Of the time limit, what is left when it is late.
FIRST_FEW = 3  # Pipelines per bucket and phase that are timed before any price is known.
FEW = 4  # Pipelines per model, bucket and phase that join in a round.
ROUNDS = 40
NOUGHT = 1e-7
SAME = 1e-4  # Of a plan's cost: not worth another look.
ByModel = Mapping[str, Sequence[Template]]
MAKING_SHARE = 0.5
"""Of the time limit, when making templates ends; what is not made by then is left out, single nodes apart."""


@dataclass(frozen=True, slots=True)
class SolveSettings:
    """How long to search, how close to the best, and what is there already."""

    time_limit_s: float = 30.0
    gap_target: float = 1e-4
    running: Plan | None = None
    pins: tuple[Deployment, ...] = ()
    clock: Callable[[], float] = time.process_time
    """What the limit is kept by: CPU time, so that a busy machine changes no plan."""
    start_s: float | None = None  # When planning began, templates included; None: it begins now.
    starts: tuple[Plan, ...] = ()
    """Plans to begin from: what is found serves no less than any of them, and for as much costs no more."""
    asking: bool = False
    """A question beside a plan: what all of the demand would cost; no other strategy is tried, no part is planned."""
    seed: int = 0  # Of the search on a pool; the program needs none.
    estimate: Estimate | None = None
    """Tries a pair of replicas of a pool, in place of the closed form; None: the closed form."""

    @property
    def begun(self) -> SolveSettings:
        return replace(self, start_s=self.clock()) if self.start_s is None else self

    @property
    def left_s(self) -> float:
        """Of the limit, at least the little that it takes to write down an answer."""
        spent_s = 0.0 if self.start_s is None else self.clock() - self.start_s
        return max(self.time_limit_s - spent_s, LEAST_SHARE * self.time_limit_s)

    @property
    def late(self) -> bool:
        """Whether there is no time for another question."""
        return self.start_s is not None and self.clock() - self.start_s > (1 - LATE_SHARE) * self.time_limit_s

    def within(self, share: float) -> SolveSettings:
        """A part of what is left, for a question of its own."""
        return replace(self, time_limit_s=share * self.left_s, start_s=None).begun


@dataclass(frozen=True, slots=True)
class FormatPrice:
    formats: tuple[tuple[str, Format], ...]
    served_fraction: float
    usd_per_h: float


@dataclass(frozen=True, slots=True, eq=False)
class PlanOutcome:
    """A plan, the allocation behind it and the columns it chose from."""

    plan: Plan
    allocation: Allocation
    columns: ProgramColumns
    tried: tuple[FormatPrice, ...] = ()
    """What it would be in each combination of formats, where there was a choice."""
    alternatives: tuple[Plan, ...] = ()  # Plans that others made of the same columns, or of some of them.

    @property
    def weighed_usd_per_h(self) -> float:
        """What plans are compared by: the cost, and what moving parts count for."""
        return self.plan.total_usd_per_h + self.columns.parts_usd_per_h(self.plan)


@dataclass(slots=True)
class TemplateFactory:
    """Makes a problem's templates, each kind once, whoever asks for them."""

    problem: PlanningProblem
    made: dict[tuple[str, str], list[Template]] = field(default_factory=dict)
    """(kind, key of a model) to templates."""
    said: Callable[[str], None] = lambda _: None  # Told what is being made, for a progress bar.
    searched: dict[str, SearchResult] = field(default_factory=dict)
    """Region to what the search of its pool found."""
    running: tuple[Template, ...] = ()  # Groups that run already, to be chosen beside those that are found.
    timed: Timed = field(default_factory=dict)
    """Pipelines whose rates are known for these lengths, whatever they cost."""
    near: dict[float, TemplateFactory] = field(default_factory=dict)
    """How far requests may travel to the factory for that (`near_users`)."""
    shelves: dict[str, PlacementTable] = field(default_factory=dict)
    """Key of a model to all its pipelines, also those that nobody has asked for."""
    enough: Callable[[], bool] = lambda: False
    """Asked before a kind of templates is made: whether there is no time for it."""
    books: RateCaches = field(default_factory=RateCaches)  # What layouts were timed to do, here and before.
    left_out: set[tuple[str, str]] = field(default_factory=set)  # (kind, model) for which there was no time.
    cut_short: dict[str, str] = field(default_factory=dict)
    """Strategies for which there was not all the time they would take, and what was left out, in words."""
    without: frozenset[str] = frozenset()  # Names of templates that are not to be chosen.
    grown: set[tuple[str, str]] = field(default_factory=set)
    """(template, region) of the columns that relaxations ended with: where the next one begins."""

    def within(self, settings: SolveSettings, time_s: float) -> TemplateFactory:
        """The same factory, which makes nothing more once so much time is gone from now on."""
        end_s = settings.clock() + time_s
        return replace(self, enough=lambda: settings.clock() > end_s)

    def settled(self, plan: Plan) -> TemplateFactory:
        """The same factory for a problem in which models have the formats of a plan."""
        return replace(self, problem=self.problem.in_formats(plan.formats))

    @property
    def prices(self) -> dict[str, float]:
        """The lowest price of each node type over regions that have some: what efficiency is judged by."""
        values: dict[str, float] = {}
        for region in self.problem.regions:
            for offer in region.offers:
                if offer.available > 0:
                    values[offer.node] = min(values.get(offer.node, float("inf")), offer.price_usd_per_h)
        return values

    def book(self, demand: ModelDemand) -> RateCache:
        return self.books.of(self.problem, demand)

    def homogeneous(self, demand: ModelDemand) -> list[Template]:
        return self._once("homogeneous", demand, lambda: homogeneous(self.problem, demand, self.book(demand)))

    def mixed(self, demand: ModelDemand) -> list[Template]:
        return [t for t in self.homogeneous(demand) if t.replicas[0].role == "mixed"]

    def data_parallel(self, demand: ModelDemand) -> list[Template]:
        return self._once(
            "data parallel", demand, lambda: fewest_gpus(self.problem, demand, self.book(demand))
        )

    def also_decoding(self, demand: ModelDemand) -> list[Template]:
        """Mixed single-node templates that may decode for others too."""
        single = self.homogeneous(demand)
        return self._once(
            "also decoding", demand, lambda: also_decoding(self.problem, demand, single, self.book(demand))
        )

    def phased(self, demand: ModelDemand) -> list[Template]:
        """Single-node templates that do one phase."""
        return [t for t in self.homogeneous(demand) if t.replicas[0].role != "mixed"]

    def combos(self, demand: ModelDemand) -> list[Template]:
        return self._once(
            "combo", demand, lambda: combos(self.problem, demand, self.homogeneous(demand), self.prices)
        )

    def ranked(self, demand: ModelDemand) -> list[RankedPair]:
        """Pairs of node types by CAUCHY's equation 15, the most cost-efficient first."""
        return ranked(self.problem, demand, self.homogeneous(demand), self.prices, self.book(demand))

    def gpu_combos(self, demand: ModelDemand) -> list[Template]:
        """Combos of the pairs that equation 15 shortlists, counted in GPUs; and aggregated ones of their types."""

        def make() -> list[Template]:
            pairs = self.ranked(demand)[:SHORTLIST]
            alike = {pair.prefill for pair in pairs if pair.prefill == pair.decode}
            alone = [t for t in self.combos(demand) if len(t.nodes) == 1 and t.nodes[0].node in alike]
            alone = [t for t in alone if t.replicas[0].role == "mixed"]
            return [*alone, *gpu_combos(self.problem, demand, pairs, self.book(demand))]

        return self._once("gpu combo", demand, make)

    def pairs(self, demand: ModelDemand) -> list[Template]:
        return self._once(
            "pair", demand, lambda: pairs(self.problem, demand, self.homogeneous(demand), self.book(demand))
        )

    def pipelines(self, demand: ModelDemand) -> list[Template]:
        """Those timed so far: at first the cheapest of each bucket, then what the program asks for (`grow`)."""

        def make() -> list[Template]:
            degree = phase_degree(self.problem, demand, self.homogeneous(demand))
            placement_table = shelf_of(
                self.problem,
                demand,
                timed=self.timed,
                rate_caches=self.books,
                degree=degree,
                enough=self.enough,
            )
            prices = np.array([self.prices.get(node.name, 0.0) for node in self.problem.nodes])
            placement_table.take(placement_table.cheapest(prices, FIRST_FEW))
            self.shelves[demand.key] = placement_table
            return placement_table.templates

        return self._once("pipeline", demand, make)

    def time_pipeline(self, name: str) -> None:
        """One of that name is among the pipelines from now on, whether or not it seems to be worth it."""
        for demand in self.problem.asks:
            table = self.shelves.get(demand.key)
            if table is not None and " pipeline " in name and name.startswith(f"{demand.name}: "):
                table.take(table.named(name))
                self.made["pipeline", demand.key] = table.templates

    def aggregated(self, demand: ModelDemand) -> list[Template]:
        """Of the pipelines timed so far, again when there are more."""
        pipelines = self.pipelines(demand)
        return self._once(
            f"mixed pipeline of {len(pipelines)}",
            demand,
            lambda: list(aggregated(self.problem, demand, pipelines, self.book(demand))),
        )

    def groups(
        self, demand: ModelDemand, settings: SolveSettings, may_do: tuple[Role, ...] = ALL_PHASES
    ) -> list[Template]:
        """Groups of the pool's machines that do one of some phases each, found by search in each region.

        The first search takes half of the time there is. Others answer what it would mean to lack a machine or two,
        or to have another engine, and are short.
        """
        phases = phases_of(self.problem.engine, may_do)
        key = f"group of {machines_key(self.problem)} {phases}"
        first = not any(kind.startswith("group of ") for kind, name in self.made if name == demand.key)
        share = 0.5 if first and not settings.asking else 0.1

        def make() -> list[Template]:
            made, search_results = search_groups(
                self.problem, demand, phases, settings.left_s * share, settings.seed, settings.estimate
            )
            if may_do == ALL_PHASES or not self.searched:
                self.searched.clear()
                self.searched.update(search_results)
            known = {template.name for template in made}
            return made + [t for t in self.running if t.model == demand.name and t.name not in known]

        return self._once(key, demand, make)

    def _once(self, kind: str, demand: ModelDemand, make: Callable[[], list[Template]]) -> list[Template]:
        key = (kind, demand.key)
        if key not in self.made and kind != "homogeneous" and self.enough():
            self.left_out.add(key)
            return []
        if key not in self.made:
            self.left_out.discard(key)
            self.said(f"{kind.split(' of ')[0]} templates of {demand.name}")
            self.made[key] = runnable(self.problem, demand, make())
            self.books.keep()
        # They may have been made for a problem that had more node types than this one.
        here = self.prices
        once = [each for each in self.made[key] if all(count.node in here for count in each.nodes)]
        once = [each for each in once if each.name not in self.without]
        if not demand.terms.asked:
            return once
        somewhere = any(demand.terms.allows(region.name) for region in self.problem.regions)
        return [template for template in once if somewhere and suits(demand, template)]


Planner = Callable[[TemplateFactory, SolveSettings], PlanOutcome]
Kind = Callable[[TemplateFactory, ModelDemand], list[Template]]


def allocated(
    factory: TemplateFactory,
    settings: SolveSettings,
    strategy: str,
    templates: Mapping[str, Sequence[Template]],
) -> PlanOutcome:
    """Solve the program over some templates and turn the answer into a plan.

    What runs already stays to be chosen, also where it is no longer among what is made.
    """
    program_columns, allocation = solved(
        factory.problem,
        with_running(factory.problem, templates, settings.running),
        running_plan=settings.running,
        pins=settings.pins,
        starts=settings.starts,
        time_limit_s=settings.left_s,
        gap_target=settings.gap_target,
        clock=settings.clock,
        rate_caches=factory.books,
        in_part=not settings.asking,
    )
    factory.books.keep()
    plan = plan_of(program_columns, allocation, strategy)
    spare = program_columns.program.guarded or any(demand.terms.min_copies for demand in factory.problem.asks)
    if spare and allocation.found:  # a spare copy that never works would be cold when it is needed
        plan = evened(factory.problem, plan, settings.time_limit_s, settings.clock)
    return PlanOutcome(plan, allocation, program_columns)


def with_running(
    problem: PlanningProblem, templates: Mapping[str, Sequence[Template]], running_plan: Plan | None
) -> Mapping[str, Sequence[Template]]:
    """Templates with those that run beside them, timed for the demand there is now; groups have their own way."""
    if running_plan is None:
        return templates
    deployed = {deployment.template for deployment in running_plan.deployments}
    merged = {model: list(group) for model, group in templates.items()}
    for template in running_plan.templates:
        demand = next(
            (model_demand for model_demand in problem.asks if model_demand.name == template.model), None
        )
        mine = merged.setdefault(template.model, [])
        known = template.name in {item.name for item in mine}
        there = all(node in problem.by_name for node in template.node_counts)
        if demand is None or known or not there or template.kind == "group" or template.name not in deployed:
            continue
        if not runnable(problem, demand, [template]):
            continue
        capacity = retimed(problem, demand, template)
        if not any(c.prefill_per_s + c.decode_per_s for c in template.capacity):  # it offers no phase alone
            capacity = tuple(replace(each, prefill_per_s=0.0, decode_per_s=0.0) for each in capacity)
        mine.append(replace(template, capacity=capacity))
    return merged


@dataclass(slots=True)
class ColumnGrowth:
    rounds: int = 0
    added: int = 0
    complete: bool = False  # Whether no pipeline that was left would lower the bound.


def grow(
    factory: TemplateFactory,
    settings: SolveSettings,
    others: ByModel,
    plan_usd_per_h: float | None = None,
    rounds: int = ROUNDS,
) -> ColumnGrowth:
    """Time what the program over `others` and the pipelines so far asks for; with a plan, what might undercut it.

    The relaxation's duals price every pipeline of the libraries, and those that might earn more than they cost are
    timed and join. When none is left, its bound holds for all pipelines, timed or not. Copies are whole, so once a
    plan is known those join too that lose less than what lies between it and the relaxation.
    """
    problem, done = factory.problem, ColumnGrowth()
    deadline = Deadline(settings.left_s, settings.clock)
    while done.rounds < rounds and not factory.enough():
        templates = {
            demand.name: [*others.get(demand.name, ()), *factory.pipelines(demand)] for demand in problem.asks
        }
        smallest = dict.fromkeys((demand.name for demand in problem.asks), problem.codecs[-1])
        wide = columns(problem, templates, pins=(), codecs=smallest, rate_caches=factory.books)
        program = wide.program
        relaxed = _relaxed(program, deadline, wide.keys(factory.grown))
        if relaxed is None:
            return done
        keys, duals, factor, value = relaxed
        factory.grown.update(map(wide.name, keys))
        ceiling = -NOUGHT * max(abs(value), 1.0)
        # Maximising the fraction, a dollar means nothing: only those that would raise it join.
        if plan_usd_per_h is not None and factor > 0:
            ceiling = max(plan_usd_per_h * (1 - SAME) - value, ceiling)
        added = _taken(factory, program, duals, factor, ceiling)
        done.rounds += 1
        done.added += added
        if not added:
            done.complete = True
            return done
    return done


def _relaxed(
    program: FlowProgram, deadline: Deadline, keys: list[ColumnKey]
) -> tuple[list[ColumnKey], Duals, float, float] | None:
    """Columns, duals, what a dollar counts and the value of the relaxation; None where there was no time."""
    pricer = Pricer(program)
    known = sorted({*pricer.first_keys(), *keys})
    least = relax_flow(pricer, deadline, at_cost=True, keys=known)
    if least is None:  # as a rule not all demand can be met
        most = relax_flow(pricer, deadline, at_cost=False, keys=known)
        if most is None or most.theta < 1 - 1e-6:
            return None if most is None else (most.keys, most.duals, 0.0, most.value)
        least = relax_flow(pricer, deadline, at_cost=True, keys=most.keys)
        if least is None:
            return None
    return least.keys, least.duals, 1.0 + program.init_penalty, least.value


def _taken(
    factory: TemplateFactory, program: FlowProgram, duals: Duals, factor: float, ceiling: float
) -> int:
    problem, added, first = factory.problem, 0, 0
    for m, demand in enumerate(problem.asks):
        buckets = len(demand.demands)
        placement_table = factory.shelves.get(demand.key)
        if placement_table is not None:
            mine = duals.phase[:, first : first + buckets]
            uses, phase = placement_table.uses, placement_table.phase
            costs = copy_costs(problem, m, uses, phase, program.fleet, duals, factor)
            rows = placement_table.worth(problem, demand, costs, mine, FEW, ceiling)
            if placement_table.take(rows):
                added += len(rows)
                factory.made["pipeline", demand.key] = placement_table.templates
            elif len(rows):
                added += len(rows)  # they can do nothing, but the next ones might
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
    """[regions, placements]: what a copy costs at these prices, before what it earns, as `Pricer.reduced` has it.

    `uses` is [placements, node types of the problem]: reserved nodes, limits and losses of spot nodes count.
    """
    places = [node_supply.nodes.index(node.name) for node in problem.nodes]
    price = node_supply.price_usd_per_h * (factor + duals.budget) + duals.nodes - duals.paid
    per_copy, per_node = limit_prices(problem, node_supply, duals.limits)[m]
    losses = losses_usd_per_h(problem, problem.asks[m], uses, node_supply) * (
        float(factor > 0) + duals.budget
    )
    costs = per_copy.T[:, phase] + losses
    for c, place in enumerate(
        places
    ):  # one type at a time: as floats the table would be eight times as large
        costs += (price + per_node)[:, place, None] * uses[:, c]
    return np.asarray(costs, np.float64)
