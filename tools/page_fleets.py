"""Fleets that are made up, for the page: plans by hand, without a planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from potluck.catalog import models
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
)
from potluck.core.values.types import Link, NodeOffer, Region

MODEL = "chat"
PREFILL_PER_S = {"1xL4": 4200.0, "1xA10": 6000.0, "1xL40S": 14000.0, "1xA100-80": 22000.0, "1xH100": 45000.0}
TPOT_S = {"1xL4": 0.034, "1xA10": 0.028, "1xL40S": 0.019, "1xA100-80": 0.013, "1xH100": 0.009}
PRICE = {"1xL4": 0.49, "1xA10": 0.85, "1xL40S": 1.09, "1xA100-80": 1.59, "1xH100": 2.49}


def template(name: str, kind: Any, parts: Sequence[tuple[Any, str]]) -> Template:
    layers = models.model("llama-3.1-8b").layer_count
    counts: dict[str, int] = {}
    for _, node in parts:
        counts[node] = counts.get(node, 0) + 1
    return Template(
        f"{MODEL}: {name}",
        kind,
        MODEL,
        tuple(NodeCount(node, count) for node, count in counts.items()),
        tuple(PlannedReplica(role, single(node, 1, layers)) for role, node in parts),
        (BucketCapacity(0, 0.0, 0.0, 9.0, 0.4, 0.02), BucketCapacity(1, 0.0, 0.0, 4.0, 0.9, 0.02)),
        "transferred",
    )


def small_fleet() -> tuple[Plan, tuple[Region, ...], tuple[Link, ...]]:
    """Two regions, five kinds of GPU, ten replicas."""
    kinds = (
        template("pair 1xL4 + 1xA100-80", "pair", [("prefill", "1xL4"), ("mixed", "1xA100-80")]),
        template(
            "combo 1xH100 + 2 1xL40S",
            "combo",
            [("prefill", "1xH100"), ("decode", "1xL40S"), ("decode", "1xL40S")],
        ),
        template("1xA10", "homogeneous", [("mixed", "1xA10")]),
    )
    held = (
        Deployment(kinds[0].name, "east", 2),
        Deployment(kinds[2].name, "east", 1),
        Deployment(kinds[1].name, "west", 1),
        Deployment(kinds[2].name, "west", 2),
    )
    regions = (
        _region("east", {"1xL4": 2, "1xA100-80": 3, "1xA10": 2}),
        _region("west", {"1xH100": 1, "1xL40S": 4, "1xA10": 2}),
    )
    links = (Link("east", "west", 10.0, 0.02), Link("west", "east", 10.0, 0.02))
    return _plan(kinds, held, 30.0), regions, links


def large_fleet(replicas: int = 200) -> tuple[Plan, tuple[Region, ...], tuple[Link, ...]]:
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
        held += [Deployment(kinds[0].name, name, item // 4), Deployment(kinds[1].name, name, item // 4)]
        held.append(Deployment(kinds[2].name, name, item - 3 * (item // 4)))
        regions.append(_region(name, dict.fromkeys(PRICE, item)))
    links = tuple(Link(one, other, 25.0, 0.03) for one in names for other in names if one != other)
    return _plan(kinds, tuple(held), 200.0), tuple(regions), links


def _region(name: str, available: dict[str, int]) -> Region:
    return Region(name, tuple(NodeOffer(node, PRICE[node], count) for node, count in available.items()))


def _plan(kinds: tuple[Template, ...], held: tuple[Deployment, ...], rate: float) -> Plan:
    copies = sum(item.count for item in held)
    shares = tuple(
        PlannedShare(item.template, item.region, bucket, "closed", rate * part * item.count / copies)
        for item in held
        for bucket, part in ((0, 0.7), (1, 0.3))
    )
    cost = sum(
        item.count * sum(one.count * PRICE[one.node] for one in kind.nodes)
        for item in held
        for kind in kinds
        if kind.name == item.template
    )
    return Plan(
        "auto",
        kinds,
        held,
        (LengthBucket(MODEL, 0, 800, rate * 0.7), LengthBucket(MODEL, 1, 8000, rate * 0.3)),
        shares,
        (),
        (Prediction(MODEL, rate * 0.8, rate, 0.62, 0.024, "transferred"),),
        cost,
        0.0,
    )
