"""Listing whole covers: all that could be part of a plan cheaper than some goal.

When few nodes are to be had, columns are a weak handle: their integer program has fractions everywhere, and a
knapsack ignores that a demand's own copies must fit its region. So every cover k of demand d (copies that
meet it, within the nodes there are) with L + excess_dk <= goal is listed, level by level, a copy at a time.
Partial covers that use the same nodes are one state, the one that has covered most. `choose` then picks one
cover per demand.
"""

from __future__ import annotations

from dataclasses import dataclass

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

MOST_STATES = 120_000
"""Partial covers of one level, or covers of one demand, beyond which listing them is given up."""
MOST_PAIRS = 4_000_000
"""States times columns looked at together, for memory's sake."""


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


def list_covers(
    restricted: Restricted, bound: Bound, d: int, spare: float, deadline: Deadline
) -> Listed | None:
    """Every cover of demand d whose excess is at most `spare`; None when there are too many, or no time."""
    cover = restricted.cover
    columns = np.flatnonzero(restricted.group == d)
    table = bound.tables[d].cost
    grid = len(table) - 1
    ceiling = float(table[-1]) + spare
    price, part = restricted.reduced(bound.at)[columns], restricted.part[columns]
    step = _steps(restricted, columns)
    own = restricted.most[columns]
    limit = np.concatenate([cover.available.ravel(), own[own < INFINITY]]).astype(np.int16)
    uses = np.zeros((1, step.shape[1]), dtype=np.int16)
    left, paid, copies = np.ones(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64)
    done: list[tuple[Shorts, Ints]] = []
    while len(uses):
        found: list[tuple[Shorts, Floats, Floats, Ints]] = []
        chunk = max(1, MOST_PAIRS // max(1, len(columns)))
        for first in range(0, len(uses), chunk):
            if deadline.over:
                return None
            some = slice(first, first + chunk)
            rest = left[some, None] - part[None, :]
            units = np.ceil(np.maximum(rest, 0.0) * grid - 1e-6).astype(np.int64)
            total = paid[some, None] + price[None, :] + table[units]
            i, j = np.nonzero(total <= ceiling)
            after = uses[some][i] + step[j]
            fits = (after <= limit).all(axis=1)
            i, j, after = i[fits], j[fits], after[fits]
            path = np.hstack([copies[some][i], columns[j][:, None]])
            found.append((after, rest[i, j], paid[some][i] + price[j], path))
        uses, left, paid, copies = (np.concatenate(each) for each in zip(*found, strict=True))
        keep = first_of_each(uses, limit, left)
        uses, left, paid, copies = uses[keep], left[keep], paid[keep], copies[keep]
        whole = left <= ROUNDING
        done.append((uses[whole], copies[whole]))
        uses, left, paid, copies = uses[~whole], left[~whole], paid[~whole], copies[~whole]
        if len(uses) > MOST_STATES or sum(len(each) for each, _ in done) > MOST_STATES:
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


def first_of_each(uses: Shorts, limit: Shorts, rank: Floats) -> Ints:
    """Of the rows that use the same, the one with the least rank; `uses` within 0..limit."""
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
    new = np.zeros(max(len(order) - 1, 0), dtype=bool)
    for key in keys:
        new |= np.diff(key[order]) != 0
    return order[np.append(True, new)] if len(order) else order


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
