"""Schedule of plans over the day, with the cost of changing between them.

    minimise   sum over parts of the day t      hours x USD/h of the plan p_t, made for at least the demand of t
             + sum over parts                   cost of changing from p_(t-1) to p_t: copies that start and copies
                                                that drain are paid for while they serve nothing

over one plan for each distinct demand, by dynamic programming on a ring, so that midnight is no boundary. Plans are
made as if the copies of the plan for the day's peak were running, so that they use the same templates unless others
save more than a start costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from potluck.core.errors import InputError
from potluck.core.values.plan import Plan
from potluck.perf.memory import weight_bytes
from potluck.perf.startup import DEFAULT_COSTS, startup_s
from potluck.plan.assemble.term_rows import offers_of
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.template_factory import Planner, SolveSettings, TemplateFactory

Rates = tuple[float, ...]  # Requests/s of each model, in the order of the problem's demands.
MAX_RATE_LEVELS = 8  # Distinct rates of a model that are planned for; other rates are rounded up to them.


@dataclass(frozen=True, slots=True)
class DayStep:
    """A plan and the hours of the day it runs; the last step may pass midnight."""

    from_h: float
    hours: float
    rates_per_s: Mapping[str, float]  # Peak rate of each model during the step.
    plan: Plan
    change_usd: float  # Cost of the change from the previous step.


@dataclass(frozen=True, slots=True)
class DaySchedule:
    """The steps of a day and their cost, beside the static plan for the day's peak."""

    steps: tuple[DayStep, ...]
    usd_per_day: float
    static: Plan
    static_usd_per_day: float


def schedule(
    factory: TemplateFactory,
    planner: Planner,
    settings: SolveSettings,
    rates_per_s: Sequence[Mapping[str, float]],
    report_progress: Callable[[str], None] = lambda _: None,
) -> DaySchedule:
    """The cheapest schedule. `rates_per_s` has one entry for each equal part of the day."""
    if len(rates_per_s) < 2:
        raise InputError("schedule", "needs rates for at least two parts of the day")
    problem, hours = factory.problem, 24.0 / len(rates_per_s)
    names = [demand.name for demand in problem.demands]
    rates_of_parts = [
        tuple(part.get(demand.name, demand.rate_per_s) for demand in problem.demands) for part in rates_per_s
    ]
    planned_rates = [_rounded_up(rates_of_parts, part) for part in rates_of_parts]
    peak_rates = peak_of(planned_rates)
    report_progress("the day's peaks")
    static_plan = planner(replace(factory, problem=at_rates(problem, peak_rates)), settings).plan
    plan_of_rates: dict[Rates, Plan] = {peak_rates: static_plan}
    start_share = max(startup_s(weight_bytes(demand.model)).total_s for demand in problem.demands) / 3600

    distinct_rates = sorted({*planned_rates, peak_rates}, reverse=True)
    plans = []
    for rates in distinct_rates:
        if rates not in plan_of_rates:
            report_progress("requests/s " + ", ".join(f"{rate:.3g}" for rate in rates))
            problem_at_rates = replace(
                at_rates(problem, rates), init_penalty=max(problem.init_penalty, start_share)
            )
            plan_of_rates[rates] = planner(
                replace(factory, problem=problem_at_rates), replace(settings, running=static_plan)
            ).plan
        plans.append(plan_of_rates[rates])
    costs = [
        [_usd_per_h(plan, rates, needed) * hours for plan, rates in zip(plans, distinct_rates, strict=True)]
        for needed in planned_rates
    ]
    changes = [
        [change_usd(problem, previous_plan, next_plan) for next_plan in plans] for previous_plan in plans
    ]
    chosen, total = cheapest_round(costs, changes)
    steps = _steps(names, rates_of_parts, chosen, plans, changes, hours)
    return DaySchedule(steps, total, static_plan, static_plan.total_usd_per_h * 24)


def _usd_per_h(plan: Plan, planned: Rates, needed: Rates) -> float:
    """Cost of a plan per hour; infinite where it was made for lower rates than needed."""
    suffices = all(limit >= rate * (1 - 1e-9) for limit, rate in zip(planned, needed, strict=True))
    return plan.total_usd_per_h if suffices else inf


def _steps(
    names: Sequence[str],
    rates_of_parts: Sequence[Rates],
    chosen: Sequence[int],
    plans: Sequence[Plan],
    changes: Sequence[Sequence[float]],
    hours: float,
) -> tuple[DayStep, ...]:
    """The steps of consecutive parts of the day that run the same plan."""
    part_count = len(chosen)
    first_parts = [i for i in range(part_count) if plans[chosen[i]] is not plans[chosen[i - 1]]] or [0]
    steps = []
    for index, first in enumerate(first_parts):
        end = first_parts[index + 1] if index + 1 < len(first_parts) else first_parts[0] + part_count
        peak_rates = peak_of([rates_of_parts[i % part_count] for i in range(first, end)])
        change_cost_usd = changes[chosen[first - 1]][chosen[first]] if len(first_parts) > 1 else 0.0
        rates = dict(zip(names, peak_rates, strict=True))
        steps.append(
            DayStep(first * hours, (end - first) * hours, rates, plans[chosen[first]], change_cost_usd)
        )
    return tuple(steps)


def _rounded_up(rates_of_parts: Sequence[Rates], part: Rates) -> Rates:
    """The rates of a part rounded up to one of MAX_RATE_LEVELS levels for each model."""
    values = []
    for index, rate in enumerate(part):
        peak_rate = max(rates[index] for rates in rates_of_parts)
        levels = sorted({peak_rate * (i + 1) / MAX_RATE_LEVELS for i in range(MAX_RATE_LEVELS)} | {0.0})
        distinct_rates = sorted({rates[index] for rates in rates_of_parts})
        # A few distinct rates are not rounded.
        choices = distinct_rates if len(distinct_rates) <= MAX_RATE_LEVELS else levels
        values.append(next((level for level in choices if level >= rate * (1 - 1e-9)), peak_rate))
    return tuple(values)


def peak_of(parts: Sequence[Rates]) -> Rates:
    """The highest rate of each model over these parts."""
    return tuple(max(values) for values in zip(*parts, strict=True))


def at_rates(problem: PlanningProblem, rates_per_s: Rates) -> PlanningProblem:
    """The problem with models at these rates, in the same length mix."""

    def with_rate(demand: ModelDemand, rate: float) -> ModelDemand:
        factor = rate / demand.rate_per_s if demand.rate_per_s > 0 else 0.0
        buckets = tuple(replace(bucket, rate_per_s=bucket.rate_per_s * factor) for bucket in demand.buckets)
        return replace(demand, buckets=buckets)

    demands = tuple(
        with_rate(demand, rate) for demand, rate in zip(problem.demands, rates_per_s, strict=True)
    )
    return replace(problem, demands=demands)


def change_usd(problem: PlanningProblem, previous_plan: Plan, next_plan: Plan) -> float:
    """Rent of the copies that start, until they serve, and of those that drain."""
    if previous_plan is next_plan:
        return 0.0
    offers, demands_by_model = offers_of(problem), {demand.name: demand for demand in problem.demands}
    previous_counts = {(d.template, d.region): d.count for d in previous_plan.deployments}
    next_counts = {(d.template, d.region): d.count for d in next_plan.deployments}
    total = 0.0
    for plan, counts, other_counts, is_drain in (
        (next_plan, next_counts, previous_counts, False),
        (previous_plan, previous_counts, next_counts, True),
    ):
        for (name, region), count in counts.items():
            extra = count - other_counts.get((name, region), 0)
            if extra <= 0:
                continue
            template = plan.template(name)
            rent_usd_per_h = sum(
                offer.price_usd_per_h * node_count.count
                for node_count in template.nodes
                if (offer := offers.get((region, node_count.node))) is not None
            )
            start_s = startup_s(weight_bytes(demands_by_model[template.model].model)).total_s
            total += extra * rent_usd_per_h * (DEFAULT_COSTS.drain_s if is_drain else start_s) / 3600
    return total


def cheapest_round(
    cost: Sequence[Sequence[float]], change: Sequence[Sequence[float]]
) -> tuple[list[int], float]:
    """(plan of each part, total) with the least sum of cost[part][plan] and change[before][after] around a ring.

    For each plan of the first part, dynamic programming finds the cheapest sequence through all parts and back.
    """
    count, least_total, chosen = len(cost[0]), inf, [0] * len(cost)
    for first_plan in range(count):
        if cost[0][first_plan] >= least_total:
            continue
        least_usd = [cost[0][plan] if plan == first_plan else inf for plan in range(count)]
        predecessors: list[list[int]] = []
        for part in cost[1:]:
            least_from_previous = [
                min((least_usd[b] + change[b][a], b) for b in range(count)) for a in range(count)
            ]
            least_usd = [usd + part[a] for a, (usd, _) in enumerate(least_from_previous)]
            predecessors.append([b for _, b in least_from_previous])
        total, last_plan = min((least_usd[a] + change[a][first_plan], a) for a in range(count))
        if total < least_total:
            least_total, chosen = total, [last_plan]
            for predecessor_of_part in reversed(predecessors):
                chosen.append(predecessor_of_part[chosen[-1]])
            chosen.reverse()
    return chosen, least_total
