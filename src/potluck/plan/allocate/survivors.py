"""The integer program over a chosen few columns of a cover program.

Rows
    cover_d    sum_j (T_j / need_d) n_j >= 1
    nodes_rc   sum_j U_jc n_j <= A_rc
    budget     sum_j p_j n_j <= B
    bound_d    sum_{j of d} c_j n_j >= F_d      c_j, F_d at the lagrangian's prices: the root then starts at L
    cutoff     sum_j cost_j n_j <= cutoff       when only plans cheaper than the one in hand are of interest
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.plan.allocate.bound import Bound
from potluck.plan.allocate.cover_data import ROUNDING, Cover, Multipliers
from potluck.plan.allocate.highs import INFINITY, Milp, MilpResult, solve_milp
from potluck.plan.allocate.program import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """New columns (group, row in the group, region), then every running column."""

    group: Ints
    row: Ints
    region: Ints

    def __len__(self) -> int:
        return len(self.group)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A plan of the cover: copies per new column and per running column."""

    new: dict[tuple[int, int, int], int]
    old: dict[int, int]
    cost: float


class Restricted:
    """The arrays of a restricted program: everything a heuristic or HiGHS asks about its columns."""

    def __init__(self, cover: Cover, columns: Columns) -> None:
        self.cover, self.columns = cover, columns
        olds = cover.olds
        types = cover.available.shape[1]
        self.group = np.concatenate([columns.group, np.array([o.group for o in olds], dtype=np.int64)])
        self.region = np.concatenate([columns.region, np.array([o.key.region for o in olds], dtype=np.int64)])
        uses = [cover.groups[int(g)].uses[int(i)] for g, i in zip(columns.group, columns.row, strict=True)]
        self.uses = np.array([*uses, *(o.uses for o in olds)]).reshape(len(self.group), types)
        rate = [cover.groups[int(g)].rate[int(i)] for g, i in zip(columns.group, columns.row, strict=True)]
        needs = np.array([group.need for group in cover.groups])
        self.part = np.array([*rate, *(o.rate for o in olds)]) / needs[self.group]
        self.rent = (self.uses * cover.price[self.region]).sum(axis=1)
        factor = np.ones(len(self.group))
        factor[: len(columns)] += cover.program.init_penalty
        self.cost = self.rent * factor
        self.most = np.concatenate([np.full(len(columns), np.inf), np.array([float(o.count) for o in olds])])

    def __len__(self) -> int:
        return len(self.group)

    def reduced(self, at: Multipliers) -> Floats:
        """c_j of every column."""
        reduced: Floats = self.cost + at.budget * self.rent + (self.uses * at.nodes[self.region]).sum(axis=1)
        return reduced

    def feasible(self, n: Floats) -> bool:
        """Checked in whole numbers, not with the solver's tolerance."""
        cover = self.cover
        met = np.bincount(self.group, self.part * n, minlength=len(cover.groups))
        nodes = self.nodes(n)
        rent_ok = cover.budget is None or float(self.rent @ n) <= cover.budget * (1 + ROUNDING) + ROUNDING
        inside = bool((n <= self.most).all() and (n >= 0).all())
        return inside and rent_ok and bool((met >= 1 - ROUNDING).all() and (nodes <= cover.available).all())

    def nodes(self, n: Floats) -> Floats:
        nodes = np.zeros(self.cover.available.shape)
        np.add.at(nodes, self.region, self.uses * n[:, None])
        return nodes

    def chosen(self, n: Floats) -> Chosen:
        count = len(self.columns)
        new = {
            (int(self.group[j]), int(self.columns.row[j]), int(self.region[j])): int(n[j])
            for j in np.flatnonzero(n[:count])
        }
        old = {int(j): int(n[count + j]) for j in np.flatnonzero(n[count:])}
        return Chosen(new, old, float(self.cost @ n))

    def milp(
        self,
        bound: Bound | None,
        free: Ints | None = None,
        held: Floats | None = None,
        cutoff: float = INFINITY,
    ) -> Milp:
        """The program over demands `free` (default all) beside the copies `held` of the others."""
        cover = self.cover
        demands = np.arange(len(cover.groups)) if free is None else free
        place = np.full(len(cover.groups), -1)
        place[demands] = np.arange(len(demands))
        left = cover.available - (0 if held is None else self.nodes(held))
        types = left.shape[1]
        fit = np.where(self.uses > 0, left[self.region] // np.maximum(self.uses, 1), np.inf).min(axis=1)
        upper = np.minimum(np.minimum(fit, self.most), np.ceil(1 / self.part))
        which, node = np.nonzero(self.uses)
        count, rows = len(self.group), len(demands)
        every = np.arange(count)
        row = [place[self.group], rows + self.region[which] * types + node]
        column, value = [every, which], [self.part, self.uses[which, node]]
        low = [np.ones(rows), np.full(left.size, -INFINITY)]
        high = [np.full(rows, INFINITY), left.ravel().astype(float)]
        next_row = rows + left.size
        if cover.budget is not None:
            row.append(np.full(count, next_row))
            column.append(every)
            value.append(self.rent)
            low.append(np.array([-INFINITY]))
            high.append(np.array([cover.budget - (0.0 if held is None else float(self.rent @ held))]))
            next_row += 1
        if bound is not None:
            row.append(next_row + place[self.group])
            column.append(every)
            value.append(self.reduced(bound.at))
            # A hair less, so that rounding in F never cuts off the best plan.
            low.append(np.array([bound.tables[int(d)].value * (1 - 1e-9) for d in demands]))
            high.append(np.full(rows, INFINITY))
            next_row += rows
        if cutoff < INFINITY:
            row.append(np.full(count, next_row))
            column.append(every)
            value.append(self.cost)
            low.append(np.array([-INFINITY]))
            high.append(np.array([cutoff]))
        return Milp(
            cost=self.cost,
            lower=np.zeros(count),
            upper=upper,
            integer=np.ones(count, dtype=bool),
            row_lower=np.concatenate(low),
            row_upper=np.concatenate(high),
            row=np.concatenate(row),
            column=np.concatenate(column),
            value=np.concatenate(value),
        )


def solve_restricted(
    restricted: Restricted,
    bound: Bound | None,
    *,
    time_limit_s: float,
    gap_abs: float,
    start: Floats | None = None,
    cutoff: float = INFINITY,
) -> tuple[MilpResult, Floats | None]:
    """HiGHS on the restricted program; the plan only when it stands the exact check."""
    problem = restricted.milp(bound, cutoff=cutoff)
    answer = solve_milp(problem, time_limit_s=time_limit_s, gap_abs=gap_abs, start=start)
    if answer.x is None:
        return answer, None
    n = np.rint(answer.x)
    return answer, n if restricted.feasible(n) else None
