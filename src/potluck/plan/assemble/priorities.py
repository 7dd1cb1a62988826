"""Where not all demand fits: models of a higher priority first, each level as much as the ones above it leave.

Level by level, the largest fraction of its models' demand is asked for, while what the levels above were given must
be met whole (`Demand.firm`) and the levels below are asked for nothing. Models of one level share alike, as all do
where none has a priority. But where that leaves nothing to any of them, since not even a copy of each fits, they come
one after another, those whose first copy costs least before others: what can be served is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from potluck.core.values.plan import Plan
from potluck.plan.allocate.allocation import Allocation, Shortfall
from potluck.plan.assemble.columns import ProgramColumns
from potluck.plan.problem import ModelDemand, PlanningProblem

NOUGHT = 1e-9
SPARE = 1e-6
"""By as much as a solver may err, less is held than was found."""

Solve = Callable[[PlanningProblem], tuple[ProgramColumns, Allocation]]


def levels(problem: PlanningProblem) -> list[int]:
    """Priorities there are, the highest first."""
    return sorted({ask.terms.priority for ask in problem.asks if ask.rate_per_s > 0}, reverse=True)


def alike(problem: PlanningProblem, short: Shortfall) -> bool:
    """Whether a shortfall that is the same for all is the last word."""
    asked = sum(ask.rate_per_s > 0 for ask in problem.asks)
    return len(levels(problem)) < 2 and (short.fraction > NOUGHT or asked < 2)


def first_usd_per_h(found: ProgramColumns, model: int) -> float:
    """What the least costs that serves anything of a model: a copy that does both phases, or one of each."""
    fleet, mine = found.program.fleet, found.program.models[model]
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
    found: tuple[ProgramColumns, Allocation] | None = None
    told, ranks = short, levels(problem)
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
            told = told if cut is None else cut
            found = tried if fraction > NOUGHT or found is None else found
            given.update(dict.fromkeys(mine, fraction if fraction >= 1 else fraction * (1 - SPARE)))
        if len(mine) > 1 and (nothing or fraction <= NOUGHT):
            todo = [[name] for name in sorted(mine, key=lambda name: first[name])] + todo
        nothing = False
    if found is None or not any(given.values()):
        return None
    least = min(given[ask.name] for ask in problem.asks if ask.rate_per_s > 0)
    bound = max(least, told.fraction_bound)
    words = replace(told, fraction=least, fraction_bound=bound, unserved=short.unserved)
    answer = replace(found[1], status="infeasible", shortfall=words)
    return replace(found[0], problem=problem, fractions=given), answer


def served(problem: PlanningProblem, plan: Plan) -> tuple[float, ...]:
    """How much a plan serves, for comparing: level by level the least share of a model, then the mean of all."""
    found: list[float] = []
    for rank in levels(problem):
        mine = [ask for ask in problem.asks if ask.terms.priority == rank and ask.rate_per_s > 0]
        shares = [plan.fraction_of(ask.name) for ask in mine]
        found += [round(min(shares), DIGITS), round(sum(shares) / len(shares), DIGITS)]
    return tuple(found)


DIGITS = 6


def _at(problem: PlanningProblem, given: Mapping[str, float], mine: list[str]) -> PlanningProblem:
    """The problem of one level: its own demand, and what those above it were given."""

    def at(ask: ModelDemand) -> ModelDemand:
        share = 1.0 if ask.name in mine else given[ask.name]
        firm = ask.name not in mine and share > 0
        demands = tuple(replace(d, rate_per_s=d.rate_per_s * share, firm=firm) for d in ask.demands)
        return replace(ask, demands=demands)

    return replace(problem, asks=tuple(at(ask) for ask in problem.asks))
