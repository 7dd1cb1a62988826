"""The parallel configuration of one group of GPUs (THUNDERSERVE 3.3 and appendix B), exactly.

A group takes some GPUs of some nodes. Its configuration is a pipeline of S stages, each on tp GPUs of one node:

- tensor parallelism stays within a node; each node's GPUs are cut by one degree that the model allows, any for
  any node, and GPUs that are left over by smaller degrees; by one degree for all where the engine asks for that;
- the order of the stages is the one whose hand-overs of a prompt take least, by dynamic programming over how many
  stages of each node are left and which node was last;
- layers are split unevenly. A stage of l layers takes l·a + r seconds for its step, and memory caps l. From
  the split of least latency (the fastest stages filled first) layers are moved one by one off the slowest
  stage; every split on the way has the least latency of all with its interval I, so all trade-offs between
  interval and latency T are seen.

What is best depends on the phase (h: the share of time a replica is planned to be busy):

    prefill   (1/I)·P(W <= TTFT - T)     W: the wait of an M/D/1 queue of service I at utilisation h
    decode    S·B / (C·O)                C = max(S·I, T) <= TPOT, the time in which all S batches step once
    mixed     S·B / (C·O)·P(W <= TTFT - T1)      T1: first token of a prompt, in chunks among the decodes; C within
                                                 the part of TPOT that admission keeps to

over all batches B whose KV fits. THUNDERSERVE takes prefill's least latency instead; with a rate and a wait
in the objective, this is the same aim without ignoring that a long stage also queues. A tenth of TTFT is kept
for the hand-over of KV here; `plan.search.evaluate` puts the real one in its place. For the wait the mean of
M/D/1 is spread exponentially: P(W > t) = h exp(-2 (1 - h) t / I), which has P(W > 0) and E[W] right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from potluck.core.routing.capacity import MARGIN
from potluck.core.values.types import Role
from potluck.plan.search.kernels import (
    BATCH,
    DECODE,
    LATENCY_S,
    MIXED,
    PREFILL,
    RATE,
    SERVICE_S,
    SHARE,
    CostTables,
    DeduceScratch,
    Floats,
    Ints,
    ListingScratch,
    StageCuts,
    StageListing,
    best_candidate,
    best_split,
    list_candidates,
)
from potluck.plan.search.workload import (
    LayerTiming,
    Pool,
    PoolLinks,
    PoolWorkload,
    StageCosts,
    costs_of,
    wires_of,
)
from potluck.plan.timing.replica_rates import HANDOVER_SHARE

MAX_STAGES = 8
FIRST_ROWS = 64
ORDERS = 1 << 15  # Places in the memory of stage orders.
PHASES: dict[Role, int] = {"prefill": PREFILL, "decode": DECODE, "mixed": MIXED}
NAMES: tuple[Role, ...] = ("prefill", "decode", "mixed")

Takes = tuple[tuple[int, int], ...]  # (node, GPUs) of a group, by node.


@dataclass(frozen=True, slots=True)
class StageTake:
    node: int
    tp: int
    layers: int


@dataclass(frozen=True, slots=True)
class GroupConfiguration:
    stages: tuple[StageTake, ...]
    rate_per_s: float  # Requests a second when it is always busy.
    latency_s: float  # Prefill and mixed: until the first token, alone.
    service_s: float  # Prefill: between two prompts. Else TPOT.
    batch: int
    attained: float  # Share within TTFT at the planned utilisation, hand-over taken as a tenth of it.

    @property
    def goodput_per_s(self) -> float:
        return self.rate_per_s * self.attained


@dataclass(slots=True)
class ConfigurationSearch:
    """Deduces configurations for one pool and workload; remembers every group it has seen."""

    pool: Pool
    work: PoolWorkload
    costs: StageCosts
    wires: PoolLinks
    tables: CostTables
    cuts: StageCuts
    seen: dict[tuple[Takes, int], GroupConfiguration | None] = field(default_factory=dict)
    _listing: StageListing = field(default_factory=lambda: _listing(FIRST_ROWS))
    _listed: tuple[Takes, int] = ((), 0)
    """The group that is in the listing, and its number of candidates: phases ask for the same one in turn."""
    _desk: ListingScratch = field(default_factory=lambda: _desk())
    _ways: list[list[int]] = field(init=False)
    _scratch: DeduceScratch = field(default_factory=lambda: _scratch())
    _result: tuple[Floats, Ints] = field(
        default_factory=lambda: (np.zeros(6), np.zeros(MAX_STAGES, np.int64))
    )
    _tried: tuple[Floats, Ints] = field(default_factory=lambda: (np.zeros(6), np.zeros(MAX_STAGES, np.int64)))

    def __post_init__(self) -> None:
        self._ways = self.cuts.ways.tolist()

    def best(self, takes: Takes, phase: int) -> GroupConfiguration | None:
        key = (takes, phase)
        if key not in self.seen:
            self.seen[key] = self._search(takes, phase)
        return self.seen[key]

    def fixed(self, stages: tuple[StageTake, ...], phase: int) -> GroupConfiguration | None:
        """What a configuration that is loaded already does in a phase: only its batch is free."""
        placed = tuple((stage.node, stage.tp) for stage in stages)
        result, layers = self._result
        layers[: len(stages)] = [stage.layers for stage in stages]
        kinds = np.array([self.costs.kinds[stage] for stage in placed], np.int64)
        path = self._hops(tuple(stage.node for stage in stages))
        best_split(phase, kinds, len(placed), path, self.tables, self._scratch, True, 0.0, result, layers)
        return self._deduced(placed) if result[RATE] > 0 else None

    def _search(self, takes: Takes, phase: int) -> GroupConfiguration | None:
        if takes != self._listed[0]:
            self._listed = takes, self._list(takes)
        count = self._listed[1]
        if not count:
            return None
        listing = self._listing
        tables, scratch = self.tables, self._scratch
        lists = listing.kind, listing.stages, listing.path
        best = best_candidate(phase, count, *lists, tables, scratch, self._tried, *self._result)
        if best < 0:
            return None
        size = int(listing.stages[best])
        placed = zip(listing.node[best, :size].tolist(), listing.tp[best, :size].tolist(), strict=True)
        return self._deduced(list(placed))

    def _list(self, takes: Takes) -> int:
        if len(takes) > MAX_STAGES:
            return 0
        rows = 1
        for node, count in takes:
            rows *= self._ways[node][count]
        if not rows:
            return 0
        if rows > len(self._listing.stages):
            self._listing = _listing(2 * rows)
        nodes, gpus = np.array([node for node, _ in takes]), np.array([count for _, count in takes])
        stages = min(MAX_STAGES, self.work.model.layer_count) if self.work.engine.pipelines else 1
        return int(list_candidates(nodes, gpus, stages, self.cuts, self._desk, self._listing))

    def _deduced(self, placed: Sequence[tuple[int, int]]) -> GroupConfiguration:
        result, layers = self._result
        return GroupConfiguration(
            tuple(StageTake(*stage, n) for stage, n in zip(placed, layers.tolist(), strict=False)),
            float(result[RATE]),
            float(result[LATENCY_S]),
            float(result[SERVICE_S]),
            int(result[BATCH]),
            float(result[SHARE]),
        )

    def _hops(self, order: tuple[int, ...]) -> tuple[float, float, float]:
        alpha, beta = self.wires.hop_alpha_s, self.wires.hop_s_per_byte
        hops = list(pairwise(order))
        back = float(alpha[order[-1], order[0]]) if hops else 0.0
        betas = [float(beta[hop]) for hop in hops] or [0.0]
        return back + sum(float(alpha[hop]) for hop in hops), sum(betas), max(betas)


def _scratch() -> DeduceScratch:
    a, r = np.zeros(MAX_STAGES), np.zeros(MAX_STAGES)
    cap, held, order = (np.zeros(MAX_STAGES, np.int64) for _ in range(3))
    return DeduceScratch(a, r, cap, held, order)


def deducer(pool: Pool, work: PoolWorkload, timing: LayerTiming) -> ConfigurationSearch:
    costs = costs_of(pool, work, timing)
    tables = CostTables(
        costs.batches,
        costs.prefill,
        costs.decode,
        costs.mixed,
        costs.room,
        costs.layer_bytes,
        costs.kv_bytes,
        costs.chunk_tokens,
        work.model.layer_count,
        float(work.input_tokens),
        float(work.output_tokens),
        work.model.hidden * 2.0,
        work.slo.ttft_s * (1.0 - HANDOVER_SHARE),
        work.slo.tpot_s,
        MARGIN * work.slo.tpot_s,
        work.headroom,
    )
    pool_links = wires_of(pool)
    return ConfigurationSearch(pool, work, costs, pool_links, tables, _cuts(pool, costs, pool_links, work))


def _cuts(pool: Pool, costs: StageCosts, pool_links: PoolLinks, work: PoolWorkload) -> StageCuts:
    """Every node's cuts by how many of its GPUs a group takes; those of too many stages are left out."""
    nodes, most = len(pool.nodes), max(node.gpus for node in pool.nodes)
    equal = not work.engine.unlike_degrees
    widest = max((tp for _, tp in costs.kinds), default=1)
    ways = np.zeros((nodes, most + 1), np.int64)
    stages = np.zeros((nodes, most + 1, widest), np.int64)
    tp = np.zeros((nodes, most + 1, widest, MAX_STAGES), np.int64)
    kind = np.zeros((nodes, widest + 1), np.int64)
    for (node, degree), row in costs.kinds.items():
        kind[node, degree] = row
    for node, degrees in enumerate(costs.degrees):
        for count in range(1, pool.nodes[node].gpus + 1):
            mine = [way for way in even_cuts(count, degrees) if len(way) <= MAX_STAGES]
            if equal:
                mine = [way for way in mine if len(set(way)) == 1]
            ways[node, count] = len(mine)
            for w, way in enumerate(mine):
                stages[node, count, w] = len(way)
                tp[node, count, w, : len(way)] = way
    sent = work.model.hidden * 2.0 * work.input_tokens
    alpha, beta = pool_links.hop_alpha_s, pool_links.hop_s_per_byte
    return StageCuts(ways, stages, tp, kind, alpha + sent * beta, alpha, beta, equal)


def _listing(rows: int) -> StageListing:
    node, tp, kind = (np.zeros((rows, MAX_STAGES), np.int64) for _ in range(3))
    return StageListing(node, tp, kind, np.zeros(rows, np.int64), np.zeros((rows, 3)))


def _desk() -> ListingScratch:
    k, size = MAX_STAGES, 2**MAX_STAGES  # the most that the product of (stages of a node + 1) can be
    return ListingScratch(
        np.zeros(k, np.int64),
        np.zeros(k, np.int64),
        np.zeros(k, np.int64),
        np.zeros((ORDERS, 2), np.int64),
        np.zeros((ORDERS, MAX_STAGES), np.int64),
        np.zeros(1, np.int64),
        np.zeros((k, k)),
        np.zeros((k, k)),
        np.zeros((size, k)),
        np.zeros((size, k), np.int64),
    )


def even_cuts(count: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """For every degree, as many stages of it as there are GPUs for, then smaller ones for the rest."""
    result = []
    for largest in degrees:
        way: list[int] = []
        for degree in sorted((d for d in degrees if d <= largest), reverse=True):
            way += [degree] * ((count - sum(way)) // degree)
        if largest <= count:
            result.append(tuple(way))
    return result
