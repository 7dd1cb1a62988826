"""Fleets that are made up, for the page: plans by hand, without a planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from potluck.catalog import models
from potluck.core.values import plan as plans
from potluck.core.values.layout import single
from potluck.core.values.types import Link, NodeOffer, Region

MODEL = "chat"
PREFILL_PER_S = {"1xL4": 4200.0, "1xA10": 6000.0, "1xL40S": 14000.0, "1xA100-80": 22000.0, "1xH100": 45000.0}
TPOT_S = {"1xL4": 0.034, "1xA10": 0.028, "1xL40S": 0.019, "1xA100-80": 0.013, "1xH100": 0.009}
PRICE = {"1xL4": 0.49, "1xA10": 0.85, "1xL40S": 1.09, "1xA100-80": 1.59, "1xH100": 2.49}


def template(name: str, kind: Any, parts: Sequence[tuple[Any, str]]) -> plans.Template:
    layers = models.model("llama-3.1-8b").layer_count
    counts = Counter(node for _, node in parts)
    return plans.Template(
        f"{MODEL}: {name}",
        kind,
        MODEL,
        tuple(plans.NodeCount(node, count) for node, count in counts.items()),
        tuple(plans.PlannedReplica(role, single(node, 1, layers)) for role, node in parts),
        tuple(
            plans.BucketCapacity(n, 0.0, 0.0, *most, 0.02) for n, most in enumerate(((9.0, 0.4), (4.0, 0.9)))
        ),
        "transferred",
    )


def small_fleet() -> tuple[plans.Plan, tuple[Region, ...], tuple[Link, ...]]:
    kinds = (
        template("pair 1xL4 + 1xA100-80", "pair", [("prefill", "1xL4"), ("mixed", "1xA100-80")]),
        template("combo 1xH100 + 2 1xL40S", "combo", [("prefill", "1xH100"), *[("decode", "1xL40S")] * 2]),
        template("1xA10", "homogeneous", [("mixed", "1xA10")]),
    )
    held = (
        plans.Deployment(kinds[0].name, "east", 2),
        plans.Deployment(kinds[2].name, "east", 1),
        plans.Deployment(kinds[1].name, "west", 1),
        plans.Deployment(kinds[2].name, "west", 2),
    )
    regions = (
        _region("east", {"1xL4": 2, "1xA100-80": 3, "1xA10": 2}),
        _region("west", {"1xH100": 1, "1xL40S": 4, "1xA10": 2}),
    )
    links = (Link("east", "west", 10.0, 0.02), Link("west", "east", 10.0, 0.02))
    return _plan(kinds, held, 30.0), regions, links


def large_fleet(replicas: int = 200) -> tuple[plans.Plan, tuple[Region, ...], tuple[Link, ...]]:
    """Four regions with as many replicas as asked for."""
    kinds = (
        template("combo 1xH100 + 1xL40S", "combo", [("prefill", "1xH100"), ("decode", "1xL40S")]),
        template("1xA100-80", "homogeneous", [("mixed", "1xA100-80")]),
        template("1xL4", "homogeneous", [("mixed", "1xL4")]),
    )
    names = ("east", "north", "south", "west")
    item = replicas // len(names)
    held, regions = [], []
    for name in names:
        counts = (item // 4, item // 4, item - 3 * (item // 4))
        held += [plans.Deployment(kind.name, name, n) for kind, n in zip(kinds, counts, strict=True)]
        regions.append(_region(name, dict.fromkeys(PRICE, item)))
    links = tuple(Link(one, other, 25.0, 0.03) for one in names for other in names if one != other)
    return _plan(kinds, tuple(held), 200.0), tuple(regions), links


def disaggregated_fleet(replicas: int) -> tuple[plans.Plan, tuple[Region, ...], tuple[Link, ...]]:
    """Half of the replicas prefill, half decode, spread over two regions (four from 24 replicas on)."""
    kind = template("combo 1xH100 + 1xL40S", "combo", [("prefill", "1xH100"), ("decode", "1xL40S")])
    names = ("east", "north", "south", "west")[: 4 if replicas >= 24 else 2]
    copies = [replicas // 2 // len(names) + (at < replicas // 2 % len(names)) for at in range(len(names))]
    held = tuple(plans.Deployment(kind.name, name, count) for name, count in zip(names, copies, strict=True))
    regions = tuple(_region(name, dict.fromkeys(("1xH100", "1xL40S"), max(copies))) for name in names)
    links = tuple(Link(one, other, 25.0, 0.03) for one in names for other in names if one != other)
    return _plan((kind,), held, 5.0 * replicas), regions, links


def _region(name: str, available: dict[str, int]) -> Region:
    return Region(name, tuple(NodeOffer(node, PRICE[node], count) for node, count in available.items()))


def _plan(kinds: tuple[plans.Template, ...], held: tuple[plans.Deployment, ...], rate: float) -> plans.Plan:
    copies = sum(item.count for item in held)
    shares = tuple(
        plans.PlannedShare(item.template, item.region, bucket, "closed", rate * part * item.count / copies)
        for item in held
        for bucket, part in ((0, 0.7), (1, 0.3))
    )
    usd = {kind.name: sum(one.count * PRICE[one.node] for one in kind.nodes) for kind in kinds}
    cost = sum(item.count * usd[item.template] for item in held)
    buckets = (plans.LengthBucket(MODEL, 0, 800, rate * 0.7), plans.LengthBucket(MODEL, 1, 8000, rate * 0.3))
    predictions = (plans.Prediction(MODEL, rate * 0.8, rate, 0.62, 0.024, "transferred"),)
    return plans.Plan("auto", kinds, held, buckets, shares, (), predictions, cost, 0.0)
