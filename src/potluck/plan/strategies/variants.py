"""Weights in one of several formats, and how far a request may travel: both chosen with the plan.

All replicas of a model share a format: any two may come to hand KV to each other. For every combination of the
models' formats the strategy is asked for a plan, and the best is taken: most served, then cheapest, then the format
that the spec names first.

A request's way to a region and back counts in its TTFT, and nobody knows which region it is sent to. For each
distance d that some region is at: only regions within d, and TTFT shorter by d. The best of these plans is taken.
Several models have one d each: the largest of their own that is no farther than the d at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from potluck.core.errors import CapacityError, InputError
from potluck.core.values.model import Format
from potluck.core.values.plan import Plan
from potluck.plan.assemble.codecs import served
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.template_factory import (
    FormatPrice,
    Planner,
    PlanOutcome,
    SolveSettings,
    TemplateFactory,
)

Formats = tuple[tuple[str, Format], ...]
MOST = 32  # Combinations that are tried; each takes a plan's time.


def choosing_formats(planner: Planner) -> Planner:
    """The strategy, made to choose formats where the spec leaves them open; what runs keeps its own."""

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        combinations = formats_of(factory.problem, settings.running)
        if combinations == [()]:
            return planner(factory, settings)
        settings = settings.begun if len(combinations) > 1 else settings
        plan_outcomes = []
        for place, formats in enumerate(combinations):
            there = replace(factory, problem=factory.problem.in_formats(formats))
            left = len(combinations) - place
            mine = settings if left == 1 else settings.within(1 / left)
            starts = tuple(start for start in settings.starts if start.formats == formats)
            plan_outcomes.append(planner(there, replace(mine, starts=starts)))
        return best_of(plan_outcomes)

    return planned


def formats_of(problem: PlanningProblem, running_plan: Plan | None = None) -> list[Formats]:
    """Every combination of the formats that models may have, those of the spec's first formats first."""
    asks = [demand for demand in problem.asks if demand.formats]
    allowed = [_allowed(demand, running_plan) for demand in asks]
    count = prod(len(item) for item in allowed)
    if count > MOST:
        raise InputError("precision", f"{count} combinations of formats are more than {MOST}; name fewer")
    names = [demand.name for demand in asks]
    return [tuple(zip(names, item, strict=True)) for item in product(*allowed)]


def _allowed(demand: ModelDemand, running_plan: Plan | None) -> Sequence[Format]:
    loaded = None if running_plan is None else running_plan.format_of(demand.name)
    return demand.formats if loaded is None else (loaded,)


def best_of(outcomes: Iterable[PlanOutcome]) -> PlanOutcome:
    """The best of plans in different formats, with a proof over all of them."""
    plan_outcomes = list(outcomes)
    best_outcome = max(plan_outcomes, key=_rank)
    if len(plan_outcomes) == 1:
        return best_outcome
    prices = ((each.plan.formats, each.plan.fraction, each.plan.total_usd_per_h) for each in plan_outcomes)
    best_outcome = replace(best_outcome, tried=tuple(FormatPrice(*price) for price in prices))
    if not best_outcome.allocation.found:
        return best_outcome
    cost = best_outcome.weighed_usd_per_h
    bound = min(each.allocation.lower_bound_usd_per_h for each in plan_outcomes if each.allocation.found)
    bound = min(bound, best_outcome.allocation.lower_bound_usd_per_h, cost)
    gap = max(best_outcome.plan.gap, (cost - bound) / cost if cost > 0 else 0.0)
    return replace(best_outcome, plan=replace(best_outcome.plan, gap=gap))


def _rank(outcome: PlanOutcome) -> tuple[float, float]:
    plan = outcome.plan
    return round(plan.fraction, 9), -round(outcome.weighed_usd_per_h + plan.start_usd_per_h, 9)


def near_users(planner: Planner) -> Planner:
    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        problem = factory.problem
        if not any(demand.origins for demand in problem.asks):
            return planner(factory, settings)
        plan_outcomes = []
        for far_s in distances(problem):
            there = within(problem, far_s)
            known = factory.near.setdefault(far_s, TemplateFactory(there, said=factory.said))
            plan_outcomes.append(planner(replace(known, problem=there), settings))
        if not plan_outcomes:
            raise CapacityError(
                "no region is near enough to all users for the objective; allow a longer TTFT"
            )
        best_outcome = max(
            plan_outcomes, key=lambda each: (served(factory.problem, each.plan), -each.weighed_usd_per_h)
        )
        return replace(best_outcome, plan=_seen_by_users(problem, best_outcome.plan))

    return planned


def _able(problem: PlanningProblem, demand: ModelDemand) -> list[float]:
    """Distances of regions where a model may run and some TTFT is left."""
    far = {demand.far_s(region.name) for region in problem.regions if demand.terms.allows(region.name)}
    return sorted(value for value in far if value < demand.slo.ttft_s)


def distances(problem: PlanningProblem) -> list[float]:
    """How far requests may travel, the nearest first; empty where some model has no region near enough."""
    able = [_able(problem, demand) for demand in problem.asks if demand.origins]
    if not all(able):
        return []
    return sorted({far_s for values in able for far_s in values if far_s >= max(first[0] for first in able)})


def within(problem: PlanningProblem, far_s: float) -> PlanningProblem:
    """The problem where no request travels farther, and what it travels is gone from TTFT."""

    def near(demand: ModelDemand) -> ModelDemand:
        if not demand.origins:
            return demand
        own_s = max(value for value in _able(problem, demand) if value <= far_s)
        regions = tuple(
            region.name
            for region in problem.regions
            if demand.terms.allows(region.name) and demand.far_s(region.name) <= own_s
        )
        slo = replace(demand.slo, ttft_s=demand.slo.ttft_s - own_s)
        return replace(demand, slo=slo, terms=replace(demand.terms, regions=regions), origins=())

    return replace(problem, asks=tuple(near(demand) for demand in problem.asks))


def _seen_by_users(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan whose predictions count the way of a mean user."""
    asks = {demand.name: demand for demand in problem.asks}
    far: dict[str, list[tuple[float, float]]] = {}
    for share in plan.shares:
        demand = asks[plan.template(share.template).model]
        if share.phase != "decode" and demand.origins:
            far.setdefault(demand.name, []).append((share.rate_per_s, demand.mean_far_s(share.region)))
    predictions = []
    for prediction in plan.predictions:
        parts = far.get(prediction.model, [])
        total = sum(rate for rate, _ in parts)
        mean_s = sum(rate * far_s for rate, far_s in parts) / total if total > 0 else 0.0
        predictions.append(replace(prediction, ttft_s=prediction.ttft_s + mean_s))
    return replace(plan, predictions=tuple(predictions))
