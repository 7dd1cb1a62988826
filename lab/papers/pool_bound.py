"""How good any use of a pool can be at most: the search's distance from the best.

Columns j are groups with a phase and their deduced configuration, at rate r_j; h is the planned utilisation:

    maximise   sum_{j prefill} D_j x_j + sum_{j mixed} D_j x_j
    time_j     x_j <= h r_j n_j                  n_j whole and not negative
    decode     sum_{j prefill} x_j <= sum_{j decode} x_j
    offered    sum_{j not decode} x_j <= R
    gpus_v     sum_j U_jv n_j <= G_v

and, between nodes a and b of the pool, with s_ja the layers that j keeps on a and F_ab layers of KV a second:

    out_a      sum_{j prefill} s_ja x_j = sum_b F_ab
    in_b       sum_{j decode} s_jb x_j = sum_a F_ab
    F_ab       <= bandwidth_ab / bytes of a layer, a != b

D_j is the attainment with KV that takes no time, and which prefill feeds which decode is free, so no state of the
search is worth more. `exact_bound` has a column for every group of the pool's own nodes. `class_bound` is for larger
pools: inside groups all links are the pool's best, and like nodes are one class that groups draw parts from; a and b
above are then classes, with all bandwidth between their nodes. KV within a class is free. Further rows:

    into_ab    F_ab <= most bandwidth from a to one node of b x parts of decoders in b;  out_ab likewise
    fit_k      sum_j n_j sum_{parts p of j} u_k(p) <= N,     k = 1 ... C/2       N nodes of C GPUs in a class
    u_k(p)     1 if p > C - k,  p/C if k <= p <= C - k,  else 0

fit_k holds since no node has room for parts whose u_k add up to more than 1 (Martello and Toth's bound).

Relaxed first: x_j = h r_j n_j, and dual prices y say what a whole copy of column j costs of the value U at least:

    loss_j = sum_v y_v U_jv - h r_j max(0, D_j - y_decode - y_offered)        decoders: y_decode in the brackets

Of the columns whose loss is not above the distance from U, the `MOST_COLUMNS` of least loss form the whole program;
what uses any other is worth at most U less its loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, combinations_with_replacement, product
from typing import NamedTuple

import numpy as np

from potluck.core.values.types import Role
from potluck.plan.allocate.highs import INFINITY, Milp, solve_milp
from potluck.plan.search.deduce import PHASES, ConfigurationSearch, Takes, deducer
from potluck.plan.search.kernels import DECODE, PREFILL, Floats, Ints
from potluck.plan.search.moves import MAX_NODES, kinds_of
from potluck.plan.search.recombine import kv_free_share
from potluck.plan.search.workload import LayerTiming, Pool, PoolWorkload, uniform_pool

MOST_COLUMNS = 8000
FEW_COLUMNS = 500
GAP = 1e-4


class GroupColumn(NamedTuple):
    phase: int
    rate: float  # h r_j
    share: float  # D_j; 0 of a decoder.
    uses: Floats  # U_j, by row.
    layers: tuple[tuple[int, int], ...]
    """(place, layers) of its stages; a place is a node, or a class of nodes."""
    parts: tuple[int, ...]  # The place of each of its nodes.


class PlaceLinks(NamedTuple):
    """What links between places carry: [from, to], layers of KV a second."""

    most: Floats  # All of them together.
    into: Floats  # Those to one node of the second place.
    out: Floats  # Those from one node of the first.


@dataclass(frozen=True, slots=True, eq=False)
class GroupColumns:
    phase: Ints
    rate: Floats
    share: Floats
    uses: Floats  # [column, row]

    def some(self, which: Ints) -> GroupColumns:
        return GroupColumns(self.phase[which], self.rate[which], self.share[which], self.uses[which])


def best_value(
    columns: list[GroupColumn],
    limits: Floats,
    offered_per_s: float,
    links: PlaceLinks | None,
    *,
    known_per_s: float,
    time_limit_s: float,
) -> float:
    """No choice of columns is worth more than this and `known_per_s`."""
    if not columns:
        return 0.0
    table = GroupColumns(
        np.array([column.phase for column in columns]),
        np.array([column.rate for column in columns]),
        np.array([column.share for column in columns]),
        np.array([column.uses for column in columns]),
    )
    value, loss = _relaxed(table, limits, offered_per_s, time_limit_s)
    order = np.argsort(loss, kind="stable")
    near = order[:MOST_COLUMNS]
    beyond = value - loss[order[MOST_COLUMNS]] if len(order) > MOST_COLUMNS else 0.0
    near = near[loss[near] <= value - known_per_s]
    whole = 0.0
    if len(near):
        chosen = [columns[j] for j in near.tolist()]
        part = table.some(near), chosen, limits, offered_per_s
        # With links it is tighter, but where it is large it may not be solved in time: then once without, too.
        tries = (links,) if links is None or len(near) <= FEW_COLUMNS else (None, links)
        whole = min(_whole(*part, place_links, time_limit_s / len(tries)) for place_links in tries)
    return float(min(offered_per_s, value, max(known_per_s, beyond, whole)))


def _relaxed(
    table: GroupColumns, limits: Floats, offered_per_s: float, time_limit_s: float
) -> tuple[float, Floats]:
    """(U, loss of every column)"""
    gives = np.where(table.phase == DECODE, 0.0, table.rate)
    balance = np.where(table.phase == PREFILL, table.rate, np.where(table.phase == DECODE, -table.rate, 0.0))
    rows = np.vstack([balance, gives, table.uses.T])
    upper = np.concatenate([[0.0, offered_per_s], limits])
    row, column = np.nonzero(rows)
    size = rows.shape[1]
    answer = solve_milp(
        Milp(
            -table.share * gives,
            np.zeros(size),
            np.full(size, INFINITY),
            np.zeros(size, bool),
            np.full(len(upper), -INFINITY),
            upper,
            row,
            column,
            rows[row, column],
        ),
        time_limit_s=time_limit_s,
        relax=True,
    )
    if answer.row_dual is None or not answer.finished:
        return float(offered_per_s), np.zeros(size)
    y = np.maximum(-answer.row_dual, 0.0)
    worth = np.where(table.phase == DECODE, y[0], table.share - y[1] - y[0] * (table.phase == PREFILL))
    loss = table.uses @ y[2:] - table.rate * np.maximum(worth, 0.0)
    # U from the prices, not from the solver's primal side: so it holds whatever the solver's tolerance was.
    copies = float(limits.sum() / table.uses.sum(axis=1).min())
    return float(upper @ y) - min(0.0, float(loss.min())) * copies, np.maximum(loss, 0.0)


def _whole(
    table: GroupColumns,
    columns: list[GroupColumn],
    limits: Floats,
    offered_per_s: float,
    links: PlaceLinks | None,
    time_limit_s: float,
) -> float:
    count = len(columns)
    j = np.arange(count)
    rows = ProgramRows(2 * count)  # n, then x
    both = np.concatenate([j, count + j])
    rows.add(count, both, np.concatenate([j, j]), np.concatenate([-table.rate, np.ones(count)]))
    sign = np.where(table.phase == PREFILL, 1.0, np.where(table.phase == DECODE, -1.0, 0.0))
    rows.add_one(count + j, sign, 0.0)
    rows.add_one(count + j, np.where(table.phase == DECODE, 0.0, 1.0), offered_per_s)
    for v, most in enumerate(limits.tolist()):
        rows.add_one(j, table.uses[:, v], most)
    if links is not None:
        _add_links(rows, columns, links, count)
    cost = np.zeros(rows.size)
    cost[count : 2 * count] = -table.share
    value = np.concatenate(rows.value).astype(np.float64)
    used = value != 0.0
    answer = solve_milp(
        Milp(
            cost,
            np.zeros(rows.size),
            np.concatenate([np.full(2 * count, INFINITY), *rows.uppers]),
            np.arange(rows.size) < count,
            np.concatenate(rows.lower),
            np.concatenate(rows.upper),
            np.concatenate(rows.row).astype(np.int64)[used],
            np.concatenate(rows.column).astype(np.int64)[used],
            value[used],
        ),
        time_limit_s=time_limit_s,
        gap_rel=GAP,
    )
    return -answer.bound


def _add_links(rows: ProgramRows, columns: list[GroupColumn], links: PlaceLinks, count: int) -> None:
    """out_a and in_b, with F_ab as further columns; then into_ab and out_ab."""
    nodes = len(links.most)
    first = rows.size
    rows.size += nodes * nodes
    rows.uppers.append(links.most.ravel())
    numbers = first + np.arange(nodes * nodes).reshape(nodes, nodes)
    for phase, axis in ((PREFILL, 0), (DECODE, 1)):
        held = np.zeros((nodes, count))
        for j, group_column in enumerate(columns):
            if group_column.phase == phase:
                for node, layers in group_column.layers:
                    held[node, j] += layers
        for node in range(nodes):
            mine = np.flatnonzero(held[node])
            column = np.concatenate([count + mine, numbers.take(node, axis=axis)])
            rows.add_one(column, np.concatenate([held[node, mine], -np.ones(nodes)]), 0.0, equal=True)
        _add_parts(rows, columns, phase, links.out if phase == PREFILL else links.into, numbers, axis)


def _add_parts(
    rows: ProgramRows, columns: list[GroupColumn], phase: int, each: Floats, numbers: Ints, axis: int
) -> None:
    """F_ab is at most what the nodes carry that copies of this phase have at a (prefill) or b (decode)."""
    for a, b in np.argwhere(np.isfinite(each)).tolist():
        place = (a, b)[axis]
        mine = [(j, column.parts.count(place)) for j, column in enumerate(columns) if column.phase == phase]
        held = [(j, count) for j, count in mine if count]
        column = np.array([*(j for j, _ in held), numbers[a, b]])
        value = np.array([*(-count * each[a, b] for _, count in held), 1.0])
        rows.add_one(column, value, 0.0)


@dataclass(slots=True)
class ProgramRows:
    """Rows in the making: sum of value x column, at most a limit or equal to it."""

    size: int
    row: list[Ints] = field(default_factory=list)
    column: list[Ints] = field(default_factory=list)
    value: list[Floats] = field(default_factory=list)
    lower: list[Floats] = field(default_factory=list)
    upper: list[Floats] = field(default_factory=list)
    uppers: list[Floats] = field(default_factory=list)  # Limits of columns beyond the first.
    count: int = 0

    def add(self, count: int, column: Ints, row: Ints, value: Floats) -> None:
        """So many rows that must not exceed 0; `row` counts from the first of them."""
        self.row.append(row + self.count)
        self.column.append(column)
        self.value.append(value)
        self.lower.append(np.full(count, -INFINITY))
        self.upper.append(np.zeros(count))
        self.count += count

    def add_one(self, column: Ints, value: Floats, limit: float, *, equal: bool = False) -> None:
        self.row.append(np.full(len(column), self.count))
        self.column.append(column)
        self.value.append(value)
        self.lower.append(np.array([limit if equal else -INFINITY]))
        self.upper.append(np.array([limit]))
        self.count += 1


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
    gpus, links = np.array([float(node.gpus) for node in pool.nodes]), _links(source, None)
    given = (columns, gpus, work.rate_per_s, links)
    return best_value(*given, known_per_s=known_per_s, time_limit_s=time_limit_s)


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
    given = (columns, np.array(most), work.rate_per_s, links)
    return best_value(*given, known_per_s=known_per_s, time_limit_s=time_limit_s)


def groups_of(pool: Pool) -> Iterator[Takes]:
    having = [(i, node.gpus) for i, node in enumerate(pool.nodes) if node.gpus]
    for size in range(1, min(MAX_NODES, len(having)) + 1):
        for nodes in combinations(having, size):
            for counts in product(*(range(1, gpus + 1) for _, gpus in nodes)):
                yield tuple((node, count) for (node, _), count in zip(nodes, counts, strict=True))


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
        configuration = source.best(takes, phase)
        if configuration is not None:
            rate = source.work.headroom * configuration.rate_per_s
            layers = tuple((owner[stage.node], stage.layers) for stage in configuration.stages)
            parts = tuple(owner[node] for node, _ in takes)
            yield GroupColumn(
                phase, rate, kv_free_share(source.work, phase, configuration), uses, layers, parts
            )


def _links(source: ConfigurationSearch, members: list[list[int]] | None) -> PlaceLinks | None:
    """Layers of KV a second that links carry, between nodes or classes; None when KV has no size."""
    value = source.work.kv_bytes_per_layer
    if value <= 0:
        return None
    size = len(source.pool.nodes)
    most = np.full((size, size), np.inf)
    apart = ~np.eye(size, dtype=bool)
    most[apart] = 1.0 / (source.wires.kv_s_per_byte[apart] * value)
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
