"""Headroom before anything is tried: how much more demand to plan for so that chance makes few enough late.

The plan for the demand as it is says which queues there are; theory says how busy they may be for what was promised
(`queueing.late`); the plan for so much more demand has other queues, so both are done again, a few times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from potluck.core.values.plan import Plan
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies.template_factory import PlanOutcome, SolveSettings, TemplateFactory
from potluck.rehearse.demand_factors import restored, scaled
from potluck.rehearse.queueing import late

TRIES = 3
MOST = 1.3
"""More headroom than this is not asked for at once, on a guess."""
STEP = 1.03
SURE = 0.9
"""Of what a promise leaves open, the part that chance may take: the model is not exact."""


@dataclass(frozen=True, slots=True, eq=False)
class MarginedPlan:
    """A plan with margins: what each model's demand was multiplied by, and the outcome for that demand."""

    factors: dict[str, float]
    outcome: PlanOutcome


def margined(
    factory: TemplateFactory,
    outcome: PlanOutcome,
    planner: Callable[[TemplateFactory, SolveSettings], PlanOutcome],
    settings: SolveSettings,
    cv: float = 1.0,
) -> MarginedPlan:
    """The plan for as much more demand as queueing asks for; the one given where none is, or nodes are too few."""
    problem = factory.problem
    found = MarginedPlan({ask.name: 1.0 for ask in problem.asks}, outcome)
    if outcome.plan.fraction < 1 or not outcome.plan.deployments:
        return found
    for _ in range(TRIES):
        real = restored(found.outcome.plan, problem, found.factors)
        needed = asked(problem, real, cv)
        if all(more <= 1.0 for more in needed.values()):
            break
        factors = {name: factor * needed.get(name, 1.0) for name, factor in found.factors.items()}
        factory.said("planning with margins")
        other = planner(replace(factory, problem=scaled(problem, factors)), settings)
        if other.plan.fraction < 1 or not other.plan.deployments:
            break
        found = MarginedPlan(factors, other)
    return found


def with_margins(
    planner: Callable[[TemplateFactory, SolveSettings], PlanOutcome], cv: float = 1.0
) -> Callable[[TemplateFactory, SolveSettings], PlanOutcome]:
    """The planner whose plans have the margins that queueing asks for, as plans for the demand there is."""

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        outcome = planner(factory, settings)
        shop = factory.settled(outcome.plan)
        found = margined(shop, outcome, planner, replace(settings, start_s=None), cv)
        plan = restored(found.outcome.plan, shop.problem, found.factors)
        return replace(found.outcome, plan=plan)

    return planned


def asked(problem: PlanningProblem, plan: Plan, cv: float) -> dict[str, float]:
    """By how much each model's replicas should be less busy; 1 where they are idle enough."""
    allowed = {ask.name: SURE * (1.0 - ask.slo.attainment) for ask in problem.asks}
    found = dict.fromkeys(late(problem, plan, cv), 1.0)
    waiting = set(found)
    while waiting:
        seen = late(problem, plan, cv, found)
        waiting = {name for name in waiting if seen[name] > allowed[name] and found[name] < MOST}
        found |= {name: min(found[name] * STEP, MOST) for name in waiting}
    return found
