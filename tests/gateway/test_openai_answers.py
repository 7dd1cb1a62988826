"""OpenAI responses from tokens: shapes, streaming and errors."""

from __future__ import annotations

import json
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_helpers import (
    END,
    LETTERS,
    NAME,
    SERVER,
    HandlerHarness,
    answering_with,
    letter_tokenizer,
    letter_tokens,
    refusing_with,
    sampled_letters,
)

from potluck.api.openai_replies import (
    ChoiceChunks,
    ReplyHead,
    event,
    part_choice,
    usage,
    usage_text,
    whole_choice,
    whole_reply,
)
from potluck.api.openai_requests import ChatRequest, CompletionRequest
from potluck.api.text_stream import TextDelta
from potluck.core.state.actions import Refuse
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.gateway.openai.response import REFUSALS
from potluck.gateway.values import AnswerSink, ChoiceRequest


def test_completion_has_text_usage_and_logged_outcome() -> None:
    resolved = HandlerHarness(answering_with("world", cached=3))
    result = resolved.complete("Hello", max_tokens=5, temperature=0)
    assert (result.status, result.over, result.streamed) == (200, True, False)
    reply = result.json
    assert reply["id"].startswith("cmpl-")
    assert (reply["object"], reply["model"], reply["created"]) == ("text_completion", NAME, 10**9)
    assert reply["choices"] == [{"index": 0, "finish_reason": "length", "logprobs": None, "text": "world"}]
    assert reply["usage"] == usage(5, 5, 3)
    assert result.sent["content-type"] == "application/json"
    assert result.sent["x-request-id"].startswith("req-")
    (asked,) = resolved.driver.asked
    assert (asked.prompt, asked.prompt_tokens) == (tuple(letter_tokens("Hello")), 5)
    assert (asked.max_output_tokens, asked.sampling) == (5, Sampling())
    assert asked.path == b"/v1/completions"
    assert json.loads(asked.body)["prompt"] == "Hello"
    (message,) = resolved.meter.told
    assert (
        message.outcome,
        message.status,
        message.prompt_tokens,
        message.cached_tokens,
        message.output_tokens,
    ) == ("length", 200, 5, 3, 5)
    assert resolved.door.open == 0


def test_streamed_chat_has_role_content_finish_and_usage() -> None:
    resolved = HandlerHarness(answering_with("Hey", "stop"))
    result = resolved.chat("Hi", stream=True, stream_options={"include_usage": True})
    assert (result.status, result.over) == (200, True)
    assert result.sent["content-type"].startswith("text/event-stream")
    *parts, last = result.events
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": "H"}
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == "Hey"
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, None, "stop"]
    assert {part["usage"] for part in parts} == {None}
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({part["id"] for part in [*parts, last]}) == 1
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert resolved.driver.asked[0].stream
    assert resolved.meter.told[0].streamed


def test_prompts_times_n_become_requests_with_derived_seeds() -> None:
    resolved = HandlerHarness()
    result = resolved.complete(["ab", letter_tokens("cde")], n=2, seed=7, temperature=1, max_tokens=4)
    asked = resolved.driver.asked
    assert [one.prompt for one in asked] == [
        tuple(letter_tokens(text)) for text in ("ab", "ab", "cde", "cde")
    ]
    assert [one.sampling.seed for one in asked] == [7, 7 + (1 << 32)] * 2
    assert len({one.id for one in asked}) == 4
    bodies = [json.loads(one.body) for one in asked]
    assert [body["prompt"] for body in bodies] == [list(one.prompt) for one in asked]
    assert [(body["n"], body["seed"]) for body in bodies] == [(1, one.sampling.seed) for one in asked]
    for place in (2, 0, 3, 1):
        assert result.status is None
        resolved.driver.answers[asked[place].id].tokens(sampled_letters("wxyz"[place]))
        resolved.driver.answers[asked[place].id].finished("stop", 2)
    assert [choice["text"] for choice in result.json["choices"]] == list("wxyz")
    assert [choice["index"] for choice in result.json["choices"]] == [0, 1, 2, 3]
    assert result.json["usage"] == usage(5, 4, 5)


def test_streamed_choices_are_sent_as_they_arrive() -> None:
    resolved = HandlerHarness()
    result = resolved.chat(n=2, stream=True)
    first, second = (resolved.driver.answers[one.id] for one in resolved.driver.asked)
    second.tokens(sampled_letters("x"))
    resolved.now_s = 3.0
    first.tokens(sampled_letters("ab"))
    assert resolved.meter.seen_s == [], "each answer's tokens are apart from the other's"
    resolved.now_s = 4.0
    first.tokens(sampled_letters(""))
    assert resolved.meter.seen_s == [1.0]
    second.finished("stop", 0)
    assert not result.over
    first.finished("length", 0)
    texts = ["", ""]
    for part in result.events:
        texts[part["choices"][0]["index"]] += part["choices"][0]["delta"].get("content", "")
    assert texts == ["ab", "x"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_log_probabilities_are_returned_in_every_response_shape(stream: bool, chat: bool) -> None:
    def script(asked: Any, answer: Any) -> None:
        assert asked.sampling.logprobs == 1
        answer.tokens([SampledToken(33, -0.5, ((33, -0.5),))])
        answer.tokens([SampledToken(34, -0.25, ((40, -0.125),))])
        answer.finished("length", 0)

    resolved = HandlerHarness(script)
    asks: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
    result = (resolved.chat if chat else resolved.complete)("x", stream=stream, max_tokens=2, **asks)
    choices = [part["choices"][0] for part in result.events] if stream else result.json["choices"]
    logs = [one["logprobs"] for one in choices if one["logprobs"]]
    if chat:
        values = [entry["logprob"] for log in logs for entry in log["content"]]
    else:
        values = [value for log in logs for value in log["token_logprobs"]]
        assert [offset for log in logs for offset in log["text_offset"]] == [0, 1]
    assert values == [-0.5, -0.25]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_completion_top_logprobs_has_most_likely_tokens_and_the_sampled_token(
    count: int, stream: bool
) -> None:
    likeliest = ((33, -0.125), (34, -2.5))

    def script(asked: Any, answer: Any) -> None:
        assert asked.sampling.logprobs == count
        answer.tokens([SampledToken(40, -3.0, likeliest[:count])])
        answer.tokens([SampledToken(33, -0.125, likeliest[:count])])
        answer.finished("length", 0)

    result = HandlerHarness(script).complete("x", stream=stream, max_tokens=2, logprobs=count)
    choices = [part["choices"][0] for part in result.events] if stream else result.json["choices"]
    top = [entry for one in choices if one["logprobs"] for entry in one["logprobs"]["top_logprobs"]]
    expected = {LETTERS[token]: logprob for token, logprob in likeliest[:count]}
    assert top == [{LETTERS[40]: -3.0, **expected}, {LETTERS[33]: -0.125, **expected}]


def test_completion_top_logprobs_with_equal_texts_keeps_sampled_and_likelier_values() -> None:
    delta = TextDelta("", (SampledToken(7, -3.0, ((5, -0.5), (6, -1.0), (4, -1.5))),))
    tokenizer = letter_tokenizer()
    tokenizer.token_text = lambda token: "\ufffd" if token in (5, 7) else "x"  # type: ignore[method-assign]
    head = ReplyHead("id-1", 77, NAME, False)
    choice: Any = whole_choice(head, 0, delta, tokenizer, logprobs=True)
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -3.0, "x": -1.0}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_chat_top_logprobs_has_the_requested_count_without_the_sampled_token(
    count: int, stream: bool
) -> None:
    likeliest = ((33, -0.125), (34, -2.5))

    def script(asked: Any, answer: Any) -> None:
        answer.tokens([SampledToken(40, -3.0, likeliest[:count])])
        answer.finished("length", 0)

    result = HandlerHarness(script).chat("x", stream=stream, max_tokens=1, logprobs=True, top_logprobs=count)
    choices = [part["choices"][0] for part in result.events] if stream else result.json["choices"]
    (entry,) = [entry for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]]
    assert (entry["token"], entry["logprob"]) == (LETTERS[40], -3.0)
    assert [item["token"] for item in entry["top_logprobs"]] == [LETTERS[33], LETTERS[34]][:count]


@pytest.mark.parametrize(
    ("options", "whole", "continuous"),
    [
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"continuous_usage_stats": True}, False, False),
        ({"include_usage": None, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True, "continuous_usage_stats": False}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({}, False, False),
        (None, False, False),
    ],
)
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_stream_usage_is_sent_only_with_include_usage(
    options: dict[str, Any] | None, whole: bool, continuous: bool, logprobs: bool, n: int
) -> None:
    result = HandlerHarness(answering_with("abc")).chat(
        "x", stream=True, n=n, stream_options=options, logprobs=logprobs
    )
    parts = [part for part in result.events if part["choices"]]
    assert (len(result.events) - len(parts)) == whole
    assert all(("usage" in part) == whole for part in parts)
    assert all((part.get("usage") is not None) == continuous for part in parts)


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": False}])
@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
def test_stream_options_without_stream_is_400(options: dict[str, Any], stream: dict[str, Any]) -> None:
    for owns in (False, True):
        directory = SimpleNamespace(segments=lambda model: True, owns=lambda model, owns=owns: owns)
        directory.adapters = dict
        resolved = HandlerHarness(answering_with("abc"), directory=directory)
        for ask in (resolved.complete, resolved.chat):
            result = ask("x", stream_options=options, **stream)
            assert (result.status, result.json["error"]["param"]) == (400, "stream_options")
        assert resolved.driver.asked == []
        assert resolved.chat("x", stream_options=None, **stream).status == 200


def test_end_tokens_are_hidden_and_client_stop_tokens_reach_the_engine() -> None:
    resolved = HandlerHarness()
    result = resolved.complete(
        "x", stop_token_ids=[40], ignore_eos=False, min_tokens=1, max_tokens=9, priority=3
    )
    (asked,) = resolved.driver.asked
    assert (tuple(sorted(asked.ends)), asked.ignore_eos, asked.min_tokens, asked.priority) == (
        (40, END),
        False,
        1,
        3,
    )
    resolved.driver.answer.tokens([SampledToken(33), SampledToken(END)])
    resolved.driver.answer.finished("stop", 0)
    assert result.json["choices"][0]["text"] == LETTERS[33]
    ignoring = resolved.complete("x", ignore_eos=True, max_tokens=9)
    resolved.driver.answer.tokens([SampledToken(33), SampledToken(END)])
    resolved.driver.answer.finished("length", 0)
    assert ignoring.json["choices"][0]["text"] == LETTERS[33] + LETTERS[END]


REFUSED = {
    "overloaded": 429,
    "no_capacity": 503,
    "too_long": 400,
    "deadline": 504,
    "unknown_model": 404,
    "unknown_class": 400,
    "retries": 502,
    "lost": 502,
    "grammar": 422,
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_brain_refusal_reason_maps_to_its_http_status(reason: str) -> None:
    resolved = HandlerHarness(refusing_with(reason, "all are busy", 2.3))
    result = resolved.chat(stream=True)
    assert (result.status, result.json["error"]["message"]) == (REFUSED[reason], "all are busy")
    assert result.sent.get("retry-after") == ("3" if result.status in (429, 503) else None)
    assert resolved.meter.told[0].outcome == reason
    assert resolved.door.open == 0


def test_refusal_of_one_choice_ends_all_choices() -> None:
    resolved = HandlerHarness()
    result = resolved.complete("x", n=3)
    first, second, third = resolved.driver.asked
    resolved.driver.answers[second.id].tokens(sampled_letters("ab"))
    resolved.driver.answers[second.id].refused(Refuse(second.id, "lost", "gone"))
    assert result.status == 502
    assert resolved.driver.cancelled == [first.id, third.id]
    resolved.driver.answers[first.id].tokens(sampled_letters("late"))
    resolved.driver.answers[first.id].finished("stop", 0)
    assert len(resolved.meter.told) == 1


def test_refusal_of_the_first_choice_prevents_the_others() -> None:
    resolved = HandlerHarness(refusing_with("overloaded"))
    assert resolved.complete("x", n=3).status == 429
    assert len(resolved.driver.asked) == 1
    assert resolved.driver.cancelled == []


def test_error_during_a_stream_is_a_stream_event() -> None:
    resolved = HandlerHarness()
    result = resolved.chat(stream=True)
    resolved.driver.answer.tokens(sampled_letters("ab"))
    resolved.driver.answer.refused(Refuse(resolved.driver.asked[0].id, "retries", "three engines died"))
    assert result.over
    assert result.events[-1]["error"]["code"] == "upstream_failed"
    assert result.events[-1]["error"]["message"] == "three engines died"
    assert resolved.meter.told[0].output_tokens == 2


def test_client_disconnect_cancels_its_choices_and_a_slow_client_pauses_them() -> None:
    resolved = HandlerHarness()
    result = resolved.chat(stream=True, n=2)
    assert result.on_room is not None
    assert result.on_gone is not None
    result.on_room(False)
    first, second = (one.id for one in resolved.driver.asked)
    resolved.driver.answers[first].finished("stop", 0)
    result.on_room(True)
    assert resolved.driver.rooms == [(first, False), (second, False), (second, True)]
    result.on_gone()
    assert resolved.driver.cancelled == [second]
    assert (resolved.meter.told[0].outcome, resolved.meter.told[0].status) == ("cancelled", 499)
    assert resolved.driver.answers[second].tokens(sampled_letters("a"))
    assert resolved.door.open == 0


WRONG: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "gpt"}, 404, "model"),
    ({"model": 5}, 400, "model"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [100_000]}, 400, "prompt"),
    ({"prompt": "x" * 600}, 400, None),
    ({"prompt": "x" * 490, "max_tokens": 25}, 400, None),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"presence_penalty": 3}, 400, "presence_penalty"),
    ({"logit_bias": {"100000": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": -101}}, 400, "logit_bias"),
    ({"response_format": {"type": "yaml"}}, 400, "response_format"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 2, "max_tokens": 9}, 400, "min_tokens"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "ignore_eos"),
    ({"echo": True}, 400, "echo"),
    ({"bogus": 1}, 400, "bogus"),
    ({"service_tier": "gold"}, 400, "service_tier"),
    ({"priority": 1 << 40}, 400, "priority"),
    ({"min_tokens": 9, "max_tokens": 5}, 400, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "status", "param"), WRONG)
def test_invalid_field_is_refused_by_name(fields: dict[str, Any], status: int, param: str | None) -> None:
    resolved = HandlerHarness()
    result = resolved.complete(**{"prompt": "x", **fields})
    assert (result.status, result.json["error"]["param"]) == (status, param)
    if status == 400 and param is None:
        assert result.json["error"]["code"] == "context_length_exceeded"
    assert resolved.driver.asked == []
    assert resolved.door.open == 0


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'"x"', b'{"model": "tiny", "prompt": "\\ud800"}']
)
def test_body_that_is_not_json_is_400(body: bytes) -> None:
    assert HandlerHarness().ask(body=body).status == 400


def test_models_health_and_ready_paths_are_answered() -> None:
    resolved = HandlerHarness(ready=lambda model: "no replica" if model == SERVER else "")
    models = resolved.ask("/v1/models", method="GET").json
    assert [entry["id"] for entry in models["data"]] == [NAME, SERVER]
    assert resolved.ask("/v1/models/tiny", method="GET").json["max_model_len"] == 512
    assert resolved.ask("/v1/models/gpt", method="GET").status == 404
    assert resolved.ask("/health", method="GET").json == {"status": "ok"}
    waiting = resolved.ask("/ready", method="GET")
    assert (waiting.status, waiting.json["reasons"]) == (503, {SERVER: "no replica"})
    assert resolved.ask("/ready", method="GET", query=f"model={NAME}").status == 200
    assert resolved.ask("/v1/embeddings").status == 400
    assert resolved.ask("/v1/whatever").status == 404
    assert resolved.ask("/v1/completions", method="GET").status == 405
    assert resolved.ask("/v1/models", method="POST").status == 405
    assert resolved.ask("/health", method="GET", x_request_id="mine-1").sent["x-request-id"] == "mine-1"
    assert resolved.ask("/health", method="GET", x_request_id="my own").sent["x-request-id"] != "my own"


def test_openapi_document_lists_every_path_and_read_field() -> None:
    resolved = HandlerHarness(answering_with("a"))
    result = resolved.ask("/openapi.json", method="GET").json
    schemas = result["components"]["schemas"]
    for path, methods in result["paths"].items():
        (method,) = methods
        answer = resolved.ask(path.replace("{id}", NAME), b"{}", method=method.upper())
        assert answer.status in (200, 400), path
        assert (answer.status == 200) == (method == "get"), path
    for name, kind in (("CompletionRequest", CompletionRequest), ("ChatRequest", ChatRequest)):
        schema = schemas[name]["properties"]
        read = {field.name for field in fields(kind)} | (
            {"prompt"} if kind is CompletionRequest else {"messages"}
        )
        assert read <= schema.keys()
        assert schema.keys() - read == {"service_tier", "prompt_cache_key", "user", "metadata"}
        assert schema["model"]["enum"] == [NAME, SERVER]


def test_closing_gateway_refuses_new_requests_with_503() -> None:
    resolved = HandlerHarness()
    resolved.door.closing = "shutting down"
    result = resolved.complete()
    assert (result.status, result.json["error"]["code"]) == (503, "shutting_down")
    assert resolved.ask("/ready", method="GET").status == 503


def test_request_class_and_deadline_come_from_headers_or_service_tier() -> None:
    resolved = HandlerHarness()
    resolved.now_s = 5.0
    resolved.complete(headers={"x-potluck-class": "interactive", "x-potluck-deadline-ms": "1500"})
    resolved.complete(service_tier="flex", prompt_cache_key="k")
    resolved.complete()
    first, second, third = resolved.driver.asked
    assert (first.request_class, first.deadline_s) == ("interactive", 6.5)
    assert (second.request_class, second.deadline_s) == ("batch", None)
    assert third.request_class == "standard"
    assert resolved.complete(headers={"x-potluck-class": "bach"}).status == 400
    assert resolved.complete(headers={"x-potluck-deadline-ms": "soon"}).status == 400


def test_exact_header_disables_lossy_kv() -> None:
    resolved = HandlerHarness()
    for text in ("1", "true", "0", "false"):
        resolved.complete(headers={"x-potluck-exact": text})
    resolved.complete()
    assert [item.exact for item in resolved.driver.asked] == [True, True, False, False, False]
    for wrong in ("", "yes", "2", "True", "1, 1"):
        result = resolved.complete(headers={"x-potluck-exact": wrong})
        assert (result.status, result.json["error"]["param"]) == (400, "x-potluck-exact"), wrong
        assert "must be 1, 0, true or false" in result.json["error"]["message"]


def test_requests_from_other_origins_are_refused_without_keys() -> None:
    resolved = HandlerHarness(answering_with("x"))
    assert resolved.complete(headers={"origin": "http://evil.example"}).status == 403
    assert resolved.complete(headers={"host": "evil.example"}).status == 403
    assert resolved.complete(headers={"host": "localhost:8000"}).status == 200


def test_unexpected_exception_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    def script(asked: Any, answer: object) -> None:
        raise RuntimeError(asked.body)

    result = HandlerHarness(script).complete("my secret")
    assert result.status == 500
    assert "secret" not in caplog.text + result.data.decode()
    assert "RuntimeError" in caplog.text


@given(
    st.text(max_size=20),
    st.text(max_size=5),
    st.booleans(),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
def test_prebuilt_response_bytes_equal_serialised_json(
    text: str, model: str, chat: bool, index: int, said: bool, finish: str
) -> None:
    head = ReplyHead("id-1", 77, model, chat, said)
    chunks = ChoiceChunks(head, index)

    def part(delta: TextDelta, first: bool) -> bytes:
        made = part_choice(head, index, delta, None, logprobs=False, offset=0, first=first)
        return event(head.reply([made], chunk=True))

    assert chunks.first(text) == part(TextDelta(text), True)
    if text:
        assert chunks.part(text) == part(TextDelta(text), False)
    assert chunks.last(text, finish) == part(TextDelta(text, (), finish), False)
    whole = head.reply(
        [whole_choice(head, 0, TextDelta(text, (), finish), None, logprobs=False)],
        chunk=False,
        usage=usage(3, 2, 1),
    )
    assert json.loads(whole_reply(head, text, finish, usage_text(3, 2, 1))) == whole
    if said:
        counted = event(
            head.reply(
                [part_choice(head, index, TextDelta("x"), None, logprobs=False, offset=0, first=False)],
                chunk=True,
                usage=usage(3, 2, 1),
            )
        )
        assert chunks.part("x", usage_text(3, 2, 1)) == counted


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_answer_at_the_engine(stream: bool) -> None:
    resolved = HandlerHarness()
    result = resolved.complete("x", stop=["lo w"], stream=stream, max_tokens=20)
    answer = resolved.driver.answer
    assert not answer.tokens(sampled_letters("Hel"))
    assert not answer.tokens(sampled_letters("lo"))
    assert answer.tokens(sampled_letters(" world"))
    assert result.over
    if stream:
        text = "".join(part["choices"][0]["text"] for part in result.events)
        finish = result.events[-1]["choices"][0]["finish_reason"]
    else:
        text, finish = result.json["choices"][0]["text"], result.json["choices"][0]["finish_reason"]
    assert (text, finish) == ("Hel", "stop")
    assert resolved.meter.told[0].output_tokens == 7


def until_stop(text: str, stops: list[str], included: bool) -> tuple[str, int, str]:
    """What is shown of a text, after how many letters it ends, and why: letter by letter."""
    for size in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:size].endswith(stop)]
        if ended:
            return text[: size if included else size - max(map(len, ended))], size, "stop"
    return text, len(text), "length"


@given(st.data())
def test_random_stop_strings_end_every_response_shape_at_the_same_text(data: st.DataObject) -> None:
    """Streamed or whole, chat or completion, with and without log probabilities, in whatever pieces tokens come."""
    stops = data.draw(st.lists(st.text("ab ", min_size=1, max_size=3), min_size=1, max_size=3))
    texts = data.draw(st.lists(st.text("abc ", min_size=1, max_size=12), min_size=1, max_size=3))
    stream, chat, logprobs, included = (data.draw(st.booleans()) for _ in range(4))
    resolved = HandlerHarness()
    fields: dict[str, Any] = {"stop": stops, "n": len(texts), "stream": stream, "seed": 1}
    fields |= {"include_stop_str_in_output": included, "max_tokens": 12}
    if logprobs:
        fields["logprobs"] = True if chat else 0
    if stream:
        fields["stream_options"] = {"include_usage": True}
    result = resolved.chat("x", **fields) if chat else resolved.complete("x", **fields)
    for asked, text in zip(resolved.driver.asked, texts, strict=True):
        answer, left, over = resolved.driver.answers[asked.id], sampled_letters(text), False
        left = [SampledToken(item.token, -1.0 if logprobs else None) for item in left]
        while left and not over:
            size = data.draw(st.integers(1, len(left)))
            over, left = answer.tokens(left[:size]), left[size:]
        if not over:
            answer.finished("length", 0)
    right = [until_stop(text, stops, included) for text in texts]
    shown, ends = [""] * len(texts), [""] * len(texts)
    logs: list[list[Any]] = [[] for _ in texts]
    for body in result.events if stream else [result.json]:
        for choice in body["choices"]:
            place = choice["index"]
            line = choice.get("delta") or choice.get("message") or choice
            shown[place] += line.get("content" if chat else "text") or ""
            ends[place] = choice["finish_reason"] or ends[place]
            message = choice["logprobs"] or {}
            logs[place] += message.get("content") or list(
                zip(message.get("tokens", ()), message.get("text_offset", ()), strict=True)
            )
    assert list(zip(shown, ends, strict=True)) == [(text, end) for text, _, end in right]
    if logprobs and chat:
        assert [[one["token"] for one in log] for log in logs] == [
            list(text[:size]) for text, (_, size, _) in zip(texts, right, strict=True)
        ]
    elif logprobs:
        assert logs == [
            [(letter, at) for at, letter in enumerate(text[:size])]
            for text, (_, size, _) in zip(texts, right, strict=True)
        ]
    whole = result.events[-1] if stream else result.json
    assert whole["usage"]["completion_tokens"] == sum(size for _, size, _ in right)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_engine_error_reaches_the_client_unchanged(n: int, stream: bool) -> None:
    error = {
        "message": "no such type",
        "type": "invalid_request_error",
        "param": "response_format",
        "code": "c",
    }

    def script(asked: ChoiceRequest, answer: AnswerSink) -> None:
        answer.relay_whole(400, b"application/json", json.dumps({"error": error}).encode())

    form = {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}
    result = HandlerHarness(script).complete("x", n=n, stream=stream, response_format=form)
    assert (result.status, result.json["error"]) == (400, error)


def test_response_formats_and_penalties_are_part_of_sampling() -> None:
    resolved = HandlerHarness()
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}}}
    biases = {"7": -100, "3": 2.5}
    resolved.complete(
        "x", presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias=biases
    )
    resolved.chat("x", response_format=form)
    resolved.chat("x", response_format={"type": "json_object"})
    ways = [asked.sampling for asked in resolved.driver.asked]
    assert (ways[0].presence_penalty, ways[0].frequency_penalty, ways[0].repetition_penalty) == (1, -0.5, 1.2)
    assert ways[0].logit_bias == ((3, 2.5), (7, -100.0))
    assert [way.json_schema for way in ways] == ["", *['{"type":"object"}'] * 2]
