"""Relaxation by column generation (`relaxation.py`), then HiGHS on the columns that can still matter.

A new column j whose bound plus reduced cost exceeds the goal cannot be in a plan below the goal. So the integer
program over the other columns proves the lesser of its own bound and that of the cheapest omitted column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck.plan.allocate.highs import INFINITY, Deadline, MilpResult, solve_milp
from potluck.plan.allocate.matrix import THETA, FlowRows
from potluck.plan.allocate.program import ColumnKey, Floats, FlowProgram
from potluck.plan.allocate.relaxation import Pricer, Relaxation, relax_flow, with_whole_copy_rows

GAP_TOLERANCE = 1e-9
INTEGRALITY_TOLERANCE = 1e-6  # How far HiGHS lets an integer variable be from an integer.
FIRST_COLUMNS = 6  # Columns per model and region, beside the relaxation's, in the first integer program.
MAX_TRIES = 4  # Integer programs over all columns below the ceiling.
SMALL_PROGRAM_COLUMNS = 60  # Programs up to this size are solved at once, without a smaller one first.
MAX_COLUMNS = 800  # Columns per model and region in the integer program that closes the gap.


@dataclass(slots=True)
class FlowState:
    """Progress of one solve: relaxation, bounds, incumbent. Values are costs, or -theta when theta is maximised."""

    pricer: Pricer
    deadline: Deadline
    gap_target: float
    at_cost: bool = True
    relaxed: Relaxation | None = None
    prices: Relaxation | None = None
    """The relaxation without the rows for whole copies; its duals are prices of single units."""
    lower: float = -INFINITY
    upper: float = INFINITY
    counts: dict[ColumnKey, int] | None = None
    infeasible: bool = False
    ready: bool = False

    @property
    def goal(self) -> float:
        """The lower bound at which the incumbent is within the gap target."""
        return self.upper - max(self.gap_target, GAP_TOLERANCE) * abs(self.upper)

    @property
    def done(self) -> bool:
        return self.infeasible or (self.counts is not None and self.lower >= self.goal)


Starts = Sequence[dict[ColumnKey, int]]  # Counts of known plans, as warm starts.


def solve_flow(program: FlowProgram, deadline: Deadline, gap_target: float, starts: Starts) -> FlowState:
    """The cheapest solution, or the proof that there is none."""
    state = solve_relaxation(program, deadline, gap_target, starts)
    if state.ready:
        close_gap(state)
    return state


def solve_relaxation(
    program: FlowProgram, deadline: Deadline, gap_target: float, starts: Starts
) -> FlowState:
    """The state after the linear relaxation, with the best of the starts; `ready` when its bound is at cost."""
    pricer = Pricer(program)
    state = FlowState(pricer, deadline, gap_target)
    for counts in starts:  # First, as time may not suffice for the relaxation.
        offer_counts(state, counts)
    keys = sorted({*pricer.first_keys(), *(key for largest in starts for key in largest)})
    state.relaxed = state.prices = relax_flow(pricer, deadline, at_cost=True, keys=keys)
    if state.relaxed is None:  # Usually because not all demand can be met.
        largest = relax_flow(pricer, deadline, at_cost=False, keys=keys)
        if largest is None:
            # Only rows without theta can conflict: pins with nodes or the budget.
            state.infeasible = not deadline.over and state.counts is None
            return state
        if largest.theta < 1 - 1e-6:
            state.relaxed, state.infeasible = largest, largest.converged and state.counts is None
            return state
        state.relaxed = state.prices = relax_flow(pricer, deadline, at_cost=True, keys=largest.keys)
        if state.relaxed is None:
            state.relaxed = largest
            return state
    state.lower = state.relaxed.bound
    is_small = sum(int((max_counts >= 1).sum()) for max_counts in pricer.most) <= SMALL_PROGRAM_COLUMNS
    whole_copies = None if is_small or state.done else with_whole_copy_rows(pricer, state.relaxed, deadline)
    if whole_copies is not None and whole_copies[1].bound > state.relaxed.bound:
        state.pricer, state.relaxed = whole_copies
        state.lower = state.relaxed.bound
    state.ready = True
    return state


def close_gap(state: FlowState) -> None:
    """Close the gap: solve integer programs over more and more columns until no omitted column can matter."""
    relaxed = state.relaxed
    assert relaxed is not None
    limit, tries = FIRST_COLUMNS, 0
    if len(_candidate_columns(state, MAX_COLUMNS)) <= SMALL_PROGRAM_COLUMNS:
        limit = MAX_COLUMNS
    while not state.done and not state.deadline.over and tries < MAX_TRIES:
        # The first program looks for any plan; later ones have the columns that could beat the goal.
        ceiling = _ceiling(state)
        keys = _candidate_columns(state, limit)
        omitted_cost = _least_omitted_cost(state, set(keys))
        rows = FlowRows(state.pricer.program, keys)
        is_complete = omitted_cost == INFINITY or omitted_cost > ceiling
        time_share = 1.0 if is_complete and limit > FIRST_COLUMNS else 0.4
        milp_result = _solve_integer(state, rows, time_share)
        proven = min(relaxed.bound + omitted_cost, INFINITY if milp_result.infeasible else milp_result.bound)
        if is_complete and milp_result.infeasible and state.counts is None:
            state.infeasible = True
            return
        state.lower = max(state.lower, min(proven, state.upper))
        if is_complete and milp_result.finished:
            return
        tries += is_complete
        limit = MAX_COLUMNS if limit == FIRST_COLUMNS else 4 * limit


def _ceiling(state: FlowState) -> float:
    """The reduced cost above which no column can be in a plan that reaches the goal."""
    assert state.relaxed is not None
    return state.goal - state.relaxed.bound if state.counts is not None else INFINITY


def _candidate_columns(state: FlowState, limit: int) -> list[ColumnKey]:
    """Columns of the next integer program: at most `limit` per model and region of those that can beat the goal."""
    assert state.relaxed is not None
    cheapest = state.pricer.cheapest(state.relaxed.reduced, limit, _ceiling(state))
    return sorted({*_required_columns(state), *cheapest})


def _required_columns(state: FlowState) -> list[ColumnKey]:
    """Running, pinned and incumbent columns, and until there is a plan those of the relaxation."""
    program = state.pricer.program
    keys = [count.key for count in program.running] + [pin.key for pin in program.pins]
    if state.counts is not None:
        return keys + list(state.counts)
    assert state.relaxed is not None
    return keys + state.relaxed.keys


def _least_omitted_cost(state: FlowState, keys: set[ColumnKey]) -> float:
    """The least reduced cost of a column outside `keys`; infinite when there is none."""
    assert state.relaxed is not None
    least = INFINITY
    for m, table in enumerate(state.relaxed.reduced):
        omitted = table.copy()
        included = [(key.template, key.region) for key in keys if key.group == m]
        if included:
            omitted[tuple(np.array(included).T)] = np.inf
        least = min(least, float(omitted.min(initial=np.inf)))
    return least


def _solve_integer(state: FlowState, rows: FlowRows, share: float) -> MilpResult:
    """Solve the integer program in a share of the time left; keep its solution as the incumbent if it is better."""
    milp = rows.milp(at_cost=state.at_cost)
    integers = np.array(sorted([*rows.new.values(), *rows.old.values()]), dtype=np.int64)
    start = None if state.counts is None else (integers, start_vector(rows, state.counts)[integers])
    milp_result = solve_milp(
        milp, time_limit_s=share * state.deadline.left_s, gap_rel=0.5 * state.gap_target, start=start
    )
    if milp_result.x is not None and (
        solution := fix_counts(rows, milp_result.x, state.at_cost, state.deadline)
    ):
        value, x = solution
        if value < state.upper:
            state.upper, state.counts = value, rows.counts(x)
    return milp_result


def start_vector(rows: FlowRows, counts: dict[ColumnKey, int]) -> Floats:
    """The vector of variables with these counts, running copies first; shares and flows are 0."""
    x = np.zeros(len(rows.entries.cost))
    for key, count in counts.items():
        old_variable = rows.old.get(key)
        old_count = 0.0 if old_variable is None else min(float(count), rows.entries.upper[old_variable])
        if old_variable is not None:
            x[old_variable] = old_count
        x[rows.new[key]] = count - old_count
    return x


def fix_counts(
    rows: FlowRows, x: Floats, at_cost: bool, deadline: Deadline, theta: float = 1.0
) -> tuple[float, Floats] | None:
    """(value, variables) with the counts rounded and fixed and the best shares and flows; None if infeasible.

    HiGHS accepts 1.000001 copies as whole: where exactly 1 falls short, serving that much less demand is accepted.
    At cost, `theta` of the demand is served.
    """
    milp = rows.milp(at_cost=at_cost)
    count_variables = np.array(sorted([*rows.new.values(), *rows.old.values()]), dtype=np.int64)
    is_linear = not any(
        helper.whole for helper in rows.program.helpers
    )  # Integer extra variables are not copies and stay free.
    if at_cost:
        milp.lower[THETA] = milp.upper[THETA] = theta
    milp.lower[count_variables] = milp.upper[count_variables] = np.rint(x[count_variables])
    for relax in (False, is_linear) if rows.order else (is_linear,):
        milp_result = solve_milp(milp, time_limit_s=deadline.final_s, relax=relax)
        if milp_result.infeasible and at_cost:
            milp.lower[THETA] = theta * (1 - (10 if rows.order else 1) * INTEGRALITY_TOLERANCE)
            milp_result = solve_milp(milp, time_limit_s=deadline.final_s, relax=relax)
        if milp_result.x is None:
            return None
        # Rounded, as y within the solver's tolerance of 0 would let as much cross out of order.
        milp.lower[rows.order] = milp.upper[rows.order] = np.rint(milp_result.x[rows.order])
    if milp_result.x is None or not milp_result.finished:
        return None
    solution = milp_result.x.copy()
    solution[count_variables] = np.rint(x[count_variables])
    return (milp_result.objective if at_cost else -float(solution[THETA])), solution


def offer_counts(state: FlowState, counts: dict[ColumnKey, int]) -> None:
    """Make counts of a known plan the incumbent, if they are feasible and better."""
    program = state.pricer.program
    required_keys = {column_count.key for column_count in program.running} | {pin.key for pin in program.pins}
    rows = FlowRows(program, sorted({*counts, *required_keys}))
    x = start_vector(rows, counts)
    if (x > np.array(rows.entries.upper) + 0.5).any():
        return
    solution = fix_counts(rows, x, state.at_cost, state.deadline)
    if solution is not None and solution[0] < state.upper:
        state.upper, state.counts = solution[0], rows.counts(solution[1])
