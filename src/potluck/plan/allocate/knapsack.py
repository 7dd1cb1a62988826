"""The covering knapsack: the cheapest whole copies that cover one demand, once nodes have prices.

    F(t) = min { sum_j c_j n_j : sum_j u_j n_j >= t, n_j whole },   t = 0..G,   F(G) covers the demand

Throughputs are rounded up to the grid delta = need / G, so every true cover is a cover on the grid and F(G)
is a valid lower bound; it is weaker by at most one part in G per copy.

Running columns come in bounded numbers (v_j copies at the price without the penalty); they are folded in
after the unbounded ones, as v_j items split into powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from potluck.plan.allocate.program import Floats, Ints

BLOCKS = 8
"""Up to so many copies are added one after the other; beyond that, in powers of two."""


def grid_units(rate: Floats, need: float, grid: int) -> Ints:
    """u_j: rates in grid steps, rounded up; at least 1, at most the whole demand."""
    units = np.ceil(rate * (grid / need * (1 + 1e-9)))
    return np.clip(units, 1, grid).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Up to `count` copies of a running column; `tag` is the caller's."""

    units: int
    price: float
    count: int
    tag: int


@dataclass(slots=True, eq=False)
class Table:
    """F, and what is needed to read a best cover out of it."""

    cost: Floats
    """F(0..G)"""
    units: Ints
    price: Floats
    row: Ints
    """The unbounded items that survived, ascending; `row` is the caller's index of each."""
    unbounded: Floats
    folds: list[tuple[Item, int, Floats]] = field(default_factory=list)
    """(item, copies in this step, F before the step)"""

    @property
    def value(self) -> float:
        return float(self.cost[-1])

    def best(self) -> tuple[dict[int, int], dict[int, int]]:
        """Copies per row of the unbounded items and per tag of the bounded ones, for the whole demand."""
        left = len(self.cost) - 1
        old: dict[int, int] = {}
        after = self.cost
        for item, copies, before in reversed(self.folds):
            if after[left] < before[left]:
                old[item.tag] = old.get(item.tag, 0) + copies
                left = max(0, left - copies * item.units)
            after = before
        new: dict[int, int] = {}
        while left > 0:
            reach = self.price + self.unbounded[np.maximum(left - self.units, 0)]
            pick = int(np.argmin(reach))
            row = int(self.row[pick])
            new[row] = new.get(row, 0) + 1
            left = max(0, left - int(self.units[pick]))
        return new, old


def frontier(units: Ints, price: Floats) -> Ints:
    """Rows, ascending in units and price, that no row with as many units undercuts; `units` ascending."""
    if not len(units):
        return np.zeros(0, dtype=np.int64)
    starts = np.flatnonzero(np.diff(units, prepend=-1))
    cheapest = np.minimum.reduceat(price, starts)
    above = np.minimum.accumulate(cheapest[::-1])[::-1]
    beaten = np.append(above[1:] <= cheapest[:-1], False)
    groups = np.flatnonzero(~beaten & np.isfinite(cheapest))
    lengths = np.diff(np.append(starts, len(units)))
    least = np.flatnonzero(price == np.repeat(cheapest, lengths))
    owner = np.repeat(np.arange(len(starts)), lengths)[least]
    first: Ints = least[np.flatnonzero(np.diff(owner, prepend=-1))][groups]
    return first


def cover_table(units: Ints, price: Floats, olds: list[Item], grid: int) -> Table:
    """Fill F; `units` ascending, infinite prices mean that a row cannot be had."""
    cost = np.full(grid + 1, np.inf)
    cost[0] = 0.0
    rows = frontier(units, price)
    kept = []
    for row in rows:
        size, each = int(units[row]), float(price[row])
        # Smaller items together, or larger ones alone, may already do as well.
        if cost[size] <= each:
            continue
        kept.append(row)
        _add_unbounded(cost, size, each)
    chosen = np.array(kept, dtype=np.int64)
    table = Table(cost, units[chosen], price[chosen], chosen, cost)
    for item in olds:
        left, step = item.count, 1
        while left > 0:
            copies = min(step, left)
            before = table.cost
            shift = min(copies * item.units, grid)
            after = before.copy()
            each = copies * item.price
            np.minimum(after[: shift + 1], each, out=after[: shift + 1])
            after[0] = 0.0
            np.minimum(after[shift:], before[: grid + 1 - shift] + each, out=after[shift:])
            table.folds.append((item, copies, before))
            table.cost = after
            left, step = left - copies, step * 2
    return table


def _add_unbounded(cost: Floats, size: int, each: float) -> None:
    """F(t) = min(F(t), each + F(max(0, t - size))), any number of times."""
    grid = len(cost) - 1
    np.minimum(cost[1 : size + 1], each, out=cost[1 : size + 1])
    if grid <= BLOCKS * size:
        for start in range(size + 1, grid + 1, size):
            stop = min(start + size, grid + 1)
            np.minimum(cost[start:stop], cost[start - size : stop - size] + each, out=cost[start:stop])
        return
    copies = 1
    while (copies - 1) * size < grid:  # so far up to copies - 1 of them
        shift = min(copies * size, grid)
        np.minimum(cost[shift:], cost[:-shift] + copies * each, out=cost[shift:])
        head = cost[1 : shift + 1]
        np.minimum(head, copies * each, out=head)
        copies *= 2
