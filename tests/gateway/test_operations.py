"""Operator orders over the admin port, and their refusals."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from potluck.core.brain.brain import Brain
from potluck.core.errors import InputError
from potluck.core.state.actions import Action, DrainReplica, FlipReplica
from potluck.core.state.events import Event, OperatorOrdered, PlanReceived, ReplicaReady
from potluck.core.state.facts import FleetFacts, ModelFacts
from potluck.core.state.policy import Policy
from potluck.core.values.layout import single
from potluck.core.values.plan import Deployment, NodeCount, Plan, PlannedReplica, ReplicaSpec, Template
from potluck.core.values.types import NodeOffer, Region, Role
from potluck.gateway.admin.app import AdminContext, build_admin
from potluck.gateway.admin.counters import Counters
from potluck.gateway.admin.metrics import GatewayMetrics
from potluck.gateway.admin.operations import Operations
from potluck.gateway.core import BrainLoop, DecisionLog
from potluck.gateway.operator_state import Cordons
from potluck.gateway.registry.registry import WantedFleet
from potluck.gateway.values import Address
from potluck.runtime.resolved_plan import EngineSetup


class OperatedFleet:
    """A Brain at its desk, with replicas of these roles, and an oversight of it."""

    def __init__(self, *roles: Role, kind: Any = "homogeneous", ready: bool = True) -> None:
        templates = tuple(
            Template(
                f"t{place}",
                kind,
                "m",
                (NodeCount("1xA10", 1),),
                (PlannedReplica(role, single("1xA10", 1, 2)),),
                (),
                "measured",
            )
            for place, role in enumerate(roles)
        )
        plan = Plan(
            "auto",
            templates,
            tuple(Deployment(template.name, "east", 1) for template in templates),
            (),
            (),
            (),
            (),
            1.0,
            0.0,
        )
        self.brain = Brain(FleetFacts({"m": ModelFacts(1e5)}, {}, {}, {}), Policy())
        self.brain_loop = BrainLoop(self.brain, self.brain.requests)
        self.done: list[Action] = []
        self.told: list[tuple[str, str]] = []
        self.brain_loop.manage = self.done.extend
        decision_log = DecisionLog(lambda: "")
        decision_log.decided = lambda what, why: self.told.append((what, why))
        self.brain_loop.watchers.append(decision_log)
        self.brain_loop.tell(PlanReceived(plan))
        self.names = list(self.brain.fleet.views)
        if ready:
            for name in self.names:
                self.brain_loop.tell(ReplicaReady(name))
        self.done.clear()
        self.drains: dict[str, float] = {}
        engines = [SimpleNamespace(entry=SimpleNamespace(address=SimpleNamespace(host="h")))]
        registry = SimpleNamespace(find=self._endpoint, engines=engines)
        self.kept: list[list[str]] = []
        self.cordons = Cordons(
            self.brain.fleet.views,
            registry,  # type: ignore[arg-type]
            self.brain_loop.tell,
            lambda marks: self.kept.append(list(marks)),
        )
        core = SimpleNamespace(
            brain=self.brain,
            brain_loop=self.brain_loop,
            registry=registry,
            drains=self.drains,
            cordons=self.cordons,
        )
        self.oversight = Operations(core)  # type: ignore[arg-type]

    def _endpoint(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(address=Address("h", self.names.index(name)))


def test_drain_order_reaches_the_brain_and_is_noted_as_by_hand() -> None:
    fleet = OperatedFleet("mixed", "mixed")
    first = fleet.names[0]
    assert fleet.oversight.drain({"replica": first}) == {"replica": first, "with_it": [], "open_requests": 0}
    assert DrainReplica(first) in fleet.done
    assert (f"{first}: drain", "by hand") in fleet.told
    assert (f"{first} drains", "by hand") in fleet.told
    assert list(fleet.drains) == ["http://h:0"], "for whoever started its engine"


def test_replica_is_cordoned_by_name_and_by_host() -> None:
    fleet = OperatedFleet("mixed", "mixed")
    views, (first, second) = fleet.brain.fleet.views, fleet.names
    assert fleet.oversight.cordon({"replica": first}) == {"cordoned": ["h:0"], "changed": [first]}
    assert (views[first].cordoned, views[second].cordoned) == (True, False)
    assert (f"{first}: cordon", "by hand") in fleet.told
    assert fleet.oversight.cordon({"node": "h"})["changed"] == [second]
    with pytest.raises(InputError, match=f"replica: {second} is cordoned with h: uncordon that"):
        fleet.oversight.uncordon({"replica": second})
    assert fleet.oversight.uncordon({"replica": first})["changed"] == [], "its host still is"
    assert fleet.oversight.uncordon({"node": "h"}) == {"cordoned": [], "changed": [first, second]}
    assert not fleet.done
    assert fleet.kept == [["h:0"], ["h", "h:0"], ["h"], []], "for a process that takes this one's place"
    with pytest.raises(InputError, match="node: h is not cordoned"):
        fleet.oversight.uncordon({"node": "h"})


def test_replica_starting_on_a_cordoned_host_is_cordoned() -> None:
    fleet = OperatedFleet("mixed", ready=False)
    fleet.cordons.inherit(["h"])
    fleet.cordons.look()
    (name,) = fleet.names
    fleet.brain_loop.tell(ReplicaReady(name))
    assert fleet.brain.fleet.views[name].serves
    fleet.cordons.look()
    assert not fleet.brain.fleet.views[name].serves


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({}, "replica: or node must be named"),
        ({"replica": "a", "node": "h"}, "replica: or node must be named"),
        ({"replica": "t0@east#9/0"}, "replica: unknown"),
        ({"node": "g"}, "node: unknown"),
        ({"node": 3}, "node: unknown"),
        ({"marks": "h"}, "marks: must be a list"),
    ],
)
def test_invalid_cordon_is_refused_in_one_line(body: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        OperatedFleet("mixed").oversight.cordon(body)


def test_role_flip_is_refused_for_the_last_replica_of_a_role() -> None:
    fleet = OperatedFleet("prefill", "prefill", "decode")
    first, second, third = fleet.names
    text = fleet.oversight.flip({"replica": first, "role": "decode"})
    assert (text["role"], text["before"], text["planned"]) == ("decode", "prefill", "prefill")
    assert fleet.done == [FlipReplica(first, "decode")]
    with pytest.raises(InputError, match="no replica to prefill for m"):
        fleet.oversight.flip({"replica": second, "role": "decode"})
    assert fleet.oversight.flip({"replica": third, "role": "prefill"})["role"] == "prefill"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({}, "replica: must be the name of one"),
        ({"replica": "t0@east#9/0"}, "replica: unknown 't0@east#9/0'; did you mean 't0@east#0/0'?"),
        ({"replica": "t0@east#0/0", "role": "both"}, "role: must be prefill or decode, is 'both'"),
        ({"replica": "t0@east#0/0", "role": "decode"}, "does both and keeps its role"),
    ],
)
def test_invalid_operator_orders_are_refused_in_one_line(body: dict[str, object], line: str) -> None:
    fleet = OperatedFleet("mixed", "mixed")
    with pytest.raises(InputError) as caught:
        fleet.oversight.flip(body)
    assert line in str(caught.value)
    assert fleet.done == []


def test_replica_that_is_not_ready_accepts_no_orders() -> None:
    fleet = OperatedFleet("mixed", ready=False)
    with pytest.raises(InputError, match="is starting; only one that is ready"):
        fleet.oversight.drain({"replica": fleet.names[0]})


def test_operator_orders_over_the_admin_port_need_its_key() -> None:
    fleet = OperatedFleet("prefill", "prefill", "decode")
    heard: list[Event] = []
    fleet.brain_loop.watchers.append(lambda at_s, event, actions: heard.append(event))
    office = AdminContext(GatewayMetrics(Counters(), fleet.oversight), fleet.oversight, key="k")

    async def run() -> list[tuple[int, Any]]:
        result = []
        async with TestServer(build_admin(office)) as server, ClientSession() as client:
            for path, body, key in (
                ("/drain", {"replica": fleet.names[0]}, ""),
                ("/drain", {"replica": fleet.names[0]}, "k"),
                ("/flip", {"replica": fleet.names[1], "role": "decode"}, "k"),
                ("/drain", {"replica": "nobody"}, "k"),
            ):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with client.post(server.make_url(path), json=body, headers=headers) as answer:
                    result.append((answer.status, await answer.json()))
        return result

    statuses, bodies = zip(*asyncio.run(run()), strict=True)
    assert statuses == (401, 200, 400, 404)
    assert "no replica to prefill" in bodies[2]["error"]["message"], "the other one is being drained"
    assert [event for event in heard if isinstance(event, OperatorOrdered)] == [
        OperatorOrdered(fleet.names[0], "drain")
    ]


def test_market_updates_and_decisions_are_exchanged_over_http() -> None:
    regions = (Region("east", (NodeOffer("1xA10", 1.0, 1),)),)
    fleet = OperatedFleet("mixed", "mixed")
    message: list[tuple[Region, ...]] = []
    core = SimpleNamespace(
        brain=fleet.brain,
        brain_loop=fleet.brain_loop,
        decision_log=fleet.brain_loop.watchers[0],
        replica_models=SimpleNamespace(resolved=SimpleNamespace(regions=regions)),
        quote=message.append,
    )
    oversight = Operations(core)  # type: ignore[arg-type]
    office = AdminContext(GatewayMetrics(Counters(), oversight), oversight)

    async def run() -> list[tuple[int, Any]]:
        result = []
        async with TestServer(build_admin(office)) as server, ClientSession() as client:
            for listed in (
                [{"name": "east", "offers": [{"node": "1xA10", "price_usd_per_h": 0.5, "available": 3}]}],
                [{"name": "mars", "offers": []}],
                [{"name": "east", "offers": [{"node": "1xL5", "price_usd_per_h": 0.5, "available": 3}]}],
                "all of it",
            ):
                async with client.put(server.make_url("/market"), json={"regions": listed}) as answer:
                    result.append((answer.status, await answer.json()))
            for after in ("0", "1", "x"):
                url = server.make_url("/decisions").with_query(after=after)
                async with client.get(url) as answer:
                    result.append((answer.status, await answer.json()))
        return result

    statuses, bodies = zip(*asyncio.run(run()), strict=True)
    assert statuses == (200, 404, 404, 400, 200, 200, 400)
    assert message == [(Region("east", (NodeOffer("1xA10", 0.5, 3),)),)]
    first, second = bodies[4], bodies[5]
    assert [item["number"] for item in first["decisions"]] == list(range(1, len(first["decisions"]) + 1))
    assert second["decisions"] == first["decisions"][1:]
    assert first["decisions"][0]["what"].startswith("the plan for")
    assert first["thinks"] == "scaling is off"


def test_wanted_replicas_include_their_planned_step_tokens() -> None:
    replica_spec = ReplicaSpec("a", "u", "t", 1, "group", "m", "mixed", "east")
    registry = SimpleNamespace(wanted=lambda: WantedFleet(((replica_spec, "mixed", False, ""),), (), None, 3))
    replica_model = SimpleNamespace(engine=EngineSetup(token_budget=192))
    core = SimpleNamespace(
        registry=registry,
        replica_models=SimpleNamespace(replica_models={("t", 1): replica_model}),
        plan_version=1,
        plan_mark="",
        market=None,
        kills={"gone"},
        drains={"http://h:1": 0.0, "http://h:2": -60.0},
        cordons=SimpleNamespace(marks=["h"]),
        brain=SimpleNamespace(fleet=SimpleNamespace(views={})),
        brain_loop=SimpleNamespace(now_s=lambda: 7.0),
    )
    wanted = Operations(core).wanted()  # type: ignore[arg-type]
    (result,) = wanted["replicas"]
    assert (result["id"], result["step_tokens"]) == ("a", 192)
    assert (wanted["cordoned"], wanted["up_s"]) == (["h"], 7.0)
    assert wanted["leave"] == ["http://h:1"], "whose engines were drained by hand, for a minute"
