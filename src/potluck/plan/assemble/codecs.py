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
    return sorted({ask.terms.priority for ask in problem.asks if ask.rate_per_s > 0}, reverse=True)


def alike(problem: PlanningProblem, short: Shortfall) -> bool:
    """Whether a shortfall that is the same for all is the last word."""
    asked = sum(ask.rate_per_s > 0 for ask in problem.asks)
    return len(levels(problem)) < 2 and (short.fraction > NOUGHT or asked < 2)


def first_usd_per_h(program_columns: ProgramColumns, model: int) -> float:
    """What the least costs that serves anything of a model: a copy that does both phases, or one of each."""
    fleet, mine = program_columns.program.fleet, program_columns.program.models[model]
    here = np.where((mine.uses[:, None, :] <= fleet.available[None]).all(axis=2), 1.0, np.inf)
    cost = (mine.uses.astype(float) @ fleet.price_usd_per_h.T + 1e-9) * here

    def least(rates: NDArray[np.float64]) -> float:
        return float(cost[rates.max(axis=1, initial=0.0) > 0].min(initial=np.inf))

    return min(least(mine.closed_per_s), least(mine.prefill_per_s) + least(mine.decode_per_s))


def by_priority(
    problem: PlanningProblem, solve: Solve, short: Shortfall, first: Mapping[str, float]
) -> tuple[ProgramColumns, Allocation] | None:
    """The program and its answer for as much of each level as there is room for; None where nothing differs.

    `first` is what a first copy of each model costs.
    """
    given: dict[str, float] = {ask.name: 0.0 for ask in problem.asks}
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
    least = min(given[ask.name] for ask in problem.asks if ask.rate_per_s > 0)
    bound = max(least, message.fraction_bound)
    words = replace(message, fraction=least, fraction_bound=bound, unserved=short.unserved)
    answer = replace(program_column[1], status="infeasible", shortfall=words)
    return replace(program_column[0], problem=problem, fractions=given), answer


def served(problem: PlanningProblem, plan: Plan) -> tuple[float, ...]:
    """How much a plan serves, for comparing: level by level the least share of a model, then the mean of all."""
    values: list[float] = []
    for rank in levels(problem):
        mine = [ask for ask in problem.asks if ask.terms.priority == rank and ask.rate_per_s > 0]
        shares = [plan.fraction_of(ask.name) for ask in mine]
        values += [round(min(shares), DIGITS), round(sum(shares) / len(shares), DIGITS)]
    return tuple(values)


DIGITS = 6


def _at(problem: PlanningProblem, given: Mapping[str, float], mine: list[str]) -> PlanningProblem:
    def at(ask: ModelDemand) -> ModelDemand:
        share = 1.0 if ask.name in mine else given[ask.name]
        firm = ask.name not in mine and share > 0
        demands = tuple(replace(d, rate_per_s=d.rate_per_s * share, firm=firm) for d in ask.demands)
        return replace(ask, demands=demands)

    return replace(problem, asks=tuple(at(ask) for ask in problem.asks))


SAME = 1e-6
LEAST_SHARE = 0.1  # Of the time limit, for a level of priority that comes when nothing is left of it.
SETTLE_S = 10.0  # For the linear programs that put codecs back.


def solved(
    problem: PlanningProblem,
    templates: Mapping[str, Sequence[Template]],
    *,
    running: Plan | None = None,
    pins: Sequence[Deployment] = (),
    exactly: bool = False,
    starts: Sequence[Plan] = (),
    time_limit_s: float = 60.0,
    gap_target: float = 0.0,
    clock: Callable[[], float] = time.process_time,
    books: RateCaches | None = None,
    in_part: bool = True,
) -> tuple[ProgramColumns, Allocation]:
    """The program over some templates and its answer, each model's KV in the most exact codec that will do.

    Where not all demand fits, models of a higher priority come first (`plan.assemble.codecs`); if not `in_part`,
    nothing is planned then.
    """

    deadline = Deadline(time_limit_s, clock)

    def once(asked: PlanningProblem) -> tuple[ProgramColumns, Allocation]:
        smallest = dict.fromkeys((ask.name for ask in asked.asks), asked.codecs[-1])
        program_columns = columns(
            asked, templates, running=running, pins=pins, exactly=exactly, codecs=smallest, books=books
        )
        answer = solve(
            program_columns.program,
            starts=[counts for plan in starts if (counts := program_columns.counts_of(plan)) is not None],
            time_limit_s=max(deadline.left_s / parts, LEAST_SHARE * time_limit_s),
            gap_target=gap_target,
            clock=clock,
            in_part=in_part,
        )
        if len(asked.codecs) < 2 or not answer.counts:
            return program_columns, answer
        return _put_back(program_columns, answer, Deadline(SETTLE_S, clock))

    parts = len(levels(problem)) + 1 if len(levels(problem)) > 1 else 1
    program_columns, answer = once(problem)
    if answer.shortfall is None or alike(problem, answer.shortfall):
        return program_columns, answer
    parts = len(problem.asks)
    first = {ask.name: first_usd_per_h(program_columns, m) for m, ask in enumerate(problem.asks)}
    return by_priority(problem, once, answer.shortfall, first) or (program_columns, answer)


def _put_back(
    program_columns: ProgramColumns, answer: Allocation, deadline: Deadline
) -> tuple[ProgramColumns, Allocation]:
    problem, best = program_columns.problem, (program_columns, answer)
    names = [ask.name for m, ask in enumerate(problem.asks) if _crosses(program_columns, answer, m)]
    chosen = dict(program_columns.codecs)
    chosen.update((ask.name, LOSSLESS) for ask in problem.asks if ask.name not in names)
    if len(names) > 1:  # nearly always nothing is short, and one look is enough
        all_exact = chosen | dict.fromkeys(names, problem.codecs[0])
        if (other := _rerouted(program_columns, answer, all_exact, deadline)) is not None:
            return other
    for name in names:
        for codec in problem.codecs:
            other = _rerouted(program_columns, answer, chosen | {name: codec}, deadline)
            if other is not None:
                chosen, best = chosen | {name: codec}, other
                break
    return best


def _crosses(program_columns: ProgramColumns, answer: Allocation, model: int) -> bool:
    inside = any(
        key.group == model and program_columns.templates[model][key.template].hands_over
        for key, _ in answer.counts
    )
    return inside or any(flow.model == model for flow in answer.flows)


def _rerouted(
    program_columns: ProgramColumns, answer: Allocation, codecs: Mapping[str, Codec], deadline: Deadline
) -> tuple[ProgramColumns, Allocation] | None:
    """The same copies with KV in these codecs; None when they would serve less."""
    used = [
        sorted({key.template for key, _ in answer.counts if key.group == m}) for m in _models(program_columns)
    ]
    problem = program_columns.problem
    few = columns(
        problem,
        {ask.name: [program_columns.templates[m][t] for t in used[m]] for m, ask in enumerate(problem.asks)},
        codecs=codecs,
        books=program_columns.books,
    )
    counts = {
        ColumnKey(key.group, used[key.group].index(key.template), key.region): n for key, n in answer.counts
    }
    routed = reroute(few.program, counts, answer.found, deadline)
    if routed is None:
        return None
    wanted = 1.0 if answer.shortfall is None else answer.shortfall.fraction
    if not survives(few.program, counts, wanted - SAME, deadline):
        return None
    shares, flows, _, fraction = routed
    if answer.shortfall is not None and fraction < answer.shortfall.fraction - SAME:
        return None
    kept = tuple(ColumnCount(key, n) for key, n in sorted(counts.items()))
    there = tuple(
        ColumnCount(ColumnKey(key.group, used[key.group].index(key.template), key.region), n)
        for key, n in program_columns.program.running
        if key.template in used[key.group]
    )
    few = replace(few, program=replace(few.program, running=there))
    return few, replace(answer, counts=kept, shares=shares, flows=flows)


def _models(program_columns: ProgramColumns) -> range:
    return range(len(program_columns.problem.asks))
