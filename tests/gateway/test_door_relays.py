"""Servers of plain OpenAI: their bytes go on as they came, and what they used is counted."""

from __future__ import annotations

import json
from itertools import pairwise

from door_kit import NAME, SERVER, Scene, choices, letters
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.state.actions import Refuse
from potluck.gateway.openai.requests import ModelCard
from potluck.gateway.openai.response import EventParser, StreamTail, counted

REPLY = {
    "id": "x",
    "choices": [{"index": 0, "text": "there", "finish_reason": "stop"}],
    "usage": {
        "prompt_tokens": 11,
        "completion_tokens": 4,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 8},
    },
}


def test_a_whole_reply_goes_on_as_it_came() -> None:
    resolved = Scene()
    body = {"model": SERVER, "prompt": "Hello you", "tools": [1], "whatever": 3}
    found = resolved.ask("/v1/completions", body)
    (asked,) = resolved.driver.asked
    assert (asked.prompt, asked.prompt_tokens, asked.max_output_tokens) == ((), 2, 16)
    assert json.loads(asked.body) == body
    raw = json.dumps(REPLY).encode()
    answer = resolved.driver.answer
    answer.relay_begin(200, b"application/json; charset=utf-8")
    answer.relay(raw[:30])
    answer.relay(raw[30:])
    assert found.status is None
    answer.relay_end()
    assert (found.status, found.data) == (200, raw)
    assert found.sent["content-type"] == "application/json; charset=utf-8"
    told = resolved.meter.told[0]
    assert (told.prompt_tokens, told.output_tokens, told.cached_tokens, told.estimated) == (11, 4, 8, False)


def test_a_second_attempt_replaces_what_the_first_had_said() -> None:
    resolved = Scene()
    found = resolved.ask("/v1/completions", {"model": SERVER, "prompt": "Hello"})
    answer = resolved.driver.answer
    answer.relay_begin(200, b"application/json")
    answer.relay(b'{"half')
    answer.relay_begin(200, b"application/json")
    answer.relay(b"{}")
    answer.relay_end()
    assert found.data == b"{}"
    assert resolved.meter.told[0].estimated


def test_a_stream_goes_on_as_it_comes() -> None:
    resolved = Scene()
    found = resolved.ask(
        "/v1/chat/completions", {"model": SERVER, "messages": [{"role": "user"}], "stream": True, "n": 3}
    )
    assert len(resolved.driver.asked) == 1
    answer = resolved.driver.answer
    answer.relay_begin(200, b"text/event-stream")
    answer.relay(b'data: {"a": 1}\n\ndata: {"b"')
    assert found.data == b'data: {"a": 1}\n\ndata: {"b"'
    answer.relay(b": 2}\n\ndata: [DONE]\n\n")
    answer.relay_end()
    assert found.over
    assert (resolved.meter.told[0].outcome, resolved.meter.told[0].estimated) == ("stop", True)
    assert len(resolved.meter.seen_s) == 1


def test_a_stream_that_breaks_off_says_so() -> None:
    resolved = Scene()
    found = resolved.ask("/v1/completions", {"model": SERVER, "prompt": "x", "stream": True})
    resolved.driver.answer.relay_begin(200, b"text/event-stream")
    resolved.driver.answer.relay(b'data: {"a": 1}\n\n')
    resolved.driver.answer.refused(Refuse("", "lost", "the server died"))
    assert found.events[-1]["error"]["message"] == "the server died"


def test_an_error_of_a_server_keeps_its_status() -> None:
    resolved = Scene()
    found = resolved.ask("/v1/completions", {"model": SERVER, "prompt": "x", "stream": True})
    resolved.driver.answer.relay_begin(422, b"application/json")
    resolved.driver.answer.relay(b'{"error": {}}')
    resolved.driver.answer.relay_end()
    assert (found.status, found.data, resolved.meter.told[0].outcome) == (422, b'{"error": {}}', "upstream")


def test_of_several_choices_servers_and_engines_may_each_say_some() -> None:
    resolved = Scene()
    found = resolved.complete("ab", n=2, max_tokens=9)
    first, second = (resolved.driver.answers[one.id] for one in resolved.driver.asked)
    second.relay_begin(200, b"application/json")
    second.relay(json.dumps(REPLY).encode())
    second.relay_end()
    first.finished("length", 0)
    assert [(one["index"], one["text"]) for one in found.json["choices"]] == [(0, ""), (1, "there")]
    streamed = resolved.complete("ab", n=2, stream=True)
    first, second = (resolved.driver.answers[one.id] for one in resolved.driver.asked[-2:])
    second.relay_begin(200, b"text/event-stream")
    second.relay(b'data: {"choices": [{"index": 0, "text": "q", "finish_reason": null}]}\n')
    second.relay(b"\ndata: [DONE]\n\n")
    second.relay_end()
    first.finished("length", 0)
    shown = [(part["choices"][0]["index"], part["choices"][0]["text"]) for part in streamed.events]
    assert shown == [(1, "q"), (0, ""), (0, "")]
    assert {part["model"] for part in streamed.events} == {NAME}
    broken = resolved.complete("ab", n=2)
    resolved.driver.answer.relay_begin(200, b"application/json")
    resolved.driver.answer.relay(b"<html>")
    resolved.driver.answer.relay_end()
    assert broken.status == 502


def test_a_server_whose_tokens_are_told_is_shown_like_an_engine() -> None:
    card = ModelCard("m", 512, letters(), plain=True)
    for extra, shown in (({}, "ab"), ({"tools": [1]}, "abc")):
        resolved = Scene(cards={"m": card})
        fields = {"stream_options": {"include_usage": True}, "stop": "c", "stream": True, **extra}
        found = resolved.ask("/v1/completions", {"model": "m", "prompt": "Hi", **fields})
        (asked,) = resolved.driver.asked
        assert (len(asked.prompt), asked.prompt_tokens) == (2, 2)
        over = resolved.driver.answer.tokens(choices("abc"))
        assert over == (not extra)
        if not over:
            resolved.driver.answer.finished("stop", 0)
        texts = [part["choices"][0]["text"] for part in found.events if part["choices"]]
        assert "".join(texts) == shown
        assert ("usage" in found.events[-1]) == (not extra)


def test_what_a_server_may_know_is_left_to_it_and_what_is_needed_is_checked() -> None:
    resolved = Scene()
    images = [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "What is it?"}]}]
    resolved.ask("/v1/chat/completions", {"model": SERVER, "messages": images, "max_completion_tokens": 7})
    assert resolved.driver.asked[-1].max_output_tokens == 7
    for wrong in ({"prompt": None}, {"stream": 1}, {"n": 0}, {"max_tokens": "x"}, {"prompt": "x" * 9000}):
        assert resolved.ask("/v1/completions", {"model": SERVER, "prompt": "x", **wrong}).status == 400
    assert resolved.ask("/v1/chat/completions", {"model": SERVER, "messages": [1]}).status == 400


@given(st.lists(st.integers(0, 400), max_size=6))
def test_parts_are_found_however_they_are_cut(cuts: list[int]) -> None:
    raw = (
        b"".join(b"data: %s\r\n\r\n" % json.dumps({"n": n}).encode() for n in range(20)) + b"data: [DONE]\n\n"
    )
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    parts, tail = EventParser(), StreamTail()
    found = []
    for start, end in pairwise(places):
        found += parts.feed(raw[start:end])
        tail.add(raw[start:end])
    assert found == [{"n": n} for n in range(20)]


def test_usage_is_that_told_last() -> None:
    first = b'{"usage": {"prompt_tokens": 1, "completion_tokens": 2}}'
    assert counted(first + json.dumps(REPLY).encode())[:2] == (11, 4)
    assert counted(b"{}") == (None, None, 0)
    tail = StreamTail()
    for byte in json.dumps(REPLY).encode():
        tail.add(bytes([byte]))
    assert tail.counts() == (11, 4, 8)
