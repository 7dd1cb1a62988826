"""All pipelines in a model's libraries, and the choice of those worth timing at given dual prices.

A library has a throughput estimate for every placement in one bucket and one phase (`pipeline`), which is enough to
price it. Only pipelines of negative reduced cost are timed stage by stage and become templates.

    reduced_e = cost_er - h q P_e pi_br        cost: at the dual prices (`copy_costs`)
                                               q: timed over estimated throughput

Libraries underestimate (`timing.stage_rates`), so q is the largest ratio among the timed pipelines. The first library
gives every stage the same time; others give one of several stages more, for pipelines of different nodes. Single
nodes are templates of `homogeneous`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import comb
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.core.values.layout import Layout
from potluck.core.values.plan import BucketCapacity, NodeCount, PlannedReplica, Template
from potluck.core.values.types import NodeType, Role
from potluck.perf.throughput import RequestLengths, best_mixed_pipeline
from potluck.perf.timers.pipeline_timer import PipelineTimer, layout_requests
from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem
from potluck.plan.templates.library import pipeline_libraries
from potluck.plan.templates.pipeline import PipelineLibrary
from potluck.plan.timing.rate_cache import RateCache, RateCaches, RatedLayout, layout_text
from potluck.plan.timing.replica_rates import (
    HANDOVER_SHARE,
    UNPROMISED_TTFT_S,
    inside_server,
    layout_timer,
    useful,
    wait_factor,
)
from potluck.plan.timing.stage_rates import BucketRule, Integers, largest_tp


def aggregated(
    problem: PlanningProblem, demand: ModelDemand, pipelines: Iterable[Template], rate_cache: RateCache
) -> Iterator[Template]:
    """Mixed replicas on the layouts of these pipelines with several stages, with a unique name each."""
    layouts: set[Layout] = set()
    names: set[str] = set()
    for template in pipelines:
        layout = template.replicas[0].layout
        if layout in layouts or len(layout.stages) < 2:
            continue
        layouts.add(layout)
        capacity = rate_cache.rated(
            f"both {layout_text(layout)}", partial(_rated, problem, demand, template)
        ).capacity
        if not useful(capacity):
            continue
        node_list = " + ".join(f"{node_count.count} {node_count.node}" for node_count in template.nodes)
        name = f"{demand.name}: mixed pipeline {node_list}"
        if name in names:
            name += f", {'+'.join(str(stage.layers) for stage in layout.stages)} layers"
        names.add(name)
        yield replace(template, name=name, replicas=(PlannedReplica("mixed", layout),), capacity=capacity)


def _rated(problem: PlanningProblem, demand: ModelDemand, template: Template) -> RatedLayout:
    layout = template.replicas[0].layout
    return RatedLayout(aggregated_capacity(problem, demand, layout), template.confidence)


def aggregated_capacity(
    problem: PlanningProblem, demand: ModelDemand, layout: Layout
) -> tuple[BucketCapacity, ...]:
    """Capacity of a mixed pipeline by bucket; 0 where it cannot meet the SLO."""
    timer = layout_timer(demand, layout, problem.by_name)
    assert isinstance(timer, PipelineTimer)
    return tuple(_bucket(problem, demand, bucket, layout, timer) for bucket in demand.buckets)


def _bucket(
    problem: PlanningProblem,
    demand: ModelDemand,
    bucket: BucketDemand,
    layout: Layout,
    timer: PipelineTimer,
) -> BucketCapacity:
    longest_tokens = bucket.longest_tokens + bucket.output_tokens
    max_requests = layout_requests(demand.model, layout, problem.by_name, longest_tokens)
    slo = demand.slo if bucket.promised else replace(demand.slo, ttft_s=UNPROMISED_TTFT_S)
    lengths = RequestLengths(
        bucket.new_tokens, bucket.cached_tokens, bucket.output_tokens, bucket.longest_tokens
    )
    mixed_pipeline = best_mixed_pipeline(timer, lengths, max_requests, slo, problem.headroom)
    if mixed_pipeline is None:
        return BucketCapacity(bucket.bucket, 0.0, 0.0, 0.0, 0.0, 0.0)
    return BucketCapacity(
        bucket.bucket, 0.0, 0.0, mixed_pipeline.requests_per_s, mixed_pipeline.ttft_s, mixed_pipeline.tpot_s
    )


MAX_NODES = 6  # Nodes of a pipeline in a plan, as in the paper; larger ones seldom pay.
MAX_MULTISETS, MIN_MAX_NODES = 1_500_000, 3
"""Multisets of nodes over all models in the libraries of one bucket: with many types or models, pipelines are limited
to fewer nodes, but never to fewer than MIN_MAX_NODES.
"""
STAGE_TIME_RATIOS = (1.0, 1.25, 1.5, 2.0)
"""Largest time of one of several stages relative to the mean; one library for each ratio."""
Timed = MutableMapping[tuple[str, Role, Layout], Template | None]
"""(model, role, layout) to the timed template; None where it cannot serve. Independent of prices."""
Floats = NDArray[np.float64]
PHASES: tuple[Role, ...] = ("prefill", "decode")
INITIAL_RATIO, MAX_RATIO = 1.05, 1.6
"""q before any pipeline was timed, and its upper bound: a library that is off by more is wrong."""


@dataclass(slots=True, eq=False)
class PlacementTable:
    """The placements of one model as arrays, with a row for each bucket, phase and library."""

    problem: PlanningProblem
    demand: ModelDemand
    uses: NDArray[np.uint8]  # [rows, node types of the problem]
    stages: NDArray[np.integer]
    phase: NDArray[np.integer]
    bucket: NDArray[np.integer]
    per_s: Floats  # Requests/s of that bucket by the library's estimate.
    library: NDArray[np.integer]
    index: NDArray[np.integer]
    libraries: list[PipelineLibrary]
    open: NDArray[np.bool_]  # Rows not timed yet.
    rate_cache: RateCache
    timed: Timed  # Timed placements of all models; extended by `take`.
    taken: dict[tuple[str, Role, Layout], Template] = field(default_factory=dict)
    """Timed placements of this model."""
    ratio: list[float] = field(default_factory=lambda: [INITIAL_RATIO, INITIAL_RATIO])

    @property
    def templates(self) -> list[Template]:
        return list(self.taken.values())

    def take(self, rows: Integers) -> int:
        """Time these rows; the number of new templates."""
        count_before = len(self.taken)
        for row in rows.tolist():
            self.open[row] = False
            role, phase = PHASES[self.phase[row]], int(self.phase[row])
            key = (self.demand.key, role, self.libraries[self.library[row]].placement(int(self.index[row])))
            if key not in self.timed:
                self.timed[key] = timed_template(self.problem, self.demand, role, key[2], self.rate_cache)
            template = self.timed[key]
            if template is None:
                continue
            if key not in self.taken:
                self.taken[key] = self._with_unique_name(template)
            capacity = template.capacity[self.bucket[row]]
            timed_per_s = capacity.prefill_per_s if role == "prefill" else capacity.decode_per_s
            ratio = timed_per_s / max(float(self.per_s[row]), 1e-9)
            self.ratio[phase] = min(max(self.ratio[phase], ratio), MAX_RATIO)
        return len(self.taken) - count_before

    def _with_unique_name(self, template: Template) -> Template:
        """The template, with its layers in the name when another placement of the same nodes has its name."""
        if all(item.name != template.name for item in self.taken.values()):
            return template
        layers = "+".join(str(stage.layers) for stage in template.replicas[0].layout.stages)
        return replace(template, name=f"{template.name}, {layers} layers")

    def cheapest(self, prices: Floats, few: int) -> Integers:
        """The `few` cheapest rows per rate for each bucket and phase, and the cheapest of each single node type.

        Ranked by full capacity, and by the capacity that the demand can use.
        """
        cost = np.maximum(self.uses @ prices, 1e-9)
        demand_rates = np.array([demand.rate_per_s for demand in self.demand.buckets])[self.bucket]
        useful = np.minimum(self.per_s, np.maximum(demand_rates, 1e-9) / self.problem.headroom)
        ranks = [np.where(self.open, -value / cost, 0.0) for value in (self.per_s, useful)]
        chosen = [self._lowest(rank, rank, few, 0.0) for rank in ranks]
        single_type = np.where((self.uses > 0).sum(axis=1) == 1, self.uses.argmax(axis=1), -1)
        for node_type in range(self.uses.shape[1]):
            rank_of_type = np.where(single_type == node_type, ranks[1], 0.0)
            chosen.append(self._lowest(rank_of_type, rank_of_type, 1, 0.0))
        return np.unique(np.concatenate(chosen))

    def named(self, template: str) -> Integers:
        """The rows with the nodes that a pipeline's name lists (`timed_template`)."""
        listed = template.split(" pipeline ")[-1].split(", ")[0].split(" + ")
        counts = {
            node: int(count) for count, _, node in (item.partition(" ") for item in listed) if count.isdigit()
        }
        uses = [counts.get(node.name, 0) for node in self.problem.nodes]
        return np.flatnonzero((self.uses == uses).all(axis=1))

    def worth(
        self,
        problem: PlanningProblem,
        demand: ModelDemand,
        costs: Floats,
        duals: Floats,
        few: int,
        ceiling: float,
    ) -> Integers:
        """At most `few` untimed rows per bucket and phase with a reduced cost below `ceiling`.

        `costs` is [regions, rows], `duals` [2, buckets, regions]. Copies are whole, so rows are ranked by their
        reduced cost when a copy earns no more than the whole demand of its phase. `problem` has the current prices
        and nodes.
        """
        ratio = np.array(self.ratio)[self.phase]
        rates = self.problem.headroom * ratio * self.per_s
        demand_rates = np.array([bucket.rate_per_s for bucket in demand.buckets])
        reduced_cost, rank = np.full(len(self.per_s), np.inf), np.full(len(self.per_s), np.inf)
        for r, placeable in enumerate(self._placeable(problem, demand)):
            cost = costs[r]
            earned = rates * duals[self.phase, self.bucket, r]
            max_earnings = (duals[:, :, r] @ demand_rates)[self.phase]
            reduced_cost = np.minimum(reduced_cost, np.where(placeable, cost - earned, np.inf))
            rank = np.minimum(rank, np.where(placeable, cost - np.minimum(earned, max_earnings), np.inf))
        return self._lowest(np.where(self.open, reduced_cost, np.inf), rank, few, ceiling)

    def _placeable(self, problem: PlanningProblem, demand: ModelDemand) -> list[NDArray[np.bool_]]:
        """For each region, whether it has the nodes of each row, and the terms allow it there."""
        names, terms = [node.name for node in problem.nodes], demand.terms
        allowed = np.ones(len(self.uses), bool)
        if terms.max_nodes is not None:
            allowed &= self.uses.sum(axis=1) <= terms.max_nodes
        if terms.max_stages is not None:
            allowed &= self.stages <= terms.max_stages
        placeable: list[NDArray[np.bool_]] = []
        for region in problem.regions:
            offers = {offer.node: offer.available for offer in region.offers}
            usable = [terms.nodes is None or name in terms.nodes for name in names]
            available = np.array([offers.get(name, 0) for name in names]) * usable * terms.allows(region.name)
            placeable.append(allowed & np.asarray((self.uses <= available).all(axis=1), bool))
        return placeable

    def _lowest(self, value: Floats, rank: Floats, few: int, ceiling: float) -> Integers:
        """The `few` rows of least rank for each bucket and phase, among those with a value below `ceiling`."""
        chosen: list[Integers] = []
        for phase in range(len(PHASES)):
            for bucket in range(len(self.demand.buckets)):
                rows = np.flatnonzero((self.phase == phase) & (self.bucket == bucket) & (value < ceiling))
                order = np.argsort(rank[rows], kind="stable")[:few]
                chosen.append(rows[order])
        return np.concatenate([np.zeros(0, np.int64), *chosen])


def placement_table_of(
    problem: PlanningProblem,
    model_demand: ModelDemand,
    folder: Path | None = None,
    timed: Timed | None = None,
    rate_caches: RateCaches | None = None,
    degree: int | None = None,
    out_of_time: Callable[[], bool] = lambda: False,
) -> PlacementTable:
    """The table of all multi-node pipelines for every bucket with demand; of one tensor-parallel `degree`, or all.

    `out_of_time` is checked before each library and skips the remaining ones.
    """
    libraries: list[PipelineLibrary] = []
    parts: list[tuple[NDArray[np.integer], ...]] = []
    rates: list[Floats] = []
    node_columns = {node.name: column for column, node in enumerate(problem.nodes)}
    for bucket_number, library in _libraries(problem, model_demand, folder, degree, out_of_time):
        node_counts = library.counts
        multi_node = np.flatnonzero(node_counts.sum(axis=1) > 1)
        counts = np.zeros((len(multi_node), len(problem.nodes)), np.uint8)
        counts[:, [node_columns[node.name] for node in library.rates.nodes]] = node_counts[multi_node]
        is_prefill = library.rates.phase == "prefill"
        tokens = demand_tokens(library)
        rows = np.ones(len(multi_node), np.int32)
        stages = library.stages[multi_node].astype(np.int32)
        parts.append(
            (rows * (not is_prefill), rows * bucket_number, rows * len(libraries), multi_node, stages, counts)
        )
        rates.append(library.tokens_per_s[multi_node] / tokens)
        libraries.append(library)
    empty = (*(np.zeros(0, np.int32) for _ in range(5)), np.zeros((0, len(node_columns)), np.uint8))
    columns = [np.concatenate(item) for item in zip(empty, *parts, strict=True)]
    per_s = np.concatenate([np.zeros(0), *rates])
    phase, bucket, library_of, index, stages, uses = columns
    untimed = np.ones(len(per_s), bool)
    timed_placements: Timed = {} if timed is None else timed
    rate_cache = (RateCaches(None) if rate_caches is None else rate_caches).of(problem, model_demand)
    return PlacementTable(
        problem,
        model_demand,
        uses,
        stages,
        phase,
        bucket,
        per_s,
        library_of,
        index,
        libraries,
        untimed,
        rate_cache,
        timed_placements,
    )


def demand_tokens(library: PipelineLibrary) -> int:
    """Prompt or output tokens of one request, by the library's phase."""
    rates = library.rates
    return rates.input_tokens if rates.phase == "prefill" else rates.output_tokens


def _libraries(
    problem: PlanningProblem,
    demand: ModelDemand,
    folder: Path | None,
    degree: int | None,
    out_of_time: Callable[[], bool],
) -> Iterator[tuple[int, PipelineLibrary]]:
    """(bucket, library) for both phases; skips node types or models that exceed the limits of a library."""
    node_type_sets = stage_kinds(problem, demand, degree)
    active_buckets = [bucket for bucket in demand.buckets if bucket.rate_per_s > 0] or demand.buckets[:1]
    wait, ttft_share = wait_factor(problem.headroom), 1.0 - HANDOVER_SHARE
    # The first library of all buckets before any second one, as time may not suffice for all.
    for stage_time_ratio, bucket, nodes in product(STAGE_TIME_RATIOS, active_buckets, node_type_sets):
        cached, promised, attainment = bucket.cached_tokens, bucket.promised, demand.slo.attainment
        rule = BucketRule(
            wait, ttft_share, bucket.longest_tokens, cached, promised, problem.headroom, attainment
        )
        with suppress(InputError):
            for library in pipeline_libraries(
                *(
                    demand.model,
                    nodes,
                    inside_server(demand.slo),
                    bucket.new_tokens,
                    bucket.output_tokens,
                ),
                max_nodes=nodes_at_most(len(nodes), len(problem.demands)),
                rule=replace(rule, uneven=stage_time_ratio),
                folder=folder,
                sure=demand.sure,
                engine=problem.engine,
            ):
                yield bucket.bucket, library
        if out_of_time():
            return


def nodes_at_most(types: int, models: int) -> int:
    """Largest pipelines in nodes for which all multisets can be searched."""
    sizes = range(MAX_NODES, MIN_MAX_NODES, -1)
    return next((n for n in sizes if comb(types + n, n) * models <= MAX_MULTISETS), MIN_MAX_NODES)


def stage_kinds(
    problem: PlanningProblem, demand: ModelDemand, degree: int | None = None
) -> list[tuple[NodeType, ...]]:
    """Sets of node types that one pipeline may combine: all, or those of equal tensor-parallel degree."""
    engine = problem.engine
    if not engine.pipelines:
        return []
    sharded = [(largest_tp(demand.model, node, engine.most_tensor), node) for node in problem.offered]
    # A node with several tensor-parallel groups shares its stage.
    usable = [item for item in sharded if engine.shared_stages or item[0] == item[1].gpus]
    usable = [item for item in usable if degree in (None, item[0])]
    if engine.unlike_degrees:
        return [tuple(node for _, node in usable)] if usable else []
    return [
        tuple(node for tp, node in usable if tp == degree_of_set)
        for degree_of_set in sorted({tp for tp, _ in usable})
    ]


def timed_template(
    problem: PlanningProblem, demand: ModelDemand, phase: Role, layout: Layout, rate_cache: RateCache
) -> Template | None:
    """The template of a placement, timed stage by stage for every bucket; None where it cannot serve."""
    rated_layout = rate_cache.replica(problem, demand, layout, phase)
    if not useful(rated_layout.capacity):
        return None
    gpus: Counter[str] = Counter()
    for stage_node in (node for stage in layout.stages for node in stage.nodes):
        gpus[stage_node.node] += stage_node.tp  # A node with several groups appears several times.
    nodes = tuple(NodeCount(name, -(-gpus[name] // problem.node(name).gpus)) for name in sorted(gpus))
    node_list = " + ".join(f"{node_count.count} {node_count.node}" for node_count in nodes)
    return Template(
        name=f"{demand.name}: {phase} pipeline {node_list}",
        kind="pipeline",
        model=demand.name,
        nodes=nodes,
        replicas=(PlannedReplica(phase, layout),),
        capacity=rated_layout.capacity,
        confidence=rated_layout.confidence,
    )
