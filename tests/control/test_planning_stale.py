"""A plan is for the nodes that were there when it was begun; some may be gone when it is done."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.control.control_values import PlanReply, PlanRequest
from potluck.control.plan_requests import PlanRequests
from potluck.control.state_store import StateStore
from potluck.core.values.layout import single
from potluck.core.values.plan import Deployment, NodeCount, Plan, PlannedReplica, Template
from potluck.core.values.types import NodeOffer, Region

WANTED: dict[str, Any] = {"replan": {"reason": "prices"}, "replicas": []}


def plan(count: int) -> Plan:
    layout = single("1xL4", 1, 2)
    template = Template(
        "t", "homogeneous", "m", (NodeCount("1xL4", 1),), (PlannedReplica("mixed", layout),), (), "measured"
    )
    return Plan("auto", (template,), (Deployment("t", "east", count),), (), (), (), (), 1.5, 0.0)


def nodes(count: int) -> tuple[Region, ...]:
    return (Region("east", (NodeOffer("1xL4", 1.0, count),)),)


@dataclass
class Slow:
    """Takes all nodes that it is told of, when it is let go."""

    go: threading.Event = field(default_factory=threading.Event)
    asked: list[int] = field(default_factory=list)

    def first(self, asked: PlanRequest) -> PlanReply:
        return PlanReply(None, "")

    def full(self, asked: PlanRequest) -> PlanReply:
        assert asked.regions is not None
        self.asked.append(asked.regions[0].offers[0].available)
        assert self.go.wait(60)
        return PlanReply(plan(self.asked[-1]), "more")


def test_a_plan_for_nodes_that_have_gone_is_made_anew(tmp_path: Path) -> None:
    slow, adopted, notes = Slow(), [], []
    planning = PlanRequests(
        StateStore(tmp_path / "state.db"),
        slow,
        lambda made, reason: adopted.append(made.deployments[0].count) or len(adopted),
        lambda kind, what, why: notes.append(f"{what}: {why}"),
    )

    def turned(count: int) -> None:
        planning.turn(WANTED, nodes(count))
        while planning.under_way is not None:
            planning.under_way.result(60)
            planning.turn(WANTED, nodes(count))

    planning.turn(WANTED, nodes(3))
    slow.go.set()
    turned(2)  # one has gone while it was made
    turned(2)
    assert (slow.asked, adopted) == ([3, 2], [2])
    assert "begins anew: it wants 3 x 1xL4 in east, and there are 2 since it was begun" in notes
    planning.close()


def test_more_nodes_than_it_was_made_for_do_no_harm(tmp_path: Path) -> None:
    slow, adopted = Slow(), []
    slow.go.set()
    planning = PlanRequests(
        StateStore(tmp_path / "state.db"),
        slow,
        lambda made, reason: adopted.append(made.deployments[0].count) or len(adopted),
        lambda kind, what, why: None,
    )
    planning.turn(WANTED, nodes(3))
    while planning.under_way is not None:
        planning.under_way.result(60)
        planning.turn(WANTED, nodes(4))
    assert adopted == [3]
    planning.close()
