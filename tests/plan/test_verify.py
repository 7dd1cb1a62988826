"""The plan checker reports every kind of violation and accepts a sound plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_problems import a_demand, a_problem

from potluck.core.values.plan import Deployment, Plan, PlannedShare
from potluck.core.values.types import Link
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify

TWO = {"east": {"1xH100": (6.9, 3)}, "west": {"1xA10G": (1.0, 12), "1xL40S": (1.86, 4)}}
LINKS = (Link("east", "west", 50.0, 0.02), Link("west", "east", 50.0, 0.02))
PROBLEM = a_problem(a_demand(rate_per_s=40.0), offers=TWO, links=LINKS)
PLAN = STRATEGIES["coral"](TemplateFactory(PROBLEM), SolveSettings()).plan


def assert_violation(plan: Plan, words: str) -> None:
    result = verify(PROBLEM, plan)
    assert any(words in item for item in result), result


def test_verify_accepts_a_solved_plan() -> None:
    assert verify(PROBLEM, PLAN) == ()
    assert PLAN.deployments
    assert PLAN.flows


def test_verify_reports_more_nodes_than_available() -> None:
    many = tuple(replace(deployment, count=deployment.count + 50) for deployment in PLAN.deployments)
    assert_violation(replace(PLAN, deployments=many), "available")


def test_verify_reports_a_wrong_cost() -> None:
    assert_violation(replace(PLAN, cost_usd_per_h=PLAN.cost_usd_per_h - 0.5), "not $")


def test_verify_reports_a_plan_over_budget() -> None:
    poor = replace(PROBLEM, budget_usd_per_h=PLAN.cost_usd_per_h / 2)
    assert any("budget" in item for item in verify(poor, PLAN))


def test_verify_reports_utilization_above_headroom() -> None:
    fewer = [deployment for deployment in PLAN.deployments if deployment.count > 1]
    assert fewer, "the case needs a template with several copies"
    cut = tuple(replace(each, count=1) if each == fewer[0] else each for each in PLAN.deployments)
    assert_violation(replace(PLAN, deployments=cut), "the headroom allows")


def test_verify_reports_unserved_demand() -> None:
    assert_violation(replace(PLAN, flows=PLAN.flows[1:]), "served")


def test_verify_reports_flows_beyond_prefill_capacity() -> None:
    more = replace(PLAN.flows[0], rate_per_s=PLAN.flows[0].rate_per_s * 3)
    assert_violation(replace(PLAN, flows=(more, *PLAN.flows[1:])), "prefill")


def test_verify_reports_flows_over_a_thin_or_missing_link() -> None:
    crossing = [flow for flow in PLAN.flows if flow.prefill_region != flow.decode_region]
    assert crossing, "the case needs flows between the regions"
    thin = replace(PROBLEM, links=tuple(replace(link, gbps=1e-6) for link in LINKS))
    assert any("Gbps" in item for item in verify(thin, PLAN))
    assert any("no link" in item for item in verify(replace(PROBLEM, links=()), PLAN))


@pytest.mark.parametrize("name", ["prefill_per_s", "decode_per_s", "closed_per_s"])
def test_verify_reports_a_template_with_too_much_capacity(name: str) -> None:
    first_template = PLAN.templates[0]
    wild = tuple(replace(item, **{name: 1e6}) for item in first_template.capacity)
    assert_violation(
        replace(PLAN, templates=(replace(first_template, capacity=wild), *PLAN.templates[1:])), name
    )


def test_verify_reports_unknown_names() -> None:
    assert_violation(
        replace(PLAN, deployments=(*PLAN.deployments, Deployment(PLAN.templates[0].name, "mars", 1))), "mars"
    )
    ghost = PlannedShare(PLAN.templates[0].name, "mars", 0, "prefill", 1.0)
    assert_violation(replace(PLAN, shares=(*PLAN.shares, ghost)), "not deployed")


def test_verify_reports_a_model_that_does_not_fit_in_memory() -> None:
    """The same layout, but every weight four times as wide."""
    wide = replace(PROBLEM.demands[0], model=replace(PROBLEM.demands[0].model, weight_bits=64.0))
    assert any("does not fit" in item for item in verify(replace(PROBLEM, demands=(wide,)), PLAN))


def test_verify_reports_a_layout_of_another_model() -> None:
    other = a_problem(a_demand("chat", "Llama-3-70B"), offers=TWO, links=LINKS)
    assert any("layers" in item for item in verify(other, PLAN))


def test_verify_reports_an_empty_plan_as_unserved() -> None:
    nothing = Plan("none", (), (), (), (), (), (), 0.0, 0.0)
    assert any("served" in item for item in verify(PROBLEM, nothing))
