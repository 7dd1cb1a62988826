"""Small fleets written by hand: templates, plans and problems as the papers' experiments need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from potluck.catalog import models, nodes
from potluck.core.values.layout import Layout, single
from potluck.core.values.plan import (
    BucketCapacity,
    Deployment,
    LengthBucket,
    NodeCount,
    Plan,
    PlannedReplica,
    Template,
    TemplateKind,
)
from potluck.core.values.types import NodeOffer, NodeType, Region, Role, Slo
from potluck.runtime.resolved_plan import EngineSetup, ResolvedPlan

MODEL, REGION = "model", "here"
LONGEST_TOKENS = 1 << 20


def node(gpu: str, network_gbps: float, gpus: int = 1) -> NodeType:
    """A node of the catalog with the paper's network card."""
    return replace(nodes.node_type(f"{gpus}x{gpu}"), network_gbps=network_gbps)


def alone(where: NodeType, model: str) -> Layout:
    """The whole model on all GPUs of one node."""
    return single(where.name, where.gpus, models.model(model).layer_count)


def template(
    name: str, kind: TemplateKind, parts: Sequence[tuple[Role, Layout]], weight_per_s: float = 1.0
) -> Template:
    """Replicas that work together; `weight_per_s` is what goodput-weighted turns go by."""
    counts: dict[str, int] = {}
    for _, layout in parts:
        for item, count in layout.node_counts.items():
            counts[item] = counts.get(item, 0) + count
    capacity = BucketCapacity(0, 0.0, 0.0, weight_per_s, 0.0, 0.0)
    return Template(
        name,
        kind,
        MODEL,
        tuple(NodeCount(entry, count) for entry, count in counts.items()),
        tuple(PlannedReplica(role, layout) for role, layout in parts),
        (capacity,),
        "measured",
    )


def problem(
    model: str,
    where: Sequence[NodeType],
    fleet: Sequence[tuple[Template, int]],
    engines: Mapping[tuple[str, int], EngineSetup],
    mean_tokens: tuple[float, float],
    *,
    slo: Slo | None = None,
    price_usd_per_h: Mapping[str, float] | None = None,
) -> ResolvedPlan:
    """A plan of (template, copies), all in one place, with all that its names mean."""
    prices = price_usd_per_h or {}
    plan = Plan(
        "by hand",
        tuple(item for item, _ in fleet),
        tuple(Deployment(item.name, REGION, count) for item, count in fleet),
        (LengthBucket(MODEL, 0, LONGEST_TOKENS, 1.0),),
        (),
        (),
        (),
        0.0,
        0.0,
    )
    offers = tuple(NodeOffer(item.name, prices.get(item.name, 0.0), 1000) for item in where)
    return ResolvedPlan(
        plan,
        {MODEL: models.model(model)},
        {item.name: item for item in where},
        (Region(REGION, offers),),
        slos={} if slo is None else {MODEL: slo},
        mean_tokens={MODEL: mean_tokens},
        engines=engines,
    )
