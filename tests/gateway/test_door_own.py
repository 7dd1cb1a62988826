"""Requests for more than tokens, at the door: what is read of them, what goes on, and adapters as models."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from door_kit import CARDS, LETTERS, NAME, Scene
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from potluck.api.openai_requests import DRAWN
from potluck.api.tokenizer import ModelTokenizer
from potluck.gateway.openai.requests import ModelCard
from potluck.gateway.values import TokenCounts

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
USER = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }}:{% endfor %}{{ messages[-1].content }}"


def scene(owns: bool = True) -> Scene:
    tokenizer = Tokenizer(BPE(vocab={letter: place for place, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = Fuse()
    card = ModelCard(NAME, 512, ModelTokenizer(tokenizer, TEMPLATE), vocab=len(LETTERS))
    directory = SimpleNamespace(
        segments=lambda model: True, owns=lambda model: owns, adapters=lambda: {"lora": NAME, "other": "gone"}
    )
    return Scene(cards={**CARDS, NAME: card}, directory=directory)


def text(tokens: tuple[int, ...]) -> str:
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
def test_what_engines_can_do_goes_on_to_them_as_it_came(more: dict[str, Any]) -> None:
    there = scene()
    body = {"model": NAME, "messages": USER, "max_tokens": 9, "temperature": 0, "priority": 3, **more}
    there.ask("/v1/chat/completions", body)
    (asked,) = there.driver.asked
    assert asked.own
    sent = json.loads(asked.body)
    assert {name: sent[name] for name in more} == more
    assert not {"priority", "n", "seed"} & sent.keys()
    assert asked.max_output_tokens == 9
    there = scene(owns=False)
    refused = there.ask("/v1/chat/completions", body)
    if more.keys() <= DRAWN:  # what every engine can do, as a part of how tokens are drawn
        assert there.driver.asked[0].sampling.edits
        assert not there.driver.asked[0].own
    else:
        assert refused.status == 400


def test_plain_requests_are_tokens_as_ever() -> None:
    there = scene()
    there.ask("/v1/chat/completions", {"model": NAME, "messages": USER, "tools": [], "presence_penalty": 0})
    assert not there.driver.asked[0].own


def test_tools_are_part_of_the_prompt() -> None:
    there = scene()
    there.ask("/v1/chat/completions", {"model": NAME, "messages": USER, "tools": TOOLS})
    assert text(there.driver.asked[0].prompt) == "f:hi"


def test_each_of_several_answers_is_asked_for_with_a_seed_of_its_own() -> None:
    there = scene()
    body = {"model": NAME, "messages": USER, "tools": TOOLS, "n": 2, "temperature": 1, "seed": 5}
    exchange = there.ask("/v1/chat/completions", body)
    sent = [json.loads(each.body) for each in there.driver.asked]
    assert [each["seed"] for each in sent] == [5, 5 + (1 << 32)]
    for place, asked in enumerate(there.driver.asked):
        reply = {"choices": [{"index": 0, "message": {"content": str(place)}, "finish_reason": "tool_calls"}]}
        answer = there.driver.answers[asked.id]
        answer.relay_whole(200, b"application/json", json.dumps(reply).encode(), TokenCounts(2, 7, 1))
    assert [each["message"]["content"] for each in exchange.json["choices"]] == ["0", "1"]
    assert exchange.json["usage"]["completion_tokens"] == 14


def test_several_streams_are_one_with_a_usage_that_counts_tokens() -> None:
    there = scene()
    body = {"model": NAME, "messages": USER, "tools": TOOLS, "n": 2, "stream": True}
    exchange = there.ask("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    for asked in there.driver.asked:
        answer = there.driver.answers[asked.id]
        answer.relay_begin(200, b"text/event-stream")
        answer.relay(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
        answer.relay(b"data: [DONE]\n\n")
        answer.relay_end(TokenCounts(2, 30, 0))
    assert [each["choices"][0]["index"] for each in exchange.events[:2]] == [0, 1]
    assert exchange.events[-1]["usage"]["completion_tokens"] == 60


def test_a_completion_goes_on_with_its_tokens() -> None:
    there = scene()
    there.ask("/v1/completions", {"model": NAME, "prompt": "hi", "suffix": "x"})
    there.ask("/v1/completions", {"model": NAME, "prompt": "hi", "echo": True})
    asked, echoed = there.driver.asked
    assert json.loads(asked.body)["prompt"] == list(asked.prompt)
    assert json.loads(echoed.body)["prompt"] == "hi", "whose text is told"


def test_hand_overs_are_not_the_clients_to_ask_for() -> None:
    body = {"model": NAME, "messages": USER, "kv_transfer_params": {"potluck": {"request": "r"}}}
    refused = scene().ask("/v1/chat/completions", body)
    assert (refused.status, refused.json["error"]["param"]) == (400, "kv_transfer_params")


def test_adapters_are_models_that_share_no_prefixes_with_theirs() -> None:
    there = scene()
    for name in (NAME, "lora"):
        there.ask("/v1/chat/completions", {"model": name, "messages": USER})
    plain, adapted = there.driver.asked
    assert (plain.model, plain.adapter, adapted.model, adapted.adapter) == (NAME, "", NAME, "lora")
    assert plain.salt != adapted.salt
    listed = there.ask("/v1/models", method="GET").json["data"]
    assert "lora" in [each["id"] for each in listed]
    assert there.ask("/v1/chat/completions", {"model": "other", "messages": USER}).status == 404
