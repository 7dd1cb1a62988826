"""Users have places: how far a request may travel is chosen with the plan.

A request's way to a region and back counts in its TTFT, and nobody knows which region it is sent to; so a model that
runs in some regions must make its first tokens within what the farthest of its users leave of the objective. For each
distance d that some region is at: only regions within d, and TTFT shorter by d. The best of these plans is taken.
Several models have one d each: the largest of their own that is no farther than the d at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from potluck.core.errors import CapacityError
from potluck.core.values.plan import Plan
from potluck.plan.assemble.priorities import served
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.template_factory import PlanOutcome, SolveSettings, TemplateFactory

Strategy = Callable[[TemplateFactory, SolveSettings], PlanOutcome]


def near_users(strategy: Strategy) -> Strategy:
    """The strategy, made to know where users are."""

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        problem = factory.problem
        if not any(ask.origins for ask in problem.asks):
            return strategy(factory, settings)
        found = []
        for far_s in distances(problem):
            there = within(problem, far_s)
            known = factory.near.setdefault(far_s, TemplateFactory(there, said=factory.said))
            found.append(strategy(replace(known, problem=there), settings))
        if not found:
            raise CapacityError(
                "no region is near enough to all users for the objective; allow a longer TTFT"
            )
        best = max(found, key=lambda each: (served(factory.problem, each.plan), -each.plan.total_usd_per_h))
        return replace(best, plan=_seen_by_users(problem, best.plan))

    return planned


def _able(problem: PlanningProblem, ask: ModelDemand) -> list[float]:
    """Distances of regions where a model may run and some TTFT is left."""
    far = {ask.far_s(region.name) for region in problem.regions if ask.terms.allows(region.name)}
    return sorted(each for each in far if each < ask.slo.ttft_s)


def distances(problem: PlanningProblem) -> list[float]:
    """How far requests may travel, the nearest first; empty where some model has no region near enough."""
    able = [_able(problem, ask) for ask in problem.asks if ask.origins]
    if not all(able):
        return []
    return sorted({far_s for each in able for far_s in each if far_s >= max(first[0] for first in able)})


def within(problem: PlanningProblem, far_s: float) -> PlanningProblem:
    """The problem where no request travels farther, and what it travels is gone from TTFT."""

    def near(ask: ModelDemand) -> ModelDemand:
        if not ask.origins:
            return ask
        own_s = max(each for each in _able(problem, ask) if each <= far_s)
        regions = tuple(
            region.name
            for region in problem.regions
            if ask.terms.allows(region.name) and ask.far_s(region.name) <= own_s
        )
        slo = replace(ask.slo, ttft_s=ask.slo.ttft_s - own_s)
        return replace(ask, slo=slo, terms=replace(ask.terms, regions=regions), origins=())

    return replace(problem, asks=tuple(near(ask) for ask in problem.asks))


def _seen_by_users(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan whose predictions count the way of a mean user."""
    asks = {ask.name: ask for ask in problem.asks}
    far: dict[str, list[tuple[float, float]]] = {}
    for share in plan.shares:
        ask = asks[plan.template(share.template).model]
        if share.phase != "decode" and ask.origins:
            far.setdefault(ask.name, []).append((share.rate_per_s, ask.mean_far_s(share.region)))
    predictions = []
    for each in plan.predictions:
        parts = far.get(each.model, [])
        total = sum(rate for rate, _ in parts)
        mean_s = sum(rate * far_s for rate, far_s in parts) / total if total > 0 else 0.0
        predictions.append(replace(each, ttft_s=each.ttft_s + mean_s))
    return replace(plan, predictions=tuple(predictions))
