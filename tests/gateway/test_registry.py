"""The engine registry: matching replicas to engines, losses and orders."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import FormatError, PotluckError
from potluck.core.state import actions, events
from potluck.core.values.plan import ReplicaSpec
from potluck.gateway.registry import registry
from potluck.gateway.registry.engine_client import (
    EngineNoAnswer,
    EngineRecord,
    StatusReport,
    read_status,
)
from potluck.gateway.registry.engine_list import EngineEntry, address_of, matched, read_engines
from potluck.gateway.registry.registry import ReplicaRegistry, abilities_of
from potluck.gateway.values import Address, Endpoint


class FakeCaller:
    """Writes down what engines are asked; those named in `dead` do not answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, object]] = []
        self.dead: set[str] = set()
        self.slow = asyncio.Event()  # What is asked of those named in `late` waits for it.
        self.late: set[str] = set()

    async def _say(self, engine: EngineRecord, what: str, value: object) -> None:
        await asyncio.sleep(0)
        if engine.entry.url in self.late:
            await self.slow.wait()
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


class RegistryHarness:
    def __init__(self) -> None:
        self.told: list[events.Event] = []
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
        return next(item for item in self.registry.engines if item.entry.address.port == port)

    async def up(self, port: int, **said: Any) -> None:
        engine = self.engine(port)
        status = events.ReplicaStatus(0, 0, 0, 0, 10, 10, 0.0)
        usual = StatusReport("m", "f", "mixed", "ready", f"h:{port + 1000}", 1.0, status, (), "")
        engine.said = replace(usual, **said)
        self.registry.heard(engine)
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _entries(*ports: int, **said: Any) -> list[EngineEntry]:
    return [EngineEntry(f"http://h:{port}", **said) for port in ports]


def _replica_spec(name: str, index: int = 0) -> ReplicaSpec:
    return ReplicaSpec(name, "u", "t", index, "homogeneous", "m", "decode", "east")


def run(body: Callable[[RegistryHarness], Any]) -> None:
    async def whole() -> None:
        fleet = RegistryHarness()
        await body(fleet)
        await fleet.registry.close()

    asyncio.run(whole())


def test_wanted_replica_is_assigned_to_an_engine_that_comes_up() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act([actions.StartReplica(_replica_spec("a"))])
        assert fleet.registry.wanted().replicas[0][3] == ""
        await fleet.up(1)
        assert fleet.told == [events.ReplicaReady("a")]
        result = fleet.registry.find("a")
        assert result is not None
        assert (result.address.port, result.kv, result.fingerprint, result.served_model) == (
            1,
            "h:1001",
            "f",
            "m",
        )
        assert ("http://h:1", "role", "decode") in fleet.caller.calls
        await fleet.up(2)
        assert fleet.registry.wanted().stop == ("http://h:2",)
        assert fleet.told == [events.ReplicaReady("a")]

    run(body)


def test_peers_learn_of_a_new_engine_before_it_is_ready() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act(
            [actions.StartReplica(_replica_spec("a")), actions.StartReplica(_replica_spec("b", 1))]
        )
        await fleet.up(1)
        fleet.caller.calls.clear()
        await fleet.up(2)
        peers = [(url, value) for url, what, value in fleet.caller.calls if what == "peers"]
        assert sorted(peers) == [("http://h:1", ["h:1002"]), ("http://h:2", ["h:1001"])]
        assert fleet.told == [events.ReplicaReady("a"), events.ReplicaReady("b")]

    run(body)


def test_two_new_engines_are_ready_only_once_they_know_their_peers() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1, 2))
        for name in ("a", "b"):
            fleet.registry.act([actions.StartReplica(_replica_spec(name, ord(name)))])
        caller, say = fleet.caller, fleet.caller.peers

        async def peers(engine: EngineRecord, addresses: Iterable[str]) -> None:
            caller.late.add("http://h:2")  # the second is long in hearing of its peers
            await say(engine, addresses)

        caller.peers = peers  # type: ignore[method-assign]
        for port in (1, 2):
            engine = fleet.engine(port)
            status = events.ReplicaStatus(0, 0, 0, 0, 10, 10, 0.0)
            engine.said = StatusReport("m", "f", "decode", "ready", f"h:{port + 1000}", 1.0, status, (), "")
            engine.up = True
        for port in (1, 2):
            fleet.registry.heard(fleet.engine(port))
        await settle()
        assert fleet.told == [], "one does not know the other yet"
        caller.slow.set()
        await settle()
        assert {event.replica for event in fleet.told if isinstance(event, events.ReplicaReady)} == {"a", "b"}
        assert all(engine.peers == {"h:1001", "h:1002"} for engine in fleet.registry.engines)

    run(body)


def test_engine_that_cannot_be_sent_its_peers_is_not_ready_and_is_retried() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act([actions.StartReplica(_replica_spec("a"))])
        await fleet.up(1, role="decode")
        fleet.caller.dead.add("http://h:1")
        fleet.registry.act([actions.StartReplica(_replica_spec("b"))])
        await fleet.up(2, role="decode")
        assert [event.replica for event in fleet.told] == ["a", "b"], (
            "what another does not hear holds up nobody"
        )  # type: ignore[attr-defined]
        assert fleet.engine(1).peers is None
        fleet.caller.dead.clear()
        await fleet.up(1, role="decode")
        assert fleet.engine(1).peers == {"h:1001", "h:1002"}, "told again once it answers"
        fleet.registry.enlist(_entries(1, 2, 3))
        fleet.caller.dead.add("http://h:3")
        fleet.registry.act([actions.StartReplica(_replica_spec("c"))])
        await fleet.up(3, role="decode")
        assert (len(fleet.told), fleet.engine(3).replica) == (2, "")

    run(body)


def test_unresponsive_engine_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PEERS_WAIT_S", 0.01)

    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(*range(1, 9)))
        fleet.registry.act([actions.StartReplica(_replica_spec("a"))])
        await fleet.up(1, role="decode")
        fleet.caller.late.add("http://h:1")  # It never answers again.
        for port in range(2, 9):
            fleet.registry.act([actions.StartReplica(_replica_spec(f"b{port}", port))])
            await fleet.up(port, role="decode")
        await asyncio.sleep(0.1)
        await settle()
        assert len(fleet.told) == 8
        fleet.caller.slow.set()
        await settle()
        assert len(fleet.engine(1).peers or ()) == 8, "it hears of all at once, and of the others it need not"
        assert sum(url == "http://h:1" and what == "peers" for url, what, _ in fleet.caller.calls) <= 3

    run(body)


def test_silent_replica_is_reported_before_its_requests_fail() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.on_gone.append(lambda replica: fleet.told.append(events.RequestCancelled(replica)))
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([actions.StartReplica(_replica_spec("a"))])
        fleet.registry.silent(fleet.engine(1))
        assert fleet.told == [], "it is nobody yet"
        await fleet.up(1)
        fleet.told.clear()
        fleet.registry.silent(fleet.engine(1))
        assert fleet.told == [events.ReplicaSilent("a"), events.RequestCancelled("a")]
        assert fleet.registry.find("a") is not None, "it is not lost for that"

    run(body)


def test_stopped_engine_is_lost_once_and_returns_as_another_replica() -> None:
    async def body(fleet: RegistryHarness) -> None:
        gone: list[str] = []
        fleet.registry.on_gone.append(gone.append)
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([actions.StartReplica(_replica_spec("a"))])
        await fleet.up(1)
        fleet.registry.lost(fleet.engine(1), "refused")
        fleet.registry.lost(fleet.engine(1), "refused")
        assert fleet.told[1:] == [events.ReplicaLost("a", "refused")]
        assert gone == ["a"]
        assert fleet.registry.find("a") is None
        fleet.registry.act([actions.StartReplica(_replica_spec("b"))])
        await fleet.up(1, kv_version=3, max_running=16)
        assert fleet.told[-1] == events.ReplicaReady("b", 3, 16)

    run(body)


def test_replica_that_does_not_come_up_is_still_wanted() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act([actions.StartReplica(_replica_spec("a"))])
        fleet.caller.dead.add("http://h:1")
        await fleet.up(1)
        assert fleet.told == []
        assert fleet.engine(1).note == "refused"
        await fleet.up(2)
        assert fleet.told == [events.ReplicaReady("a")]

    run(body)


def test_engine_with_other_weights_is_not_used() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act(
            [actions.StartReplica(_replica_spec("a")), actions.StartReplica(_replica_spec("b", 1))]
        )
        await fleet.up(1)
        await fleet.up(2, fingerprint="other")
        assert fleet.told == [events.ReplicaReady("a")]
        assert "other weights" in fleet.engine(2).note

    run(body)


def test_drain_waits_for_the_last_request_and_stop_frees_the_engine() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([actions.StartReplica(_replica_spec("a"))])
        await fleet.up(1)
        fleet.open["a"] = 2
        fleet.registry.act([actions.DrainReplica("a")])
        fleet.registry.look()
        assert fleet.told == [events.ReplicaReady("a")]
        fleet.open["a"] = 0
        fleet.registry.look()
        fleet.registry.look()
        await settle()
        assert fleet.told[1:] == [events.ReplicaDrained("a")]
        assert ("http://h:1", "drain", False) in fleet.caller.calls
        fleet.registry.act([actions.StopReplica("a")])
        assert fleet.registry.wanted().replicas == ()
        assert fleet.registry.wanted().stop == ("http://h:1",)
        fleet.registry.act([actions.StartReplica(_replica_spec("b"))])
        await settle()
        assert ("http://h:1", "drain", True) in fleet.caller.calls
        assert fleet.told[-1] == events.ReplicaReady("b")

    run(body)


def test_replica_drained_by_another_gateway_is_drained_here() -> None:
    async def scenario(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([actions.StartReplica(_replica_spec("a"))])
        await fleet.up(1)
        assert fleet.told == [events.ReplicaReady("a")]
        fleet.open["a"] = 1
        await fleet.up(1, state="draining")
        assert fleet.told[1:] == [events.OperatorOrdered("a", "drain")]
        fleet.registry.act([actions.DrainReplica("a")])
        await fleet.up(1, state="draining")
        fleet.open["a"] = 0
        fleet.registry.look()
        assert fleet.told[2:] == [events.ReplicaDrained("a")]
        fleet.registry.act([actions.StopReplica("a"), actions.StartReplica(_replica_spec("b"))])
        await fleet.up(1, state="drained")
        assert not [call for call in fleet.caller.calls if call[1] == "drain"], "it is not ours to wake"
        assert fleet.engine(1).replica == ""
        await fleet.up(1)
        assert fleet.engine(1).replica == "b"

    run(scenario)


def test_registry_carries_out_flips_cache_resyncs_and_replans() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act(
            [actions.StartReplica(_replica_spec("a")), actions.StartReplica(_replica_spec("b", 1))]
        )
        await fleet.up(1)
        await fleet.up(2)
        fleet.engine(1).cache_epoch = 7
        fleet.registry.act(
            [
                actions.FlipReplica("a", "prefill"),
                actions.ResyncCache("a"),
                actions.Replan((("m", 2.0),), "more"),
            ]
        )
        await settle()
        assert ("http://h:1", "role", "prefill") in fleet.caller.calls
        assert fleet.engine(1).cache_epoch is None
        assert fleet.registry.wanted().replan == actions.Replan((("m", 2.0),), "more")
        fleet.registry.planned()
        assert fleet.registry.wanted().replan is None

    run(body)


def test_new_plan_changes_the_kv_codec_between_regions() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([actions.StartReplica(_replica_spec("a"))])
        await fleet.up(1)
        heard: list[str] = []
        fleet.registry.on_endpoints.append(lambda: heard.append("changed"))
        result = fleet.registry.find("a")
        assert result is not None
        assert result.codec == "int8"
        fleet.registry._codec_inside = {"t": "raw"}.__getitem__
        fleet.registry.planned()
        result = fleet.registry.find("a")
        assert result is not None
        assert (result.codec, heard) == ("raw", ["changed"])

    run(body)


def test_plain_servers_get_whole_requests_under_their_served_model_name() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1, kind="openai", model="m", cache_salt=True))
        fleet.registry.act([actions.StartReplica(_replica_spec("a"))])
        fleet.registry.heard(fleet.engine(1))
        await settle()
        result = fleet.registry.find("a")
        assert result is not None
        assert (result.kind, result.served_model, result.kv) == ("openai", "their-name", "")
        assert (result.token_ids, result.cache_salt) == (False, True)
        assert fleet.told == [events.ReplicaReady("a")]

    run(body)


def test_roster_without_an_engine_loses_it_and_keeps_the_others() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1, 2))
        fleet.registry.act(
            [actions.StartReplica(_replica_spec("a")), actions.StartReplica(_replica_spec("b", 1))]
        )
        await fleet.up(1)
        await fleet.up(2)
        fleet.registry.enlist(_entries(2))
        assert fleet.told[-1] == events.ReplicaLost("a", "was removed from the list of engines")
        assert fleet.registry.find("b") is not None

    run(body)


def test_role_change_that_did_not_reach_its_engine_is_retried() -> None:
    async def body(fleet: RegistryHarness) -> None:
        fleet.registry.enlist(_entries(1))
        fleet.registry.act([actions.StartReplica(_replica_spec("a"))])
        await fleet.up(1)
        fleet.caller.dead.add("http://h:1")
        fleet.registry.act([actions.FlipReplica("a", "prefill")])
        await settle()
        fleet.caller.dead.clear()
        fleet.caller.calls.clear()
        await fleet.up(1, role="decode")
        assert fleet.caller.calls == [("http://h:1", "role", "prefill")]
        fleet.caller.calls.clear()
        await fleet.up(1, role="prefill")
        assert fleet.caller.calls == []

    run(body)


ONE = Endpoint("a", "m", "here", Address("h", 1), own=True, adapters=("x", "y"))


def test_model_abilities_are_those_common_to_all_its_engines() -> None:
    other = replace(ONE, replica="b", adapters=("y", "z"))
    assert abilities_of((ONE, other)) == (frozenset({"m"}), {"y": "m"})
    assert abilities_of((ONE, replace(other, own=False)))[0] == frozenset()
    elsewhere = replace(ONE, replica="c", model="y", own=False, adapters=())
    assert abilities_of((ONE, elsewhere)) == (frozenset({"m"}), {"x": "m"}), "a model is no adapter"
    assert abilities_of(()) == (frozenset(), {})


def test_engine_status_reports_abilities_and_adapters() -> None:
    told = {"state": "ready", "own": True, "adapters": ["b", "a", 7], "max_running": 16}
    status = read_status(json.dumps(told).encode())
    assert (status.own, status.adapters, status.max_running) == (True, ("a", "b"), 16)
    assert not read_status(b'{"state": "ready", "own": "yes"}').own
    with pytest.raises(FormatError, match="adapters"):
        read_status(b'{"state": "ready", "adapters": "a"}')


def _listed_replica_spec(
    name: str, template: str = "t", index: int = 0, region: str = "east", model: str = "m"
) -> ReplicaSpec:
    return ReplicaSpec(name, "u", template, index, "homogeneous", model, "mixed", region)


def _entry(place: int, **said: object) -> EngineEntry:
    return EngineEntry(f"http://h:{place}", **said)  # type: ignore[arg-type]


def test_engines_file_is_parsed_with_keys_and_addresses(tmp_path: Path) -> None:
    (tmp_path / "east.key").write_text("secret\n")
    roster = read_engines(
        """
        engines:
          - {url: "http://10.0.0.5:8100/", template: combo, index: 1, region: east, key_file: east.key}
          - {url: "https://[::1]", kind: openai, model: llama, served_model: meta/llama, token_ids: true}
        """,
        "engines.yaml",
        tmp_path,
    )
    first, second = roster
    assert first.url == "http://10.0.0.5:8100"
    assert first.address == Address("10.0.0.5", 8100)
    assert (first.template, first.index, first.key) == ("combo", 1, "secret")
    assert "secret" not in repr(first)
    assert second.address == Address("::1", 443, True)
    assert second.token_ids


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engines: 3", "must be a list"),
        ("{", "is not YAML"),
        ("engines: [{url: 'ftp://h:1'}]", "url"),
        ("engines: [{url: 'http://h:1/v1', kind: segments}]", "behind the port"),
        ("engines: [{url: 'http://u@h:1'}]", "no user or password"),
        ("engines: [{url: 'http://h:99999'}]", "no address"),
        ("engines: [{url: 'http://h:1', colour: red}]", "colour"),
        ("engines: [{url: 'http://h:1', index: -1}]", "index"),
        ("engines: [{url: 'http://h:1', index: true}]", "index"),
        ("engines: [{url: 'http://h:1', kind: vllm}]", "kind"),
        ("engines: [{url: 'http://h:1', model: 3}]", "model"),
        ("engines: [{url: 'http://h:1'}, {url: 'http://h:1'}]", "twice"),
        ("engines: [{url: 'http://h:1', key_file: /etc/passwd}]", "key_file"),
        ("engines: [7]", "mapping"),
        ("engines: [{}]", "url"),
    ],
)
def test_invalid_engines_file_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(PotluckError) as error:
        read_engines(text, "engines.yaml")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@given(st.text(max_size=80))
def test_arbitrary_engines_file_raises_only_project_errors(text: str) -> None:
    with suppress(PotluckError):
        read_engines(text, "roster")


@given(st.text(max_size=40))
def test_any_url_is_an_address_or_refused(text: str) -> None:
    try:
        address = address_of(text, "url")
    except PotluckError:
        return
    assert address.host
    assert 0 <= address.port < 1 << 16


def test_engine_with_the_most_specific_entry_is_matched_first() -> None:
    members = [_listed_replica_spec("a", index=0), _listed_replica_spec("b", index=1)]
    anybody, second = _entry(1), _entry(2, template="t", index=1)
    assert {(m.id, e.address.port) for m, e in matched(members, [anybody, second])} == {("b", 2), ("a", 1)}


def test_engine_started_for_a_replica_is_matched_only_to_it() -> None:
    members = [_listed_replica_spec("a"), _listed_replica_spec("b")]
    assert [m.id for m, _ in matched(members, [_entry(1, replica="b")])] == ["b"]
    assert matched(members, [_entry(1, replica="gone")]) == []


@given(
    st.lists(st.tuples(st.sampled_from("tu"), st.integers(0, 2), st.sampled_from(["e", "w"])), max_size=8),
    st.lists(
        st.tuples(
            st.sampled_from(["", "t", "u"]), st.sampled_from([None, 0, 1, 2]), st.sampled_from(["", "e", "w"])
        ),
        max_size=8,
    ),
)
def test_each_engine_is_matched_at_most_once_and_suits_its_replica(
    wanted: list[tuple[str, int, str]], there: list[tuple[str, int | None, str]]
) -> None:
    members = [_listed_replica_spec(str(place), *text) for place, text in enumerate(wanted)]
    entries = [_entry(p, template=t, index=i, region=r) for p, (t, i, r) in enumerate(there)]
    result = matched(members, entries)
    assert len({m.id for m, _ in result}) == len({e.url for _, e in result}) == len(result)
    assert all(entry.suits(replica_spec) for replica_spec, entry in result)
    free_members = [m for m in members if m.id not in {x.id for x, _ in result}]
    free_entries = [e for e in entries if e.url not in {x.url for _, x in result}]
    assert not any(e.suits(m) for m in free_members for e in free_entries)
