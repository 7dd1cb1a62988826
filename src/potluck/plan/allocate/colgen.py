"""The linear relaxation of a cover program, by column generation.

Master rows, demands scaled to 1:
    cover_d    sum_j (T_j / need_d) n_j - theta >= 0
    nodes_rc   sum_j U_jc n_j <= A_rc
    budget     sum_j p_j n_j <= B

First theta <= 1 is maximised: below 1 the relaxation is infeasible and the duals say which rows bind. Then
theta is set to 1 and cost is minimised over the same columns. A column prices out when its price with the
node duals on top is below what its throughput earns: U_j (p_r (cost + beta) + mu_r) < pi_d T_j, tried for all
columns at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from potluck.plan.allocate.cover_data import Cover, Multipliers, reduced_prices
from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.highs import INFINITY, GrowingLp
from potluck.plan.allocate.program import Floats, Ints

PER_ROUND = 8
"""Columns per demand and round: more rounds cost passes over all columns, more columns cost pivots."""
TOLERANCE = 1e-7
THETA = 0


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """The solved relaxation; `theta` below 1 means that it has no solution."""

    theta: float
    objective: float
    at: Multipliers
    earn: Floats
    """pi_d, per unit of throughput."""
    converged: bool


class Master:
    """The growing linear program over the columns found so far."""

    def __init__(self, cover: Cover) -> None:
        self.cover = cover
        self._seen: set[tuple[int, int, int]] = set()
        self._needs = np.array([group.need for group in cover.groups])
        demands, shared = len(self._needs), cover.available.size
        budget = INFINITY if cover.budget is None else cover.budget
        self.lp = GrowingLp(
            np.concatenate([np.zeros(demands), np.full(shared + 1, -INFINITY)]),
            np.concatenate([np.full(demands, INFINITY), cover.available.ravel().astype(float), [budget]]),
        )
        theta = np.zeros((1, demands + shared + 1))
        theta[0, :demands] = -1.0
        self.lp.add(np.zeros(1), np.array([1.0]), theta)
        self._price = [0.0]
        olds = cover.olds
        self._append(
            np.array([old.group for old in olds], dtype=np.int64),
            np.array([old.rate for old in olds]),
            np.array([old.key.region for old in olds], dtype=np.int64),
            np.array([old.uses for old in olds]).reshape(len(olds), cover.available.shape[1]),
            np.array([float(old.count) for old in olds]),
            1.0,
        )

    def _append(
        self, group: Ints, rate: Floats, region: Ints, uses: Floats, upper: Floats, factor: float
    ) -> None:
        if not len(group):
            return
        cover, demands = self.cover, len(self._needs)
        types = cover.available.shape[1]
        dense = np.zeros((len(group), demands + cover.available.size + 1))
        index = np.arange(len(group))
        dense[index, group] = rate / self._needs[group]
        spread = demands + region[:, None] * types + np.arange(types)[None, :]
        dense[index[:, None], spread] = uses
        rent = (uses * cover.price[region]).sum(axis=1)
        dense[:, -1] = rent if cover.budget is not None else 0.0
        self.lp.add(np.zeros(len(group)), upper, dense)
        self._price.extend((rent * factor).tolist())

    def add(self, group: int, rows: Ints, regions: Ints) -> int:
        """Columns of one demand that are not there yet; how many there were."""
        pairs = [(int(i), int(r)) for i, r in zip(rows, regions, strict=True)]
        fresh = [(i, r) for i, r in pairs if (group, i, r) not in self._seen]
        if not fresh:
            return 0
        self._seen.update((group, i, r) for i, r in fresh)
        which = np.array([i for i, _ in fresh])
        where = np.array([r for _, r in fresh])
        of = self.cover.groups[group]
        full = np.full(len(fresh), group)
        unbounded = np.full(len(fresh), INFINITY)
        factor = 1 + self.cover.program.init_penalty
        self._append(full, of.rate[which], where, of.uses[which], unbounded, factor)
        return len(fresh)

    def aim(self, at_cost: bool) -> None:
        """Minimise cost with theta = 1, or maximise theta <= 1."""
        if at_cost:
            self.lp.set_bounds(THETA, 1.0, 1.0)
            self.lp.set_cost(np.array(self._price))
        else:
            self.lp.set_bounds(THETA, 0.0, 1.0)
            cost = np.zeros(len(self._price))
            cost[THETA] = -1.0
            self.lp.set_cost(cost)

    def solve(self, deadline: Deadline) -> Relaxed | None:
        solved = self.lp.solve(deadline.left_s)
        if solved is None:
            return None
        x, dual, objective = solved
        demands = len(self._needs)
        shape = self.cover.available.shape
        at = Multipliers(np.maximum(-dual[demands:-1], 0.0).reshape(shape), max(-float(dual[-1]), 0.0))
        earn = np.maximum(dual[:demands], 0.0) / self._needs
        return Relaxed(float(x[THETA]), objective, at, earn, converged=False)


def best_columns(prices: Floats, rate: Floats, earn: float, limit: int) -> tuple[Ints, Ints, float]:
    """The columns that lose least, per region the best few, and the least reduced cost of all."""
    reduced = prices - earn * rate[:, None]
    rows: list[Ints] = []
    regions: list[Ints] = []
    least = INFINITY
    for r in range(reduced.shape[1]):
        column = reduced[:, r]
        few = min(limit, len(column))
        if not few:
            continue
        pick = np.argpartition(column, few - 1)[:few]
        pick = pick[np.isfinite(column[pick])]
        least = min(least, float(column[pick].min(initial=INFINITY)))
        rows.append(pick)
        regions.append(np.full(len(pick), r))
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *rows]), np.concatenate([empty, *regions]), least


def relax(cover: Cover, deadline: Deadline, warm: tuple[Multipliers, Floats] | None = None) -> Relaxed | None:
    """Solve the relaxation; None when time ran out before the first solution."""
    master = Master(cover)
    at, earn = warm if warm is not None else (cover.zero(), None)
    for d, group in enumerate(cover.groups):
        prices = reduced_prices(group, cover.new_price(at))
        # Without earlier prices, start with what is cheapest per unit of throughput.
        ratio = prices.min(axis=1, initial=INFINITY) / group.rate
        pay = float(earn[d]) if earn is not None else float(ratio.min(initial=INFINITY))
        if np.isfinite(pay):
            rows, regions, _ = best_columns(prices, group.rate, pay, PER_ROUND)
            master.add(d, rows, regions)
    phase = _generate(master, deadline, at_cost=False)
    if phase is None or phase.theta < 1 - TOLERANCE or deadline.over:
        return phase
    return _generate(master, deadline, at_cost=True) or phase


def _generate(master: Master, deadline: Deadline, at_cost: bool) -> Relaxed | None:
    cover = master.cover
    last: Relaxed | None = None
    while not deadline.over:
        master.aim(at_cost)
        solved = master.solve(deadline)
        if solved is None:
            return last
        last = solved
        if not at_cost and solved.theta >= 1 - TOLERANCE:
            return solved
        price = cover.new_price(solved.at) if at_cost else cover.price * solved.at.budget + solved.at.nodes
        scale = max(abs(solved.objective), 1e-9) if at_cost else 1.0
        added = 0
        for d, group in enumerate(cover.groups):
            reduced = reduced_prices(group, price)
            rows, regions, _ = best_columns(reduced, group.rate, float(solved.earn[d]), PER_ROUND)
            worth = reduced[rows, regions] - solved.earn[d] * group.rate[rows] < -TOLERANCE * scale
            added += master.add(d, rows[worth], regions[worth])
        if not added:
            return replace(solved, converged=True)
    return last
