"""Closing the gap over listed covers: one per demand, the cheapest that fit together, or the proof of none.

    pick_d     sum_k y_dk = 1
    nodes_rc   sum_dk use_dkrc y_dk <= A_rc
    budget     sum_dk rent_dk y_dk <= B

The relaxation's duals (pi, mu, beta) split the cost of any choice into a constant and parts that are not negative,

    cost = [sum_d pi_d - mu A - beta B] + sum_d reduced_dk + mu (A - use) + beta (B - rent)

so covers whose reduced cost alone exceeds what is left to the goal are dropped, then those that another one
makes needless, and the demands are merged one by one: a state is the nodes used so far, with the least sum of
reduced costs, dropped when that sum exceeds what is left. The last and longest list is only looked through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from potluck.plan.allocate.bound import Bound
from potluck.plan.allocate.cover_data import Cover
from potluck.plan.allocate.covers import Listed, Shorts, groups_of_same, list_covers
from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.highs import INFINITY, GrowingLp
from potluck.plan.allocate.program import Floats, Ints
from potluck.plan.allocate.survivors import Chosen, Columns, Restricted

MOST_STATES = 400_000
MOST_PAIRS = 2_000_000
PER_ROUND = 60
MOST_COMPARED = 6_000
"""Covers of a demand up to which all pairs are compared for needless ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """`settled`: `plan` is the cheapest below the goal, or there is none; else only `lower` is proven."""

    settled: bool
    lower: float
    plan: Chosen | None = None


def close_by_covers(cover: Cover, bound: Bound, columns: Columns, goal: float, deadline: Deadline) -> Verdict:
    """Settle whether a plan cheaper than `goal` exists; `columns`: all with L + excess <= goal."""
    restricted = Restricted(cover, columns)
    lists = []
    for d in range(len(cover.groups)):
        listed = list_covers(restricted, bound, d, goal - bound.value, deadline)
        if listed is None:
            return Verdict(False, bound.value)
        if not len(listed.cost):
            return Verdict(True, goal)
        lists.append(listed)
    dual = _duals(cover, lists, goal, deadline)
    if dual is None:
        return Verdict(False, bound.value)
    constant, reduced = _split(cover, lists, dual)
    lower = max(bound.value, constant)
    if constant >= goal:
        return Verdict(True, goal)
    lists = [_thin(listed, part, goal - constant) for listed, part in zip(lists, reduced, strict=True)]
    if any(not len(listed.cost) for listed in lists):
        return Verdict(True, goal)
    constant, reduced = _split(cover, lists, dual)
    return _merge(restricted, lists, reduced, goal, constant, lower, deadline)


def _duals(cover: Cover, lists: list[Listed], goal: float, deadline: Deadline) -> Floats | None:
    """Duals of the relaxed choice, by column generation over the lists; None when time is over.

    A stand-in for every demand, dearer than the goal, makes the first few columns feasible.
    """
    demands, nodes = len(lists), cover.available.size
    limit = np.append(
        cover.available.ravel().astype(float), INFINITY if cover.budget is None else cover.budget
    )
    lp = GrowingLp(
        np.concatenate([np.ones(demands), np.full(nodes + 1, -INFINITY)]),
        np.concatenate([np.ones(demands), limit]),
    )
    lp.add(np.full(demands, 2 * goal), np.full(demands, INFINITY), np.eye(demands, demands + nodes + 1))
    inside = [np.zeros(len(listed.cost), dtype=bool) for listed in lists]
    worth = [listed.cost for listed in lists]
    while not deadline.over:
        fresh = 0
        for d, (listed, value) in enumerate(zip(lists, worth, strict=True)):
            few = min(PER_ROUND, len(value))
            pick = np.argpartition(value, few - 1)[:few]
            pick = pick[~inside[d][pick]]
            inside[d][pick] = True
            dense = np.zeros((len(pick), demands + nodes + 1))
            dense[:, d] = 1.0
            dense[:, demands:-1] = listed.uses[pick]
            dense[:, -1] = listed.rent[pick] if cover.budget is not None else 0.0
            lp.add(listed.cost[pick], np.full(len(pick), INFINITY), dense)
            fresh += len(pick)
        solved = lp.solve(deadline.left_s)
        if solved is None:
            return None
        dual = solved[1]
        worth = _reduced(cover, lists, dual)
        if not fresh or min(float(value.min()) for value in worth) > -1e-7 * goal:
            return dual
    return None


def _reduced(cover: Cover, lists: list[Listed], dual: Floats) -> list[Floats]:
    demands = len(lists)
    nodes = np.minimum(dual[demands:-1], 0.0)
    budget = min(float(dual[-1]), 0.0) if cover.budget is not None else 0.0
    return [
        listed.cost - dual[d] - listed.uses @ nodes - budget * listed.rent for d, listed in enumerate(lists)
    ]


def _split(cover: Cover, lists: list[Listed], dual: Floats) -> tuple[float, list[Floats]]:
    """The constant and each cover's reduced cost; exact for any duals, negative parts moved to the constant."""
    demands = len(lists)
    shared = np.minimum(dual[demands:], 0.0)
    limit = np.append(cover.available.ravel().astype(float), cover.budget or 0.0)
    parts = _reduced(cover, lists, dual)
    least = [float(part.min()) for part in parts]
    constant = float(dual[:demands].sum() + shared @ limit) + sum(least)
    parts = [part - low for part, low in zip(parts, least, strict=True)]
    return constant - 1e-9 * abs(constant), parts


def _thin(listed: Listed, reduced: Floats, spare: float) -> Listed:
    """Without covers that the goal rules out, or that another with no more of any node and no dearer replaces."""
    kept = listed.take(np.flatnonzero(reduced <= spare))
    if len(kept.cost) > MOST_COMPARED:
        return kept
    order = np.lexsort((kept.uses.sum(axis=1), kept.cost))
    uses = kept.uses[order]
    keep = np.ones(len(order), dtype=bool)
    for k in range(len(order) - 1):
        if keep[k]:
            keep[k + 1 :] &= ~(uses[k + 1 :] >= uses[k]).all(axis=1)
    return kept.take(np.sort(order[keep]))


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Partial choices: nodes used, sum of reduced costs, cost, and the cover taken from each list so far."""

    uses: Shorts
    paid: Floats
    cost: Floats
    trail: Ints

    def __len__(self) -> int:
        return len(self.paid)

    def take(self, rows: Ints | slice) -> States:
        return States(self.uses[rows], self.paid[rows], self.cost[rows], self.trail[rows])


class Merger:
    """Joins states with the covers of one more demand."""

    def __init__(self, cover: Cover, spare: float, deadline: Deadline) -> None:
        self.limit = cover.available.ravel().astype(np.int16)
        self.rents, self.budget = cover.price.ravel(), cover.budget
        self.spare, self.deadline = spare, deadline

    def start(self) -> States:
        none = np.zeros(1)
        return States(np.zeros((1, len(self.limit)), np.int16), none, none, np.zeros((1, 0), np.int64))

    def join(self, states: States, listed: Listed, reduced: Floats) -> Iterator[States]:
        """All pairs that fit, some at a time."""
        more = listed.uses
        chunk = max(1, MOST_PAIRS // max(1, len(more)))
        for first in range(0, len(states), chunk):
            some = states.take(slice(first, first + chunk))
            i, k = np.nonzero(some.paid[:, None] + reduced[None, :] <= self.spare)
            for part in range(0, len(i), MOST_PAIRS):
                yield self._fitting(some, listed, reduced, more, i[part:][:MOST_PAIRS], k[part:][:MOST_PAIRS])

    def _fitting(
        self, some: States, listed: Listed, reduced: Floats, more: Shorts, i: Ints, k: Ints
    ) -> States:
        after = some.uses[i] + more[k]
        fits = (after <= self.limit).all(axis=1)
        if self.budget is not None:
            fits &= after @ self.rents <= self.budget * (1 + 1e-9) + 1e-9
        i, k = i[fits], k[fits]
        trail = np.hstack([some.trail[i], k[:, None]])
        return States(after[fits], some.paid[i] + reduced[k], some.cost[i] + listed.cost[k], trail)

    def merge(self, states: States, listed: Listed, reduced: Floats) -> States | None:
        """One state per set of nodes used; None when they are too many or time is over."""
        found: list[States] = []
        for some in self.join(states, listed, reduced):
            found.append(some)
            if self.deadline.over or sum(map(len, found)) > 4 * MOST_STATES:
                return None
        if not found:
            return states.take(slice(0, 0))
        joined = States(
            np.concatenate([each.uses for each in found]),
            np.concatenate([each.paid for each in found]),
            np.concatenate([each.cost for each in found]),
            np.concatenate([each.trail for each in found]),
        )
        order, starts = groups_of_same(joined.uses, self.limit, joined.paid)
        distinct = joined.take(order[starts])
        return distinct if len(distinct) <= MOST_STATES else None

    def cheapest(self, states: States, listed: Listed, reduced: Floats) -> tuple[float, Ints] | None:
        """The least cost and its covers over all joins with the last list; None when time is over."""
        best, trail = INFINITY, np.zeros(0, np.int64)
        for some in self.join(states, listed, reduced):
            if self.deadline.over:
                return None
            if len(some) and some.cost.min() < best:
                best = float(some.cost.min())
                trail = some.trail[int(np.argmin(some.cost))]
        return best, trail


def _merge(
    restricted: Restricted,
    lists: list[Listed],
    reduced: list[Floats],
    goal: float,
    constant: float,
    lower: float,
    deadline: Deadline,
) -> Verdict:
    merger = Merger(restricted.cover, goal - constant, deadline)
    order = sorted(range(len(lists)), key=lambda d: len(lists[d].cost))
    states = merger.start()
    for d in order[:-1]:
        merged = merger.merge(states, lists[d], reduced[d])
        if merged is None:
            return Verdict(False, lower)
        if not len(merged):
            return Verdict(True, goal)
        states = merged
    found = merger.cheapest(states, lists[order[-1]], reduced[order[-1]])
    if found is None:
        return Verdict(False, lower)
    best, trail = found
    if best >= goal:
        return Verdict(True, goal)
    n = np.zeros(len(restricted))
    for d, k in zip(order, trail.tolist(), strict=True):
        path = lists[d].copies[k]
        np.add.at(n, path[path >= 0], 1.0)
    if not restricted.feasible(n):
        return Verdict(False, lower)
    return Verdict(True, best, restricted.chosen(n))
