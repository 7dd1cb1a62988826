"""How good any use of a pool can be at most: the search's distance from the best.

Columns j are groups with a phase and their deduced configuration, at rate r_j; h is the planned utilisation:

Maximise    sum_{j prefill} D_j x_j + sum_{j mixed} D_j x_j
Rows        time_j     x_j <= h r_j n_j                          prefill and mixed
            decode     sum_{j prefill} x_j <= sum_{j decode} h r_j n_j
            offered    sum_j x_j <= R
            gpus_v     sum_j U_jv n_j <= G_v                     v: nodes, or classes of like nodes
            n_j        whole and not negative

D_j is the attainment with KV that takes no time, and links have no limit, so no state of the search is worth
more. `exact_bound` has a column for every group of the pool's own nodes; it is for small pools, where it is a
whole program. `class_bound` is for large ones: all links are the pool's best, like nodes are one class of GPUs
that groups draw from, and n may be fractional. Both know groups of up to `MAX_NODES` nodes, as the search does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np

from potluck.core.types import Role
from potluck.plan.allocate.highs import INFINITY, Milp, solve_milp
from potluck.plan.search.costs import Timing
from potluck.plan.search.deduce import PHASES, Deduced, Deducer, Takes, deducer
from potluck.plan.search.deduce_kernel import DECODE, PREFILL, attained
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
    columns = []
    for counts in product(*(range(node.gpus + 1) for node in pool.nodes)):
        takes = tuple((node, count) for node, count in enumerate(counts) if count)
        if 0 < len(takes) <= MAX_NODES:
            columns += _columns(source, takes, tuple(map(float, counts)), phases)
    gpus = [float(node.gpus) for node in pool.nodes]
    return _bound(columns, gpus, work, time_limit_s=time_limit_s, relax=False)


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
    columns = []
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
    return replace(uniform_pool(pool.nodes, gbps, rtt_s)), list(kinds.values())


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
    columns: list[Column], gpus: list[float], work: Workload, *, time_limit_s: float, relax: bool
) -> float:
    if not columns:
        return 0.0
    count, h = len(columns), work.headroom
    weight = np.zeros(count)
    rate = np.zeros(count)
    for j, (_, phase, found) in enumerate(columns):
        rate[j] = h * found.rate_per_s
        if phase == PREFILL:
            weight[j] = attained(h, found.service_s, work.slo.ttft_s - found.latency_s)
        elif phase != DECODE:
            weight[j] = found.attained
    phases = np.array([phase for _, phase, _ in columns])
    uses = np.array([row for row, _, _ in columns])
    giving = np.flatnonzero(phases != DECODE)
    # Rows: time of every giving column, then decode, offered, GPUs. Columns: n, then x of the giving ones.
    x = count + np.arange(len(giving))
    decode_row, offered_row = len(giving), len(giving) + 1
    first_gpu = len(giving) + 2
    prefills = np.flatnonzero(phases[giving] == PREFILL)
    decodes = np.flatnonzero(phases == DECODE)
    used_row, used_column = np.nonzero(uses.T)
    entries = [
        (np.arange(len(giving)), x, np.ones(len(giving))),
        (np.arange(len(giving)), giving, -rate[giving]),
        (np.full(len(prefills), decode_row), x[prefills], np.ones(len(prefills))),
        (np.full(len(decodes), decode_row), decodes, -rate[decodes]),
        (np.full(len(giving), offered_row), x, np.ones(len(giving))),
        (first_gpu + used_row, used_column, uses.T[used_row, used_column]),
    ]
    row, column, value = (np.concatenate([entry[k] for entry in entries]) for k in range(3))
    upper = np.zeros(first_gpu + len(gpus))
    upper[offered_row], upper[first_gpu:] = work.rate_per_s, gpus
    size = count + len(giving)
    answer = solve_milp(
        Milp(
            np.concatenate([np.zeros(count), -weight[giving]]),
            np.zeros(size),
            np.full(size, INFINITY),
            np.arange(size) < count,
            np.full(len(upper), -INFINITY),
            upper,
            row.astype(np.int64),
            column.astype(np.int64),
            value.astype(np.float64),
        ),
        time_limit_s=time_limit_s,
        relax=relax,
        gap_rel=1e-4,
    )
    return min(work.rate_per_s, -answer.bound)
