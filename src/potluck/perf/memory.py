"""What a model leaves in memory: weights, and the KV cache of a request.

KV bytes of a request of L tokens, added up over its layers:

    full attention     L · kv_heads · (head_dim + v_head_dim) · kv_bits/8          grows with every token
    latent (MLA)       L · (kv_lora_rank + qk_rope_head_dim) · kv_bits/8           grows with every token
    window w           min(L, w) · kv_heads · (head_dim + v_head_dim) · kv_bits/8  grows up to w tokens
    linear             value_heads · key_dim · value_dim · state width             a fixed state, and
                       + conv_channels · (conv_kernel - 1) · 2                     the last conv inputs

Weights come as parts, so that one list answers for parameter counts, active parameters, bytes, and the
share of one tensor-parallel rank. Counts are exact: they equal the tensors of the released checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from potluck.core.errors import InputError
from potluck.core.values.layout import Ep
from potluck.core.values.model import (
    Attention,
    DenseFfn,
    Ffn,
    FullAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    Model,
    MoeFfn,
)

Floats = NDArray[np.float64]
Lengths = Sequence[float] | NDArray[np.generic]
Layers = range | slice | None
"""Which layers of a model: a pipeline stage holds a part. None is all."""

CONV_STATE_BYTES = 2
"""The short convolution's inputs are kept in the width of activations."""
TABLE_BITS = 16.0
"""Quantised checkpoints (FP8, MXFP4, AWQ, GPTQ) leave the embedding and the head in 16 bits."""
EXPERTS = ("experts", "expert_bias")
"""Parts that lie on one GPU where experts are spread."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Some of a layer's weights that are stored and sharded alike."""

    name: str
    elements: int
    split: Literal["shard", "kv", "copy"] = "shard"
    """Over tensor-parallel ranks: divided, divided only as far as there are KV heads, or on every rank."""
    bits: Literal["weight", "expert"] = "weight"
    active_share: float = 1.0
    """Share that one token uses: below 1 for routed experts."""


def parameters(model: Model, layers: Layers = None) -> int:
    """Parameters of the whole model with its embedding, head and norms, or only of `layers`."""
    total = sum(count * _elements(layer, model.hidden) for layer, count in unlike_layers(model, layers))
    return total if layers is not None else total + _outside(model)


def active_parameters(model: Model, layers: Layers = None) -> int:
    """Parameters that one token uses; embedding and head count whole, as in the model's name."""
    total = sum(count * _active(layer, model.hidden) for layer, count in unlike_layers(model, layers))
    return total if layers is not None else total + _outside(model)


def embedding_bytes(model: Model) -> float:
    """Bytes of the token embedding."""
    return model.vocab * model.hidden * _table_bits(model) / 8


def head_bytes(model: Model) -> float:
    """Bytes of the output head that are not already the embedding's; includes the final norm."""
    own = 0 if model.tied_embeddings else model.vocab * model.hidden
    return (own + model.hidden) * _table_bits(model) / 8


def weight_bytes(model: Model, layers: Layers = None) -> float:
    """Bytes of all weights, or only of those of `layers` (then without embedding and head)."""
    total = sum(count * _layer_bytes(model, layer) for layer, count in unlike_layers(model, layers))
    return total if layers is not None else total + embedding_bytes(model) + head_bytes(model)


def weight_bytes_per_gpu(
    model: Model, tp: int, layers: Layers = None, *, tables: bool | None = None, ep: Ep = "none"
) -> float:
    """Bytes on one of `tp` ranks. Norms, routers and MLA's down-projections stand on every rank.

    `tables` says whether embedding and head are there too; by default when all layers are. Where experts are spread
    (`ep`), a rank has some of them whole; with data-parallel attention all else stands on every rank.
    """
    total = 0.0
    ways_of_all = attention_ways(tp, ep)
    for layer, count in unlike_layers(model, layers):
        kv_heads = layer.attention.kv_heads if isinstance(layer.attention, FullAttention) else ways_of_all
        ways: dict[str, float] = {"shard": ways_of_all, "kv": min(ways_of_all, kv_heads), "copy": 1}
        experts = layer.ffn.experts if isinstance(layer.ffn, MoeFfn) and ep != "none" else tp
        ways["experts"] = experts / -(-experts // tp)
        parts = _parts(layer, model.hidden)
        total += count * sum(
            _part_bytes(model, part) / ways["experts" if part.name in EXPERTS else part.split]
            for part in parts
        )
    if tables if tables is not None else layers is None:
        total += (embedding_bytes(model) + head_bytes(model)) / ways_of_all  # sharded over the vocabulary
    return total


def attention_ways(tp: int, ep: Ep) -> int:
    """Over how many GPUs one request's attention and KV are divided."""
    return 1 if ep == "dp" else tp


def kv_bytes_per_token(model: Model, layers: Layers = None) -> float:
    """Bytes that every further token adds for good: full and latent attention only."""
    return sum(count * _growing(model, layer.attention, 1) for layer, count in unlike_layers(model, layers))


def state_bytes(model: Model, layers: Layers = None) -> float:
    """Bytes of a request's linear-attention states, whatever its length."""
    return sum(count * _state(layer.attention, 1) for layer, count in unlike_layers(model, layers))


def window_bytes_per_token(model: Model, layers: Layers = None) -> dict[int, float]:
    """Bytes per token of the windowed layers, by window: what a request adds until it fills the window."""
    windows: dict[int, float] = {}
    for layer, count in unlike_layers(model, layers):
        if isinstance(layer.attention, FullAttention) and layer.attention.window is not None:
            window = layer.attention.window
            windows[window] = windows.get(window, 0.0) + count * _windowed(model, layer.attention, 1)
    return windows


@overload
def kv_bytes(model: Model, tokens: float, layers: Layers = None) -> float: ...
@overload
def kv_bytes(model: Model, tokens: Lengths, layers: Layers = None) -> Floats: ...
def kv_bytes(model: Model, tokens: ArrayLike, layers: Layers = None) -> float | Floats:
    """All KV bytes of a request of `tokens` tokens, over the whole replica; an array gives an array."""
    return kv_bytes_per_gpu(model, tokens, 1, layers)  # type: ignore[arg-type]


@overload
def kv_bytes_per_gpu(model: Model, tokens: float, tp: int, layers: Layers = None) -> float: ...
@overload
def kv_bytes_per_gpu(model: Model, tokens: Lengths, tp: int, layers: Layers = None) -> Floats: ...
def kv_bytes_per_gpu(model: Model, tokens: ArrayLike, tp: int, layers: Layers = None) -> float | Floats:
    """KV bytes of a request on each of `tp` ranks.

    KV heads are divided while there are enough and copied beyond; MLA's latent stands on every rank.
    """
    growing, windows, state = kv_rates_per_gpu(model, tp, layers)
    length = np.asarray(tokens, dtype=np.float64)
    total: Floats = growing * length + np.where(length > 0, state, 0.0)
    for window, rate in windows.items():
        total = total + rate * np.minimum(length, window)
    return float(total) if total.ndim == 0 else total


def kv_rates_per_gpu(model: Model, tp: int, layers: Layers = None) -> tuple[float, dict[int, float], float]:
    """(bytes per token for good, {window: bytes per token up to it}, fixed bytes) on each of `tp` ranks."""
    growing = state = 0.0
    windows: dict[int, float] = {}
    for layer, count in unlike_layers(model, layers):
        attention = layer.attention
        growing += count * _growing(model, attention, tp)
        state += count * _state(attention, tp)
        if isinstance(attention, FullAttention) and attention.window is not None:
            rate = count * _windowed(model, attention, tp)
            windows[attention.window] = windows.get(attention.window, 0.0) + rate
    return growing, windows, state


def _growing(model: Model, attention: Attention, tp: int) -> float:
    if isinstance(attention, LatentAttention):
        return (attention.kv_lora_rank + attention.qk_rope_head_dim) * model.kv_bits / 8
    if isinstance(attention, FullAttention) and attention.window is None:
        return _windowed(model, attention, tp)
    return 0.0


def _windowed(model: Model, attention: FullAttention, tp: int) -> float:
    heads = -(-attention.kv_heads // tp)
    return heads * (attention.head_dim + attention.v_head_dim) * model.kv_bits / 8


def _state(attention: Attention, tp: int) -> float:
    if not isinstance(attention, LinearAttention):
        return 0.0
    value_heads, key_heads = -(-attention.value_heads // tp), -(-attention.key_heads // tp)
    state = value_heads * attention.key_head_dim * attention.value_head_dim
    channels = 2 * key_heads * attention.key_head_dim + value_heads * attention.value_head_dim
    taps = max(attention.conv_kernel - 1, 0)
    return float(state * attention.state_bytes_per_element + channels * taps * CONV_STATE_BYTES)


@lru_cache(maxsize=4096)
def _parts(layer: Layer, hidden: int) -> tuple[WeightPart, ...]:
    norms = WeightPart("norms", 2 * hidden, "copy")
    return (norms, *_attention_parts(layer.attention, hidden), *_ffn_parts(layer.ffn, hidden))


def _attention_parts(attention: Attention, hidden: int) -> Iterator[WeightPart]:
    if isinstance(attention, FullAttention):
        return _full_parts(attention, hidden)
    if isinstance(attention, LatentAttention):
        return _latent_parts(attention, hidden)
    return _linear_parts(attention, hidden)


def _full_parts(attention: FullAttention, hidden: int) -> Iterator[WeightPart]:
    queries = attention.heads * attention.head_dim
    keys, values = attention.kv_heads * attention.head_dim, attention.kv_heads * attention.v_head_dim
    gates = 2 if attention.output_gate else 1
    bias = 1 if attention.bias else 0
    yield WeightPart("q", queries * gates * (hidden + bias))
    yield WeightPart("kv", (keys + values) * (hidden + bias), "kv")
    yield WeightPart("o", attention.heads * attention.v_head_dim * hidden)
    if attention.output_bias:
        yield WeightPart("o_bias", hidden, "copy")
    if attention.sinks:
        yield WeightPart("sinks", attention.heads)
    if attention.qk_norm == "head":
        yield WeightPart("qk_norm", 2 * attention.head_dim, "copy")
    elif attention.qk_norm == "full":
        yield WeightPart("qk_norm", queries + keys)


def _latent_parts(attention: LatentAttention, hidden: int) -> Iterator[WeightPart]:
    heads, rank = attention.heads, attention.kv_lora_rank
    query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    if attention.q_lora_rank is None:
        yield WeightPart("q", hidden * query)
    else:
        yield WeightPart("q_down", (hidden + 1) * attention.q_lora_rank, "copy")  # with its norm
        yield WeightPart("q_up", attention.q_lora_rank * query)
    yield WeightPart("kv_down", hidden * (rank + attention.qk_rope_head_dim) + rank, "copy")
    yield WeightPart("kv_up", rank * heads * (attention.qk_nope_head_dim + attention.v_head_dim))
    yield WeightPart("o", heads * attention.v_head_dim * hidden)


def _linear_parts(attention: LinearAttention, hidden: int) -> Iterator[WeightPart]:
    heads = attention.value_heads
    keys = attention.key_heads * attention.key_head_dim
    values = heads * attention.value_head_dim
    yield WeightPart("qkv", hidden * (2 * keys + values))
    yield WeightPart("o", values * hidden)
    if attention.conv_kernel:
        yield WeightPart("conv", attention.conv_channels * attention.conv_kernel)
    if attention.kind == "kda":
        # The decay and the output gate are low-rank; the decay also has a bias per channel and A per head.
        rank = attention.gate_rank
        yield WeightPart("gates_down", 2 * hidden * rank, "copy")
        yield WeightPart("gates_up", rank * (keys + values))
        yield WeightPart("beta", hidden * heads)
        yield WeightPart("decay", keys + heads)
        yield WeightPart("o_norm", attention.value_head_dim, "copy")
    elif attention.kind == "gated_delta":
        yield WeightPart("z", hidden * values)
        yield WeightPart("beta_alpha", 2 * hidden * heads)
        yield WeightPart("decay", 2 * heads)
        yield WeightPart("o_norm", attention.value_head_dim, "copy")
    else:
        # Lightning: an output gate as wide as the values and a norm over them; decays are constants.
        yield WeightPart("gate", hidden * values)
        yield WeightPart("o_norm", values)


def _ffn_parts(ffn: Ffn, hidden: int) -> Iterator[WeightPart]:
    if isinstance(ffn, DenseFfn):
        yield WeightPart("ffn", 3 * hidden * ffn.intermediate)
        return
    yield from _moe_parts(ffn, hidden)


def _moe_parts(ffn: MoeFfn, hidden: int) -> Iterator[WeightPart]:
    share = ffn.active / ffn.experts
    yield WeightPart("experts", ffn.experts * 3 * hidden * ffn.intermediate, "shard", "expert", share)
    yield WeightPart("router", ffn.experts * hidden, "copy")
    if ffn.bias:
        # Biases stay in the width of the other weights when the experts are quantised.
        yield WeightPart(
            "expert_bias", ffn.experts * (2 * ffn.intermediate + hidden), "shard", "weight", share
        )
    biases = int(ffn.bias) + int(ffn.router_bias)
    if biases:
        yield WeightPart("router_bias", biases * ffn.experts, "copy")
    if ffn.shared_intermediate:
        yield WeightPart("shared", 3 * hidden * ffn.shared_intermediate)
        if ffn.shared_gate:
            yield WeightPart("shared_gate", hidden, "copy")


def _elements(layer: Layer, hidden: int) -> int:
    return sum(part.elements for part in _parts(layer, hidden))


def _active(layer: Layer, hidden: int) -> int:
    return round(sum(part.elements * part.active_share for part in _parts(layer, hidden)))


def _outside(model: Model) -> int:
    tables = 1 if model.tied_embeddings else 2
    return tables * model.vocab * model.hidden + model.hidden


def _part_bytes(model: Model, part: WeightPart) -> float:
    bits = model.expert_bits if part.bits == "expert" else model.weight_bits
    return part.elements * bits / 8


def _layer_bytes(model: Model, layer: Layer) -> float:
    return sum(_part_bytes(model, part) for part in _parts(layer, model.hidden))


def _table_bits(model: Model) -> float:
    return max(model.weight_bits, TABLE_BITS)


def unlike_layers(model: Model, layers: Layers) -> list[tuple[Layer, int]]:
    """Unlike layers with how often each occurs: a stack of 94 layers has one or two kinds."""
    chosen = _range(model, layers)
    counts: dict[int, tuple[Layer, int]] = {}
    for layer in model.layers[chosen.start : chosen.stop]:  # equal ones are one object
        counts[id(layer)] = (layer, counts.get(id(layer), (layer, 0))[1] + 1)
    return list(counts.values())


def _range(model: Model, layers: Layers) -> range:
    count = model.layer_count
    if layers is None:
        return range(count)
    chosen = range(count)[layers] if isinstance(layers, slice) else layers
    if chosen.step != 1 or (len(chosen) and not 0 <= chosen.start <= chosen.stop <= count):
        raise InputError("layers", f"must be consecutive layers within 0 to {count}, not {layers}")
    return chosen
