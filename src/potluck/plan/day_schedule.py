"""Demand over the day: which plan to run from when to when, with what changing between them costs.

    minimise   sum over parts of the day t      hours x USD/h of the plan p_t, made for at least what t asks for
             + sum over parts                   what changing from p_(t-1) to p_t costs: copies that start and copies
                                                that drain are paid for while they serve nothing

over one plan for each different demand, by dynamic programming on a ring: midnight is no cut. Plans are made as if
the copies of the plan for the day's peaks ran already, so that they use the same templates unless others are cheaper
by more than a start.
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

Peaks = tuple[float, ...]  # Requests a second of each model, in the order of the problem's.
LEVELS = 8  # Different peaks of a model that are planned for: rates are rounded up to one of so many.


@dataclass(frozen=True, slots=True)
class DayStep:
    """One plan, from an hour of the day to another; the last may pass midnight."""

    from_h: float
    hours: float
    rates_per_s: Mapping[str, float]  # The most that each model is asked for.
    plan: Plan
    change_usd: float  # Paid once, for coming here from the step before.


@dataclass(frozen=True, slots=True)
class DaySchedule:
    steps: tuple[DayStep, ...]
    usd_per_day: float
    static: Plan
    static_usd_per_day: float


def schedule(
    factory: TemplateFactory,
    planner: Planner,
    settings: SolveSettings,
    rates_per_s: Sequence[Mapping[str, float]],
    said: Callable[[str], None] = lambda _: None,
) -> DaySchedule:
    """The cheapest day. `rates_per_s` has one entry for each equal part of it."""
    if len(rates_per_s) < 2:
        raise InputError("schedule", "needs rates for at least two parts of the day")
    problem, hours = factory.problem, 24.0 / len(rates_per_s)
    names = [demand.name for demand in problem.demands]
    asked = [
        tuple(part.get(demand.name, demand.rate_per_s) for demand in problem.demands) for part in rates_per_s
    ]
    peaks = [_rounded_up(asked, part) for part in asked]
    top = peak_of(peaks)
    said("the day's peaks")
    static_plan = planner(replace(factory, problem=at_rates(problem, top)), settings).plan
    made: dict[Peaks, Plan] = {top: static_plan}
    penalty = max(startup_s(weight_bytes(demand.model)).total_s for demand in problem.demands) / 3600

    distinct = sorted({*peaks, top}, reverse=True)
    plans = []
    for peak in distinct:
        if peak not in made:
            said("requests/s " + ", ".join(f"{rate:.3g}" for rate in peak))
            there = replace(at_rates(problem, peak), init_penalty=max(problem.init_penalty, penalty))
            made[peak] = planner(replace(factory, problem=there), replace(settings, running=static_plan)).plan
        plans.append(made[peak])
    cost = [
        [_usd(plan, peak, each) * hours for plan, peak in zip(plans, distinct, strict=True)] for each in peaks
    ]
    changes = [
        [change_usd(problem, previous_plan, next_plan) for next_plan in plans] for previous_plan in plans
    ]
    chosen, total = cheapest_round(cost, changes)
    steps = _steps(names, asked, chosen, plans, changes, hours)
    return DaySchedule(steps, total, static_plan, static_plan.total_usd_per_h * 24)


def _usd(plan: Plan, peak: Peaks, asked: Peaks) -> float:
    """What a plan costs an hour; infinite where more is asked for than it was made for."""
    enough = all(most >= rate * (1 - 1e-9) for most, rate in zip(peak, asked, strict=True))
    return plan.total_usd_per_h if enough else inf


def _steps(
    names: Sequence[str],
    asked: Sequence[Peaks],
    chosen: Sequence[int],
    plans: Sequence[Plan],
    changes: Sequence[Sequence[float]],
    hours: float,
) -> tuple[DayStep, ...]:
    parts = len(chosen)
    begins = [i for i in range(parts) if plans[chosen[i]] is not plans[chosen[i - 1]]] or [0]
    steps = []
    for place, begin in enumerate(begins):
        end = begins[place + 1] if place + 1 < len(begins) else begins[0] + parts
        most = peak_of([asked[i % parts] for i in range(begin, end)])
        change = changes[chosen[begin - 1]][chosen[begin]] if len(begins) > 1 else 0.0
        rates = dict(zip(names, most, strict=True))
        steps.append(DayStep(begin * hours, (end - begin) * hours, rates, plans[chosen[begin]], change))
    return tuple(steps)


def _rounded_up(asked: Sequence[Peaks], part: Peaks) -> Peaks:
    values = []
    for place, rate in enumerate(part):
        most = max(item[place] for item in asked)
        levels = sorted({most * (i + 1) / LEVELS for i in range(LEVELS)} | {0.0})
        known = sorted({item[place] for item in asked})
        # Few different rates are planned for as they are.
        choices = known if len(known) <= LEVELS else levels
        values.append(next((level for level in choices if level >= rate * (1 - 1e-9)), most))
    return tuple(values)


def peak_of(parts: Sequence[Peaks]) -> Peaks:
    return tuple(max(values) for values in zip(*parts, strict=True))


def at_rates(problem: PlanningProblem, rates_per_s: Peaks) -> PlanningProblem:
    def at(demand: ModelDemand, rate: float) -> ModelDemand:
        factor = rate / demand.rate_per_s if demand.rate_per_s > 0 else 0.0
        buckets = tuple(replace(bucket, rate_per_s=bucket.rate_per_s * factor) for bucket in demand.buckets)
        return replace(demand, buckets=buckets)

    demands = tuple(at(demand, rate) for demand, rate in zip(problem.demands, rates_per_s, strict=True))
    return replace(problem, demands=demands)


def change_usd(problem: PlanningProblem, previous_plan: Plan, next_plan: Plan) -> float:
    if previous_plan is next_plan:
        return 0.0
    offers, asks = offers_of(problem), {demand.name: demand for demand in problem.demands}
    held = {(d.template, d.region): d.count for d in previous_plan.deployments}
    wanted = {(d.template, d.region): d.count for d in next_plan.deployments}
    total = 0.0
    for plan, more, fewer, drains in ((next_plan, wanted, held, False), (previous_plan, held, wanted, True)):
        for (name, region), count in more.items():
            extra = count - fewer.get((name, region), 0)
            if extra <= 0:
                continue
            template = plan.template(name)
            price = sum(
                offer.price_usd_per_h * node_count.count
                for node_count in template.nodes
                if (offer := offers.get((region, node_count.node))) is not None
            )
            start_s = startup_s(weight_bytes(asks[template.model].model)).total_s
            total += extra * price * (DEFAULT_COSTS.drain_s if drains else start_s) / 3600
    return total


def cheapest_round(
    cost: Sequence[Sequence[float]], change: Sequence[Sequence[float]]
) -> tuple[list[int], float]:
    """Which plan to run in each part of a ring: cost[part][plan] and change[before][after] add up to the least.

    For each plan in the first part, the cheapest way to every plan of the next part, and so on, and back again.
    """
    count, best, chosen = len(cost[0]), inf, [0] * len(cost)
    for first in range(count):
        if cost[0][first] >= best:
            continue
        value = [cost[0][plan] if plan == first else inf for plan in range(count)]
        received: list[list[int]] = []
        for part in cost[1:]:
            ways = [min((value[b] + change[b][a], b) for b in range(count)) for a in range(count)]
            value = [usd + part[a] for a, (usd, _) in enumerate(ways)]
            received.append([b for _, b in ways])
        total, last = min((value[a] + change[a][first], a) for a in range(count))
        if total < best:
            best, chosen = total, [last]
            for before in reversed(received):
                chosen.append(before[chosen[-1]])
            chosen.reverse()
    return chosen, best
