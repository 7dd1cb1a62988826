"""How good any use of a pool can be at most: the search's distance from the best.

Columns j are groups with a phase and their deduced configuration, at rate r_j; h is the planned utilisation:

Maximise    sum_{j prefill} D_j x_j + sum_{j mixed} D_j x_j
Rows        time_j     x_j <= h r_j n_j                          prefill and mixed
            decode     sum_{j prefill} x_j <= sum_{j decode} h r_j n_j
            offered    sum_j x_j <= R
            gpus_v     sum_j U_jv n_j <= G_v                     v: nodes, or classes of like nodes
            n_j        whole and not negative

and, between nodes a and b of the pool, with s_ja the layers that j keeps on a and F_ab layers of KV a second:

            out_a      sum_{j prefill} s_ja x_j = sum_b F_ab
            in_b       sum_{j decode} s_jb z_j = sum_a F_ab      z_j <= h r_j n_j: what j decodes
            F_ab       <= bandwidth_ab / bytes of a layer, a != b

D_j is the attainment with KV that takes no time, and which prefill feeds which decode is free, so no state of
the search is worth more. `exact_bound` has a column for every group of the pool's own nodes; it is for small
pools, where it is a whole program. `class_bound` is for large ones: all links are the pool's best and without
limit, like nodes are one class of GPUs that groups draw from, and n may be fractional. Both know groups of up
to `MAX_NODES` nodes, as the search does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product

import numpy as np

from potluck.core.types import Role
from potluck.plan.allocate.highs import INFINITY, Milp, solve_milp
from potluck.plan.search.costs import Timing
from potluck.plan.search.deduce import PHASES, Deduced, Deducer, Takes, deducer
from potluck.plan.search.deduce_kernel import DECODE, PREFILL, Floats, Ints, attained
from potluck.plan.search.moves import MAX_NODES
from potluck.plan.search.pool import Pool, Workload, uniform_pool

Column = tuple[tuple[float, ...], int, Deduced]
"""GPUs of each row, phase, configuration."""


def exact_bound(
    pool: Pool,
    work: Workload,
    timing: Timing,
    phases: Sequence[Role] = ("prefill", "decode", "mixed"),
    *,
    time_limit_s: float = 60.0,
) -> float:
    """At most so many requests a second within the objective, of those offered."""
    source = deducer(pool, work, timing)
    columns: list[Column] = []
    for counts in product(*(range(node.gpus + 1) for node in pool.nodes)):
        takes = tuple((node, count) for node, count in enumerate(counts) if count)
        if 0 < len(takes) <= MAX_NODES:
            columns += _columns(source, takes, tuple(map(float, counts)), phases)
    gpus = [float(node.gpus) for node in pool.nodes]
    return _bound(columns, gpus, work, source, time_limit_s=time_limit_s, relax=False)


def class_bound(
    pool: Pool,
    work: Workload,
    timing: Timing,
    phases: Sequence[Role] = ("prefill", "decode", "mixed"),
    *,
    time_limit_s: float = 60.0,
) -> float:
    """The same for pools of any size, looser."""
    rich, members = _classes(pool)
    source = deducer(rich, work, timing)
    columns: list[Column] = []
    for takes in _multisets(rich, members):
        uses = [0.0] * len(members)
        for node, count in takes:
            uses[next(row for row, nodes in enumerate(members) if node in nodes)] += count
        columns += _columns(source, takes, tuple(uses), phases)
    gpus = [float(sum(rich.nodes[node].gpus for node in nodes)) for nodes in members]
    return _bound(columns, gpus, work, time_limit_s=time_limit_s, relax=True)


def _columns(
    source: Deducer, takes: Takes, uses: tuple[float, ...], phases: Sequence[Role]
) -> Iterator[Column]:
    for role in phases:
        found = source.best(takes, PHASES[role])
        if found is not None:
            yield uses, PHASES[role], found


def _classes(pool: Pool) -> tuple[Pool, list[list[int]]]:
    """The pool with its best link everywhere, and which nodes are alike."""
    size = len(pool.nodes)
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    gbps = max((pool.gbps[a][b] for a, b in pairs), default=1.0)
    rtt_s = min((pool.rtt_s[a][b] for a, b in pairs), default=0.0)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, node in enumerate(pool.nodes):
        if node.gpus:
            kinds.setdefault((node.type.gpu, node.type.interconnect, node.gpus), []).append(index)
    return uniform_pool(pool.nodes, gbps, rtt_s), list(kinds.values())


def _multisets(pool: Pool, members: list[list[int]]) -> Iterator[Takes]:
    """Every group of up to MAX_NODES nodes, up to exchanging like nodes."""
    options = [
        (row, count) for row, nodes in enumerate(members) for count in range(1, pool.nodes[nodes[0]].gpus + 1)
    ]
    for size in range(1, MAX_NODES + 1):
        for chosen in combinations_with_replacement(options, size):
            free = [list(nodes) for nodes in members]
            if all(sum(row == r for row, _ in chosen) <= len(nodes) for r, nodes in enumerate(members)):
                yield tuple(sorted((free[row].pop(0), count) for row, count in chosen))


def _bound(
    columns: list[Column],
    gpus: list[float],
    work: Workload,
    source: Deducer | None = None,
    *,
    time_limit_s: float,
    relax: bool,
) -> float:
    """Solve it; links count when `source` says what they are."""
    if not columns:
        return 0.0
    count, h = len(columns), work.headroom
    phases = np.array([phase for _, phase, _ in columns])
    rate = np.array([h * found.rate_per_s for _, _, found in columns])
    weight = np.array([kv_free_share(work, phase, found) for _, phase, found in columns])
    uses = np.array([row for row, _, _ in columns])
    size = 2 * count  # n, then x or z
    j = np.arange(count)
    rows = Rows(size)
    rows.add(
        j, np.concatenate([j, count + j]), np.concatenate([j, j]), np.concatenate([-rate, np.ones(count)])
    )
    prefills, decodes = np.flatnonzero(phases == PREFILL), np.flatnonzero(phases == DECODE)
    both = np.concatenate([prefills, decodes])
    signs = np.concatenate([np.ones(len(prefills)), -np.ones(len(decodes))])
    rows.add_one(count + both, signs, 0.0)
    giving = np.flatnonzero(phases != DECODE)
    rows.add_one(count + giving, np.ones(len(giving)), work.rate_per_s)
    for v, most in enumerate(gpus):
        mine = np.flatnonzero(uses[:, v])
        rows.add_one(mine, uses[mine, v], most)
    if source is not None:
        _add_links(rows, columns, source, count)
    cost = np.zeros(rows.size)
    cost[count : 2 * count] = -weight
    answer = solve_milp(
        Milp(
            cost,
            np.zeros(rows.size),
            np.concatenate([np.full(size, INFINITY), *rows.uppers]),
            np.arange(rows.size) < count,
            np.concatenate(rows.lower),
            np.concatenate(rows.upper),
            np.concatenate(rows.row).astype(np.int64),
            np.concatenate(rows.column).astype(np.int64),
            np.concatenate(rows.value).astype(np.float64),
        ),
        time_limit_s=time_limit_s,
        relax=relax,
        gap_rel=1e-4,
    )
    return min(work.rate_per_s, -answer.bound)


def kv_free_share(work: Workload, phase: int, found: Deduced) -> float:
    """D_j: the share within TTFT if KV took no time; 0 for a decoder, whose requests others count."""
    if phase == PREFILL:
        return float(attained(work.headroom, found.service_s, work.slo.ttft_s - found.latency_s))
    return 0.0 if phase == DECODE else found.attained


def _add_links(rows: Rows, columns: list[Column], source: Deducer, count: int) -> None:
    """out_a and in_b, with F_ab as further columns."""
    nodes, each = len(source.pool.nodes), source.work.kv_bytes_per_layer
    most = np.full((nodes, nodes), INFINITY)
    beta = source.wires.kv_s_per_byte
    if each > 0:
        apart = ~np.eye(nodes, dtype=bool)
        most[apart] = 1.0 / (beta[apart] * each)
    first = rows.size
    rows.size += nodes * nodes
    rows.uppers.append(most.ravel())
    for phase, axis in ((PREFILL, 0), (DECODE, 1)):
        for node in range(nodes):
            mine, held = [], []
            for j, (_, its, found) in enumerate(columns):
                layers = sum(stage.layers for stage in found.stages if stage.node == node)
                if its == phase and layers:
                    mine.append(count + j)
                    held.append(float(layers))
            links = first + np.arange(nodes * nodes).reshape(nodes, nodes).take(node, axis=axis)
            column = np.concatenate([np.array(mine, np.int64), links])
            rows.add_one(column, np.concatenate([held, -np.ones(nodes)]), 0.0, equal=True)


@dataclass(slots=True)
class Rows:
    """Rows in the making: sum of value x column, at most a limit or equal to it."""

    size: int
    """Columns."""
    row: list[Ints] = field(default_factory=list)
    column: list[Ints] = field(default_factory=list)
    value: list[Floats] = field(default_factory=list)
    lower: list[Floats] = field(default_factory=list)
    upper: list[Floats] = field(default_factory=list)
    uppers: list[Floats] = field(default_factory=list)
    """Limits of columns beyond the first."""
    count: int = 0

    def add(self, which: Ints, column: Ints, row: Ints, value: Floats) -> None:
        """Rows that must not exceed 0; `row` counts from the first of them."""
        self.row.append(row + self.count)
        self.column.append(column)
        self.value.append(value)
        self.lower.append(np.full(len(which), -INFINITY))
        self.upper.append(np.zeros(len(which)))
        self.count += len(which)

    def add_one(self, column: Ints, value: Floats, limit: float, *, equal: bool = False) -> None:
        self.row.append(np.full(len(column), self.count))
        self.column.append(column)
        self.value.append(value)
        self.lower.append(np.array([limit if equal else -INFINITY]))
        self.upper.append(np.array([limit]))
        self.count += 1
