"""Choose weight formats and the longest network distance together with the plan.

All replicas of a model share a format, because any two may hand KV over to each other. The strategy plans every
combination of the models' formats, and the best plan is taken: most demand served, then cheapest, then the format
that the spec names first.

The round trip to a region counts towards TTFT, and routing decides the region later. So for each distance d of some
region, the strategy plans with only the regions within d and a TTFT objective shorter by d; the best plan is taken.
With several models, each uses the largest of its own distances that does not exceed d.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from potluck.core.errors import CapacityError, InputError
from potluck.core.values.model import Format
from potluck.core.values.plan import Plan
from potluck.plan.assemble.codecs import served_shares
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.template_factory import (
    FormatPrice,
    Planner,
    PlanOutcome,
    SolveSettings,
    TemplateFactory,
)

Formats = tuple[tuple[str, Format], ...]
MAX_FORMAT_COMBINATIONS = 32  # Each combination costs the time of one plan.


def choose_formats(planner: Planner) -> Planner:
    """The planner, extended to choose formats where the spec allows several; running models keep theirs."""

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        combinations = formats_of(factory.problem, settings.running)
        if combinations == [()]:
            return planner(factory, settings)
        settings = settings.started if len(combinations) > 1 else settings
        plan_outcomes = []
        for index, formats in enumerate(combinations):
            factory_in_formats = replace(factory, problem=factory.problem.in_formats(formats))
            plans_left = len(combinations) - index
            own_settings = settings if plans_left == 1 else settings.with_time_share(1 / plans_left)
            start_plans = tuple(plan for plan in settings.start_plans if plan.formats == formats)
            plan_outcomes.append(planner(factory_in_formats, replace(own_settings, start_plans=start_plans)))
        return best_of(plan_outcomes)

    return planned


def formats_of(problem: PlanningProblem, running_plan: Plan | None = None) -> list[Formats]:
    """Every combination of the models' allowed formats, in the order of the spec."""
    demands = [demand for demand in problem.demands if demand.formats]
    allowed = [_allowed(demand, running_plan) for demand in demands]
    count = prod(len(formats) for formats in allowed)
    if count > MAX_FORMAT_COMBINATIONS:
        raise InputError(
            "precision",
            f"{count} combinations of formats are more than {MAX_FORMAT_COMBINATIONS}; name fewer",
        )
    names = [demand.name for demand in demands]
    return [tuple(zip(names, formats, strict=True)) for formats in product(*allowed)]


def _allowed(demand: ModelDemand, running_plan: Plan | None) -> Sequence[Format]:
    loaded = None if running_plan is None else running_plan.format_of(demand.name)
    return demand.formats if loaded is None else (loaded,)


def best_of(outcomes: Iterable[PlanOutcome]) -> PlanOutcome:
    """The best of several plans in different formats, with a gap against the lowest bound of all of them."""
    plan_outcomes = list(outcomes)
    best_outcome = max(plan_outcomes, key=_rank)
    if len(plan_outcomes) == 1:
        return best_outcome
    prices = (
        (outcome.plan.formats, outcome.plan.fraction, outcome.plan.total_usd_per_h)
        for outcome in plan_outcomes
    )
    best_outcome = replace(best_outcome, tried=tuple(FormatPrice(*price) for price in prices))
    if not best_outcome.allocation.found:
        return best_outcome
    cost = best_outcome.weighted_usd_per_h
    bound = min(
        outcome.allocation.lower_bound_usd_per_h for outcome in plan_outcomes if outcome.allocation.found
    )
    bound = min(bound, best_outcome.allocation.lower_bound_usd_per_h, cost)
    gap = max(best_outcome.plan.gap, (cost - bound) / cost if cost > 0 else 0.0)
    return replace(best_outcome, plan=replace(best_outcome.plan, gap=gap))


def _rank(outcome: PlanOutcome) -> tuple[float, float]:
    plan = outcome.plan
    return round(plan.fraction, 9), -round(outcome.weighted_usd_per_h + plan.start_usd_per_h, 9)


def choose_distance(planner: Planner) -> Planner:
    """The planner, extended to choose how far requests may travel from their users to a region."""

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        problem = factory.problem
        if not any(demand.origins for demand in problem.demands):
            return planner(factory, settings)
        plan_outcomes = []
        for far_s in distances(problem):
            problem_within = within(problem, far_s)
            factory_within = factory.by_distance.setdefault(
                far_s, TemplateFactory(problem_within, report_progress=factory.report_progress)
            )
            plan_outcomes.append(planner(replace(factory_within, problem=problem_within), settings))
        if not plan_outcomes:
            raise CapacityError(
                "no region is near enough to all users for the TTFT objective; allow a longer TTFT"
            )
        best_outcome = max(
            plan_outcomes,
            key=lambda outcome: (served_shares(factory.problem, outcome.plan), -outcome.weighted_usd_per_h),
        )
        return replace(best_outcome, plan=_seen_by_users(problem, best_outcome.plan))

    return planned


def _usable_distances(problem: PlanningProblem, demand: ModelDemand) -> list[float]:
    """Round-trip times to the regions where a model may run and that leave some of its TTFT, shortest first."""
    rtts = {demand.max_rtt_s(region.name) for region in problem.regions if demand.terms.allows(region.name)}
    return sorted(value for value in rtts if value < demand.slo.ttft_s)


def distances(problem: PlanningProblem) -> list[float]:
    """Candidate limits on the distance of requests, nearest first; empty where a model has no region in reach."""
    usable = [_usable_distances(problem, demand) for demand in problem.demands if demand.origins]
    if not all(usable):
        return []
    shortest_s = max(values[0] for values in usable)
    return sorted({rtt_s for values in usable for rtt_s in values if rtt_s >= shortest_s})


def within(problem: PlanningProblem, far_s: float) -> PlanningProblem:
    """The problem with only the regions within `far_s`, and TTFT objectives shortened by the round trip."""

    def within_reach(demand: ModelDemand) -> ModelDemand:
        if not demand.origins:
            return demand
        own_s = max(value for value in _usable_distances(problem, demand) if value <= far_s)
        regions = tuple(
            region.name
            for region in problem.regions
            if demand.terms.allows(region.name) and demand.max_rtt_s(region.name) <= own_s
        )
        slo = replace(demand.slo, ttft_s=demand.slo.ttft_s - own_s)
        return replace(demand, slo=slo, terms=replace(demand.terms, regions=regions), origins=())

    return replace(problem, demands=tuple(within_reach(demand) for demand in problem.demands))


def _seen_by_users(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan with the mean user's round trip added to its predicted TTFTs."""
    demands_by_model = {demand.name: demand for demand in problem.demands}
    rtts_by_model: dict[str, list[tuple[float, float]]] = {}
    for share in plan.shares:
        demand = demands_by_model[plan.template(share.template).model]
        if share.phase != "decode" and demand.origins:
            rtts_by_model.setdefault(demand.name, []).append(
                (share.rate_per_s, demand.mean_rtt_s(share.region))
            )
    predictions = []
    for prediction in plan.predictions:
        rtts = rtts_by_model.get(prediction.model, [])
        total = sum(rate for rate, _ in rtts)
        mean_s = sum(rate * far_s for rate, far_s in rtts) / total if total > 0 else 0.0
        predictions.append(replace(prediction, ttft_s=prediction.ttft_s + mean_s))
    return replace(plan, predictions=tuple(predictions))
