"""Relays to plain OpenAI servers: unchanged bytes and counted usage."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_helpers import CARDS, LETTERS, NAME, SERVER, HandlerHarness, letter_tokenizer, sampled_letters
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from potluck.api.openai_requests import DRAWN
from potluck.api.tokenizer import ModelTokenizer
from potluck.core.state.actions import Refuse
from potluck.gateway.openai import requests
from potluck.gateway.openai.response import EventParser, StreamTail, counted
from potluck.gateway.values import TokenCounts

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


def test_whole_reply_of_a_plain_server_is_relayed_unchanged() -> None:
    resolved = HandlerHarness()
    body = {"model": SERVER, "prompt": "Hello you", "tools": [1], "whatever": 3}
    result = resolved.ask("/v1/completions", body)
    (asked,) = resolved.driver.asked
    assert (asked.prompt, asked.prompt_tokens, asked.max_output_tokens) == ((), 2, 16)
    assert json.loads(asked.body) == body
    raw = json.dumps(REPLY).encode()
    answer = resolved.driver.answer
    answer.relay_begin(200, b"application/json; charset=utf-8")
    answer.relay(raw[:30])
    answer.relay(raw[30:])
    assert result.status is None
    answer.relay_end()
    assert (result.status, result.data) == (200, raw)
    assert result.sent["content-type"] == "application/json; charset=utf-8"
    message = resolved.meter.told[0]
    assert (message.prompt_tokens, message.output_tokens, message.cached_tokens, message.estimated) == (
        11,
        4,
        8,
        False,
    )


def test_second_relay_attempt_replaces_the_partial_reply_and_its_usage_is_estimated() -> None:
    resolved = HandlerHarness()
    result = resolved.ask("/v1/completions", {"model": SERVER, "prompt": "Hello"})
    answer = resolved.driver.answer
    answer.relay_begin(200, b"application/json")
    answer.relay(b'{"half')
    answer.relay_begin(200, b"application/json")
    answer.relay(b"{}")
    answer.relay_end()
    assert result.data == b"{}"
    assert resolved.meter.told[0].estimated


def test_stream_of_a_plain_server_is_relayed_unchanged() -> None:
    resolved = HandlerHarness()
    result = resolved.ask(
        "/v1/chat/completions", {"model": SERVER, "messages": [{"role": "user"}], "stream": True, "n": 3}
    )
    assert len(resolved.driver.asked) == 1
    answer = resolved.driver.answer
    answer.relay_begin(200, b"text/event-stream")
    answer.relay(b'data: {"a": 1}\n\ndata: {"b"')
    assert result.data == b'data: {"a": 1}\n\ndata: {"b"'
    answer.relay(b": 2}\n\ndata: [DONE]\n\n")
    answer.relay_end()
    assert result.over
    assert (resolved.meter.told[0].outcome, resolved.meter.told[0].estimated) == ("stop", True)
    assert len(resolved.meter.seen_s) == 1


def test_broken_relayed_stream_ends_with_an_error_event() -> None:
    resolved = HandlerHarness()
    result = resolved.ask("/v1/completions", {"model": SERVER, "prompt": "x", "stream": True})
    resolved.driver.answer.relay_begin(200, b"text/event-stream")
    resolved.driver.answer.relay(b'data: {"a": 1}\n\n')
    resolved.driver.answer.refused(Refuse("", "lost", "the server died"))
    assert result.events[-1]["error"]["message"] == "the server died"


def test_error_of_a_plain_server_keeps_its_status() -> None:
    resolved = HandlerHarness()
    result = resolved.ask("/v1/completions", {"model": SERVER, "prompt": "x", "stream": True})
    resolved.driver.answer.relay_begin(422, b"application/json")
    resolved.driver.answer.relay(b'{"error": {}}')
    resolved.driver.answer.relay_end()
    assert (result.status, result.data, resolved.meter.told[0].outcome) == (422, b'{"error": {}}', "upstream")


def test_choices_may_come_from_plain_servers_and_segment_engines() -> None:
    resolved = HandlerHarness()
    result = resolved.complete("ab", n=2, max_tokens=9)
    first, second = (resolved.driver.answers[one.id] for one in resolved.driver.asked)
    second.relay_begin(200, b"application/json")
    second.relay(json.dumps(REPLY).encode())
    second.relay_end()
    first.finished("length", 0)
    assert [(one["index"], one["text"]) for one in result.json["choices"]] == [(0, ""), (1, "there")]
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


def test_plain_server_with_token_ids_is_shown_like_an_engine() -> None:
    card = requests.ModelCard("m", 512, letter_tokenizer(), plain=True)
    for extra, shown in (({}, "ab"), ({"tools": [1]}, "abc")):
        resolved = HandlerHarness(cards={"m": card})
        fields = {"stream_options": {"include_usage": True}, "stop": "c", "stream": True, **extra}
        result = resolved.ask("/v1/completions", {"model": "m", "prompt": "Hi", **fields})
        (asked,) = resolved.driver.asked
        assert (len(asked.prompt), asked.prompt_tokens) == (2, 2)
        over = resolved.driver.answer.tokens(sampled_letters("abc"))
        assert over == (not extra)
        if not over:
            resolved.driver.answer.finished("stop", 0)
        texts = [part["choices"][0]["text"] for part in result.events if part["choices"]]
        assert "".join(texts) == shown
        assert ("usage" in result.events[-1]) == (not extra)


def test_plain_server_fields_are_forwarded_and_required_ones_are_checked() -> None:
    resolved = HandlerHarness()
    images = [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "What is it?"}]}]
    resolved.ask("/v1/chat/completions", {"model": SERVER, "messages": images, "max_completion_tokens": 7})
    assert resolved.driver.asked[-1].max_output_tokens == 7
    for wrong in ({"prompt": None}, {"stream": 1}, {"n": 0}, {"max_tokens": "x"}, {"prompt": "x" * 9000}):
        assert resolved.ask("/v1/completions", {"model": SERVER, "prompt": "x", **wrong}).status == 400
    assert resolved.ask("/v1/chat/completions", {"model": SERVER, "messages": [1]}).status == 400


@given(st.lists(st.integers(0, 400), max_size=6))
def test_stream_events_are_found_for_any_chunking(cuts: list[int]) -> None:
    raw = (
        b"".join(b"data: %s\r\n\r\n" % json.dumps({"n": n}).encode() for n in range(20)) + b"data: [DONE]\n\n"
    )
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    parts, tail = EventParser(), StreamTail()
    result = []
    for start, end in pairwise(places):
        result += parts.feed(raw[start:end])
        tail.add(raw[start:end])
    assert result == [{"n": n} for n in range(20)]


def test_usage_of_a_relayed_reply_is_the_last_reported() -> None:
    first = b'{"usage": {"prompt_tokens": 1, "completion_tokens": 2}}'
    assert counted(first + json.dumps(REPLY).encode())[:2] == (11, 4)
    assert counted(b"{}") == (None, None, 0)
    tail = StreamTail()
    for byte in json.dumps(REPLY).encode():
        tail.add(bytes([byte]))
    assert tail.counts() == (11, 4, 8)


ROOM = 490  # All prompts are short enough to be tokenised at once.


def plain_harness(**fields: object) -> HandlerHarness:
    card = requests.ModelCard("m", ROOM, letter_tokenizer(), plain=True)  # a token for each letter
    return HandlerHarness(cards={"m": card}, **fields)


def estimated_tokens(resolved: HandlerHarness, text: str, **fields: object) -> tuple[int, int]:
    """How many tokens were told of it, and as how long it counts."""
    resolved.ask("/v1/completions", {"model": "m", "prompt": text, **fields})
    asked = resolved.driver.asked[-1]
    return len(asked.prompt), asked.prompt_tokens


def test_first_prompts_are_tokenised_to_estimate_the_length_of_others() -> None:
    resolved = plain_harness()
    assert [estimated_tokens(resolved, "a" * 100) for _ in range(requests.FEW)] == [(100, 100)] * requests.FEW
    assert [estimated_tokens(resolved, "a" * 200) for _ in range(requests.SAMPLE - requests.FEW - 1)] == [
        (0, 200)
    ] * (requests.SAMPLE - requests.FEW - 1)
    assert estimated_tokens(resolved, "a" * 300) == (300, 300)
    assert estimated_tokens(resolved, "a" * 300) == (0, 300)


def test_prompt_that_might_not_fit_is_tokenised_and_refused_if_too_long() -> None:
    resolved = plain_harness()
    for _ in range(requests.FEW):
        estimated_tokens(resolved, "a" * 10)
    assert estimated_tokens(resolved, "a" * (ROOM // 2))[0] == 0
    assert estimated_tokens(resolved, "a" * (ROOM - 100)) == (ROOM - 100, ROOM - 100)
    assert estimated_tokens(resolved, "a", max_tokens=ROOM - 1) == (1, 1)
    refused = resolved.ask("/v1/completions", {"model": "m", "prompt": "a" * ROOM})
    assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")


def test_prompts_for_segment_engines_are_tokenised() -> None:
    there = [False]
    resolved = plain_harness(directory=SimpleNamespace(segments=lambda model: there[0]))
    for _ in range(requests.FEW):
        estimated_tokens(resolved, "a" * 10)
    assert estimated_tokens(resolved, "a" * 10) == (0, 10)
    there[0] = True
    assert estimated_tokens(resolved, "a" * 10) == (10, 10)


def test_reported_usage_improves_the_length_estimate_and_is_recorded() -> None:
    resolved = HandlerHarness(cards={"m": requests.ModelCard("m", ROOM, None, plain=True)})
    assert estimated_tokens(resolved, "a" * 80) == (0, 20), "nothing is known: four characters"
    usage = {"usage": {"prompt_tokens": 40, "completion_tokens": 3}}
    resolved.driver.answer.relay_whole(200, b"application/json", json.dumps(usage).encode())
    assert (resolved.meter.told[-1].prompt_tokens, resolved.meter.told[-1].estimated) == (40, False)
    assert estimated_tokens(resolved, "a" * 80) == (0, 40)
    assert resolved.ask("/v1/completions", {"model": "m", "prompt": [1, 2, 3]}).status is None
    assert resolved.driver.asked[-1].prompt_tokens == 3
    resolved.driver.answer.relay_whole(200, b"application/json", json.dumps(usage).encode())
    assert estimated_tokens(resolved, "a" * 80) == (0, 40), "a prompt of tokens teaches nothing of texts"


@given(st.lists(st.tuples(st.integers(-5, 10**7), st.integers(-5, 10**7))))
def test_learned_characters_per_token_stay_bounded(said: list[tuple[int, int]]) -> None:
    length = requests.TenantLength()
    for chars, tokens in said:
        length.learn(chars, tokens)
        assert requests.LEAST_CHARS <= length.chars_per_token <= requests.MOST_CHARS


@given(st.floats(0.6, 15.0))
def test_learned_characters_per_token_converge(truth: float) -> None:
    length = requests.TenantLength()
    for number in range(200):
        tokens = 50 + number % 7 * 40
        length.learn(round(tokens * truth), tokens)
    assert length.chars_per_token == pytest.approx(truth, rel=0.02)


def test_length_estimates_are_separate_by_tenant_and_model() -> None:
    lengths = requests.LengthEstimates()
    lengths.of("m", "ann").learn(100, 100)
    assert lengths.of("m", "ann").chars_per_token == 1.0
    assert lengths.of("m", "bob").chars_per_token == lengths.of("n", "ann").chars_per_token == 4.0


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
USER = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }}:{% endfor %}{{ messages[-1].content }}"


def owning_harness(owns: bool = True) -> HandlerHarness:
    tokenizer = Tokenizer(BPE(vocab={letter: place for place, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = Fuse()
    card = requests.ModelCard(NAME, 512, ModelTokenizer(tokenizer, TEMPLATE), vocab=len(LETTERS))
    directory = SimpleNamespace(
        segments=lambda model: True, owns=lambda model: owns, adapters=lambda: {"lora": NAME, "other": "gone"}
    )
    return HandlerHarness(cards={**CARDS, NAME: card}, directory=directory)


def letters_text(tokens: tuple[int, ...]) -> str:
    return "".join(LETTERS[token] for token in tokens)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": TOOLS},
        {"response_format": {"type": "json_object"}},
        {"presence_penalty": 0.5},
        {"structured_outputs": {"regex": "a+"}},
        {"what_vllm_will_have": 1},
        {"return_token_ids": True},
        {"messages": [{"role": "tool", "tool_call_id": "c", "content": "hi"}]},
    ],
)
def test_fields_for_engine_features_are_forwarded_unchanged(more: dict[str, Any]) -> None:
    there = owning_harness()
    body = {"model": NAME, "messages": USER, "max_tokens": 9, "temperature": 0, "priority": 3, **more}
    there.ask("/v1/chat/completions", body)
    (asked,) = there.driver.asked
    assert asked.own
    sent = json.loads(asked.body)
    assert {name: sent[name] for name in more} == more
    assert not {"priority", "n", "seed"} & sent.keys()
    assert asked.max_output_tokens == 9
    there = owning_harness(owns=False)
    refused = there.ask("/v1/chat/completions", body)
    if more.keys() <= DRAWN:  # what every engine can do, as a part of how tokens are drawn
        assert there.driver.asked[0].sampling.edits
        assert not there.driver.asked[0].own
    elif more.keys() <= {"tools", "messages"}:  # a part of the prompt
        assert not there.driver.asked[0].own
    else:
        assert refused.status == 400


def test_plain_requests_are_sent_as_tokens() -> None:
    there = owning_harness()
    there.ask("/v1/chat/completions", {"model": NAME, "messages": USER, "tools": [], "presence_penalty": 0})
    assert not there.driver.asked[0].own


def test_tools_are_part_of_the_rendered_prompt() -> None:
    there = owning_harness()
    there.ask("/v1/chat/completions", {"model": NAME, "messages": USER, "tools": TOOLS})
    assert letters_text(there.driver.asked[0].prompt) == "f:hi"


def test_each_of_several_forwarded_choices_has_its_own_seed() -> None:
    there = owning_harness()
    body = {"model": NAME, "messages": USER, "tools": TOOLS, "n": 2, "temperature": 1, "seed": 5}
    exchange = there.ask("/v1/chat/completions", body)
    sent = [json.loads(item.body) for item in there.driver.asked]
    assert [item["seed"] for item in sent] == [5, 5 + (1 << 32)]
    for place, asked in enumerate(there.driver.asked):
        reply = {"choices": [{"index": 0, "message": {"content": str(place)}, "finish_reason": "tool_calls"}]}
        answer = there.driver.answers[asked.id]
        answer.relay_whole(200, b"application/json", json.dumps(reply).encode(), TokenCounts(2, 7, 1))
    assert [item["message"]["content"] for item in exchange.json["choices"]] == ["0", "1"]
    assert exchange.json["usage"]["completion_tokens"] == 14


def test_several_forwarded_streams_are_merged_with_token_usage() -> None:
    there = owning_harness()
    body = {"model": NAME, "messages": USER, "tools": TOOLS, "n": 2, "stream": True}
    exchange = there.ask("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    for asked in there.driver.asked:
        answer = there.driver.answers[asked.id]
        answer.relay_begin(200, b"text/event-stream")
        answer.relay(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
        answer.relay(b"data: [DONE]\n\n")
        answer.relay_end(TokenCounts(2, 30, 0))
    assert [event["choices"][0]["index"] for event in exchange.events[:2]] == [0, 1]
    assert exchange.events[-1]["usage"]["completion_tokens"] == 60


def test_forwarded_completion_has_its_prompt_as_tokens() -> None:
    there = owning_harness()
    there.ask("/v1/completions", {"model": NAME, "prompt": "hi", "suffix": "x"})
    there.ask("/v1/completions", {"model": NAME, "prompt": "hi", "echo": True})
    asked, echoed = there.driver.asked
    assert json.loads(asked.body)["prompt"] == list(asked.prompt)
    assert json.loads(echoed.body)["prompt"] == "hi", "whose text is told"


def test_kv_transfer_params_from_a_client_are_refused() -> None:
    body = {"model": NAME, "messages": USER, "kv_transfer_params": {"potluck": {"request": "r"}}}
    refused = owning_harness().ask("/v1/chat/completions", body)
    assert (refused.status, refused.json["error"]["param"]) == (400, "kv_transfer_params")


def test_adapters_are_models_with_their_own_prefix_salt() -> None:
    there = owning_harness()
    for name in (NAME, "lora"):
        there.ask("/v1/chat/completions", {"model": name, "messages": USER})
    plain, adapted = there.driver.asked
    assert (plain.model, plain.adapter, adapted.model, adapted.adapter) == (NAME, "", NAME, "lora")
    assert plain.salt != adapted.salt
    listed = there.ask("/v1/models", method="GET").json["data"]
    assert "lora" in [item["id"] for item in listed]
    assert there.ask("/v1/chat/completions", {"model": "other", "messages": USER}).status == 404
