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
from potluck.plan.allocate.covers import Listed, Shorts, first_of_each, list_covers
from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.highs import INFINITY, Milp, solve_milp
from potluck.plan.allocate.program import Floats, Ints
from potluck.plan.allocate.survivors import Chosen, Columns, Restricted

MOST_STATES = 400_000
MOST_PAIRS = 2_000_000
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
        lists.append(listed)
    lower = bound.value
    dual = np.zeros(0)
    for _ in range(3):
        if any(not len(listed.cost) for listed in lists):
            return Verdict(True, goal)
        problem = _choice(cover, lists)
        relaxed = solve_milp(problem, time_limit_s=deadline.left_s, relax=True)
        if relaxed.infeasible:
            return Verdict(True, goal)
        if relaxed.x is None or relaxed.row_dual is None or not relaxed.finished:
            return Verdict(False, lower)
        dual = relaxed.row_dual
        constant, reduced = _split(cover, lists, problem, dual)
        lower = max(lower, constant)
        if lower >= goal:
            return Verdict(True, goal)
        before = sum(len(listed.cost) for listed in lists)
        lists = [_thin(listed, part, goal - constant) for listed, part in zip(lists, reduced, strict=True)]
        if sum(len(listed.cost) for listed in lists) > 0.8 * before:
            break
    constant, reduced = _split(cover, lists, _choice(cover, lists), dual)
    return _merge(restricted, lists, reduced, goal, constant, lower, deadline)


def _choice(cover: Cover, lists: list[Listed]) -> Milp:
    demands, nodes = len(lists), cover.available.size
    sizes = [len(listed.cost) for listed in lists]
    dense = np.zeros((sum(sizes), demands + nodes + 1))
    dense[np.arange(sum(sizes)), np.repeat(np.arange(demands), sizes)] = 1.0
    dense[:, demands:-1] = np.concatenate([listed.uses for listed in lists])
    rent = np.concatenate([listed.rent for listed in lists])
    dense[:, -1] = rent if cover.budget is not None else 0.0
    column, row = np.nonzero(dense)
    budget = INFINITY if cover.budget is None else cover.budget
    return Milp(
        cost=np.concatenate([listed.cost for listed in lists]),
        lower=np.zeros(sum(sizes)),
        upper=np.full(sum(sizes), INFINITY),
        integer=np.zeros(sum(sizes), dtype=bool),
        row_lower=np.concatenate([np.ones(demands), np.full(nodes + 1, -INFINITY)]),
        row_upper=np.concatenate([np.ones(demands), cover.available.ravel().astype(float), [budget]]),
        row=row,
        column=column,
        value=dense[column, row],
    )


def _split(cover: Cover, lists: list[Listed], problem: Milp, dual: Floats) -> tuple[float, list[Floats]]:
    """The constant and each cover's reduced cost; exact for any duals, negative parts moved to the constant."""
    demands = len(lists)
    pick, shared = dual[:demands], np.minimum(dual[demands:], 0.0)
    signed = np.concatenate([pick, shared])
    reduced = problem.cost - np.bincount(
        problem.column, problem.value * signed[problem.row], minlength=len(problem.cost)
    )
    limit = np.append(cover.available.ravel().astype(float), cover.budget or 0.0)
    constant = float(pick.sum() + shared @ limit)
    parts = np.split(reduced, np.cumsum([len(listed.cost) for listed in lists])[:-1])
    least = [float(part.min(initial=INFINITY)) for part in parts]
    for d, low in enumerate(least):
        if np.isfinite(low):
            parts[d] = parts[d] - low
            constant += low
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
        distinct = joined.take(first_of_each(joined.uses, self.limit, joined.paid))
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
