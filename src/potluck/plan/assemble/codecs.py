"""In which codec KV crosses: the most exact one that costs no more. And who is served first where not all fits.

The program is solved with the smallest codec that is allowed, whose bound holds for all. Then, with the counts that
were found, each model's KV is put back to the most exact codec in which these copies still serve as much.

Level by level of priority, the largest fraction of its models' demand is asked for, while what the levels above were
given must be met whole (`Demand.firm`). Models of one level share alike; where not even a copy of each fits, they
come one after another, those whose first copy costs least before others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from potluck.core.values.kv import LOSSLESS
from potluck.core.values.plan import Deployment, Plan, Template
from potluck.core.values.types import Codec
from potluck.plan.allocate.allocation import Allocation, Shortfall
from potluck.plan.allocate.highs import Deadline
from potluck.plan.allocate.outages import survives
from potluck.plan.allocate.program import ColumnCount, ColumnKey
from potluck.plan.allocate.solve import reroute, solve
from potluck.plan.assemble.columns import ProgramColumns, columns
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.timing.rate_cache import RateCaches

NOUGHT = 1e-9
SPARE = 1e-6  # By as much as a solver may err, less is held than was found.

Solve = Callable[[PlanningProblem], tuple[ProgramColumns, Allocation]]


def levels(problem: PlanningProblem) -> list[int]:
    return sorted({demand.terms.priority for demand in problem.asks if demand.rate_per_s > 0}, reverse=True)


def alike(problem: PlanningProblem, short: Shortfall) -> bool:
    """Whether a shortfall that is the same for all is the last word."""
    asked = sum(demand.rate_per_s > 0 for demand in problem.asks)
    return len(levels(problem)) < 2 and (short.fraction > NOUGHT or asked < 2)


def first_usd_per_h(program_columns: ProgramColumns, model: int) -> float:
    """What the least costs that serves anything of a model: a copy that does both phases, or one of each."""
    node_supply, mine = program_columns.program.fleet, program_columns.program.models[model]
    here = np.where((mine.uses[:, None, :] <= node_supply.available[None]).all(axis=2), 1.0, np.inf)
    cost = (mine.uses.astype(float) @ node_supply.price_usd_per_h.T + 1e-9) * here

    def least(rates: NDArray[np.float64]) -> float:
        return float(cost[rates.max(axis=1, initial=0.0) > 0].min(initial=np.inf))

    return min(least(mine.closed_per_s), least(mine.prefill_per_s) + least(mine.decode_per_s))


def by_priority(
    problem: PlanningProblem, solve: Solve, short: Shortfall, first: Mapping[str, float]
) -> tuple[ProgramColumns, Allocation] | None:
    """The program and its answer for as much of each level as there is room for; None where nothing differs.

    `first` is what a first copy of each model costs.
    """
    given: dict[str, float] = {demand.name: 0.0 for demand in problem.asks}
    program_column: tuple[ProgramColumns, Allocation] | None = None
    message, ranks = short, levels(problem)
    todo = [[a.name for a in problem.asks if a.terms.priority == rank and a.rate_per_s > 0] for rank in ranks]
    fraction, nothing = 0.0, len(ranks) < 2  # one level, and it is known that nothing is left to all of it
    while todo:
        mine = todo.pop(0)
        if not nothing:
            tried = solve(_at(problem, given, mine))
            cut = tried[1].shortfall
            if cut is None and not tried[1].found:
                return None  # no time
            fraction = 1.0 if cut is None else cut.fraction
            message = message if cut is None else cut
            program_column = tried if fraction > NOUGHT or program_column is None else program_column
            given.update(dict.fromkeys(mine, fraction if fraction >= 1 else fraction * (1 - SPARE)))
        if len(mine) > 1 and (nothing or fraction <= NOUGHT):
            todo = [[name] for name in sorted(mine, key=lambda name: first[name])] + todo
        nothing = False
    if program_column is None or not any(given.values()):
        return None
    least = min(given[demand.name] for demand in problem.asks if demand.rate_per_s > 0)
    bound = max(least, message.fraction_bound)
    words = replace(message, fraction=least, fraction_bound=bound, unserved=short.unserved)
    allocation = replace(program_column[1], status="infeasible", shortfall=words)
    return replace(program_column[0], problem=problem, fractions=given), allocation


def served(problem: PlanningProblem, plan: Plan) -> tuple[float, ...]:
    """How much a plan serves, for comparing: level by level the least share of a model, then the mean of all."""
    values: list[float] = []
    for rank in levels(problem):
        mine = [demand for demand in problem.asks if demand.terms.priority == rank and demand.rate_per_s > 0]
        shares = [plan.fraction_of(demand.name) for demand in mine]
        values += [round(min(shares), DIGITS), round(sum(shares) / len(shares), DIGITS)]
    return tuple(values)


DIGITS = 6


def _at(problem: PlanningProblem, given: Mapping[str, float], mine: list[str]) -> PlanningProblem:
    def at(demand: ModelDemand) -> ModelDemand:
        share = 1.0 if demand.name in mine else given[demand.name]
        firm = demand.name not in mine and share > 0
        demands = tuple(replace(d, rate_per_s=d.rate_per_s * share, firm=firm) for d in demand.demands)
        return replace(demand, demands=demands)

    return replace(problem, asks=tuple(at(demand) for demand in problem.asks))


SAME = 1e-6
LEAST_SHARE = 0.1  # Of the time limit, for a level of priority that comes when nothing is left of it.
SETTLE_S = 10.0  # For the linear programs that put codecs back.


def solved(
    problem: PlanningProblem,
    templates: Mapping[str, Sequence[Template]],
    *,
    running_plan: Plan | None = None,
    pins: Sequence[Deployment] = (),
    exactly: bool = False,
    starts: Sequence[Plan] = (),
    time_limit_s: float = 60.0,
    gap_target: float = 0.0,
    clock: Callable[[], float] = time.process_time,
    rate_caches: RateCaches | None = None,
    in_part: bool = True,
) -> tuple[ProgramColumns, Allocation]:
    """The program over some templates and its answer, each model's KV in the most exact codec that will do.

    Where not all demand fits, models of a higher priority come first (`plan.assemble.codecs`); if not `in_part`,
    nothing is planned then.
    """

    deadline = Deadline(time_limit_s, clock)

    def once(planning_problem: PlanningProblem) -> tuple[ProgramColumns, Allocation]:
        smallest = dict.fromkeys(
            (demand.name for demand in planning_problem.asks), planning_problem.codecs[-1]
        )
        program_columns = columns(
            planning_problem,
            templates,
            running_plan=running_plan,
            pins=pins,
            exactly=exactly,
            codecs=smallest,
            rate_caches=rate_caches,
        )
        allocation = solve(
            program_columns.program,
            starts=[counts for plan in starts if (counts := program_columns.counts_of(plan)) is not None],
            time_limit_s=max(deadline.left_s / parts, LEAST_SHARE * time_limit_s),
            gap_target=gap_target,
            clock=clock,
            in_part=in_part,
        )
        if len(planning_problem.codecs) < 2 or not allocation.counts:
            return program_columns, allocation
        return _put_back(program_columns, allocation, Deadline(SETTLE_S, clock))

    parts = len(levels(problem)) + 1 if len(levels(problem)) > 1 else 1
    program_columns, allocation = once(problem)
    if allocation.shortfall is None or alike(problem, allocation.shortfall):
        return program_columns, allocation
    parts = len(problem.asks)
    first = {demand.name: first_usd_per_h(program_columns, m) for m, demand in enumerate(problem.asks)}
    return by_priority(problem, once, allocation.shortfall, first) or (program_columns, allocation)


def _put_back(
    program_columns: ProgramColumns, allocation: Allocation, deadline: Deadline
) -> tuple[ProgramColumns, Allocation]:
    problem, best = program_columns.problem, (program_columns, allocation)
    names = [demand.name for m, demand in enumerate(problem.asks) if _crosses(program_columns, allocation, m)]
    chosen = dict(program_columns.codecs)
    chosen.update((demand.name, LOSSLESS) for demand in problem.asks if demand.name not in names)
    if len(names) > 1:  # nearly always nothing is short, and one look is enough
        all_exact = chosen | dict.fromkeys(names, problem.codecs[0])
        if (other := _rerouted(program_columns, allocation, all_exact, deadline)) is not None:
            return other
    for name in names:
        for codec in problem.codecs:
            other = _rerouted(program_columns, allocation, chosen | {name: codec}, deadline)
            if other is not None:
                chosen, best = chosen | {name: codec}, other
                break
    return best


def _crosses(program_columns: ProgramColumns, allocation: Allocation, model: int) -> bool:
    inside = any(
        key.group == model and program_columns.templates[model][key.template].hands_over
        for key, _ in allocation.counts
    )
    return inside or any(flow.model == model for flow in allocation.flows)


def _rerouted(
    program_columns: ProgramColumns, allocation: Allocation, codecs: Mapping[str, Codec], deadline: Deadline
) -> tuple[ProgramColumns, Allocation] | None:
    """The same copies with KV in these codecs; None when they would serve less."""
    used = [
        sorted({key.template for key, _ in allocation.counts if key.group == m})
        for m in _models(program_columns)
    ]
    problem = program_columns.problem
    few = columns(
        problem,
        {
            demand.name: [program_columns.templates[m][t] for t in used[m]]
            for m, demand in enumerate(problem.asks)
        },
        codecs=codecs,
        rate_caches=program_columns.books,
    )
    counts = {
        ColumnKey(key.group, used[key.group].index(key.template), key.region): n
        for key, n in allocation.counts
    }
    routed = reroute(few.program, counts, allocation.found, deadline)
    if routed is None:
        return None
    wanted = 1.0 if allocation.shortfall is None else allocation.shortfall.fraction
    if not survives(few.program, counts, wanted - SAME, deadline):
        return None
    shares, flows, _, fraction = routed
    if allocation.shortfall is not None and fraction < allocation.shortfall.fraction - SAME:
        return None
    kept = tuple(ColumnCount(key, n) for key, n in sorted(counts.items()))
    there = tuple(
        ColumnCount(ColumnKey(key.group, used[key.group].index(key.template), key.region), n)
        for key, n in program_columns.program.running
        if key.template in used[key.group]
    )
    few = replace(few, program=replace(few.program, running=there))
    return few, replace(allocation, counts=kept, shares=shares, flows=flows)


def _models(program_columns: ProgramColumns) -> range:
    return range(len(program_columns.problem.asks))
