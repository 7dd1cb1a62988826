"""A frontier: what a plan costs as one thing that is asked of it goes from little to much, each point a plan.

The points of `availability` and `spot` differ in terms alone, so they choose from the same templates; those of
`objective` have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from potluck.core.values.plan import Plan
from potluck.core.values.service import FailureDomain, ModelTerms
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies.template_factory import PlanOutcome, SolveSettings, TemplateFactory

Against = Literal["objective", "availability", "spot"]
VALUES: dict[str, tuple[float, ...]] = {
    "objective": (0.5, 0.7, 0.85, 1.0, 1.25, 1.6, 2.0, 3.0),
    "availability": (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0),
    "spot": (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0),
}
"""What is asked for where nothing else is said."""
LEAST = 1e-3
"""Less is no difference in cost."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """What was asked for, and the plan for it."""

    value: float
    plan: Plan

    @property
    def usd_per_h(self) -> float:
        return self.plan.total_usd_per_h


def with_value(
    problem: PlanningProblem, against: Against, value: float, domain: FailureDomain
) -> PlanningProblem:
    """The problem with that much asked of every model."""

    def asked(terms: ModelTerms) -> ModelTerms:
        if against == "spot":
            return replace(terms, max_spot_share=value)
        return replace(terms, survive=domain if value > 0 else None, survive_share=value or 1.0)

    return replace(problem, asks=tuple(replace(ask, terms=asked(ask.terms)) for ask in problem.asks))


def frontier(
    problem_at: Callable[[float], PlanningProblem],
    values: Sequence[float],
    planner: Callable[[TemplateFactory, SolveSettings], PlanOutcome],
    settings: SolveSettings,
    *,
    share_templates: bool,
    said: Callable[[str], None] = lambda _: None,
) -> tuple[FrontierPoint, ...]:
    """A plan for each value. Where templates do not depend on it, they are made once."""
    made: TemplateFactory | None = None
    points = []
    for value in values:
        said(f"{value:g}")
        problem = problem_at(value)
        if made is None or not share_templates:
            made = TemplateFactory(problem)
        points.append(FrontierPoint(value, planner(replace(made, problem=problem), settings).plan))
    return tuple(points)


def dominated(points: Sequence[FrontierPoint], *, less_is_more: bool) -> frozenset[int]:
    """Places of points beside which another asks for as much, serves as much and costs less."""
    found = set()
    for place, point in enumerate(points):
        for other in points:
            harder = other.value < point.value if less_is_more else other.value > point.value
            enough = other.plan.fraction >= point.plan.fraction - 1e-9
            if harder and enough and other.usd_per_h < point.usd_per_h * (1 - LEAST):
                found.add(place)
    return frozenset(found)
