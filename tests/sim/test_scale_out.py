"""Scale-out beyond what a plan deploys, in simulation: copies of candidates start and are sent requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from potluck.catalog import models, nodes
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.replan.current_problem import with_candidates
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import workload
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate

LENGTHS = (1200, 60)
SLO = Slo(4.0, 0.1)
TRAFFIC = Traffic("m", 2.0, (LengthBin(*LENGTHS, 1.0),))
REGIONS = (Region("east", (NodeOffer("1xL4", 0.4, 3), NodeOffer("1xA10", 1.2, 6))),)
PROBLEM = PlanningProblem(
    (model_demand("m", models.model("Llama-3.1-8B"), SLO, TRAFFIC),),
    REGIONS,
    (nodes.node_type("1xL4"), nodes.node_type("1xA10")),
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    factory = TemplateFactory(PROBLEM)
    made = STRATEGIES["melange"](factory, SolveSettings(time_limit_s=5)).plan
    return with_candidates(factory, made)


def served(plan: Plan) -> SimResult:
    """From 120 s on three times the planned rate, for eight minutes."""
    when = np.concatenate([np.arange(0, 120, 0.5), np.arange(120, 600, 1 / 6)])
    load = workload("m", when, np.full(len(when), LENGTHS[0]), np.full(len(when), LENGTHS[1]))
    resolved = ResolvedPlan(
        plan,
        {"m": PROBLEM.asks[0].model},
        PROBLEM.by_name,
        REGIONS,
        slos={"m": SLO},
        mean_tokens={"m": (1200.0, 60.0)},
    )
    return simulate(resolved, load, Policy(scaling="cauchy", window_s=30.0))


def late(result: SimResult) -> int:
    """Of those who came in the last three minutes, how many were not served in time."""
    records = result.records
    came = records.arrival_s > 420
    in_time = records.first_token_s - records.arrival_s <= SLO.ttft_s
    return int((came & ~in_time).sum())


def test_more_is_started_of_what_there_is_and_serves(plan: Plan) -> None:
    own = {each.name for each in plan.templates}
    assert own == {"m: mixed 1xL4 tp1"}, "the cheap ones, of which there are few"
    alone, offered = served(replace(plan, candidates=())), served(plan)
    assert {each.template for each in alone.replicas} == own
    begun = {each.template for each in offered.replicas} - own
    assert begun
    assert all(each.busy_s > 0 for each in offered.replicas if each.template in begun)
    assert late(alone) > 400
    assert late(offered) < 120, "a tenth may be late: the rule leaves a fifth more than is planned for alone"
