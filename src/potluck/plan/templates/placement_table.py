"""All pipelines that a model's libraries hold, and which of them are worth timing at given prices.

A library says of every placement what it does in one bucket of lengths and one phase (`pipeline`). That is enough to
price it; only those that might earn more than they cost are timed stage by stage, and become templates.

    reduced_e = cost_er - h q P_e pi_br        cost: its nodes and all that is asked (`grow`)
                                               q: how much better pipelines prove than libraries say

Libraries are on the safe side (`timing.stage_rates`), so q is the largest ratio seen among those that were timed. The
first library gives every stage the same time; others give each of several stages more, for pipelines of unlike nodes.
Single nodes are left to `homogeneous`.
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
    """Of each placement of several stages the same nodes doing both; one name for one placement."""
    seen: set[Layout] = set()
    names: set[str] = set()
    for template in pipelines:
        layout = template.replicas[0].layout
        if layout in seen or len(layout.stages) < 2:
            continue
        seen.add(layout)
        capacity = rate_cache.rated(
            f"both {layout_text(layout)}", partial(_rated, problem, demand, template)
        ).capacity
        if not useful(capacity):
            continue
        listed = " + ".join(f"{node_count.count} {node_count.node}" for node_count in template.nodes)
        name = f"{demand.name}: mixed pipeline {listed}"
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
    """What a pipeline that does both serves of every bucket; 0 where it cannot be in time."""
    timer = layout_timer(demand, layout, problem.by_name)
    assert isinstance(timer, PipelineTimer)
    return tuple(_bucket(problem, demand, bucket, layout, timer) for bucket in demand.buckets)


def _bucket(
    problem: PlanningProblem,
    model_demand: ModelDemand,
    demand: BucketDemand,
    layout: Layout,
    timer: PipelineTimer,
) -> BucketCapacity:
    longest = demand.longest_tokens + demand.output_tokens
    room = layout_requests(model_demand.model, layout, problem.by_name, longest)
    slo = model_demand.slo if demand.promised else replace(model_demand.slo, ttft_s=UNPROMISED_TTFT_S)
    lengths = RequestLengths(
        demand.new_tokens, demand.cached_tokens, demand.output_tokens, demand.longest_tokens
    )
    mixed_pipeline = best_mixed_pipeline(timer, lengths, room, slo, problem.headroom)
    if mixed_pipeline is None:
        return BucketCapacity(demand.bucket, 0.0, 0.0, 0.0, 0.0, 0.0)
    return BucketCapacity(
        demand.bucket, 0.0, 0.0, mixed_pipeline.requests_per_s, mixed_pipeline.ttft_s, mixed_pipeline.tpot_s
    )


MAX_NODES = 6  # Nodes of a pipeline in a plan, as in the paper; larger ones seldom pay.
MOST_SETS, LEAST_NODES = 1_500_000, 3
"""Multisets of nodes that the libraries of one bucket go through for all models: with many types or models pipelines
are of fewer nodes, but of as many as these at least.
"""
UNEVEN = (1.0, 1.25, 1.5, 2.0)
"""How much longer than the mean a stage of several may take: a library for each."""
Timed = MutableMapping[tuple[str, Role, Layout], Template | None]
"""Model, role and layout to the template; None where it can do nothing. Prices have no part in it."""
Floats = NDArray[np.float64]
PHASES: tuple[Role, ...] = ("prefill", "decode")
FIRST_RATIO, MOST_RATIO = 1.05, 1.6
"""q before anything was timed, and at most: a library that is off by more is wrong, not careful."""


@dataclass(slots=True, eq=False)
class PlacementTable:
    """The placements of one model as arrays, one row for each bucket, phase and library that has it."""

    problem: PlanningProblem
    ask: ModelDemand
    uses: NDArray[np.uint8]  # [rows, node types of the problem]
    stages: NDArray[np.integer]
    phase: NDArray[np.integer]
    bucket: NDArray[np.integer]
    per_s: Floats  # Requests a second of that bucket, as the library has it.
    library: NDArray[np.integer]
    index: NDArray[np.integer]
    libraries: list[PipelineLibrary]
    open: NDArray[np.bool_]  # Rows that were not timed yet.
    book: RateCache
    timed: Timed  # What is known of placements, this model's and others'; added to.
    mine: dict[tuple[str, Role, Layout], Template] = field(default_factory=dict)
    """Of these, what was taken from here."""
    ratio: list[float] = field(default_factory=lambda: [FIRST_RATIO, FIRST_RATIO])

    @property
    def templates(self) -> list[Template]:
        return list(self.mine.values())

    def take(self, rows: Integers) -> int:
        """Time these rows; how many templates came of it."""
        before = len(self.mine)
        for row in rows.tolist():
            self.open[row] = False
            role, phase = PHASES[self.phase[row]], int(self.phase[row])
            key = (self.ask.key, role, self.libraries[self.library[row]].placement(int(self.index[row])))
            if key not in self.timed:
                self.timed[key] = timed_template(self.problem, self.ask, role, key[2], self.book)
            made = self.timed[key]
            if made is None:
                continue
            if key not in self.mine:
                self.mine[key] = self._told_apart(made)
            capacity = made.capacity[self.bucket[row]]
            real = capacity.prefill_per_s if role == "prefill" else capacity.decode_per_s
            seen = real / max(float(self.per_s[row]), 1e-9)
            self.ratio[phase] = min(max(self.ratio[phase], seen), MOST_RATIO)
        return len(self.mine) - before

    def _told_apart(self, template: Template) -> Template:
        """Of several placements of the same nodes, all but the first are named by their layers."""
        if all(item.name != template.name for item in self.mine.values()):
            return template
        layers = "+".join(str(stage.layers) for stage in template.replicas[0].layout.stages)
        return replace(template, name=f"{template.name}, {layers} layers")

    def cheapest(self, prices: Floats, few: int) -> Integers:
        """Per bucket and phase the `few` rows that do most for their price, and the first of each node type alone:
        what is best for both phases together is seldom best for one.
        """
        cost = np.maximum(self.uses @ prices, 1e-9)
        asked = np.array([demand.rate_per_s for demand in self.ask.buckets])[self.bucket]
        useful = np.minimum(self.per_s, np.maximum(asked, 1e-9) / self.problem.headroom)
        ranks = [np.where(self.open, -value / cost, 0.0) for value in (self.per_s, useful)]
        chosen = [self._best(rank, rank, few, 0.0) for rank in ranks]
        kind = np.where((self.uses > 0).sum(axis=1) == 1, self.uses.argmax(axis=1), -1)
        for place in range(self.uses.shape[1]):
            alone = np.where(kind == place, ranks[1], 0.0)
            chosen.append(self._best(alone, alone, 1, 0.0))
        return np.unique(np.concatenate(chosen))

    def named(self, template: str) -> Integers:
        """The rows of the nodes that a pipeline's name lists (`timed_template`)."""
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
        """Per bucket and phase a `few` open rows of a reduced cost below `ceiling`.

        `costs` is [regions, rows], `duals` [2, buckets, regions]. Copies are whole, so those come first that lose
        least when a copy earns no more than all that is asked of its phase. `problem` is that of the moment.
        """
        ratio = np.array(self.ratio)[self.phase]
        busy = self.problem.headroom * ratio * self.per_s
        asked = np.array([bucket.rate_per_s for bucket in demand.buckets])
        least, rank = np.full(len(self.per_s), np.inf), np.full(len(self.per_s), np.inf)
        for r, there in enumerate(self._there(problem, demand)):
            cost = costs[r]
            earned = busy * duals[self.phase, self.bucket, r]
            most = (duals[:, :, r] @ asked)[self.phase]
            least = np.minimum(least, np.where(there, cost - earned, np.inf))
            rank = np.minimum(rank, np.where(there, cost - np.minimum(earned, most), np.inf))
        return self._best(np.where(self.open, least, np.inf), rank, few, ceiling)

    def _there(self, problem: PlanningProblem, demand: ModelDemand) -> list[NDArray[np.bool_]]:
        """Per region, whether it has the nodes of a row, and the terms let it run there."""
        names, terms = [node.name for node in problem.nodes], demand.terms
        fine = np.ones(len(self.uses), bool)
        if terms.max_nodes is not None:
            fine &= self.uses.sum(axis=1) <= terms.max_nodes
        if terms.max_stages is not None:
            fine &= self.stages <= terms.max_stages
        there: list[NDArray[np.bool_]] = []
        for region in problem.regions:
            offers = {offer.node: offer.available for offer in region.offers}
            usable = [terms.nodes is None or name in terms.nodes for name in names]
            available = np.array([offers.get(name, 0) for name in names]) * usable * terms.allows(region.name)
            there.append(fine & np.asarray((self.uses <= available).all(axis=1), bool))
        return there

    def _best(self, value: Floats, rank: Floats, few: int, ceiling: float) -> Integers:
        chosen: list[Integers] = []
        for phase in range(len(PHASES)):
            for bucket in range(len(self.ask.buckets)):
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
    """Every pipeline of several nodes for every bucket that something is asked of; of one `degree`, or of all.

    `out_of_time` is checked before each library and skips the remaining ones.
    """
    result: list[PipelineLibrary] = []
    parts: list[tuple[NDArray[np.integer], ...]] = []
    rates: list[Floats] = []
    places = {node.name: place for place, node in enumerate(problem.nodes)}
    for demand, library in _all(problem, model_demand, folder, degree, out_of_time):
        mine = library.counts
        several = np.flatnonzero(mine.sum(axis=1) > 1)
        counts = np.zeros((len(several), len(problem.nodes)), np.uint8)
        counts[:, [places[node.name] for node in library.rates.nodes]] = mine[several]
        prefill = library.rates.phase == "prefill"
        tokens = demand_tokens(library)
        rows = np.ones(len(several), np.int32)
        stages = library.stages[several].astype(np.int32)
        parts.append((rows * (not prefill), rows * demand, rows * len(result), several, stages, counts))
        rates.append(library.tokens_per_s[several] / tokens)
        result.append(library)
    empty = (*(np.zeros(0, np.int32) for _ in range(5)), np.zeros((0, len(places)), np.uint8))
    columns = [np.concatenate(item) for item in zip(empty, *parts, strict=True)]
    per_s = np.concatenate([np.zeros(0), *rates])
    phase, bucket, library_of, index, stages, uses = columns
    open_ = np.ones(len(per_s), bool)
    known: Timed = {} if timed is None else timed
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
        result,
        open_,
        rate_cache,
        known,
    )


def demand_tokens(library: PipelineLibrary) -> int:
    """Tokens of one request in a library's unit."""
    rates = library.rates
    return rates.input_tokens if rates.phase == "prefill" else rates.output_tokens


def _all(
    problem: PlanningProblem,
    model_demand: ModelDemand,
    folder: Path | None,
    degree: int | None,
    out_of_time: Callable[[], bool],
) -> Iterator[tuple[int, PipelineLibrary]]:
    """Prefill and decode pipelines; none of types of which there are more, or more layers, than a library takes."""
    kinds = stage_kinds(problem, model_demand, degree)
    asked = [bucket for bucket in model_demand.buckets if bucket.rate_per_s > 0] or model_demand.buckets[:1]
    wait, share = wait_factor(problem.headroom), 1.0 - HANDOVER_SHARE
    # Of each bucket the first before any second: time may not suffice for all.
    for uneven, demand, nodes in product(UNEVEN, asked, kinds):
        cached, promised, at = demand.cached_tokens, demand.promised, model_demand.slo.attainment
        rule = BucketRule(wait, share, demand.longest_tokens, cached, promised, problem.headroom, at)
        with suppress(InputError):
            for library in pipeline_libraries(
                *(
                    model_demand.model,
                    nodes,
                    inside_server(model_demand.slo),
                    demand.new_tokens,
                    demand.output_tokens,
                ),
                max_nodes=nodes_at_most(len(nodes), len(problem.demands)),
                rule=replace(rule, uneven=uneven),
                folder=folder,
                sure=model_demand.sure,
                engine=problem.engine,
            ):
                yield demand.bucket, library
        if out_of_time():
            return


def nodes_at_most(types: int, models: int) -> int:
    """Nodes of a pipeline: as many as there is time to go through all of."""
    sizes = range(MAX_NODES, LEAST_NODES, -1)
    return next((n for n in sizes if comb(types + n, n) * models <= MOST_SETS), LEAST_NODES)


def stage_kinds(
    problem: PlanningProblem, demand: ModelDemand, degree: int | None = None
) -> list[tuple[NodeType, ...]]:
    """Node types that may be stages of one pipeline: all of them, or by their tensor-parallel degree."""
    engine = problem.engine
    if not engine.pipelines:
        return []
    sharded = [(largest_tp(demand.model, node, engine.most_tensor), node) for node in problem.offered]
    # A node of several groups shares a stage with itself.
    usable = [item for item in sharded if engine.shared_stages or item[0] == item[1].gpus]
    usable = [item for item in usable if degree in (None, item[0])]
    if engine.unlike_degrees:
        return [tuple(node for _, node in usable)] if usable else []
    return [tuple(node for tp, node in usable if tp == one) for one in sorted({tp for tp, _ in usable})]


def timed_template(
    problem: PlanningProblem, demand: ModelDemand, phase: Role, layout: Layout, rate_cache: RateCache
) -> Template | None:
    """A placement timed stage by stage for every bucket; None where it can do nothing."""
    rated = rate_cache.replica(problem, demand, layout, phase)
    if not useful(rated.capacity):
        return None
    gpus: Counter[str] = Counter()
    for stage_node in (node for stage in layout.stages for node in stage.nodes):
        gpus[stage_node.node] += stage_node.tp  # a node of several groups is in its stage several times
    nodes = tuple(NodeCount(name, -(-gpus[name] // problem.node(name).gpus)) for name in sorted(gpus))
    listed = " + ".join(f"{node_count.count} {node_count.node}" for node_count in nodes)
    return Template(
        name=f"{demand.name}: {phase} pipeline {listed}",
        kind="pipeline",
        model=demand.name,
        nodes=nodes,
        replicas=(PlannedReplica(phase, layout),),
        capacity=rated.capacity,
        confidence=rated.confidence,
    )
