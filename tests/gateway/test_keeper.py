"""The keeper: what is wanted finds engines, what is gone is said, and what is asked of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from potluck.core.state.actions import (
    CopyPrefix,
    DrainReplica,
    FlipReplica,
    Replan,
    ResyncCache,
    StartReplica,
    StopReplica,
)
from potluck.core.state.events import (
    Event,
    OperatorOrdered,
    ReplicaDrained,
    ReplicaLost,
    ReplicaReady,
    ReplicaSilent,
    ReplicaStatus,
    RequestCancelled,
)
from potluck.core.values.replica_spec import ReplicaSpec
from potluck.gateway.registry.engine_client import EngineNoAnswer, EngineRecord, StatusReport
from potluck.gateway.registry.engine_list import EngineEntry
from potluck.gateway.registry.registry import ReplicaRegistry
from potluck.gateway.values import Address


class FakeCaller:
    """Writes down what engines are asked; those named in `dead` do not answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, object]] = []
        self.dead: set[str] = set()

    async def _say(self, engine: EngineRecord, what: str, value: object) -> None:
        await asyncio.sleep(0)
        if engine.entry.url in self.dead:
            raise EngineNoAnswer("refused")
        self.calls.append((engine.entry.url, what, value))

    async def role(self, engine: EngineRecord, role: str) -> None:
        await self._say(engine, "role", role)

    async def drain(self, engine: EngineRecord, *, resume: bool) -> None:
        await self._say(engine, "drain", resume)

    async def peers(self, engine: EngineRecord, addresses: Iterable[str]) -> None:
        await self._say(engine, "peers", sorted(addresses))

    async def served_model(self, engine: EngineRecord) -> str:
        await self._say(engine, "models", None)
        return "their-name"

    async def move(
        self, source: EngineRecord, target: EngineRecord, request: str, names: list[str], codec: str
    ) -> None:
        await self._say(source, "move", (target.entry.url, names, codec))


class Yard:
    """A keeper with engines that are made up."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.open: dict[str, int] = {}
        self.caller = FakeCaller()
        self.registry = ReplicaRegistry(
            self.told.append,
            None,  # type: ignore[arg-type]
            lambda replica: self.open.get(replica, 0),
            codec_inside={"t": "int8"}.__getitem__,
        )
        self.registry.caller = self.caller  # type: ignore[assignment]

    def engine(self, port: int) -> EngineRecord:
        return next(each for each in self.registry.engines if each.entry.address.port == port)

    async def up(
        self, port: int, *, fingerprint: str = "f", role: str = "mixed", state: str = "ready"
    ) -> None:
        engine = self.engine(port)
        status = ReplicaStatus(0, 0, 0, 0, 10, 10, 0.0)
        engine.said = StatusReport(
            "m", fingerprint, role, state, f"h:{port + 1000}", 1.0, 100, 16, status, (), ""
        )
        self.registry.heard(engine)
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _entries(*ports: int, **said: Any) -> list[EngineEntry]:
    return [EngineEntry(f"http://h:{port}", Address("h", port), **said) for port in ports]


def _member(name: str, index: int = 0) -> ReplicaSpec:
    return ReplicaSpec(name, "u", "t", index, "homogeneous", "m", "decode", "east")


def run(body: Callable[[Yard], Any]) -> None:
    async def whole() -> None:
        fleet = Yard()
        await body(fleet)
        await fleet.registry.close()

    asyncio.run(whole())


def test_a_wanted_replica_becomes_the_engine_that_comes_up() -> None:
    async def body(fleet: Yard) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act([StartReplica(_member("a"))])
        assert fleet.registry.wanted().replicas[0][3] == ""
        await fleet.up(1)
        assert fleet.told == [ReplicaReady("a")]
        found = fleet.registry.find("a")
        assert found is not None
        assert (found.address.port, found.kv, found.fingerprint, found.served_model) == (
            1,
            "h:1001",
            "f",
            "m",
        )
        assert ("http://h:1", "role", "decode") in fleet.caller.calls
        await fleet.up(2)
        assert fleet.registry.wanted().stop == ("http://h:2",)
        assert fleet.told == [ReplicaReady("a")]

    run(body)


def test_all_learn_of_a_new_peer_before_it_is_ready() -> None:
    async def body(fleet: Yard) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act([StartReplica(_member("a")), StartReplica(_member("b", 1))])
        await fleet.up(1)
        fleet.caller.calls.clear()
        await fleet.up(2)
        peers = [(url, value) for url, what, value in fleet.caller.calls if what == "peers"]
        assert sorted(peers) == [("http://h:1", ["h:1002"]), ("http://h:2", ["h:1001"])]
        assert fleet.told == [ReplicaReady("a"), ReplicaReady("b")]

    run(body)


def test_of_an_engine_that_is_silent_the_brain_hears_before_its_requests_fail() -> None:
    async def body(fleet: Yard) -> None:
        fleet.registry.on_gone.append(lambda replica: fleet.told.append(RequestCancelled(replica)))
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([StartReplica(_member("a"))])
        fleet.registry.silent(fleet.engine(1))
        assert fleet.told == [], "it is nobody yet"
        await fleet.up(1)
        fleet.told.clear()
        fleet.registry.silent(fleet.engine(1))
        assert fleet.told == [ReplicaSilent("a"), RequestCancelled("a")]
        assert fleet.registry.find("a") is not None, "it is not lost for that"

    run(body)


def test_an_engine_that_is_gone_is_lost_once_and_comes_back_as_another() -> None:
    async def body(fleet: Yard) -> None:
        gone: list[str] = []
        fleet.registry.on_gone.append(gone.append)
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([StartReplica(_member("a"))])
        await fleet.up(1)
        fleet.registry.lost(fleet.engine(1), "refused")
        fleet.registry.lost(fleet.engine(1), "refused")
        assert fleet.told[1:] == [ReplicaLost("a", "refused")]
        assert gone == ["a"]
        assert fleet.registry.find("a") is None
        fleet.registry.act([StartReplica(_member("b"))])
        await fleet.up(1)
        assert fleet.told[-1] == ReplicaReady("b")

    run(body)


def test_one_that_does_not_come_up_is_still_wanted() -> None:
    async def body(fleet: Yard) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act([StartReplica(_member("a"))])
        fleet.caller.dead.add("http://h:1")
        await fleet.up(1)
        assert fleet.told == []
        assert fleet.engine(1).note == "refused"
        await fleet.up(2)
        assert fleet.told == [ReplicaReady("a")]

    run(body)


def test_other_weights_are_not_mixed_in() -> None:
    async def body(fleet: Yard) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act([StartReplica(_member("a")), StartReplica(_member("b", 1))])
        await fleet.up(1)
        await fleet.up(2, fingerprint="other")
        assert fleet.told == [ReplicaReady("a")]
        assert "other weights" in fleet.engine(2).note

    run(body)


def test_a_drain_waits_for_the_last_request_and_a_stop_frees_the_engine() -> None:
    async def body(fleet: Yard) -> None:
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([StartReplica(_member("a"))])
        await fleet.up(1)
        fleet.open["a"] = 2
        fleet.registry.act([DrainReplica("a")])
        fleet.registry.look()
        assert fleet.told == [ReplicaReady("a")]
        fleet.open["a"] = 0
        fleet.registry.look()
        fleet.registry.look()
        await settle()
        assert fleet.told[1:] == [ReplicaDrained("a")]
        assert ("http://h:1", "drain", False) in fleet.caller.calls
        fleet.registry.act([StopReplica("a")])
        assert fleet.registry.wanted().replicas == ()
        assert fleet.registry.wanted().stop == ("http://h:1",)
        fleet.registry.act([StartReplica(_member("b"))])
        await settle()
        assert ("http://h:1", "drain", True) in fleet.caller.calls
        assert fleet.told[-1] == ReplicaReady("b")

    run(body)


def test_what_another_gateway_empties_is_emptied_here_and_not_taken_back() -> None:
    async def scenario(fleet: Yard) -> None:
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([StartReplica(_member("a"))])
        await fleet.up(1)
        assert fleet.told == [ReplicaReady("a")]
        fleet.open["a"] = 1
        await fleet.up(1, state="draining")
        assert fleet.told[1:] == [OperatorOrdered("a", "drain")]
        fleet.registry.act([DrainReplica("a")])
        await fleet.up(1, state="draining")
        fleet.open["a"] = 0
        fleet.registry.look()
        assert fleet.told[2:] == [ReplicaDrained("a")]
        fleet.registry.act([StopReplica("a"), StartReplica(_member("b"))])
        await fleet.up(1, state="drained")
        assert not [call for call in fleet.caller.calls if call[1] == "drain"], "it is not ours to wake"
        assert fleet.engine(1).replica == ""
        await fleet.up(1)
        assert fleet.engine(1).replica == "b"

    run(scenario)


def test_flips_recounts_moves_and_plans_asked_for() -> None:
    async def body(fleet: Yard) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act([StartReplica(_member("a")), StartReplica(_member("b", 1))])
        await fleet.up(1)
        await fleet.up(2)
        fleet.engine(1).cache_epoch = 7
        fleet.registry.act(
            [
                FlipReplica("a", "prefill"),
                ResyncCache("a"),
                CopyPrefix((255,), "a", "b"),
                Replan((("m", 2.0),), "more"),
            ]
        )
        await settle()
        assert ("http://h:1", "role", "prefill") in fleet.caller.calls
        assert fleet.engine(1).cache_epoch is None
        assert ("http://h:1", "move", ("http://h:2", [f"{255:032x}"], "int8")) in fleet.caller.calls
        assert fleet.registry.wanted().replan == Replan((("m", 2.0),), "more")
        fleet.registry.planned()
        assert fleet.registry.wanted().replan is None

    run(body)


def test_another_plan_may_have_kv_cross_in_another_codec() -> None:
    async def body(fleet: Yard) -> None:
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([StartReplica(_member("a"))])
        await fleet.up(1)
        heard: list[str] = []
        fleet.registry.on_endpoints.append(lambda: heard.append("changed"))
        found = fleet.registry.find("a")
        assert found is not None
        assert found.codec == "int8"
        fleet.registry._codec_inside = {"t": "raw"}.__getitem__
        fleet.registry.planned()
        found = fleet.registry.find("a")
        assert found is not None
        assert (found.codec, heard) == ("raw", ["changed"])

    run(body)


def test_plain_servers_get_whole_requests_under_their_own_name() -> None:
    async def body(fleet: Yard) -> None:
        fleet.registry.enlist(_entries(1, kind="openai", model="m", cache_salt=True))
        fleet.registry.act([StartReplica(_member("a"))])
        fleet.registry.heard(fleet.engine(1))
        await settle()
        found = fleet.registry.find("a")
        assert found is not None
        assert (found.kind, found.served_model, found.kv) == ("openai", "their-name", "")
        assert (found.token_ids, found.cache_salt) == (False, True)
        assert fleet.told == [ReplicaReady("a")]

    run(body)


def test_a_roster_without_an_engine_loses_it_and_keeps_the_others() -> None:
    async def body(fleet: Yard) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act([StartReplica(_member("a")), StartReplica(_member("b", 1))])
        await fleet.up(1)
        await fleet.up(2)
        fleet.registry.enlist(_entries(2))
        assert fleet.told[-1] == ReplicaLost("a", "was removed from the list of engines")
        assert fleet.registry.find("b") is not None

    run(body)


def test_a_role_that_did_not_reach_its_engine_is_asked_for_again() -> None:
    async def body(fleet: Yard) -> None:
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([StartReplica(_member("a"))])
        await fleet.up(1)
        fleet.caller.dead.add("http://h:1")
        fleet.registry.act([FlipReplica("a", "prefill")])
        await settle()
        fleet.caller.dead.clear()
        fleet.caller.calls.clear()
        await fleet.up(1, role="decode")
        assert fleet.caller.calls == [("http://h:1", "role", "prefill")]
        fleet.caller.calls.clear()
        await fleet.up(1, role="prefill")
        assert fleet.caller.calls == []

    run(body)
