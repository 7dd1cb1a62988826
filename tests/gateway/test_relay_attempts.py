"""Attempts on plain OpenAI servers: failures before and after the first byte, continued streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dispatch_helpers import DispatchHarness, FakeCall, RecordedAnswer, choice_request

from potluck.core.errors import FormatError
from potluck.core.state.actions import Run
from potluck.core.state.events import (
    AttemptFailed,
    FailureKind,
    FirstToken,
    RequestCancelled,
    RequestFinished,
)
from potluck.core.values.route import aggregated
from potluck.gateway.dispatch import relay_attempt
from potluck.gateway.dispatch.active_request import BACKSTOP_S
from potluck.gateway.dispatch.dispatcher import Dispatcher
from potluck.gateway.registry.engine_list import read_engines
from potluck.gateway.values import ChoiceRequest

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
SSE = {b"content-type": b"text/event-stream; charset=utf-8"}
WORDS = ["It", " was", " a", " dark", " and", " stormy", " night"]


def plain_harness(*replicas: str, **more: Any) -> DispatchHarness:
    stage = DispatchHarness()
    for replica in replicas:
        stage.fleet.add(replica, kind="openai", served_model="theirs", **more)
    return stage


def relay_request(path: bytes = CHAT, stream: bool = True, most: int = 7, **fields: Any) -> ChoiceRequest:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": '"model": "m"'}],
        "stream": stream,
        **fields,
    }
    return choice_request("r", 5, most, path=path, body=json.dumps(body).encode(), stream=stream)


def begin_attempt(stage: DispatchHarness, what: ChoiceRequest) -> RecordedAnswer:
    return stage.begin(what, aggregated("x"))


def event(said: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


def chunk(place: int, first: bool = False, **more: Any) -> bytes:
    """A part of a chat with its token, as vLLM writes it."""
    text: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "theirs",
    }
    delta = {"role": "assistant", "content": WORDS[place]} if first else {"content": WORDS[place]}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": [100 + place]}
    return event({**text, "choices": [choice | more], **({"prompt_token_ids": [1, 2, 3]} if first else {})})


def texts(relayed: bytes) -> list[str]:
    result = []
    for part in relayed.split(b"\n\n"):
        if part and part != b"data: [DONE]":
            choice = json.loads(part[6:])["choices"][0]
            result.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
    return result


def parts(relayed: bytes) -> list[dict[str, Any]]:
    return [json.loads(part[6:]) for part in relayed.split(b"\n\n") if part and part != b"data: [DONE]"]


# Bytes as they are.


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_relayed_stream_is_unchanged_for_any_chunking(cut: int) -> None:
    stage = plain_harness("x")
    heard = begin_attempt(stage, relay_request())
    call = stage.call("x")
    assert call.path == CHAT
    assert call.body["model"] == "theirs"
    assert call.body["messages"][0]["content"] == '"model": "m"'
    assert "return_token_ids" not in call.body
    usage = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}})
    answer = chunk(0, True) + chunk(1) + usage + b"data: [DONE]\n\n"
    call.listener.head(200, SSE)
    for start in range(0, len(answer), cut):
        call.write_raw(answer[start : start + cut])
    call.end()
    assert heard.relayed == answer
    assert heard.relay_ended
    assert stage.news == [FirstToken("r", 0), RequestFinished("r", 0, 2)]
    stage.assert_idle()


def test_unstreamed_reply_is_retried_until_it_is_complete() -> None:
    stage = plain_harness("x", "y")
    what = relay_request(stream=False)
    heard = begin_attempt(stage, what)
    answer = json.dumps({"choices": [{"text": "a"}], "usage": {"completion_tokens": 3}}).encode()
    stage.call("x").listener.head(200, {b"content-type": b"application/json"})
    stage.call("x").write_raw(answer[:20])
    stage.call("x").lose()
    assert stage.news == [AttemptFailed("r", 0, "replica", "x", 0)]
    assert not heard.status
    stage.again(what, aggregated("y"), 1, 0)
    stage.call("y").listener.head(200, {b"content-type": b"application/json"})
    stage.call("y").write_raw(answer[:20])
    stage.call("y").write_raw(answer[20:])
    stage.call("y").end()
    assert heard.relayed == answer
    assert stage.news[1:] == [RequestFinished("r", 1, 3)], "when its first token was there nobody knows"
    stage.assert_idle()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (500, "replica"),
        (503, "replica"),
        (429, "memory"),
        (404, "replica"),
        (401, "replica"),
        (504, "timeout"),
    ],
)
def test_error_status_of_a_plain_server_fails_the_attempt(status: int, kind: FailureKind) -> None:
    stage = plain_harness("x")
    heard = begin_attempt(stage, relay_request())
    stage.call("x").refuse(status)
    assert stage.news == [AttemptFailed("r", 0, kind, "x", 0)]
    assert not heard.status


def test_plain_server_400_reaches_the_client_and_cancels_the_request() -> None:
    stage = plain_harness("x")
    heard = begin_attempt(stage, relay_request())
    stage.call("x").refuse(400, "bad")
    assert (heard.status, heard.relay_ended) == (400, True)
    assert json.loads(heard.relayed)["error"]["code"] == "bad"
    assert stage.news == [RequestCancelled("r")]
    stage.assert_idle()


def test_aborted_reply_with_status_200_fails_the_attempt() -> None:
    for body in (
        {"choices": [{"text": "", "finish_reason": "abort"}]},
        {"choices": [{"text": ""}], "usage": {"completion_tokens": 0}},
    ):
        stage = plain_harness("x")
        begin_attempt(stage, relay_request(stream=False))
        stage.call("x").listener.head(200, {})
        stage.call("x").write_raw(json.dumps(body, separators=(",", ":")).encode())
        stage.call("x").end()
        assert stage.news == [AttemptFailed("r", 0, "replica", "x", 0)]


BREAKS = ["lost", "ended", "error", "abort"]


def break_stream(call: FakeCall, how: str) -> None:
    if how == "lost":
        call.lose()
    elif how == "ended":
        call.end()
    elif how == "error":
        call.write_raw(event({"error": {"message": "engine died"}}))
    else:
        call.write_raw(chunk(3, finish_reason="abort"))


@pytest.mark.parametrize("how", BREAKS)
def test_broken_stream_without_token_ids_ends_with_an_error(how: str) -> None:
    stage = plain_harness("x", "y")
    heard = begin_attempt(stage, relay_request())
    call = stage.call("x")
    call.listener.head(200, SSE)
    call.write_raw(chunk(0, True) + chunk(1)[:30])
    break_stream(call, how)
    assert heard.relayed == chunk(0, True), "no half of an event"
    assert heard.refusal is not None
    assert heard.refusal.reason == "lost"
    assert stage.news == [FirstToken("r", 0), AttemptFailed("r", 0, "replica", "x", 0), RequestCancelled("r")]
    stage.dispatcher.act([Run("r", aggregated("y"), 1, 5, 0)])  # The Brain does not know yet.
    stage.assert_idle()


# One stream over several servers.


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_broken_stream_with_token_ids_continues_on_another_server(cut: int, how: str) -> None:
    stage = plain_harness("x", "y", token_ids=True)
    what = relay_request(temperature=0, seed=4, stream_options={"include_usage": True}, min_tokens=5)
    heard = begin_attempt(stage, what)
    call = stage.call("x")
    assert call.body["return_token_ids"] is True
    call.listener.head(200, SSE)
    call.write_raw(b"".join(chunk(place, place == 0) for place in range(cut)))
    held = {"delta": {"content": ""}, "token_ids": [999]}
    call.write_raw(chunk(0, **held))  # Half a character: its text is not shown yet.
    break_stream(call, how)
    assert stage.news[-1] == AttemptFailed("r", 0, "replica", "x", cut)
    stage.again(what, aggregated("y"), 1, cut)
    other = stage.call("y")
    assert other.path == COMPLETIONS
    assert other.body["prompt"] == [1, 2, 3, *range(100, 100 + cut)]
    assert (other.body["max_tokens"], other.body["min_tokens"], other.body["seed"]) == (7 - cut, 5 - cut, 4)
    assert (other.body["model"], other.body["temperature"], other.body["stream"]) == ("theirs", 0, True)
    other.listener.head(200, SSE)
    for place in range(cut, len(WORDS)):
        last = place == len(WORDS) - 1
        choice = {"index": 0, "text": WORDS[place], "finish_reason": "length" if last else None}
        text = {"id": "cmpl-2", "object": "text_completion", "created": 9, "model": "theirs"}
        other.write_raw(event({**text, "choices": [choice | {"token_ids": [100 + place]}]}))
    usage = {"prompt_tokens": 3 + cut, "completion_tokens": 7 - cut, "total_tokens": 10}
    other.write_raw(event({"id": "cmpl-2", "choices": [], "usage": usage}) + b"data: [DONE]\n\n")
    other.end()
    *text, counted = parts(heard.relayed)
    assert "".join(texts(b"".join(event(item) for item in text))) == "".join(WORDS)
    assert {(item["id"], item["object"], item["created"]) for item in text} == {
        ("chatcmpl-1", "chat.completion.chunk", 7)
    }
    assert text[-1]["choices"][0]["finish_reason"] == "length"
    assert counted["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
    assert b"token_ids" not in heard.relayed
    assert heard.relayed.endswith(b"data: [DONE]\n\n")
    assert stage.news[-1] == RequestFinished("r", 1, 7)
    stage.assert_idle()


def test_stream_with_all_its_tokens_is_finished_for_the_failed_server() -> None:
    stage = plain_harness("x", token_ids=True)
    heard = begin_attempt(stage, relay_request(most=2, stream_options={"include_usage": True}))
    stage.call("x").listener.head(200, SSE)
    stage.call("x").write_raw(chunk(0, True) + chunk(1))
    stage.call("x").lose()
    last, counted = parts(heard.relayed)[-2:]
    assert last["choices"][0]["finish_reason"] == "length"
    assert counted["usage"]["completion_tokens"] == 2
    assert stage.news[-1] == RequestFinished("r", 0, 2)
    stage.assert_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x"]},
        {"tools": [{}]},
        {"n": 2},
        {"presence_penalty": 0.5},
        {"response_format": {"type": "json"}},
    ],
)
def test_stream_whose_state_cannot_be_resumed_is_not_continued_elsewhere(fields: dict[str, Any]) -> None:
    stage = plain_harness("x", "y", token_ids=True)
    what = relay_request(**fields)
    heard = begin_attempt(stage, what)
    stage.call("x").listener.head(200, SSE)
    stage.call("x").write_raw(chunk(0, True))
    stage.call("x").lose()
    stage.again(what, aggregated("y"), 1, 1)
    assert heard.refusal is not None
    assert stage.news[-2:] == [AttemptFailed("r", 1, "replica", "y", 1), RequestCancelled("r")]
    stage.assert_idle()


def test_completion_log_probabilities_are_converted_to_chat_form() -> None:
    logs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "é": -2.0}]}
    for count, names in ((2, ["a", "é"]), (1, ["a"]), (0, [])):
        rewriter = relay_attempt.EventRewriter(chunk(0, True), True, 3, 1, count)
        made = rewriter.event(event({"choices": [{"index": 0, "text": "a", "logprobs": logs}]}))
        (one,) = json.loads(made[6:])["choices"][0]["logprobs"]["content"]
        assert (one["token"], one["logprob"], one["bytes"]) == ("a", -0.5, [97])
        assert [item["token"] for item in one["top_logprobs"]] == names


def test_model_name_is_replaced_only_at_the_top_level_of_the_body() -> None:
    for body in (
        b'{"model": "m", "x": "\\"model\\": 1"}',
        b'{"metadata":{"model":"m"},"model":"m"}',
        b' {"model":"m\\"q"} ',
    ):
        made = json.loads(relay_attempt.forwarded(body, "m", 'a"b', b'"more":1'))
        assert (made["model"], made["more"]) == ('a"b', 1)
        assert {name: value for name, value in json.loads(body).items() if name != "model"} == {
            name: value for name, value in made.items() if name not in ("model", "more")
        }
    assert relay_attempt.forwarded(b'{"model":"m"}', "m", "m") == b'{"model":"m"}'


def test_attempt_on_a_server_without_an_answer_fails_after_the_stall_limit() -> None:
    stage = plain_harness("x")
    begin_attempt(stage, relay_request())
    stage.clock.pass_s(130)
    assert stage.news == [AttemptFailed("r", 0, "replica", "x", 0)]


def started_stream() -> DispatchHarness:
    stage = plain_harness("x")
    begin_attempt(stage, relay_request())
    stage.call("x").listener.head(200, SSE)
    stage.call("x").write_raw(chunk(0, True))
    return stage


def test_client_that_stops_reading_does_not_count_as_a_stalled_server() -> None:
    stage = started_stream()
    stage.dispatcher.room("r", False)
    stage.clock.pass_s(500)
    stage.dispatcher.room("r", True)
    assert stage.news == [FirstToken("r", 0)]
    assert not stage.call("x").cancelled


def test_cancelled_request_cancels_its_call() -> None:
    stage = started_stream()
    stage.dispatcher.cancel("r")
    assert stage.call("x").cancelled
    assert stage.news == [FirstToken("r", 0), RequestCancelled("r")]
    stage.assert_idle()


def test_replica_reported_gone_fails_its_attempts() -> None:
    stage = plain_harness("x")
    begin_attempt(stage, relay_request(stream=False))
    stage.dispatcher.gone("x")
    stage.dispatcher.gone("nobody")
    assert stage.news == [AttemptFailed("r", 0, "replica", "x", 0)]


class RecordingCounters:
    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def routed(self, model: str, run: Run) -> None:
        self.heard.append(("routed", run.attempt))

    def segment(
        self, replica: str, took_s: float, prompt_tokens: int, output_tokens: int, problem: str = ""
    ) -> None:
        self.heard.append((replica, took_s, prompt_tokens, output_tokens, problem))

    def failed(self, where: str, kind: FailureKind) -> None:
        self.heard.append(("failed", where, kind))


@pytest.mark.parametrize("kind", ["openai", "segments"])
def test_outcome_of_every_attempt_is_counted_once(kind: str) -> None:
    stage, meter = DispatchHarness(), RecordingCounters()
    for item in ("x", "y"):
        stage.fleet.add(item, kind=kind)
    stage.dispatcher = Dispatcher(
        stage.line, stage.fleet, stage.fleet, stage.clock.now_s, stage.clock.later, counters=meter
    )  # type: ignore[arg-type]
    what = relay_request() if kind == "openai" else choice_request("r", 5, 3, ends=())
    begin_attempt(stage, what)
    stage.clock.pass_s(0.5)
    stage.call("x").lose("is gone")
    stage.again(what, aggregated("y"), 1, 0)
    stage.clock.pass_s(0.5)
    if kind == "openai":
        stage.call("y").listener.head(200, SSE)
        stage.call("y").write_raw(chunk(0, True) + chunk(1) + b"data: [DONE]\n\n")
        stage.call("y").end()
    else:
        stage.run_to_end()
    first, second, failed, *_ = meter.heard
    assert first == ("routed", 0)
    assert second == ("x", 0.5, 0, 0, "is gone"), "it may have computed nothing"
    assert failed == ("failed", "x", "replica")
    prompt_tokens, output_tokens = (5, 1) if kind == "openai" else (5, 3)
    assert meter.heard[3:] == [("routed", 1), ("y", 0.5, prompt_tokens, output_tokens, "")]
    stage.assert_idle()


KNOWN = {"model", "messages", "prompt", "stream", "max_tokens", "min_tokens", "add_special_tokens"}
SALT_SSE = {b"content-type": b"text/event-stream"}
JSON = {b"content-type": b"application/json"}
REPLY = b'{"choices":[{"text":"there"}],"usage":{"completion_tokens":2}}'


def salted_request(salt: str, stream: bool = False, **fields: Any) -> ChoiceRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream, **fields}
    return choice_request("r", 5, 7, path=CHAT, body=json.dumps(body).encode(), stream=stream, salt=salt)


def strict_server_status(call: FakeCall, *more: str) -> int:
    """A server that refuses what it does not know, and names that come twice; its status."""
    pairs: list[tuple[str, Any]] = json.loads(call.raw, object_pairs_hook=list)
    names = [name for name, _ in pairs]
    fine = len(set(names)) == len(names) and {*names} <= KNOWN.union(more)
    call.listener.head(200 if fine else 422, JSON)
    call.write_raw(REPLY if fine else b'{"error":{"message":"extra fields are not permitted"}}')
    call.end()
    return 200 if fine else 422


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "mine"}, {"metadata": {"cache_salt": "x"}}])
def test_server_with_cache_salt_support_gets_the_tenant_salt_once(fields: dict[str, Any]) -> None:
    stage = DispatchHarness()
    stage.fleet.add("x", kind="openai", served_model="theirs", cache_salt=True)
    heard = stage.begin(salted_request("of-a-tenant", **fields), aggregated("x"))
    body = stage.call("x").body
    assert body["cache_salt"] == "of-a-tenant"
    assert body["model"] == "theirs"
    assert body.get("metadata") == fields.get("metadata")
    assert strict_server_status(stage.call("x"), "cache_salt", "metadata") == heard.status == 200
    assert heard.relayed == REPLY


def test_server_without_cache_salt_support_gets_none() -> None:
    stage = DispatchHarness()
    stage.fleet.add("x", kind="openai", served_model="m")
    what = salted_request("of-a-tenant")
    heard = stage.begin(what, aggregated("x"))
    assert stage.call("x").raw == what.body, "bodies go on as they came"
    assert strict_server_status(stage.call("x")) == heard.status == 200
    # Nor is anything invented where tenants share: no keys, no salt.
    stage = DispatchHarness()
    stage.fleet.add("x", kind="openai", served_model="m", cache_salt=True)
    what = salted_request("")
    stage.begin(what, aggregated("x"))
    assert stage.call("x").raw == what.body


@pytest.mark.parametrize("takes", [True, False])
def test_continued_request_keeps_its_cache_salt(takes: bool) -> None:
    stage = DispatchHarness()
    for item in ("x", "y"):
        stage.fleet.add(item, kind="openai", served_model="m", token_ids=True, cache_salt=takes)
    what = salted_request("of-a-tenant", stream=True)
    stage.begin(what, aggregated("x"))
    first = stage.call("x")
    assert first.body.get("cache_salt") == ("of-a-tenant" if takes else None)
    first.listener.head(200, SALT_SSE)
    text = {"id": "1", "choices": [{"index": 0, "delta": {"content": "It"}, "token_ids": [100]}]}
    raw = json.dumps({**text, "prompt_token_ids": [1, 2]}, separators=(",", ":")).encode()
    first.write_raw(b"data: " + raw + b"\n\n")
    first.lose()
    stage.again(what, aggregated("y"), 1, 1)
    other = stage.call("y")
    assert (other.path, other.body["prompt"]) == (COMPLETIONS, [1, 2, 100])
    assert other.body.get("cache_salt") == ("of-a-tenant" if takes else None)


def test_cache_salt_is_added_beside_other_fields() -> None:
    made = relay_attempt.forwarded(b'{"model":"m","cache_salt":"own"}', "m", "n", b'"more":1', 'a"b')
    assert json.loads(made) == {"model": "n", "more": 1, "cache_salt": 'a"b'}


def test_roster_flags_servers_that_accept_a_cache_salt() -> None:
    def flags(said: str) -> tuple[bool, bool]:
        (result,) = read_engines(f'engines: [{{url: "http://h:1", kind: openai{said}}}]', "engines.yaml")
        return result.token_ids, result.cache_salt

    assert flags("") == (False, False)
    assert flags(", cache_salt: true") == (False, True)
    assert flags(", token_ids: true") == (True, True), "it is vLLM's, which takes both"
    assert flags(", token_ids: true, cache_salt: false") == (True, False)
    with pytest.raises(FormatError, match="cache_salt"):
        flags(", cache_salt: yes please")


def test_unstreamed_reply_is_abandoned_at_the_time_limit_unless_its_client_is_slow() -> None:
    stage, what = plain_harness("x", "y"), relay_request(stream=False)
    stage.begin(what, aggregated("x"))
    stage.begin(what._replace(id="other"), aggregated("y"))
    stage.dispatcher.room("other", False)
    stage.clock.pass_s(BACKSTOP_S - 1)
    before = len(stage.news)
    stage.clock.pass_s(2)
    assert stage.news[before:] == [AttemptFailed("r", 0, "replica", "x", 0)]
