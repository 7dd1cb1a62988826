"""Better node prices: the lagrangian dual by cutting planes.

Every whole cover k of demand d that the knapsacks have returned is a column of

    min sum_dk cost_dk y_dk + sum_i cap_i s_i
    pick_d   sum_k y_dk = 1
    shared_i sum_dk use_dki y_dk - s_i <= A_i          i: nodes_rc and the budget

whose duals are the next prices to try (cap_i keeps them within reason). The next evaluation is taken between
them and the best prices so far, since the duals alone swing about.
"""

from __future__ import annotations

import numpy as np

from potluck.plan.allocate.bound import Bound, Lagrangian
from potluck.plan.allocate.cover_data import Cover, Multipliers
from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.highs import INFINITY, GrowingLp
from potluck.plan.allocate.program import Floats

TRUST = 0.7
"""How far to stay with the best prices."""
PATIENCE = 30
"""Rounds without worthwhile progress after which to stop."""
PROGRESS = 1e-4


class Covers:
    """The covers seen so far and the linear program over them."""

    def __init__(self, cover: Cover, at: Multipliers) -> None:
        self.cover = cover
        self._demands, self._shared = len(cover.groups), cover.available.size + 1
        budget = 0.0 if cover.budget is None else cover.budget
        limit = np.concatenate([cover.available.ravel().astype(float), [budget]])
        self.lp = GrowingLp(
            np.concatenate([np.ones(self._demands), np.full(self._shared, -INFINITY)]),
            np.concatenate([np.ones(self._demands), limit]),
        )
        cap = 4 * (cover.price + at.nodes) + 2 * at.nodes.max(initial=0.0)
        slack = np.zeros((self._shared, self._demands + self._shared))
        slack[:, self._demands :] = -np.eye(self._shared)
        # Without a budget its row must not bind.
        cost = np.append(cap.ravel(), 4 * (1 + at.budget) if cover.budget is not None else 0.0)
        self.lp.add(cost, np.full(self._shared, INFINITY), slack)
        self._seen: set[bytes] = set()

    def add(self, cover: Cover, bound: Bound) -> bool:
        """The cover of every demand that these prices favour; false when all were known.

        `cover` may hold fewer templates than the program, `bound` belongs to it.
        """
        rows = [self._column(cover, bound, d) for d in range(self._demands)]
        fresh = [(cost, row) for cost, row in rows if row.tobytes() not in self._seen]
        self._seen.update(row.tobytes() for _, row in fresh)
        if fresh:
            costs = np.array([cost for cost, _ in fresh])
            self.lp.add(costs, np.full(len(fresh), INFINITY), np.array([row for _, row in fresh]))
        return bool(fresh)

    def _column(self, cover: Cover, bound: Bound, d: int) -> tuple[float, Floats]:
        group = cover.groups[d]
        new, old = bound.tables[d].best()
        nodes = np.zeros(cover.available.shape)
        penalty = 1 + cover.program.init_penalty
        cost = rent = 0.0
        for row, copies in new.items():
            region = int(np.argmin(bound.prices[d][row]))
            nodes[region] += copies * group.uses[row]
            price = copies * float(group.uses[row] @ cover.price[region])
            cost, rent = cost + price * penalty, rent + price
        for tag, copies in old.items():
            one = cover.olds[tag]
            nodes[one.key.region] += copies * one.uses
            price = copies * float(one.uses @ cover.price[one.key.region])
            cost, rent = cost + price, rent + price
        line = np.zeros(self._demands + self._shared)
        line[d] = 1.0
        line[self._demands : -1] = nodes.ravel()
        line[-1] = rent if cover.budget is not None else 0.0
        return cost, line

    def prices(self, deadline: Deadline) -> tuple[Multipliers, float] | None:
        solved = self.lp.solve(deadline.left_s)
        if solved is None:
            return None
        _, dual, objective = solved
        shared = np.maximum(-dual[self._demands :], 0.0)
        return Multipliers(shared[:-1].reshape(self.cover.available.shape), float(shared[-1])), objective


def improve(covers: Covers, lagrangian: Lagrangian, start: Bound, deadline: Deadline, rounds: int) -> Bound:
    """The best bound that some rounds of cutting planes find, from the prices of `start`."""
    best = start
    covers.add(lagrangian.cover, start)
    stale = 0
    for _ in range(rounds):
        found = None if deadline.over else covers.prices(deadline)
        if found is None:
            break
        out, ceiling = found
        if ceiling - best.value <= PROGRESS * abs(ceiling):
            break
        bound = lagrangian.evaluate(_between(best.at, out, TRUST))
        fresh = covers.add(lagrangian.cover, bound)
        if bound.value > best.value:
            stale = stale + 1 if bound.value - best.value < PROGRESS * abs(best.value) else 0
            best = bound
        else:
            stale += 1
            if not fresh:  # the step between lies in known ground: go all the way
                bound = lagrangian.evaluate(out)
                if not covers.add(lagrangian.cover, bound) and bound.value <= best.value:
                    break
                best = bound if bound.value > best.value else best
        if stale >= PATIENCE:
            break
    return best


def _between(a: Multipliers, b: Multipliers, trust: float) -> Multipliers:
    return Multipliers(trust * a.nodes + (1 - trust) * b.nodes, trust * a.budget + (1 - trust) * b.budget)
