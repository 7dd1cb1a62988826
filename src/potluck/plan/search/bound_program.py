"""The program behind `plan.search.bound`, which has it with its letters: relaxed first, then whole.

With n in fractions a column that is not fully used only wastes GPUs, so x_j = h r_j n_j and the rows are few. Its
dual prices y say what a whole copy of column j costs of the relaxed value U at least:

    loss_j = sum_v y_v U_jv - h r_j max(0, D_j - y_decode - y_offered)        decoders: y_decode in the brackets

So nothing better than a known value has a column whose loss is above the distance from U. Of the columns left,
the `MOST_COLUMNS` of least loss form the whole program; what uses any other is worth at most U less its loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from potluck.plan.allocate.highs import INFINITY, Milp, solve_milp
from potluck.plan.search.deduce_kernel import DECODE, PREFILL, Floats, Ints

MOST_COLUMNS = 8000
FEW_COLUMNS = 500
GAP = 1e-4


class GroupColumn(NamedTuple):
    """A group in a phase."""

    phase: int
    rate: float
    """h r_j"""
    share: float
    """D_j; 0 of a decoder."""
    uses: Floats
    """U_j, by row."""
    layers: tuple[tuple[int, int], ...]
    """(place, layers) of its stages; a place is a node, or a class of nodes."""
    parts: tuple[int, ...]
    """The place of each of its nodes."""


class PlaceLinks(NamedTuple):
    """What links between places carry: [from, to], layers of KV a second."""

    most: Floats
    """All of them together."""
    into: Floats
    """Those to one node of the second place."""
    out: Floats
    """Those from one node of the first."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupColumns:
    """Columns as arrays."""

    phase: Ints
    rate: Floats
    share: Floats
    uses: Floats
    """[column, row]"""

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
        np.array([each.phase for each in columns]),
        np.array([each.rate for each in columns]),
        np.array([each.share for each in columns]),
        np.array([each.uses for each in columns]),
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
        whole = min(_whole(*part, each, time_limit_s / len(tries)) for each in tries)
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
    """The bound of the whole program over some columns."""
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
        for j, each in enumerate(columns):
            if each.phase == phase:
                for node, layers in each.layers:
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
    """Columns."""
    row: list[Ints] = field(default_factory=list)
    column: list[Ints] = field(default_factory=list)
    value: list[Floats] = field(default_factory=list)
    lower: list[Floats] = field(default_factory=list)
    upper: list[Floats] = field(default_factory=list)
    uppers: list[Floats] = field(default_factory=list)
    """Limits of columns beyond the first."""
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
