"""The fleets and requests that benchmarks/simulate.py times: Llama-3.1-8B on H100s, lengths of Azure's chat trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from potluck.catalog import models, nodes
from potluck.catalog import named_workloads as named
from potluck.core.values import plan as plans
from potluck.core.values.layout import single
from potluck.core.values.types import NodeOffer, NodeType, Region, Role, Slo
from potluck.perf.throughput import best_operating
from potluck.perf.timers.roofline import roofline
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import Workload, synthetic, with_prefixes

MODEL = "chat"
LLAMA = models.model("Llama-3.1-8B")
NODE = nodes.node_type("1xH100-SXM")
INPUT, OUTPUT = 1155, 211
SLO = Slo(2.0, 0.06)
LOAD = 0.7
HIT_SHARE = 0.3
LONGEST = 16_384


def per_s(role: Role = "mixed", node: NodeType = NODE) -> float:
    """Requests a second that one replica sustains, by the model that plans are made with."""
    result = best_operating(roofline(LLAMA, node, node.gpus), INPUT, OUTPUT, 300, None, role)
    assert result is not None
    return result.requests_per_s


def aggregated(replicas: int) -> ResolvedPlan:
    rates = (0.0, 0.0, per_s())
    return _problem(template("chat: mixed", "homogeneous", [("mixed", NODE.name)], rates), replicas)


def combos(copies: int) -> ResolvedPlan:
    rate = min(per_s("prefill"), per_s("decode"))
    parts: list[tuple[Role, str]] = [("prefill", NODE.name), ("decode", NODE.name)]
    return _problem(template("chat: 1P1D", "combo", parts, (0.0, 0.0, rate)), copies)


def requests(problem: ResolvedPlan, count: int, seed: int, block_tokens: int = 0) -> Workload:
    """Poisson arrivals at a part of what the fleet sustains; with blocks of some size, with shared prefixes."""
    rate = LOAD * problem.plan.predictions[0].capacity_per_s
    workload = synthetic(MODEL, named.workload("azure-conv").lengths, rate, count, seed)
    return with_prefixes(workload, HIT_SHARE, seed, block_tokens=block_tokens) if block_tokens else workload


def template(
    name: str, kind: plans.TemplateKind, parts: Sequence[tuple[Role, str]], rates: tuple[float, float, float]
) -> plans.Template:
    """One replica per (role, node); `rates` are prefill, decode and closed requests a second."""
    names = [node for _, node in parts]
    counts = tuple(plans.NodeCount(node, names.count(node)) for node in dict.fromkeys(names))
    replicas = tuple(plans.PlannedReplica(role, single(node, 1, LLAMA.layer_count)) for role, node in parts)
    capacity = (plans.BucketCapacity(0, *rates, 0.2, 0.03),)
    return plans.Template(name, kind, MODEL, counts, replicas, capacity, "measured")


def _problem(template: plans.Template, copies: int) -> ResolvedPlan:
    rate = copies * template.capacity[0].closed_per_s
    shares = (plans.PlannedShare(template.name, "east", 0, "closed", LOAD * rate),)
    return planned([(template, "east", copies)], shares, rate, LOAD, LONGEST)


def planned(
    fleet: Sequence[tuple[plans.Template, str, int]],
    shares: Sequence[plans.PlannedShare],
    rate_per_s: float,
    load: float = 1.0,
    longest: int = 1 << 20,
    **more: Any,
) -> ResolvedPlan:
    """(template, region, copies); `more` are flows, links and an objective where they are not the usual ones."""
    templates = tuple({t.name: t for t, _, _ in fleet}.values())
    deployments = tuple(plans.Deployment(t.name, region, n) for t, region, n in fleet)
    buckets = (plans.LengthBucket(MODEL, 0, longest, load * rate_per_s),)
    predictions = (plans.Prediction(MODEL, load * rate_per_s, rate_per_s, 0.2, 0.03, "measured"),)
    routes = (tuple(shares), tuple(more.get("flows", ())))
    plan = plans.Plan("by hand", templates, deployments, buckets, *routes, predictions, 1.0, 0.0)
    used = {item.node: nodes.node_type(item.node) for t in templates for item in t.nodes}
    offers = tuple(NodeOffer(name, 2.0, 100_000) for name in used)
    regions = tuple(Region(name, offers) for name in dict.fromkeys(region for _, region, _ in fleet))
    slos, mean = {MODEL: more.get("slo", SLO)}, {MODEL: (float(INPUT), float(OUTPUT))}
    return ResolvedPlan(plan, {MODEL: LLAMA}, used, regions, tuple(more.get("links", ())), slos, mean)
