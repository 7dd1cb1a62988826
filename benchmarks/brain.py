"""What a decision costs: CPU-microseconds of the Brain per request (Arrived, FirstToken, RequestFinished together).

A fleet of like replicas, requests of the Azure conversation trace's mean size, 200 of them open at a time. Each
figure is the least of several runs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

from parts.common import run
from potluck.core.brain.brain import Brain
from potluck.core.state import events
from potluck.core.state.actions import StartReplica
from potluck.core.state.facts import FleetFacts, ModelFacts, ReplicaFacts
from potluck.core.state.policy import Policy
from potluck.core.values import plan as plans
from potluck.core.values.layout import single
from potluck.core.values.types import Request, Role

PROMPT_TOKENS, OUTPUT_TOKENS = 1155, 211
OPEN = 200
TARGETS = {
    "aggregated_1_us": ("<=", 8.0),
    "aggregated_8_us": ("<=", 8.0),
    "aggregated_1000_us": ("<=", 8.0),
    "ratio_1000_to_1": ("<=", 2.0),
}


def template(name: str, roles: Sequence[Role], kind: plans.TemplateKind = "homogeneous") -> plans.Template:
    rates = enumerate((5.0, 2.0))
    capacity = tuple(plans.BucketCapacity(i, rate, rate, rate, 0.1, 0.02) for i, rate in rates)
    replicas = tuple(plans.PlannedReplica(role, single("node", 1, 8)) for role in roles)
    return plans.Template(name, kind, "m", (plans.NodeCount("node", 1),), replicas, capacity, "measured")


def plan(templates: Sequence[plans.Template], count: int) -> plans.Plan:
    """So many copies of each; several templates are prefill and decode of one flow."""
    buckets = (plans.LengthBucket("m", 0, 2000, 1.0), plans.LengthBucket("m", 1, 8000, 1.0))
    phases = ("closed",) if len(templates) == 1 else ("prefill", "decode")
    shares = tuple(
        plans.PlannedShare(item.name, "home", bucket, phase, rate * count)  # type: ignore[arg-type]
        for item, phase in zip(templates, phases, strict=True)
        for bucket, rate in enumerate((3.0, 0.6))
    )
    apart = (0, 1) if len(templates) > 1 else ()
    flows = tuple(plans.PlannedFlow("m", bucket, "home", "home", 1.0) for bucket in apart)
    deployments = tuple(plans.Deployment(item.name, "home", count) for item in templates)
    return plans.Plan("benchmark", tuple(templates), deployments, buckets, shares, flows, (), 1.0, 0.0)


def started(templates: Sequence[plans.Template], count: int, policy: Policy) -> Brain:
    replicas = {
        (item.name, place): ReplicaFacts(1e-4, 1e-3, 0.02, 64, 20_000, 16_000)
        for item in templates
        for place in range(len(item.replicas))
    }
    brain = Brain(FleetFacts({"m": ModelFacts(1e5)}, replicas), policy)
    for action in brain.on(0.0, events.PlanReceived(plan(templates, count))):
        if isinstance(action, StartReplica):
            brain.on(0.0, events.ReplicaReady(action.member.id))
    return brain


def cost_us(templates: Sequence[plans.Template], count: int, policy: Policy, requests: int) -> float:
    """One run: each request arrives, has its first token, and ends when OPEN others have come."""
    brain = started(templates, count, policy)
    asked = [Request(str(n), "m", n * 0.01, PROMPT_TOKENS, OUTPUT_TOKENS) for n in range(requests)]
    begins: list[list[events.Event]] = []
    for item in asked:
        middle: list[events.Event] = [events.SegmentDone(item.id, 0, 0)] if len(templates) > 1 else []
        begins.append([events.RequestArrived(item), *middle, events.FirstToken(item.id, 0)])
    ends = [events.RequestFinished(entry.id, 0, OUTPUT_TOKENS) for entry in asked]
    gc.collect()
    gc.disable()
    begin_s = time.process_time()
    for number, begun in enumerate(begins):
        for event in begun:
            brain.on(number * 0.01, event)
        if number >= OPEN:
            brain.on(number * 0.01, ends[number - OPEN])
    spent_s = time.process_time() - begin_s
    gc.enable()
    return spent_s / requests * 1e6


def measure(quick: bool) -> dict[str, float]:
    requests, rounds = (5_000, 3) if quick else (20_000, 7)

    def least(templates: Sequence[plans.Template], count: int, policy: Policy) -> float:
        return min(cost_us(templates, count, policy, requests) for _ in range(rounds))

    mixed = [template("mixed", ["mixed"])]
    combo = [template("combo", ["prefill", "decode", "decode"], "combo")]
    apart = [template("prefill", ["prefill"]), template("decode", ["decode"])]
    figures = {f"aggregated_{n}_us": least(mixed, n, Policy()) for n in (1, 8, 1000)}
    figures["ratio_1000_to_1"] = figures["aggregated_1000_us"] / figures["aggregated_1_us"]
    for balance in ("round-robin", "token"):
        figures[f"{balance}_8_us"] = least(mixed, 8, Policy(balance=balance))
    figures["scaling_8_us"] = least(mixed, 8, Policy(scaling="cauchy"))
    for count in (1, 300):
        figures[f"combo_1p2d_{count}_us"] = least(combo, count, Policy())
    for count in (1, 500):
        figures[f"flow_{count}_us"] = least(apart, count, Policy())
    return figures


if __name__ == "__main__":
    run("brain", measure, TARGETS, quick_without="three of four requests, most rounds")
