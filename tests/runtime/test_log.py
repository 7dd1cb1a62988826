"""A log replays to the same actions, or shows the first difference."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_brains import WrappedBrain
from sim_fleets import SLOW, closed_plan, combo, flow_plan, load, mixed, prefill_only, problem

from potluck.core.brain.brain import Brain
from potluck.core.errors import FormatError
from potluck.core.state.actions import Action, Replan, Run, SeenLengths
from potluck.core.state.events import Event, PlanReceived, ReplicaStatus, RequestArrived, Tick
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan, ReplicaSpec
from potluck.core.values.route import Route, Segment, aggregated
from potluck.core.values.types import NodeOffer, Region, Request
from potluck.runtime import brain_log
from potluck.runtime import log_lines as lines_
from potluck.runtime.brain_log import LogFiles
from potluck.runtime.log_lines import ACTIONS, EVENTS, kind_of, line, read_line
from potluck.runtime.replay import LogHead, LogReader, log_lines, read, replay
from potluck.sim.run import simulate
from potluck.sim.world.faults import FaultRates, Faults


def a_log(**more: object) -> list[str]:
    out = io.StringIO()
    faults = Faults(random=FaultRates(*[300.0] * 6))
    plan = closed_plan((combo(1, 2), "east", 1), (mixed(), "west", 1))
    simulate(problem(plan), load(60, 4.0, blocks=2), log=out, faults=faults, **more)  # type: ignore[arg-type]
    return out.getvalue().splitlines()


def test_log_is_read_back_and_replays() -> None:
    lines = a_log()
    replayed = replay(lines, Brain)
    assert replayed.difference == ""
    assert replayed.events == len(lines) - 1
    assert replayed.runs == 1
    assert replayed.actions >= 60
    message = list(read(lines))
    assert isinstance(message[0][1], PlanReceived)
    arrived = [event.request for _, event, _ in message if isinstance(event, RequestArrived)]
    assert [int(request.id) for request in arrived] == list(range(60))
    assert arrived[0].blocks
    assert sum(isinstance(action, Run) for _, _, actions in message for action in actions) > 30
    for at_s, event, actions in message:
        assert lines_.line(at_s, event, actions).rstrip("\n") in lines


def test_replay_detects_a_different_brain() -> None:
    class Forgetful(WrappedBrain):
        def on(self, at_s: float, event: Event) -> list[Action]:
            actions = self.brain.on(at_s, event)
            return [] if isinstance(event, RequestArrived) and event.request.id == "7" else actions

    replayed = replay(a_log(), Forgetful)
    assert "RequestArrived" in replayed.difference
    assert "instead of" in replayed.difference
    other = replay(a_log(), lambda facts, policy: Brain(facts, Policy(balance="round-robin")))
    assert isinstance(other.difference, str)


def test_log_with_templates_of_a_later_plan_replays() -> None:
    later = closed_plan((mixed(), "west", 1), (mixed(SLOW), "east", 2))

    class Asking(WrappedBrain):
        def on(self, at_s: float, event: Event) -> list[Action]:
            more: list[Action] = [Replan((), "test")] if isinstance(event, Tick) and at_s == 2.0 else []
            return self.brain.on(at_s, event) + more

    def mind(replica_models: object, policy: Policy) -> Asking:
        return Asking(replica_models.facts(), policy)  # type: ignore[attr-defined]

    lines = a_log(mind=mind, planner=lambda moment: later)
    assert sum(text.startswith("{") for text in lines) == 2
    assert replay(lines, Asking).difference == ""


def test_truncated_last_log_line_is_skipped_with_a_note() -> None:
    lines = a_log()
    for cut in (lines[-1][:30], lines[-1][:-1], "["):
        replayed = replay([*lines[:-1], cut], Brain)
        assert (replayed.difference, replayed.events, replayed.cuts) == ("", len(lines) - 2, (len(lines),))
    with pytest.raises(FormatError, match=f"line {len(lines) - 1}: is not JSON"):
        replay([*lines[:-2], lines[-2][:30], lines[-1]], Brain)


def test_restart_in_a_log_begins_with_a_new_brain() -> None:
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


def test_live_log_continues_after_a_kill(tmp_path: Path) -> None:
    lines = [text + "\n" for text in a_log()]
    path = tmp_path / "gateway.log"
    facts, policy = _facts_of(lines[0])
    message = list(read(lines))
    first = LogFiles(path)
    mind = brain_log.LoggedBrain(
        Brain(facts, policy), first, facts, policy, zero_utc_s=1e9 + 0.1, flush_s=1.0
    )
    for at_s, event, _ in message[:50]:
        mind.on(at_s, event)
    first.flush()
    assert path.stat().st_mode & 0o077 == 0
    os.truncate(path, path.stat().st_size - 7)
    first.close()
    facts, policy = _facts_of(lines[0])
    again = brain_log.LoggedBrain(Brain(facts, policy), LogFiles(path), facts, policy, zero_utc_s=1e9 + 60.3)
    for at_s, event, _ in message:
        again.on(at_s, event)
    again.close()
    with log_lines([path]) as result:
        replayed = replay(result, Brain)
    assert (replayed.difference, replayed.runs) == ("", 2)
    assert (replayed.events, replayed.cuts) == (49 + len(message), (51,))
    with log_lines([path]) as result:
        heads = [entry for entry in LogReader(result) if isinstance(entry, LogHead)]
    assert [head.zero_utc_s for head in heads] == [1e9 + 0.1, 1e9 + 60.3]
    packed = tmp_path / "gateway.log.1.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with log_lines([packed, path]) as result:
        assert replay(result, Brain).runs == 4


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


def test_log_is_flushed_every_second_and_write_errors_do_not_stop_the_brain() -> None:
    lines = a_log()
    facts, policy = _facts_of(lines[0])
    message = list(read(lines))
    disk = Disk()
    mind = brain_log.LoggedBrain(Brain(facts, policy), disk, facts, policy, flush_s=1.0)
    for at_s, event, _ in message:
        mind.on(at_s, event)
    span_s = message[-1][0]
    assert span_s / 2 <= disk.flushes <= span_s + 1
    assert mind.trouble == ""
    facts, policy = _facts_of(lines[0])
    full = Disk()
    full.room = 20
    mind = brain_log.LoggedBrain(Brain(facts, policy), full, facts, policy)
    for at_s, event, actions in message:
        assert mind.on(at_s, event) == actions
    assert "No space left" in mind.trouble
    assert replay(full.getvalue().splitlines(), Brain).events == 19


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "log: is empty"),
        (["[]"], "line 1: is not the beginning"),
        (['{"format": "potluck.log", "version": 9}'], "version: is 9"),
        (['{"format": "potluck.log", "version": 5}'], "line 1: lacks"),
        ([..., "x", "[1]"], "line 2: is not JSON"),
        ([..., "[1]"], "line 2: must be [time, event, actions]"),
        ([..., '[1, ["Nothing"], []]'], "line 2: has no known event"),
        ([..., '[1, ["FirstToken"], []]'], "line 2: FirstToken"),
    ],
)
def test_invalid_log_is_refused_with_its_line(lines: list[object], says: str) -> None:
    good = brain_log.header(FleetFacts({}, {}), Policy())
    texts = [good if line is ... else str(line) for line in lines]
    with pytest.raises(FormatError) as error:
        replay(texts, Brain)
    assert says in str(error.value)


text = st.text(max_size=8) | st.sampled_from(['"', "\\", "\n", "\ud800", "é", "東", '["Tick"]', ""])


whole = st.integers(-(2**70), 2**70) | st.integers(0, 9)


floats = st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0, 0.1 + 0.2, 5e-324, float("inf")])


names = st.lists(st.integers(0, 2**128 - 1) | st.integers(-(2**63), 9), max_size=4).map(tuple)


@st.composite
def routes(draw: st.DrawFn) -> Route:
    cuts = [0, *sorted(draw(st.sets(st.integers(1, 10**9), max_size=3)))]
    stops: list[int | None] = [*cuts[1:], None]
    return Route(tuple(Segment(draw(text), a, b) for a, b in zip(cuts, stops, strict=True)))


counts = st.integers(1, 10**9)


deadlines = st.none() | floats


requests = st.builds(Request, text, text, floats, counts, counts, whole, deadlines, names, text, text)


members = st.builds(
    ReplicaSpec, text, text, text, st.integers(0, 9), st.just("combo"), text, st.just("mixed"), text
)


seen = st.builds(SeenLengths, text, floats, st.lists(st.tuples(floats, floats), max_size=2).map(tuple))


prices = st.floats(0, 1e6)


offers = st.builds(NodeOffer, text, prices, st.integers(0, 99), st.booleans())


regions = st.builds(Region, text, st.lists(offers, max_size=2).map(tuple))


plans = st.sampled_from(
    [closed_plan((combo(1, 2), "east", 1)), flow_plan((prefill_only(), "west", 1), (mixed(), "east", 2))]
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    known: dict[Any, st.SearchStrategy[Any]] = {
        str: text,
        int: whole,
        float: floats,
        bool: st.booleans(),
        float | None: st.none() | floats,
        tuple[int, ...]: names,
        tuple[str, ...]: st.lists(text, max_size=3).map(tuple),
        tuple[tuple[str, float], ...]: st.lists(st.tuples(text, floats), max_size=3).map(tuple),
        tuple[SeenLengths, ...]: st.lists(seen, max_size=2).map(tuple),
        Request: requests,
        Route: routes(),
        Route | None: st.none() | routes(),
        Plan: plans,
        ReplicaSpec: members,
        tuple[Region, ...]: st.lists(regions, max_size=2).map(tuple),
    }
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    return of_kind(ReplicaStatus) if hint is ReplicaStatus else known[hint]


def of_kind(kind: Any) -> st.SearchStrategy[Any]:
    return st.tuples(*map(values, get_type_hints(kind).values())).map(lambda fields: kind(*fields))


told = st.one_of(*map(of_kind, get_args(Event)))


asked = st.lists(st.one_of(*map(of_kind, get_args(Action))), max_size=3)


@given(floats, told, asked)
def test_any_event_and_action_round_trips_through_a_log_line(at_s: float, event: Any, actions: Any) -> None:
    written = line(at_s, event, actions)
    assert written.endswith("]]\n")
    assert written.count("\n") == 1
    assert written.isascii()
    assert kind_of(written) == type(event).__name__
    result = read_line(written, "line 1")
    assert result == (at_s, event, actions)
    assert [type(item) for item in result[2]] == [type(action) for action in actions]
    # Equal numbers may still differ: 0.0 and -0.0, 1 and 1.0.
    assert repr(result) == repr((at_s, event, actions))


def test_every_event_and_action_class_has_a_log_name() -> None:
    assert set(EVENTS.values()) == set(get_args(Event))
    assert set(ACTIONS.values()) == set(get_args(Action))


def test_truncated_log_line_is_never_read_as_whole() -> None:
    request = Request("a", "chat", 1.25, 10, 5, blocks=(2**127, 5), exact=True)
    written = line(1.25, RequestArrived(request), [Run("a", aggregated("r"), 1, 10, 0)])
    for cut in range(1, len(written) - 1):
        with pytest.raises(FormatError, match="is not JSON"):
            read_line(written[:cut], "line 1")
    assert read_line(line(2, Tick(), []), "line 1") == (2.0, Tick(), [])
