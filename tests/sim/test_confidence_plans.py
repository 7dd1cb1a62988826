"""Plans for a confidence in step times: their cost and attainment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.core.values.plan import Plan
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.perf.error_bars import slower
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import workload
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate
from potluck.sim.world.faults import Fault, Faults

LENGTHS = (900, 150)
SLO = Slo(1.0, 0.06, 0.95)
MODEL = models.model("Llama-3.1-8B")
OFFERS = {"1xL40S": 1.9, "1xA10": 1.2, "1xH100-SXM": 6.9}
REGIONS = (Region("east", tuple(NodeOffer(name, price, 40) for name, price in OFFERS.items())),)


def planned(sure: float, rate_per_s: float = 12.0, strategy: str = "melange") -> tuple[PlanningProblem, Plan]:
    asked = model_demand("m", MODEL, SLO, Traffic("m", rate_per_s, (LengthBin(*LENGTHS, 1.0),)))
    problem = PlanningProblem(
        (replace(asked, sure=sure),), REGIONS, tuple(map(nodes.node_type, OFFERS)), headroom=0.95
    )
    plan = STRATEGIES[strategy](TemplateFactory(problem), SolveSettings(time_limit_s=5)).plan
    assert verify(problem, plan) == ()
    return problem, plan


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([0.5, 0.7, 0.8, 0.9, 0.97]), st.sampled_from([0.5, 0.7, 0.8, 0.9, 0.97]))
def test_plan_for_a_higher_confidence_never_costs_less(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert planned(low)[1].cost_usd_per_h <= planned(high)[1].cost_usd_per_h * (1 + 1e-9)


def attained(problem: PlanningProblem, plan: Plan) -> float:
    """Of requests at the planned rate, where all steps take as long as nine in ten do at most."""
    when = np.arange(0, 60, 1 / 12.0)
    load = workload("m", when, np.full(len(when), LENGTHS[0]), np.full(len(when), LENGTHS[1]))
    resolved = ResolvedPlan(
        plan, {"m": MODEL}, problem.by_name, REGIONS, slos={"m": SLO}, mean_tokens={"m": (900.0, 150.0)}
    )
    gpus = {template.name: problem.by_name[template.nodes[0].node].gpu.name for template in plan.templates}
    factors = {t.name: slower(MODEL, 1, gpus[t.name], t.confidence, 0.9) for t in plan.templates}
    slow = [
        Fault(0.0, "slow", replica=item.id, factor=factors[item.template])
        for item in simulate(resolved, load).replicas
    ]
    return summarise(simulate(resolved, load, faults=Faults(tuple(slow)))).models[0].attainment or 0.0


def test_plan_for_slow_steps_attains_its_objective_where_steps_are_slow() -> None:
    usual, sure = planned(0.5), planned(0.9)
    assert usual[1].cost_usd_per_h < sure[1].cost_usd_per_h
    assert attained(*usual) < SLO.attainment <= attained(*sure)


def test_predicted_capacity_has_an_error_bar() -> None:
    (usual,), (sure,) = (planned(item)[1].predictions for item in (0.5, 0.9))
    assert usual.slowest_per_s < usual.capacity_per_s < usual.fastest_per_s
    assert sure.capacity_per_s == pytest.approx(sure.slowest_per_s, rel=1e-6), "it counts on the slow end"
