"""Closing the gap over whole covers: list all that could be in a better plan, then choose one per demand.

When few nodes are to be had, columns are a weak handle: their integer program has fractions everywhere, and a knapsack
ignores that a demand's own copies must fit its region. So every cover k of demand d (copies that meet it, within the
nodes there are) with L + excess_dk <= goal is listed, level by level, a copy at a time. Partial covers that use the
same nodes are one state, the one that has covered most. Any plan cheaper than the goal is then a choice among them:

    pick_d     sum_k y_dk = 1
    nodes_rc   sum_dk use_dkrc y_dk <= A_rc
    budget     sum_dk rent_dk y_dk <= B

whose relaxation is at least L; its reduced costs drop most covers before HiGHS sees the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.plan.allocate.bound import Bound
from potluck.plan.allocate.cover_data import ROUNDING, Cover
from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.highs import INFINITY, Milp, solve_milp
from potluck.plan.allocate.program import Floats, Ints
from potluck.plan.allocate.survivors import Chosen, Columns, Restricted

MOST_STATES = 40_000
"""Partial covers of one level, or covers of one demand, beyond which listing them is given up."""
MOST_PAIRS = 4_000_000
"""States times columns looked at together, for memory's sake."""


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """The covers of one demand: nodes used, cost, rent, and the copies of the restricted columns."""

    uses: Floats
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
    limit = np.concatenate([cover.available.ravel(), restricted.most[columns[restricted.most[columns] < INFINITY]]])
    uses = np.zeros((1, step.shape[1]))
    left, paid, copies = np.ones(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64)
    done: list[tuple[Floats, Ints]] = []
    while len(uses):
        found: list[tuple[Floats, Floats, Floats, Ints]] = []
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
        uses, left, paid, copies = _distinct(*(np.concatenate(each) for each in zip(*found, strict=True)))
        whole = left <= ROUNDING
        done.append((uses[whole], copies[whole]))
        uses, left, paid, copies = uses[~whole], left[~whole], paid[~whole], copies[~whole]
        if len(uses) > MOST_STATES or sum(len(each) for each, _ in done) > MOST_STATES:
            return None
    return _listed(restricted, done)


def _steps(restricted: Restricted, columns: Ints) -> Floats:
    """What one copy of each column takes: nodes, and one of its own for running columns."""
    shape = restricted.cover.available.shape
    step = np.zeros((len(columns), *shape))
    step[np.arange(len(columns)), restricted.region[columns]] = restricted.uses[columns]
    old = np.flatnonzero(restricted.most[columns] < INFINITY)
    own = np.zeros((len(columns), len(old)))
    own[old, np.arange(len(old))] = 1.0
    return np.hstack([step.reshape(len(columns), -1), own])


def _distinct(
    uses: Floats, left: Floats, paid: Floats, copies: Ints
) -> tuple[Floats, Floats, Floats, Ints]:
    """One state per set of nodes used: that which has covered most."""
    if not len(uses):
        return uses, left, paid, copies
    order = np.lexsort((left, *uses.T))
    ahead = uses[order]
    first = np.append(True, (ahead[1:] != ahead[:-1]).any(axis=1))
    keep = order[first]
    return uses[keep], left[keep], paid[keep], copies[keep]


def _listed(restricted: Restricted, done: list[tuple[Floats, Ints]]) -> Listed:
    nodes = restricted.cover.available.size
    most = max(copies.shape[1] for _, copies in done)
    padded = [np.pad(c, ((0, 0), (0, most - c.shape[1])), constant_values=-1) for _, c in done]
    copies = np.concatenate(padded)
    uses = np.concatenate([each[:, :nodes] for each, _ in done])
    held = copies >= 0
    cost = np.where(held, restricted.cost[copies], 0.0).sum(axis=1)
    rent = np.where(held, restricted.rent[copies], 0.0).sum(axis=1)
    return Listed(uses, cost, rent, copies)


def close_by_covers(
    cover: Cover, bound: Bound, columns: Columns, goal: float, deadline: Deadline, effort_s: float
) -> tuple[bool, float, Chosen | None]:
    """(settled, proven bound, plan below the goal if there is one); `columns`: all with L + excess <= goal."""
    restricted = Restricted(cover, columns)
    lists = []
    for d in range(len(cover.groups)):
        listed = list_covers(restricted, bound, d, goal - bound.value, deadline)
        if listed is None:
            return False, bound.value, None
        if not len(listed.cost):
            return True, goal, None
        lists.append(listed)
    return _choose(restricted, lists, goal, deadline, effort_s)


def _choose(
    restricted: Restricted, lists: list[Listed], goal: float, deadline: Deadline, effort_s: float
) -> tuple[bool, float, Chosen | None]:
    lower = -INFINITY
    for _ in range(4):
        problem = _choice(restricted.cover, lists)
        relaxed = solve_milp(problem, time_limit_s=deadline.left_s, relax=True)
        if relaxed.infeasible:
            return True, goal, None
        if relaxed.x is None or relaxed.row_dual is None or not relaxed.finished:
            return False, lower, None
        lower = max(lower, relaxed.objective)
        if lower >= goal:
            return True, goal, None
        size = sum(len(listed.cost) for listed in lists)
        lists = _reduce(lists, problem, relaxed.row_dual, goal - relaxed.objective)
        if any(not len(listed.cost) for listed in lists):
            return True, goal, None
        if sum(len(listed.cost) for listed in lists) > 0.9 * size:
            break
    lists = [listed.take(_minimal(listed)) for listed in lists]
    problem = _choice(restricted.cover, lists)
    answer = solve_milp(problem, time_limit_s=min(effort_s, deadline.left_s))
    if answer.infeasible:
        return True, goal, None
    plan = None if answer.x is None else _plan(restricted, lists, answer.x)
    settled = answer.finished and (plan is not None or answer.bound >= goal)
    return settled, min(goal, max(lower, answer.bound)), plan


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
        upper=np.ones(sum(sizes)),
        integer=np.ones(sum(sizes), dtype=bool),
        row_lower=np.concatenate([np.ones(demands), np.full(nodes + 1, -INFINITY)]),
        row_upper=np.concatenate([np.ones(demands), cover.available.ravel().astype(float), [budget]]),
        row=row,
        column=column,
        value=dense[column, row],
    )


def _reduce(lists: list[Listed], problem: Milp, dual: Floats, spare: float) -> list[Listed]:
    """Without the covers whose reduced cost alone takes the relaxation above the goal."""
    reduced = problem.cost - np.bincount(
        problem.column, problem.value * dual[problem.row], minlength=len(problem.cost)
    )
    ends = np.cumsum([len(listed.cost) for listed in lists])
    parts = np.split(reduced, ends[:-1])
    # A hair more than the spare, for the relaxation's own tolerance.
    room = spare + 1e-6 * max(1.0, abs(spare))
    return [l.take(np.flatnonzero(part <= room)) for l, part in zip(lists, parts, strict=True)]


def _minimal(listed: Listed) -> Ints:
    """Covers that no other one, with no more of any node and no dearer, makes needless."""
    order = np.lexsort((listed.uses.sum(axis=1), listed.cost))
    uses = listed.uses[order].astype(np.int16)
    keep = np.ones(len(order), dtype=bool)
    for k in range(len(order) - 1):
        if keep[k]:
            keep[k + 1 :] &= ~(uses[k + 1 :] >= uses[k]).all(axis=1)
    return np.sort(order[keep])


def _plan(restricted: Restricted, lists: list[Listed], x: Floats) -> Chosen | None:
    n = np.zeros(len(restricted))
    copies = [listed.copies for listed in lists]
    most = max(each.shape[1] for each in copies)
    padded = [np.pad(c, ((0, 0), (0, most - c.shape[1])), constant_values=-1) for c in copies]
    for path in np.concatenate(padded)[np.flatnonzero(x > 0.5)]:
        np.add.at(n, path[path >= 0], 1.0)
    return restricted.chosen(n) if restricted.feasible(n) else None
