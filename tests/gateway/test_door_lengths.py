"""Prompts for servers of plain OpenAI are reckoned, not tokenised, but where it matters."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from door_kit import Scene, letters
from hypothesis import given
from hypothesis import strategies as st

from potluck.gateway.openai.requests import (
    FEW,
    LEAST_CHARS,
    MOST_CHARS,
    SAMPLE,
    LengthEstimates,
    ModelCard,
    TenantLength,
)

ROOM = 490
"""All prompts are short enough to be tokenised at once."""


def scene_of(**fields: object) -> Scene:
    card = ModelCard("m", ROOM, letters(), plain=True)  # a token for each letter
    return Scene(cards={"m": card}, **fields)


def ask(resolved: Scene, text: str, **fields: object) -> tuple[int, int]:
    """How many tokens were told of it, and as how long it counts."""
    resolved.ask("/v1/completions", {"model": "m", "prompt": text, **fields})
    asked = resolved.driver.asked[-1]
    return len(asked.prompt), asked.prompt_tokens


def test_the_first_prompts_are_tokenised_and_teach_how_long_the_others_are() -> None:
    resolved = scene_of()
    assert [ask(resolved, "a" * 100) for _ in range(FEW)] == [(100, 100)] * FEW
    assert [ask(resolved, "a" * 200) for _ in range(SAMPLE - FEW - 1)] == [(0, 200)] * (SAMPLE - FEW - 1)
    assert ask(resolved, "a" * 300) == (300, 300)
    assert ask(resolved, "a" * 300) == (0, 300)


def test_what_might_not_fit_is_tokenised_and_refused_if_it_does_not() -> None:
    resolved = scene_of()
    for _ in range(FEW):
        ask(resolved, "a" * 10)
    assert ask(resolved, "a" * (ROOM // 2))[0] == 0
    assert ask(resolved, "a" * (ROOM - 100)) == (ROOM - 100, ROOM - 100)
    assert ask(resolved, "a", max_tokens=ROOM - 1) == (1, 1)
    refused = resolved.ask("/v1/completions", {"model": "m", "prompt": "a" * ROOM})
    assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")


def test_engines_that_run_segments_need_tokens() -> None:
    there = [False]
    resolved = scene_of(directory=SimpleNamespace(segments=lambda model: there[0]))
    for _ in range(FEW):
        ask(resolved, "a" * 10)
    assert ask(resolved, "a" * 10) == (0, 10)
    there[0] = True
    assert ask(resolved, "a" * 10) == (10, 10)


def test_what_a_server_used_teaches_and_is_what_is_recorded() -> None:
    resolved = Scene(cards={"m": ModelCard("m", ROOM, None, plain=True)})
    assert ask(resolved, "a" * 80) == (0, 20), "nothing is known: four characters"
    usage = {"usage": {"prompt_tokens": 40, "completion_tokens": 3}}
    resolved.driver.answer.relay_whole(200, b"application/json", json.dumps(usage).encode())
    assert (resolved.meter.told[-1].prompt_tokens, resolved.meter.told[-1].estimated) == (40, False)
    assert ask(resolved, "a" * 80) == (0, 40)
    tokens = resolved.ask("/v1/completions", {"model": "m", "prompt": [1, 2, 3]})
    assert tokens.status is None
    assert resolved.driver.asked[-1].prompt_tokens == 3
    resolved.driver.answer.relay_whole(200, b"application/json", json.dumps(usage).encode())
    assert ask(resolved, "a" * 80) == (0, 40), "a prompt of tokens teaches nothing of texts"


@given(st.lists(st.tuples(st.integers(-5, 10**7), st.integers(-5, 10**7))))
def test_whatever_is_said_a_token_has_some_characters(said: list[tuple[int, int]]) -> None:
    length = TenantLength()
    for chars, tokens in said:
        length.learn(chars, tokens)
        assert LEAST_CHARS <= length.chars_per_token <= MOST_CHARS


@given(st.floats(0.6, 15.0))
def test_what_is_steady_is_learned(truth: float) -> None:
    length = TenantLength()
    for number in range(200):
        tokens = 50 + number % 7 * 40
        length.learn(round(tokens * truth), tokens)
    assert length.chars_per_token == pytest.approx(truth, rel=0.02)


def test_tenants_and_models_are_apart() -> None:
    lengths = LengthEstimates()
    lengths.of("m", "ann").learn(100, 100)
    assert lengths.of("m", "ann").chars_per_token == 1.0
    assert lengths.of("m", "bob").chars_per_token == lengths.of("n", "ann").chars_per_token == 4.0
