"""A copy on standby, from the Brain by the gateway's port to the controller: it is started, and not routed to."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from potluck.control.control_values import LaunchEngine
from potluck.control.gateway_client import wants_of
from potluck.control.plan_requests import _running
from potluck.control.reconciler import ReconcilerMemory, step
from potluck.control.service_view import replicas_of
from potluck.core.brain.brain import Brain
from potluck.core.errors import InputError
from potluck.core.state.actions import Run
from potluck.core.state.events import PlanReceived, ReplicaLost, ReplicaReady, RequestArrived, Tick
from potluck.core.state.facts import FleetFacts, ModelFacts
from potluck.core.state.policy import Policy
from potluck.core.values.layout import single
from potluck.core.values.plan import (
    BucketCapacity,
    Deployment,
    LengthBucket,
    NodeCount,
    Plan,
    PlannedReplica,
    Template,
)
from potluck.core.values.types import NodeOffer, Region, Request
from potluck.gateway.admin.operations import Operations
from potluck.gateway.brain_loop.core import BrainLoop, DecisionLog
from potluck.gateway.registry.registry import ReplicaRegistry

TEMPLATE = Template(
    "t",
    "homogeneous",
    "m",
    (NodeCount("1xA10", 1),),
    (PlannedReplica("mixed", single("1xA10", 1, 2)),),
    (BucketCapacity(0, 0.0, 0.0, 5.0, 0.1, 0.01),),
    "measured",
)
PLAN = Plan(
    "auto",
    (TEMPLATE,),
    (Deployment("t", "east", 1),),
    (LengthBucket("m", 0, 100_000, 1.0),),
    (),
    (),
    (),
    1.5,
    0.0,
)
REGIONS = (Region("east", (NodeOffer("1xA10", 1.5, 4),)),)


class Gateway:
    """A Brain at its desk with a keeper of engines, and what the operators' port says of them."""

    def __init__(self) -> None:
        self.brain = Brain(
            FleetFacts({"m": ModelFacts(1e5)}, {}, {}, {}, regions=REGIONS),
            Policy(standby=1, admission=False),
        )
        self.brain_loop = BrainLoop(self.brain, self.brain.requests)
        self.registry = ReplicaRegistry(lambda event: None, None, lambda replica: 0)  # type: ignore[arg-type]
        self.brain_loop.manage = self.registry.act
        self.runs: list[Run] = []
        self.told: list[str] = []
        decision_log = DecisionLog(lambda: "")
        decision_log.decided = lambda what, why: self.told.append(what)
        self.brain_loop.watchers.append(decision_log)
        self.oversight = Operations(
            SimpleNamespace(
                brain=self.brain,
                brain_loop=self.brain_loop,
                registry=self.registry,
                plan_version=1,
                plan_mark="",
                market=None,
                replica_models=SimpleNamespace(replica_models={}),
                kills=set(),
                drains={},
                cordons=SimpleNamespace(marks=[]),
            )  # type: ignore[arg-type]
        )

    def wanted(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(json.dumps(self.oversight.wanted()))
        return found

    def asked(self, name: str) -> str:
        """Where a request is sent."""
        actions = self.brain.on(self.brain_loop.now_s(), RequestArrived(Request(name, "m", 0.0, 100, 10)))
        (run,) = [each for each in actions if isinstance(each, Run)]
        return run.route.segments[0].replica


def test_it_is_wanted_and_started_and_gets_no_request_until_it_takes_over() -> None:
    async def main() -> None:
        gateway = Gateway()
        gateway.brain_loop.tell(PlanReceived(PLAN))
        wanted = gateway.wanted()
        wants = wants_of(wanted, {"t": TEMPLATE})
        orders = step(wants, (), ReconcilerMemory(), 0.0).orders
        assert sorted(each.want.replica for each in orders if isinstance(each, LaunchEngine)) == [
            "t@east#0/0",
            "t@east#1/0",
        ]
        running = _running(PLAN, wanted)
        assert running is not None
        assert running.deployments == (Deployment("t", "east", 1),), "planners do not count on it"
        assert "t@east#1/0 is wanted on standby" in gateway.told
        assert gateway.brain.autoscaler.standby_usd_per_h == 1.5
        rows = {each["replica"]: each["standby"] for each in replicas_of({}, wanted, ())}
        assert rows == {"t@east#0/0": False, "t@east#1/0": True}
        for name in ("t@east#0/0", "t@east#1/0"):
            gateway.brain_loop.tell(ReplicaReady(name))
        gateway.brain_loop.tell(Tick())
        assert {gateway.asked(f"r{number}") for number in range(8)} == {"t@east#0/0"}
        with pytest.raises(InputError, match="is on standby"):
            gateway.oversight.flip({"replica": "t@east#1/0", "role": "prefill"})
        gateway.brain_loop.tell(ReplicaLost("t@east#0/0", "died"))
        gateway.brain_loop.tell(Tick())
        assert gateway.asked("after") == "t@east#1/0"
        assert "t@east#1/0 serves, from standby" in gateway.told
        again = {each.member.id: each.member.standby for each in gateway.brain.fleet.views.values()}
        assert again == {"t@east#1/0": False, "t@east#2/0": True}, "its place is filled again"
        replicas = gateway.wanted()["replicas"]
        assert isinstance(replicas, list)
        assert {each["id"]: each["standby"] for each in replicas} == again | {"t@east#0/0": False}

    asyncio.run(main())
