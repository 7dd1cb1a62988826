"""The reconciler converges from any engines and failures to the wanted replicas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_controller import World

from potluck.cli.fleet import orders
from potluck.control.control_values import (
    AssignEngine,
    EngineInstance,
    EngineSpec,
    ForgetEngine,
    LaunchEngine,
    StopEngine,
    WantedReplica,
)
from potluck.control.manual_changes import UpgradeTurn, due, lacks, turns
from potluck.control.reconciler import ReconcilerMemory, StartFailures, StuckReplica, step, stuck
from potluck.control.service_view import ServiceView
from potluck.control.state_store import StateStore
from potluck.core.errors import PotluckError
from potluck.core.values.layout import single

A = EngineSpec("m", single("1xA10", 1, 2), "east")
B = EngineSpec("m", single("1xL4", 1, 2), "east")


def _wanted_replica(name: str, engine_spec: EngineSpec = A, *, draining: bool = False) -> WantedReplica:
    return WantedReplica(name, engine_spec, "mixed", draining)


def _running_engine(
    name: str, replica: str = "", engine_spec: EngineSpec = A, since_s: float = 0.0
) -> EngineInstance:
    return EngineInstance(name, engine_spec, "up", since_s, f"http://h/{name}", replica)


def test_existing_engines_are_assigned_before_new_ones_start() -> None:
    result = step(
        [_wanted_replica("r1"), _wanted_replica("r2"), _wanted_replica("r3", B)],
        [_running_engine("i1", "r1"), _running_engine("i2")],
        ReconcilerMemory(),
        0.0,
    )
    assert AssignEngine("i2", "r2", "it was there and free") in result.orders
    launches = [order.want.replica for order in result.orders if isinstance(order, LaunchEngine)]
    assert launches == ["r3"]


def test_engine_is_assigned_to_a_renamed_replica() -> None:
    result = step([_wanted_replica("new")], [_running_engine("i", "old")], ReconcilerMemory(), 0.0)
    assert result.orders == (AssignEngine("i", "new", "it was there and free"),)


def test_unwanted_engine_is_stopped_after_the_linger_time_unless_pinned() -> None:
    hand = replace(_running_engine("hand"), pinned=True)
    first = step([], [_running_engine("i", "r"), hand], ReconcilerMemory(), 10.0, linger_s=5.0)
    assert [type(order) for order in first.orders] == [AssignEngine]
    later = step([], [_running_engine("i"), hand], first.memory, 15.0, linger_s=5.0)
    assert [order.instance for order in later.orders if isinstance(order, StopEngine)] == ["i"]


def test_replica_wanted_again_in_time_keeps_its_engine() -> None:
    first = step([], [_running_engine("i")], ReconcilerMemory(), 0.0, linger_s=5.0)
    again = step([_wanted_replica("r")], [_running_engine("i")], first.memory, 4.0, linger_s=5.0)
    assert [type(order) for order in again.orders] == [AssignEngine]
    assert step([], [_running_engine("i")], again.memory, 6.0, linger_s=5.0).orders == ()


def test_failed_starts_are_retried_with_exponential_backoff() -> None:
    memory, now_s, tries = ReconcilerMemory(), 0.0, []
    while now_s < 200:
        result = step([_wanted_replica("r")], [], memory, now_s)
        memory = result.memory
        if result.orders:
            tries.append(now_s)
            why = ("no memory", "no port")[len(tries) % 2]
            dead = EngineInstance(f"i{now_s}", A, "dead", now_s, problem=why)
            result = step([_wanted_replica("r")], [dead], memory, now_s)
            assert ForgetEngine(f"i{now_s}", why) in result.orders
            memory = result.memory
        else:
            assert "failed, the last as 'no " in result.waiting[0]
        now_s += 0.5
    assert tries[:5] == [0.0, 1.0, 3.0, 7.0, 15.0]
    assert tries[-1] - tries[-2] == 60.0


def test_running_engine_clears_the_failure_count() -> None:
    memory = ReconcilerMemory().failed(A, 0.0, "why").failed(A, 0.0, "why")
    assert step([_wanted_replica("r")], [_running_engine("i", "r")], memory, 1.0).memory.failures == {}


@pytest.mark.parametrize("name", ["a", "z"])
def test_failed_starts_count_while_an_older_engine_of_the_same_make_runs(name: str) -> None:
    """One that came up before says nothing of starts now, whichever the state lists first."""
    wants, memory = [_wanted_replica("r1"), _wanted_replica("r2")], ReconcilerMemory()
    for now_s in (10.0, 20.0, 40.0):
        dead = EngineInstance("m", A, "dead", now_s, replica="r2", problem=f"no memory at {now_s}")
        fleet = sorted([_running_engine(name, "r1"), dead], key=lambda one: one.name)
        memory = step(wants, fleet, memory, now_s).memory
    assert memory.failures[A].count == 3
    waits = step(wants, [_running_engine(name, "r1")], memory, 40.5)
    assert waits.orders == ()
    assert "the next in" in waits.waiting[0]
    assert step(wants, [_running_engine(name, "r1", since_s=41.0)], memory, 42.0).memory.failures == {}


def test_start_beyond_its_time_limit_counts_as_failed() -> None:
    slow = EngineInstance("i", A, "starting", 0.0, replica="r")
    result = step([_wanted_replica("r")], [slow], ReconcilerMemory(), 11.0, start_s=10.0)
    assert [type(order) for order in result.orders] == [StopEngine]
    assert result.memory.failures[A].count == 1
    again = step([], [replace(slow, problem="was not ready after 10 s")], result.memory, 12.0, start_s=10.0)
    gone = replace(slow, state="dead", problem="was not ready after 10 s")
    ended = step([], [gone], again.memory, 13.0, start_s=10.0)
    assert ended.memory.failures[A].count == 1, "one start failed, however long its end takes"


def test_long_silent_engine_is_killed_and_replaced() -> None:
    hand = replace(_running_engine("hand", "h"), pinned=True)
    wants, fleet = [_wanted_replica("r"), _wanted_replica("h")], [_running_engine("i", "r"), hand]
    both = ("i", "hand")
    first = step(wants, fleet, ReconcilerMemory(), 0.0, silent=both, silent_s=20.0)
    assert first.orders == (), "it may be busy"
    heard = step(wants, fleet, first.memory, 19.0, silent_s=20.0)
    since = step(wants, fleet, heard.memory, 20.0, silent=both, silent_s=20.0)
    assert since.orders == (), "it was heard of between"
    late = step(wants, fleet, since.memory, 40.0, silent=both, silent_s=20.0)
    assert [type(order) for order in late.orders] == [StopEngine, LaunchEngine]
    assert late.orders[0] == StopEngine("i", "was silent for 20 s", True)


def test_draining_replica_is_not_replaced() -> None:
    assert step([_wanted_replica("r", draining=True)], [], ReconcilerMemory(), 0.0).orders == ()


@given(st.data())
def test_any_fleet_converges_to_the_wanted_replicas(data: st.DataObject) -> None:
    """Whatever there is, and whatever dies or is not carried out on the way: in the end each want has one engine of
    its make, no engine has two, and none is left over."""
    makes = st.sampled_from([A, B])
    wants = [
        _wanted_replica(f"r{i}", engine_spec)
        for i, engine_spec in enumerate(data.draw(st.lists(makes, max_size=5)))
    ]
    living = {
        f"i{i}": _running_engine(f"i{i}", data.draw(st.sampled_from(["", "r0", "r1", "gone"])), engine_spec)
        for i, engine_spec in enumerate(data.draw(st.lists(makes, max_size=5)))
    }
    memory, now_s, started = ReconcilerMemory(), 0.0, 0
    for turn in range(60):
        now_s += 10.0
        result = step(wants, living.values(), memory, now_s, linger_s=20.0)
        memory = result.memory
        for order in result.orders:
            if turn < 10 and data.draw(st.booleans()):
                continue  # it was not carried out: the controller died
            match order:
                case LaunchEngine(want):
                    started += 1
                    living[f"n{started}"] = EngineInstance(
                        f"n{started}", want.make, "starting", now_s, replica=want.replica
                    )
                case AssignEngine(name, replica) if name in living:
                    living[name] = replace(living[name], replica=replica)
                case StopEngine(name) | ForgetEngine(name):
                    living.pop(name, None)
        for name, item in list(living.items()):
            if item.state == "starting":
                dies = turn < 10 and data.draw(st.booleans())
                living[name] = (
                    replace(item, state="dead", since_s=now_s, problem="died")
                    if dies
                    else replace(item, state="up", since_s=now_s, url="http://h")
                )
    assert sorted(entry.replica for entry in living.values()) == sorted(want.replica for want in wants)
    assert all(
        entry.make == next(w.make for w in wants if w.replica == entry.replica) for entry in living.values()
    )
    assert step(wants, living.values(), memory, now_s).orders == ()


def test_repeated_identical_start_failures_wait_longer() -> None:
    failures, waits = StartFailures(), []
    for number in range(9):
        # Ports and names of engines differ from try to try.
        failures = failures.more(
            100.0, f"words-0000000{number}: port 90{number} refused", f"words-0000000{number}"
        )
        waits.append(failures.again_s - 100.0)
        assert failures.in_vain == (number >= 2)
    assert waits == [1.0, 2.0, 60.0, 120.0, 240.0, 300.0, 300.0, 300.0, 300.0]
    assert failures.engine == "words-00000008", "whose log is read"
    other = failures.more(100.0, "no memory", "words-00000009")
    assert (other.count, other.alike, other.in_vain) == (10, 1, False), "another reason may pass"


def test_stuck_replicas_are_those_with_failed_starts_and_no_engine() -> None:
    wants = [
        _wanted_replica("r1"),
        _wanted_replica("r2"),
        _wanted_replica("r3", B),
        _wanted_replica("r4", draining=True),
    ]
    failures = {A: StartFailures(2, 5.0, "no memory", 2, "i9")}
    dead = EngineInstance("i9", A, "dead", 5.0, replica="r1")
    assert stuck(wants, [dead, _running_engine("i2", "r2")], failures) == (StuckReplica("r1", failures[A]),)


def test_controller_backs_off_and_status_shows_the_failure(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gateway.replicas = ["a"]
    world.machine.broken = True
    controller = world.controller()
    world.turns(controller, 50)
    store = StateStore(world.path)
    failed = [happening for happening in store.happenings() if happening.kind == "failed"]
    assert len(failed) == 3, "in 50 s, and the next not before a minute has passed"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"{failed[-1].what}.log").write_text("a line before\nno memory left\n")
    service = ServiceView(world.path.parent)
    service.controller_lives = True
    (lacking,) = service.status(world.now_s)["lacking"]
    assert lacking["why"].startswith("3 starts failed in the same way: no memory left; the next try in ")
    assert lacking["engine"] == failed[-1].what
    assert lacking["log"] == ["a line before", "no memory left"]
    world.machine.broken = False
    world.turns(controller, 20)
    assert world.last.settled
    assert store.get("stuck") == {}
    service.close()


class Fleet:
    """Copies of two templates, as a gateway's snapshot has them; each engine may be replaced or be away."""

    def __init__(self, copies: dict[str, int]) -> None:
        self.replicas: list[dict[str, Any]] = []
        self.engines: dict[str, dict[str, Any]] = {}
        for template, count in copies.items():
            for copy in range(count):
                for index in range(2):
                    self.put(
                        template, f"{template}#{copy}", index, f"http://{template}-{copy}-{index}", 1000.0
                    )
        self.asked: list[str] = []
        self.late = 0
        """Looks until a copy that was drained is replaced."""
        self.stuck = self.busy = False

    def put(self, template: str, unit: str, index: int, url: str, uptime_s: float) -> None:
        row = {"replica": f"{unit}/{index}", "unit": unit, "template": template, "index": index}
        self.replicas.append({**row, "region": "near", "state": "ready", "url": url})
        self.engines[url] = {"url": url, "up": True, "uptime_s": uptime_s}

    def snapshot(self) -> dict[str, Any]:
        if self.asked and not self.stuck:
            self.late -= 1
            if self.late == 0:
                unit = self.asked[-1].rpartition("/")[0]
                gone = [replica for replica in self.replicas if replica["unit"] == unit]
                self.replicas = [replica for replica in self.replicas if replica["unit"] != unit]
                for item in gone:
                    self.put(item["template"], f"{unit}'", item["index"], item["url"], 0.0)
        return {"replicas": list(self.replicas), "engines": list(self.engines.values())}

    def drain(self, replica: str) -> None:
        assert len(self.replicas) == len(self.engines), "only one copy at a time is away"
        if not self.asked and not self.busy:
            self.busy = True
            raise PotluckError("the gateway does not answer")
        self.asked.append(replica)
        self.late = 3


def test_upgrade_replaces_every_copy_one_after_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(orders, "POLL_INTERVAL_S", 0.001)
    fleet = Fleet({"a": 1, "b": 3})
    orders._all(fleet, fleet.drain, 10.0, as_json=True)  # type: ignore[arg-type]
    *item, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert ([text["left"] for text in item], last) == ([3, 2, 1, 0], {"copies": 4}), (
        "a line per copy, and the sum"
    )
    assert fleet.asked == ["b#0/0", "b#1/0", "b#2/0", "a#0/0"]


def test_upgrade_stops_when_a_copy_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "POLL_INTERVAL_S", 0.001)
    fleet = Fleet({"a": 3})
    fleet.stuck = True
    with pytest.raises(click.exceptions.Exit):
        orders._all(fleet, fleet.drain, 0.05, False)  # type: ignore[arg-type]
    assert len(fleet.asked) == 1, "the others are left as they are"


def test_upgrade_skips_copies_restarted_since_it_began() -> None:
    fleet = Fleet({"a": 3})
    assert len(due(fleet.snapshot(), 60.0)) == 3
    for place in range(2):
        fleet.engines[f"http://a-1-{place}"]["uptime_s"] = 20.0
    assert [turn.replicas[0] for turn in due(fleet.snapshot(), 60.0)] == ["a#0/0", "a#2/0"]


def test_upgrade_names_the_condition_it_waits_for() -> None:
    before = Fleet({"a": 2}).snapshot()
    (turn, _) = turns(before)
    assert turn == UpgradeTurn(("a#0/0", "a#0/1"), ("http://a-0-0", "http://a-0-1"))
    assert lacks(before, before, turn, 5.0) == "a#0/0 still has requests"
    after = Fleet({"a": 2})
    after.replicas = after.replicas[2:]
    assert "http://a-0-0" in lacks(after.snapshot(), before, turn, 5.0)
    for url in turn.urls:
        after.engines[url]["uptime_s"] = 1.0
    assert lacks(after.snapshot(), before, turn, 5.0) == "1 of a in near are not ready"
    after.engines[turn.urls[0]]["up"] = False
    assert "http://a-0-0" in lacks(after.snapshot(), before, turn, 5.0)
    gone = Fleet({"a": 2})
    gone.replicas, gone.engines = gone.replicas[2:], dict(list(gone.engines.items())[2:])
    for index in range(2):
        gone.put("a", "a#9", index, f"http://elsewhere-{index}", 1.0)
    assert lacks(gone.snapshot(), before, turn, 5.0) == ""
