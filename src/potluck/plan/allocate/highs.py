"""Solve a linear or integer program with HiGHS within a limit on CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from potluck.plan.allocate.program import Floats, Ints

INFINITY = float("inf")
MIN_TIME_S = 0.01
PROBING = 1 << 15
"""The presolve rule that is switched off: in HiGHS 1.14 and 1.15 probing cuts off optima of small mixed-integer
programs (one continuous variable below an integer one suffices) and reports a wrong bound as proven.
"""

MODEL_STATUS = highspy.HighsModelStatus
INFEASIBLE = (MODEL_STATUS.kInfeasible, MODEL_STATUS.kUnboundedOrInfeasible)
CONCLUSIVE = (*INFEASIBLE, MODEL_STATUS.kOptimal, MODEL_STATUS.kTimeLimit, MODEL_STATUS.kInterrupt)
COSTLY_HEURISTICS = ("feasibility_jump", "rins", "rens", "root_reduced_cost")
HEURISTICS_MIN_INTEGERS = 150  # Integer variables from which these heuristics save more time than they take.
WALL_TIME_RATIO = 50  # Wall time an integer program may take on a busy machine, relative to its CPU time.


@dataclass(slots=True)
class Milp:
    """Minimise cost.x, row_lower <= A x <= row_upper, lower <= x <= upper; A as (row, column, value)."""

    cost: Floats
    lower: Floats
    upper: Floats
    integer: NDArray[np.bool_]
    row_lower: Floats
    row_upper: Floats
    row: Ints
    column: Ints
    value: Floats


@dataclass(frozen=True, slots=True)
class MilpResult:
    """Solution, bound and status of a linear or integer program; `x` is None when no solution was found."""

    x: Floats | None
    objective: float
    bound: float
    row_dual: Floats | None
    infeasible: bool
    finished: bool


def solve_milp(
    milp: Milp,
    *,
    time_limit_s: float,
    relax: bool = False,
    start: tuple[Ints, Floats] | None = None,
    gap_rel: float = 0.0,
) -> MilpResult:
    """Solve with HiGHS on one thread. `start` has the indices and values of some variables, for HiGHS to complete.

    The limit is CPU time of this thread, so that a busy machine does not change the plan. HiGHS measures wall time,
    so a callback interrupts it, and a linear program that it stopped too soon is continued. When HiGHS ends in an
    error (its solution is slightly outside its own tolerance), it runs once more without presolve.
    """
    solver = _quiet_solver()
    if not relax and np.count_nonzero(milp.integer) <= HEURISTICS_MIN_INTEGERS:
        for heuristic in COSTLY_HEURISTICS:
            solver.setOptionValue(f"mip_heuristic_run_{heuristic}", False)
    watch = _SolverWatch(time_limit_s)
    if not relax:
        solver.cbMipInterrupt += watch.stop_when_over
    solver.setOptionValue("mip_rel_gap", gap_rel)
    solver.setOptionValue("mip_abs_gap", 1e-9)
    solver.passModel(_as_lp(milp, relax))
    for presolve in ("choose", "off"):
        solver.setOptionValue("presolve", presolve)
        if start is not None and not relax:
            solver.setSolution(len(start[0]), start[0].astype(np.int32), start[1])
        watch.run(solver, not relax)
        if solver.getModelStatus() in CONCLUSIVE:
            return _result(solver, mixed=bool(milp.integer.any()) and not relax)
        solver.clearSolver()
    return MilpResult(None, INFINITY, -INFINITY, None, infeasible=False, finished=False)


class _SolverWatch:
    """Keeps HiGHS to a limit in CPU time of this thread."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.thread_time() + max(limit_s, MIN_TIME_S)

    @property
    def left_s(self) -> float:
        return self._end_s - time.thread_time()

    def stop_when_over(self, event: highspy.HighsCallbackEvent) -> None:
        if self.left_s <= 0:
            event.interrupt()

    def run(self, highs: highspy.Highs, is_integer: bool) -> None:
        """Run until done or out of time. Simplex continues where HiGHS stopped it; branch and bound would restart."""
        wall_ratio = WALL_TIME_RATIO if is_integer else 1
        while True:
            highs.setOptionValue("time_limit", highs.getRunTime() + wall_ratio * max(self.left_s, MIN_TIME_S))
            highs.run()
            if (
                wall_ratio > 1
                or highs.getModelStatus() != MODEL_STATUS.kTimeLimit
                or self.left_s <= MIN_TIME_S
            ):
                return


def _result(highs: highspy.Highs, mixed: bool) -> MilpResult:
    status, info, solution = highs.getModelStatus(), highs.getInfo(), highs.getSolution()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    infeasible = status in INFEASIBLE
    finished = infeasible or status == highspy.HighsModelStatus.kOptimal
    bound = info.mip_dual_bound if mixed else (info.objective_function_value if finished else -INFINITY)
    if not finished and bound == 0.0:  # HiGHS reports 0 when stopped before it has a bound.
        bound = -INFINITY
    return MilpResult(
        x=np.array(solution.col_value) if feasible else None,
        objective=float(info.objective_function_value) if feasible else INFINITY,
        bound=INFINITY if infeasible else (float(bound) if np.isfinite(bound) else -INFINITY),
        row_dual=np.array(solution.row_dual) if solution.dual_valid else None,
        infeasible=infeasible,
        finished=finished,
    )


def _quiet_solver() -> highspy.Highs:
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("parallel", "off")
    highs.setOptionValue("presolve_rule_off", PROBING)
    # With a start solution, restarts take 3/4 of the time and gain nothing.
    highs.setOptionValue("mip_allow_restart", False)
    return highs


def _as_lp(milp: Milp, relax: bool) -> highspy.HighsLp:
    count = len(milp.cost)
    order = np.argsort(milp.column, kind="stable")
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = count, len(milp.row_lower)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = milp.cost, milp.lower, milp.upper
    lp.row_lower_, lp.row_upper_ = milp.row_lower, milp.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.searchsorted(milp.column[order], np.arange(count + 1)).astype(np.int32)
    lp.a_matrix_.index_ = milp.row[order].astype(np.int32)
    lp.a_matrix_.value_ = milp.value[order]
    if not relax:
        variable_types = highspy.HighsVarType
        lp.integrality_ = [
            variable_types.kInteger if is_integer else variable_types.kContinuous
            for is_integer in milp.integer.tolist()
        ]
    return lp


Clock = Callable[[], float]


class Deadline:
    """A time limit on some clock; `reserve_s` of it is kept for extracting the solution."""

    def __init__(self, limit_s: float, clock: Clock) -> None:
        self.limit_s = limit_s
        self.reserve_s = min(0.5, 0.1 * limit_s)
        self._clock = clock
        self._start_s = clock()

    @property
    def spent_s(self) -> float:
        return self._clock() - self._start_s

    @property
    def left_s(self) -> float:
        return self.limit_s - self.reserve_s - self.spent_s

    @property
    def final_s(self) -> float:
        """Half of the time left, the reserve included, for the last small programs."""
        return max(0.5 * (self.limit_s - self.spent_s), 0.0)

    @property
    def over(self) -> bool:
        return self.left_s <= 0

    def part(self, share: float) -> Deadline:
        """A deadline within this one, after a share of the time left."""
        return Deadline(max(share * self.left_s, 1e-3), self._clock)
