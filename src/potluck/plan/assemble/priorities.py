"""Where not all demand fits: models of a higher priority first, each level as much as the ones above it leave.

Level by level, the largest fraction of its models' demand is asked for, while what the levels above were given must
be met whole (`Demand.firm`) and the levels below are asked for nothing. Models of one level share alike, as all do
where none has a priority.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from potluck.plan.allocate.result import Allocation, Shortfall
from potluck.plan.assemble.columns import Columns
from potluck.plan.problem import Ask, Problem

SPARE = 1e-6
"""By as much as a solver may err, less is held than was found."""

Solve = Callable[[Problem], tuple[Columns, Allocation]]


def levels(problem: Problem) -> list[int]:
    """Priorities there are, the highest first."""
    return sorted({ask.terms.priority for ask in problem.asks if ask.rate_per_s > 0}, reverse=True)


def by_priority(problem: Problem, solve: Solve, short: Shortfall) -> tuple[Columns, Allocation] | None:
    """The program and its answer for as much of each level as there is room for; None where nothing differs."""
    ranks = levels(problem)
    if len(ranks) < 2:
        return None
    given: dict[str, float] = {ask.name: 0.0 for ask in problem.asks}
    found: tuple[Columns, Allocation] | None = None
    told = short
    for rank in ranks:
        mine = [ask.name for ask in problem.asks if ask.terms.priority == rank]
        found = solve(_at(problem, given, mine))
        cut = found[1].shortfall
        if cut is None and not found[1].found:
            return None  # no time
        fraction = 1.0 if cut is None else cut.fraction
        told = told if cut is None else cut
        given.update(dict.fromkeys(mine, fraction if fraction >= 1 else fraction * (1 - SPARE)))
    assert found is not None
    least = min(given[ask.name] for ask in problem.asks if ask.rate_per_s > 0)
    words = replace(told, fraction=least, fraction_bound=max(least, told.fraction_bound))
    answer = replace(found[1], status="infeasible", shortfall=words)
    return replace(found[0], problem=problem, fractions=given), answer


def _at(problem: Problem, given: Mapping[str, float], mine: list[str]) -> Problem:
    """The problem of one level: its own demand, and what those above it were given."""

    def at(ask: Ask) -> Ask:
        share = 1.0 if ask.name in mine else given[ask.name]
        firm = ask.name not in mine and share > 0
        demands = tuple(replace(d, rate_per_s=d.rate_per_s * share, firm=firm) for d in ask.demands)
        return replace(ask, demands=demands)

    return replace(problem, asks=tuple(at(ask) for ask in problem.asks))
