"""How good a way to use the pool is: estimated SLO attainment, thousands of times a second.

A state says which groups of GPUs there are and which phase each does. Its parallel configurations come from `deduce`,
once per (group, phase). What is left is which prefill replica feeds which decode replica: THUNDERSERVE's two-stage
transportation problem.

    i, j, k    prefill, decode and mixed replicas;  (a, b)  links between nodes;  R  the offered rate
    D_ij, D_k  share of requests within the objective when i prefills and j decodes, or k does both
    P, Q, C    requests a second that a replica is planned to take
    s_ij,ab    seconds that one request from i to j keeps the link (a, b) busy

    maximise   sum_ij D_ij f_ij + sum_k D_k g_k
    prefill_i  sum_j f_ij <= P_i
    decode_j   sum_i f_ij <= Q_j
    mixed_k    g_k <= C_k
    offered    sum_ij f_ij + sum_k g_k <= R
    link_ab    sum_ij s_ij,ab f_ij <= 1

    D_ij = P(W_i <= TTFT - T_i - KV_ij)        W_i: the wait at i, see `deduce`
    KV_ij = max over links (a, b) of  alpha_ab + bytes_ab / beta_ab

bytes_ab are the layers that i keeps on node a and j on node b, through the codec; they go in one piece after the
prefill, as in THUNDERSERVE's equation 1. What two states attain alike is told apart by the rate that they would
attain if more were offered. The paper's X_i and Y_ij are f_ij = R X_i Y_ij; as printed it has no capacities. f = 0 is
feasible, so a primal simplex needs no first phase; rows of links are added only when an answer overloads one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from potluck.core.errors import InputError
from potluck.plan.search.deduce import NAMES, ConfigurationSearch, GroupConfiguration, Takes
from potluck.plan.search.kernels import (
    CAPPED,
    COMPLETE,
    DECODE,
    MIXED,
    OPEN,
    PREFILL,
    ConfigurationStore,
    Floats,
    Ints,
    TransportProgram,
    evaluate,
    evaluate_weighed,
    simplex,
)


@dataclass(frozen=True, slots=True)
class Pairing:
    """A share of the requests, from one replica to another or, when mixed, within one."""

    source: int  # Place of the replica among the groups.
    target: int
    rate_per_s: float
    attained: float  # D_ij


@dataclass(frozen=True, slots=True)
class Orchestration:
    pairings: tuple[Pairing, ...]

    @property
    def rate_per_s(self) -> float:
        return sum(pairing.rate_per_s for pairing in self.pairings)

    @property
    def goodput_per_s(self) -> float:
        return sum(pairing.rate_per_s * pairing.attained for pairing in self.pairings)

    def x(self) -> dict[int, float]:
        """X: share of the requests that each replica takes in first; they add up to 1."""
        total = self.rate_per_s
        shares: dict[int, float] = {}
        for pairing in self.pairings:
            shares[pairing.source] = shares.get(pairing.source, 0.0) + pairing.rate_per_s / total
        return shares

    def y(self) -> dict[tuple[int, int], float]:
        """Y: of what a replica takes in, the share that each other decodes; they add up to 1 per replica."""
        total, mine = self.rate_per_s, self.x()
        return {
            (pairing.source, pairing.target): pairing.rate_per_s / (total * mine[pairing.source])
            for pairing in self.pairings
        }


def shares_of(
    flow: Floats, weight: Floats, pre: Sequence[int], dec: Sequence[int], mix: Sequence[int]
) -> Orchestration:
    """Flows as they leave the program, with the places of the replicas among the groups."""
    pairings = []
    for x, i in enumerate(pre):
        for y, j in enumerate(dec):
            column = x * len(dec) + y
            if flow[column] > 1e-12:
                pairings.append(Pairing(i, j, float(flow[column]), float(weight[column])))
    for z, k in enumerate(mix):
        column = len(pre) * len(dec) + z
        if flow[column] > 1e-12:
            pairings.append(Pairing(k, k, float(flow[column]), float(weight[column])))
    return Orchestration(tuple(pairings))


def transport(
    prefill_per_s: Floats,
    decode_per_s: Floats,
    attained: Floats,
    offered_per_s: float | None = None,
    links: Floats | None = None,
) -> tuple[float, Floats]:
    """(value, f) of the program without mixed replicas; `links` is s as [link, i, j]."""
    m, n = attained.shape
    if prefill_per_s.shape != (m,) or decode_per_s.shape != (n,):
        raise InputError("orchestration", f"needs {m} prefill and {n} decode rates")
    sides = [prefill_per_s, decode_per_s, attained, *([] if links is None else [links])]
    if any(not np.isfinite(side).all() or (side < 0).any() for side in sides):
        raise InputError("orchestration", "rates and shares must be finite and not negative")
    blocks = [np.kron(np.eye(m), np.ones((1, n))), np.kron(np.ones((1, m)), np.eye(n))]
    right = [prefill_per_s, decode_per_s]
    if offered_per_s is not None:
        blocks.append(np.ones((1, m * n)))
        right.append(np.array([offered_per_s]))
    if links is not None:
        blocks.append(links.reshape(len(links), m * n))
        right.append(np.ones(len(links)))
    matrix, limit = np.vstack(blocks), np.concatenate(right)
    rows, columns = matrix.shape
    tableau = np.zeros((rows + 1, columns + 1))
    tableau[:rows, :columns], tableau[:rows, columns] = matrix, limit
    tableau[rows, :columns] = attained.ravel()
    basis, outside = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
    simplex(tableau, basis, outside, rows, columns)
    flow = np.zeros(columns)
    inside = basis < columns
    flow[basis[inside]] = np.maximum(tableau[:rows, columns][inside], 0.0)
    return -float(tableau[rows, columns]), flow.reshape(m, n)


TIE_WEIGHT = 1e-3
"""How little the attainable rate, in units of the offered one, counts beside the attainment."""
MAX_LINK_ROWS = 64
FIRST_NUMBERS = 1024
PER_NUMBER = ("owner", "rate", "latency_s", "service_s", "attained")


class GpuGroup(NamedTuple):
    takes: Takes
    phase: int


class PoolUse(NamedTuple):
    """Groups in their canonical order, and GPUs in none of them."""

    groups: tuple[GpuGroup, ...]
    idle: Takes


@dataclass(frozen=True, slots=True, order=True)
class PoolScore:
    value: float
    attainment: float  # Estimated share of the offered requests that are served within the objective.
    goodput_per_s: float  # Requests a second within the objective if any number were offered.


NOTHING = PoolScore(-1.0, 0.0, 0.0)


@dataclass(slots=True)
class PoolEvaluator:
    """Scores states of one pool and workload. Build it with `evaluator`."""

    deducer: ConfigurationSearch
    numbers: dict[GpuGroup, int] = field(default_factory=dict)
    """(group, phase) to its row in the store; -1 for what cannot do its phase."""
    scores: dict[tuple[GpuGroup, ...], PoolScore] = field(default_factory=dict)
    evaluated: int = 0  # States scored, without those that were remembered.
    _used: int = 0
    _store: ConfigurationStore = field(init=False)
    _program: TransportProgram = field(init=False)
    _result: Floats = field(default_factory=lambda: np.zeros(3))

    def __post_init__(self) -> None:
        work, pool_links = self.deducer.work, self.deducer.wires
        rate, latency_s, service_s, attained = (np.zeros(FIRST_NUMBERS) for _ in range(4))
        self._store = ConfigurationStore(
            np.zeros((FIRST_NUMBERS, work.model.layer_count), np.int64),
            rate,
            latency_s,
            service_s,
            attained,
            pool_links.kv_alpha_s,
            pool_links.kv_s_per_byte,
            work.kv_bytes_per_layer,
            work.slo.ttft_s,
            work.headroom,
        )
        gpus, nodes = self.deducer.pool.gpus, len(self.deducer.pool.nodes)
        columns = (gpus // 2 + 1) * (gpus - gpus // 2 + 1) + gpus
        rows = 2 * gpus + 1 + MAX_LINK_ROWS
        self._program = TransportProgram(
            np.zeros((rows + 1, columns + 1)),
            np.zeros(rows, np.int64),
            np.zeros(columns, np.int64),
            np.zeros(columns),
            np.zeros(columns),
            np.zeros((nodes, nodes), np.int64),
            np.zeros((nodes, nodes)),
            np.zeros(MAX_LINK_ROWS, np.int64),
        )

    def score(self, groups: tuple[GpuGroup, ...]) -> PoolScore:
        """What these groups are worth; NOTHING when one of them cannot do its phase."""
        known = self.scores.get(groups)
        if known is None:
            known = self.scores[groups] = self._score(groups)
        return known

    def deduced(self, group: GpuGroup) -> GroupConfiguration | None:
        return self.deducer.best(group.takes, group.phase)

    def orchestrated(self, groups: tuple[GpuGroup, ...]) -> Orchestration:
        sides = self._sides(groups)
        assert sides is not None, "a group cannot do its phase"
        self._run(*sides)
        return self._routed(groups)

    def attained(self, groups: tuple[GpuGroup, ...]) -> dict[tuple[int, int], float]:
        """D of a state that has a score, by places of its groups: (prefill, decode), or twice a mixed one."""
        sides = self._sides(groups)
        assert sides is not None, "a group cannot do its phase"
        self._run(*sides)
        pairs = _pairs(groups)
        return dict(zip(pairs, self._program.weight[: len(pairs)].tolist(), strict=True))

    def weighed(
        self, groups: tuple[GpuGroup, ...], attained: Mapping[tuple[int, int], float]
    ) -> tuple[PoolScore, Orchestration]:
        """What groups are worth, and how they are routed, with D of somebody else."""
        sides = self._sides(groups)
        assert sides is not None, "a group cannot do its phase"
        for column, pair in enumerate(_pairs(groups)):
            self._program.weight[column] = attained[pair]
        offered = self.deducer.work.rate_per_s
        evaluate_weighed(*sides, offered, self._store, self._program, self._result)
        return self._scored(), self._routed(groups)

    def _routed(self, groups: tuple[GpuGroup, ...]) -> Orchestration:
        flow, weight = self._program.flow.copy(), self._program.weight.copy()
        return shares_of(flow, weight, *_places(groups))

    def number(self, group: GpuGroup) -> int:
        known = self.numbers.get(group)
        if known is None:
            configuration = self.deducer.best(group.takes, group.phase)
            known = self.numbers[group] = -1 if configuration is None else self._add(configuration)
        return known

    def _score(self, groups: tuple[GpuGroup, ...]) -> PoolScore:
        sides = self._sides(groups)
        if sides is None:
            return NOTHING
        self.evaluated += 1
        self._run(*sides)
        return self._scored()

    def _scored(self) -> PoolScore:
        offered = self.deducer.work.rate_per_s
        capped, free = float(self._result[CAPPED]), float(self._result[OPEN])
        attainment = min(1.0, capped / offered)
        return PoolScore(attainment + TIE_WEIGHT * free / offered, attainment, free)

    def _sides(self, groups: tuple[GpuGroup, ...]) -> tuple[Ints, Ints, Ints] | None:
        sides: tuple[list[int], list[int], list[int]] = ([], [], [])
        for group in groups:
            number = self.number(group)
            if number < 0:
                return None
            sides[group.phase].append(number)
        pre, dec, mix = (np.array(side, np.int64) for side in sides)
        return pre, dec, mix

    def _run(self, pre: Ints, dec: Ints, mix: Ints) -> None:
        offered = self.deducer.work.rate_per_s
        evaluate(pre, dec, mix, offered, self._store, self._program, self._result)

    def _add(self, group_configuration: GroupConfiguration) -> int:
        number = self._used
        if number == len(self._store.rate):
            parts = {name: getattr(self._store, name) for name in PER_NUMBER}
            grown: dict[str, Any] = {
                name: np.concatenate([part, np.zeros_like(part)]) for name, part in parts.items()
            }
            self._store = self._store._replace(**grown)
        self._used += 1
        owner = [stage.node for stage in group_configuration.stages for _ in range(stage.layers)]
        self._store.owner[number] = owner
        self._store.rate[number] = group_configuration.rate_per_s
        self._store.latency_s[number] = group_configuration.latency_s
        self._store.service_s[number] = group_configuration.service_s
        self._store.attained[number] = group_configuration.attained
        return number

    @property
    def complete(self) -> bool:
        """Whether the last orchestration kept every link within its bandwidth by itself."""
        return bool(self._result[COMPLETE] == 1.0)


def _places(groups: tuple[GpuGroup, ...]) -> tuple[list[int], list[int], list[int]]:
    pre, dec, mix = (
        [i for i, group in enumerate(groups) if group.phase == p] for p in (PREFILL, DECODE, MIXED)
    )
    return pre, dec, mix


def _pairs(groups: tuple[GpuGroup, ...]) -> list[tuple[int, int]]:
    """Places of the groups behind each column of the program."""
    pre, dec, mix = _places(groups)
    return [*((i, j) for i in pre for j in dec), *((k, k) for k in mix)]


def describe(pool_use: PoolUse, evaluator: PoolEvaluator) -> list[str]:
    pool = evaluator.deducer.pool
    lines = []
    for group in pool_use.groups:
        gpus = "+".join(f"{count}x{pool.nodes[node].name}" for node, count in group.takes)
        configuration = evaluator.deduced(group)
        stages = " ".join(f"tp{s.tp}:{s.layers}" for s in configuration.stages) if configuration else "-"
        rate = configuration.rate_per_s if configuration else 0.0
        lines.append(f"{NAMES[group.phase]:<8}{gpus:<28}{stages:<32}{rate:.3f}/s")
    return lines
