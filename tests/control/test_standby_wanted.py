"""A copy on standby, from the Brain by the gateway's port to the controller: it is started, and not routed to."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from potluck.control.gateway import wants_of
from potluck.control.planning import _running
from potluck.control.step import Memory, step
from potluck.control.values import Launch
from potluck.control.view import replicas_of
from potluck.core.brain.actions import Run
from potluck.core.brain.brain import Brain
from potluck.core.brain.events import Arrived, Planned, ReplicaLost, ReplicaReady, Tick
from potluck.core.brain.facts import Facts, ModelFacts
from potluck.core.brain.policy import Policy
from potluck.core.errors import InputError
from potluck.core.values.layout import single
from potluck.core.values.plan import Bucket, BucketCapacity, Deployment, NodeCount, Plan, Replica, Template
from potluck.core.values.types import Offer, Region, Request
from potluck.gateway.desk.desk import Desk
from potluck.gateway.desk.herald import Herald
from potluck.gateway.desk.oversight import Oversight
from potluck.gateway.fleet.keeper import Keeper

TEMPLATE = Template(
    "t",
    "homogeneous",
    "m",
    (NodeCount("1xA10", 1),),
    (Replica("mixed", single("1xA10", 1, 2)),),
    (BucketCapacity(0, 0.0, 0.0, 5.0, 0.1, 0.01),),
    "measured",
)
PLAN = Plan(
    "auto",
    (TEMPLATE,),
    (Deployment("t", "east", 1),),
    (Bucket("m", 0, 100_000, 1.0),),
    (),
    (),
    (),
    1.5,
    0.0,
)
REGIONS = (Region("east", (Offer("1xA10", 1.5, 4),)),)


class Gateway:
    """A Brain at its desk with a keeper of engines, and what the operators' port says of them."""

    def __init__(self) -> None:
        self.brain = Brain(
            Facts({"m": ModelFacts(1e5)}, {}, {}, {}, regions=REGIONS), Policy(standby=1, admission=False)
        )
        self.desk = Desk(self.brain, self.brain.flights)
        self.keeper = Keeper(lambda event: None, None, lambda replica: 0)  # type: ignore[arg-type]
        self.desk.manage = self.keeper.act
        self.runs: list[Run] = []
        self.told: list[str] = []
        herald = Herald(lambda: "")
        herald.decided = lambda what, why: self.told.append(what)
        self.desk.watchers.append(herald)
        self.oversight = Oversight(
            SimpleNamespace(
                brain=self.brain,
                desk=self.desk,
                keeper=self.keeper,
                plan_version=1,
                plan_mark="",
                market=None,
                kits=SimpleNamespace(kits={}),
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
        actions = self.brain.on(self.desk.now_s(), Arrived(Request(name, "m", 0.0, 100, 10)))
        (run,) = [each for each in actions if isinstance(each, Run)]
        return run.route.segments[0].replica


def test_it_is_wanted_and_started_and_gets_no_request_until_it_takes_over() -> None:
    async def main() -> None:
        gateway = Gateway()
        gateway.desk.tell(Planned(PLAN))
        wanted = gateway.wanted()
        wants = wants_of(wanted, {"t": TEMPLATE})
        orders = step(wants, (), Memory(), 0.0).orders
        assert sorted(each.want.replica for each in orders if isinstance(each, Launch)) == [
            "t@east#0/0",
            "t@east#1/0",
        ]
        running = _running(PLAN, wanted)
        assert running is not None
        assert running.deployments == (Deployment("t", "east", 1),), "planners do not count on it"
        assert "t@east#1/0 is wanted on standby" in gateway.told
        assert gateway.brain.steward.standby_usd_per_h == 1.5
        rows = {each["replica"]: each["standby"] for each in replicas_of({}, wanted, ())}
        assert rows == {"t@east#0/0": False, "t@east#1/0": True}
        for name in ("t@east#0/0", "t@east#1/0"):
            gateway.desk.tell(ReplicaReady(name))
        gateway.desk.tell(Tick())
        assert {gateway.asked(f"r{number}") for number in range(8)} == {"t@east#0/0"}
        with pytest.raises(InputError, match="is on standby"):
            gateway.oversight.flip({"replica": "t@east#1/0", "role": "prefill"})
        gateway.desk.tell(ReplicaLost("t@east#0/0", "died"))
        gateway.desk.tell(Tick())
        assert gateway.asked("after") == "t@east#1/0"
        assert "t@east#1/0 serves, from standby" in gateway.told
        again = {each.member.id: each.member.standby for each in gateway.brain.fleet.views.values()}
        assert again == {"t@east#1/0": False, "t@east#2/0": True}, "its place is filled again"
        replicas = gateway.wanted()["replicas"]
        assert isinstance(replicas, list)
        assert {each["id"]: each["standby"] for each in replicas} == again | {"t@east#0/0": False}

    asyncio.run(main())
