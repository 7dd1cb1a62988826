"""The parallel configuration of one group of GPUs (THUNDERSERVE 3.3 and appendix B), exactly.

A group takes some GPUs of some nodes. Its configuration is a pipeline of S stages, each on tp GPUs of one node:

- tensor parallelism stays within a node; each node's GPUs are cut by one degree that the model allows, any for
  any node, and GPUs that are left over by smaller degrees;
- the order of the stages is the one whose hand-overs of a prompt take least, by dynamic programming over how many
  stages of each node are left and which node was last;
- layers are split unevenly. A stage of l layers takes l·a + r seconds for its step, and memory caps l. From
  the split of least latency (the fastest stages filled first) layers are moved one by one off the slowest
  stage; every split on the way has the least latency of all with its interval I, so all trade-offs between
  interval and latency T are seen.

What is best depends on the phase (h: the share of time a replica is planned to be busy):

    prefill   (1/I)·P(W <= TTFT - T)     W: the wait of an M/D/1 queue of service I at utilisation h
    decode    S·B / (C·O)                C = max(S·I, T) <= TPOT, the time in which all S batches step once
    mixed     S·B / (C·O)·P(W <= TTFT - T1)      T1: first token of a prompt, in chunks among the decodes

over all batches B whose KV fits. THUNDERSERVE takes prefill's least latency instead; with a rate and a wait
in the objective, this is the same aim without ignoring that a long stage also queues. A tenth of TTFT is kept
for the hand-over of KV here; `plan.search.evaluate` puts the real one in its place. For the wait the mean of
M/D/1 is spread exponentially: P(W > t) = h exp(-2 (1 - h) t / I), which has P(W > 0) and E[W] right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product

import numpy as np

from potluck.core.types import Role
from potluck.plan.rates import HANDOVER_SHARE
from potluck.plan.search.costs import Costs, Timing, costs_of
from potluck.plan.search.deduce_kernel import (
    BATCH,
    DECODE,
    LATENCY_S,
    MIXED,
    PREFILL,
    RATE,
    SERVICE_S,
    SHARE,
    Floats,
    Ints,
    Scratch,
    Tables,
    best_candidate,
    best_path,
    best_split,
)
from potluck.plan.search.pool import Pool, Wires, Workload, wires_of

MAX_STAGES = 8
PHASES: dict[Role, int] = {"prefill": PREFILL, "decode": DECODE, "mixed": MIXED}
NAMES: tuple[Role, ...] = ("prefill", "decode", "mixed")

Takes = tuple[tuple[int, int], ...]
"""(node, GPUs) of a group, by node."""


@dataclass(frozen=True, slots=True)
class StageTake:
    """One stage of a configuration."""

    node: int
    tp: int
    layers: int


@dataclass(frozen=True, slots=True)
class Deduced:
    """The best configuration of a group in a phase, and what it does."""

    stages: tuple[StageTake, ...]
    rate_per_s: float
    """Requests a second when it is always busy."""
    latency_s: float
    """Prefill and mixed: until the first token, alone."""
    service_s: float
    """Prefill: between two prompts. Else TPOT."""
    batch: int
    """Requests in each stage's batch."""
    attained: float
    """Share within TTFT at the planned utilisation, hand-over taken as a tenth of it."""

    @property
    def goodput_per_s(self) -> float:
        return self.rate_per_s * self.attained


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """The candidates of a group, each in its best order."""

    placed: list[tuple[tuple[int, int], ...]]
    """(node, tp) of every stage."""
    kinds: Ints
    counts: Ints
    paths: Floats


@dataclass(slots=True)
class Deducer:
    """Deduces configurations for one pool and workload; remembers every group it has seen."""

    pool: Pool
    work: Workload
    costs: Costs
    wires: Wires
    tables: Tables
    seen: dict[tuple[Takes, int], Deduced | None] = field(default_factory=dict)
    _paths: dict[Takes, tuple[tuple[int, ...], tuple[float, float, float]]] = field(default_factory=dict)
    _cuts: dict[tuple[int, int], tuple[tuple[tuple[int, int], ...], ...]] = field(default_factory=dict)
    _listed: dict[Takes, Listed] = field(default_factory=dict)
    _scratch: Scratch = field(default_factory=lambda: _scratch())
    _result: tuple[Floats, Ints] = field(
        default_factory=lambda: (np.zeros(6), np.zeros(MAX_STAGES, np.int64))
    )
    _tried: tuple[Floats, Ints] = field(default_factory=lambda: (np.zeros(6), np.zeros(MAX_STAGES, np.int64)))

    def best(self, takes: Takes, phase: int) -> Deduced | None:
        """The best configuration; None when the group cannot do this phase."""
        key = (takes, phase)
        if key not in self.seen:
            self.seen[key] = self._search(takes, phase)
        return self.seen[key]

    def candidates(self, takes: Takes) -> Iterator[tuple[tuple[int, int], ...]]:
        """Every list of stages (node, tp), in no order yet."""
        most = min(MAX_STAGES, self.work.model.layer_count)
        for chosen in product(*(self.cuts(node, count) for node, count in takes)):
            if sum(map(len, chosen)) <= most:
                yield tuple(chain.from_iterable(chosen))

    def cuts(self, node: int, count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The ways to cut so many GPUs of a node into stages."""
        key = (node, count)
        if key not in self._cuts:
            ways = even_cuts(count, self.costs.degrees[node])
            self._cuts[key] = tuple(tuple((node, tp) for tp in way) for way in ways)
        return self._cuts[key]

    def path(self, per_node: Takes) -> tuple[tuple[int, ...], tuple[float, float, float]]:
        """The order of nodes for so many stages on each, and its hops: see `deduce_kernel.walk`."""
        if per_node not in self._paths:
            alpha, beta = self.wires.hop_alpha_s, self.wires.hop_s_per_byte
            sent = self.tables.token_bytes * self.work.input_tokens
            order = best_order(per_node, alpha + sent * beta, alpha)
            self._paths[per_node] = order, self._hops(order)
        return self._paths[per_node]

    def fixed(self, stages: tuple[StageTake, ...], phase: int) -> Deduced | None:
        """What a configuration that is loaded already does in a phase: only its batch is free."""
        placed = tuple((stage.node, stage.tp) for stage in stages)
        result, layers = self._result
        layers[: len(stages)] = [stage.layers for stage in stages]
        kinds = np.array([self.costs.kinds[stage] for stage in placed], np.int64)
        path = self._hops(tuple(stage.node for stage in stages))
        best_split(phase, kinds, len(placed), path, self.tables, self._scratch, True, 0.0, result, layers)
        return self._deduced(placed) if result[RATE] > 0 else None

    def _search(self, takes: Takes, phase: int) -> Deduced | None:
        if takes not in self._listed:
            self._listed[takes] = self._list(takes)
        listed = self._listed[takes]
        if not listed.placed:
            return None
        best = best_candidate(
            phase,
            listed.kinds,
            listed.counts,
            listed.paths,
            self.tables,
            self._scratch,
            self._tried,
            *self._result,
        )
        return self._deduced(listed.placed[best]) if best >= 0 else None

    def _list(self, takes: Takes) -> Listed:
        placed, paths = [], []
        for stages in self.candidates(takes):
            order, path = self.path(_per_node(stages))
            placed.append(_placed(stages, order))
            paths.append(path)
        kinds = np.zeros((len(placed), MAX_STAGES), np.int64)
        for row, mine in zip(kinds, placed, strict=True):
            row[: len(mine)] = [self.costs.kinds[stage] for stage in mine]
        counts = np.array([len(mine) for mine in placed], np.int64)
        return Listed(placed, kinds, counts, np.array(paths, np.float64))

    def _deduced(self, placed: Sequence[tuple[int, int]]) -> Deduced:
        result, layers = self._result
        return Deduced(
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


def _scratch() -> Scratch:
    a, r = np.zeros(MAX_STAGES), np.zeros(MAX_STAGES)
    cap, held, order = (np.zeros(MAX_STAGES, np.int64) for _ in range(3))
    return Scratch(a, r, cap, held, order)


def deducer(pool: Pool, work: Workload, timing: Timing) -> Deducer:
    """Tables for a pool and a workload, and an empty memory."""
    costs = costs_of(pool, work, timing)
    tables = Tables(
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
        work.headroom,
    )
    return Deducer(pool, work, costs, wires_of(pool), tables)


def even_cuts(count: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """For every degree, as many stages of it as there are GPUs for, then smaller ones for the rest."""
    found = []
    for largest in degrees:
        way: list[int] = []
        for degree in sorted((d for d in degrees if d <= largest), reverse=True):
            way += [degree] * ((count - sum(way)) // degree)
        if largest <= count:
            found.append(tuple(way))
    return found


def best_order(per_node: Takes, hop_s: Floats, back_s: Floats) -> tuple[int, ...]:
    """Nodes in the order of stages whose hops, and the way back of the token, take least."""
    nodes = [node for node, _ in per_node]
    if len(nodes) == 1:
        return tuple(nodes) * per_node[0][1]
    counts = np.array([count for _, count in per_node], np.int64)
    size = int(np.prod(counts + 1))
    mine = np.ix_(nodes, nodes)
    path = np.zeros(int(counts.sum()), np.int64)
    scratch = np.zeros((size, len(nodes))), np.zeros((size, len(nodes)), np.int64)
    best_path(counts, hop_s[mine], back_s[mine], *scratch, path)
    return tuple(nodes[i] for i in path.tolist())


def _per_node(stages: tuple[tuple[int, int], ...]) -> Takes:
    counts: dict[int, int] = {}
    for node, _ in stages:
        counts[node] = counts.get(node, 0) + 1
    return tuple(sorted(counts.items()))


def _placed(stages: tuple[tuple[int, int], ...], order: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The stages in an order of nodes; those of one node as they come."""
    waiting: dict[int, list[tuple[int, int]]] = {}
    for stage in stages:
        waiting.setdefault(stage[0], []).append(stage)
    return tuple(waiting[node].pop(0) for node in order)
