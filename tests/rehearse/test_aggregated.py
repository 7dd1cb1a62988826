"""Pipelines that do both phases keep in simulation what they promise in a plan."""

from __future__ import annotations

from potluck.catalog import models, nodes
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.strategies import SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import allocated
from potluck.plan.verify import verify
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import DEFAULT_ENGINE, ResolvedPlan
from potluck.sim.load.workload import of_traffic
from potluck.sim.results.metrics import summarise
from potluck.sim.results.plan_comparison import compared, disagreements
from potluck.sim.run import simulate

TRAFFIC = Traffic("big", 1.5, (LengthBin(800, 100, 1.0),))


def test_a_plan_of_such_pipelines_runs_as_planned() -> None:
    wanted = model_demand("big", models.model("LLaMA-30B"), Slo(3.0, 0.2), TRAFFIC)
    kind = nodes.node_type("2xRTX4090")
    problem = PlanningProblem((wanted,), (Region("here", (NodeOffer(kind.name, 1.0, 6),)),), (kind,))
    shop = TemplateFactory(problem)
    plan = allocated(
        shop, SolveSettings(time_limit_s=5.0), "aggregated", {"big": shop.aggregated(wanted)}
    ).plan
    assert plan.fraction == 1
    assert verify(problem, plan) == ()
    (template,) = {plan.template(each.template) for each in plan.deployments}
    assert template.replicas[0].role == "mixed"
    assert len(template.replicas[0].layout.stages) > 1
    world = ResolvedPlan(
        plan,
        {"big": wanted.model},
        problem.by_name,
        problem.regions,
        (),
        {"big": wanted.slo},
        {"big": (800.0, 100.0)},
    )
    replica_models = ReplicaModels(world)
    replica_models.learn(plan)
    engine = replica_models.replica_models[template.name, 0].engine
    assert engine.token_budget < DEFAULT_ENGINE.token_budget, "turns of the planned length"
    result = simulate(world, of_traffic([TRAFFIC], 300, 0, 0.1))
    (seen,) = summarise(result).models
    assert seen.attainment is not None
    assert seen.attainment >= wanted.slo.attainment
    assert not [each for each in disagreements(compared(world, result, "learned")) if each.what != "rate"]
