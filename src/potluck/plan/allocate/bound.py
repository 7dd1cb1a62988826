"""The lagrangian bound: put prices on nodes (and the budget), and every demand becomes a knapsack of its own.

    L(mu, beta) = sum_d F_d(mu, beta) - sum_rc mu_rc A_rc - beta B  <=  cheapest plan,    mu, beta >= 0

A column j of demand d cannot be part of a plan cheaper than `cutoff` when
    L + e_j > cutoff,    e_j = c_j + F_d(G - u_j) - F_d(G)                    (`excess`)
since using it once leaves G - u_j to cover, at the least price there is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.plan.allocate.cover_data import Cover, Multipliers, reduced_prices
from potluck.plan.allocate.knapsack import Item, Table, cover_table, grid_units
from potluck.plan.allocate.program import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """L at some multipliers, with each demand's table."""

    at: Multipliers
    value: float
    tables: tuple[Table, ...]
    prices: tuple[Floats, ...]
    """[n, R] per demand: c_j."""
    units: tuple[Ints, ...]

    def excess(self, d: int) -> Floats:
        """[n, R]: e_j of every new column of a demand."""
        table = self.tables[d]
        rest = table.cost[len(table.cost) - 1 - self.units[d]]
        spare: Floats = self.prices[d] + (rest - table.value)[:, None]
        return spare


class Lagrangian:
    """Evaluates L on a grid; keeps what does not depend on the multipliers."""

    def __init__(self, cover: Cover, grid: int) -> None:
        self.cover = cover
        self.grid = grid
        self.units = tuple(grid_units(group.rate, group.need, grid) for group in cover.groups)

    def evaluate(self, at: Multipliers) -> Bound:
        cover = self.cover
        node_price = cover.new_price(at)
        tables, prices = [], []
        for d, group in enumerate(cover.groups):
            price = reduced_prices(group, node_price)
            cheapest = price.min(axis=1, initial=np.inf)
            tables.append(cover_table(self.units[d], cheapest, self._items(d, at), self.grid))
            prices.append(price)
        total = sum(table.value for table in tables)
        value = total - cover.relief(at)
        # What floating point may have lost in sums of this size.
        value -= 1e-11 * (abs(total) + cover.relief(at))
        return Bound(at, value, tuple(tables), tuple(prices), self.units)

    def _items(self, d: int, at: Multipliers) -> list[Item]:
        cover, need = self.cover, self.cover.groups[d].need
        node_price = cover.old_price(at)
        items = []
        for tag, old in enumerate(cover.olds):
            if old.group == d:
                units = int(grid_units(np.array([old.rate]), need, self.grid)[0])
                items.append(Item(units, float(old.uses @ node_price[old.key.region]), old.count, tag))
        return items
