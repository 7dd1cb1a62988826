"""Comparison of a plan with its simulated run."""

from __future__ import annotations

from dataclasses import replace
from math import exp, isclose
from pathlib import Path

import numpy as np
import pytest
from sim_fleets import (
    FAST,
    MODEL,
    SLOW,
    closed_plan,
    decode_only,
    flow_plan,
    load,
    mixed,
    prefill_only,
    problem,
)

from potluck.catalog import models, nodes
from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.simulating.simulation import SimulationInputs, scene_of
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan, PlannedFlow, PlannedShare
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.assemble.columns import codecs_of
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.timing.network_cards import wire_bits
from potluck.plan.verify import verify
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import Workload, at_rate, of_traffic
from potluck.sim.results.metrics import summarise
from potluck.sim.results.plan_comparison import (
    BucketLengths,
    PlanDeviation,
    busy_span,
    compared,
    described,
    disagreements,
)
from potluck.sim.run import simulate
from potluck.sim.world.faults import parse_faults


def plan_with_rates(plan: Plan, **rates: float) -> Plan:
    """With these requests a second on the templates whose names end so."""
    shares = tuple(
        PlannedShare(t.name, "east", 0, "closed", rate)
        for end, rate in rates.items()
        for t in plan.templates
        if t.name.endswith(end)
    )
    return replace(plan, shares=shares)


def two_kinds() -> ResolvedPlan:
    plan = closed_plan((mixed(FAST), "east", 1), (mixed(SLOW), "east", 1))
    return replace(problem(plan_with_rates(plan, H100=9.0, L4=1.0)), slos={MODEL: Slo(2.0, 0.2)})


def deviations_of(
    resolved: ResolvedPlan, requests: Workload, ran: ResolvedPlan | None = None
) -> dict[str, list[PlanDeviation]]:
    result = simulate(ran or resolved, requests)
    outcome: dict[str, list[PlanDeviation]] = {}
    for item in compared(resolved, result):
        outcome.setdefault(item.what, []).append(item)
    return outcome


def test_run_that_follows_its_plan_agrees_in_every_comparison() -> None:
    resolved = problem(flow_plan((prefill_only(), "east", 1), (decode_only(), "west", 1)))
    result = deviations_of(resolved, load(2000, 10.0, prompt=(900, 1100), output=(80, 120)))
    assert set(result) == {"served", "attainment", "rate", "flow", "busy", "link"}
    wrong = disagreements(item for part in result.values() for item in part)
    assert not wrong, wrong
    (link,) = result["link"]
    assert link.name == "east -> west"
    assert link.ran > 1e9


def test_planned_replica_without_work_is_reported_as_broken() -> None:
    resolved = two_kinds()
    other = replace(resolved, plan=plan_with_rates(resolved.plan, H100=10.0))
    result = deviations_of(resolved, load(1000, 10.0), other)
    (idle,) = result["work"]
    assert idle.verdict == "broken"
    assert "L4" in idle.name
    assert described(idle) == (f"{idle.planned.low:.0f} requests", "none")
    assert disagreements(item for part in result.values() for item in part)[0] is idle


def test_link_bytes_beyond_the_plan_are_reported() -> None:
    ends = (prefill_only(), "east", 1), (decode_only(), "west", 1)
    result = deviations_of(
        problem(flow_plan(*ends, codec="int4")), load(500, 10.0), problem(flow_plan(*ends))
    )
    (link,) = result["link"]
    assert link.verdict == "differs"
    assert link.ran > 3 * link.planned.high


def test_planned_link_without_traffic_is_reported() -> None:
    ends = (prefill_only(), "east", 1), (decode_only(), "west", 1)
    result = deviations_of(
        problem(flow_plan(*ends)), load(500, 10.0), problem(closed_plan((mixed(), "east", 1)))
    )
    (link,) = result["link"]
    assert (link.ran, link.verdict) == (0.0, "differs")


def test_planned_flow_below_one_request_is_not_reported() -> None:
    """What a solver leaves of a flow asks for nothing that a run could show."""
    resolved = problem(closed_plan((mixed(), "east", 1)))
    left = PlannedFlow(MODEL, 0, "east", "west", 1e-5)
    told = replace(resolved, plan=replace(resolved.plan, flows=(left,)))
    (link,) = deviations_of(told, load(500, 10.0), resolved)["link"]
    assert (link.ran, link.verdict) == (0.0, "agrees")


def test_unserved_requests_and_missed_attainment_are_reported() -> None:
    resolved = replace(problem(closed_plan((mixed(SLOW), "east", 1))), slos={MODEL: Slo(1.0, 0.06)})
    result = deviations_of(resolved, load(1500, 10.0))
    assert [item.verdict for item in result["served"] + result["attainment"]] == ["differs", "differs"]


def test_fewer_requests_than_planned_are_no_disagreement() -> None:
    result = deviations_of(problem(closed_plan((mixed(), "east", 1))), load(400, 2.0))
    assert not disagreements(item for part in result.values() for item in part)
    assert result["rate"][0].planned.high < 3.0


def test_run_with_fleet_changes_is_not_compared_with_its_plan() -> None:
    resolved = two_kinds()
    faults = parse_faults("faults: [{at_s: 20, kind: replica, replica: '*L4*'}]", "f")
    assert compared(resolved, simulate(resolved, load(400, 5.0), faults=faults)) == ()


@pytest.mark.parametrize("rate", [0.01, 0.2, 5.0])
def test_busy_share_lies_between_random_and_even_arrivals(rate: float) -> None:
    """With steps of one second whatever is in them, both bounds have closed forms."""

    class OneSecond:
        confidence = "measured"

        def step_s(self, batch):  # type: ignore[no-untyped-def]
            return batch.tokens * 0 + 1.0

    lengths = {0: BucketLengths(100.0, 5.0, 100.0)}
    span = busy_span(OneSecond(), 512, {0: [rate, 0.0]}, {0: [rate, 0.0]}, lengths, 0)  # type: ignore[arg-type]
    assert isclose(span.high, min(1.0, 6 * rate))
    assert isclose(span.low, 1 - (1 - min(1.0, rate)) * exp(-5 * rate))


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("kind", "number", "strategies"),
    # The last: prompts keep the one prefill replica busy although, coming in turn, each finds it free.
    [("pool", 1, ("thunderserve",)), ("pair", 0, ("melange", "cauchy")), ("pipeline", 4, ("cauchy-mc",))],
)
def test_random_specs_run_as_planned(
    kind: str, number: int, strategies: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import planned
    from parts import planned_specs

    path = tmp_path / f"{kind}.yaml"
    path.write_text(planned_specs.spec_text(kind, number), encoding="utf-8")
    runs = list(planned.tried(kind, path, strategies, 60.0))
    assert {item.strategy for item in runs} == set(strategies)
    for run in runs:
        wrong = [one for part in planned.PARTS.values() for one in run.wrong(part)]
        assert not wrong, (run.strategy, wrong)


def test_random_spec_is_the_same_for_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from parts import planned_specs

    for kind in planned_specs.KINDS:
        assert planned_specs.spec_text(kind, 3) == planned_specs.spec_text(kind, 3)
        assert planned_specs.spec_text(kind, 3) != planned_specs.spec_text(kind, 4)


SPEC = """
models:
  - model: Llama-3.1-8B
    slo: {ttft_ms: 2000, tpot_ms: 80}
    traffic: {rate_per_s: 6, input: {mean: 800, cv: 0.8}, output: {mean: 120, cv: 0.7}}
fleet:
  regions:
    - name: east
      nodes:
        - {node: 1xA100-80, available: 1}
        - {node: 1xL4, available: 3}
"""


def test_planned_network_load_is_served_in_simulation(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    spec = read_spec(path)
    problem = load_problem(spec, 0.8, None, (), 0.0)
    plan = STRATEGIES["coral"](TemplateFactory(problem), SolveSettings()).plan
    used = [plan.template(deployment.template) for deployment in plan.deployments]
    assert {replica.role for template in used for replica in template.replicas} == {"prefill", "decode"}
    resolved, slo = scene_of(SimulationInputs(spec, problem, plan)), spec.models[0].slo
    for rate_per_s, least_per_s in ((6.0, 0.99 * 6.0), (12.0, 9.0)):
        workload = at_rate(of_traffic([model.traffic for model in spec.models], 600, 11), rate_per_s)
        seen = simulate(resolved, workload, Policy()).records
        gaps = np.maximum(seen.output_tokens - 1, 1)
        soon = seen.first_token_s - seen.arrival_s <= slo.ttft_s
        good = soon & ((seen.finish_s - seen.first_token_s) / gaps <= slo.tpot_s)
        assert good.sum() / len(good) * rate_per_s >= least_per_s


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
        {demand.name: demand.model for demand in problem.demands},
        problem.by_name,
        problem.regions,
        problem.links,
        {demand.name: demand.slo for demand in problem.demands},
        {"chat": (TRAFFIC.mean_input_tokens, TRAFFIC.mean_output_tokens)},
    )


@pytest.mark.parametrize("strategy", ["prfaas", "cauchy"])
@pytest.mark.parametrize("gbps", [10.0, 2.0, 1.0])
def test_evenly_spaced_arrivals_at_the_planned_rate_attain_the_objective(strategy: str, gbps: float) -> None:
    problem = a_problem(gbps)
    plan = STRATEGIES[strategy](TemplateFactory(problem), SolveSettings(time_limit_s=10)).plan
    assert plan.fraction == 1.0
    assert verify(problem, plan) == ()
    result = simulate(scene(problem, plan), of_traffic([TRAFFIC], 1200, seed=5, cv=0.3))
    total_summary = summarise(result).total
    chat = summarise(result).models[0]
    assert chat.attainment is not None
    assert chat.attainment >= SLO.attainment
    assert total_summary.outcomes.answered >= 0.97 * 1200
    for link in result.links:
        if link.kind == "card":
            # 0.8 at most is planned, and whoever is done first gets more than its planned share. It was 0.85 while
            # codecs were reckoned 3 % too small: the same 0.85 in true bytes is 0.876.
            assert link.busy_s <= 0.87 * result.end_s


def test_plan_does_not_exceed_the_bandwidth_of_network_cards() -> None:
    """With cards of 1 Gbps and KV as it is, 60 requests a second need 70 Gbps."""
    problem = replace(a_problem(1.0, rate_per_s=60.0), codecs=("fp16",))
    plan = STRATEGIES["prfaas"](TemplateFactory(problem), SolveSettings(time_limit_s=10)).plan
    assert verify(problem, plan) == ()
    bits = wire_bits(problem.demands[0], "fp16")
    sent = sum(float(bits[flow.bucket]) * flow.rate_per_s for flow in plan.flows)
    assert sent <= 0.8 * 0.94e9 * sum(plan.nodes.values()) / 2 * (1 + 1e-6)
    smaller = replace(problem, codecs=("fp16", "int8", "int4"))
    more = STRATEGIES["prfaas"](TemplateFactory(smaller), SolveSettings(time_limit_s=10)).plan
    assert more.fraction > plan.fraction
    assert codecs_of(more)["chat"] != "fp16"


def test_lossy_codec_is_planned_only_where_it_lowers_the_cost() -> None:
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
def test_two_region_example_attains_its_objectives_in_simulation(strategy: str) -> None:
    spec = read_spec(EXAMPLES / "two-regions.yaml")
    problem = load_problem(spec, 0.8, None, (), 0.0)
    plan = STRATEGIES[strategy](TemplateFactory(problem), SolveSettings(time_limit_s=10)).plan
    traffic = [model.traffic for model in spec.models]
    result = simulate(
        scene_of(SimulationInputs(spec, problem, plan)), of_traffic(traffic, 600, seed=1), spec.policy
    )
    assert [model.holds for model in summarise(result).models] == [True, True]
