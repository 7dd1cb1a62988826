"""FLOPs and bytes of steps against formulas written by hand, and the way tensor parallelism divides them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import models
from potluck.core.values.model import (
    DenseFfn,
    FullAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    Model,
    MoeFfn,
)
from potluck.perf.memory import active_parameters, embedding_bytes, kv_bytes, state_bytes, weight_bytes
from potluck.perf.operators.layers import (
    GemmWork,
    LinearWork,
    SoftmaxWork,
    StepSums,
    head_gemm,
    layer_work,
    layer_works,
    step_sums,
)
from potluck.perf.step_timer import steps
from potluck.perf.timers.cauchy_timer import CauchyModel

LLAMA = models.model("Llama-3.1-8B")
DENSE = ["Llama-3.1-8B", "Llama-3-70B", "Llama-2-7B", "Qwen3-32B", "Phi-4"]
MIXTURES = ["Qwen3-235B-A22B", "DeepSeek-V3", "GPT-OSS-120B", "MiniMax-M2.5"]


def prefill_sums(model: Model, tokens: float, cached: float = 0.0, tp: int = 1) -> StepSums:
    return step_sums(model, steps(tokens, cached), tp)


def decode_sums(model: Model, requests: float, context: float, tp: int = 1) -> StepSums:
    return step_sums(model, steps(decodes=requests, decode_context=requests * context), tp)


def one_layer(attention: FullAttention | LatentAttention | LinearAttention, ffn: object = None) -> Model:
    layer = Layer(attention, ffn or DenseFfn(4096))  # type: ignore[arg-type]
    return Model("tiny", 1024, 32000, (layer,), 131072)


def test_llama_prefill_flops_equal_a_hand_count() -> None:
    """Llama-3.1-8B's config: 32 layers, hidden 4096, 32 heads and 8 KV heads of 128, inner 14336."""
    tokens = 1000
    projections = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    pairs = tokens * (tokens + 1) / 2
    expected = 32 * (2 * projections * tokens + 2 * 2 * 4096 * pairs) + 2 * 128256 * 4096
    assert prefill_sums(LLAMA, tokens).flops[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("tokens", [1.0, 333.0, 4096.0])
def test_prefill_flops_are_two_per_parameter_and_token_plus_attention(name: str, tokens: float) -> None:
    """2 P L without the tables (the head sees one token), plus 4 n s for every pair."""
    model = models.model(name)
    attention = model.layers[0].attention
    assert isinstance(attention, FullAttention)
    inside = active_parameters(model, range(model.layer_count))
    pairs = 4 * attention.heads * attention.head_dim * tokens * (tokens + 1) / 2 * model.layer_count
    expected = 2 * inside * tokens + pairs + 2 * model.vocab * model.hidden
    assert prefill_sums(model, tokens).flops[0] == pytest.approx(expected, rel=6e-5)


@given(st.integers(1, 20_000))
def test_prefill_flops_equal_cauchys_equation_3_without_gqa(tokens: int) -> None:
    """(3) counts every pair, masked or not: the causal half is what differs, and the head it leaves out."""
    layers = tuple(replace(layer, attention=replace(layer.attention, kv_heads=32)) for layer in LLAMA.layers)
    model = replace(LLAMA, layers=layers)
    paper = CauchyModel.from_model(model)
    ours = prefill_sums(model, tokens).flops[0] - 2.0 * model.vocab * model.hidden
    assert ours == pytest.approx(paper.c1 * tokens * (tokens + 1) / 2 + paper.c2 * tokens, rel=1e-9)
    assert ours <= (paper.c1 * tokens**2 + paper.c2 * tokens) * (1 + 1e-9)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_chunk_flops_add_up_to_the_whole_prompt(first: int, second: int) -> None:
    """FLOPs of two chunks, one behind the other, are those of the whole; each sees the head."""
    head = 2.0 * LLAMA.vocab * LLAMA.hidden
    whole = prefill_sums(LLAMA, first + second).flops[0]
    parts = prefill_sums(LLAMA, first).flops[0] + prefill_sums(LLAMA, second, first).flops[0]
    assert parts - head == pytest.approx(whole, rel=1e-12)


@given(st.integers(1, 3000))
def test_decode_flops_equal_a_prefill_of_one_token(context: int) -> None:
    decode, chunk = decode_sums(LLAMA, 1, context + 1), prefill_sums(LLAMA, 1, context)
    assert decode.flops == pytest.approx(chunk.flops, rel=1e-12)
    assert decode.kv_bytes == pytest.approx(chunk.kv_bytes, rel=1e-12)


@pytest.mark.parametrize("name", DENSE)
def test_decode_reads_all_weights_but_the_embedding(name: str) -> None:
    """Norms (and biases, where there are any) are below 0.006 % and not counted."""
    model = models.model(name)
    # With tied tables the head is the embedding and is read after all.
    read = weight_bytes(model) - (0.0 if model.tied_embeddings else embedding_bytes(model))
    got = decode_sums(model, 1, 100).weight_bytes[0]
    assert got <= read
    assert got == pytest.approx(read, rel=6e-5)


def test_llama_decode_reads_its_exact_weight_bytes() -> None:
    norms = (2 * 32 + 1) * 4096 * 2
    assert decode_sums(LLAMA, 7, 100).weight_bytes[0] == weight_bytes(LLAMA) - embedding_bytes(LLAMA) - norms


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "GPT-OSS-120B", "DeepSeek-V3", "Qwen3-32B"])
@pytest.mark.parametrize("context", [1, 100, 127, 128, 5000])
def test_decode_reads_the_kv_bytes_that_memory_counts(name: str, context: int) -> None:
    model = models.model(name)
    assert decode_sums(model, 3, context).kv_bytes[0] == pytest.approx(3 * kv_bytes(model, context))


def test_latent_attention_reads_1152_bytes_per_token_and_layer() -> None:
    """(512 + 64) elements of 2 bytes, whatever the number of heads or ranks."""
    model = models.model("DeepSeek-V3")
    for tp in (1, 8):
        more, less = decode_sums(model, 1, 1001, tp), decode_sums(model, 1, 1000, tp)
        per_token = (more.kv_bytes[0] - less.kv_bytes[0]) / model.layer_count
        assert per_token == pytest.approx(1152 * model.kv_bits / 16)


def test_latent_decode_flops_equal_a_hand_count() -> None:
    """Absorbed: every head meets the latent and the rotary key (576), then sums latents (512)."""
    model = one_layer(LatentAttention(128, 512, 128, 64, 128, 1536))
    more, less = decode_sums(model, 1, 501), decode_sums(model, 1, 500)
    assert more.flops[0] - less.flops[0] == pytest.approx(2 * 128 * (576 + 512))


def test_attention_window_caps_decode_and_prefill_work() -> None:
    model = one_layer(FullAttention(16, 4, 64, 64, window=128))
    assert decode_sums(model, 2, 5000).kv_bytes == decode_sums(model, 2, 128).kv_bytes
    assert decode_sums(model, 2, 5000).flops == decode_sums(model, 2, 128).flops
    assert prefill_sums(model, 64, 5000).flops == prefill_sums(model, 64, 500).flops
    assert prefill_sums(model, 64, 5000).kv_bytes == prefill_sums(model, 64, 500).kv_bytes
    assert prefill_sums(model, 64, 0).flops[0] < prefill_sums(model, 64, 500).flops[0]


def test_linear_attention_work_does_not_depend_on_context() -> None:
    """Each request reads and writes its state, and no more with a longer context."""
    model = one_layer(LinearAttention("gated_delta", 16, 32, 128, 128, conv_kernel=0))
    short, long = decode_sums(model, 5, 10), decode_sums(model, 5, 100_000)
    assert short.kv_bytes == long.kv_bytes
    assert short.flops == long.flops
    assert short.kv_bytes[0] == 2 * 5 * state_bytes(model)


@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 100_000))
def test_expert_rows_add_up_to_the_routed_tokens(experts: int, active: int, tokens: int) -> None:
    active = min(active, experts)
    rows, used = GemmWork("experts", 1.0, 1.0, 16.0, experts, active).spread(np.array([float(tokens)]))
    assert rows[0] * used[0] == pytest.approx(tokens * active)
    assert active * (1 - 1e-9) <= used[0] <= min(experts, tokens * active) * (1 + 1e-9)


def test_used_experts_equal_the_simulated_mean_for_few_and_many_tokens() -> None:
    rows, used = GemmWork("experts", 1.0, 1.0, 16.0, 128, 8).spread(np.array([1.0, 16.0, 1e6]))
    assert used[0] == pytest.approx(8.0)
    assert used[2] == pytest.approx(128.0)
    assert rows[2] == pytest.approx(1e6 * 8 / 128)
    # 16 tokens that choose 8 of 128 at random: count the experts that someone chose.
    rng = np.random.default_rng(0)
    trials = [len(set(np.concatenate([rng.permutation(128)[:8] for _ in range(16)]))) for _ in range(400)]
    assert used[1] == pytest.approx(np.mean(trials), rel=0.01)
    assert GemmWork("plain", 1.0, 1.0, 16.0).spread(np.array([5.0])) == (5.0, 1.0)


@pytest.mark.parametrize("name", MIXTURES)
def test_token_of_a_mixture_uses_its_active_parameters(name: str) -> None:
    model = models.model(name)
    inside = active_parameters(model, range(model.layer_count))
    flops = decode_sums(model, 1, 1e-9).flops[0] - 2.0 * model.vocab * model.hidden
    assert flops == pytest.approx(2.0 * inside, rel=0.01)
    many = decode_sums(model, 1e5, 1e-9).weight_bytes[0]
    tables = 0.0 if model.tied_embeddings else embedding_bytes(model)
    assert many == pytest.approx(weight_bytes(model) - tables, rel=0.01)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Llama-3-70B", "Qwen3-32B"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_work_of_all_ranks_adds_up_to_the_whole(name: str, tp: int) -> None:
    """As long as no KV head has to be copied, everything but the element-wise work is divided."""
    model = models.model(name)
    batch = steps(700, 300, 20, 20_000)
    whole, rank = step_sums(model, batch), step_sums(model, batch, tp)
    assert tp * rank.flops == pytest.approx(whole.flops, rel=1e-12)
    assert tp * rank.weight_bytes == pytest.approx(whole.weight_bytes, rel=1e-12)
    assert tp * rank.kv_bytes == pytest.approx(whole.kv_bytes, rel=1e-12)
    assert tp * rank.activation_bytes >= whole.activation_bytes  # norms and residuals stand on every rank


def test_replicated_kv_heads_do_not_shrink_with_more_ranks() -> None:
    """Two KV heads over eight ranks: each holds one, so the ranks read four times the cache."""
    model = one_layer(FullAttention(16, 2, 64, 64))
    whole, rank = decode_sums(model, 4, 1000), decode_sums(model, 4, 1000, 8)
    assert 8 * rank.kv_bytes[0] == pytest.approx(4 * whole.kv_bytes[0])


def test_latents_are_replicated_on_every_rank_and_experts_are_sharded() -> None:
    attention = LatentAttention(16, 512, 128, 64, 128, 768)
    model = one_layer(attention, MoeFfn(64, 4, 512, shared_intermediate=512))
    one, many = (layer_work(model.layers[0], model, tp) for tp in (1, 4))
    width = {gemm.name: gemm.n * gemm.k for gemm in one.gemms}
    for gemm in many.gemms:
        divided = 1 if gemm.name in ("router", "down") else 4
        assert gemm.n * gemm.k * divided == pytest.approx(width[gemm.name]), gemm.name
    assert (one.reduced_bytes_per_token, many.reduced_bytes_per_token) == (0.0, 2 * 2 * 1024)


def test_equal_layers_are_counted_once_and_stages_take_their_own() -> None:
    model = models.model("GPT-OSS-120B")
    assert sum(count for _, count in layer_works(model, 1)) == model.layer_count
    assert len(layer_works(model, 1)) == 2
    halves = [step_sums(model, steps(100, 0), layers=r) for r in (range(18), range(18, 36))]
    whole = step_sums(model, steps(100, 0))
    head = head_gemm(model, 1)
    assert halves[0].flops + halves[1].flops == pytest.approx(whole.flops - 2 * head.n * head.k)


def test_layer_works_distinguish_attention_kinds() -> None:
    hybrid = models.model("Kimi-Linear-48B")
    assert {type(work.attention) for work, _ in layer_works(hybrid, 1)} == {SoftmaxWork, LinearWork}


def test_empty_step_has_no_work() -> None:
    sums = step_sums(LLAMA, steps([0.0, 10.0], [500.0, 0.0]))
    for part in (sums.flops, sums.weight_bytes, sums.kv_bytes, sums.activation_bytes, sums.bytes):
        assert part[0] == 0.0
        assert part[1] > 0.0
