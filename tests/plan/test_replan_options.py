"""Answers to node losses are sound and ordered by cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem

from potluck.core.values.plan import Plan
from potluck.core.values.types import Link, Slo
from potluck.plan.assemble.term_rows import rent_usd_per_h
from potluck.plan.problem import PlanningProblem, without_nodes
from potluck.plan.replan_options import at_once, best_answer, ladder, surviving_deployments
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify

OFFERS = {"east": {"1xH100": (3.0, 3), "1xL40S": (1.2, 4)}, "west": {"1xA10G": (0.6, 10), "1xL40S": (1.5, 4)}}
LINKS = (Link("east", "west", 40.0, 0.02), Link("west", "east", 40.0, 0.02))
PROBLEM = a_problem(a_demand(rate_per_s=40.0, slo=Slo(3.0, 0.08)), offers=OFFERS, links=LINKS)
AUTO = STRATEGIES["auto"]
QUICK = SolveSettings(time_limit_s=10.0)
RUNNING = AUTO(TemplateFactory(PROBLEM), QUICK).plan
SPREAD = STRATEGIES["coral"](TemplateFactory(PROBLEM), QUICK).plan


def test_spread_plan_serves_all_demand_on_at_least_three_nodes() -> None:
    assert RUNNING.fraction == SPREAD.fraction == 1
    assert sum(SPREAD.nodes.values()) >= 3


def problem_after_losses(problem: PlanningProblem, plan: Plan, shares: list[float]) -> PlanningProblem:
    """The problem after a share of each rented kind of node is gone, and the spare ones of it too."""
    for (region, node), count in plan.nodes.items():
        share = shares[hash((region, node)) % len(shares)]
        problem = without_nodes(problem, region, node, int(count * (1 - share)))
    return problem


@pytest.mark.slow
@settings(max_examples=3)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.booleans())
def test_replan_answers_to_random_node_losses_are_sound_and_ordered(
    shares: list[float], spread: bool
) -> None:
    running_plan = SPREAD if spread else RUNNING
    now = problem_after_losses(PROBLEM, running_plan, shares)
    answers = ladder(now, running_plan, AUTO, QUICK)
    assert [replan_option.step for replan_option in answers] == ["reroute", "flip", "reallocate"]
    for replan_option in answers:
        assert verify(now, replan_option.plan) == (), replan_option.step
    reroute, flip, reallocate = answers
    assert flip.served_fraction >= reroute.served_fraction - 1e-6
    assert reallocate.served_fraction >= reroute.served_fraction - 1e-6
    assert reroute.starts == reroute.stops == reroute.flips == 0
    assert flip.starts == 0
    assert reallocate.time_s > 0 or reallocate.starts == 0


def test_replan_without_a_change_keeps_the_plan_by_rerouting() -> None:
    answers = ladder(PROBLEM, RUNNING, AUTO, QUICK)
    assert best_answer(answers).step == "reroute"
    assert best_answer(answers).served_fraction == 1
    assert answers[0].plan.cost_usd_per_h == pytest.approx(RUNNING.cost_usd_per_h)


def test_reallocation_serves_when_the_last_replica_is_lost() -> None:
    one = a_problem(a_demand(rate_per_s=1.0), offers={"home": {"1xL40S": (1.2, 1), "1xA10G": (0.6, 1)}})
    running_plan = STRATEGIES["melange"](TemplateFactory(one), QUICK).plan
    used = next(iter(running_plan.nodes))[1]
    spare = "1xA10G" if used == "1xL40S" else "1xL40S"
    gone = without_nodes(without_nodes(one, "home", used, 0), "home", spare, 1)
    reroute, flip, reallocate = ladder(gone, running_plan, AUTO, QUICK)
    assert reroute.served_fraction == flip.served_fraction == 0
    assert reallocate.served_fraction > 0
    assert reallocate.starts == 1
    assert reallocate.start_cost_usd > 0
    assert best_answer((reroute, flip, reallocate)).step == "reallocate"


def test_role_flip_serves_more_when_traffic_shifts_to_long_prompts() -> None:
    """From long outputs to long prompts: decode replicas become prefill ones, without a node more."""
    slo = Slo(6.0, 0.08)
    writing = a_demand(rate_per_s=14.0, lengths=((200, 800, 1.0),), slo=slo)
    coding = a_demand(rate_per_s=9.0, lengths=((6000, 40, 1.0),), slo=slo)
    factory = TemplateFactory(a_problem(writing, offers={"home": {"1xH100": (3.0, 8)}}))
    running_plan = STRATEGIES["coral"](factory, QUICK).plan
    now = a_problem(coding, offers={"home": {"1xH100": (3.0, sum(running_plan.nodes.values()))}})
    reroute, flip, _ = ladder(now, running_plan, AUTO, QUICK)
    assert flip.served_fraction > reroute.served_fraction
    assert flip.flips >= 1
    assert flip.plan.nodes == running_plan.nodes or sum(flip.plan.nodes.values()) <= sum(
        running_plan.nodes.values()
    )


def test_survivors_fit_the_remaining_nodes() -> None:
    for (region, node), count in SPREAD.nodes.items():
        left = surviving_deployments(without_nodes(PROBLEM, region, node, count - 1), SPREAD)
        assert replace(SPREAD, deployments=left).nodes.get((region, node), 0) <= count - 1
        assert sum(d.count for d in left) >= sum(d.count for d in SPREAD.deployments) - count


def test_replan_answers_do_not_charge_for_reserved_nodes() -> None:
    east, west = PROBLEM.regions
    offers = tuple(replace(offer, reserved=offer.available) for offer in east.offers)
    paid = replace(PROBLEM, regions=(replace(east, offers=offers), west))
    running_plan = STRATEGIES["melange"](TemplateFactory(paid), QUICK).plan
    for replan_option in at_once(paid, running_plan, QUICK):
        assert verify(paid, replan_option.plan) == (), replan_option.step
        assert replan_option.cost_usd_per_h == rent_usd_per_h(paid, replan_option.plan.nodes), (
            replan_option.step
        )
