"""Relaxation by column generation (`relaxation.py`), then HiGHS on the columns that can still matter.

A new column j with bound + reduced cost above what must be proven cannot be in a plan that undercuts it. The integer
program over the others therefore proves the least of its own bound and of the cheapest column left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck.plan.allocate.highs import INFINITY, Deadline, MilpResult, solve_milp
from potluck.plan.allocate.matrix import THETA, FlowRows
from potluck.plan.allocate.program import ColumnKey, Floats, FlowProgram
from potluck.plan.allocate.relaxation import Pricer, Relaxation, relax_flow, with_whole_rows

EXACT = 1e-9
WHOLE = 1e-6  # How far from whole a count may be for HiGHS.
FIRST = 6  # Columns per model and region beside those of the relaxation, in the first integer program.
TRIES = 4
SMALL = 60  # Columns with which an integer program is soon solved: no need to try a few of them first.
MOST_SURVIVORS = 800  # Columns per model and region in the integer program that closes the gap.


@dataclass(slots=True)
class FlowState:
    """What is known so far. Values are costs, or -theta when the fraction is maximised."""

    pricer: Pricer
    deadline: Deadline
    gap_target: float
    at_cost: bool = True
    relaxed: Relaxation | None = None
    prices: Relaxation | None = None
    """The relaxation without rows for whole copies, whose duals are prices of single units."""
    lower: float = -INFINITY
    upper: float = INFINITY
    counts: dict[ColumnKey, int] | None = None
    infeasible: bool = False
    ready: bool = False

    @property
    def goal(self) -> float:
        return self.upper - max(self.gap_target, EXACT) * abs(self.upper)

    @property
    def done(self) -> bool:
        return self.infeasible or (self.counts is not None and self.lower >= self.goal)


Starts = Sequence[dict[ColumnKey, int]]  # Plans that may be known already.


def solve_flow(program: FlowProgram, deadline: Deadline, gap_target: float, starts: Starts) -> FlowState:
    """The cheapest plan, or the proof that there is none."""
    state = begun(program, deadline, gap_target, starts)
    if state.ready:
        close(state)
    return state


def begun(program: FlowProgram, deadline: Deadline, gap_target: float, starts: Starts) -> FlowState:
    pricer = Pricer(program)
    state = FlowState(pricer, deadline, gap_target)
    for counts in starts:  # before anything that time may not suffice for
        offer_counts(state, counts)
    keys = sorted({*pricer.first_keys(), *(key for start in starts for key in start)})
    state.relaxed = state.prices = relax_flow(pricer, deadline, at_cost=True, keys=keys)
    if state.relaxed is None:  # as a rule not all demand can be met
        start = relax_flow(pricer, deadline, at_cost=False, keys=keys)
        if start is None:
            # Only rows without theta can be at fault: pins, against nodes or budget.
            state.infeasible = not deadline.over and state.counts is None
            return state
        if start.theta < 1 - 1e-6:
            state.relaxed, state.infeasible = start, start.converged and state.counts is None
            return state
        state.relaxed = state.prices = relax_flow(pricer, deadline, at_cost=True, keys=start.keys)
        if state.relaxed is None:
            state.relaxed = start
            return state
    state.lower = state.relaxed.bound
    small = sum(int((most >= 1).sum()) for most in pricer.most) <= SMALL
    closer = None if small or state.done else with_whole_rows(pricer, state.relaxed, deadline)
    if closer is not None and closer[1].bound > state.relaxed.bound:
        state.pricer, state.relaxed = closer
        state.lower = state.relaxed.bound
    state.ready = True
    return state


def close(state: FlowState) -> None:
    """Integer programs over ever more columns, until nothing that is left out can matter."""
    relaxed = state.relaxed
    assert relaxed is not None
    limit, tries = FIRST, 0
    if len(_undercutting(state, MOST_SURVIVORS)) <= SMALL:
        limit = MOST_SURVIVORS
    while not state.done and not state.deadline.over and tries < TRIES:
        # The first one looks for a plan; from then on the columns are those that could undercut the goal.
        ceiling = _ceiling(state)
        keys = _undercutting(state, limit)
        left_out = _least_left_out(state, set(keys))
        rows = FlowRows(state.pricer.program, keys)
        whole = left_out == INFINITY or left_out > ceiling
        share = 1.0 if whole and limit > FIRST else 0.4
        answer = _run(state, rows, share)
        proven = min(relaxed.bound + left_out, INFINITY if answer.infeasible else answer.bound)
        if whole and answer.infeasible and state.counts is None:
            state.infeasible = True
            return
        state.lower = max(state.lower, min(proven, state.upper))
        if whole and answer.finished:
            return
        tries += whole
        limit = MOST_SURVIVORS if limit == FIRST else 4 * limit


def _ceiling(state: FlowState) -> float:
    """The reduced cost above which no column can be in a plan that reaches the goal."""
    assert state.relaxed is not None
    return state.goal - state.relaxed.bound if state.counts is not None else INFINITY


def _undercutting(state: FlowState, limit: int) -> list[ColumnKey]:
    """Columns of the next integer program: per model and region at most so many of those that could matter."""
    assert state.relaxed is not None
    few = state.pricer.cheapest(state.relaxed.reduced, limit, _ceiling(state))
    return sorted({*_always(state), *few})


def _always(state: FlowState) -> list[ColumnKey]:
    """Running, pinned and incumbent columns, and until there is a plan those of the relaxation."""
    program = state.pricer.program
    keys = [count.key for count in program.running] + [pin.key for pin in program.pins]
    if state.counts is not None:
        return keys + list(state.counts)
    assert state.relaxed is not None
    return keys + state.relaxed.keys


def _least_left_out(state: FlowState, keys: set[ColumnKey]) -> float:
    """The least reduced cost of a column that is not there; infinite when all are."""
    assert state.relaxed is not None
    least = INFINITY
    for m, table in enumerate(state.relaxed.reduced):
        spare = table.copy()
        inside = [(key.template, key.region) for key in keys if key.group == m]
        if inside:
            spare[tuple(np.array(inside).T)] = np.inf
        least = min(least, float(spare.min(initial=np.inf)))
    return least


def _run(state: FlowState, rows: FlowRows, share: float) -> MilpResult:
    milp = rows.milp(at_cost=state.at_cost)
    integers = np.array(sorted([*rows.new.values(), *rows.old.values()]), dtype=np.int64)
    start = None if state.counts is None else (integers, start_vector(rows, state.counts)[integers])
    answer = solve_milp(
        milp, time_limit_s=share * state.deadline.left_s, gap_rel=0.5 * state.gap_target, start=start
    )
    if answer.x is not None and (settled := settle(rows, answer.x, state.at_cost, state.deadline)):
        value, x = settled
        if value < state.upper:
            state.upper, state.counts = value, rows.counts(x)
    return answer


def start_vector(rows: FlowRows, counts: dict[ColumnKey, int]) -> Floats:
    x = np.zeros(len(rows.entries.cost))
    for key, count in counts.items():
        old = rows.old.get(key)
        kept = 0.0 if old is None else min(float(count), rows.entries.upper[old])
        if old is not None:
            x[old] = kept
        x[rows.new[key]] = count - kept
    return x


def settle(
    rows: FlowRows, x: Floats, at_cost: bool, deadline: Deadline, theta: float = 1.0
) -> tuple[float, Floats] | None:
    """With the counts made whole, the best shares and flows; None when whole counts do not suffice.

    HiGHS calls 1.000001 copies whole: where exactly 1 falls short, that much less of the demand will do. At cost,
    `theta` of the demand is served.
    """
    milp = rows.milp(at_cost=at_cost)
    whole = np.array(sorted([*rows.new.values(), *rows.old.values()]), dtype=np.int64)
    linear = not any(helper.whole for helper in rows.program.helpers)  # those are not copies, and stay free
    if at_cost:
        milp.lower[THETA] = milp.upper[THETA] = theta
    milp.lower[whole] = milp.upper[whole] = np.rint(x[whole])
    for relax in (False, linear) if rows.order else (linear,):
        answer = solve_milp(milp, time_limit_s=deadline.final_s, relax=relax)
        if answer.infeasible and at_cost:
            milp.lower[THETA] = theta * (1 - (10 if rows.order else 1) * WHOLE)
            answer = solve_milp(milp, time_limit_s=deadline.final_s, relax=relax)
        if answer.x is None:
            return None
        # What is whole within a millionth would let as much cross out of order.
        milp.lower[rows.order] = milp.upper[rows.order] = np.rint(answer.x[rows.order])
    if answer.x is None or not answer.finished:
        return None
    final = answer.x.copy()
    final[whole] = np.rint(x[whole])
    return (answer.objective if at_cost else -float(final[THETA])), final


def offer_counts(state: FlowState, counts: dict[ColumnKey, int]) -> None:
    """An earlier plan, where it still is one and better than what is known."""
    program = state.pricer.program
    fixed = {column_count.key for column_count in program.running} | {pin.key for pin in program.pins}
    rows = FlowRows(program, sorted({*counts, *fixed}))
    x = start_vector(rows, counts)
    if (x > np.array(rows.entries.upper) + 0.5).any():
        return
    settled = settle(rows, x, state.at_cost, state.deadline)
    if settled is not None and settled[0] < state.upper:
        state.upper, state.counts = settled[0], rows.counts(settled[1])
