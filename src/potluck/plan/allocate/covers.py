"""Listing whole covers: all that could be part of a plan cheaper than some goal.

When few nodes are to be had, columns are a weak handle: their integer program has fractions everywhere, and a
knapsack ignores that a demand's own copies must fit its region. So every cover k of demand d (copies that
meet it, within the nodes there are) with L + excess_dk <= goal is listed, level by level, a copy at a time.
Partial covers that use the same nodes are one state, the one that has covered most. `choose` then picks one
cover per demand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from potluck.plan.allocate.bound import Bound
from potluck.plan.allocate.cover_data import ROUNDING
from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.highs import INFINITY
from potluck.plan.allocate.program import Floats, Ints
from potluck.plan.allocate.survivors import Restricted

Shorts = NDArray[np.int16]
"""Node counts; availability is cut to what one demand could use."""

MOST_STATES = 300_000
"""Partial covers of one level, or covers of one demand, beyond which listing them is given up."""
MOST_PAIRS = 500_000
"""Extensions written down at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """The covers of one demand: nodes used, cost, rent, and the copies of the restricted columns."""

    uses: Shorts
    """[covers, R * C]"""
    cost: Floats
    rent: Floats
    copies: Ints
    """[covers, most copies]: columns of the restricted program, -1 where there are fewer."""

    def take(self, rows: Ints) -> Listed:
        return Listed(self.uses[rows], self.cost[rows], self.rent[rows], self.copies[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Covers in the making, all of as many copies.

    Copies are added in ascending order of their column. Of the states that use the same, the one with least left
    stays, with the lowest `last` of them all: whatever could follow one of them can follow it.
    """

    uses: Shorts
    left: Floats
    """Of the demand, as a fraction."""
    paid: Floats
    last: Ints
    copies: Ints

    def __len__(self) -> int:
        return len(self.left)

    @property
    def arrays(self) -> tuple[Shorts, Floats, Floats, Ints]:
        return self.uses, self.left, self.paid, self.last

    def take(self, rows: Ints) -> Partial:
        return Partial(self.uses[rows], self.left[rows], self.paid[rows], self.last[rows], self.copies[rows])

    def with_copies(
        self, i: Ints, j: Ints, columns: Ints, step: Shorts, part: Floats, price: Floats
    ) -> Partial:
        copies = np.hstack([self.copies[i], columns[j][:, None]])
        return Partial(
            self.uses[i] + step[j], self.left[i] - part[j], self.paid[i] + price[j], j.copy(), copies
        )

    def distinct(self, limit: Shorts) -> Partial:
        order, starts = groups_of_same(self.uses, limit, self.left)
        if not len(starts):
            return self
        last = np.minimum.reduceat(self.last[order], starts)
        return replace(self.take(order[starts]), last=last)


def joined(parts: list[Partial]) -> Partial:
    return Partial(
        np.concatenate([each.uses for each in parts]),
        np.concatenate([each.left for each in parts]),
        np.concatenate([each.paid for each in parts]),
        np.concatenate([each.last for each in parts]),
        np.concatenate([each.copies for each in parts]),
    )


def list_covers(
    restricted: Restricted, bound: Bound, d: int, spare: float, deadline: Deadline
) -> Listed | None:
    """Every cover of demand d whose excess is at most `spare`; None when there are too many, or no time."""
    from potluck.plan.allocate.covers_kernel import extend  # numba is slow to load

    cover = restricted.cover
    columns = np.flatnonzero(restricted.group == d)
    table = bound.tables[d].cost
    ceiling = float(table[-1]) + spare
    price, part = restricted.reduced(bound.at)[columns], restricted.part[columns]
    step = _steps(restricted, columns)
    own = restricted.most[columns]
    limit = np.concatenate([cover.available.ravel(), own[own < INFINITY]]).astype(np.int16)
    twin = _twins(restricted, columns)
    states = Partial(
        np.zeros((1, step.shape[1]), dtype=np.int16),
        np.ones(1),
        np.zeros(1),
        np.zeros(1, dtype=np.int64),
        np.zeros((1, 0), dtype=np.int64),
    )
    done: list[tuple[Shorts, Ints]] = []
    state, column = np.zeros((2, MOST_PAIRS + len(columns)), dtype=np.int64)
    while len(states):
        grown: list[Partial] = []
        first = 0
        while first < len(states):
            if deadline.over:
                return None
            size, first = extend(
                first, *states.arrays, step, part, price, twin, limit, table, ceiling, state, column
            )
            grown.append(states.with_copies(state[:size], column[:size], columns, step, part, price))
            if sum(map(len, grown)) > 4 * MOST_PAIRS:
                grown = [joined(grown).distinct(limit)]
                if len(grown[0]) > MOST_STATES:
                    return None
        states = joined(grown).distinct(limit)
        whole = states.left <= ROUNDING
        done.append((states.uses[whole], states.copies[whole]))
        states = states.take(np.flatnonzero(~whole))
        if len(states) > MOST_STATES or sum(len(each) for each, _ in done) > MOST_STATES:
            return None
    return _listed(restricted, done)


def _steps(restricted: Restricted, columns: Ints) -> Shorts:
    """What one copy of each column takes: nodes, and one of its own for running columns."""
    shape = restricted.cover.available.shape
    step = np.zeros((len(columns), *shape))
    step[np.arange(len(columns)), restricted.region[columns]] = restricted.uses[columns]
    old = np.flatnonzero(restricted.most[columns] < INFINITY)
    own = np.zeros((len(columns), len(old)))
    own[old, np.arange(len(old))] = 1.0
    return np.hstack([step.reshape(len(columns), -1), own]).astype(np.int16)


def _twins(restricted: Restricted, columns: Ints) -> Ints:
    """For a new column whose template runs there: the place of the running column in a state; else -1."""
    cover, count = restricted.cover, len(restricted.columns)
    place = {}
    for k, j in enumerate(columns[columns >= count].tolist()):
        old = cover.olds[j - count]
        place[old.key.template, old.key.region] = cover.available.size + k
    twins = np.full(len(columns), -1, dtype=np.int64)
    for k, j in enumerate(columns[columns < count].tolist()):
        template = int(cover.groups[int(restricted.group[j])].origin[restricted.columns.row[j]])
        twins[k] = place.get((template, int(restricted.region[j])), -1)
    return twins


def groups_of_same(uses: Shorts, limit: Shorts, rank: Floats) -> tuple[Ints, Ints]:
    """(order, starts): rows that use the same side by side, least rank first; `uses` within 0..limit."""
    keys = [np.zeros(len(uses), np.int64)]
    room = 1
    for c, most in enumerate(limit.tolist()):
        # As many columns as fit go into one number: two or three to sort by instead of dozens.
        if room * (most + 1) >= 2**62:
            keys.append(np.zeros(len(uses), np.int64))
            room = 1
        keys[-1] = keys[-1] * (most + 1) + uses[:, c]
        room *= most + 1
    order = np.lexsort((rank, *keys))
    new = np.ones(len(order), dtype=bool)
    if len(order):
        new[1:] = False
    for key in keys:
        new[1:] |= np.diff(key[order]) != 0
    return order, np.flatnonzero(new)


def _listed(restricted: Restricted, done: list[tuple[Shorts, Ints]]) -> Listed:
    nodes = restricted.cover.available.size
    most = max(copies.shape[1] for _, copies in done)
    padded = [np.pad(c, ((0, 0), (0, most - c.shape[1])), constant_values=-1) for _, c in done]
    copies = np.concatenate(padded)
    uses = np.concatenate([each[:, :nodes] for each, _ in done])
    held = copies >= 0
    cost = np.where(held, restricted.cost[copies], 0.0).sum(axis=1)
    rent = np.where(held, restricted.rent[copies], 0.0).sum(axis=1)
    return Listed(uses, cost, rent, copies)
