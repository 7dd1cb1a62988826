"""Biases, penalties and grammars as changes of logits: by the formula, and the same wherever an answer goes on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from potluck.core.errors import FormatError, InputError
from potluck.core.values.sampling import Sampling
from potluck.engine.compute.logit_edits import LogitEdit, LogitEdits
from potluck.engine.compute.sample import sample
from potluck.engine.pipeline.pipeline_messages import EditSize, edit_bytes, read_edits

VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)
PENALTY = st.floats(-2, 2, width=32)
WAYS = st.builds(
    lambda presence, frequency, repetition, biases: Sampling(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(sorted(biases.items())),
    ),
    PENALTY,
    PENALTY,
    st.floats(0.125, 4, width=32),
    st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=30),
)


def logits(seed: int, scale: float = 5.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * scale).astype(np.float32)


def by_the_formula(
    row: np.ndarray, way: Sampling, prompt: list[int], output: list[int]
) -> dict[int, np.floating[Any]]:
    """As vLLM and OpenAI write it down, token by token."""
    counts, biases, found = Counter(output), dict(way.logit_bias), {}
    for token in range(len(row)):
        value = np.float32(row[token]) + np.float32(biases.get(token, 0.0))
        if token in counts or token in prompt:
            by = np.float32(way.repetition_penalty)
            value = value / by if value > 0 else value * by
        if token in counts:
            value -= np.float32(way.frequency_penalty * counts[token] + way.presence_penalty)
        found[token] = value
    return found


def likeliest(row: np.ndarray, edit: LogitEdit | None, way: Sampling | None = None) -> int:
    (choice,) = sample(torch.from_numpy(row.copy())[None], [way or Sampling()], [9], [edit])
    return choice.token


@given(WAYS, st.lists(TOKENS, min_size=1, max_size=40), st.lists(TOKENS, max_size=40), st.integers(0, 999))
def test_penalties_and_biases_are_those_of_the_formula(
    way: Sampling, prompt: list[int], output: list[int], seed: int
) -> None:
    row, edits = logits(seed), LogitEdits(way, prompt, 0, None)
    for token in output:
        edits.drew((token,))
    right = by_the_formula(row, way, prompt, output)
    best = sorted(right, key=lambda token: -right[token])
    assume(right[best[0]] != right[best[1]])
    assert likeliest(row, edits.next()) == best[0]


@given(WAYS, st.lists(TOKENS, min_size=1, max_size=40), st.lists(TOKENS, max_size=40), st.data())
def test_what_changes_depends_on_prompt_and_output_alone(
    way: Sampling, prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    """Whoever goes on behind tokens that another has streamed changes the same; so does who gets it over a wire."""
    whole = LogitEdits(way, prompt, 0, None)
    for token in output:
        whole.drew((token,))
    cut = data.draw(st.integers(0, len(output)))
    later = LogitEdits(way, prompt + output[:cut], cut, None)
    later.drew(output[cut:])
    right = changes(whole.next())
    assert changes(later.next()) == right
    edit = LogitEdit(
        *[getattr(later.next(), name) for name in ("tokens", "bias", "repetition", "penalty")], b"abc"
    )
    sizes = [EditSize(1, len(edit.tokens), 3)]
    none, sent = read_edits(sizes, 2, memoryview(edit_bytes(edit)))
    assert none is None
    assert sent is not None
    assert (changes(sent), sent.allowed) == (right, b"abc")
    with pytest.raises(FormatError):
        read_edits(sizes, 2, memoryview(edit_bytes(edit) + b"x"))


def changes(edit: LogitEdit) -> set[tuple[float, ...]]:
    columns = (edit.tokens, edit.bias, edit.repetition, edit.penalty)
    found = set(zip(*(column.tolist() for column in columns), strict=True))
    return {each for each in found if each[1:] != (0.0, 1.0, 0.0)}


@given(TOKENS, st.integers(0, 9999), st.floats(0, 2), st.integers(0, 1 << 40))
def test_a_bias_of_100_either_way_settles_it(token: int, seed: int, temperature: float, chance: int) -> None:
    row = logits(seed)
    for bias in (-100.0, 100.0):
        way = Sampling(temperature, seed=chance, logit_bias=((token, bias),))
        drawn = likeliest(row, LogitEdits(way, [1], 0, None).next(), way)
        assert (drawn == token) == (bias > 0)


@given(
    st.sets(TOKENS, min_size=1), st.integers(0, 9999), st.floats(0, 2), st.integers(0, 5), st.integers(0, 99)
)
def test_what_a_grammar_does_not_allow_is_never_drawn(
    allowed: set[int], seed: int, temperature: float, top_k: int, chance: int
) -> None:
    bits = np.zeros(VOCAB, np.uint8)
    bits[list(allowed)] = 1
    empty = np.zeros(0, np.float32)
    edit = LogitEdit(
        empty.astype(np.int32), empty, empty, empty, np.packbits(bits, bitorder="little").tobytes()
    )
    row = logits(seed)
    way = Sampling(temperature, top_k=top_k, seed=chance)
    assert likeliest(row, edit, way) in allowed
    if temperature == 0:
        assert likeliest(row, edit, way) == max(sorted(allowed), key=lambda token: row[token])


@settings(max_examples=30)
@given(WAYS, st.integers(0, 9999))
def test_rows_with_and_without_changes_do_not_touch_each_other(way: Sampling, seed: int) -> None:
    rows = torch.from_numpy(np.stack([logits(seed + place) for place in range(3)]))
    before, plain = rows.clone(), Sampling(1.0, seed=seed, logprobs=2)
    edit = LogitEdits(way, [1, 2, 3], 1, None).next()
    together = sample(rows, [plain] * 3, [5, 6, 7], [None, edit, None])
    assert torch.equal(rows, before)
    for place, one in enumerate([None, edit, None]):
        assert sample(rows[place : place + 1], [plain], [5 + place], [one]) == [together[place]]
    own = torch.log_softmax(rows[1], -1)[together[1].token].item()
    assert together[1].logprob == pytest.approx(own, rel=1e-5)  # the model's own, whatever was changed


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e9}, "repetition_penalty"),
        ({"logit_bias": ((1, 100.5),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"logit_bias": tuple((token, 1.0) for token in range(1025))}, "logit_bias"),
    ],
)
def test_what_is_out_of_range_is_named(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        Sampling(**wrong)
    assert caught.value.field == field


def test_requests_without_any_of_it_cost_what_they_did() -> None:
    """The logits are not even copied."""

    from potluck.engine.compute.sample import _edited, _without_barred

    row = torch.zeros(2, VOCAB)
    assert _without_barred(_edited(row, [None, None]), [Sampling()] * 2, [1, 1]) is row
    assert not Sampling(0.7, 5, 0.9, 0.1, 3, 2).edits
