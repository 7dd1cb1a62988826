"""What fits in memory, against counting requests one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.core.errors import CapacityError
from potluck.core.values.model import DenseFfn, FullAttention, Layer, LinearAttention, Model
from potluck.perf.sizes.capacity import StageMemory, max_requests, require_fit, stage_memory
from potluck.perf.sizes.memory import embedding_bytes, head_bytes, kv_bytes, weight_bytes

LLAMA, BIG = models.model("Llama-3.1-8B"), models.model("Llama-3-70B")
H100, FOUR = nodes.node_type("H100-SXM"), nodes.node_type("4xH100-SXM")


def test_llama_on_an_h100_by_hand() -> None:
    """80 GB, nine tenths usable, 16.06 GB of weights, and 8,192 tokens of activations in 16 bits."""
    memory = stage_memory(LLAMA, H100, 1)
    assert memory.usable_bytes == pytest.approx(72e9)
    assert memory.weight_bytes == weight_bytes(LLAMA) == pytest.approx(16.06e9, rel=1e-3)
    assert memory.activation_bytes == 2 * 8192 * (2 * 4096 + 3 * 14336)
    assert memory.kv_bytes == memory.usable_bytes - memory.weight_bytes - memory.activation_bytes
    # 131,072 bytes per token of Llama-3.1-8B: 32 layers, 8 KV heads of 128, keys and values, 2 bytes.
    assert max_requests(LLAMA, memory, 1, 2000) == int(memory.kv_bytes // (131_072 * 2000))


@settings(max_examples=30)
@given(
    st.sampled_from(["Llama-3.1-8B", "GPT-OSS-20B", "Kimi-Linear-48B"]),
    st.integers(1, 60_000),
    st.floats(0.0, 5e9),
)
def test_counting_one_by_one(name: str, tokens: int, room: float) -> None:
    model = models.model(name)
    each, count = kv_bytes(model, tokens), 0
    memory = StageMemory(room, 0.0, 0.0)
    while (count + 1) * each <= room and count < 5000:
        count += 1
    got = max_requests(model, memory, 1, tokens)
    assert min(got, 5000) in (count, count - 1 if count * each > room * (1 - 1e-12) else count)


def test_no_room_is_no_request_and_never_negative() -> None:
    assert max_requests(LLAMA, StageMemory(10e9, 16e9, 1e9), 1, 100) == 0
    assert max_requests(LLAMA, StageMemory(17e9, 16e9, 1e9 - 1), 1, 100) == 0


def test_what_keeps_nothing_is_not_limited_by_memory() -> None:
    assert max_requests(LLAMA, StageMemory(20e9, 16e9, 1e9), 1, 0) > 1e6


@given(st.integers(1, 100_000), st.integers(1, 1000))
def test_longer_requests_never_fit_better(tokens: int, extra: int) -> None:
    memory = stage_memory(LLAMA, H100, 1)
    assert max_requests(LLAMA, memory, 1, tokens + extra) <= max_requests(LLAMA, memory, 1, tokens)


def test_more_ranks_leave_more_room_on_each() -> None:
    memories = [stage_memory(BIG, FOUR, tp) for tp in (1, 2, 4)]
    weights = [memory.weight_bytes for memory in memories]
    assert weights[0] > 1.9 * weights[1] > 3.6 * weights[2]
    assert memories[0].kv_bytes < 0 < memories[2].kv_bytes
    assert max_requests(BIG, memories[2], 4, 2000) > max_requests(BIG, memories[1], 2, 2000) >= 0


def test_it_does_not_fit_and_says_by_how_much() -> None:
    memory = stage_memory(BIG, H100, 1)
    with pytest.raises(CapacityError) as caught:
        require_fit(BIG, memory, H100, 1)
    message = str(caught.value)
    needed = (memory.weight_bytes + memory.activation_bytes) / 1e9
    for words in ("Llama-3-70B", "1xH100-SXM", "tensor parallelism 1", f"{needed:.1f} GB", "72.0 GB"):
        assert words in message
    assert "\n" not in message
    require_fit(BIG, stage_memory(BIG, FOUR, 4), FOUR, 4)


@pytest.mark.parametrize("cuts", [(1,), (40,), (20, 41, 60), (79,)])
def test_the_stages_of_a_pipeline_hold_the_model_once(cuts: tuple[int, ...]) -> None:
    """Embedding on the first, head on the last, nothing twice."""
    edges = (0, *cuts, BIG.layer_count)
    stages = [range(a, b) for a, b in pairwise(edges)]
    held = [stage_memory(BIG, FOUR, 1, layers).weight_bytes for layers in stages]
    assert sum(held) == pytest.approx(weight_bytes(BIG))
    assert held[0] == pytest.approx(weight_bytes(BIG, stages[0]) + embedding_bytes(BIG))
    assert held[-1] == pytest.approx(weight_bytes(BIG, stages[-1]) + head_bytes(BIG))


def test_tied_tables_stand_on_both_ends() -> None:
    layer = Layer(FullAttention(8, 2, 64, 64), DenseFfn(2048))
    model = Model("tied", 512, 50_000, (layer,) * 4, 4096, tied_embeddings=True)
    first, last = (stage_memory(model, H100, 1, layers).weight_bytes for layers in (range(2), range(2, 4)))
    assert first + last == pytest.approx(weight_bytes(model) + embedding_bytes(model))
    assert stage_memory(model, H100, 1).weight_bytes == pytest.approx(weight_bytes(model))


def test_a_stage_needs_room_for_its_own_layers_only() -> None:
    memory = StageMemory(40e9, 0.0, 0.0)
    whole, half = max_requests(BIG, memory, 1, 1000), max_requests(BIG, memory, 1, 1000, range(40))
    assert half in (2 * whole, 2 * whole + 1)


def test_a_state_counts_however_short_the_request() -> None:
    linear = Layer(LinearAttention("gated_delta", 16, 32, 128, 128), DenseFfn(2048))
    model = Model("states", 1024, 32_000, (linear,) * 4, 1 << 20)
    memory = StageMemory(1e9, 0.0, 0.0)
    assert max_requests(model, memory, 1, 1) == max_requests(model, memory, 1, 1_000_000)


@pytest.mark.parametrize("step_tokens", [512, 8192])
def test_smaller_steps_leave_more_room(step_tokens: int) -> None:
    default, given_tokens = (
        stage_memory(LLAMA, H100, 1),
        stage_memory(LLAMA, H100, 1, step_tokens=step_tokens),
    )
    assert given_tokens.activation_bytes == default.activation_bytes * step_tokens / 8192
    assert stage_memory(LLAMA, H100, 1, usable_share=0.95).kv_bytes > default.kv_bytes
