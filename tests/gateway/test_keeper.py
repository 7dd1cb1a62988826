"""The keeper: what is wanted finds engines, what is gone is said, and what is asked of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from potluck.core.brain.actions import Drain, Flip, Move, Recount, Replan, Start, Stop
from potluck.core.brain.events import (
    Cancelled,
    Drained,
    Event,
    Ordered,
    ReplicaLost,
    ReplicaReady,
    Silent,
    Status,
)
from potluck.core.values.member import Member
from potluck.gateway.fleet.engine import Engine, NotAnswered
from potluck.gateway.fleet.keeper import Keeper
from potluck.gateway.fleet.roster import Entry
from potluck.gateway.fleet.status import Said
from potluck.gateway.parts import Address


class FakeCaller:
    """Writes down what engines are asked; those named in `dead` do not answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, object]] = []
        self.dead: set[str] = set()

    async def _say(self, engine: Engine, what: str, value: object) -> None:
        await asyncio.sleep(0)
        if engine.entry.url in self.dead:
            raise NotAnswered("refused")
        self.calls.append((engine.entry.url, what, value))

    async def role(self, engine: Engine, role: str) -> None:
        await self._say(engine, "role", role)

    async def drain(self, engine: Engine, *, resume: bool) -> None:
        await self._say(engine, "drain", resume)

    async def peers(self, engine: Engine, addresses: Iterable[str]) -> None:
        await self._say(engine, "peers", sorted(addresses))

    async def served_model(self, engine: Engine) -> str:
        await self._say(engine, "models", None)
        return "their-name"

    async def move(self, source: Engine, target: Engine, request: str, names: list[str], codec: str) -> None:
        await self._say(source, "move", (target.entry.url, names, codec))


class Yard:
    """A keeper with engines that are made up."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.open: dict[str, int] = {}
        self.caller = FakeCaller()
        self.keeper = Keeper(
            self.told.append,
            None,  # type: ignore[arg-type]
            lambda replica: self.open.get(replica, 0),
            codec_inside={"t": "int8"}.__getitem__,
        )
        self.keeper.caller = self.caller  # type: ignore[assignment]

    def engine(self, port: int) -> Engine:
        return next(each for each in self.keeper.engines if each.entry.address.port == port)

    async def up(
        self, port: int, *, fingerprint: str = "f", role: str = "mixed", state: str = "ready"
    ) -> None:
        engine = self.engine(port)
        status = Status(0, 0, 0, 0, 10, 10, 0.0)
        engine.said = Said("m", fingerprint, role, state, f"h:{port + 1000}", 1.0, 100, 16, status, (), "")
        self.keeper.heard(engine)
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _entries(*ports: int, **said: Any) -> list[Entry]:
    return [Entry(f"http://h:{port}", Address("h", port), **said) for port in ports]


def _member(name: str, index: int = 0) -> Member:
    return Member(name, "u", "t", index, "homogeneous", "m", "decode", "east")


def run(body: Callable[[Yard], Any]) -> None:
    async def whole() -> None:
        yard = Yard()
        await body(yard)
        await yard.keeper.close()

    asyncio.run(whole())


def test_a_wanted_replica_becomes_the_engine_that_comes_up() -> None:
    async def body(yard: Yard) -> None:
        yard.keeper.enlist(_entries(1, 2))
        yard.keeper.act([Start(_member("a"))])
        assert yard.keeper.wanted().replicas[0][3] == ""
        await yard.up(1)
        assert yard.told == [ReplicaReady("a")]
        found = yard.keeper.find("a")
        assert found is not None
        assert (found.address.port, found.kv, found.fingerprint, found.served_model) == (
            1,
            "h:1001",
            "f",
            "m",
        )
        assert ("http://h:1", "role", "decode") in yard.caller.calls
        await yard.up(2)
        assert yard.keeper.wanted().stop == ("http://h:2",)
        assert yard.told == [ReplicaReady("a")]

    run(body)


def test_all_learn_of_a_new_peer_before_it_is_ready() -> None:
    async def body(yard: Yard) -> None:
        yard.keeper.enlist(_entries(1, 2))
        yard.keeper.act([Start(_member("a")), Start(_member("b", 1))])
        await yard.up(1)
        yard.caller.calls.clear()
        await yard.up(2)
        peers = [(url, value) for url, what, value in yard.caller.calls if what == "peers"]
        assert sorted(peers) == [("http://h:1", ["h:1002"]), ("http://h:2", ["h:1001"])]
        assert yard.told == [ReplicaReady("a"), ReplicaReady("b")]

    run(body)


def test_of_an_engine_that_is_silent_the_brain_hears_before_its_requests_fail() -> None:
    async def body(yard: Yard) -> None:
        yard.keeper.on_gone.append(lambda replica: yard.told.append(Cancelled(replica)))
        yard.keeper.enlist(_entries(1))
        yard.keeper.act([Start(_member("a"))])
        yard.keeper.silent(yard.engine(1))
        assert yard.told == [], "it is nobody yet"
        await yard.up(1)
        yard.told.clear()
        yard.keeper.silent(yard.engine(1))
        assert yard.told == [Silent("a"), Cancelled("a")]
        assert yard.keeper.find("a") is not None, "it is not lost for that"

    run(body)


def test_an_engine_that_is_gone_is_lost_once_and_comes_back_as_another() -> None:
    async def body(yard: Yard) -> None:
        gone: list[str] = []
        yard.keeper.on_gone.append(gone.append)
        yard.keeper.enlist(_entries(1))
        yard.keeper.act([Start(_member("a"))])
        await yard.up(1)
        yard.keeper.lost(yard.engine(1), "refused")
        yard.keeper.lost(yard.engine(1), "refused")
        assert yard.told[1:] == [ReplicaLost("a", "refused")]
        assert gone == ["a"]
        assert yard.keeper.find("a") is None
        yard.keeper.act([Start(_member("b"))])
        await yard.up(1)
        assert yard.told[-1] == ReplicaReady("b")

    run(body)


def test_one_that_does_not_come_up_is_still_wanted() -> None:
    async def body(yard: Yard) -> None:
        yard.keeper.enlist(_entries(1, 2))
        yard.keeper.act([Start(_member("a"))])
        yard.caller.dead.add("http://h:1")
        await yard.up(1)
        assert yard.told == []
        assert yard.engine(1).note == "refused"
        await yard.up(2)
        assert yard.told == [ReplicaReady("a")]

    run(body)


def test_other_weights_are_not_mixed_in() -> None:
    async def body(yard: Yard) -> None:
        yard.keeper.enlist(_entries(1, 2))
        yard.keeper.act([Start(_member("a")), Start(_member("b", 1))])
        await yard.up(1)
        await yard.up(2, fingerprint="other")
        assert yard.told == [ReplicaReady("a")]
        assert "other weights" in yard.engine(2).note

    run(body)


def test_a_drain_waits_for_the_last_request_and_a_stop_frees_the_engine() -> None:
    async def body(yard: Yard) -> None:
        yard.keeper.enlist(_entries(1))
        yard.keeper.act([Start(_member("a"))])
        await yard.up(1)
        yard.open["a"] = 2
        yard.keeper.act([Drain("a")])
        yard.keeper.look()
        assert yard.told == [ReplicaReady("a")]
        yard.open["a"] = 0
        yard.keeper.look()
        yard.keeper.look()
        await settle()
        assert yard.told[1:] == [Drained("a")]
        assert ("http://h:1", "drain", False) in yard.caller.calls
        yard.keeper.act([Stop("a")])
        assert yard.keeper.wanted().replicas == ()
        assert yard.keeper.wanted().stop == ("http://h:1",)
        yard.keeper.act([Start(_member("b"))])
        await settle()
        assert ("http://h:1", "drain", True) in yard.caller.calls
        assert yard.told[-1] == ReplicaReady("b")

    run(body)


def test_what_another_gateway_empties_is_emptied_here_and_not_taken_back() -> None:
    async def scene(yard: Yard) -> None:
        yard.keeper.enlist(_entries(1))
        yard.keeper.act([Start(_member("a"))])
        await yard.up(1)
        assert yard.told == [ReplicaReady("a")]
        yard.open["a"] = 1
        await yard.up(1, state="draining")
        assert yard.told[1:] == [Ordered("a", "drain")]
        yard.keeper.act([Drain("a")])
        await yard.up(1, state="draining")
        yard.open["a"] = 0
        yard.keeper.look()
        assert yard.told[2:] == [Drained("a")]
        yard.keeper.act([Stop("a"), Start(_member("b"))])
        await yard.up(1, state="drained")
        assert not [call for call in yard.caller.calls if call[1] == "drain"], "it is not ours to wake"
        assert yard.engine(1).replica == ""
        await yard.up(1)
        assert yard.engine(1).replica == "b"

    run(scene)


def test_flips_recounts_moves_and_plans_asked_for() -> None:
    async def body(yard: Yard) -> None:
        yard.keeper.enlist(_entries(1, 2))
        yard.keeper.act([Start(_member("a")), Start(_member("b", 1))])
        await yard.up(1)
        await yard.up(2)
        yard.engine(1).cache_epoch = 7
        yard.keeper.act(
            [Flip("a", "prefill"), Recount("a"), Move((255,), "a", "b"), Replan((("m", 2.0),), "more")]
        )
        await settle()
        assert ("http://h:1", "role", "prefill") in yard.caller.calls
        assert yard.engine(1).cache_epoch is None
        assert ("http://h:1", "move", ("http://h:2", [f"{255:032x}"], "int8")) in yard.caller.calls
        assert yard.keeper.wanted().replan == Replan((("m", 2.0),), "more")
        yard.keeper.planned()
        assert yard.keeper.wanted().replan is None

    run(body)


def test_another_plan_may_have_kv_cross_in_another_codec() -> None:
    async def body(yard: Yard) -> None:
        yard.keeper.enlist(_entries(1))
        yard.keeper.act([Start(_member("a"))])
        await yard.up(1)
        heard: list[str] = []
        yard.keeper.on_endpoints.append(lambda: heard.append("changed"))
        found = yard.keeper.find("a")
        assert found is not None
        assert found.codec == "int8"
        yard.keeper._codec_inside = {"t": "raw"}.__getitem__
        yard.keeper.planned()
        found = yard.keeper.find("a")
        assert found is not None
        assert (found.codec, heard) == ("raw", ["changed"])

    run(body)


def test_plain_servers_get_whole_requests_under_their_own_name() -> None:
    async def body(yard: Yard) -> None:
        yard.keeper.enlist(_entries(1, kind="openai", model="m", cache_salt=True))
        yard.keeper.act([Start(_member("a"))])
        yard.keeper.heard(yard.engine(1))
        await settle()
        found = yard.keeper.find("a")
        assert found is not None
        assert (found.kind, found.served_model, found.kv) == ("openai", "their-name", "")
        assert (found.token_ids, found.cache_salt) == (False, True)
        assert yard.told == [ReplicaReady("a")]

    run(body)


def test_a_roster_without_an_engine_loses_it_and_keeps_the_others() -> None:
    async def body(yard: Yard) -> None:
        yard.keeper.enlist(_entries(1, 2))
        yard.keeper.act([Start(_member("a")), Start(_member("b", 1))])
        await yard.up(1)
        await yard.up(2)
        yard.keeper.enlist(_entries(2))
        assert yard.told[-1] == ReplicaLost("a", "was removed from the list of engines")
        assert yard.keeper.find("b") is not None

    run(body)


def test_a_role_that_did_not_reach_its_engine_is_asked_for_again() -> None:
    async def body(yard: Yard) -> None:
        yard.keeper.enlist(_entries(1))
        yard.keeper.act([Start(_member("a"))])
        await yard.up(1)
        yard.caller.dead.add("http://h:1")
        yard.keeper.act([Flip("a", "prefill")])
        await settle()
        yard.caller.dead.clear()
        yard.caller.calls.clear()
        await yard.up(1, role="decode")
        assert yard.caller.calls == [("http://h:1", "role", "prefill")]
        yard.caller.calls.clear()
        await yard.up(1, role="prefill")
        assert yard.caller.calls == []

    run(body)
