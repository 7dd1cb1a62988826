"""A log replays to the same actions, and says where it does not."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path

import pytest
from sim_fleets import SLOW, closed_plan, combo, load, mixed, problem
from sim_minds import Around

from potluck.core.brain.brain import Brain
from potluck.core.errors import FormatError
from potluck.core.state.actions import Action, Replan, Run
from potluck.core.state.events import Event, PlanReceived, RequestArrived, Tick
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy
from potluck.runtime import brain_log
from potluck.runtime import log_lines as lines_
from potluck.runtime.log_files import LogFiles
from potluck.runtime.replay import LogHead, LogReader, log_lines, read, replay
from potluck.sim.run import simulate
from potluck.sim.world.faults import FaultRates, Faults


def a_log(**more: object) -> list[str]:
    out = io.StringIO()
    faults = Faults(random=FaultRates(*[300.0] * 6))
    plan = closed_plan((combo(1, 2), "east", 1), (mixed(), "west", 1))
    simulate(problem(plan), load(60, 4.0, blocks=2), log=out, faults=faults, **more)  # type: ignore[arg-type]
    return out.getvalue().splitlines()


def test_a_log_replays_and_reads_back() -> None:
    lines = a_log()
    replayed = replay(lines, Brain)
    assert replayed.difference == ""
    assert replayed.events == len(lines) - 1
    assert replayed.runs == 1
    assert replayed.actions >= 60
    told = list(read(lines))
    assert isinstance(told[0][1], PlanReceived)
    arrived = [event.request for _, event, _ in told if isinstance(event, RequestArrived)]
    assert [int(request.id) for request in arrived] == list(range(60))
    assert arrived[0].blocks
    assert sum(isinstance(action, Run) for _, _, actions in told for action in actions) > 30
    for at_s, event, actions in told:
        assert lines_.line(at_s, event, actions).rstrip("\n") in lines


def test_another_brain_is_found_out() -> None:
    class Forgetful(Around):
        def on(self, at_s: float, event: Event) -> list[Action]:
            actions = self.brain.on(at_s, event)
            return [] if isinstance(event, RequestArrived) and event.request.id == "7" else actions

    replayed = replay(a_log(), Forgetful)
    assert "RequestArrived" in replayed.difference
    assert "instead of" in replayed.difference
    other = replay(a_log(), lambda facts, policy: Brain(facts, Policy(balance="round-robin")))
    assert isinstance(other.difference, str)


def test_templates_of_a_later_plan_replay_too() -> None:
    later = closed_plan((mixed(), "west", 1), (mixed(SLOW), "east", 2))

    class Asking(Around):
        def on(self, at_s: float, event: Event) -> list[Action]:
            more: list[Action] = [Replan((), "test")] if isinstance(event, Tick) and at_s == 2.0 else []
            return self.brain.on(at_s, event) + more

    def mind(replica_models: object, policy: Policy) -> Asking:
        return Asking(replica_models.facts(), policy)  # type: ignore[attr-defined]

    lines = a_log(mind=mind, planner=lambda moment: later)
    assert sum(text.startswith("{") for text in lines) == 2
    assert replay(lines, Asking).difference == ""


def test_a_line_that_was_cut_off_is_passed_over_with_a_note() -> None:
    lines = a_log()
    for cut in (lines[-1][:30], lines[-1][:-1], "["):
        replayed = replay([*lines[:-1], cut], Brain)
        assert (replayed.difference, replayed.events, replayed.cuts) == ("", len(lines) - 2, (len(lines),))
    with pytest.raises(FormatError, match=f"line {len(lines) - 1}: is not JSON"):
        replay([*lines[:-2], lines[-2][:30], lines[-1]], Brain)


def test_a_restart_begins_with_a_fresh_brain_and_more_facts_do_not() -> None:
    lines = a_log()
    twice = replay([*lines, *lines], Brain)
    assert (twice.difference, twice.runs, twice.events) == ("", 2, 2 * (len(lines) - 1))
    killed = replay([*lines[:70], lines[70][:20], *lines], Brain)
    assert (killed.difference, killed.runs, killed.cuts) == ("", 2, (71,))
    # The same lines taken for one long run would be told of requests it has known for long.
    known = [lines[0], *lines[1:], lines[0].replace('"begins":"run"', '"begins":"facts"'), *lines[1:]]
    assert replay(known, Brain).difference
    with pytest.raises(FormatError, match="goes on with a run; name the file"):
        replay(known[len(lines) :], Brain)


def test_a_live_log_goes_on_after_a_kill(tmp_path: Path) -> None:
    lines = [text + "\n" for text in a_log()]
    path = tmp_path / "gateway.log"
    facts, policy = _facts_of(lines[0])
    told = list(read(lines))
    first = LogFiles(path)
    mind = brain_log.LoggedBrain(
        Brain(facts, policy), first, facts, policy, zero_utc_s=1e9 + 0.1, flush_s=1.0
    )
    for at_s, event, _ in told[:50]:
        mind.on(at_s, event)
    first.flush()
    assert path.stat().st_mode & 0o077 == 0
    os.truncate(path, path.stat().st_size - 7)
    first.close()
    facts, policy = _facts_of(lines[0])
    again = brain_log.LoggedBrain(Brain(facts, policy), LogFiles(path), facts, policy, zero_utc_s=1e9 + 60.3)
    for at_s, event, _ in told:
        again.on(at_s, event)
    again.close()
    with log_lines([path]) as found:
        replayed = replay(found, Brain)
    assert (replayed.difference, replayed.runs) == ("", 2)
    assert (replayed.events, replayed.cuts) == (49 + len(told), (51,))
    with log_lines([path]) as found:
        heads = [entry for entry in LogReader(found) if isinstance(entry, LogHead)]
    assert [head.zero_utc_s for head in heads] == [1e9 + 0.1, 1e9 + 60.3]
    packed = tmp_path / "gateway.log.1.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with log_lines([packed, path]) as found:
        assert replay(found, Brain).runs == 4


def _facts_of(text: str) -> tuple[FleetFacts, Policy]:
    (head,) = LogReader([text])
    assert isinstance(head, LogHead)
    return head.facts, head.policy


class Disk(io.StringIO):
    """Full after so many lines; counts how often it was flushed."""

    room = 10**9
    flushes = 0

    def write(self, text: str) -> int:
        self.room -= 1
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return super().write(text)

    def flush(self) -> None:
        self.flushes += 1


def test_a_log_reaches_the_system_once_a_second_and_trouble_does_not_stop_the_brain() -> None:
    lines = a_log()
    facts, policy = _facts_of(lines[0])
    told = list(read(lines))
    disk = Disk()
    mind = brain_log.LoggedBrain(Brain(facts, policy), disk, facts, policy, flush_s=1.0)
    for at_s, event, _ in told:
        mind.on(at_s, event)
    span_s = told[-1][0]
    assert span_s / 2 <= disk.flushes <= span_s + 1
    assert mind.trouble == ""
    facts, policy = _facts_of(lines[0])
    full = Disk()
    full.room = 20
    mind = brain_log.LoggedBrain(Brain(facts, policy), full, facts, policy)
    for at_s, event, actions in told:
        assert mind.on(at_s, event) == actions
    assert "No space left" in mind.trouble
    assert replay(full.getvalue().splitlines(), Brain).events == 19


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "log: is empty"),
        (["[]"], "line 1: is not the beginning"),
        (['{"format": "potluck.log", "version": 9}'], "version: is 9"),
        (['{"format": "potluck.log", "version": 4}'], "line 1: lacks"),
        ([..., "x", "[1]"], "line 2: is not JSON"),
        ([..., "[1]"], "line 2: must be [time, event, actions]"),
        ([..., '[1, ["Nothing"], []]'], "line 2: has no known event"),
        ([..., '[1, ["FirstToken"], []]'], "line 2: FirstToken"),
    ],
)
def test_a_bad_log_is_answered_with_its_line(lines: list[object], says: str) -> None:
    good = brain_log.header(FleetFacts({}, {}), Policy())
    texts = [good if line is ... else str(line) for line in lines]
    with pytest.raises(FormatError) as error:
        replay(texts, Brain)
    assert says in str(error.value)
