"""Two attempts at once, over engines that only exist here: one answer, one end, and nobody who still works on it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from door_kit import FakeExchange, FakeMeter, letters
from drive_kit import EOS, MODEL, VOCAB, Clock, Desk, Fleet, Heard, asked, driver, plan_of, right_answer
from drive_stage import Stage

from potluck.core.state.actions import Hedge
from potluck.core.state.events import AttemptFailed, FirstToken, RequestArrived, RequestFinished, SegmentDone
from potluck.core.state.policy import Policy
from potluck.core.values.route import Route, Segment, aggregated, handed_over
from potluck.gateway.dispatch.silence import LEAST_FIRST_S
from potluck.gateway.openai.handler import ClientHandler
from potluck.gateway.openai.requests import ModelCard
from potluck.gateway.values import ChoiceRequest


def twin(stage: Stage, what: ChoiceRequest, route: Route, attempt: int = 1) -> None:
    stage.dispatcher.act([Hedge(what.id, route, attempt, what.prompt_tokens, 0)])


def two(*replicas: str, first: Route | None = None, second: Route | None = None) -> tuple[Stage, Heard]:
    stage = Stage(*(replicas or ("x", "y")))
    what = asked()
    heard = stage.begin(what, first or aggregated("x"))
    twin(stage, what, second or aggregated("y"))
    return stage, heard


@pytest.mark.parametrize(("quick", "slow", "attempt"), [("x", "y", 0), ("y", "x", 1)])
def test_whoever_is_first_answers_and_the_other_is_stopped_at_once(
    quick: str, slow: str, attempt: int
) -> None:
    stage, heard = two()
    stage.call(quick).step()
    assert stage.call(slow).cancelled
    stage.call(slow).listener.data(b'{"token":3}\n')  # It was under way.
    stage.to_end()
    heard.is_right()
    assert stage.news == [FirstToken("r", attempt), RequestFinished("r", attempt, len(heard.tokens_))]
    stage.at_rest()


def test_a_second_route_with_segments_tells_of_itself() -> None:
    stage, heard = two("x", "p", "d", second=handed_over("p", "d", 10))
    while not heard.tokens_:
        stage.call("p").step()
        stage.call("d").step()
    assert stage.call("x").cancelled
    stage.to_end()
    heard.is_right()
    assert stage.turns == [
        SegmentDone("r", 1, 0),
        FirstToken("r", 1),
        RequestFinished("r", 1, len(heard.tokens_)),
    ]
    stage.at_rest()


@pytest.mark.parametrize(("dies", "left", "attempt"), [("x", "y", 0), ("y", "x", 1)])
def test_when_one_dies_the_other_goes_on(dies: str, left: str, attempt: int) -> None:
    stage, heard = two()
    stage.fleet.kill(dies)
    assert stage.news == [AttemptFailed("r", attempt, "replica", dies, 0)]
    assert stage.call(left).live
    stage.to_end()
    heard.is_right()
    assert stage.news[-1] == RequestFinished("r", 1 - attempt, len(heard.tokens_))
    stage.at_rest()


def test_when_both_die_a_third_answers() -> None:
    stage, heard = two("x", "y", "z")
    stage.fleet.kill("x")
    stage.fleet.kill("y")
    assert stage.news == [AttemptFailed("r", 0, "replica", "x", 0), AttemptFailed("r", 1, "replica", "y", 0)]
    stage.again(heard.asked, aggregated("z"), 2, 0)
    stage.to_end()
    heard.is_right()
    stage.at_rest()


def test_a_twin_that_comes_too_late_is_not_begun_and_one_whose_first_has_failed_runs_alone() -> None:
    stage = Stage("x", "y")
    streams, failed = asked("a"), asked("b")
    heards = stage.begin(streams, aggregated("x")), stage.begin(failed, aggregated("x"))
    stage.fleet.sent[0].step()
    stage.fleet.sent[1].lose()
    for what in (streams, failed):
        twin(stage, what, aggregated("y"))
    assert [call.replica for call in stage.fleet.sent] == ["x", "x", "y"]
    stage.to_end()
    for heard in heards:
        heard.is_right()
    stage.at_rest()


def test_a_client_that_leaves_stops_both() -> None:
    stage, _ = two()
    stage.dispatcher.cancel("r")
    assert [call.cancelled for call in stage.fleet.sent] == [True, True]
    stage.at_rest()


def test_one_that_cannot_be_reached_is_said_to_have_failed() -> None:
    stage, heard = two(second=aggregated("nobody"))
    assert stage.news == [AttemptFailed("r", 1, "replica", "nobody", 0)]
    stage.to_end()
    heard.is_right()


@pytest.mark.parametrize("quick", ["x", "y"])
def test_servers_of_plain_openai_race_until_the_first_byte_of_a_stream(quick: str) -> None:
    stage = Stage()
    for name in ("x", "y"):
        stage.fleet.add(name, kind="openai")
    body = json.dumps({"model": MODEL, "prompt": "Hi", "stream": True}).encode()
    what = asked("r", 5, 7, path=b"/v1/completions", body=body, stream=True)
    heard = stage.begin(what, aggregated("x"))
    twin(stage, what, aggregated("y"))
    call, other = stage.call(quick), stage.call("y" if quick == "x" else "x")
    call.listener.head(200, {b"content-type": b"text/event-stream"})
    said = b'data: {"choices":[{"index":0,"text":"It"}]}\n\n'
    call.write_raw(said)
    assert other.cancelled
    other.listener.data(said)
    end = b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\ndata: [DONE]\n\n'
    call.write_raw(end)
    call.end()
    assert heard.relayed == said + end
    assert stage.news == [FirstToken("r", int(quick == "y")), RequestFinished("r", int(quick == "y"), 1)]
    stage.at_rest()


def test_what_comes_whole_is_never_late() -> None:
    stage = Stage()
    for name in ("x", "y"):
        stage.fleet.add(name, kind="openai")
    what = asked("r", 5, 7, path=b"/v1/completions", body=b'{"model":"m"}')
    stage.begin(what, aggregated("x"))
    twin(stage, what, aggregated("y"))
    assert stage.news == [AttemptFailed("r", 1, "timeout", "", 0)]
    assert [call.replica for call in stage.fleet.sent] == ["x"]


@pytest.mark.parametrize("hedge", [0.0, 3.0])
def test_from_the_client_to_the_bill_a_silent_engine_costs_a_moment_and_counts_once(hedge: float) -> None:
    clock, fleet, meter = Clock(), Fleet(), FakeMeter()
    brain_loop = Desk(clock, fleet, plan_of([["mixed"], ["mixed"]]), Policy(hedge=hedge))
    dispatcher = driver(brain_loop, fleet, clock)
    cards = {MODEL: ModelCard(MODEL, 512, letters(), ends=frozenset({EOS}), vocab=VOCAB)}
    door = ClientHandler(cards, dispatcher, meter, clock=clock.now_s)
    body: dict[str, Any] = {"model": MODEL, "prompt": [3, 4, 5], "max_tokens": 9, "stream": True}
    exchange = FakeExchange(body=body)
    door(exchange)
    (silent,) = fleet.sent
    fleet.stopped.add(silent.replica)
    for _ in range(8):
        brain_loop.tick(0.25)
        while fleet.step_all():
            pass
    assert clock.now_s() < LEAST_FIRST_S, "before anybody is thought to be dead"
    assert exchange.over is bool(hedge)
    assert silent.cancelled is bool(hedge)
    if not hedge:
        return
    expected = right_answer(ChoiceRequest("", MODEL, (3, 4, 5), 3, 9, ends=(EOS,)))
    (told,) = meter.told
    assert (told.outcome, told.prompt_tokens) == ("stop" if expected[-1] == EOS else "length", 3)
    assert told.output_tokens == len(expected)
    assert [type(each) for each in brain_loop.told if isinstance(each, RequestFinished | AttemptFailed)] == [
        RequestFinished
    ]
    assert dispatcher.sizes() == {"open": 0, "watched": 0, "news": 0}
    assert not any(view.open_requests for view in brain_loop.brain.fleet.views.values())


def test_an_exact_request_asks_for_whole_kv_in_every_attempt_and_hedge() -> None:
    stage = Stage("a", "b", "c", "d", far=("a", "c"))
    stage.fleet.codecs = {("far", "near"): "int8", ("near", "near"): "int4", ("near", "far"): "int4"}
    what = asked(exact=True)
    stage.begin(what, Route((Segment("a", 0, 5), Segment("b", 5, 12), Segment("c", 12, None))))
    stage.dispatcher.act([Hedge("r", handed_over("c", "d", 12), 1, what.prompt_tokens, 0)])
    stage.again(what, handed_over("b", "a", 12), 2, 0)
    arrived = stage.line.told[0]
    assert isinstance(arrived, RequestArrived)
    assert arrived.request.exact
    assert [call.replica for call in stage.fleet.sent] == ["a", "b", "c", "c", "d", "b", "a"]
    assert not [call.replica for call in stage.fleet.sent if "codec" in call.body]
