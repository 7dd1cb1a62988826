"""The state file: stored values are read back after restarts, migrations and failures."""

from __future__ import annotations

import sqlite3
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from potluck.control import state_store
from potluck.control.control_values import EngineInstance, EngineSpec
from potluck.control.state_store import Lease, StateError, StateStore
from potluck.core.errors import PotluckError
from potluck.core.values.layout import single
from potluck.core.values.plan import Plan

MAKE = EngineSpec("m", single("1xA10", 1, 2), "east")
PLAN = Plan("auto", (), (), (), (), (), (), 1.5, 0.0)


def test_stored_state_is_read_back_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.db"
    store = StateStore(path)
    first = store.add_plan(PLAN, 10.0, "begin")
    second = store.add_plan(replace(PLAN, cost_usd_per_h=2.0), 11.0, "more load")
    one = EngineInstance("i1", MAKE, "starting", 5.0, replica="r1")
    store.put(one, {"pid": 7})
    store.put(replace(one, state="up", url="http://h:1"))
    store.note(1.0, "start", "i1", "wanted")
    store.add_rates(100, [("m", 2.5)])
    store.set("gateway", {"url": "http://g"})
    store.close()
    again = StateStore(path)
    assert again.instances() == (replace(one, state="up", url="http://h:1"),)
    assert again.places() == {"i1": {"pid": 7}}
    newest = again.plan()
    assert newest is not None
    assert (newest.version, newest.reason, newest.plan.cost_usd_per_h) == (second, "more load", 2.0)
    oldest = again.plan(first)
    assert oldest is not None
    assert oldest.plan == PLAN
    assert [happening.what for happening in again.happenings()] == ["i1"]
    assert again.rates("m", 101, 3) == (None, 2.5, None)
    assert again.rated_models() == ("m",)
    assert again.get("gateway") == {"url": "http://g"}
    assert again.get("nothing") is None
    again.remove("i1")
    assert again.instances() == ()
    assert path.stat().st_mode & 0o077 == 0


def test_damaged_state_file_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(b"this is not a database, however long it may be " * 50)
    with pytest.raises(StateError) as error:
        StateStore(path)
    assert "damaged" in str(error.value)
    assert "mv " in str(error.value)
    assert path.read_bytes().startswith(b"this is not")


def test_state_file_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    StateStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {state_store.VERSION + 1}")
    with pytest.raises(PotluckError, match="newer release"):
        StateStore(path)


def test_older_state_file_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.db"
    store = StateStore(path)
    store.put(EngineInstance("i", MAKE, "up", 0.0))
    store.close()
    more = (*state_store.MIGRATIONS, ("ALTER TABLE instances ADD COLUMN colour TEXT NOT NULL DEFAULT 'red'",))
    monkeypatch.setattr(state_store, "MIGRATIONS", more)
    monkeypatch.setattr(state_store, "VERSION", len(more))
    again = StateStore(path)
    assert [instance.name for instance in again.instances()] == ["i"]
    assert again.rows("SELECT colour FROM instances") == [("red",)]


def test_state_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PotluckError, match="--state"):
        StateStore(tmp_path / "file" / "state.db")


def test_failed_state_change_is_rolled_back(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state.db")

    def breaks_off() -> None:
        with store.change() as db:
            db.execute("INSERT INTO settings VALUES ('a', '1')")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        breaks_off()
    assert store.get("a") is None
    store.set("a", 2)
    assert store.get("a") == 2


def test_stored_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.control.state_store.MAX_EVENTS", 20)
    monkeypatch.setattr("potluck.control.state_store.BATCH", 10)
    store = StateStore(tmp_path / "state.db")
    for place in range(60):
        store.note(float(place), "k", str(place), "")
    result = store.happenings(most=1000)
    assert [item.what for item in result] == [str(place) for place in range(40, 60)]
    assert [happening.what for happening in store.happenings(after=result[-3].id)] == ["58", "59"]


def test_lease_has_one_holder_and_passes_on_when_it_expires(tmp_path: Path) -> None:
    now = [0.0]
    one = Lease(StateStore(tmp_path / "state.db"), lambda: now[0])
    two = Lease(StateStore(tmp_path / "state.db"), lambda: now[0])
    assert one.renew()
    assert not two.renew()
    assert one.held
    assert not two.held
    now[0] = 5.0
    assert not one.held, "too little is left to begin anything"
    assert one.renew()
    now[0] = 12.0
    assert two.renew()
    assert not one.held
    assert not one.renew()
    two.release()
    assert one.renew()


def test_lease_of_a_dead_local_process_is_free_at_once(tmp_path: Path) -> None:
    one, two = (Lease(StateStore(tmp_path / "state.db")) for _ in range(2))
    assert one.renew()
    assert not two.inherit(), "its holder, this process, lives"
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = one.holder.rsplit("-", 2)[0]
    for holder, free in ((f"{host}-{ended.pid}-ab", True), (f"elsewhere-{ended.pid}-ab", False)):
        store = StateStore(tmp_path / "state.db")
        store.release(one.holder)
        store.release(two.holder)
        assert store.claim(holder, time.time(), 60.0) is not None
        assert two.inherit() is free
