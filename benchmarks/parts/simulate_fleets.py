"""The fleets and requests that benchmarks/simulate.py times: Llama-3.1-8B on H100s, lengths of Azure's chat trace."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.catalog import models, nodes
from potluck.catalog import named_workloads as named
from potluck.core.values.layout import single
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
    TemplateKind,
)
from potluck.core.values.types import NodeOffer, Region, Role, Slo
from potluck.perf.throughput import best_operating
from potluck.perf.timers.roofline import roofline
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import Workload, synthetic, with_prefixes

MODEL = "chat"
LLAMA = models.model("Llama-3.1-8B")
NODE = nodes.node_type("1xH100-SXM")
INPUT, OUTPUT = 1155, 211
LOAD = 0.7
HIT_SHARE = 0.3
LONGEST = 16_384


def capacity_per_s(role: Role = "mixed") -> float:
    """Requests a second that one replica sustains, by the model that plans are made with."""
    result = best_operating(roofline(LLAMA, NODE, 1), INPUT, OUTPUT, 300, None, role)
    assert result is not None
    return result.requests_per_s


def aggregated(replicas: int) -> ResolvedPlan:
    rates = (0.0, 0.0, capacity_per_s())
    return _problem(template("chat: mixed", "homogeneous", [("mixed", NODE.name)], rates), replicas)


def combos(copies: int) -> ResolvedPlan:
    """One prefill and one decode replica each."""
    rate = min(capacity_per_s("prefill"), capacity_per_s("decode"))
    parts: list[tuple[Role, str]] = [("prefill", NODE.name), ("decode", NODE.name)]
    return _problem(template("chat: 1P1D", "combo", parts, (0.0, 0.0, rate)), copies)


def requests(problem: ResolvedPlan, count: int, seed: int, block_tokens: int = 0) -> Workload:
    """Poisson arrivals at a part of what the fleet sustains; with blocks of some size, with shared prefixes."""
    rate = LOAD * problem.plan.predictions[0].capacity_per_s
    made = synthetic(MODEL, named.workload("azure-conv").lengths, rate, count, seed)
    return with_prefixes(made, HIT_SHARE, seed, block_tokens=block_tokens) if block_tokens else made


def template(
    name: str, kind: TemplateKind, parts: Sequence[tuple[Role, str]], rates: tuple[float, float, float]
) -> Template:
    """One replica per (role, node); `rates` are prefill, decode and closed requests a second."""
    names = [node for _, node in parts]
    counts = tuple(NodeCount(node, names.count(node)) for node in dict.fromkeys(names))
    replicas = tuple(PlannedReplica(role, single(node, 1, LLAMA.layer_count)) for role, node in parts)
    return Template(name, kind, MODEL, counts, replicas, (BucketCapacity(0, *rates, 0.2, 0.03),), "measured")


def _problem(template: Template, copies: int) -> ResolvedPlan:
    rate = copies * template.capacity[0].closed_per_s
    plan = Plan(
        "benchmark",
        (template,),
        (Deployment(template.name, "east", copies),),
        (LengthBucket(MODEL, 0, LONGEST, LOAD * rate),),
        (PlannedShare(template.name, "east", 0, "closed", LOAD * rate),),
        (),
        (Prediction(MODEL, LOAD * rate, rate, 0.2, 0.03, "measured"),),
        1.0,
        0.0,
    )
    region = Region("east", (NodeOffer(NODE.name, 2.0, 10_000),))
    slos, mean = {MODEL: Slo(2.0, 0.06)}, {MODEL: (float(INPUT), float(OUTPUT))}
    return ResolvedPlan(plan, {MODEL: LLAMA}, {NODE.name: NODE}, (region,), (), slos, mean)
