"""What one layer asks of one GPU: its matrix products, its attention, its element-wise traffic.

Tensor parallelism divides heads, inner widths and experts' widths over `tp` ranks; KV heads are copied when
there are fewer than ranks, and MLA's down-projections and its latent stand on every rank. With expert parallelism
(`core.values.layout.Ep`) an expert is whole on one rank, which works on the rows that chose it; the rank that chance
gives most decides. The same lists give times (`perf.timers.roofline`) and plain sums of FLOPs and bytes
(`perf.sizes.arithmetic`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from potluck.core.values.layout import Ep
from potluck.core.values.model import (
    Attention,
    Format,
    FullAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    Model,
    MoeFfn,
)
from potluck.perf.memory import Layers, unlike_layers
from potluck.perf.operators.kernels import busiest_share, mean_keys
from potluck.perf.step_timer import Floats, StepBatch

LINEAR_CHUNK = 64
"""Tokens that linear-attention kernels work on at a time when they prefill."""


@dataclass(frozen=True, slots=True)
class GemmWork:
    """A product of the step's tokens with an (n, k) weight matrix; of routed tokens when it has experts."""

    name: str
    n: float
    k: float
    bits: float
    experts: int = 0
    active: int = 0
    ranks: int = 1
    """GPUs that the experts are spread over, each whole on one."""
    format: Format = "bf16"

    def spread(self, tokens: Floats) -> tuple[Floats, Floats]:
        """(rows per matrix, matrices used): tokens choose experts evenly and independently.

        Of several ranks it is the one with the most rows, and more matrices in proportion. For sums of FLOPs and
        bytes; times take routers as uneven as they are (`perf.operators.routing`).
        """
        if not self.experts:
            return tokens, np.ones_like(tokens)
        miss = (1.0 - self.active / self.experts) ** tokens
        used = np.maximum(self.experts * (1.0 - miss), 1.0)
        rows = tokens * self.active
        if self.ranks > 1:
            share = busiest_share(rows, self.ranks)
            rows, most = rows * share, -(-self.experts // self.ranks)
            used = np.clip(used * share, 1.0, most)
        return rows / used, used


@dataclass(frozen=True, slots=True)
class SoftmaxWork:
    """Full, windowed or latent attention on one rank."""

    heads: float
    kv_heads: float
    qk_dim: float
    v_dim: float
    window: int | None
    bytes_per_token: float
    """KV that one context token makes a decode read."""
    decode_flops_per_token: float
    """Matrix FLOPs of a decode per context token."""
    latent_up: GemmWork | None = None
    """MLA expands its cached latents again for every prefill chunk."""


@dataclass(frozen=True, slots=True)
class LinearWork:
    """Linear attention on one rank."""

    flops_per_token: float
    state_bytes: float


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Everything one layer does on one rank."""

    gemms: tuple[GemmWork, ...]
    attention: SoftmaxWork | LinearWork
    stream_bytes_per_token: float
    launches: int
    reduced_bytes_per_token: float
    """Activations that the ranks add up, per token; 0 without tensor parallelism."""
    routed_bytes_per_token: float = 0.0
    """Activations that go to experts on other ranks, and as many come back; where ranks have tokens of their own."""


def layer_works(model: Model, tp: int, layers: Layers = None, ep: Ep = "none") -> list[tuple[LayerWork, int]]:
    """The unlike layers of a stage with how often each occurs."""
    return [(layer_work(layer, model, tp, ep), count) for layer, count in unlike_layers(model, layers)]


@lru_cache(maxsize=1024)
def layer_work(layer: Layer, model: Model, tp: int, ep: Ep = "none") -> LayerWork:
    """One layer on one of `tp` ranks. With data-parallel attention, per token of that rank; experts of all tokens."""
    hidden = model.hidden
    ranks, tp = tp, 1 if ep == "dp" else tp
    attention_gemms = _attention_gemms(layer.attention, model, tp)
    ffn_gemms, inner, launches = _ffn_gemms(layer, model, tp, ranks if ep != "none" else 1)
    gemms = _in_formats((*attention_gemms, *ffn_gemms), model)
    # Two norms with residual (read two, write two), rotary embedding and cache write, and the activation.
    # Latent attention was measured with all that lies around it, and needs one norm less.
    latent = isinstance(layer.attention, LatentAttention)
    rotated = 0.0 if latent else sum(gemm.n for gemm in attention_gemms[:1])
    elements = (1 if latent else 2) * 4 * hidden + 3 * rotated + 3 * inner
    reduced = 2.0 * 2.0 * hidden if tp > 1 else 0.0
    routed = 2.0 * hidden * layer.ffn.active if ep == "dp" and isinstance(layer.ffn, MoeFfn) else 0.0
    attention = _attention(layer.attention, model, tp)
    return LayerWork(gemms, attention, 2.0 * elements, (2 if latent else 5) + launches, reduced, routed)


def _in_formats(gemms: tuple[GemmWork, ...], model: Model) -> tuple[GemmWork, ...]:
    """Products with the formats of their weights; routers are left as they were."""
    named = (
        (gemm, "bf16" if gemm.name == "router" else model.experts_are if gemm.experts else model.weights_are)
        for gemm in gemms
    )
    return tuple(replace(gemm, format=kind) for gemm, kind in named)


def head_gemm(model: Model, tp: int) -> GemmWork:
    """The output head; it sees one token of every sequence."""
    return GemmWork("head", model.vocab / tp, model.hidden, max(model.weight_bits, 16.0))


def _attention_gemms(attention: Attention, model: Model, tp: int) -> tuple[GemmWork, ...]:
    hidden, bits = model.hidden, model.weight_bits
    if isinstance(attention, FullAttention):
        heads, kv_heads = attention.heads / tp, _kv_heads(attention.kv_heads, tp)
        queries = heads * attention.head_dim * (2 if attention.output_gate else 1)
        keys_values = kv_heads * (attention.head_dim + attention.v_head_dim)
        return (
            GemmWork("qkv", queries + keys_values, hidden, bits),
            GemmWork("o", hidden, heads * attention.v_head_dim, bits),
        )
    if isinstance(attention, LatentAttention):
        return latent_gemms(attention, model, tp)
    heads = attention.value_heads / tp
    values = heads * attention.value_head_dim
    keys = attention.key_heads / tp * attention.key_head_dim
    gate = 0.0 if attention.kind == "kda" else values
    projections = [
        GemmWork("qkv", 2 * keys + values + gate, hidden, bits),
        GemmWork("o", hidden, values, bits),
    ]
    if attention.gate_rank:
        projections.append(GemmWork("gates_down", 2 * attention.gate_rank, hidden, bits))
        projections.append(GemmWork("gates_up", keys + values, attention.gate_rank, bits))
    return tuple(projections)


def latent_gemms(attention: LatentAttention, model: Model, tp: int) -> tuple[GemmWork, ...]:
    """Projections of latent attention; the last of the ups is part of every decode too, in two halves."""
    hidden, bits, heads = model.hidden, model.weight_bits, attention.heads / tp
    query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    down = attention.kv_lora_rank + attention.qk_rope_head_dim
    up = GemmWork(
        "kv_up", heads * (attention.qk_nope_head_dim + attention.v_head_dim), attention.kv_lora_rank, bits
    )
    out = GemmWork("o", hidden, heads * attention.v_head_dim, bits)
    if attention.q_lora_rank is None:
        return _in_formats((GemmWork("q_and_kv_down", query + down, hidden, bits), up, out), model)
    narrow = GemmWork("down", attention.q_lora_rank + down, hidden, bits)
    return _in_formats((narrow, GemmWork("q_up", query, attention.q_lora_rank, bits), up, out), model)


def _ffn_gemms(layer: Layer, model: Model, tp: int, ranks: int) -> tuple[tuple[GemmWork, ...], float, int]:
    """(products, width of the activation per token, further launches); experts are spread over `ranks`."""
    ffn, hidden, bits = layer.ffn, model.hidden, model.weight_bits
    if not isinstance(ffn, MoeFfn):
        inner = ffn.intermediate / tp
        return (GemmWork("gate_up", 2 * inner, hidden, bits), GemmWork("down", hidden, inner, bits)), inner, 0
    inner, wide = ffn.intermediate / tp, model.expert_bits
    width = float(ffn.intermediate) if ranks > 1 else inner
    gemms = [
        GemmWork("router", ffn.experts, hidden, 16.0),
        GemmWork("experts_gate_up", 2 * width, hidden, wide, ffn.experts, ffn.active, ranks),
        GemmWork("experts_down", hidden, width, wide, ffn.experts, ffn.active, ranks),
    ]
    shared = ffn.shared_intermediate / tp
    if shared:
        gemms += [
            GemmWork("shared_gate_up", 2 * shared, hidden, bits),
            GemmWork("shared_down", hidden, shared, bits),
        ]
    # Choosing, sorting, activating and adding up experts' rows are timed with the experts, but not a shared one's.
    return tuple(gemms), shared, 1 if shared else -1


def _attention(attention: Attention, model: Model, tp: int) -> SoftmaxWork | LinearWork:
    width = model.kv_bits / 8
    if isinstance(attention, FullAttention):
        heads, kv_heads = attention.heads / tp, _kv_heads(attention.kv_heads, tp)
        dims = attention.head_dim + attention.v_head_dim
        flops = 2.0 * heads * dims
        moved = kv_heads * dims * width
        window = attention.window
        return SoftmaxWork(heads, kv_heads, attention.head_dim, attention.v_head_dim, window, moved, flops)
    if isinstance(attention, LatentAttention):
        return latent_work(attention, model, tp)
    return _linear(attention, tp)


def latent_work(attention: LatentAttention, model: Model, tp: int) -> SoftmaxWork:
    """Latent attention without its projections on one of `tp` ranks."""
    heads, width = attention.heads / tp, model.kv_bits / 8
    latent = attention.kv_lora_rank + attention.qk_rope_head_dim
    qk_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    flops = 2.0 * heads * (latent + attention.kv_lora_rank)
    up = next(gemm for gemm in latent_gemms(attention, model, tp) if gemm.name == "kv_up")
    # One latent serves all heads: blocks of 64 heads keep the SMs busy.
    blocks = max(heads / 64, 1.0)
    return SoftmaxWork(heads, blocks, qk_dim, attention.v_head_dim, None, latent * width, flops, up)


def _linear(attention: LinearAttention, tp: int) -> LinearWork:
    heads = attention.value_heads / tp
    keys, values = attention.key_head_dim, attention.value_head_dim
    # Inside a chunk every pair of tokens meets; between chunks the state is read, decayed and written.
    flops = 2.0 * heads * (LINEAR_CHUNK * (keys + values) + 3.0 * keys * values)
    state = heads * keys * values * attention.state_bytes_per_element
    return LinearWork(flops, state)


def _kv_heads(kv_heads: int, tp: int) -> int:
    return -(-kv_heads // tp)


@dataclass(frozen=True, slots=True)
class StepSums:
    """(N,) sums over all layers of what one of `tp` GPUs does in each step."""

    flops: Floats
    weight_bytes: Floats
    kv_bytes: Floats
    """KV that is read and written."""
    activation_bytes: Floats

    @property
    def bytes(self) -> Floats:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


def step_sums(model: Model, batch: StepBatch, tp: int = 1, layers: Layers = None) -> StepSums:
    """FLOPs and bytes of steps on one of `tp` ranks, for all layers or some; the head counts with all."""
    total = [np.zeros(len(batch)) for _ in range(4)]
    for work, count in layer_works(model, tp, layers):
        for sums, part in zip(total, _layer_sums(work, batch), strict=True):
            sums += count * part
    if layers is None:
        flops, moved = _gemm_sums(head_gemm(model, tp), batch.sequences)
        total[0] += flops
        total[1] += moved
    return StepSums(*total)


def _layer_sums(work: LayerWork, batch: StepBatch) -> tuple[Floats, Floats, Floats, Floats]:
    tokens = batch.tokens
    flops, weights = np.zeros(len(batch)), np.zeros(len(batch))
    for gemm in work.gemms:
        gemm_flops, gemm_bytes = _gemm_sums(gemm, tokens)
        flops += gemm_flops
        weights += gemm_bytes
    if isinstance(work.attention, LinearWork):
        requests = batch.sequences
        attention_flops = tokens * work.attention.flops_per_token
        moved = 2.0 * requests * work.attention.state_bytes
    else:
        attention_flops, moved = _softmax_sums(work.attention, batch)
    return flops + attention_flops, weights, moved, tokens * work.stream_bytes_per_token


def _gemm_sums(gemm: GemmWork, tokens: Floats) -> tuple[Floats, Floats]:
    rows, used = gemm.spread(tokens)
    busy = tokens > 0
    flops = 2.0 * rows * used * gemm.n * gemm.k
    moved = np.where(busy, used * gemm.n * gemm.k * gemm.bits / 8, 0.0)
    return flops, moved


def _softmax_sums(work: SoftmaxWork, batch: StepBatch) -> tuple[Floats, Floats]:
    new, cached = batch.chunk_new, batch.chunk_cached
    pairs = (new * mean_keys(new, cached, work.window)).sum(axis=1)
    context = batch.decode_context
    reach = np.where(new > 0, cached + new, 0.0)
    if work.window is not None:
        context = np.minimum(context, batch.decodes * work.window)
        reach = np.minimum(reach, work.window + new)
    flops = 2.0 * work.heads * (work.qk_dim + work.v_dim) * pairs + work.decode_flops_per_token * context
    moved = work.bytes_per_token * (context + reach.sum(axis=1))
    return flops, moved
