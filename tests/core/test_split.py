"""CRONUS's split point against enumeration and the printed formula."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.routing.split import (
    chunked_s,
    decodes_faster_on_low_end,
    finishes_sooner_on_high_end,
    partial_prefill_s,
    partial_tokens,
    printed_tokens,
)
from potluck.core.state.facts import ReplicaFacts, SplitFacts

BLOCK = 16
PLENTY = 1 << 30


def summed_chunked_s(facts: SplitFacts, prompt: int, part: int, decodes: int, context: float) -> float:
    """Iteration by iteration: predictor (3) at the context that each one finds."""
    done, total = part, 0.0
    while done < prompt:
        total += facts.k_ctxp * done + facts.k_ctxd * context + facts.b_c
        done += facts.chunk_tokens - decodes
    return total


def apart_s(facts: SplitFacts, prompt: int, part: int, decodes: int, context: float) -> float:
    return abs(partial_prefill_s(facts, part) - summed_chunked_s(facts, prompt, part, decodes, context))


split_facts = st.builds(
    SplitFacts,
    k_p=st.floats(1e-6, 1e-3),
    b_p=st.floats(0.0, 0.02),
    k_ctxp=st.floats(0.0, 1e-5),
    k_ctxd=st.floats(0.0, 1e-6),
    b_c=st.floats(0.0, 0.1),
    chunk_tokens=st.integers(2, 300),
)


@given(split_facts, st.integers(1, 600), st.integers(0, 200), st.floats(0, 1e5))
@settings(max_examples=75)
def test_split_point_is_the_best_of_all_split_points(
    facts: SplitFacts, prompt: int, decodes: int, context: float
) -> None:
    decodes = min(decodes, facts.chunk_tokens - 1)
    chosen = partial_tokens(prompt, facts, (decodes, context, PLENTY))
    assert 1 <= chosen <= prompt
    best = min(apart_s(facts, prompt, part, decodes, context) for part in range(1, prompt + 1))
    assert apart_s(facts, prompt, chosen, decodes, context) == pytest.approx(best, rel=1e-9, abs=1e-12)


@given(split_facts, st.integers(1, 3000), st.integers(1, 3000))
def test_chunked_prefill_series_equals_the_sum_of_its_iterations(
    facts: SplitFacts, prompt: int, part: int
) -> None:
    part = min(part, prompt)
    closed = chunked_s(facts, facts.chunk_tokens, facts.b_c, prompt, part)
    assert closed == pytest.approx(summed_chunked_s(facts, prompt, part, 0, 0.0), rel=1e-9, abs=1e-12)


A10_A100 = SplitFacts(k_p=2.4e-4, b_p=0.004, k_ctxp=1.6e-6, k_ctxd=2.5e-7, b_c=0.032, chunk_tokens=512)
"""About Llama-3-8B: 8,192 tokens take 2 s on the low-end GPU, an iteration 32 ms and more on the high-end one."""


def printed_split(facts: SplitFacts, prompt: int, decodes: int, context: float) -> int:
    """Algorithm 1 to the letter, over its 512 candidates."""
    chunk = facts.chunk_tokens - decodes

    def apart(part: int) -> float:
        rest = prompt - part
        last = part + floor(rest / chunk) * chunk
        iteration = facts.k_ctxp * (prompt + last) / 2 + facts.k_ctxd * context + facts.b_c
        return abs(facts.k_p * part + facts.b_p - ceil(rest / chunk) * iteration)

    return min((ceil(i * prompt / 512) for i in range(1, 513)), key=apart)


@given(split_facts, st.integers(1, 5000), st.integers(0, 200), st.floats(0, 1e5))
def test_printed_split_equals_algorithm_1(
    facts: SplitFacts, prompt: int, decodes: int, context: float
) -> None:
    decodes = min(decodes, facts.chunk_tokens - 1)
    assert printed_tokens(prompt, facts, (decodes, context, PLENTY)) == printed_split(
        facts, prompt, decodes, context
    )
    assert printed_tokens(prompt, facts, (facts.chunk_tokens, context, PLENTY)) == prompt
    assert printed_tokens(prompt, facts, (decodes, context, ceil(prompt / BLOCK) - 1)) == prompt


@pytest.mark.parametrize("prompt", [2000, 6000, 20000, 100000])
def test_printed_split_is_never_below_the_computed_split_and_never_more_balanced(prompt: int) -> None:
    """L_in in place of L_p counts every chunk as if it came after the whole prompt."""
    printed = printed_split(A10_A100, prompt, 30, 30000.0)
    ours = partial_tokens(prompt, A10_A100, (30, 30000.0, PLENTY))
    assert printed >= ours
    assert apart_s(A10_A100, prompt, ours, 30, 30000.0) <= apart_s(A10_A100, prompt, printed, 30, 30000.0)


def test_printed_split_of_a_long_prompt_is_unbalanced_by_over_a_second() -> None:
    printed = printed_split(A10_A100, 100000, 30, 30000.0)
    assert apart_s(A10_A100, 100000, printed, 30, 30000.0) > 1.0
    ours = partial_tokens(100000, A10_A100, (30, 30000.0, PLENTY))
    assert apart_s(A10_A100, 100000, ours, 30, 30000.0) < 0.2


def test_split_without_free_blocks_gives_the_low_end_the_whole_prompt() -> None:
    assert partial_tokens(1000, A10_A100, (10, 1000.0, ceil(1000 / BLOCK) - 1)) == 1000
    assert partial_tokens(1000, A10_A100, (10, 1000.0, ceil(1000 / BLOCK))) < 1000


def test_split_without_room_in_a_step_gives_the_low_end_the_whole_prompt() -> None:
    assert partial_tokens(1000, A10_A100, (512, 1000.0, PLENTY)) == 1000


def test_more_decodes_on_the_high_end_move_prefill_to_the_low_end() -> None:
    parts = [partial_tokens(4000, A10_A100, (n, n * 1500.0, PLENTY)) for n in (0, 50, 150, 400)]
    assert parts == sorted(parts)
    assert parts[0] < parts[-1]


HIGH = ReplicaFacts(1e-5, 0.0, 0.032, 64, 10_000, 10_000)
LOW = ReplicaFacts(1e-4, 0.0, 0.032, 16, 1000, 10_000)


def test_decode_stays_on_the_low_end_only_if_the_high_end_is_over_its_batch_and_slower() -> None:
    assert not decodes_faster_on_low_end(HIGH, 63, LOW, 0, 0.0)
    assert decodes_faster_on_low_end(HIGH, 64, LOW, 0, 0.0)
    assert not decodes_faster_on_low_end(HIGH, 64, LOW, 16, 0.0)
    assert decodes_faster_on_low_end(HIGH, 100, LOW, 16, 0.0)
    assert not decodes_faster_on_low_end(HIGH, 100, LOW, 16, 0.5)  # prefills would come in between
    slow = replace(LOW, decode_step_s=0.090, decode_first_s=0.080)
    assert not decodes_faster_on_low_end(HIGH, 64, slow, 0, 0.0)
    assert decodes_faster_on_low_end(HIGH, 200, slow, 0, 0.0)


def test_decodes_are_shared_in_proportion_to_batch_sizes_under_overload() -> None:
    high = low = 0
    for _ in range(300):
        if decodes_faster_on_low_end(HIGH, high, LOW, low, 0.0):
            low += 1
        else:
            high += 1
    assert low / 16 == pytest.approx(high / 64, rel=0.05)


def test_prompt_without_a_low_end_slot_goes_where_it_finishes_first() -> None:
    part = partial_tokens(4000, A10_A100, (0, 0.0, PLENTY))
    alone_s = chunked_s(A10_A100, 512, A10_A100.b_c, 4000, 0)
    both_s = partial_prefill_s(A10_A100, part) + chunked_s(A10_A100, 512, A10_A100.b_c, 4000, part)
    spare_s = alone_s - both_s  # what waiting may cost at most

    def sooner(low_wait_s: float, high_wait_s: float) -> bool:
        return finishes_sooner_on_high_end(A10_A100, 4000, part, (0, 0.0, PLENTY), low_wait_s, high_wait_s)

    assert (
        spare_s < 0
    )  # the parts come one after the other: alone the high-end GPU is always sooner when it is free
    assert sooner(0.0, 0.0)
    assert sooner(1.0, 0.9)
    assert not sooner(0.0, 10.0)  # by then the low-end GPU has done its part
    assert not finishes_sooner_on_high_end(
        A10_A100, 4000, part, (512, 0.0, PLENTY), 9.0, 0.0
    )  # no room for prompts in its steps
