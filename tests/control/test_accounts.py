"""Keys and usage in the state: records count once, and keys reach the gateway's key file."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from potluck.api.http import HttpRefusal
from potluck.cli.main import run
from potluck.control.accounts import (
    KEY_FILE,
    Accounts,
    KeptKey,
    UsageRead,
    UsageReader,
    add_key,
    count_all,
    kept_keys,
    publish_keys,
    revoke_key,
    rotate_key,
    used,
)
from potluck.control.state_store import VERSION, StateError, StateStore
from potluck.core.errors import CapacityError, InputError, PotluckError, UnknownNameError
from potluck.gateway.openai.keys import KeyRing, new_key

HOUR = 480_000  # Of 2024.


def usage_line(hour: int = HOUR, **more: Any) -> str:
    from datetime import UTC, datetime

    when = datetime.fromtimestamp(hour * 3600 + 5, UTC).isoformat(timespec="milliseconds")
    return json.dumps(
        {
            "time": when,
            "request": "req-1",
            "key": "ann",
            "tenant": "co",
            "model": "m",
            "class": "standard",
            "prompt_tokens": 100,
            "cached_tokens": 60,
            "output_tokens": 11,
            "outcome": "stop",
            "status": 200,
            "seconds": 1.0,
            "estimated": False,
        }
        | more
    )


def write(path: Path, *lines: str, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(lines) + end)


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path / "state.db")


def total(store: StateStore) -> dict[str, Any]:
    (row,) = used(store, ())
    return row


# Usage.


def test_usage_record_written_twice_counts_once(tmp_path: Path, store: StateStore) -> None:
    """By a gateway that was killed, and by the one that took its place."""
    path = tmp_path / "usage.jsonl"
    write(
        path,
        usage_line(id="a"),
        usage_line(id="b"),
        usage_line(id="a", output_tokens=99),
        usage_line(),
        usage_line(),
    )
    count_all(store, tmp_path, 7.0)
    write(path, usage_line(HOUR + 1, id="b"), usage_line(HOUR + 1, id="c"))
    count_all(store, tmp_path, 8.0)
    assert (total(store)["requests"], total(store)["output_tokens"]) == (5, 55)
    write(path, usage_line(HOUR + 9, id="d"))
    count_all(store, tmp_path, 9.0)
    assert store.rows("SELECT id FROM usage_ids") == [("d",)], "ids are not remembered for ever"
    (tmp_path / "state.db").unlink()
    again = StateStore(tmp_path / "state.db")
    count_all(again, tmp_path, 10.0)
    assert total(again)["requests"] == 6


def test_usage_record_behind_a_truncated_one_counts(tmp_path: Path, store: StateStore) -> None:
    """Somebody was killed within a line, and another process wrote on."""
    write(
        tmp_path / "usage.jsonl",
        usage_line(),
        usage_line(id="x")[:-9] + usage_line(id="y"),
        usage_line()[:-9] + usage_line()[:-3],
    )
    count_all(store, tmp_path, 7.0)
    assert total(store)["requests"] == 2


def test_usage_line_with_several_records_and_torn_pieces_counts_every_whole_record(
    tmp_path: Path, store: StateStore
) -> None:
    """A record may lack only its line end, and more than one record may follow it on the line."""
    torn = usage_line(id="torn")[:-9]
    write(
        tmp_path / "usage.jsonl",
        usage_line(id="a") + usage_line(id="b"),
        torn + usage_line(id="c") + torn + usage_line(id="a"),
    )
    assert UsageReader(store, tmp_path).turn() == UsageRead(3, 2)
    assert total(store)["requests"] == 3


def test_usage_records_are_counted_once_across_readers(tmp_path: Path, store: StateStore) -> None:
    now = tmp_path / "usage.jsonl"
    write(now, usage_line(), usage_line(HOUR + 1, key="bob", outcome="overloaded", output_tokens=0))
    assert UsageReader(store, tmp_path).turn() == UsageRead(2)
    assert UsageReader(StateStore(tmp_path / "state.db"), tmp_path).turn() == UsageRead()
    write(now, usage_line(estimated=True), end="")
    reader = UsageReader(store, tmp_path)
    assert reader.turn() == UsageRead(), "its end has not come yet"
    write(now, "")
    assert reader.turn() == UsageRead(1)
    now.rename(tmp_path / "usage-2024-10-04.jsonl")  # a day is over
    write(now, usage_line(HOUR + 24))
    assert reader.turn() == UsageRead(1)
    (tmp_path / "usage-copy.jsonl").write_bytes(now.read_bytes())
    assert reader.turn() == UsageRead()
    assert total(store) == {
        "requests": 4,
        "answered": 3,
        "prompt_tokens": 300,  # nothing was computed for the one that was refused
        "cached_tokens": 180,
        "output_tokens": 33,
        "estimated": 1,
    }
    rows = used(store, ("day", "key"))
    assert [(row["day"], row["key"], row["requests"]) for row in rows] == [
        ("2024-10-04", "ann", 2),
        ("2024-10-04", "bob", 1),
        ("2024-10-05", "ann", 1),
    ]
    assert used(store, ("outcome",))[0]["prompt_tokens"] == 100, "whoever asks for outcomes sees all tokens"
    assert [row["hour"] for row in used(store, ("hour",), HOUR * 3600 + 3599, HOUR * 3600 + 3601)] == [
        "2024-10-04T00:00Z",
        "2024-10-04T01:00Z",
    ]


def test_lost_state_recounts_usage_from_the_files(tmp_path: Path, store: StateStore) -> None:
    write(tmp_path / "usage.jsonl", *[usage_line()] * 5)
    write(tmp_path / "usage-2024-10-03.jsonl", usage_line(HOUR - 30))
    count_all(store, tmp_path, 0.0)
    before = used(store, ("hour", "key"))
    store.close()
    (tmp_path / "state.db").unlink()
    again = StateStore(tmp_path / "state.db")
    count_all(again, tmp_path, 0.0)
    assert used(again, ("hour", "key")) == before


def test_large_usage_files_are_read_in_pieces(tmp_path: Path, store: StateStore) -> None:
    write(tmp_path / "usage.jsonl", *[usage_line(request=f"r{number}") for number in range(2000)])
    reader, turns = UsageReader(store, tmp_path), 0
    while reader.turn(100_000).more:
        turns += 1
    assert turns >= 3
    assert total(store)["requests"] == 2000


@pytest.mark.parametrize(
    "bad",
    [
        "no json",
        "[1]",
        "null",
        usage_line(time="yesterday"),
        usage_line(prompt_tokens=-1),
        usage_line(prompt_tokens=True),
        usage_line(output_tokens=1e9),
        usage_line(key=None),
        json.dumps({"time": "2024-10-04"}),
        "[" * 50_000,
        "x" * 300_000,
    ],
)
def test_invalid_usage_record_is_not_counted_and_is_reported(
    bad: str, tmp_path: Path, store: StateStore
) -> None:
    write(tmp_path / "usage.jsonl", usage_line(), bad, usage_line())
    count_all(store, tmp_path, 7.0)
    assert total(store)["requests"] == 2
    assert any(event.kind == "usage" and "no records" in event.what for event in store.happenings())


KILLED = """
import os, sys, threading
from pathlib import Path
from potluck.control.state_store import StateStore
from potluck.control.accounts import UsageReader
folder = Path(sys.argv[1])
threading.Timer(float(sys.argv[2]), lambda: os._exit(9)).start()
reader = UsageReader(StateStore(folder / "state.db"), folder)
while reader.turn(1).more:
    pass
os._exit(0)
"""


def test_usage_readers_killed_at_any_instant_count_nothing_twice(
    tmp_path: Path, store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "usage.jsonl", *[usage_line(prompt_tokens=number) for number in range(20_000)])
    for after_s in (0.01, 0.03):
        two = [
            subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(after_s)]) for _ in range(2)
        ]
        for item in two:
            assert item.wait(60) in (0, 9)
    count_all(store, tmp_path, 0.0)
    assert total(store)["requests"] == 20_000
    assert total(store)["prompt_tokens"] == sum(range(20_000))


def test_full_disk_is_reported_and_usage_is_counted_later(tmp_path: Path, store: StateStore) -> None:
    write(tmp_path / "usage.jsonl", *[usage_line(key=f"k{number}") for number in range(3000)])
    (pages,) = store.rows("PRAGMA page_count")[0]
    store.rows(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StateError, match="cannot be written .*full.*make room and start again"):
        UsageReader(store, tmp_path).turn()
    assert used(store, ("key",)) == [], "all of it or nothing"
    store.rows("PRAGMA max_page_count = 1000000")
    assert UsageReader(store, tmp_path).turn().records == 3000


# Keys.


def new_kept_key(name: str, at_s: float, **line: Any) -> tuple[str, KeptKey]:
    key, text = new_key(name)
    return key, KeptKey(json.loads(text)["sha256"], name, {"tenant": "co", **line}, at_s)


class Gateway:
    def __init__(self, folder: Path) -> None:
        self.now_s = 1000.0
        self.ring = KeyRing(folder / KEY_FILE, 0.0, lambda: self.now_s, may_open=True)

    def lets_in(self, key: str) -> bool:
        self.ring.look(0.0)
        assert self.ring.problem == ""
        if self.ring.open:
            return True
        try:
            return self.ring.who(f"Bearer {key}".encode(), 0.0).tenant == "co"
        except HttpRefusal:
            return False


def test_added_rotated_and_revoked_keys_reach_the_gateway(tmp_path: Path, store: StateStore) -> None:
    assert publish_keys(store, tmp_path, 0.0)
    gateway = Gateway(tmp_path)
    assert gateway.lets_in(""), "until there is a key none is asked for"
    old, kept = new_kept_key("ann", 1000.0, requests_per_min=60.0)
    add_key(store, tmp_path, kept)
    assert gateway.lets_in(old)
    assert not gateway.lets_in("")
    with pytest.raises(InputError, match="ann: has a key already"):
        add_key(store, tmp_path, new_kept_key("ann", 1000.0)[1])
    new, text = new_key("ann")
    rotate_key(store, tmp_path, "ann", json.loads(text)["sha256"], 1000.0, 100.0)
    assert gateway.lets_in(old)
    assert gateway.lets_in(new)
    gateway.now_s = 1101.0
    assert not gateway.lets_in(old), "its grace is over"
    assert gateway.lets_in(new)
    assert revoke_key(store, tmp_path, "ann", 1101.0) == 1
    assert not gateway.lets_in(new)
    assert not gateway.lets_in(""), "it never opens again"
    with pytest.raises(InputError, match="no key that holds"):
        rotate_key(store, tmp_path, "ann", "0" * 64, 1102.0, 0.0)
    with pytest.raises(UnknownNameError, match="did you mean 'ann'"):
        revoke_key(store, tmp_path, "anne", 1102.0)
    other, again = new_kept_key("ann", 1103.0)  # with other limits than the ones before
    add_key(store, tmp_path, again)
    assert gateway.lets_in(other)
    text = (tmp_path / KEY_FILE).read_text()
    assert other not in text
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o077 == 0


def test_key_file_that_cannot_be_written_changes_no_key(tmp_path: Path, store: StateStore) -> None:
    publish_keys(store, tmp_path, 0.0)
    before = (tmp_path / KEY_FILE).read_text()
    os.mkdir(tmp_path / f"{KEY_FILE}.new")
    with pytest.raises((CapacityError, OSError)):
        add_key(store, tmp_path, new_kept_key("ann", 0.0)[1])
    assert kept_keys(store) == ()
    assert (tmp_path / KEY_FILE).read_text() == before


def test_manually_changed_key_file_is_restored_and_reported(tmp_path: Path, store: StateStore) -> None:
    add_key(store, tmp_path, new_kept_key("ann", 0.0)[1])
    notes: list[tuple[str, ...]] = []
    now_s = [0.0]
    books = Accounts(store, tmp_path, lambda *what: notes.append(what), lambda: now_s[0])
    books.turn()
    assert notes == []
    whole = (tmp_path / KEY_FILE).read_text()
    (tmp_path / KEY_FILE).write_text('{"open": true}\n')
    books.turn()
    assert notes == [], "it looks every few seconds"
    now_s[0] = 5.0
    books.turn()
    assert (tmp_path / KEY_FILE).read_text() == whole
    assert [note[0] for note in notes] == ["keys"]


def test_lost_state_restores_keys_from_the_key_file(tmp_path: Path, store: StateStore) -> None:
    key, kept = new_kept_key("ann", 1000.0, concurrent=4)
    add_key(store, tmp_path, kept)
    again = StateStore(tmp_path / "another.db")
    publish_keys(again, tmp_path, 2000.0)
    assert [(item.name, item.line) for item in kept_keys(again)] == [("ann", kept.line)]
    gateway = Gateway(tmp_path)
    assert gateway.lets_in(key)
    assert not gateway.lets_in(""), "what was closed stays closed"
    (tmp_path / KEY_FILE).write_text('{"name": "ann", "sha256": "no hash"}')
    with pytest.raises(InputError, match=r"keys.jsonl:1: is no key"):
        publish_keys(StateStore(tmp_path / "third.db"), tmp_path, 0.0)


# The file, and the commands.


def test_state_file_of_version_one_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as db:
        db.executescript((Path(__file__).parent / "state_v1.sql").read_text())
    store = StateStore(path)
    assert store.rows("PRAGMA user_version") == [(VERSION,)]
    newest = store.plan()
    assert newest is not None
    assert [deployment.template for deployment in newest.plan.deployments] == ["words: mixed 1xL4 tp1"]
    assert [happening.kind for happening in store.happenings()][-1] == "down"
    assert store.get("spec files") == {"path": "potluck.yaml", "profiles": []}
    assert kept_keys(store) == ()
    write(tmp_path / "usage.jsonl", usage_line())
    count_all(store, tmp_path, 0.0)
    assert total(store)["requests"] == 1
    add_key(store, tmp_path, new_kept_key("ann", 0.0)[1])
    assert [key.name for key in kept_keys(StateStore(path))] == ["ann"]


def test_key_and_usage_commands_change_and_show_the_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ["--state", str(tmp_path / "new")]
    assert (
        run(["keys", "add", "ann", "--tenant", "co", "--concurrent", "4", "--expires", "2099-01-01", *state])
        == 0
    )
    shown = capsys.readouterr().out.split()[-1]
    assert run(["keys", "list", "--json", *state]) == 0
    (row,) = json.loads(capsys.readouterr().out)["keys"]
    assert (row["name"], row["tenant"], row["holds"], row["limits"]) == ("ann", "co", "yes", "concurrent 4")
    assert Gateway(tmp_path / "new").lets_in(shown)
    assert run(["keys", "rotate", "ann", "--grace-h", "0", *state]) == 0
    other = capsys.readouterr().out.split()[-1]
    gateway = Gateway(tmp_path / "new")
    gateway.now_s = 1e12
    assert not gateway.lets_in(other), "it expires when the first one would have"
    assert run(["keys", "revoke", "bob", *state]) == 2
    assert "did you mean" in (text := capsys.readouterr().err) or "known are" in text
    assert run(["keys", "add", "bob", "--expires", "soon", *state]) == 2
    assert "2031-01-31" in capsys.readouterr().err
    write(tmp_path / "new" / "usage.jsonl", usage_line(), usage_line(model="=cmd()"))
    assert run(["usage", "--json", "--by", "tenant", *state]) == 0
    assert json.loads(capsys.readouterr().out)[0]["requests"] == 2
    assert run(["usage", "--since", "24h", *state]) == 0
    assert "no requests were recorded since 24h" in capsys.readouterr().out
    assert run(["usage", "--since", "tomorrow", *state]) == 2
    assert run(["usage", "--by", "colour", *state]) == 2
    assert "none of hour, day" in capsys.readouterr().err
    (tmp_path / "new" / "state.db").write_bytes(b"no database" * 100)
    assert run(["usage", *state]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_damaged_state_file_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"no database" * 100)
    with pytest.raises(PotluckError, match="damaged"):
        kept_keys(StateStore(tmp_path / "state.db"))
