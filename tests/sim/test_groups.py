"""Groups of named machines in simulation run as planned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sim_brains import WrappedBrain, requests
from sim_fleets import SLOW, closed_plan, load, mixed, problem

from potluck.catalog import models, nodes
from potluck.core.state.actions import Action
from potluck.core.state.events import Event, MarketReported
from potluck.core.state.policy import Policy
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import (
    BucketCapacity,
    Deployment,
    LengthBucket,
    NodeCount,
    Plan,
    PlannedReplica,
    PlannedShare,
    Prediction,
    Template,
    TemplateFlow,
)
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.perf.timers.engine_host import DEFAULT_HOST
from potluck.perf.transfer import alpha_beta
from potluck.plan.current_problem import with_candidates
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import Workload, workload
from potluck.sim.results.metrics import judge, summarise
from potluck.sim.results.plan_comparison import compared, disagreements
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world.faults import Faults, PriceChange, SupplyChange, parse_faults
from potluck.sim.world.sim_fleet import PlanQuestion

LLAMA = models.model("Llama-3.1-8B")


NODE = nodes.canonical("2xA40")


LAYERS = LLAMA.layer_count


NAMES = ("a", "b", "c")


def group_problem(rate_per_s: float = 4.0, gbps: float = 20.0) -> ResolvedPlan:
    """A prefill pipeline over a and b; decoders on c and on what is left of a and b."""

    def on(*stages: tuple[str, int, int]) -> Layout:
        return Layout(tuple(Stage(layers, (StageNode(NODE, tp, name),)) for name, tp, layers in stages))

    replicas = (
        PlannedReplica("prefill", on(("a", 1, 20), ("b", 1, LAYERS - 20))),
        PlannedReplica("decode", on(("c", 2, LAYERS))),
        PlannedReplica("decode", on(("a", 1, LAYERS))),
        PlannedReplica("mixed", on(("b", 1, LAYERS))),
    )
    flows = (TemplateFlow(0, 0, 1, 0.5), TemplateFlow(0, 0, 2, 0.3), TemplateFlow(0, 3, 3, 0.2))
    capacity = (BucketCapacity(0, 0.0, 0.0, rate_per_s / 0.8, 0.5, 0.03),)
    made = Template(
        "chat: group", "group", "chat", (NodeCount(NODE, 3),), replicas, capacity, "measured", "int4", flows
    )
    plan = Plan(
        "test",
        (made,),
        (Deployment(made.name, "pool", 1),),
        (LengthBucket("chat", 0, 2000, rate_per_s),),
        (PlannedShare(made.name, "pool", 0, "closed", rate_per_s),),
        (),
        (Prediction("chat", rate_per_s, rate_per_s / 0.8, 0.5, 0.03, "measured"),),
        1.0,
        0.0,
    )
    links = {(a, b): (gbps if "c" in (a, b) else 2 * gbps, 1e-4) for a in NAMES for b in NAMES if a != b}
    regions = (Region("pool", (NodeOffer(NODE, 1.0, 3),)),)
    return ResolvedPlan(
        plan,
        {"chat": LLAMA},
        {NODE: nodes.node_type(NODE)},
        regions,
        (),
        {"chat": Slo(2.0, 0.08)},
        {"chat": (1000.0, 100.0)},
        links,
    )


def steady(count: int, rate_per_s: float, prompt: int = 1000, output: int = 100) -> Workload:
    return workload("chat", np.arange(count) / rate_per_s, np.full(count, prompt), np.full(count, output))


def test_simulated_group_follows_its_plan_over_the_machine_links() -> None:
    resolved_plan = group_problem()
    result = simulate(resolved_plan, steady(1200, 4.0))
    outcome = compared(resolved_plan, result)
    assert not disagreements(outcome), disagreements(outcome)
    assert {item.what for item in outcome} == {"served", "attainment", "rate", "flow", "busy", "link"}
    replica_models = ReplicaModels(resolved_plan)
    replica_models.learn(resolved_plan.plan)
    sent = {(link.source, link.target): link.sent_bytes for link in result.links if link.sent_bytes}
    whole = replica_models.kv["chat"].wire_bytes(0, 1000, "int4")
    # Half of the requests go to c, each with 20 layers from a and the rest from b; 0.3 to a, which lacks b's layers.
    assert sent["a", "c"] == pytest.approx(600 * whole * 20 / LAYERS)
    assert sent["b", "c"] == pytest.approx(600 * whole * (LAYERS - 20) / LAYERS)
    assert sent["b", "a"] == pytest.approx(360 * whole * (LAYERS - 20) / LAYERS)
    assert set(sent) == {("a", "c"), ("b", "c"), ("b", "a")}


def test_kv_transfer_of_a_group_ends_with_the_layers_over_the_slowest_link() -> None:
    """All layers over one link would take 32 / 20 as long."""
    runs = [
        simulate(group_problem(gbps=gbps), steady(50, 0.2), settings=SimSettings(overlap=False))
        for gbps in (2.0, 1.0)
    ]
    ttft = [run.records.first_token_s - run.records.arrival_s for run in runs]
    replica_models = ReplicaModels(group_problem())
    replica_models.learn(group_problem().plan)
    slowest_bytes = replica_models.kv["chat"].wire_bytes(0, 1000, "int4") * 20 / LAYERS
    gap_s = (ttft[1] - ttft[0])[runs[0].records.decode_replica == 1]
    assert len(gap_s) == 25
    half_s = slowest_bytes * (1 / alpha_beta(1.0, 1e-4).beta_bytes_per_s) / 2
    assert 0.98 * half_s < gap_s.min() <= gap_s.max() < 1.3 * half_s
    alone = runs[0].records.prefill_replica == runs[0].records.decode_replica
    assert np.allclose(ttft[0][alone], ttft[1][alone])


def test_lost_machine_is_detected_by_missed_heartbeats_and_stays_lost() -> None:
    resolved_plan, workload = group_problem(), steady(1200, 4.0)
    faults = parse_faults("faults: [{at_s: 100, kind: node, node: c}]", "f")
    policy = Policy(scaling="flips", window_s=30.0)
    runs = [
        simulate(resolved_plan, workload, policy, faults=faults, settings=SimSettings(heartbeat_s=wait_s))
        for wait_s in (0.0, 5.0)
    ]
    for run, wait_s in zip(runs, (0.0, 5.0), strict=True):
        first = [each for each in run.replicas if each.changes[-1][1] == "lost" and each.ready_s == 0.0]
        assert [item.changes[-1][0] for item in first] == [100.0 + wait_s]
        # Every later try to have it back comes to nothing: there is no other machine c.
        again = [replica for replica in run.replicas if replica.changes[0][0] > 0]
        assert again
        assert all(item.changes[-1][1] == "lost" for item in again)
        # Those that were there do all of it again in the end.
        assert judge(run.records, run.slos, run.end_s).met[run.records.arrival_s > 200].mean() > 0.95
    late = [judge(run.records, run.slos, run.end_s).met[380:440].mean() for run in runs]
    assert late[1] < late[0]


def test_shift_to_long_prompts_flips_a_decode_replica_of_a_group() -> None:
    resolved_plan = group_problem(16.0)
    arrival_s = np.arange(4800) / 16.0
    prompts = np.where(arrival_s < 100, 600, 1900)
    load = workload("chat", arrival_s, prompts, np.where(arrival_s < 100, 100, 8))
    runs = [simulate(resolved_plan, load, Policy(scaling=item, window_s=30.0)) for item in ("none", "flips")]
    end = arrival_s > 200
    met = [judge(run.records, run.slos, run.end_s).met[end].mean() for run in runs]
    assert met[1] > met[0] + 0.1
    flips = [replica for replica in runs[1].replicas if len({role for _, _, role in replica.changes}) > 1]
    assert flips


def test_group_template_without_flows_is_accepted() -> None:
    assert replace(group_problem().plan.templates[0], flows=()).flows == ()


LENGTHS = (1200, 60)


SLO = Slo(4.0, 0.1)


TRAFFIC = Traffic("m", 2.0, (LengthBin(*LENGTHS, 1.0),))


REGIONS = (Region("east", (NodeOffer("1xL4", 0.4, 3), NodeOffer("1xA10", 1.2, 6))),)


PROBLEM = PlanningProblem(
    (model_demand("m", models.model("Llama-3.1-8B"), SLO, TRAFFIC),),
    REGIONS,
    (nodes.node_type("1xL4"), nodes.node_type("1xA10")),
    complexity_share=0.05,  # as specs have it: of plans that cost the same, the one of smaller copies
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    factory = TemplateFactory(PROBLEM)
    return with_candidates(factory, STRATEGIES["melange"](factory, SolveSettings(time_limit_s=5)).plan)


def served(plan: Plan) -> SimResult:
    """From 120 s on three times the planned rate, for eight minutes."""
    when = np.concatenate([np.arange(0, 120, 0.5), np.arange(120, 600, 1 / 6)])
    load = workload("m", when, np.full(len(when), LENGTHS[0]), np.full(len(when), LENGTHS[1]))
    resolved = ResolvedPlan(
        plan,
        {"m": PROBLEM.demands[0].model},
        PROBLEM.by_name,
        REGIONS,
        slos={"m": SLO},
        mean_tokens={"m": (1200.0, 60.0)},
    )
    return simulate(resolved, load, Policy(scaling="cauchy", window_s=30.0))


def late_requests(result: SimResult) -> int:
    """Of those who came in the last three minutes, how many were not served in time."""
    records = result.records
    received = records.arrival_s > 420
    in_time = records.first_token_s - records.arrival_s <= SLO.ttft_s
    return int((received & ~in_time).sum())


def test_candidate_templates_are_started_under_overload_and_serve(plan: Plan) -> None:
    own = {item.name for item in plan.templates}
    assert own == {"m: mixed 1xL4 tp1"}, "the cheap ones, of which there are few"
    alone, offered = served(replace(plan, candidates=())), served(plan)
    assert {replica.template for replica in alone.replicas} == own
    begun = {replica.template for replica in offered.replicas} - own
    assert begun
    assert all(replica.busy_s > 0 for replica in offered.replicas if replica.template in begun)
    assert late_requests(alone) > 400
    assert late_requests(offered) < 120, (
        "a tenth may be late: the rule leaves a fifth more than is planned for alone"
    )


FAST_NODE, SLOW_NODE = "1xH100-SXM", "1xL4"


PLAN = closed_plan((mixed(), "east", 2))


MARKET = Faults(
    prices=(
        PriceChange(300.0, "east", FAST_NODE, 9.0),
        PriceChange(300.0, "east", SLOW_NODE, 0.1),
        PriceChange(600.0, "east", SLOW_NODE, 0.2),
    ),
    availability=(SupplyChange(300.0, "east", FAST_NODE, 1, notice_s=20.0),),
)


def offer(plan_question: PlanQuestion, node: str) -> NodeOffer:
    node_offer = next(region for region in plan_question.regions if region.name == "east").offer(node)
    assert node_offer is not None
    return node_offer


def test_planner_gets_current_prices_supply_and_running_deployments() -> None:
    asked: list[PlanQuestion] = []

    def planner(plan_question: PlanQuestion) -> Plan:
        asked.append(plan_question)
        return closed_plan((mixed(), "east", 1), (mixed(SLOW), "east", 1))

    result = simulate(
        problem(PLAN),
        load(1300, 2.0),
        Policy(scaling="replan", replan_s=400.0),
        faults=MARKET,
        planner=planner,
        settings=SimSettings(planner_s=30.0),
    )
    assert [plan_question.at_s for plan_question in asked] == [300.0, 600.0], (
        "at once, not with the next interval"
    )
    first, later = asked
    assert (offer(first, FAST_NODE).price_usd_per_h, offer(first, FAST_NODE).available) == (9.0, 1)
    assert offer(first, SLOW_NODE).price_usd_per_h == 0.1
    assert first.running.deployments == (Deployment(PLAN.templates[0].name, "east", 2),)
    counts = {deployment.template: deployment.count for deployment in later.running.deployments}
    assert counts == {PLAN.templates[0].name: 1, mixed(SLOW).name: 1}, "one machine went, and one was started"
    (began,) = [replica for replica in result.replicas if replica.changes[0][0] > 0]
    (ready_s,) = [at_s for at_s, state, _ in began.changes if state == "ready"]
    assert summarise(result).start_usd == pytest.approx(0.1 * (ready_s - began.changes[0][0]) / 3600), (
        "at 0.1 an hour"
    )


def test_simultaneous_market_changes_are_reported_once() -> None:
    message: list[tuple[float, MarketReported]] = []

    class Listening(WrappedBrain):
        def on(self, at_s: float, event: Event) -> list[Action]:
            if isinstance(event, MarketReported):
                message.append((at_s, event))
            return self.brain.on(at_s, event)

    result = simulate(
        problem(PLAN),
        load(1300, 2.0),
        faults=MARKET,
        mind=lambda replica_models, policy: Listening(replica_models.facts(), policy),
    )
    assert [at_s for at_s, _ in message] == [300.0, 600.0]
    assert len(result.replicas) == 2, "nothing is started where there is no machine"


def test_replica_drained_for_a_new_plan_finishes_its_requests() -> None:
    """CORAL 5.1: an instance that goes shuts down once its requests complete, however long they take."""
    moved = closed_plan((mixed(SLOW), "east", 1))
    steady = [(float(at_s), 200, 5) for at_s in range(0, 700, 10)]
    work = requests(*sorted([*steady, (395.0, 200, 12_000)]))
    result = simulate(
        problem(closed_plan((mixed(), "east", 1))),
        work,
        Policy(scaling="replan"),
        faults=Faults(prices=(PriceChange(300.0, "east", FAST_NODE, 99.0),)),
        planner=lambda plan_question: moved,
    )
    old = result.replicas[0]
    drained_s, stopped_s = (at_s for at_s, state, _ in old.changes if state in ("draining", "stopped"))
    (long,) = [place for place, tokens in enumerate(work.output_tokens) if tokens == 12_000]
    assert 395.0 < drained_s < stopped_s - 40.0
    assert result.records.finish_s[long] == pytest.approx(stopped_s + DEFAULT_HOST.request_s)
    assert (result.records.attempts == 1).all()
