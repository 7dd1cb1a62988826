"""What is planned over thin network cards runs: nothing waits for the network longer than the objective allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from potluck.catalog import models, nodes
from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.simulating.simulation import SimulationInputs, scene_of
from potluck.core.values.plan import Plan
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.assemble.columns import codecs_of
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.timing.network_cards import wire_bits
from potluck.plan.verify import verify
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import of_traffic
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate

SLO = Slo(4.0, 0.06)
TRAFFIC = Traffic("chat", 8.0, (LengthBin(900, 120, 0.7), LengthBin(2500, 120, 0.3)))
EXAMPLES = Path(__file__).parents[2] / "examples"


def a_problem(gbps: float, rate_per_s: float = 8.0) -> PlanningProblem:
    types = tuple(replace(nodes.node_type(name), network_gbps=gbps) for name in ("1xL40S", "1xA10G"))
    offers = tuple(NodeOffer(t.name, usd, 24) for t, usd in zip(types, (1.86, 1.0), strict=True))
    traffic = replace(TRAFFIC, rate_per_s=rate_per_s)
    asked = model_demand("chat", models.model("Llama-3.1-8B"), SLO, traffic)
    return PlanningProblem((asked,), (Region("here", offers),), types, codecs=CODECS)


def scene(problem: PlanningProblem, plan: Plan) -> ResolvedPlan:
    return ResolvedPlan(
        plan,
        {each.name: each.model for each in problem.asks},
        problem.by_name,
        problem.regions,
        problem.links,
        {each.name: each.slo for each in problem.asks},
        {"chat": (TRAFFIC.mean_input_tokens, TRAFFIC.mean_output_tokens)},
    )


@pytest.mark.parametrize("strategy", ["prfaas", "cauchy"])
@pytest.mark.parametrize("gbps", [10.0, 2.0, 1.0])
def test_smooth_arrivals_at_the_planned_rate_keep_the_promise(strategy: str, gbps: float) -> None:
    problem = a_problem(gbps)
    plan = STRATEGIES[strategy](TemplateFactory(problem), SolveSettings(time_limit_s=10)).plan
    assert plan.fraction == 1.0
    assert verify(problem, plan) == ()
    result = simulate(scene(problem, plan), of_traffic([TRAFFIC], 1200, seed=5, cv=0.3))
    total = summarise(result).total
    chat = summarise(result).models[0]
    assert chat.attainment is not None
    assert chat.attainment >= SLO.attainment
    assert total.outcomes.answered >= 0.97 * 1200
    for link in result.links:
        if link.kind == "card":
            assert link.busy_s <= 0.85 * result.end_s


def test_what_the_cards_cannot_carry_is_not_planned() -> None:
    """With cards of 1 Gbps and KV as it is, 60 requests a second need 70 Gbps."""
    problem = replace(a_problem(1.0, rate_per_s=60.0), codecs=("fp16",))
    plan = STRATEGIES["prfaas"](TemplateFactory(problem), SolveSettings(time_limit_s=10)).plan
    assert verify(problem, plan) == ()
    bits = wire_bits(problem.asks[0], "fp16")
    sent = sum(float(bits[flow.bucket]) * flow.rate_per_s for flow in plan.flows)
    nodes_rented = sum(plan.nodes.values())
    assert sent <= 0.8 * 0.94e9 * nodes_rented / 2 * (1 + 1e-6)
    smaller = replace(problem, codecs=("fp16", "int8", "int4"))
    more = STRATEGIES["prfaas"](TemplateFactory(smaller), SolveSettings(time_limit_s=10)).plan
    assert more.fraction > plan.fraction
    assert codecs_of(more)["chat"] != "fp16"


def test_a_codec_is_used_only_where_it_saves_something() -> None:
    wide, thin = a_problem(100.0), a_problem(4.0)
    plans = [
        STRATEGIES["prfaas"](TemplateFactory(p), SolveSettings(time_limit_s=10)).plan for p in (wide, thin)
    ]
    assert codecs_of(plans[0])["chat"] == "fp16"
    exact = STRATEGIES["prfaas"](
        TemplateFactory(replace(thin, codecs=("fp16",))), SolveSettings(time_limit_s=10)
    ).plan
    if codecs_of(plans[1])["chat"] != "fp16":
        assert plans[1].cost_usd_per_h < exact.cost_usd_per_h
    assert plans[0].cost_usd_per_h <= plans[1].cost_usd_per_h <= exact.cost_usd_per_h


@pytest.mark.parametrize("strategy", ["homo", "cauchy"])
def test_the_two_regions_of_the_examples_keep_their_promise(strategy: str) -> None:
    spec = read_spec(EXAMPLES / "two-regions.yaml")
    problem = load_problem(spec, 0.8, None, (), 0.0)
    plan = STRATEGIES[strategy](TemplateFactory(problem), SolveSettings(time_limit_s=10)).plan
    traffic = [model.traffic for model in spec.models]
    result = simulate(
        scene_of(SimulationInputs(spec, problem, plan)), of_traffic(traffic, 600, seed=1), spec.policy
    )
    assert [model.holds for model in summarise(result).models] == [True, True]
