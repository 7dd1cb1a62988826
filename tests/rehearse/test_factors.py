"""Plans for more than the demand, brought back to it."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearse_builders import SETTINGS, a_problem, a_traffic, melange

from potluck.plan.strategies import TemplateFactory
from potluck.plan.verify import verify
from potluck.rehearse.queueing_margins import assembled, cost_by_model, reached, restored, scaled
from potluck.rehearse.rehearsal import FactorBracket, refuted, told

PROBLEM = a_problem(a_traffic("chat", 8.0), a_traffic("code", 3.0))


SHOP = TemplateFactory(PROBLEM)


@settings(max_examples=8)
@given(chat=st.floats(1.0, 4.0), code=st.floats(1.0, 4.0))
def test_a_restored_plan_is_sound_and_serves_the_real_demand(chat: float, code: float) -> None:
    factors = {"chat": chat, "code": code}
    raw = melange(replace(SHOP, problem=scaled(PROBLEM, factors)), SETTINGS).plan
    plan = restored(raw, PROBLEM, factors)
    assert verify(PROBLEM, plan) == ()
    assert plan.deployments == raw.deployments
    assert plan.cost_usd_per_h == raw.cost_usd_per_h
    assert sum(cost_by_model(plan, PROBLEM).values()) == pytest.approx(plan.cost_usd_per_h)
    for model, rate in (("chat", 8.0), ("code", 3.0)):
        served = sum(s.rate_per_s for s in plan.shares if plan.template(s.template).model == model)
        assert served == pytest.approx(rate)
        prediction = next(p for p in plan.predictions if p.model == model)
        assert prediction.demand_per_s == pytest.approx(rate)
        assert prediction.capacity_per_s == pytest.approx(factors[model] * rate / PROBLEM.headroom)


def test_a_fleet_too_small_for_the_factor_may_still_be_large_enough() -> None:
    small = a_problem(offers={"1xL40S": (1.9, 2)})
    factors = {"chat": 50.0}
    raw = melange(TemplateFactory(scaled(small, factors)), SETTINGS).plan
    assert 0 < raw.fraction < 1
    assert reached(raw, factors)["chat"] > 1
    plan = restored(raw, small, factors)
    assert plan.fraction == 1.0
    assert verify(small, plan) == ()


def test_a_fleet_too_small_for_the_demand_says_how_much_it_serves() -> None:
    small = a_problem(a_traffic(rate_per_s=500.0), offers={"1xA10G": (1.0, 2)})
    for factor in (1.0, 3.0):
        raw = melange(TemplateFactory(scaled(small, {"chat": factor})), SETTINGS).plan
        plan = restored(raw, small, {"chat": factor})
        assert sum(share.rate_per_s for share in plan.shares) == pytest.approx(500.0 * plan.fraction)
        assert plan.fraction == pytest.approx(raw.fraction * factor, rel=1e-6)


def test_a_plan_of_parts_is_sound_and_costs_their_sum() -> None:
    few, many = {"chat": 1.0, "code": 1.0}, {"chat": 2.0, "code": 3.0}
    plans = [melange(replace(SHOP, problem=scaled(PROBLEM, f)), SETTINGS).plan for f in (few, many)]
    both = assembled({"chat": plans[0], "code": plans[1]}, PROBLEM)
    assert verify(scaled(PROBLEM, {"chat": 1.0, "code": 3.0}), both) == ()
    wanted = cost_by_model(plans[0], PROBLEM)["chat"] + cost_by_model(plans[1], PROBLEM)["code"]
    assert both.cost_usd_per_h == pytest.approx(wanted)
    assert verify(scaled(PROBLEM, many), both) != ()


FLOOR, CEILING, TOLERANCE = 0.8, 16.0, 0.05


@given(needed=st.floats(0.3, 20.0), copy=st.floats(0.02, 0.5))
def test_finds_the_least_that_holds_when_more_is_better(needed: float, copy: float) -> None:
    """Whole copies, each `copy` of the demand: what a plan has is its factor rounded up."""
    bracket = FactorBracket(FLOOR, CEILING)
    tried = []
    while not bracket.done:
        at = bracket.factor
        tried.append(at)
        copies = ceil(at / copy)
        bracket = told(bracket, at, float(copies), copies * copy >= needed, TOLERANCE)
        assert len(tried) < 20
    assert all(FLOOR <= at <= CEILING for at in tried)
    if ceil(CEILING / copy) * copy < needed:
        assert bracket.held is None
        return
    assert bracket.held in tried
    result = ceil(bracket.held / copy)
    least = max(ceil(FLOOR / copy), ceil(needed / copy))
    # At most the tolerance above the least, and a copy for rounding.
    assert least <= result <= max(least * (1 + TOLERANCE), least + 1)


@given(truth=st.lists(st.booleans(), min_size=60, max_size=60))
def test_ends_in_any_world_and_only_with_what_held(truth: list[bool]) -> None:
    """Nothing need be monotone: whatever is settled on has been seen to hold."""
    bracket = FactorBracket(FLOOR, CEILING)
    answers: dict[float, bool] = {}
    for holds in truth:
        if bracket.done:
            break
        at = bracket.factor
        holds = answers.setdefault(at, holds)
        bracket = told(bracket, at, at, holds, TOLERANCE)
    assert bracket.done
    if bracket.held is None:
        assert bracket.factor == CEILING
        assert not answers[CEILING]
    else:
        assert bracket.factor == bracket.held
        assert answers[bracket.held]


def test_stops_where_no_cheaper_plan_can_be() -> None:
    bracket = told(FactorBracket(FLOOR, CEILING), 1.0, 10.0, False, TOLERANCE)
    bracket = told(bracket, 1.5, 10.0, True, TOLERANCE)
    assert bracket.done
    assert bracket.held == 1.5


def test_a_refuted_factor_is_not_taken_again() -> None:
    bracket = told(FactorBracket(FLOOR, CEILING), 1.0, 10.0, False, TOLERANCE)
    bracket = refuted(told(bracket, 1.04, 11.0, True, TOLERANCE), 1.04, 11.0)
    assert bracket.held is None
    assert not bracket.done
    assert bracket.factor > 1.04
    assert told(bracket, bracket.factor, 12.0, True, TOLERANCE).held == bracket.factor
    assert refuted(bracket, CEILING, 50.0).done
