"""Planning a running service again: start costs, and templates reused for a market."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_problems import a_demand, a_problem

from potluck.core.errors import CapacityError
from potluck.core.values.plan import Template
from potluck.core.values.types import NodeOffer, Region
from potluck.perf.startup import DEFAULT_COSTS
from potluck.plan.current_problem import TemplateFactories, problem_now, start_share
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory

PROBLEM = a_problem(a_demand(), a_demand("more", rate_per_s=2.0), offers={"east": {"1xL40S": (1.86, 8)}})


def at_price(usd_per_h: float, available: int = 8) -> tuple[Region, ...]:
    (region,) = PROBLEM.regions
    return (Region(region.name, (NodeOffer(region.offers[0].node, usd_per_h, available),)),)


def test_init_penalty_is_startup_time_over_planning_interval() -> None:
    fixed_s = DEFAULT_COSTS.provision_s + DEFAULT_COSTS.container_s + DEFAULT_COSTS.engine_init_s
    loading_s = 16.06e9 / (DEFAULT_COSTS.load_gb_per_s * 1e9)  # Llama-3.1-8B in two bytes a weight
    assert start_share(PROBLEM, 360.0) == pytest.approx((fixed_s + loading_s) / 360.0, rel=1e-3)
    now = problem_now(PROBLEM, {"chat": 10.0}, regions=at_price(3.0), interval_s=720.0)
    assert now.init_penalty == pytest.approx(start_share(PROBLEM, 360.0) / 2)
    assert [demand.rate_per_s for demand in now.demands] == [pytest.approx(10.0), pytest.approx(2.0)]
    assert now.regions[0].offers[0].price_usd_per_h == 3.0
    with pytest.raises(CapacityError, match="no region has any node"):
        problem_now(PROBLEM, {}, regions=at_price(3.0, 0))


def same_templates(some: list[Template], others: list[Template]) -> bool:
    return bool(some) and all(
        template is other_template for template, other_template in zip(some, others, strict=True)
    )


def test_templates_are_reused_for_the_same_market_and_rebuilt_for_other_prices() -> None:
    shops = TemplateFactories()
    made = shops.at(PROBLEM).homogeneous(PROBLEM.demands[0])
    busier = problem_now(PROBLEM, {"chat": 9.0}, regions=at_price(1.86, 3))
    again = shops.at(busier)
    assert again.problem is busier
    assert same_templates(again.homogeneous(busier.demands[0]), made)
    assert not same_templates(
        shops.at(replace(PROBLEM, regions=at_price(9.0))).homogeneous(PROBLEM.demands[0]), made
    )
    assert same_templates(shops.at(PROBLEM).homogeneous(PROBLEM.demands[0]), made), "prices that come back"


def test_start_costs_are_separate_from_rent_and_predicted_goodput_is_in_tokens() -> None:
    shop = TemplateFactory(PROBLEM)
    first = STRATEGIES["melange"](shop, SolveSettings(10.0)).plan
    assert first.start_usd_per_h == 0.0, "K is 0"
    for prediction, asked in zip(first.predictions, PROBLEM.demands, strict=True):
        prompts = sum(bucket.rate_per_s * bucket.input_tokens for bucket in asked.buckets)
        answers = sum(bucket.rate_per_s * bucket.output_tokens for bucket in asked.buckets)
        assert prediction.prompt_tokens_per_s == pytest.approx(prompts)
        assert prediction.answer_tokens_per_s == pytest.approx(answers)
    busier = problem_now(PROBLEM, {"chat": 12.0})
    grown = STRATEGIES["melange"](replace(shop, problem=busier), SolveSettings(10.0, running=first)).plan
    nodes, before = sum(grown.nodes.values()), sum(first.nodes.values())
    assert nodes > before
    assert grown.cost_usd_per_h == pytest.approx(1.86 * nodes)
    assert grown.start_usd_per_h == pytest.approx(busier.init_penalty * 1.86 * (nodes - before))
