"""Attempts on segment engines: engine requests, client answers and events to the Brain."""

from __future__ import annotations

import asyncio
import gc
import json
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from dispatch_helpers import (
    EOS,
    LIES,
    Clock,
    DispatchHarness,
    FakeEngines,
    RecordedAnswer,
    RecordingLine,
    choice_request,
    dispatcher_of,
    right_answer,
)

from potluck.api.segments import UNSUPPORTED
from potluck.core.replica.batch import LATE
from potluck.core.replica.blocks import block_hashes
from potluck.core.state import events
from potluck.core.state.actions import Abort, QueryAttempt, Refuse, Run
from potluck.core.values.route import Route, Segment, aggregated, handed_over
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.gateway.dispatch.segment_attempt import GRACE_S, SegmentAttempt, stretches
from potluck.gateway.workers.worker import Worker


def test_aggregated_request_is_sent_streamed_and_reported() -> None:
    stage = DispatchHarness("x")
    what = choice_request(sampling=Sampling(0.5, seed=3, logprobs=2), tenant="t", priority=4, min_tokens=2)
    heard = stage.begin(what, aggregated("x"), weight=2.0)
    body = stage.call("x").body
    assert body["request"] == "r"
    assert body["tokens"] == list(what.prompt)
    assert (body["max_tokens"], body["min_tokens"], body["end_tokens"]) == (12, 2, [EOS])
    assert (body["tenant"], body["weight"], body["priority"]) == ("t", 2.0, 4)
    assert body["sampling"] == {"temperature": 0.5, "seed": 3, "logprobs": 2}
    assert not {"start", "stop", "source", "handle", "codec"} & body.keys()
    stage.run_to_end()
    heard.assert_right()
    assert stage.news == [events.FirstToken("r", 0), events.RequestFinished("r", 0, len(heard.received))]
    stage.assert_idle()


def test_segments_are_sent_at_once_with_a_new_handle_per_transfer() -> None:
    stage = DispatchHarness("a", "b", "c", far=("a",))
    stage.fleet.codecs = {("far", "near"): "int8"}
    heard = stage.begin(
        choice_request(), Route((Segment("a", 0, 5), Segment("b", 5, 12), Segment("c", 12, None)))
    )
    a, b, c = (stage.call(name).body for name in "abc")
    assert (a["stop"], a["codec"], "start" in a) == (5, "int8", False)
    assert (b["start"], b["stop"], b["codec"]) == (5, 12, "int8"), "what came in fewer bits cannot go on raw"
    assert (c["start"], "stop" in c) == (12, False)
    assert b["source"] == {"kv": stage.fleet.endpoints["a"].kv, "handle": a["handle"], "connections": 6}
    assert c["source"] == {"kv": stage.fleet.endpoints["b"].kv, "handle": b["handle"], "connections": 2}
    assert len(a["handle"]) >= 32
    assert a["handle"] != b["handle"]
    stage.run_to_end()
    heard.assert_right()
    assert stage.news[:5] == [
        events.SegmentComputed("r", 0, 0),
        events.SegmentDone("r", 0, 0),
        events.SegmentComputed("r", 0, 1),
        events.SegmentDone("r", 0, 1),
        events.FirstToken("r", 0),
    ]
    stage.assert_idle()


def test_yielding_prefill_is_sent_with_the_lowest_priority_and_its_decode_is_not() -> None:
    stage = DispatchHarness("a", "b")
    what = choice_request(priority=3)
    stage.dispatcher.begin(what, RecordedAnswer(what))
    stage.dispatcher.act(
        [Run("r", handed_over("a", "b", what.prompt_tokens), 0, what.prompt_tokens, 0, yields=True)]
    )
    assert [stage.call(name).body["priority"] for name in "ab"] == [LATE, 3]


def test_adjacent_segments_on_one_replica_are_merged_and_an_empty_last_one_is_dropped() -> None:
    def found(*segments: Segment, prompt: int = 20) -> list[tuple[int, str, int, int | None]]:
        parts = stretches(segments, prompt)
        return [(part.place, part.replica, part.start, part.stop) for part in parts]

    assert found(Segment("a", 0, 5), Segment("a", 5, 12), Segment("b", 12, None)) == [
        (1, "a", 0, 12),
        (2, "b", 12, None),
    ]
    assert found(Segment("a", 0, 5), Segment("a", 5, None)) == [(1, "a", 0, None)]
    assert found(Segment("a", 0, 19), Segment("b", 19, 20), Segment("c", 20, None)) == [
        (0, "a", 0, 19),
        (2, "c", 19, None),
    ]
    assert found(Segment("a", 0, 1), Segment("b", 1, None), prompt=1) == [(1, "b", 0, None)]


def test_tokens_of_one_read_are_passed_on_together() -> None:
    stage = DispatchHarness("x")
    heard = stage.begin(choice_request(most=4, ends=()), aggregated("x"))
    call = stage.call("x")
    pieces: list[int] = []
    heard.on_tokens = lambda: pieces.append(len(heard.received))
    call.listener.head(200, {})
    call.listener.data(b'{"token":5}\n{"token":6}\n{"tok')
    call.listener.data(b'en":7,"logprob":-0.5,"top":[[7,-0.5],[8,-1]]}')
    assert heard.received == [5, 6]
    call.listener.data(
        b'\n{"token":8}\n{"ended":"length","prompt_tokens":20,"cached_tokens":16,"output_tokens":4}\n'
    )
    assert pieces == [2, 4]
    assert heard.choices[2] == SampledToken(7, -0.5, ((7, -0.5), (8, -1.0)))
    assert (heard.end, heard.cached) == ("length", 16)


@pytest.mark.parametrize("lie", LIES)
def test_inconsistent_engine_events_fail_the_attempt_and_the_retry_resumes(lie: str) -> None:
    stage = DispatchHarness("x", "y")
    what = choice_request("z", most=9)
    expected = right_answer(what)
    assert len(expected) > 3
    heard = stage.begin(what, aggregated("x"))
    call = stage.call("x")
    if lie != "an end before it began":
        call.step()
    else:
        call.listener.head(200, {})
    call.write_raw(LIES[lie])
    count = len(heard.received)
    assert stage.news[-1] == events.AttemptFailed("z", 0, "replica", "x", count)
    assert call.cancelled
    call.listener.data(b'{"token":5}\n')
    call.listener.done()
    assert heard.received == expected[:count]
    stage.again(what, aggregated("y"), 1, count)
    assert stage.call("y").body["tokens"] == [*what.prompt, *expected[:count]]
    assert stage.call("y").body["max_tokens"] == 9 - count
    stage.run_to_end()
    heard.assert_right()
    assert stage.news[-1] == events.RequestFinished("z", 1, len(expected))
    stage.assert_idle()


REFUSALS: list[tuple[int, str | None, events.FailureKind]] = [
    (503, "draining", "replica"),
    (503, "try_again", "replica"),
    (409, "role", "replica"),
    (500, None, "replica"),
    (404, "model_not_found", "replica"),
    (401, None, "replica"),
    (429, None, "memory"),
    (400, "context_length_exceeded", "memory"),
    (403, "not_a_peer", "replica"),
    (504, "deadline", "timeout"),
    (424, "hand_over", "replica"),
]


@pytest.mark.parametrize(("status", "code", "kind"), REFUSALS)
def test_engine_refusal_is_reported_with_its_failure_kind(
    status: int, code: str | None, kind: events.FailureKind
) -> None:
    stage = DispatchHarness("x")
    stage.begin(choice_request(), aggregated("x"))
    stage.call("x").refuse(status, code)
    assert stage.news == [events.AttemptFailed("r", 0, kind, "x", 0)]


@pytest.mark.parametrize("far", [(), ("p",)], ids=["one region", "two regions"])
@pytest.mark.parametrize("dies", ["at once", "within the grace", "not at all"])
@pytest.mark.parametrize("who", ["receiver", "sender"])
def test_transfer_failure_blames_the_peer_only_if_it_is_not_found_dead(
    who: str, dies: str, far: tuple[str, ...]
) -> None:
    stage = DispatchHarness("p", "d", far=far)
    stage.begin(choice_request(), handed_over("p", "d", 10))
    p, d = stage.call("p"), stage.call("d")
    p.step()
    p.step()
    if dies == "at once":
        (p if who == "receiver" else d).lose()
    if who == "receiver":
        d.refuse(502, "hand_over")
    else:
        p.write(
            {
                "ended": "error",
                "prompt_tokens": 20,
                "cached_tokens": 0,
                "output_tokens": 0,
                "code": "receiver_gone",
            }
        )
    other = "p" if who == "receiver" else "d"
    if dies == "within the grace":
        assert stage.turns == []
        (p if who == "receiver" else d).lose()
    stage.clock.pass_s(GRACE_S)
    if dies != "not at all":
        assert stage.turns == [events.AttemptFailed("r", 0, "replica", other, 0)]
    elif far:
        assert stage.turns == [events.AttemptFailed("r", 0, "link", "far->near", 0)]
    else:
        assert stage.turns == [events.AttemptFailed("r", 0, "transfer", other, 0)]
    assert p.cancelled or p.over
    assert d.cancelled or d.over


def test_sender_failure_after_its_kv_was_delivered_is_ignored() -> None:
    stage = DispatchHarness("p", "d")
    heard = stage.begin(choice_request(), handed_over("p", "d", 10))
    p, d = stage.call("p"), stage.call("d")
    p.step()
    p.step()
    stage.fleet.delivered.add(p.body["handle"])
    d.step()
    p.lose()
    stage.run_to_end()
    heard.assert_right()
    assert stage.turns == [events.FirstToken("r", 0), events.RequestFinished("r", 0, len(heard.received))]
    stage.assert_idle()


def test_complete_answer_without_an_end_line_is_finished() -> None:
    for most, ends in ((3, ()), (99, (EOS,))):
        stage = DispatchHarness("x")
        what = choice_request("e", most=most, ends=ends)
        heard = stage.begin(what, aggregated("x"))
        call = stage.call("x")
        while len(heard.received) < len(right_answer(what)):
            call.step()
        assert heard.end is None
        call.lose()
        heard.assert_right()
        assert stage.news[-1] == events.RequestFinished("e", 0, len(heard.received))
        stage.assert_idle()


def test_tokens_beyond_the_last_are_dropped() -> None:
    stage = DispatchHarness("x")
    what = choice_request(most=3, ends=())
    heard = stage.begin(what, aggregated("x"))
    stage.call("x").write(*({"token": token} for token in [*right_answer(what), 5, 6]))
    heard.assert_right()
    assert stage.call("x").cancelled
    stage.assert_idle()


def test_end_token_before_min_tokens_fails_the_attempt() -> None:
    stage = DispatchHarness("x", "y")
    what = choice_request(most=12, min_tokens=5)
    heard = stage.begin(what, aggregated("x"))
    stage.call("x").step(2)
    stage.call("x").write({"token": EOS})
    assert stage.news[-1] == events.AttemptFailed("r", 0, "replica", "x", 2)
    stage.again(what, aggregated("y"), 1, 2)
    assert stage.call("y").body["min_tokens"] == 3
    stage.run_to_end()
    heard.assert_right()


def test_stop_string_cancels_the_request_at_the_engine() -> None:
    stage = DispatchHarness("x")
    what = choice_request(most=30, ends=())
    heard = RecordedAnswer(what, stop_after=4)
    stage.dispatcher.begin(what, heard)
    stage.dispatcher.act([Run("r", aggregated("x"), 0, 20, 0)])
    stage.run_to_end()
    assert heard.received == right_answer(what)[:4]
    assert stage.call("x").cancelled
    assert stage.news[-1] == events.RequestFinished("r", 0, 4)
    stage.assert_idle()


def test_client_disconnect_cancels_every_segment_at_once() -> None:
    stage = DispatchHarness("p", "d")
    stage.begin(choice_request(), handed_over("p", "d", 10))
    stage.dispatcher.cancel("r")
    assert stage.call("p").cancelled
    assert stage.call("d").cancelled
    assert stage.news == [events.RequestCancelled("r")]
    stage.dispatcher.cancel("r")
    stage.assert_idle()


def test_closing_worker_cancels_its_running_requests() -> None:
    stage = DispatchHarness("x")
    heard = stage.begin(choice_request(), aggregated("x"))
    stage.call("x").step(3)
    worker: Any = SimpleNamespace(port=None, handler=SimpleNamespace(close=int), dispatcher=stage.dispatcher)
    asyncio.run(Worker.close(worker, 0.0))
    assert stage.call("x").cancelled, "while it can be written down, and not told to anybody later"
    assert stage.news[-1] == events.RequestCancelled("r")
    assert heard.refusal is None, "it is kept for whoever asks again"
    stage.assert_idle()


def test_client_disconnect_during_token_delivery_cancels_the_request() -> None:
    stage = DispatchHarness("x")
    stage.begin(choice_request(), aggregated("x")).on_tokens = lambda: stage.dispatcher.cancel("r")
    stage.call("x").step(3)
    assert stage.news == [events.RequestCancelled("r")]
    stage.assert_idle()


def test_run_sent_before_tokens_were_reported_fails_and_its_retry_repeats_no_token() -> None:
    stage = DispatchHarness("x", "y")
    what = choice_request()
    heard = stage.begin(what, aggregated("x"))
    stage.call("x").step(2)
    stage.dispatcher.act([Abort("r", ("x",)), Run("r", aggregated("y"), 1, 20, 0)])
    assert stage.call("x").cancelled
    assert stage.news[-1] == events.AttemptFailed("r", 1, "link", "", 2)
    stage.again(what, aggregated("y"), 2, 2)
    stage.dispatcher.act([Run("r", aggregated("x"), 1, 22, 2)])  # Said twice, or late.
    stage.run_to_end()
    heard.assert_right()


def test_attempt_queries_are_answered_with_its_state() -> None:
    stage = DispatchHarness("x")
    what = choice_request()
    stage.begin(what, aggregated("x"))
    stage.dispatcher.act([QueryAttempt("r", 0)])
    assert stage.news[-1] == events.AttemptRunning("r", 0)
    stage.call("x").step(2)
    stage.fleet.kill("x")
    failed = stage.news[-1]
    stage.dispatcher.act([QueryAttempt("r", 0)])
    assert stage.news[-1] == failed == events.AttemptFailed("r", 0, "replica", "x", 2)
    stage.dispatcher.act([QueryAttempt("r", 1)])
    assert stage.news[-1] == events.AttemptFailed("r", 1, "timeout", "", 2)
    stage.again(what, aggregated("x"), 2, 2)
    stage.run_to_end()
    stage.dispatcher.act([QueryAttempt("r", 2)])
    assert stage.news[-1] == stage.news[-2] == events.RequestFinished("r", 2, len(right_answer(what)))
    stage.begin(choice_request("s"), aggregated("x"))
    stage.call("x").step(3)
    stage.dispatcher.act([Abort("s", ("x",)), QueryAttempt("s", 0)])
    assert stage.call("x").cancelled
    assert stage.news[-1] == events.AttemptFailed("s", 0, "timeout", "", 3)
    stage.dispatcher.act([QueryAttempt("never heard of", 0)])
    assert stage.news[-1] == events.RequestCancelled("never heard of")


def test_refusal_cancels_running_segments() -> None:
    stage = DispatchHarness("x")
    heard = stage.begin(choice_request(), aggregated("x"))
    stage.call("x").step()
    refusal = Refuse("r", "deadline", "too late")
    stage.dispatcher.act([Abort("r", ("x",)), refusal])
    assert heard.refusal == refusal
    assert stage.call("x").cancelled
    stage.assert_idle()


def test_slow_client_pauses_only_its_own_answer_and_fails_no_replica() -> None:
    stage = DispatchHarness("x")
    heard = stage.begin(choice_request(), aggregated("x"))
    stage.call("x").step()
    stage.dispatcher.room("r", False)
    assert stage.call("x").paused
    stage.clock.pass_s(500)
    assert stage.news == [events.FirstToken("r", 0)]
    stage.dispatcher.room("r", True)
    stage.dispatcher.room("r", True)
    stage.clock.pass_s(1.0)
    stage.run_to_end()
    heard.assert_right()


def test_unreachable_replica_fails_the_attempt_at_once() -> None:
    stage = DispatchHarness("x", "y")
    stage.begin(choice_request("a"), aggregated("gone"))
    assert stage.news == [events.AttemptFailed("a", 0, "replica", "gone", 0)]
    stage.fleet.dead.add("y")
    heard = RecordedAnswer(choice_request("b"))
    stage.dispatcher.begin(heard.asked, heard)
    stage.dispatcher.act([Run("b", handed_over("x", "y", 10), 0, 20, 0)])
    assert stage.news[-1] == events.AttemptFailed("b", 0, "replica", "y", 0)
    assert stage.call("x").cancelled


def test_segment_body_is_valid_json_for_any_field_value() -> None:
    stage = DispatchHarness("x")
    stage.begin(choice_request('a"\\é', tenant='"', salt="s"), aggregated("x"))
    body = json.loads(stage.call("x").raw)
    assert (body["request"], body["tenant"], body["salt"]) == ('a"\\é', '"', "s")


def test_engine_with_a_changed_fingerprint_fails_the_attempt() -> None:
    stage = DispatchHarness()
    stage.fleet.add("x", fingerprint="abc")
    for name, mark in (("a", b"abc"), ("b", b""), ("c", b"xyz")):
        stage.begin(choice_request(name), aggregated("x"))
        stage.call("x").listener.head(200, {b"x-potluck-fingerprint": mark} if mark else {})
    assert [item for item in stage.news if isinstance(item, events.AttemptFailed)] == [
        events.AttemptFailed("c", 0, "replica", "x", 0)
    ]


@pytest.mark.parametrize("end", ["answered", "cancelled", "failed"])
def test_finished_request_is_freed_without_garbage_collection(end: str) -> None:
    """Prompt and answer would wait there for thousands of others."""
    stage = DispatchHarness("a", "b")
    what = choice_request()
    heard = stage.begin(what, Route((Segment("a", 0, 5), Segment("b", 5, None))))
    trips = [item for item in gc.get_objects() if type(item) is SegmentAttempt]
    here = [ref(trip) for trip in trips if trip._request.asked is what]
    del trips
    assert len(here) == 1
    gc.disable()
    try:
        if end == "answered":
            stage.run_to_end()
            heard.assert_right()
        elif end == "cancelled":
            stage.dispatcher.cancel(what.id)
        else:
            stage.fleet.kill("b")
            stage.dispatcher.cancel(what.id)
        stage.assert_idle()
        stage.fleet.sent.clear()
        assert here[0]() is None
    finally:
        gc.enable()


def test_prompt_blocks_have_the_hashes_of_the_engine_fingerprint() -> None:
    clock, fleet = Clock(), FakeEngines()
    fleet.add("plain")
    fleet.add("x", fingerprint="weights")
    line = RecordingLine(clock)
    dispatcher = dispatcher_of(line, fleet, clock)

    def names(name: str, salt: str, replica: str) -> tuple[int, ...]:
        what = choice_request(name, prompt=600, salt=salt)
        dispatcher.begin(what, RecordedAnswer(what))
        event = line.told[-1]
        assert isinstance(event, events.RequestArrived)
        dispatcher.act([Run(name, aggregated(replica), 0, 600, 0)])
        prompts[name] = what.prompt
        return event.request.blocks

    prompts: dict[str, tuple[int, ...]] = {}
    assert names("a", "acme", "plain") == (), "nobody has told what the weights are"
    assert names("b", "acme", "x") == ()
    for name, salt in (("c", "acme"), ("d", "acme"), ("e", ""), ("f", "other")):
        assert names(name, salt, "gone") == block_hashes(prompts[name], "weights", salt=salt) != ()


def test_resumed_attempt_gets_the_output_count_and_the_sampling() -> None:
    stage = DispatchHarness("x", "y")
    sampling = Sampling(0.5, seed=3, presence_penalty=1.0, logit_bias=((4, -2.0),), json_schema="{}")
    heard = stage.begin(what := choice_request(sampling=sampling), aggregated("x"))
    text = {
        "temperature": 0.5,
        "seed": 3,
        "presence_penalty": 1.0,
        "logit_bias": [[4, -2.0]],
        "json_schema": "{}",
    }
    body = stage.call("x").body
    assert (body["sampling"], "generated" in body) == (text, False)
    stage.call("x").step(3)
    stage.fleet.kill("x")
    stage.again(what, aggregated("y"), 1, 3)
    body = stage.call("y").body
    assert (body["sampling"], body["generated"]) == (text, 3)
    assert body["tokens"] == [*what.prompt, *heard.received]
    stage.run_to_end()
    heard.assert_right()


@pytest.mark.parametrize("handed", [False, True])
def test_unsupported_feature_of_every_engine_is_a_client_error(handed: bool) -> None:
    stage = DispatchHarness("x", "y")
    route = handed_over("x", "y", 20) if handed else aggregated("y")
    heard = stage.begin(choice_request(sampling=Sampling(json_schema="{}")), route)
    stage.call("y").refuse(400, UNSUPPORTED)
    assert (heard.status, json.loads(heard.relayed)["error"]["code"]) == (400, UNSUPPORTED)
    assert stage.turns == [events.RequestCancelled("r")]
    stage.assert_idle()


@pytest.mark.parametrize("streamed", [0, 2])
def test_grammar_failure_during_generation_ends_only_its_answer(streamed: int) -> None:
    stage = DispatchHarness("x")
    heard = stage.begin(choice_request(sampling=Sampling(json_schema="{}")), aggregated("x"))
    if streamed:
        stage.call("x").step(streamed)
    counts = {"prompt_tokens": 20, "cached_tokens": 0, "output_tokens": streamed}
    stage.call("x").write({"ended": "error", "code": UNSUPPORTED, "problem": "too complex", **counts})
    if streamed:
        assert heard.refusal is not None
        assert heard.refusal.reason == "lost"
    else:
        assert heard.status == 400
        assert json.loads(heard.relayed)["error"]["param"] == "response_format"
    assert not any(isinstance(item, events.AttemptFailed) for item in stage.news)
