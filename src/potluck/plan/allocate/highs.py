"""The little of HiGHS that planning needs: a linear or integer program, within CPU time."""

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
"""The presolve rule that is switched off: in HiGHS 1.14 and 1.15 probing cuts off optima of small mixed programs (a
continuous share below a whole count is enough) and then reports a wrong bound as proven.
"""

KINDS = highspy.HighsModelStatus
INFEASIBLE = (KINDS.kInfeasible, KINDS.kUnboundedOrInfeasible)
SOUND = (*INFEASIBLE, KINDS.kOptimal, KINDS.kTimeLimit, KINDS.kInterrupt)
DEAR_HEURISTICS = ("feasibility_jump", "rins", "rens", "root_reduced_cost")
FEW_WHOLE = 150  # Whole variables with which these take longer than the search that they are to shorten.
BUSY = 50  # How many times its CPU time an integer program may take on a busy machine.


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
    """HiGHS on one thread. A start gives some variables by index, for HiGHS to complete.

    The limit is CPU time of this thread, as everywhere in planning, so that a busy machine changes no plan: HiGHS
    itself keeps wall time, so it is asked to stop, and a linear program that it stopped too soon goes on.
    When HiGHS ends in an error (it finds its own solution a hair outside its tolerance), it is asked once more
    without presolve; what then still has no status proves nothing.
    """
    highs = _silent()
    if not relax and np.count_nonzero(milp.integer) <= FEW_WHOLE:
        for heuristic in DEAR_HEURISTICS:
            highs.setOptionValue(f"mip_heuristic_run_{heuristic}", False)
    watch = _SolverWatch(time_limit_s)
    if not relax:
        highs.cbMipInterrupt += watch.stop_when_over
    highs.setOptionValue("mip_rel_gap", gap_rel)
    highs.setOptionValue("mip_abs_gap", 1e-9)
    highs.passModel(_as_lp(milp, relax))
    for presolve in ("choose", "off"):
        highs.setOptionValue("presolve", presolve)
        if start is not None and not relax:
            highs.setSolution(len(start[0]), start[0].astype(np.int32), start[1])
        watch.run(highs, not relax)
        if highs.getModelStatus() in SOUND:
            return _answer(highs, mixed=bool(milp.integer.any()) and not relax)
        highs.clearSolver()
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

    def run(self, highs: highspy.Highs, whole: bool) -> None:
        """Until it is done or time is over. Simplex goes on from where it was; whole numbers would begin anew."""
        slower = BUSY if whole else 1
        while True:
            highs.setOptionValue("time_limit", highs.getRunTime() + slower * max(self.left_s, MIN_TIME_S))
            highs.run()
            if slower > 1 or highs.getModelStatus() != KINDS.kTimeLimit or self.left_s <= MIN_TIME_S:
                return


def _answer(highs: highspy.Highs, mixed: bool) -> MilpResult:
    status, info, solution = highs.getModelStatus(), highs.getInfo(), highs.getSolution()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    infeasible = status in INFEASIBLE
    finished = infeasible or status == highspy.HighsModelStatus.kOptimal
    bound = info.mip_dual_bound if mixed else (info.objective_function_value if finished else -INFINITY)
    if not finished and bound == 0.0:  # what HiGHS reports when it was stopped before it had any bound
        bound = -INFINITY
    return MilpResult(
        x=np.array(solution.col_value) if feasible else None,
        objective=float(info.objective_function_value) if feasible else INFINITY,
        bound=INFINITY if infeasible else (float(bound) if np.isfinite(bound) else -INFINITY),
        row_dual=np.array(solution.row_dual) if solution.dual_valid else None,
        infeasible=infeasible,
        finished=finished,
    )


def _silent() -> highspy.Highs:
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("parallel", "off")
    highs.setOptionValue("presolve_rule_off", PROBING)
    highs.setOptionValue(
        "mip_allow_restart", False
    )  # with a plan at hand restarts take 3/4 of the time for nothing
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
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if each else kinds.kContinuous for each in milp.integer.tolist()]
    return lp


Clock = Callable[[], float]


class Deadline:
    """Counts down from a limit; `reserve_s` is kept back for writing down the answer."""

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
        """For the last small steps: half of what is left, the reserve included."""
        return max(0.5 * (self.limit_s - self.spent_s), 0.0)

    @property
    def over(self) -> bool:
        return self.left_s <= 0

    def part(self, share: float) -> Deadline:
        """A deadline within this one, with so much of what is left."""
        return Deadline(max(share * self.left_s, 1e-3), self._clock)
