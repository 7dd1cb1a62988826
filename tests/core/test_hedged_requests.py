"""A request that is late with its first token, and its hedge: who gets one, who answers, what is left over."""

from __future__ import annotations

import brain_builders as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.brain.brain import Brain
from potluck.core.brain.hedging import LEAST_S, SHARE
from potluck.core.errors import InputError
from potluck.core.state.actions import Abort, Action, Hedge, Refuse, Run, StartReplica
from potluck.core.state.events import (
    AttemptFailed,
    Event,
    FirstToken,
    PlanReceived,
    ReplicaReady,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
)
from potluck.core.state.policy import Policy
from potluck.core.values.service import RequestClass, with_built_in
from potluck.runtime.log_lines import line, read_line

PROMPT = 2000
TIMES = 3.0


class Told:
    """A Brain over some replicas that each do whole requests."""

    def __init__(self, replicas: int = 3, hedge: float = TIMES, batch: int = 8, **more: object) -> None:
        templates = [build.template("t", closed=(1.0, 1.0))]
        made = build.plan(templates, {("t", "near"): replicas}, {("t", "near", "closed"): (1.0, 1.0)})
        self.brain = Brain(
            build.facts(templates, batch=batch),
            Policy(hedge=hedge, **more),  # type: ignore[arg-type]
        )
        self.log: list[tuple[float, Event, list[Action]]] = []
        for action in self.on(0.0, PlanReceived(made)):
            if isinstance(action, StartReplica):
                self.on(0.0, ReplicaReady(action.member.id))

    def on(self, at_s: float, event: Event) -> list[Action]:
        actions = self.brain.on(at_s, event)
        self.log.append((at_s, event, actions))
        return actions

    def arrive(self, name: str, at_s: float = 0.0, **more: object) -> Run:
        made = build.request(name, PROMPT, at_s=at_s, **more)  # type: ignore[arg-type]
        (run,) = self.on(at_s, RequestArrived(made))
        assert isinstance(run, Run)
        return run

    def late(self, at_s: float = 5.0) -> list[Hedge]:
        return [each for each in self.on(at_s, Tick()) if isinstance(each, Hedge)]

    def both(self) -> tuple[Run, Hedge]:
        run = self.arrive("a")
        (hedge,) = self.late()
        return run, hedge

    def where(self) -> list[str]:
        """Who has something to do, as far as is counted."""
        views = self.brain.fleet.views.values()
        return sorted(each.member.id for each in views if each.open_requests)

    def nothing_left(self) -> None:
        assert self.brain.sizes()["open"] == self.brain.sizes()["hedges"] == 0
        for view in self.brain.fleet.views.values():
            counted = (view.open_requests, view.open_prefill_tokens, view.open_context_tokens)
            assert counted == (0, 0, 0)


def test_after_so_many_times_what_was_predicted_it_is_sent_elsewhere_as_well() -> None:
    told = Told()
    run = told.arrive("a")
    predicted_s = PROMPT * 1e-4 + 1e-3 + 0.02
    assert told.late(TIMES * predicted_s - 0.01) == []
    (hedge,) = told.late(TIMES * predicted_s + 0.01)
    assert (hedge.request, hedge.attempt, hedge.prompt_tokens, hedge.streamed_tokens) == ("a", 1, PROMPT, 0)
    assert hedge.route.decoder != run.route.decoder
    assert told.where() == sorted([run.route.decoder, hedge.route.decoder])
    assert told.late(100.0) == [], "one at a time"


def test_any_event_is_an_occasion_to_look() -> None:
    told = Told()
    told.arrive("a")
    actions = told.on(5.0, RequestArrived(build.request("b")))
    assert [type(each) for each in actions] == [Run, Hedge]


def test_it_is_off_unless_wanted_and_a_wrong_value_is_named() -> None:
    assert Policy().hedge == 0
    told = Told(hedge=0.0)
    told.arrive("a")
    assert told.late(100.0) == []
    with pytest.raises(InputError, match="hedge"):
        Policy(hedge=-1.0)


@pytest.mark.parametrize("winner", [0, 1])
def test_whoever_has_the_first_token_answers_and_the_other_counts_no_more(winner: int) -> None:
    told = Told()
    routes = [each.route.decoder for each in told.both()]
    told.on(5.1, FirstToken("a", winner))
    assert told.where() == [routes[winner]]
    assert told.on(5.2, FirstToken("a", 1 - winner)) == []
    assert told.on(5.2, RequestFinished("a", 1 - winner, 100)) == []
    assert told.where() == [routes[winner]]
    told.on(6.0, RequestFinished("a", winner, 100))
    told.nothing_left()


@pytest.mark.parametrize("loser", [0, 1])
def test_when_one_fails_the_other_goes_on_and_numbers_are_used_once(loser: int) -> None:
    told = Told(4, retries=9)
    routes = [each.route.decoder for each in told.both()]
    assert told.on(5.1, AttemptFailed("a", loser, "replica", routes[loser], 0)) == []
    assert told.where() == [routes[1 - loser]]
    (run,) = [
        each
        for each in told.on(5.2, AttemptFailed("a", 1 - loser, "transfer", routes[1 - loser], 0))
        if isinstance(each, Run)
    ]
    assert run.attempt == 2
    assert run.route.decoder not in routes
    told.on(5.3, FirstToken("a", 2))
    told.on(5.4, RequestFinished("a", 2, 100))
    told.nothing_left()


def test_one_that_fails_behind_tokens_had_the_first_though_nobody_said_so() -> None:
    told = Told()
    told.both()
    (run,) = [each for each in told.on(5.1, AttemptFailed("a", 1, "timeout", "", 7)) if isinstance(each, Run)]
    assert (run.attempt, run.streamed_tokens) == (2, 7)
    assert told.where() == [run.route.decoder]
    assert told.late(50.0) == [], "nothing that was streamed has a hedge"


def test_who_goes_away_leaves_nothing_behind() -> None:
    told = Told()
    routes = {each.route.decoder for each in told.both()}
    actions = told.on(5.1, RequestCancelled("a"))
    assert {each.replicas[0] for each in actions if isinstance(each, Abort)} == routes
    told.nothing_left()


def test_a_deadline_ends_both() -> None:
    told = Told(classes=with_built_in((RequestClass("hasty", stops=True),)))
    hasty = build.request("a", PROMPT, deadline_s=8.0)._replace(request_class="hasty")
    told.on(0.0, RequestArrived(hasty))
    assert len(told.late()) == 1
    assert any(isinstance(each, Refuse) for each in told.on(9.0, Tick()))
    told.nothing_left()


def test_no_more_twins_than_the_budget_allows() -> None:
    told = Told(16, batch=64)
    count = 100
    for number in range(count):
        told.arrive(f"r{number}")
    hedges = [each for second in range(30, 90) for each in told.late(float(second))]
    assert 1 < len(hedges) <= SHARE * count
    more = told.on(90.0, FirstToken(hedges[0].request, 1))
    assert [type(each) for each in more] == [Hedge], "there is a place again, and the others are still late"


def test_no_twin_where_there_is_no_room() -> None:
    alone = Told(1)
    alone.arrive("a")
    assert alone.late() == []
    full = Told(2, batch=4)
    for number in range(8):
        full.arrive(f"r{number}")
    assert full.late(60.0) == []
    taken = [view for view in full.brain.fleet.views.values() if view.open_requests]
    assert [view.open_requests for view in taken] == [4, 4]


def test_a_replica_that_is_outrun_again_and_again_is_believed_to_be_slow() -> None:
    told = Told()
    slow = next(iter(told.brain.fleet.views))
    at_s = 0.0
    for number in range(40):
        name, at_s = f"r{number}", at_s + 10.0
        run = told.arrive(name, at_s)
        attempt = 0
        if run.route.decoder == slow:
            attempt = len(told.late(at_s + 2.0))
            assert attempt == 1
        told.on(at_s + 0.22 + 2.0 * attempt, FirstToken(name, attempt))
        told.on(at_s + 0.3 + 2.0 * attempt, RequestFinished(name, attempt, 2))
        if told.brain.fleet.views[slow].pace > 2.0:
            break
    else:
        pytest.fail("nothing was learned")
    assert all(view.pace < 1.5 for name, view in told.brain.fleet.views.items() if name != slow)


def test_it_is_written_down_as_it_is() -> None:
    told = Told()
    told.both()
    at_s, event, actions = told.log[-1]
    assert any(isinstance(each, Hedge) for each in actions)
    assert read_line(line(at_s, event, actions), "here") == (at_s, event, actions)


STEPS = st.lists(st.tuples(st.sampled_from("abctfxg"), st.integers(0, 9), st.integers(0, 2)), max_size=60)


@given(STEPS)
def test_while_nobody_is_late_hedging_changes_nothing(steps: list[tuple[str, int, int]]) -> None:
    fleets = Told(hedge=0.0), Told(hedge=1e9)
    for place, (what, who, attempt) in enumerate(steps):
        event = _event(what, f"r{who}", attempt, 0.05 * place)
        first, second = (each.on(0.05 * place, event) for each in fleets)
        assert first == second


@given(STEPS)
def test_whatever_is_told_twins_are_few_and_nothing_is_left(steps: list[tuple[str, int, int]]) -> None:
    told = Told(hedge=1.0, retries=9)
    streamed: set[str] = set()
    at_s = 0.0
    for what, who, attempt in steps:
        at_s += LEAST_S
        event = _event(what, f"r{who}", attempt, at_s)
        req = told.brain.requests.get(f"r{who}")
        if isinstance(event, FirstToken) and req is not None and attempt == req.attempt:
            streamed.add(f"r{who}")
        for action in told.on(at_s, event):
            assert not (isinstance(action, Hedge) and action.request in streamed)
        assert told.brain.sizes()["hedges"] <= max(1.0, SHARE * len(told.brain.requests))
    for number in range(10):
        told.on(at_s, RequestCancelled(f"r{number}"))
    told.nothing_left()


def _event(what: str, name: str, attempt: int, at_s: float) -> Event:
    match what:
        case "f":
            return FirstToken(name, attempt)
        case "g":
            return RequestFinished(name, attempt, 100)
        case "x":
            return AttemptFailed(name, attempt, "transfer", "", 0)
        case "t":
            return Tick()
    return RequestArrived(build.request(name, PROMPT, at_s=at_s))
