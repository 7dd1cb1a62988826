"""The cover solver: relaxation, lagrangian bound, plans, and the proof that nothing better is left.

Steps
    relax       linear program over all columns by column generation         -> node prices
    bound       knapsacks at those prices; improved by cutting planes        -> L, a valid lower bound
    plan        the knapsacks' covers if they fit, else a small integer program and neighbourhood search
    close       columns whose excess takes L above what must be proven cannot matter; over the others, whole
                covers are listed and one per demand is chosen, or HiGHS proves the bound or finds a plan
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.plan.allocate.bound import Bound, Lagrangian
from potluck.plan.allocate.choose import close_by_covers
from potluck.plan.allocate.colgen import Relaxed, relax
from potluck.plan.allocate.cover_data import Cover, Multipliers
from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.dual import Covers, improve
from potluck.plan.allocate.primal import (
    FREED,
    Neighbourhoods,
    cheapest_columns,
    counts_of,
    knapsack_plan,
)
from potluck.plan.allocate.program import Floats, Ints
from potluck.plan.allocate.survivors import Chosen, Restricted, solve_restricted

COARSE, FINE = 2_000, 20_000
"""Grid steps per demand while prices are sought, and for the bound that counts."""
POOL, POOLS = 1_500, 6
"""Templates per demand that take part in the search for prices, and how often they are chosen anew."""
FIRST, SEARCH = 20, 60
"""Columns per demand in the first integer program and in the neighbourhood search."""
MOST_SURVIVORS = 4_000
MOST_LISTED, MOST_CLOSED = 2_000, 1_000
"""Columns up to which listing whole covers, and an integer program over them all, are tried."""
FEW = 8
EXACT = 1e-9
INSIDE = 0.999
"""How much of the gap asked for is used, so that rounding does not carry the answer past it."""


@dataclass(slots=True)
class State:
    """What is known so far; one mutator: the functions of this file, in order."""

    cover: Cover
    deadline: Deadline
    gap_target: float
    lower: float = -np.inf
    plan: Chosen | None = None
    bound: Bound | None = None
    relaxed: Relaxed | None = None
    solved: int = 0
    infeasible: bool = False

    @property
    def upper(self) -> float:
        return np.inf if self.plan is None else self.plan.cost

    @property
    def goal(self) -> float:
        """The bound that would do for the plan in hand."""
        allowed = self.gap_target * INSIDE * (self.upper + self.cover.fixed_cost)
        return self.upper - max(allowed, EXACT * self.upper)

    @property
    def done(self) -> bool:
        return self.infeasible or (self.plan is not None and self.lower >= self.goal)

    def offer(self, plan: Chosen | None) -> bool:
        if plan is not None and plan.cost < self.upper - EXACT * abs(plan.cost):
            self.plan = plan
            return True
        return False

    def raise_to(self, lower: float) -> None:
        self.lower = max(self.lower, min(lower, self.upper))


def solve_cover(
    cover: Cover,
    deadline: Deadline,
    gap_target: float,
    warm: tuple[Multipliers, Floats] | None,
    warm_plan: Chosen | None,
) -> State:
    """The best plan that time allows, or the proof that there is none."""
    state = State(cover, deadline, gap_target)
    if not cover.groups:
        state.plan, state.lower = Chosen({}, {}, 0.0), 0.0
        return state
    state.offer(warm_plan)
    state.relaxed = relax(cover, deadline, warm)
    if state.relaxed is None or deadline.over:
        return state
    if state.relaxed.theta < 1 - 1e-6:
        state.infeasible = state.relaxed.converged
        return state
    _bound(state)
    if state.done or deadline.over:
        return state
    _first_plan(state)
    _search(state)
    return state


def _bound(state: State) -> None:
    """L at the relaxation's prices, then at better ones, always over all columns."""
    cover = state.cover
    assert state.relaxed is not None
    fine = Lagrangian(cover, FINE)
    full = fine.evaluate(state.relaxed.at)
    _take(state, full)
    covers = Covers(cover, state.relaxed.at)
    for _ in range(POOLS):
        if state.done or state.deadline.over or not np.isfinite(full.value):
            return
        pool = Lagrangian(cover.restrict(_pool(full)), COARSE)
        better = improve(covers, pool, pool.evaluate(full.at), state.deadline, rounds=100)
        full = fine.evaluate(better.at)
        _take(state, full)
        # The pool's bound exceeds the true one only when a template left out of it would have been chosen.
        if better.value - full.value < 1e-4 * abs(full.value):
            return


def _take(state: State, bound: Bound) -> None:
    if bound.value > state.lower or state.bound is None:
        state.bound = bound
    state.raise_to(bound.value)
    if not np.isfinite(bound.value):
        state.infeasible = True
        return
    state.offer(knapsack_plan(state.cover, bound))


def _pool(bound: Bound) -> list[Ints]:
    """Per demand the templates whose best region has the least excess."""
    rows = []
    for d in range(len(bound.tables)):
        excess = bound.excess(d).min(axis=1)
        few = min(POOL, len(excess))
        rows.append(np.sort(np.argpartition(excess, few - 1)[:few]))
    return rows


def _first_plan(state: State) -> None:
    assert state.bound is not None
    limit = FIRST
    while not state.done and not state.deadline.over:
        columns = cheapest_columns(state.bound, limit, extra=state.plan)
        restricted = Restricted(state.cover, columns)
        start = None if state.plan is None else counts_of(restricted, state.plan)
        seconds = min(state.deadline.left_s, max(1.0, 0.12 * state.deadline.limit_s))
        answer, n = solve_restricted(
            restricted,
            state.bound,
            time_limit_s=seconds,
            gap_abs=0.95 * max(state.gap_target, 1e-9) * abs(state.bound.value),
            start=start,
        )
        state.solved = max(state.solved, len(restricted))
        if n is not None:
            state.offer(restricted.chosen(n))
        every = sum(group.fits.sum() for group in state.cover.groups) <= len(columns)
        if every and answer.infeasible:
            state.infeasible = True
            return
        if state.plan is not None or every:
            break
        limit *= 4
    if state.plan is None:
        _plan_by_covers(state)


def _plan_by_covers(state: State) -> None:
    """Where no plan was found: the cheapest one, when it is not far above the bound."""
    bound = state.bound
    assert bound is not None
    for above in (0.02, 0.04, 0.08, 0.16):
        goal = bound.value * (1 + above)
        columns = cheapest_columns(bound, MOST_SURVIVORS, ceiling=goal - bound.value)
        if len(columns) > MOST_LISTED or state.deadline.over or state.plan is not None:
            return
        verdict = close_by_covers(state.cover, bound, columns, goal, state.deadline)
        state.offer(verdict.plan)
        state.raise_to(verdict.lower)
        if not verdict.settled:
            return


def _search(state: State) -> None:
    """Neighbourhoods and attempts to close, in turn, until the goal, the proof or the deadline."""
    if state.plan is None or state.bound is None:
        return
    effort_s = 1.0
    for seed in range(1_000):
        if state.done or state.deadline.over:
            return
        # With few demands listing covers is quick and finds the optimum itself.
        if seed or len(state.cover.groups) > FEW:
            _neighbourhoods(state, seed, effort_s)
        if state.done or state.deadline.over or _close(state, effort_s):
            return
        effort_s *= 1.5


def _neighbourhoods(state: State, seed: int, effort_s: float) -> None:
    assert state.bound is not None
    assert state.plan is not None
    if len(state.cover.groups) <= FREED:
        return
    restricted = Restricted(state.cover, cheapest_columns(state.bound, SEARCH, extra=state.plan))
    n = counts_of(restricted, state.plan)
    assert n is not None
    around = Neighbourhoods(restricted, state.bound, seed)
    failures, start_s = 0, state.deadline.spent_s
    while not state.done and not state.deadline.over and failures < 5:
        if state.deadline.spent_s - start_s > 4 * effort_s:
            return
        better = around.step(
            n,
            size=FREED + (failures // 3),
            time_limit_s=min(0.6 * effort_s, state.deadline.left_s),
            gap_abs=1e-4 * state.upper,
        )
        failures = failures + 1 if better is None else 0
        if better is not None:
            n = better
            state.offer(restricted.chosen(n))


def _close(state: State, effort_s: float) -> bool:
    """Prove the goal over the columns that could undercut it; true when nothing is left to do."""
    bound = state.bound
    assert bound is not None
    if _deepen(state):
        return True
    goal = state.goal
    columns = cheapest_columns(bound, MOST_SURVIVORS, ceiling=goal - bound.value)
    every = min(goal, bound.value + _least_left_out(bound, goal))
    state.solved = max(state.solved, len(columns))
    if len(columns) > MOST_CLOSED:
        return False
    restricted = Restricted(state.cover, columns)
    answer, n = solve_restricted(
        restricted, None, time_limit_s=min(effort_s, state.deadline.left_s), gap_abs=0.0, cutoff=goal
    )
    if n is not None and state.offer(restricted.chosen(n)):
        state.raise_to(min(every, answer.bound))
        return False
    state.raise_to(min(every, np.inf if answer.infeasible else answer.bound))
    return answer.infeasible and every >= goal


def _deepen(state: State) -> bool:
    """Settle nearer goals first: each either raises the bound to it or finds the optimum; true when done.

    What there is to list grows fast with the distance, so the steps before the last cost little, and a plan in
    hand that is far from the optimum does not make the search longer.
    """
    bound = state.bound
    assert bound is not None
    for part in (0.5, 0.75, 0.88, 1.0):
        goal = bound.value + part * (state.goal - bound.value)
        if goal <= state.lower and part < 1.0:
            continue
        columns = cheapest_columns(bound, MOST_SURVIVORS, ceiling=goal - bound.value)
        if len(columns) > MOST_LISTED or state.deadline.over:
            return False
        state.solved = max(state.solved, len(columns))
        verdict = close_by_covers(state.cover, bound, columns, goal, state.deadline)
        state.offer(verdict.plan)
        state.raise_to(verdict.lower)
        if state.done or not verdict.settled:
            return state.done
    return False


def _least_left_out(bound: Bound, goal: float) -> float:
    """The least excess of a column that was left out only because there were too many."""
    least = np.inf
    for d in range(len(bound.tables)):
        excess = bound.excess(d).ravel()
        if (excess <= goal - bound.value).sum() > MOST_SURVIVORS:
            least = min(least, float(np.partition(excess, MOST_SURVIVORS)[MOST_SURVIVORS]))
    return least
