"""Why a search over plans ended: a plan held, a limit of the search was reached, or nothing was left to try."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from potluck.plan.allocate.allocation import Allocation
from potluck.plan.problem import PlanningProblem

SearchEnding = Literal[
    "holds",
    "holds_in_fresh_runs",
    "requests_left_out",
    "time",
    "plans",
    "requests",
    "solves",
    "planner_time",
    "nodes",
    "budget",
    "links",
    "terms",
    "combinations",
]
"""
holds, holds_in_fresh_runs      a plan keeps every objective in simulation
requests_left_out               the same, of the requests that the plan serves: the others are served by no plan
time, plans, requests, solves   the search reached its limit of time, plans, simulated requests or planner runs
planner_time                    the planner found no plan for more demand within its own time limit
nodes, budget, links, terms     no plan serves more demand; these are the binding limits
combinations                    models' plans that may hold do not fit into the fleet together
"""
SEARCH_LIMITS: frozenset[SearchEnding] = frozenset({"time", "plans", "requests", "solves", "planner_time"})
"""Endings after which a longer search may find a plan."""

MAX_BINDING_NAMES = 4


@dataclass(frozen=True, slots=True)
class SearchEnd:
    """The reason why the search ended, as a code and in words."""

    ending: SearchEnding
    words: str

    def __str__(self) -> str:
        return self.words

    @property
    def longer_may_help(self) -> bool:
        return self.ending in SEARCH_LIMITS


HOLDS = SearchEnd("holds", "meets its SLOs in simulation")
HOLDS_IN_FRESH_RUNS = SearchEnd("holds_in_fresh_runs", "meets its SLOs in fresh simulation runs")
REQUESTS_LEFT_OUT = SearchEnd("requests_left_out", "no plan serves all of the requests")


def no_larger_plan(
    problem: PlanningProblem, allocation: Allocation, factors: dict[str, float], names: Collection[str]
) -> SearchEnd:
    """The end of a search whose planner found no plan for these multiples of the models' demand."""
    demand = ", ".join(f"{factors[name]:.3g} times the demand of {name}" for name in sorted(names))
    shortfall = allocation.shortfall
    if shortfall is None:
        return SearchEnd("planner_time", f"the planner found no plan for {demand} within its time limit")
    if shortfall.overpinned or shortfall.unkept or shortfall.unserved:
        return SearchEnd("terms", f"no plan serves {demand}: {shortfall}")
    # Without a binding resource, the nodes suffice for fractional copies but not for whole ones.
    binding = shortfall.binding[:MAX_BINDING_NAMES] or ("whole copies, not any one resource",)
    ending: SearchEnding = _resource(problem, shortfall.binding[0]) if shortfall.binding else "nodes"
    return SearchEnd(ending, f"no plan serves {demand}; limited by: {', '.join(binding)}")


def _resource(problem: PlanningProblem, name: str) -> SearchEnding:
    """The ending for a binding resource of this name."""
    if name == "budget":
        return "budget"
    if name.startswith("link "):
        return "links"
    nodes = {f"{region.name}: {offer.node}" for region in problem.regions for offer in region.offers}
    return "nodes" if name in nodes else "terms"
