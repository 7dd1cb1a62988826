"""Expert parallelism as a layout: columns of the program, plan files, the simulator."""

from __future__ import annotations

import json

import pytest
from plan_problems import a_demand, a_problem

from potluck.core.values.layout import StageNode
from potluck.core.values.plan import Plan, plan_from_json, plan_to_json
from potluck.core.values.types import LengthBin, Slo, Traffic
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import of_traffic
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings as Running

LENGTHS = ((1500.0, 300.0, 1.0),)
ASK = a_demand("deep", "DeepSeek-V3", 20.0, Slo(2.0, 0.08), lengths=LENGTHS)
PROBLEM = a_problem(ASK, offers={"here": {"8xH200": (40.0, 8)}})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return STRATEGIES["prfaas"](TemplateFactory(PROBLEM), SolveSettings(time_limit_s=20.0)).plan


def expert_parallel_ways(plan: Plan) -> set[str]:
    return {r.layout.stages[0].nodes[0].ep for t in plan.templates for r in t.replicas}


def test_mixture_of_experts_has_expert_parallel_layouts_and_a_dense_model_has_none() -> None:
    made = TemplateFactory(PROBLEM).homogeneous(ASK)
    assert any(" dp8 ep8" in template.name for template in made)
    assert len({template.name for template in made}) == len(made)
    dense = a_problem(a_demand(), offers={"here": {"2xL4": (1.6, 8)}})
    assert all(how_one == "none" for how_one in ways_of_problem(dense))


def ways_of_problem(problem: object) -> list[str]:
    shop = TemplateFactory(problem)  # type: ignore[arg-type]
    made = shop.homogeneous(shop.problem.demands[0])
    return [r.layout.stages[0].nodes[0].ep for t in made for r in t.replicas]


def test_plan_with_expert_parallelism_is_sound_and_survives_its_file(plan: Plan) -> None:
    assert expert_parallel_ways(plan) - {"none"}, "it pays here"
    assert verify(PROBLEM, plan) == ()
    assert plan_from_json(plan_to_json(plan)) == plan
    old = json.loads(plan_to_json(plan))
    text = json.dumps(old).replace('"ep": "dp"', '"ep": "none"').replace('"ep": "tp"', '"ep": "none"')
    assert expert_parallel_ways(plan_from_json(text)) == {"none"}
    assert StageNode("1xL4", 1).ep == "none"


def test_simulated_tpot_of_an_expert_parallel_plan_is_near_its_prediction(plan: Plan) -> None:
    resolved = ResolvedPlan(
        plan, {"deep": ASK.model}, PROBLEM.by_name, PROBLEM.regions, (), {"deep": ASK.slo}
    )
    workload = of_traffic([Traffic("deep", 20.0, tuple(LengthBin(*length) for length in LENGTHS))], 600, 1)
    result = simulate(resolved, workload, settings=Running())
    assert (result.records.outcome == 1).all()
    tpot_s = (result.records.finish_s - result.records.first_token_s) / (workload.output_tokens - 1)
    assert 0.2 * plan.predictions[0].tpot_s < float(tpot_s.mean()) < 1.2 * plan.predictions[0].tpot_s
