"""Schedules over the day against enumeration, and frontiers of plans."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem

from potluck.core.errors import InputError
from potluck.core.values.service import ModelTerms
from potluck.plan.day_schedule import at_rates, change_usd, cheapest_round, schedule
from potluck.plan.frontier import dominated, frontier, with_value
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify

melange = STRATEGIES["melange"]
SETTINGS = SolveSettings(time_limit_s=20.0)
OFFERS = {"east": {"1xL40S": (1.86, 8), "1xA10G": (1.0, 16)}}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_schedule_cycle_equals_the_cheapest_of_all_enumerated_cycles(data: st.DataObject) -> None:
    parts, plans = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    usd = st.floats(0, 10)
    cost = [[data.draw(usd) for _ in range(plans)] for _ in range(parts)]
    for part in cost:  # some plan always does
        for plan in range(1, plans):
            if data.draw(st.booleans()):
                part[plan] = inf
    change = [[0.0 if a == b else data.draw(usd) for b in range(plans)] for a in range(plans)]

    def total(chosen: tuple[int, ...] | list[int]) -> float:
        return sum(cost[t][p] + change[chosen[t - 1]][p] for t, p in enumerate(chosen))

    chosen, best = cheapest_round(cost, change)
    assert best == pytest.approx(min(total(item) for item in itertools.product(range(plans), repeat=parts)))
    assert total(chosen) == pytest.approx(best)


def test_day_with_two_rate_levels_has_two_steps_that_cost_less_than_a_static_plan() -> None:
    problem = a_problem(a_demand(rate_per_s=12.0), offers=OFFERS)
    day = schedule(TemplateFactory(problem), melange, SETTINGS, [{"chat": 2.0}] * 8 + [{"chat": 12.0}] * 4)
    night, noon = sorted(day.steps, key=lambda step: step.rates_per_s["chat"])
    assert (night.from_h, night.hours) == (0.0, 16.0)
    assert (noon.from_h, noon.hours) == (16.0, 8.0)
    assert verify(at_rates(problem, (2.0,)), night.plan) == ()
    assert verify(at_rates(problem, (12.0,)), noon.plan) == ()
    paid = sum(step.plan.total_usd_per_h * step.hours + step.change_usd for step in day.steps)
    assert day.usd_per_day == pytest.approx(paid)
    assert noon.change_usd > night.change_usd > 0  # starting is dearer than draining
    assert day.usd_per_day < day.static_usd_per_day == pytest.approx(24 * day.static.total_usd_per_h)
    assert change_usd(problem, day.static, day.static) == 0


def test_day_with_a_constant_rate_has_one_step() -> None:
    problem = a_problem(a_demand(rate_per_s=5.0), offers=OFFERS)
    day = schedule(TemplateFactory(problem), melange, SETTINGS, [{"chat": 5.0}] * 3)
    (step,) = day.steps
    assert step.hours == 24
    assert step.change_usd == 0
    assert day.usd_per_day == pytest.approx(day.static_usd_per_day)
    with pytest.raises(InputError, match="at least two parts"):
        schedule(TemplateFactory(problem), melange, SETTINGS, [{"chat": 5.0}])


def test_frontier_plans_keep_their_terms_and_costs_increase() -> None:
    problem = a_problem(a_demand(rate_per_s=6.0), offers=OFFERS)
    values = (0.0, 0.5, 1.0)
    problems = [(value, with_value(problem, "availability", value, "node"), melange) for value in values]
    points = frontier(problems, SETTINGS, share_templates=True)
    costs = [plan.total_usd_per_h for _, plan in points]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]
    for (_, planning_problem, _), (_, plan) in zip(problems, points, strict=True):
        assert verify(planning_problem, plan) == ()
    assert with_value(problem, "spot", 0.3, "node").demands[0].terms == ModelTerms(max_spot_share=0.3)
    dear = (0.0, replace(points[0][1], cost_usd_per_h=costs[-1] + 1))
    assert dominated((dear, *points[1:]), less_is_more=False) == {0.0}
    assert dominated(points, less_is_more=False) == frozenset()
