"""How good any use of a pool can be at most: the search's distance from the best.

Columns j are groups with a phase and their deduced configuration, at rate r_j; h is the planned utilisation:

Maximise    sum_{j prefill} D_j x_j + sum_{j mixed} D_j x_j
Rows        time_j     x_j <= h r_j n_j
            decode     sum_{j prefill} x_j <= sum_{j decode} x_j
            offered    sum_{j not decode} x_j <= R
            gpus_v     sum_j U_jv n_j <= G_v
            n_j        whole and not negative

and, between nodes a and b of the pool, with s_ja the layers that j keeps on a and F_ab layers of KV a second:

            out_a      sum_{j prefill} s_ja x_j = sum_b F_ab
            in_b       sum_{j decode} s_jb x_j = sum_a F_ab
            F_ab       <= bandwidth_ab / bytes of a layer, a != b

D_j is the attainment with KV that takes no time, and which prefill feeds which decode is free, so no state of
the search is worth more. Both bounds know groups of up to `MAX_NODES` nodes, as the search does.

`exact_bound` has a column for every group of the pool's own nodes (17,695 groups on 32 GPUs). `class_bound` is for
pools beyond that: inside groups all links are the pool's best, and like nodes are one class that groups draw parts
from; a and b above are then classes, with all bandwidth between their nodes, and

            into_ab    F_ab <= most bandwidth from a to one node of b x parts of decoders in b;  out_ab likewise

KV within a class is free, since it may stay in a node. That the parts of whole groups must fit into the class's N
nodes of C GPUs each gives rows

            fit_k      sum_j n_j sum_{parts p of j} u_k(p) <= N,     k = 1 ... C/2
            u_k(p)     1 if p > C - k,  p/C if k <= p <= C - k,  else 0

whose first one is gpus; each holds since no node has room for parts whose u_k add up to more than 1 (Martello and
Toth's bound for bin packing). `bound_program` solves both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, combinations_with_replacement, product

import numpy as np

from potluck.core.values.types import Role
from potluck.plan.search.bound_program import GroupColumn, PlaceLinks, best_value
from potluck.plan.search.deduce import PHASES, ConfigurationSearch, GroupConfiguration, Takes, deducer
from potluck.plan.search.deduce_kernel import DECODE, PREFILL, Floats, attained
from potluck.plan.search.moves import MAX_NODES, kinds_of
from potluck.plan.search.pool_workload import Pool, PoolWorkload, uniform_pool
from potluck.plan.search.stage_costs import LayerTiming

ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")


def exact_bound(
    pool: Pool,
    work: PoolWorkload,
    timing: LayerTiming,
    phases: Sequence[Role] = ROLES,
    *,
    known_per_s: float = 0.0,
    time_limit_s: float = 60.0,
) -> float:
    """At most so many requests a second within the objective, of those offered.

    `known_per_s` is what some state attains: columns that cannot be part of anything better are left out.
    """
    source = deducer(pool, work, timing)
    columns: list[GroupColumn] = []
    for takes in groups_of(pool):
        uses = np.zeros(len(pool.nodes))
        for node, count in takes:
            uses[node] = count
        columns += _columns(dict.fromkeys(range(3), source), takes, uses, phases, range(len(uses)))
    gpus = np.array([float(node.gpus) for node in pool.nodes])
    return best_value(
        columns,
        gpus,
        work.rate_per_s,
        _links(source, None),
        known_per_s=known_per_s,
        time_limit_s=time_limit_s,
    )


def class_bound(
    pool: Pool,
    work: PoolWorkload,
    timing: LayerTiming,
    phases: Sequence[Role] = ROLES,
    *,
    known_per_s: float = 0.0,
    time_limit_s: float = 60.0,
) -> float:
    """The same for pools of any size, looser."""
    rich, members = _classes(pool)
    source = deducer(rich, work, timing)
    # On better links another prefill configuration may be chosen: the one best without KV bounds them all.
    free = deducer(rich, work, timing)
    free.tables = free.tables._replace(ttft_s=work.slo.ttft_s)
    sources = {PREFILL: free, DECODE: source, 2: source}
    sizes = [rich.nodes[nodes[0]].gpus for nodes in members]
    most = [float(len(nodes)) for nodes, size in zip(members, sizes, strict=True) for _ in _thresholds(size)]
    owner = {node: row for row, nodes in enumerate(members) for node in nodes}
    columns: list[GroupColumn] = []
    for takes in _multisets(rich, members):
        fits = [
            sum(_fit(count, sizes[row], k) for node, count in takes if owner[node] == row)
            for row in range(len(members))
            for k in _thresholds(sizes[row])
        ]
        columns += _columns(sources, takes, np.array(fits), phases, owner)
    links = _links(deducer(pool, work, timing), members)
    return best_value(
        columns, np.array(most), work.rate_per_s, links, known_per_s=known_per_s, time_limit_s=time_limit_s
    )


def groups_of(pool: Pool) -> Iterator[Takes]:
    """Every group of up to MAX_NODES nodes of the pool."""
    having = [(i, node.gpus) for i, node in enumerate(pool.nodes) if node.gpus]
    for size in range(1, min(MAX_NODES, len(having)) + 1):
        for nodes in combinations(having, size):
            for counts in product(*(range(1, gpus + 1) for _, gpus in nodes)):
                yield tuple((node, count) for (node, _), count in zip(nodes, counts, strict=True))


def kv_free_share(work: PoolWorkload, phase: int, found: GroupConfiguration) -> float:
    """D_j: the share within TTFT if KV took no time; 0 for a decoder, whose requests others count."""
    if phase == PREFILL:
        return float(attained(work.headroom, found.service_s, work.slo.ttft_s - found.latency_s))
    return 0.0 if phase == DECODE else found.attained


def _columns(
    sources: Mapping[int, ConfigurationSearch],
    takes: Takes,
    uses: Floats,
    phases: Sequence[Role],
    owner: Mapping[int, int] | Sequence[int],
) -> Iterator[GroupColumn]:
    for role in phases:
        phase = PHASES[role]
        source = sources[phase]
        found = source.best(takes, phase)
        if found is not None:
            rate = source.work.headroom * found.rate_per_s
            layers = tuple((owner[stage.node], stage.layers) for stage in found.stages)
            parts = tuple(owner[node] for node, _ in takes)
            yield GroupColumn(phase, rate, kv_free_share(source.work, phase, found), uses, layers, parts)


def _links(source: ConfigurationSearch, members: list[list[int]] | None) -> PlaceLinks | None:
    """Layers of KV a second that links carry, between nodes or classes; None when KV has no size."""
    each = source.work.kv_bytes_per_layer
    if each <= 0:
        return None
    size = len(source.pool.nodes)
    most = np.full((size, size), np.inf)
    apart = ~np.eye(size, dtype=bool)
    most[apart] = 1.0 / (source.wires.kv_s_per_byte[apart] * each)
    if members is None:
        return PlaceLinks(most, np.full_like(most, np.inf), np.full_like(most, np.inf))
    tables = [np.full((len(members),) * 2, np.inf) for _ in range(3)]
    for a, first in enumerate(members):
        for b, second in enumerate(members):
            if a != b:
                between = most[np.ix_(first, second)]
                tables[0][a, b] = between.sum()
                tables[1][a, b] = between.sum(axis=0).max()
                tables[2][a, b] = between.sum(axis=1).max()
    return PlaceLinks(*tables)


def _thresholds(size: int) -> range:
    return range(1, max(size // 2, 1) + 1)


def _fit(part: int, size: int, k: int) -> float:
    """u_k(p)"""
    if part > size - k:
        return 1.0
    return part / size if part >= k else 0.0


def _classes(pool: Pool) -> tuple[Pool, list[list[int]]]:
    """The pool with its best link everywhere, and which nodes are alike."""
    size = len(pool.nodes)
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    gbps = max((pool.gbps[a][b] for a, b in pairs), default=1.0)
    rtt_s = min((pool.rtt_s[a][b] for a, b in pairs), default=0.0)
    return uniform_pool(pool.nodes, gbps, rtt_s), kinds_of(pool)


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
