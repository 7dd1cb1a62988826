"""Unservable models and requests are reported and left out; sufficient budgets are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_problems import a_demand, a_problem

from potluck.core.values.types import Slo
from potluck.plan.explain import budget_that_would_do, planned_rest, within_context
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify

PLAN = STRATEGIES["melange"]
QUICK = SolveSettings(time_limit_s=10.0)


def test_unservable_model_is_left_out_and_the_others_are_planned() -> None:
    problem = a_problem(a_demand(rate_per_s=2.0), a_demand("strict", slo=Slo(0.001, 0.0001)))
    assert PLAN(TemplateFactory(problem), QUICK).plan.fraction == 0
    shop, outcome, notes = planned_rest(PLAN, TemplateFactory(problem), QUICK)
    assert outcome.plan.fraction == 1
    assert verify(shop.problem, outcome.plan) == ()
    assert {t.model for t in outcome.plan.templates} == {"chat"}
    assert len(notes) == 1
    assert notes[0].startswith("strict: its SLO")


def test_requests_beyond_the_context_are_left_out_and_reported() -> None:
    ask = a_demand(rate_per_s=2.0, lengths=((300, 200, 0.9), (400_000, 200, 0.1)))
    problem, notes = within_context(a_problem(ask))
    assert [bucket.rate_per_s for bucket in problem.demands[0].buckets] == pytest.approx([1.8, 0.0])
    assert "10 % of its requests exceed its context window" in notes[0]
    assert within_context(problem) == (problem, ())
    _, outcome, text = planned_rest(PLAN, TemplateFactory(a_problem(ask)), QUICK)
    assert outcome.plan.fraction == 1
    assert text == notes


def test_sufficient_budget_is_the_cost_of_a_plan_without_a_budget() -> None:
    rich = a_problem(a_demand(rate_per_s=20.0))
    cost = PLAN(TemplateFactory(rich), QUICK).plan.cost_usd_per_h
    poor = a_problem(a_demand(rate_per_s=20.0), budget_usd_per_h=cost / 2)
    assert PLAN(TemplateFactory(poor), QUICK).plan.fraction < 1
    assert budget_that_would_do(PLAN, TemplateFactory(poor), QUICK) == pytest.approx(cost)
    assert budget_that_would_do(PLAN, TemplateFactory(rich), QUICK) is None


def test_plan_rents_no_copy_without_work() -> None:
    """Where not even one copy can be had, no copy is rented; where some is served, every copy has work."""
    two = (a_demand(rate_per_s=2.0), a_demand("second", rate_per_s=2.0))
    none = PLAN(TemplateFactory(a_problem(*two, budget_usd_per_h=0.5)), QUICK).plan
    assert none.fraction == 0
    assert none.deployments == ()
    some = PLAN(TemplateFactory(a_problem(a_demand(rate_per_s=500.0), budget_usd_per_h=17.0)), QUICK).plan
    busy = {(share.template, share.region) for share in some.shares if share.rate_per_s > 0}
    assert {(deployment.template, deployment.region) for deployment in some.deployments} == busy


@pytest.mark.parametrize("strategy", ["melange", "auto"])
def test_budget_too_small_for_every_model_serves_the_models_that_fit(strategy: str) -> None:
    one = ((500, 200, 1.0),)
    small = a_demand("small", lengths=one)
    large = a_demand("large", model="Llama-3-70B", slo=Slo(5.0, 0.1), lengths=one)
    offers = {"east": {"1xL40S": (1.86, 8), "8xH100": (50.0, 2)}}
    problem = a_problem(large, small, offers=offers, budget_usd_per_h=8.0)
    plan = STRATEGIES[strategy](TemplateFactory(problem), SolveSettings(20.0)).plan
    assert (plan.fraction_of("small"), plan.fraction_of("large")) == (1.0, 0.0)
    assert 0 < plan.cost_usd_per_h <= 8.0
    assert not verify(problem, plan)
    alone = STRATEGIES[strategy](TemplateFactory(a_problem(small, offers=offers)), SolveSettings(20.0)).plan
    assert plan.cost_usd_per_h == pytest.approx(alone.cost_usd_per_h), "and for no more than it costs"
    urgent = replace(large, terms=replace(large.terms, priority=1))
    first = STRATEGIES[strategy](
        TemplateFactory(a_problem(urgent, small, offers=offers, budget_usd_per_h=60.0)), SolveSettings(20.0)
    ).plan
    assert first.fraction_of("large") == pytest.approx(1.0)
