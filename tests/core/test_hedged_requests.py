"""A request that is late with its first token, and its hedge: who gets one, who answers, what is left over."""

from __future__ import annotations

import brain_builders as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.brain.brain import Brain
from potluck.core.brain.hedging import LEAST_S, SHARE
from potluck.core.errors import InputError
from potluck.core.state import events as told
from potluck.core.state.actions import Abort, Action, Hedge, Refuse, Run, StartReplica
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
        self.log: list[tuple[float, told.Event, list[Action]]] = []
        for action in self.on(0.0, told.PlanReceived(made)):
            if isinstance(action, StartReplica):
                self.on(0.0, told.ReplicaReady(action.member.id))

    def on(self, at_s: float, event: told.Event) -> list[Action]:
        actions = self.brain.on(at_s, event)
        self.log.append((at_s, event, actions))
        return actions

    def arrive(self, name: str, at_s: float = 0.0, **more: object) -> Run:
        made = build.request(name, PROMPT, at_s=at_s, **more)  # type: ignore[arg-type]
        (run,) = self.on(at_s, told.RequestArrived(made))
        assert isinstance(run, Run)
        return run

    def late(self, at_s: float = 5.0) -> list[Hedge]:
        return [item for item in self.on(at_s, told.Tick()) if isinstance(item, Hedge)]

    def both(self) -> tuple[Run, Hedge]:
        run = self.arrive("a")
        (hedge,) = self.late()
        return run, hedge

    def where(self) -> list[str]:
        """Who has something to do, as far as is counted."""
        views = self.brain.fleet.views.values()
        return sorted(replica.member.id for replica in views if replica.open_requests)

    def nothing_left(self) -> None:
        assert self.brain.sizes()["open"] == self.brain.sizes()["hedges"] == 0
        for replica in self.brain.fleet.views.values():
            counted = (replica.open_requests, replica.open_prefill_tokens, replica.open_context_tokens)
            assert counted == (0, 0, 0)


def test_after_so_many_times_what_was_predicted_it_is_sent_elsewhere_as_well() -> None:
    message = Told()
    run = message.arrive("a")
    predicted_s = PROMPT * 1e-4 + 1e-3 + 0.02
    assert message.late(TIMES * predicted_s - 0.01) == []
    (hedge,) = message.late(TIMES * predicted_s + 0.01)
    assert (hedge.request, hedge.attempt, hedge.prompt_tokens, hedge.streamed_tokens) == ("a", 1, PROMPT, 0)
    assert hedge.route.decoder != run.route.decoder
    assert message.where() == sorted([run.route.decoder, hedge.route.decoder])
    assert message.late(100.0) == [], "one at a time"


def test_any_event_is_an_occasion_to_look() -> None:
    message = Told()
    message.arrive("a")
    actions = message.on(5.0, told.RequestArrived(build.request("b")))
    assert [type(action) for action in actions] == [Run, Hedge]


def test_it_is_off_unless_wanted_and_a_wrong_value_is_named() -> None:
    assert Policy().hedge == 0
    message = Told(hedge=0.0)
    message.arrive("a")
    assert message.late(100.0) == []
    with pytest.raises(InputError, match="hedge"):
        Policy(hedge=-1.0)


@pytest.mark.parametrize("winner", [0, 1])
def test_whoever_has_the_first_token_answers_and_the_other_counts_no_more(winner: int) -> None:
    message = Told()
    routes = [item.route.decoder for item in message.both()]
    message.on(5.1, told.FirstToken("a", winner))
    assert message.where() == [routes[winner]]
    assert message.on(5.2, told.FirstToken("a", 1 - winner)) == []
    assert message.on(5.2, told.RequestFinished("a", 1 - winner, 100)) == []
    assert message.where() == [routes[winner]]
    message.on(6.0, told.RequestFinished("a", winner, 100))
    message.nothing_left()


@pytest.mark.parametrize("loser", [0, 1])
def test_when_one_fails_the_other_goes_on_and_numbers_are_used_once(loser: int) -> None:
    message = Told(4, retries=9)
    routes = [item.route.decoder for item in message.both()]
    assert message.on(5.1, told.AttemptFailed("a", loser, "replica", routes[loser], 0)) == []
    assert message.where() == [routes[1 - loser]]
    failed = told.AttemptFailed("a", 1 - loser, "transfer", routes[1 - loser], 0)
    (run,) = [item for item in message.on(5.2, failed) if isinstance(item, Run)]
    assert run.attempt == 2
    assert run.route.decoder not in routes
    message.on(5.3, told.FirstToken("a", 2))
    message.on(5.4, told.RequestFinished("a", 2, 100))
    message.nothing_left()


def test_one_that_fails_behind_tokens_had_the_first_though_nobody_said_so() -> None:
    message = Told()
    message.both()
    failed = told.AttemptFailed("a", 1, "timeout", "", 7)
    (run,) = [item for item in message.on(5.1, failed) if isinstance(item, Run)]
    assert (run.attempt, run.streamed_tokens) == (2, 7)
    assert message.where() == [run.route.decoder]
    assert message.late(50.0) == [], "nothing that was streamed has a hedge"


def test_who_goes_away_leaves_nothing_behind() -> None:
    message = Told()
    routes = {item.route.decoder for item in message.both()}
    actions = message.on(5.1, told.RequestCancelled("a"))
    assert {action.replicas[0] for action in actions if isinstance(action, Abort)} == routes
    message.nothing_left()


def test_a_deadline_ends_both() -> None:
    message = Told(classes=with_built_in((RequestClass("hasty", stops=True),)))
    hasty = build.request("a", PROMPT, deadline_s=8.0)._replace(request_class="hasty")
    message.on(0.0, told.RequestArrived(hasty))
    assert len(message.late()) == 1
    assert any(isinstance(item, Refuse) for item in message.on(9.0, told.Tick()))
    message.nothing_left()


def test_no_more_twins_than_the_budget_allows() -> None:
    message = Told(16, batch=64)
    count = 100
    for number in range(count):
        message.arrive(f"r{number}")
    hedges = [item for second in range(30, 90) for item in message.late(float(second))]
    assert 1 < len(hedges) <= SHARE * count
    more = message.on(90.0, told.FirstToken(hedges[0].request, 1))
    assert [type(item) for item in more] == [Hedge], "there is a place again, and the others are still late"


def test_no_twin_where_there_is_no_room() -> None:
    alone = Told(1)
    alone.arrive("a")
    assert alone.late() == []
    full = Told(2, batch=4)
    for number in range(8):
        full.arrive(f"r{number}")
    assert full.late(60.0) == []
    taken = [replica for replica in full.brain.fleet.views.values() if replica.open_requests]
    assert [replica.open_requests for replica in taken] == [4, 4]


def test_a_replica_that_is_outrun_again_and_again_is_believed_to_be_slow() -> None:
    message = Told()
    slow = next(iter(message.brain.fleet.views))
    at_s = 0.0
    for number in range(40):
        name, at_s = f"r{number}", at_s + 10.0
        run = message.arrive(name, at_s)
        attempt = 0
        if run.route.decoder == slow:
            attempt = len(message.late(at_s + 2.0))
            assert attempt == 1
        message.on(at_s + 0.22 + 2.0 * attempt, told.FirstToken(name, attempt))
        message.on(at_s + 0.3 + 2.0 * attempt, told.RequestFinished(name, attempt, 2))
        if message.brain.fleet.views[slow].pace > 2.0:
            break
    else:
        pytest.fail("nothing was learned")
    assert all(replica.pace < 1.5 for name, replica in message.brain.fleet.views.items() if name != slow)


def test_it_is_written_down_as_it_is() -> None:
    message = Told()
    message.both()
    at_s, event, actions = message.log[-1]
    assert any(isinstance(action, Hedge) for action in actions)
    assert read_line(line(at_s, event, actions), "here") == (at_s, event, actions)


STEPS = st.lists(st.tuples(st.sampled_from("abctfxg"), st.integers(0, 9), st.integers(0, 2)), max_size=60)


@given(STEPS)
def test_while_nobody_is_late_hedging_changes_nothing(steps: list[tuple[str, int, int]]) -> None:
    fleets = Told(hedge=0.0), Told(hedge=1e9)
    for place, (what, who, attempt) in enumerate(steps):
        event = _event(what, f"r{who}", attempt, 0.05 * place)
        first, second = (fleet.on(0.05 * place, event) for fleet in fleets)
        assert first == second


@given(STEPS)
def test_whatever_is_told_twins_are_few_and_nothing_is_left(steps: list[tuple[str, int, int]]) -> None:
    message = Told(hedge=1.0, retries=9)
    streamed: set[str] = set()
    at_s = 0.0
    for what, who, attempt in steps:
        at_s += LEAST_S
        event = _event(what, f"r{who}", attempt, at_s)
        request = message.brain.requests.get(f"r{who}")
        if isinstance(event, told.FirstToken) and request is not None and attempt == request.attempt:
            streamed.add(f"r{who}")
        for action in message.on(at_s, event):
            assert not (isinstance(action, Hedge) and action.request in streamed)
        assert message.brain.sizes()["hedges"] <= max(1.0, SHARE * len(message.brain.requests))
    for number in range(10):
        message.on(at_s, told.RequestCancelled(f"r{number}"))
    message.nothing_left()


def _event(what: str, name: str, attempt: int, at_s: float) -> told.Event:
    match what:
        case "f":
            return told.FirstToken(name, attempt)
        case "g":
            return told.RequestFinished(name, attempt, 100)
        case "x":
            return told.AttemptFailed(name, attempt, "transfer", "", 0)
        case "t":
            return told.Tick()
    return told.RequestArrived(build.request(name, PROMPT, at_s=at_s))
