"""Sampling: the right distribution, the same draw for the same seed and place, and honest log probabilities."""

from __future__ import annotations

from collections import Counter
from math import isclose, log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.core.values.sampling import Sampling
from potluck.engine.compute.logit_edits import LogitEdit, LogitEdits
from potluck.engine.compute.sample import FIRST_LOOK, chance, sample


def random_logits(count: int, vocab: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * spread


UNCUT = st.builds(Sampling, temperature=st.sampled_from([0.3, 1.0, 2.5]), seed=st.integers(0, 2**40))
WAYS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, FIRST_LOOK, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**40),
    logprobs=st.sampled_from([None, None, 0, 1, 3, 20]),
)
VOCABS = st.sampled_from([1, 2, 7, FIRST_LOOK - 1, FIRST_LOOK, FIRST_LOOK + 1, 700, 5000])
SHAPES = st.sampled_from(["spread", "ties", "flat", "sharp"])


def shaped_logits(count: int, vocab: int, shape: str, seed: int) -> torch.Tensor:
    logits = random_logits(count, vocab, seed)
    if shape == "ties":  # few values, as where logits have few bits
        return logits.round()
    return logits * {"spread": 1.0, "flat": 0.0, "sharp": 20.0}[shape]


def sampled_by_definition(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """The definition, one token at a time: cuts go by likelihood, the draw by the vocabulary's order."""
    values = logits.double().numpy()
    if sampling.temperature == 0:
        return int(values.argmax())
    order = np.argsort(-values, kind="stable")
    weights = np.exp((values - values.max()) / sampling.temperature)
    weights /= weights.sum()
    likely = list(order[: sampling.top_k] if sampling.top_k else order)
    total, kept, reached = sum(weights[t] for t in likely) if sampling.top_k else 1.0, [], 0.0
    for token in likely:
        if sampling.top_p < 1 and reached >= sampling.top_p * total:
            break
        reached += weights[token]
        if weights[token] >= sampling.min_p * weights[order[0]]:
            kept.append(token)
    kept.sort()
    goal, reached = chance(sampling.seed, position) * sum(weights[t] for t in kept), 0.0
    for token in kept:
        reached += weights[token]
        if reached > goal:
            return int(token)
    return int(kept[-1])


@settings(max_examples=60)
@given(st.lists(st.tuples(WAYS, st.integers(0, 10**6)), min_size=1, max_size=5), VOCABS, st.integers(0, 99))
def test_batched_sampling_equals_the_definition_per_row(
    batch: list[tuple[Sampling, int]], vocab: int, seed: int
) -> None:
    logits = random_logits(len(batch), vocab, seed)
    result = sample(logits, [sampling for sampling, _ in batch], [position for _, position in batch])
    expected = [
        sampled_by_definition(logits[i], sampling, position) for i, (sampling, position) in enumerate(batch)
    ]
    assert [sampled_token.token for sampled_token in result] == expected


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.one_of(UNCUT, WAYS), st.integers(0, 10**6)), min_size=2, max_size=12),
    VOCABS,
    SHAPES,
    st.integers(0, 99),
)
def test_sampled_row_does_not_depend_on_other_rows(
    batch: list[tuple[Sampling, int]], vocab: int, shape: str, seed: int
) -> None:
    """Token, log probability and the likeliest ones, to the last bit."""
    logits = shaped_logits(len(batch), vocab, shape, seed)
    ways, positions = [sampling for sampling, _ in batch], [position for _, position in batch]
    alone = [sample(logits[i : i + 1], ways[i : i + 1], positions[i : i + 1])[0] for i in range(len(batch))]
    assert sample(logits, ways, positions) == alone
    half = len(batch) // 2
    assert sample(logits[half:], ways[half:], positions[half:]) == alone[half:]


CUTS = [{"top_k": 1}, {"top_k": 40}, {"top_k": 1000}, {"top_p": 0.9}, {"min_p": 0.02}]


@pytest.mark.parametrize("shape", ["spread", "ties", "flat"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_row_without_cutoff_samples_the_same_beside_rows_with_one(cut: dict[str, float], shape: str) -> None:
    logits = shaped_logits(2, 900, shape, seed=4)
    for own in ({}, *CUTS):
        mine = [Sampling(temperature=1.0, seed=seed, **own) for seed in range(12)]  # type: ignore[arg-type]
        other = Sampling(temperature=1.0, seed=9, **cut)  # type: ignore[arg-type]
        alone = [sample(logits[:1], [sampling], [3])[0] for sampling in mine]
        assert [sample(logits, [sampling, other], [3, 8])[0] for sampling in mine] == alone


def test_tokens_of_equal_probability_are_ordered_by_id() -> None:
    """Whoever else is there and however many they look at, which `topk` would let decide."""
    logits = torch.zeros(2, 900)
    logits[0, 500:] = 1.0
    sampling = Sampling(temperature=1.0, top_k=3, seed=1, logprobs=2)
    result = [sample(logits, [sampling, Sampling(logprobs=20)], [place, 0])[0] for place in range(60)]
    assert {sampled_token.token for sampled_token in result} == {500, 501, 502}
    assert {tuple(token for token, _ in sampled_token.top) for sampled_token in result} == {(500, 501)}


def test_cutoffs_that_keep_all_tokens_change_no_sample() -> None:
    logits = random_logits(1, 600, seed=8)
    for seed in range(40):
        plain = sample(logits, [Sampling(temperature=1.0, seed=seed)], [2])
        assert plain == sample(logits, [Sampling(temperature=1.0, seed=seed, top_k=600)], [2])
        assert plain == sample(logits, [Sampling(temperature=1.0, seed=seed, min_p=1e-12)], [2])


def test_samples_follow_the_softmax_distribution() -> None:
    logits, count = random_logits(1, 12, seed=3, spread=1.0), 20_000
    sampling = Sampling(temperature=0.8, seed=11)
    tokens = [
        sampled_token.token
        for sampled_token in sample(logits.expand(count, -1), [sampling] * count, range(count))
    ]
    expected = torch.softmax(logits[0].double() / 0.8, -1) * count
    seen = torch.bincount(torch.tensor(tokens), minlength=12)
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < 31.3  # 11 degrees of freedom: one in a thousand seeds would fail, this one does not


def test_flat_distribution_with_top_p_samples_from_the_whole_vocabulary() -> None:
    vocab = 4 * FIRST_LOOK
    logits, sampling = torch.zeros(1, vocab), Sampling(temperature=1.0, top_p=0.9, seed=1)
    tokens = {sample(logits, [sampling], [position])[0].token for position in range(300)}
    assert len(tokens) > FIRST_LOOK / 2
    assert max(tokens) > FIRST_LOOK


def test_sample_depends_only_on_seed_and_position() -> None:
    logits = random_logits(1, 500, seed=5)
    ways = [Sampling(temperature=1.0, seed=seed) for seed in range(40)]
    draws = [[sample(logits, [sampling], [place])[0].token for place in range(30)] for sampling in ways]
    assert draws == [
        [sample(logits, [sampling], [place])[0].token for place in range(30)] for sampling in ways
    ]
    assert len({tuple(draw) for draw in draws}) == len(ways)
    numbers = [chance(seed, place) for seed in range(50) for place in range(50)]
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert len(set(numbers)) == len(numbers)


def test_log_probabilities_are_those_of_the_unmodified_model() -> None:
    logits = random_logits(3, 50, seed=6)
    ways = [Sampling(logprobs=3), Sampling(temperature=2.0, seed=1, logprobs=0), Sampling()]
    greedy, drawn, silent = sample(logits, ways, [4, 5, 6])
    expected = torch.log_softmax(logits.double(), -1)
    assert greedy.logprob is not None
    assert isclose(greedy.logprob, float(expected[0].max()), abs_tol=1e-5)
    assert [token for token, _ in greedy.top] == expected[0].topk(3)[1].tolist()
    assert all(isclose(value, float(expected[0, token]), abs_tol=1e-5) for token, value in greedy.top)
    assert greedy.top[0] == (greedy.token, greedy.logprob)
    assert drawn.logprob is not None
    assert isclose(drawn.logprob, float(expected[1, drawn.token]), abs_tol=1e-5)
    assert drawn.top == ()
    assert (silent.logprob, silent.top) == (None, ())
    assert greedy.logprob <= log(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 1e9),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_invalid_sampling_fields_are_refused(field: str, value: float) -> None:
    with pytest.raises(InputError, match=f"^{field}: "):
        Sampling(**{field: value})  # type: ignore[arg-type]


VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)
PENALTY = st.floats(-2, 2, width=32)
WAYS_EDITS = st.builds(
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


def edited_by_formula(
    row: np.ndarray, sampling: Sampling, prompt: list[int], output: list[int]
) -> dict[int, np.floating[Any]]:
    """As vLLM and OpenAI write it down, token by token."""
    counts, biases, the_formula = Counter(output), dict(sampling.logit_bias), {}
    for token in range(len(row)):
        value = np.float32(row[token]) + np.float32(biases.get(token, 0.0))
        if token in counts or token in prompt:
            by = np.float32(sampling.repetition_penalty)
            value = value / by if value > 0 else value * by
        if token in counts:
            value -= np.float32(sampling.frequency_penalty * counts[token] + sampling.presence_penalty)
        the_formula[token] = value
    return the_formula


def likeliest(row: np.ndarray, edit: LogitEdit | None, sampling: Sampling | None = None) -> int:
    (sampled_token,) = sample(torch.from_numpy(row.copy())[None], [sampling or Sampling()], [9], [edit])
    return sampled_token.token


@given(
    WAYS_EDITS, st.lists(TOKENS, min_size=1, max_size=40), st.lists(TOKENS, max_size=40), st.integers(0, 999)
)
def test_penalties_and_biases_equal_the_formula(
    way: Sampling, prompt: list[int], output: list[int], seed: int
) -> None:
    row, edits = logits(seed), LogitEdits(way, prompt, 0, None)
    for token in output:
        edits.drew((token,))
    right = edited_by_formula(row, way, prompt, output)
    best = sorted(right, key=lambda token: -right[token])
    assume(right[best[0]] != right[best[1]])
    assert likeliest(row, edits.next()) == best[0]


@given(WAYS_EDITS, st.lists(TOKENS, min_size=1, max_size=40), st.lists(TOKENS, max_size=40), st.data())
def test_logit_edits_depend_only_on_prompt_and_output(
    way: Sampling, prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    """A request continued behind tokens that another engine streamed has the same edits."""
    whole = LogitEdits(way, prompt, 0, None)
    for token in output:
        whole.drew((token,))
    cut = data.draw(st.integers(0, len(output)))
    later = LogitEdits(way, prompt + output[:cut], cut, None)
    later.drew(output[cut:])
    right = edit_changes(whole.next())
    assert edit_changes(later.next()) == right


def edit_changes(edit: LogitEdit) -> set[tuple[float, ...]]:
    columns = (edit.tokens, edit.bias, edit.repetition, edit.penalty)
    result = set(zip(*(column.tolist() for column in columns), strict=True))
    return {item for item in result if item[1:] != (0.0, 1.0, 0.0)}


@given(TOKENS, st.integers(0, 9999), st.floats(0, 2), st.integers(0, 1 << 40))
def test_logit_bias_of_100_decides_the_token(token: int, seed: int, temperature: float, chance: int) -> None:
    row = logits(seed)
    for bias in (-100.0, 100.0):
        sampling = Sampling(temperature, seed=chance, logit_bias=((token, bias),))
        assert (likeliest(row, LogitEdits(sampling, [1], 0, None).next(), sampling) == token) == (bias > 0)


@given(
    st.sets(TOKENS, min_size=1), st.integers(0, 9999), st.floats(0, 2), st.integers(0, 5), st.integers(0, 99)
)
def test_tokens_outside_the_grammar_are_never_drawn(
    allowed: set[int], seed: int, temperature: float, top_k: int, chance: int
) -> None:
    bits = np.zeros(VOCAB, np.uint8)
    bits[list(allowed)] = 1
    empty = np.zeros(0, np.float32)
    edit = LogitEdit(
        empty.astype(np.int32), empty, empty, empty, np.packbits(bits, bitorder="little").tobytes()
    )
    row = logits(seed)
    sampling = Sampling(temperature, top_k=top_k, seed=chance)
    assert likeliest(row, edit, sampling) in allowed
    if temperature == 0:
        assert likeliest(row, edit, sampling) == max(sorted(allowed), key=lambda token: row[token])


@settings(max_examples=30)
@given(WAYS_EDITS, st.integers(0, 9999))
def test_rows_with_logit_edits_do_not_affect_others(way: Sampling, seed: int) -> None:
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
def test_sampling_value_out_of_range_is_refused_by_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        Sampling(**wrong)
    assert caught.value.field == field


def test_requests_without_logit_edits_skip_their_work() -> None:
    from potluck.engine.compute.sample import _edited, _without_barred

    row = torch.zeros(2, VOCAB)
    assert _without_barred(_edited(row, [None, None]), [Sampling()] * 2, [1, 1]) is row
    assert not Sampling(0.7, 5, 0.9, 0.1, 3, 2).edits
