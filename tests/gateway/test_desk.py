"""The desk: who is told what, in which order, and what is remembered."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.core.brain.actions import Abandon, Action, Drain, Refuse, Run
from potluck.core.brain.events import Arrived, Cancelled, Event, Failed, Finished, FirstToken, Tick
from potluck.core.values.route import aggregated
from potluck.core.values.types import Request
from potluck.gateway.desk.desk import Desk


class Scripted:
    """A mind that answers as it was told to."""

    def __init__(self) -> None:
        self.flights: dict[str, object] = {}
        self.heard: list[Event] = []
        self.answers: list[list[Action]] = []

    def on(self, at_s: float, event: Event) -> list[Action]:
        self.heard.append(event)
        if isinstance(event, Arrived):
            self.flights[event.request.id] = event
        elif isinstance(event, Finished | Cancelled):
            self.flights.pop(event.request, None)
        return self.answers.pop(0) if self.answers else []


def _request(name: str) -> Request:
    return Request(name, "m", 0.0, 10, 5)


def _run(name: str) -> Run:
    return Run(name, aggregated("a"), 0, 10, 0)


def _desk() -> tuple[Desk, Scripted]:
    mind = Scripted()
    return Desk(mind, mind.flights), mind


def test_actions_go_to_the_worker_whose_request_it_is() -> None:
    desk, mind = _desk()
    one: list[Action] = []
    two: list[Action] = []
    first, second = desk.line(one.extend), desk.line(two.extend)
    mind.answers = [[_run("x")], [_run("y")], [Abandon("x", ("a",)), Drain("a"), _run("y")]]
    managed: list[Action] = []
    desk.manage = managed.extend
    first.tell(Arrived(_request("x")))
    second.tell(Arrived(_request("y")))
    desk.tell(Tick())
    assert one == [_run("x"), Abandon("x", ("a",))]
    assert two == [_run("y"), _run("y")]
    assert managed == [Drain("a")]


def test_what_happens_meanwhile_is_told_afterwards_in_order() -> None:
    desk, mind = _desk()
    line = desk.line(lambda actions: None)

    def act(actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Run):
                line.tell(FirstToken(action.request, 0))
                line.tell(Finished(action.request, 0, 1))

    line.act = act
    mind.answers = [[_run("x"), _run("x")]]
    line.tell(Arrived(_request("x")))
    kinds = [type(event) for event in mind.heard]
    assert kinds == [Arrived, FirstToken, Finished, FirstToken, Finished]


def test_nothing_is_remembered_of_requests_that_ended() -> None:
    desk, mind = _desk()
    heard: list[Action] = []
    line = desk.line(heard.extend)
    for name, ending in (
        ("a", Finished("a", 0, 3)),
        ("b", Cancelled("b")),
    ):
        line.tell(Arrived(_request(name)))
        line.tell(ending)
    mind.answers = [[Refuse("c", "overloaded", "full")]]
    line.tell(Arrived(_request("c")))
    assert heard == [Refuse("c", "overloaded", "full")]
    assert desk._owners == {}


def test_a_failure_that_goes_on_keeps_its_owner() -> None:
    desk, mind = _desk()
    heard: list[Action] = []
    line = desk.line(heard.extend)
    mind.answers = [[_run("x")], [Run("x", aggregated("b"), 1, 12, 2)]]
    line.tell(Arrived(_request("x")))
    line.tell(Failed("x", 0, "replica", "a", 2))
    assert isinstance(heard[-1], Run)
    assert heard[-1].attempt == 1
    assert list(desk._owners) == ["x"]


def test_a_lost_workers_requests_are_cancelled() -> None:
    desk, mind = _desk()
    gone, stays = desk.line(lambda actions: None), desk.line(lambda actions: None)
    gone.tell(Arrived(_request("x")))
    stays.tell(Arrived(_request("y")))
    desk.lost(gone)
    assert mind.heard[-1] == Cancelled("x")
    assert list(desk._owners) == ["y"]


def test_time_runs_from_the_start_and_watchers_hear_all() -> None:
    now = [100.0]
    mind = Scripted()
    desk = Desk(mind, mind.flights, clock=lambda: now[0])
    seen: list[tuple[float, str]] = []
    desk.watchers.append(lambda at_s, event, actions: seen.append((at_s, type(event).__name__)))
    now[0] = 103.5
    desk.tell(Tick())
    assert seen == [(3.5, "Tick")]
