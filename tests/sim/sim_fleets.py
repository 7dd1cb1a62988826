"""Small fleets and workloads that tests of the simulator share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from potluck.catalog import models, nodes
from potluck.core.values.layout import single
from potluck.core.values.plan import (
    BucketCapacity,
    Deployment,
    LengthBucket,
    NodeCount,
    Plan,
    PlannedFlow,
    PlannedReplica,
    PlannedShare,
    Prediction,
    Template,
    TemplateKind,
)
from potluck.core.values.types import Codec, Link, NodeOffer, Region, Role, Slo
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import PrefixBlocks, Workload, workload

MODEL = "chat"
LLAMA = models.model("Llama-3.1-8B")
FAST, SLOW, FOUR = "1xH100", "1xL4", "4xL4"
NODES = {nodes.canonical(name): nodes.node_type(name) for name in (FAST, SLOW, FOUR)}
LONGEST = 8192


def template(
    name: str, kind: TemplateKind, parts: Sequence[tuple[Role, str]], rates: tuple[float, float, float]
) -> Template:
    """One replica per (role, node); `rates` are prefill, decode and closed requests a second."""
    names = [nodes.canonical(node) for _, node in parts]
    counts = tuple(NodeCount(node, names.count(node)) for node in dict.fromkeys(names))
    replicas = tuple(
        PlannedReplica(role, single(node, 1, LLAMA.layer_count))
        for (role, _), node in zip(parts, names, strict=True)
    )
    return Template(name, kind, MODEL, counts, replicas, (BucketCapacity(0, *rates, 0.2, 0.03),), "measured")


def mixed(node: str = FAST) -> Template:
    return template(f"chat: mixed {node}", "homogeneous", [("mixed", node)], (0.0, 0.0, 10.0))


def combo(prefills: int = 1, decodes: int = 1, node: str = FAST) -> Template:
    parts: list[tuple[Role, str]] = [("prefill", node)] * prefills + [("decode", node)] * decodes
    return template(f"chat: combo {prefills}P{decodes}D", "combo", parts, (0.0, 0.0, 10.0))


def pair() -> Template:
    return template("chat: pair", "pair", [("prefill", SLOW), ("mixed", FAST)], (0.0, 0.0, 12.0))


def prefill_only(node: str = FAST) -> Template:
    return template("chat: prefill", "homogeneous", [("prefill", node)], (20.0, 0.0, 0.0))


def decode_only(node: str = FAST) -> Template:
    return template("chat: decode", "homogeneous", [("decode", node)], (0.0, 20.0, 0.0))


def closed_plan(*fleet: tuple[Template, str, int]) -> Plan:
    """(template, region, copies): each serves by itself."""
    shares = tuple(PlannedShare(t.name, region, 0, "closed", 10.0 * n) for t, region, n in fleet)
    return _plan(fleet, shares, ())


def flow_plan(
    prefill: tuple[Template, str, int], decode: tuple[Template, str, int], codec: Codec = "fp16"
) -> Plan:
    shares = (
        PlannedShare(prefill[0].name, prefill[1], 0, "prefill", 10.0),
        PlannedShare(decode[0].name, decode[1], 0, "decode", 10.0),
    )
    return _plan((prefill, decode), shares, (PlannedFlow(MODEL, 0, prefill[1], decode[1], 10.0, codec),))


def _plan(
    fleet: Sequence[tuple[Template, str, int]],
    shares: tuple[PlannedShare, ...],
    flows: tuple[PlannedFlow, ...],
) -> Plan:
    templates = tuple({t.name: t for t, _, _ in fleet}.values())
    return Plan(
        "test",
        templates,
        tuple(Deployment(t.name, region, n) for t, region, n in fleet),
        (LengthBucket(MODEL, 0, LONGEST, 10.0),),
        shares,
        flows,
        (Prediction(MODEL, 10.0, 20.0, 0.2, 0.03, "measured"),),
        1.0,
        0.0,
    )


def problem(plan: Plan, gbps: float = 100.0, rtt_s: float = 0.01) -> ResolvedPlan:
    offers = tuple(NodeOffer(name, 2.0 + i, 100) for i, name in enumerate(NODES))
    return ResolvedPlan(
        plan,
        {MODEL: LLAMA},
        NODES,
        (Region("east", offers), Region("west", offers)),
        (Link("east", "west", gbps, rtt_s), Link("west", "east", gbps, rtt_s)),
        {MODEL: Slo(2.0, 0.06)},
        {MODEL: (1155.0, 211.0)},
    )


def load(
    count: int,
    rate_per_s: float = 5.0,
    seed: int = 0,
    prompt: tuple[int, int] = (50, 3000),
    output: tuple[int, int] = (1, 300),
    blocks: int = 0,
) -> Workload:
    """Poisson arrivals, lengths drawn evenly; with `blocks`, prompts share prefixes in so many groups."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1.0 / rate_per_s, count))
    prompts, outputs = rng.integers(*prompt, count), rng.integers(*output, count)
    held = None
    if blocks:
        size = 64
        counts = -(-prompts // size)
        groups = rng.integers(0, blocks, count)
        shared = rng.integers(0, counts + 1)
        ids = [
            group * 100_000 + place if place < same else 10_000_000 + request * 1000 + place
            for request, (number, group, same) in enumerate(zip(counts, groups, shared, strict=True))
            for place in range(number)
        ]
        held = PrefixBlocks(np.concatenate(([0], np.cumsum(counts))), np.array(ids, np.int64), size)
    return workload(MODEL, arrival_s, prompts, outputs, blocks=held)
