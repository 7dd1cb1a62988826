"""Plans for a running service at current rates, lengths, prices and nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from potluck.catalog import models, nodes
from potluck.control.control_values import PlanRequest
from potluck.control.replanner import PlanEvidence, Replanner
from potluck.core.errors import CapacityError
from potluck.core.state.actions import SeenLengths
from potluck.core.state.facts import ObservedSpeed, spoken
from potluck.core.values.layout import single
from potluck.core.values.plan import Deployment, Plan, Rehearsed, Tried
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.perf.step_timer import steps
from potluck.perf.timers.profile import ProfileTimer
from potluck.plan.current_problem import drifted, observed, profile_of
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, PlanOutcome, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import Planner
from potluck.plan.timing.replica_rates import layout_timer

L4, A10 = nodes.node_type("1xL4"), nodes.node_type("1xA10")
TRAFFIC = Traffic("m", 6.0, (LengthBin(1200.0, 40.0, 1.0),))
ASK = model_demand("m", models.model("Llama-3.1-8B"), Slo(4.0, 0.25), TRAFFIC)


def regions(l4: int, a10: int, a10_usd: float = 3.0) -> tuple[Region, ...]:
    return (Region("east", (NodeOffer("1xL4", 0.6, l4), NodeOffer("1xA10", a10_usd, a10))),)


PROBLEM = PlanningProblem((ASK,), regions(6, 2), (L4, A10))


@pytest.fixture(scope="module")
def running_plan() -> Plan:
    return STRATEGIES["melange"](TemplateFactory(PROBLEM), SolveSettings(time_limit_s=20.0)).plan


@pytest.fixture(scope="module")
def planner() -> Replanner:
    return Replanner(PROBLEM, 10.0)


def copies(plan: Plan | None, node: str) -> int:
    assert plan is not None
    return sum(deployment.count for deployment in plan.deployments if node in deployment.template)


def test_remaining_nodes_are_rerouted_first_and_then_replanned(
    running_plan: Plan, planner: Replanner
) -> None:
    there = copies(running_plan, "L4")
    plan_request = PlanRequest({"m": 6.0}, "a node died", regions=regions(there - 1, 2), running=running_plan)
    first = planner.first(plan_request)
    assert copies(first.plan, "L4") == there - 1
    assert copies(first.plan, "A10") == 0
    assert first.plan is not None
    assert first.plan.fraction < 1
    assert sum(share.rate_per_s for share in first.plan.shares) > 0
    gone = replace(running_plan, deployments=(replace(running_plan.deployments[0], count=there - 1),))
    seen = planner.first(replace(plan_request, running=gone, planned=running_plan))
    assert seen.plan == first.plan, "also where the copy was seen to be gone before its machine"
    full = planner.full(replace(plan_request, running=first.plan))
    assert full.plan is not None
    assert full.plan.fraction == pytest.approx(1)
    assert copies(full.plan, "A10") > 0


def test_replanner_changes_nothing_at_once_when_all_nodes_are_there(
    running_plan: Plan, planner: Replanner
) -> None:
    assert planner.first(PlanRequest({"m": 6.0}, "prices", running=running_plan)).plan is None
    assert planner.full(PlanRequest({"m": 6.0}, "prices", running=running_plan)).plan is None


def test_replanner_uses_a_cheaper_gpu_only_if_it_saves_more_than_a_start(
    running_plan: Plan, planner: Replanner
) -> None:
    cheap = planner.full(PlanRequest({"m": 6.0}, "prices", regions=regions(6, 4, 0.3), running=running_plan))
    assert "saves" in cheap.why
    assert copies(cheap.plan, "A10") > 0
    per_a10 = running_plan.cost_usd_per_h / 2
    same = planner.full(
        PlanRequest({"m": 6.0}, "prices", regions=regions(6, 4, per_a10 * 0.99), running=running_plan)
    )
    assert same.plan is None


def replanner_with_judge(holding: Callable[[Plan], bool], at: tuple[Region, ...]) -> Replanner:
    """With a simulator that says who holds; its search finds the plan for some regions, with that verdict."""

    def tried(planner: Planner) -> Planner:
        def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
            there = replace(factory.problem, regions=at)
            outcome = planner(TemplateFactory(there), replace(settings, running=None))
            seen = 1.0 if holding(outcome.plan) else 0.5
            mark = Rehearsed("", (Tried("m", 0.9, seen, seen, 1.0, 1000, 4, True),))
            return replace(outcome, plan=replace(outcome.plan, rehearsed=mark))

        return planned

    return Replanner(PROBLEM, 10.0, evidence=PlanEvidence(tried, lambda problem, plan: holding(plan)))


def test_replanner_compares_plans_by_simulated_attainment(running_plan: Plan) -> None:
    """What runs stays where only it holds, however cheap the other is, and goes where only the other does."""
    cheap, dear = regions(6, 4, 0.3), regions(0, 12, 2.0)
    plan_request = PlanRequest({"m": 6.0}, "prices", regions=cheap, running=running_plan)
    kept = replanner_with_judge(lambda plan: copies(plan, "A10") == 0, cheap).full(plan_request)
    assert (kept.plan, kept.why) == (None, "no other plan holds in simulation")
    plan_request = replace(plan_request, regions=regions(6, 12, 2.0))
    taken = replanner_with_judge(lambda plan: copies(plan, "A10") > 0, dear).full(plan_request)
    assert taken.why == "this plan holds in simulation, what runs would not"
    assert taken.plan is not None
    assert taken.plan.cost_usd_per_h > running_plan.cost_usd_per_h


def test_replanner_plans_for_observed_rates_and_lengths(running_plan: Plan, planner: Replanner) -> None:
    more = planner.full(PlanRequest({"m": 9.0}, "more", running=running_plan))
    assert copies(more.plan, "L4") + copies(more.plan, "A10") > copies(running_plan, "L4")
    seen = SeenLengths("m", 12.0, ((300.0, 60.0),))
    assert drifted(ASK, seen)
    assert not drifted(ASK, SeenLengths("m", 42.0, ((1150.0, 60.0),)))
    short = planner.full(PlanRequest({"m": 6.0}, "shorter", (seen,), running=running_plan))
    assert short.plan is not None
    assert short.plan.cost_usd_per_h < running_plan.cost_usd_per_h


def test_replanner_keeps_running_layouts_when_only_roles_change(planner: Replanner) -> None:
    """A plan for long answers, asked for long prompts: what comes back keeps to the layouts that are there."""
    talk = Traffic("m", 6.0, (LengthBin(300.0, 120.0, 1.0),))
    problem = replace(PROBLEM, demands=(model_demand("m", ASK.model, ASK.slo, talk),), regions=regions(5, 0))
    plan = STRATEGIES["prfaas"](TemplateFactory(problem), SolveSettings(time_limit_s=10.0)).plan
    counts = {
        deployment.template: 1 if "prefill" in deployment.template else 4 for deployment in plan.deployments
    }
    plan = replace(plan, deployments=tuple(Deployment(name, "east", n) for name, n in counts.items()))
    seen = SeenLengths("m", 12.0, ((1200.0, 60.0),))
    reply = Replanner(problem, 10.0).full(PlanRequest({"m": 6.0}, "shift", (seen,), running=plan))
    assert reply.plan is not None
    assert sum(deployment.count for deployment in reply.plan.deployments) <= 5


def test_replanner_without_any_node_is_refused(planner: Replanner) -> None:
    with pytest.raises(CapacityError, match="no region has any node"):
        planner.full(PlanRequest({"m": 1.0}, "all gone", regions=regions(0, 0)))


def test_replanner_plans_a_slow_node_type_at_its_observed_speed(
    running_plan: Plan, planner: Replanner
) -> None:
    assert copies(running_plan, "A10") == 0
    plan_request = PlanRequest({"m": 6.0}, "as usual", running=running_plan)
    assert planner.full(plan_request).plan is None, "at the speed of its facts it is the best there is"
    reply = planner.full(replace(plan_request, paces=(ObservedSpeed("m", "1xL4", 1, 2.0),)))
    assert reply.plan is not None
    assert copies(reply.plan, "A10") > 0, "twice the L4s are not there"
    assert "instead of" in reply.why
    assert planner.full(replace(plan_request, paces=(ObservedSpeed("m", "1xL4", 1, 1.05),))).plan is None, (
        "near enough"
    )
    assert planner.full(replace(plan_request, paces=(ObservedSpeed("other", "1xL4", 1, 2.0),))).plan is None
    assert planner.full(replace(plan_request, paces=(ObservedSpeed("m", "1xH100", 1, 2.0),))).plan is None, (
        "no such node"
    )


def test_observed_profile_is_the_predicted_times_the_observed_pace() -> None:
    layout = single("1xL4", 1, len(ASK.model.layers))
    batch = steps(
        [300.0, 900.0, 1800.0, 0.0, 0.0, 700.0],
        [0.0, 0.0, 500.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 8.0, 40.0, 30.0],
        [0.0, 0.0, 0.0, 8000.0, 40.0 * 700, 30.0 * 900],
    )
    facts = layout_timer(ASK, layout, PROBLEM.by_name).step_s(batch)
    for pace, believed in ((2.0, 2.0), (0.6, 0.6), (50.0, 4.0), (0.01, 0.5)):
        profile = profile_of(PROBLEM, ASK, ObservedSpeed("m", "1xL4", 1, pace), "2031-01-31")
        assert ProfileTimer(profile).step_s(batch) / facts == pytest.approx(believed, rel=0.08)
    slow = observed(PROBLEM, (ObservedSpeed("m", "1xL4", 1, 2.0),), "2031-01-31")
    assert layout_timer(slow.demands[0], layout, PROBLEM.by_name).step_s(batch) / facts == pytest.approx(
        2, rel=0.08
    )
    assert observed(PROBLEM, (ObservedSpeed("m", "1xL4", 1, 0.95),), "2031-01-31") == PROBLEM
    assert spoken((ObservedSpeed("m", "1xL4", 1, 1.349), ObservedSpeed("m", "1xA10", 1, 1.0))) == (
        "plans with 1xL4 at 1.35 of its facts for m"
    )
