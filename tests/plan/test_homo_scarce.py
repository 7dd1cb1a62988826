"""CORAL's homogeneous baseline: the cheapest node type first, the next when nodes run out."""

from __future__ import annotations

from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem

from potluck.core.values.types import Slo
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify

BRIEF = SolveSettings(time_limit_s=10)


def used_types(available: int, rate_per_s: float) -> tuple[set[str], float]:
    """Node types of the plan, and the fraction it serves, with so many of the best type."""
    item = a_demand(rate_per_s=rate_per_s)
    problem = a_problem(item, offers={"east": {"1xL40S": (0.5, available), "1xA10G": (1.0, 40)}})
    plan = STRATEGIES["homo"](TemplateFactory(problem), BRIEF).plan
    assert verify(problem, plan) == ()
    return {node for _, node in plan.nodes}, plan.fraction


def test_homo_uses_one_node_type_when_its_supply_suffices() -> None:
    assert used_types(40, 30.0) == ({"1xL40S"}, 1.0)


def test_homo_adds_the_next_node_type_when_the_best_runs_out() -> None:
    assert used_types(3, 30.0) == ({"1xL40S", "1xA10G"}, 1.0)


def naive_usd_per_h(problem: PlanningProblem) -> float:
    """The least rent of whole nodes of one type that each serve their part of all lengths alone."""
    factory, (model_demand,) = TemplateFactory(problem), problem.demands
    rents = []
    for template in factory.mixed(model_demand):
        rates = [capacity.closed_per_s for capacity in template.capacity]
        if all(rates):
            busy = sum(
                bucket.rate_per_s / rate for bucket, rate in zip(model_demand.buckets, rates, strict=True)
            )
            whole = ceil(busy / problem.headroom - 1e-9)
            rents.append(whole * factory.prices[template.nodes[0].node])
    return min(rents)


@settings(max_examples=12, deadline=None)
@given(st.floats(0.05, 20.0), st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_homo_never_costs_more_than_the_cheapest_single_type_for_small_demand(
    rate_per_s: float, small: float, large: float
) -> None:
    """Whole nodes are paid for: what a large one could do more for its price is nothing to who asks for little."""
    prices = {"1xL40S": 1.86 * small, "8xH100": 40.0 * large, "1xA10G": 1.0, "4xL4": 3.0 * small}
    offers = {"east": {name: (price, 60) for name, price in prices.items()}}
    problem = a_problem(a_demand(rate_per_s=rate_per_s), offers=offers)
    plan = STRATEGIES["homo"](TemplateFactory(problem), BRIEF).plan
    assert verify(problem, plan) == ()
    assert plan.cost_usd_per_h <= naive_usd_per_h(problem) * (1 + 1e-6)


def test_homo_cost_grows_at_most_in_proportion_to_demand() -> None:
    """Long prompts with short answers: computed apart, prompts alone look cheap, and answers are not."""
    costs = []
    for rate_per_s in (20.0, 200.0):
        lengths = tuple((6000.0 * k, 10.0, 0.25) for k in (0.6, 0.9, 1.1, 1.4))
        ask = a_demand("long", "Phi-4", rate_per_s, Slo(1.207, 0.057), lengths)
        offers = {"east": {"1xH200": (4.55, 400), "2xH100": (7.31, 400), "1xH100": (4.44, 400)}}
        plan = STRATEGIES["homo"](TemplateFactory(a_problem(ask, offers=offers)), BRIEF).plan
        costs.append(plan.cost_usd_per_h)
    assert costs[1] <= 10.0 * costs[0] * 1.01
