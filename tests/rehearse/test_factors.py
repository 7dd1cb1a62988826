"""Plans for a scaled demand, scaled back to the demand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearse_builders import SETTINGS, a_problem, a_traffic, melange

from potluck.plan.strategies import TemplateFactory
from potluck.plan.verify import verify
from potluck.rehearse.queueing_margins import assembled, cost_by_model, reached, restored, scaled

PROBLEM = a_problem(a_traffic("chat", 8.0), a_traffic("code", 3.0))


SHOP = TemplateFactory(PROBLEM)


@settings(max_examples=8)
@given(chat=st.floats(1.0, 4.0), code=st.floats(1.0, 4.0))
def test_plan_scaled_back_to_the_demand_is_sound(chat: float, code: float) -> None:
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


def test_plan_short_of_a_scaled_demand_may_serve_the_real_one() -> None:
    small = a_problem(offers={"1xL40S": (1.9, 2)})
    factors = {"chat": 50.0}
    raw = melange(TemplateFactory(scaled(small, factors)), SETTINGS).plan
    assert 0 < raw.fraction < 1
    assert reached(raw, factors)["chat"] > 1
    plan = restored(raw, small, factors)
    assert plan.fraction == 1.0
    assert verify(small, plan) == ()


def test_plan_short_of_the_demand_reports_the_fraction_it_serves() -> None:
    small = a_problem(a_traffic(rate_per_s=500.0), offers={"1xA10G": (1.0, 2)})
    for factor in (1.0, 3.0):
        raw = melange(TemplateFactory(scaled(small, {"chat": factor})), SETTINGS).plan
        plan = restored(raw, small, {"chat": factor})
        assert sum(share.rate_per_s for share in plan.shares) == pytest.approx(500.0 * plan.fraction)
        assert plan.fraction == pytest.approx(raw.fraction * factor, rel=1e-6)


def test_plan_assembled_from_models_is_sound_and_costs_their_sum() -> None:
    few, many = {"chat": 1.0, "code": 1.0}, {"chat": 2.0, "code": 3.0}
    plans = [melange(replace(SHOP, problem=scaled(PROBLEM, f)), SETTINGS).plan for f in (few, many)]
    both = assembled({"chat": plans[0], "code": plans[1]}, PROBLEM)
    assert verify(scaled(PROBLEM, {"chat": 1.0, "code": 3.0}), both) == ()
    wanted = cost_by_model(plans[0], PROBLEM)["chat"] + cost_by_model(plans[1], PROBLEM)["code"]
    assert both.cost_usd_per_h == pytest.approx(wanted)
    assert verify(scaled(PROBLEM, many), both) != ()
