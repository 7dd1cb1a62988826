"""Zones in the spec: requests lost with one part of a zone are retried in another zone."""

from __future__ import annotations

from pathlib import Path

import sim_fleets as fleets

from potluck.cli.simulating.simulation import read_inputs, scene_of
from potluck.core.brain.brain import Brain
from potluck.core.state.actions import Run, StartReplica
from potluck.core.state.events import AttemptFailed, PlanReceived, ReplicaLost, ReplicaReady, RequestArrived
from potluck.core.state.policy import Policy
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import NodeCount, Plan, PlannedReplica, Template, plan_to_json
from potluck.core.values.types import Request
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import ResolvedPlan

SPEC = """\
models:
  - model: Llama-3.1-8B
    name: chat
    slo: {ttft_ms: 2000, tpot_ms: 60}
    traffic: {rate_per_s: 4, input: 1024, output: 200}
pool:
  machines:
    - {name: one, node: 1xH100-SXM, price_usd_per_h: 2, zone: left}
    - {name: two, node: 1xH100-SXM, price_usd_per_h: 2, zone: left}
    - {name: three, node: 1xH100-SXM, price_usd_per_h: 2, zone: left}
    - {name: four, node: 1xH100-SXM, price_usd_per_h: 2, zone: right}
  gbps: 100
"""
MACHINES = ("one", "two", "three", "four")


def on_machine(name: str) -> Template:
    layout = Layout((Stage(fleets.LLAMA.layer_count, (StageNode("1xH100-SXM", 1, name),)),))
    made = fleets.template(f"chat on {name}", "homogeneous", [("mixed", fleets.FAST)], (0.0, 0.0, 10.0))
    counts = (NodeCount("1xH100-SXM", 1),)
    return Template(
        made.name,
        made.kind,
        made.model,
        counts,
        (PlannedReplica("mixed", layout),),
        made.capacity,
        "measured",
    )


def fleet(spec: str, folder: Path) -> tuple[Plan, ResolvedPlan]:
    plan = fleets.closed_plan(*((on_machine(name), "pool", 1) for name in MACHINES))
    (folder / "potluck.yaml").write_text(spec)
    (folder / "plan.json").write_text(plan_to_json(plan))
    paths = (folder / "plan.json", folder / "potluck.yaml")
    inputs, _ = read_inputs(paths, 10.0, lambda line: None, lambda spec: None)
    return plan, scene_of(inputs)


def replicas_after_two_losses(spec: str, folder: Path) -> tuple[dict[str, str], set[str]]:
    """Replicas to machines; and where requests go when `one` and `two` are lost with six on them."""
    plan, resolved = fleet(spec, folder)
    replica_models = ReplicaModels(resolved)
    replica_models.learn(plan)
    brain = Brain(replica_models.facts(), Policy(balance="round-robin"))
    members = [
        action.member for action in brain.on(0.0, PlanReceived(plan)) if isinstance(action, StartReplica)
    ]
    where = {replica_spec.id: replica_spec.nodes[0] for replica_spec in members}
    for name in where:
        brain.on(0.0, ReplicaReady(name))
    runs: dict[str, str] = {}
    for number in range(12):
        (run,) = brain.on(1.0, RequestArrived(Request(str(number), "chat", 1.0, 100, 50)))
        assert isinstance(run, Run)
        runs[run.request] = run.route.decoder
    lost = [name for name, machine in where.items() if machine in ("one", "two")]
    for name in lost:
        brain.on(2.0, ReplicaLost(name, "power"))
    again = {
        action.route.decoder
        for request, name in runs.items()
        if name in lost
        for action in brain.on(2.1, AttemptFailed(request, 0, "replica", name, 3))
        if isinstance(action, Run)
    }
    return {replica_spec.id: replica_spec.zone for replica_spec in members}, {where[name] for name in again}


def test_request_lost_with_two_machines_of_a_zone_avoids_the_zone(tmp_path: Path) -> None:
    zones, machines = replicas_after_two_losses(SPEC, tmp_path)
    assert sorted(zones.values()) == ["left", "left", "left", "right"]
    assert machines == {"four"}


def test_request_lost_twice_without_zones_avoids_the_region(tmp_path: Path) -> None:
    plain = SPEC.replace(", zone: left", "").replace(", zone: right", "")
    zones, machines = replicas_after_two_losses(plain, tmp_path)
    assert set(zones.values()) == {""}
    assert "three" in machines  # nobody is elsewhere, so wherever somebody is
