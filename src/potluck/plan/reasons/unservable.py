"""What nothing on offer can serve is said and left out, and the rest is planned.

A bucket of requests is left out when it does not fit the model's context, or when no template keeps its objective at
any count. Its rate becomes 0, so that buckets keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem
from potluck.plan.reasons.explain import Planner, why_not
from potluck.plan.strategies.template_factory import PlanOutcome, SolveSettings, TemplateFactory

TRIES = 3


def planned_rest(
    planner: Planner, factory: TemplateFactory, settings: SolveSettings
) -> tuple[TemplateFactory, PlanOutcome, tuple[str, ...]]:
    """(the workshop with what is planned for, its plan, a line for everything that was left out)."""
    problem, notes = within_context(factory.problem)
    factory = replace(factory, problem=problem)
    outcome = planner(factory, settings)
    for _ in range(TRIES):
        shortfall = outcome.allocation.shortfall
        if shortfall is None or not shortfall.unserved or outcome.plan.fraction > 0:
            break
        rest, more = without(factory.problem, shortfall.unserved)
        if not any(ask.rate_per_s > 0 for ask in rest.asks):
            break
        notes += more
        factory = replace(factory, problem=rest)
        outcome = planner(factory, settings)
    return factory, outcome, notes


def within_context(problem: PlanningProblem) -> tuple[PlanningProblem, tuple[str, ...]]:
    """Without requests that are longer than their model's context: every engine refuses them."""

    def too_long(ask: ModelDemand, demand: BucketDemand) -> bool:
        return demand.input_tokens + demand.output_tokens > ask.model.max_context_tokens

    rest = _left_out(problem, too_long)
    notes = []
    for before, after in zip(problem.asks, rest.asks, strict=True):
        if share := _share(before, after):
            limit = f"{before.model.max_context_tokens:,} tokens"
            notes.append(
                f"{before.name}: {share:.2g} % of its requests are longer than its context of {limit}; "
                "they are left out of the plan, and refused when they come"
            )
    return rest, tuple(notes)


def without(problem: PlanningProblem, unserved: Collection[str]) -> tuple[PlanningProblem, tuple[str, ...]]:
    """Without the demands of these names, as `Shortfall.unserved` has them."""

    def named(ask: ModelDemand, demand: BucketDemand) -> bool:
        return f"{ask.name}/{ask.name} up to {demand.longest_tokens} tokens" in unserved

    rest = _left_out(problem, named)
    notes = []
    for before, after in zip(problem.asks, rest.asks, strict=True):
        if not (share := _share(before, after)):
            continue
        if after.rate_per_s > 0:
            left = [
                d for d, e in zip(before.demands, after.demands, strict=True) if d.rate_per_s > e.rate_per_s
            ]
            lengths = ", ".join(f"up to {demand.longest_tokens:,}" for demand in left)
            notes.append(
                f"{before.name}: no template on offer serves its prompts of {lengths} tokens within the "
                f"objective; {share:.2g} % of its requests are left out"
            )
        else:
            notes.append(f"{why_not(problem, before.name)}. It is left out, the others are planned")
    return rest, tuple(notes)


def _left_out(
    problem: PlanningProblem, which: Callable[[ModelDemand, BucketDemand], bool]
) -> PlanningProblem:
    asks = tuple(
        replace(ask, demands=tuple(replace(d, rate_per_s=0.0) if which(ask, d) else d for d in ask.demands))
        for ask in problem.asks
    )
    return replace(problem, asks=asks)


def _share(before: ModelDemand, after: ModelDemand) -> float:
    """Percent of requests that are gone."""
    asked = before.rate_per_s
    return 100.0 * (1.0 - after.rate_per_s / asked) if asked > 0 and after.rate_per_s < asked else 0.0


def budget_that_would_do(planner: Planner, factory: TemplateFactory, settings: SolveSettings) -> float | None:
    """USD an hour of a plan for all of the demand if money were no matter; None where other things bind too."""
    if factory.problem.budget_usd_per_h is None:
        return None
    free = replace(factory, problem=replace(factory.problem, budget_usd_per_h=None))
    other = planner(free, settings)
    return other.plan.cost_usd_per_h if other.allocation.found else None
