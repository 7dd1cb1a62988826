"""Stop strings, penalties and formats at the door: the same in every shape of answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from door_kit import NAME, Scene, choices
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.values.sampling import SampledToken
from potluck.gateway.values import AnswerSink, ChoiceRequest


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_it_and_the_rest_is_not_wanted(stream: bool) -> None:
    resolved = Scene()
    found = resolved.complete("x", stop=["lo w"], stream=stream, max_tokens=20)
    answer = resolved.driver.answer
    assert not answer.tokens(choices("Hel"))
    assert not answer.tokens(choices("lo"))
    assert answer.tokens(choices(" world"))
    assert found.over
    if stream:
        text = "".join(part["choices"][0]["text"] for part in found.events)
        finish = found.events[-1]["choices"][0]["finish_reason"]
    else:
        text, finish = found.json["choices"][0]["text"], found.json["choices"][0]["finish_reason"]
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
def test_random_stop_strings_end_every_shape_of_answer_alike(data: st.DataObject) -> None:
    """Streamed or whole, chat or completion, with and without log probabilities, in whatever pieces tokens come."""
    stops = data.draw(st.lists(st.text("ab ", min_size=1, max_size=3), min_size=1, max_size=3))
    texts = data.draw(st.lists(st.text("abc ", min_size=1, max_size=12), min_size=1, max_size=3))
    stream, chat, logprobs, included = (data.draw(st.booleans()) for _ in range(4))
    resolved = Scene()
    fields: dict[str, Any] = {"stop": stops, "n": len(texts), "stream": stream, "seed": 1}
    fields |= {"include_stop_str_in_output": included, "max_tokens": 12}
    if logprobs:
        fields["logprobs"] = True if chat else 0
    if stream:
        fields["stream_options"] = {"include_usage": True}
    found = resolved.chat("x", **fields) if chat else resolved.complete("x", **fields)
    for asked, text in zip(resolved.driver.asked, texts, strict=True):
        answer, left, over = resolved.driver.answers[asked.id], choices(text), False
        left = [SampledToken(each.token, -1.0 if logprobs else None) for each in left]
        while left and not over:
            size = data.draw(st.integers(1, len(left)))
            over, left = answer.tokens(left[:size]), left[size:]
        if not over:
            answer.finished("length", 0)
    right = [until_stop(text, stops, included) for text in texts]
    shown, ends = [""] * len(texts), [""] * len(texts)
    logs: list[list[Any]] = [[] for _ in texts]
    for body in found.events if stream else [found.json]:
        for choice in body["choices"]:
            place = choice["index"]
            said = choice.get("delta") or choice.get("message") or choice
            shown[place] += said.get("content" if chat else "text") or ""
            ends[place] = choice["finish_reason"] or ends[place]
            told = choice["logprobs"] or {}
            logs[place] += told.get("content") or list(
                zip(told.get("tokens", ()), told.get("text_offset", ()), strict=True)
            )
    assert list(zip(shown, ends, strict=True)) == [(text, end) for text, _, end in right]
    if logprobs and chat:
        assert [[one["token"] for one in each] for each in logs] == [
            list(text[:size]) for text, (_, size, _) in zip(texts, right, strict=True)
        ]
    elif logprobs:
        assert logs == [
            [(letter, at) for at, letter in enumerate(text[:size])]
            for text, (_, size, _) in zip(texts, right, strict=True)
        ]
    whole = found.events[-1] if stream else found.json
    assert whole["usage"]["completion_tokens"] == sum(size for _, size, _ in right)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_what_an_engine_finds_wrong_reaches_the_client_as_it_is(n: int, stream: bool) -> None:
    error = {
        "message": "no such type",
        "type": "invalid_request_error",
        "param": "response_format",
        "code": "c",
    }

    def script(asked: ChoiceRequest, answer: AnswerSink) -> None:
        answer.relay_whole(400, b"application/json", json.dumps({"error": error}).encode())

    form = {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}
    found = Scene(script).complete("x", n=n, stream=stream, response_format=form)
    assert (found.status, found.json["error"]) == (400, error)


def test_formats_and_penalties_are_a_part_of_how_tokens_are_drawn() -> None:
    resolved = Scene()
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}}}
    biases = {"7": -100, "3": 2.5}
    resolved.complete(
        "x", presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias=biases
    )
    resolved.chat("x", response_format=form)
    resolved.ask("/v1/responses", {"model": NAME, "input": "x", "text": {"format": {"type": "json_object"}}})
    flat = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    resolved.ask("/v1/responses", {"model": NAME, "input": "x", "text": {"format": flat}})
    ways = [asked.sampling for asked in resolved.driver.asked]
    assert (ways[0].presence_penalty, ways[0].frequency_penalty, ways[0].repetition_penalty) == (1, -0.5, 1.2)
    assert ways[0].logit_bias == ((3, 2.5), (7, -100.0))
    assert [way.json_schema for way in ways] == ["", *['{"type":"object"}'] * 3]
