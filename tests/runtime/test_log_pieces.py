"""A rotated, compressed and bounded log replays from its oldest remaining piece."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner
from sim_fleets import closed_plan, combo, load, mixed, problem

from potluck.cli.main import cli
from potluck.core.brain.brain import Brain
from potluck.core.errors import FormatError, InputError
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy
from potluck.runtime import brain_log as log_
from potluck.runtime.brain_log import (
    NAME,
    LogFiles,
    LoggedBrain,
    NotPlain,
    checkpoint,
    pack,
    pieces_of,
    restored,
)
from potluck.runtime.log_lines import written
from potluck.runtime.replay import LogEntry, LogHead, LogReader, log_lines, replay
from potluck.sim.load.workload import from_log
from potluck.sim.run import simulate
from potluck.sim.world.faults import FaultRates, Faults


def a_log(policy: Policy, requests: int = 80) -> list[str]:
    out = io.StringIO()
    faults = Faults(random=FaultRates(*[300.0] * 6))
    plan = closed_plan((combo(1, 2), "east", 1), (mixed(), "west", 1))
    simulate(problem(plan), load(requests, 4.0, blocks=2), log=out, faults=faults, policy=policy)
    return out.getvalue().splitlines()


POLICIES = [
    *(Policy(balance=item) for item in get_args(str)),
    *(Policy(scaling=item, window_s=5.0, replan_s=5.0) for item in get_args(str)),
    Policy(split_rule="printed", opportunistic=False, admission=False),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_brain_restored_from_a_checkpoint_continues_identically(policy: Policy) -> None:
    """Again and again in the middle of whatever it was doing, as a log has it: by way of JSON."""
    mind: Brain | None = None
    facts: FleetFacts | None = None
    asked = written_down = 0
    for place, entry in enumerate(LogReader(a_log(policy))):
        if isinstance(entry, LogHead):
            facts = entry.facts
            mind = Brain(facts, entry.policy)
            continue
        assert isinstance(entry, LogEntry)
        assert mind is not None
        assert written(mind.on(entry.at_s, entry.event)) == written(entry.actions)
        asked += len(entry.actions)
        if place % 25 == 0:
            mind, facts = restored(json.loads(json.dumps(checkpoint((mind, facts)))), "test")
            written_down += 1
    assert asked > 60
    assert written_down > 5


def test_checkpoint_keeps_shared_objects_and_refuses_foreign_ones() -> None:
    facts = FleetFacts({}, {})
    brain = Brain(facts, Policy())
    again, known = restored(checkpoint((brain, facts)), "test")
    assert again.requests is again._requests.open
    assert again.fleet is again.router._fleet
    assert again._handlers.keys() == brain._handlers.keys()
    assert known is again.table.facts
    with pytest.raises(NotPlain):
        checkpoint(lambda: None)
    with pytest.raises(NotPlain):
        checkpoint([os.system])
    for name in ("os:system", "potluck.core.codec:json", "potluck.cli.main:cli"):
        with pytest.raises(FormatError, match="not of the core"):
            restored({"root": ["core", name], "things": []}, "log")
    with pytest.raises(FormatError, match="log: state: cannot be read"):
        restored({"root": ["ref", 3], "things": []}, "log")


def _written(folder: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int = 10**9, times: int = 1) -> int:
    """A live log in small pieces, a state in every other one or so; how many events it was told."""
    monkeypatch.setattr(log_, "STATE_S", 5.0)
    lines = a_log(Policy(), 200)
    count = 0
    for _ in range(times):
        (head, *message) = LogReader(lines)
        assert isinstance(head, LogHead)
        pieces = LogFiles(folder / NAME, 8_000, most_bytes)
        mind = LoggedBrain(Brain(head.facts, head.policy), pieces, head.facts, head.policy, zero_utc_s=1e9)
        for entry in message:
            assert isinstance(entry, LogEntry)
            mind.on(entry.at_s, entry.event)
            count += 1
        assert mind.trouble == ""
        mind.close()
    return count


def _replayed(*paths: Path) -> Any:
    with log_lines(paths) as lines:
        return replay(lines, Brain)


def _first_head(piece: Path) -> str:
    text = gzip.decompress(piece.read_bytes()) if piece.suffix == ".gz" else piece.read_bytes()
    return str(json.loads(text.partition(b"\n")[0])["begins"])


def test_log_pieces_are_compressed_and_replay_as_one_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = _written(tmp_path, monkeypatch, times=2)
    pieces = pieces_of(tmp_path / NAME)
    assert len(pieces) > 4
    assert [piece.suffix for piece in pieces] == [".gz"] * (len(pieces) - 1) + [".log"]
    assert all(piece.stat().st_mode & 0o077 == 0 for piece in pieces)
    replayed = _replayed(tmp_path)
    assert (replayed.difference, replayed.events, replayed.runs, replayed.since_s) == ("", count, 2, 0.0)
    assert {_first_head(piece) for piece in pieces} == {"run", "facts", "state"}
    with log_lines([tmp_path]) as lines:
        assert len(from_log(lines).workload.arrival_s) == 400


def test_bounded_log_replays_from_its_oldest_remaining_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "all").mkdir()
    count = _written(tmp_path / "all", monkeypatch)
    most = int(0.7 * sum(piece.stat().st_size for piece in pieces_of(tmp_path / "all" / NAME)[:-1]))
    _written(tmp_path, monkeypatch, most_bytes=most)
    pieces = pieces_of(tmp_path / NAME)
    assert sum(piece.stat().st_size for piece in pieces[:-1]) <= most
    assert not pieces[0].name.endswith("000001.gz"), "the oldest went"
    replayed = _replayed(tmp_path)
    assert replayed.difference == ""
    assert 0 < replayed.events < count
    assert replayed.since_s > 0
    whole = next(piece for piece in pieces if _first_head(piece) == "state")
    assert _replayed(whole).difference == "", "a piece with a state stands alone"
    with log_lines([tmp_path]) as lines:
        assert from_log(lines).workload.arrival_s[0] == 0.0
    ran = CliRunner().invoke(cli, ["replay", str(tmp_path), "--json"])
    assert json.loads(ran.output)["since_s"] == replayed.since_s
    ran = CliRunner().invoke(cli, ["replay", str(tmp_path)])
    assert "older pieces were dropped" in ran.output
    gone = next((piece for piece in pieces if _first_head(piece) == "facts"), None)
    if gone is not None:
        with pytest.raises(InputError, match="goes on with a run"):
            _replayed(gone)


def test_log_pieces_left_by_a_crash_are_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a packed piece, a piece that is there twice, and half of the last line."""
    count = _written(tmp_path, monkeypatch)
    first, second, *_, last = pieces_of(tmp_path / NAME)
    plain = first.with_suffix("")
    plain.write_bytes(gzip.decompress(first.read_bytes()))
    second.with_suffix("").write_bytes(gzip.decompress(second.read_bytes()))
    second.rename(second.with_name(second.name + ".part"))
    os.truncate(last, last.stat().st_size - 9)
    replayed = _replayed(tmp_path)
    assert (replayed.difference, replayed.events, len(replayed.cuts)) == ("", count - 1, 1), "as it lies"
    LogFiles(tmp_path / NAME).close()
    assert not plain.exists()
    assert not list(tmp_path.glob("*.part"))
    assert [piece.suffix for piece in pieces_of(tmp_path / NAME)[:2]] == [".gz", ".gz"]
    count = count - 1 + _written(tmp_path, monkeypatch)
    replayed = _replayed(tmp_path)
    assert (replayed.difference, replayed.events, replayed.runs) == ("", count, 2)


def test_log_written_by_another_process_is_not_rotated(tmp_path: Path) -> None:
    """One gateway takes over from another: both write until the first one ends."""
    old, new = (LogFiles(tmp_path / NAME, 10) for _ in range(2))
    old.write("the old one's\n")
    assert old.full
    assert not old.cut()
    old.close()
    new.write("the new one's\n")
    assert new.cut()
    new.write("more\n")
    new.close()
    (packed, _) = pieces_of(tmp_path / NAME)
    assert gzip.decompress(packed.read_bytes()) == b"the old one's\nthe new one's\n"


def test_folder_without_a_log_is_refused_with_a_fix(tmp_path: Path) -> None:
    ran = CliRunner().invoke(cli, ["replay", str(tmp_path)])
    assert "has no brain.log; name the files of the log" in str(ran.exception or ran.output)
    pack(tmp_path / NAME, 10)
    assert pieces_of(tmp_path / NAME) == []
