"""What a driver tells another Brain, of each request that is open: where it is, in that Brain's names."""

from __future__ import annotations

from drive_kit import Heard, asked
from drive_stage import Stage

from potluck.core.state.actions import Run
from potluck.core.state.events import Event, RequestAdopted, RequestArrived
from potluck.core.values.route import aggregated, handed_over
from potluck.core.values.types import Request
from potluck.gateway.values import Endpoint


def known(name: str = "r") -> Request:
    what = asked(name, 20, 12)
    return Request(name, "m", 0.0, what.prompt_tokens, what.max_output_tokens)


def renamed(endpoint: Endpoint) -> str | None:
    return f"new-{endpoint.replica}"


def told(stage: Stage, name: str = "r") -> Event | None:
    return stage.dispatcher.whereabouts(name, renamed)


def test_one_that_was_never_sent_arrives_again() -> None:
    stage = Stage("x")
    stage.dispatcher.begin(asked("r", 20, 12), Heard(asked("r", 20, 12)))
    event = told(stage)
    assert isinstance(event, RequestArrived)
    assert event.request == known()


def test_one_under_way_is_where_it_is() -> None:
    stage = Stage("x", "y")
    heard = stage.begin(asked("r", 20, 12), handed_over("x", "y", 20))
    assert told(stage) == RequestAdopted(known(), 0, 0, handed_over("new-x", "new-y", 20), 0, False)
    while not heard.tokens_:
        stage.fleet.step_all()
    event = told(stage)
    assert isinstance(event, RequestAdopted)
    assert (event.route, event.first) == (handed_over("new-x", "new-y", 20), True)
    assert stage.dispatcher.whereabouts("r", lambda each: None) is None, "nobody knows it yet"
    stage.to_end()
    assert stage.dispatcher.names() == []
    heard.is_right()


def test_one_that_failed_is_sent_from_where_its_user_is() -> None:
    stage = Stage("x", "y")
    heard = stage.begin(asked("r", 20, 12, ends=()), aggregated("x"))
    while len(heard.tokens_) < 3:
        stage.fleet.step_all()
    streamed = len(heard.tokens_)
    stage.fleet.kill("x")
    assert stage.dispatcher.whereabouts("r", lambda each: None) == RequestAdopted(known(), 0, streamed, None)
    stage.dispatcher.act([Run("r", aggregated("y"), 1, 20 + streamed, streamed)])
    event = told(stage)
    assert isinstance(event, RequestAdopted)
    assert (event.attempt, event.streamed_tokens, event.first) == (1, streamed, False)
    stage.to_end()
    heard.is_right()
