"""The Brain loop: owners of requests, order of events, and cleared state."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.core.state.actions import Abort, Action, DrainReplica, Refuse, Run
from potluck.core.state.events import (
    AttemptFailed,
    Event,
    FirstToken,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
)
from potluck.core.values.route import aggregated
from potluck.core.values.types import Request
from potluck.gateway.core import BrainLoop


class ScriptedBrain:
    def __init__(self) -> None:
        self.requests: dict[str, object] = {}
        self.heard: list[Event] = []
        self.answers: list[list[Action]] = []

    def on(self, at_s: float, event: Event) -> list[Action]:
        self.heard.append(event)
        if isinstance(event, RequestArrived):
            self.requests[event.request.id] = event
        elif isinstance(event, RequestFinished | RequestCancelled):
            self.requests.pop(event.request, None)
        return self.answers.pop(0) if self.answers else []


def _request(name: str) -> Request:
    return Request(name, "m", 0.0, 10, 5)


def _run(name: str) -> Run:
    return Run(name, aggregated("a"), 0, 10, 0)


def _brain_loop() -> tuple[BrainLoop, ScriptedBrain]:
    mind = ScriptedBrain()
    return BrainLoop(mind, mind.requests), mind


def test_actions_go_to_the_worker_that_owns_the_request() -> None:
    brain_loop, mind = _brain_loop()
    one: list[Action] = []
    two: list[Action] = []
    first, second = brain_loop.line(one.extend), brain_loop.line(two.extend)
    mind.answers = [[_run("x")], [_run("y")], [Abort("x", ("a",)), DrainReplica("a"), _run("y")]]
    managed: list[Action] = []
    brain_loop.manage = managed.extend
    first.tell(RequestArrived(_request("x")))
    second.tell(RequestArrived(_request("y")))
    brain_loop.tell(Tick())
    assert one == [_run("x"), Abort("x", ("a",))]
    assert two == [_run("y"), _run("y")]
    assert managed == [DrainReplica("a")]


def test_events_raised_while_acting_are_processed_afterwards_in_order() -> None:
    brain_loop, mind = _brain_loop()
    brain_client = brain_loop.line(lambda actions: None)

    def act(actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Run):
                brain_client.tell(FirstToken(action.request, 0))
                brain_client.tell(RequestFinished(action.request, 0, 1))

    brain_client.act = act
    mind.answers = [[_run("x"), _run("x")]]
    brain_client.tell(RequestArrived(_request("x")))
    kinds = [type(event) for event in mind.heard]
    assert kinds == [RequestArrived, FirstToken, RequestFinished, FirstToken, RequestFinished]


def test_ended_requests_have_no_owner_entry() -> None:
    brain_loop, mind = _brain_loop()
    heard: list[Action] = []
    brain_client = brain_loop.line(heard.extend)
    for name, ending in (("a", RequestFinished("a", 0, 3)), ("b", RequestCancelled("b"))):
        brain_client.tell(RequestArrived(_request(name)))
        brain_client.tell(ending)
    mind.answers = [[Refuse("c", "overloaded", "full")]]
    brain_client.tell(RequestArrived(_request("c")))
    assert heard == [Refuse("c", "overloaded", "full")]
    assert brain_loop._owners == {}


def test_failed_attempt_that_is_retried_keeps_its_owner() -> None:
    brain_loop, mind = _brain_loop()
    heard: list[Action] = []
    brain_client = brain_loop.line(heard.extend)
    mind.answers = [[_run("x")], [Run("x", aggregated("b"), 1, 12, 2)]]
    brain_client.tell(RequestArrived(_request("x")))
    brain_client.tell(AttemptFailed("x", 0, "replica", "a", 2))
    assert isinstance(heard[-1], Run)
    assert heard[-1].attempt == 1
    assert list(brain_loop._owners) == ["x"]


def test_requests_of_a_lost_worker_are_cancelled() -> None:
    brain_loop, mind = _brain_loop()
    gone, stays = brain_loop.line(lambda actions: None), brain_loop.line(lambda actions: None)
    gone.tell(RequestArrived(_request("x")))
    stays.tell(RequestArrived(_request("y")))
    brain_loop.lost(gone)
    assert mind.heard[-1] == RequestCancelled("x")
    assert list(brain_loop._owners) == ["y"]


def test_brain_time_starts_at_zero_and_watchers_get_every_event() -> None:
    now = [100.0]
    mind = ScriptedBrain()
    brain_loop = BrainLoop(mind, mind.requests, clock=lambda: now[0])
    seen: list[tuple[float, str]] = []
    brain_loop.watchers.append(lambda at_s, event, actions: seen.append((at_s, type(event).__name__)))
    now[0] = 103.5
    brain_loop.tell(Tick())
    assert seen == [(3.5, "Tick")]
