"""Groups of named machines in simulation: what was planned is what runs, over the links between their machines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from potluck.catalog import models, nodes
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
from potluck.core.values.types import NodeOffer, Region, Slo
from potluck.perf.delays.transfer import alpha_beta
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import Workload, workload
from potluck.sim.results.metrics import judge
from potluck.sim.results.plan_comparison import compared, disagreements
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world.faults import parse_faults

LLAMA = models.model("Llama-3.1-8B")
NODE = nodes.canonical("2xA40")
LAYERS = LLAMA.layer_count
NAMES = ("a", "b", "c")


def scene(rate_per_s: float = 4.0, gbps: float = 20.0) -> ResolvedPlan:
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
    arrival_s = np.arange(count) / rate_per_s
    return workload("chat", arrival_s, np.full(count, prompt), np.full(count, output))


def test_a_group_runs_as_planned_over_the_links_between_its_machines() -> None:
    world = scene()
    result = simulate(world, steady(1200, 4.0))
    found = compared(world, result)
    assert not disagreements(found), disagreements(found)
    assert {each.what for each in found} == {"served", "attainment", "rate", "flow", "busy", "link"}
    replica_models = ReplicaModels(world)
    replica_models.learn(world.plan)
    sent = {(link.source, link.target): link.sent_bytes for link in result.links if link.sent_bytes}
    whole = replica_models.kv["chat"].wire_bytes(0, 1000, "int4")
    # Half of the requests go to c, each with 20 layers from a and the rest from b; 0.3 to a, which lacks b's layers.
    assert sent["a", "c"] == pytest.approx(600 * whole * 20 / LAYERS)
    assert sent["b", "c"] == pytest.approx(600 * whole * (LAYERS - 20) / LAYERS)
    assert sent["b", "a"] == pytest.approx(360 * whole * (LAYERS - 20) / LAYERS)
    assert set(sent) == {("a", "c"), ("b", "c"), ("b", "a")}


def test_layers_that_come_over_the_slowest_link_decide_when_all_is_there() -> None:
    """All layers over one link would take 32 / 20 as long."""
    runs = [
        simulate(scene(gbps=gbps), steady(50, 0.2), settings=SimSettings(overlap=False))
        for gbps in (2.0, 1.0)
    ]
    ttft = [run.records.first_token_s - run.records.arrival_s for run in runs]
    replica_models = ReplicaModels(scene())
    replica_models.learn(scene().plan)
    slowest_bytes = replica_models.kv["chat"].wire_bytes(0, 1000, "int4") * 20 / LAYERS
    gap_s = (ttft[1] - ttft[0])[runs[0].records.decode_replica == 1]
    assert len(gap_s) == 25
    half_s = slowest_bytes * (1 / alpha_beta(1.0, 1e-4).beta_bytes_per_s) / 2
    assert 0.98 * half_s < gap_s.min() <= gap_s.max() < 1.3 * half_s
    alone = runs[0].records.prefill_replica == runs[0].records.decode_replica
    assert np.allclose(ttft[0][alone], ttft[1][alone])


def test_a_lost_machine_is_noticed_when_its_heartbeat_is_missing_and_stays_lost() -> None:
    world, load = scene(), steady(1200, 4.0)
    faults = parse_faults("faults: [{at_s: 100, kind: node, node: c}]", "f")
    policy = Policy(scaling="flips", window_s=30.0)
    runs = [
        simulate(world, load, policy, faults=faults, settings=SimSettings(heartbeat_s=wait_s))
        for wait_s in (0.0, 5.0)
    ]
    for run, wait_s in zip(runs, (0.0, 5.0), strict=True):
        first = [each for each in run.replicas if each.changes[-1][1] == "lost" and each.ready_s == 0.0]
        assert [each.changes[-1][0] for each in first] == [100.0 + wait_s]
        # Every later try to have it back comes to nothing: there is no other machine c.
        again = [each for each in run.replicas if each.began_s > 0]
        assert again
        assert all(each.changes[-1][1] == "lost" for each in again)
        # Those that were there do all of it again in the end.
        met = judge(run.records, run.slos, run.end_s).met
        assert met[run.records.arrival_s > 200].mean() > 0.95
    late = [judge(run.records, run.slos, run.end_s).met[380:440].mean() for run in runs]
    assert late[1] < late[0]


def test_a_shift_to_long_prompts_flips_a_decoder() -> None:
    world = scene(16.0)
    arrival_s = np.arange(4800) / 16.0
    prompts = np.where(arrival_s < 100, 600, 1900)
    outputs = np.where(arrival_s < 100, 100, 8)
    load = workload("chat", arrival_s, prompts, outputs)
    runs = [simulate(world, load, Policy(scaling=each, window_s=30.0)) for each in ("none", "flips")]
    end = arrival_s > 200
    met = [judge(run.records, run.slos, run.end_s).met[end].mean() for run in runs]
    assert met[1] > met[0] + 0.1
    flips = [each for each in runs[1].replicas if len({role for _, _, role in each.changes}) > 1]
    assert flips


def test_plans_of_groups_without_flows_still_load() -> None:
    made = scene().plan
    assert replace(made.templates[0], flows=()).flows == ()
