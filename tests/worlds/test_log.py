"""A log replays to the same actions, and says where it does not."""

from __future__ import annotations

import io

import pytest
from sim_fleets import SLOW, closed_plan, combo, load, mixed, problem
from sim_minds import Around

from potluck.core.brain.actions import Action, Replan, Run
from potluck.core.brain.brain import Brain
from potluck.core.brain.events import Arrived, Event, Planned, Tick
from potluck.core.brain.facts import Facts
from potluck.core.brain.policy import Policy
from potluck.core.errors import FormatError
from potluck.sim.run import simulate
from potluck.sim.world.faults import Faults, Rates
from potluck.worlds import log
from potluck.worlds.replay import read, replay


def a_log(**more: object) -> list[str]:
    out = io.StringIO()
    faults = Faults(random=Rates(*[300.0] * 6))
    plan = closed_plan((combo(1, 2), "east", 1), (mixed(), "west", 1))
    simulate(problem(plan), load(60, 4.0, blocks=2), log=out, faults=faults, **more)  # type: ignore[arg-type]
    return out.getvalue().splitlines()


def test_a_log_replays_and_reads_back() -> None:
    lines = a_log()
    replayed = replay(lines, Brain)
    assert replayed.difference == ""
    assert replayed.lines == len(lines) - 1
    assert replayed.actions >= 60
    told = list(read(lines))
    assert isinstance(told[0][1], Planned)
    arrived = [event.request for _, event, _ in told if isinstance(event, Arrived)]
    assert [int(request.id) for request in arrived] == list(range(60))
    assert arrived[0].blocks
    assert sum(isinstance(action, Run) for _, _, actions in told for action in actions) > 30
    for at_s, event, actions in told:
        assert log.line(at_s, event, actions).rstrip("\n") in lines


def test_another_brain_is_found_out() -> None:
    class Forgetful(Around):
        def on(self, at_s: float, event: Event) -> list[Action]:
            actions = self.brain.on(at_s, event)
            return [] if isinstance(event, Arrived) and event.request.id == "7" else actions

    replayed = replay(a_log(), Forgetful)
    assert "Arrived" in replayed.difference
    assert "instead of" in replayed.difference
    other = replay(a_log(), lambda facts, policy: Brain(facts, Policy(balance="round-robin")))
    assert isinstance(other.difference, str)


def test_templates_of_a_later_plan_replay_too() -> None:
    later = closed_plan((mixed(), "west", 1), (mixed(SLOW), "east", 2))

    class Asking(Around):
        def on(self, at_s: float, event: Event) -> list[Action]:
            more: list[Action] = [Replan((), "test")] if isinstance(event, Tick) and at_s == 2.0 else []
            return self.brain.on(at_s, event) + more

    def mind(kits: object, policy: Policy) -> Asking:
        return Asking(kits.facts(), policy)  # type: ignore[attr-defined]

    lines = a_log(mind=mind, planner=lambda rates, at_s: later)
    assert sum(text.startswith("{") for text in lines) == 2
    assert replay(lines, Asking).difference == ""


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "line 1: is not JSON"),
        (["[]"], "line 1: is not the beginning"),
        (['{"format": "potluck.log", "version": 9}'], "version: is 9"),
        (['{"format": "potluck.log", "version": 2}'], "line 1: lacks"),
        ([..., "x"], "line 2: is not JSON"),
        ([..., "[1]"], "line 2: must be [time, event, actions]"),
        ([..., '[1, ["Nothing"], []]'], "line 2: has no known event"),
        ([..., '[1, ["FirstToken"], []]'], "line 2: FirstToken"),
    ],
)
def test_a_bad_log_is_answered_with_its_line(lines: list[object], says: str) -> None:
    good = log.header(Facts({}, {}), Policy())
    texts = [good if line is ... else str(line) for line in lines]
    with pytest.raises(FormatError) as error:
        replay(texts, Brain)
    assert says in str(error.value)
