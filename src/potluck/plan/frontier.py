"""Cost frontier: one plan for each value of the objective, the availability or the share on spot nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from potluck.core.values.plan import Plan
from potluck.core.values.service import FailureDomain, ModelTerms
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies.template_factory import Planner, SolveSettings, TemplateFactory

Against = Literal["objective", "availability", "spot"]
VALUES: dict[str, tuple[float, ...]] = {
    "objective": (0.5, 0.7, 0.85, 1.0, 1.25, 1.6, 2.0, 3.0),
    "availability": (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0),
    "spot": (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0),
}
"""Values that are planned by default."""
MIN_SAVING_SHARE = 1e-3  # Of a plan's cost; smaller differences count as equal cost.
FrontierPoint = tuple[float, Plan]  # The requested value, and the plan for it.


def with_value(
    problem: PlanningProblem, against: Against, value: float, domain: FailureDomain
) -> PlanningProblem:
    """The problem with this availability, or this largest share on spot nodes, as a term of every model."""

    def with_term(terms: ModelTerms) -> ModelTerms:
        if against == "spot":
            return replace(terms, max_spot_share=value)
        return replace(terms, survive=domain if value > 0 else None, survive_share=value or 1.0)

    return replace(
        problem, demands=tuple(replace(demand, terms=with_term(demand.terms)) for demand in problem.demands)
    )


def frontier(
    problems: Sequence[tuple[float, PlanningProblem, Planner]],
    settings: SolveSettings,
    *,
    share_templates: bool,
    report_progress: Callable[[str], None] = lambda _: None,
) -> tuple[FrontierPoint, ...]:
    """A plan for each value. With `share_templates` the templates are made once, for all values."""
    factory: TemplateFactory | None = None
    points = []
    for value, problem, planner in problems:
        report_progress(f"planning for {value:g}")
        if factory is None or not share_templates:
            factory = TemplateFactory(problem)
        points.append((value, planner(replace(factory, problem=problem), settings).plan))
    return tuple(points)


def dominated(points: Sequence[FrontierPoint], *, less_is_more: bool) -> frozenset[float]:
    """Values for which a stricter value has a plan that serves as much and costs less."""
    return frozenset(
        value
        for value, plan in points
        for other_value, other in points
        if (other_value < value if less_is_more else other_value > value)
        and other.fraction >= plan.fraction - 1e-9
        and other.total_usd_per_h < plan.total_usd_per_h * (1 - MIN_SAVING_SHARE)
    )
