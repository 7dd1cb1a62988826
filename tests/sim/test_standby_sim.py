"""A load jump with and without a copy on standby: a start-up's time of late answers, for one more copy's rent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_groups import LENGTHS, PROBLEM, SLO

from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import NodeOffer, Region
from potluck.perf.startup import StartupCosts
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import workload
from potluck.sim.results.plan_comparison import compared
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate

JUMP_S, END_S = 120.0, 420.0


def region_of(nodes: int) -> tuple[Region, ...]:
    return (Region("east", (NodeOffer("1xL4", 0.4, nodes),)),)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return STRATEGIES["melange"](TemplateFactory(PROBLEM), SolveSettings(time_limit_s=5)).plan


def scene_of(plan: Plan) -> ResolvedPlan:
    """Where a start takes 90 s: 70 s, and 16 GB of weights at 0.8 GB/s."""
    costs = StartupCosts(provision_s=40.0, container_s=15.0, engine_init_s=15.0, load_gb_per_s=0.803)
    return ResolvedPlan(
        plan,
        {"m": PROBLEM.asks[0].model},
        PROBLEM.by_name,
        region_of(8),
        slos={"m": SLO},
        mean_tokens={"m": (1200.0, 60.0)},
        startup=costs,
    )


def served(plan: Plan, standby: int, factor: float) -> SimResult:
    rate = 2.0
    when = np.concatenate([np.arange(0, JUMP_S, 1 / rate), np.arange(JUMP_S, END_S, 1 / (factor * rate))])
    load = workload("m", when, np.full(len(when), LENGTHS[0]), np.full(len(when), LENGTHS[1]))
    policy = Policy(scaling="cauchy", window_s=30.0, standby=standby)
    return simulate(scene_of(plan), load, policy)


def kept(result: SimResult) -> float:
    """Of those that came from the jump on, how many got their first token in time."""
    records = result.records
    received = records.arrival_s >= JUMP_S
    return float(
        (received & (records.first_token_s - records.arrival_s <= SLO.ttft_s)).sum() / received.sum()
    )


def states(result: SimResult) -> list[list[tuple[float, str]]]:
    return [[(at_s, state) for at_s, state, _ in replica.changes] for replica in result.replicas]


def test_a_copy_on_standby_serves_a_jump_a_start_up_sooner_for_its_rent(plan: Plan) -> None:
    none, one = served(plan, 0, 2.0), served(plan, 1, 2.0)
    began_s, ready_s = (at_s for at_s, _ in states(none)[3])
    assert ready_s - began_s == pytest.approx(90.0, abs=0.1)
    assert states(one)[3] == [(0.0, "starting"), (0.0, "standby"), (began_s, "ready")]
    assert states(one)[5][0] == (began_s, "starting"), "its place is filled again"
    assert states(one)[5][1][1] == "standby"
    assert kept(one) > kept(none) + 0.05
    rent = one.cost_usd - none.cost_usd
    assert rent == pytest.approx(0.4 * one.end_s / 3600, rel=0.02), "one more copy, all the time"
    first = one.records.first_token_s[one.records.prefill_replica == 3]
    assert len(first) > 50
    assert first.min() > began_s


def test_what_is_too_much_after_a_peak_goes_back_on_standby(plan: Plan) -> None:
    when = np.concatenate([np.arange(0, 60, 0.5), np.arange(60, 180, 0.25), np.arange(180, 400, 1.0)])
    load = workload("m", when, np.full(len(when), LENGTHS[0]), np.full(len(when), LENGTHS[1]))
    policy = Policy(scaling="cauchy", window_s=30.0, standby=1)
    result = simulate(replace(scene_of(plan), regions=region_of(4)), load, policy)
    assert len(result.replicas) == 4, "there is no node for another"
    changes = sorted(change for item in states(result) for change in item)
    assert [state for at_s, state in changes if 0 < at_s < 180] == ["ready"]
    fell = [state for at_s, state in changes if at_s > 180]
    assert fell[0] == "standby", "the first that is too much is not drained"
    assert fell.count("standby") == 1


def test_a_plan_is_not_blamed_for_what_stood_by(plan: Plan) -> None:
    result = served(plan, 1, 1.0)
    (idle,) = [replica for replica in result.replicas if replica.stood_by]
    assert idle.busy_s == 0.0
    outcome = compared(scene_of(plan), result)
    assert {item.what for item in outcome} >= {"served", "attainment", "busy"}
    assert {item.verdict for item in outcome} == {"agrees"}
