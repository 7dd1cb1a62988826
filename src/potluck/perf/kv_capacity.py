"""What fits: weights and KV cache in the memory of a layout's GPUs.

Of a GPU's memory a share is usable (vLLM's default is 0.9; the rest is for the CUDA context and
fragmentation). From it come the weights of its stage and the activations of the largest step; the rest holds
KV. The stage with the least room decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf

from potluck.core.errors import CapacityError
from potluck.core.values.layout import Ep
from potluck.core.values.model import LinearAttention, Model
from potluck.core.values.types import NodeType
from potluck.perf.memory import (
    attention_ways,
    embedding_bytes,
    head_bytes,
    kv_bytes_per_gpu,
    weight_bytes_per_gpu,
)

USABLE_SHARE = 0.9
STEP_TOKENS = 8192
"""Tokens of the largest step that activations are kept for (vLLM's default token budget on large GPUs)."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory of one GPU of a stage."""

    usable_bytes: float
    weight_bytes: float
    activation_bytes: float

    @property
    def kv_bytes(self) -> float:
        """Room for KV; negative when not even the weights fit."""
        return self.usable_bytes - self.weight_bytes - self.activation_bytes


def stage_memory(
    model: Model, node: NodeType, tp: int, layers: range | None = None, *, ep: Ep = "none"
) -> StageMemory:
    """Memory of one of `tp` GPUs that hold `layers` (all of them when left out)."""
    chosen, ways = range(model.layer_count) if layers is None else layers, attention_ways(tp, ep)
    weights = weight_bytes_per_gpu(model, tp, chosen, tables=False, ep=ep)
    weights += _table_bytes(model, chosen) / ways
    return StageMemory(node.gpu.memory_bytes * USABLE_SHARE, weights, _activation_bytes(model, ways))


def max_requests(
    model: Model, memory: StageMemory, tp: int, tokens: float, layers: range | None = None, ep: Ep = "none"
) -> int:
    """How many requests of so many tokens have room for their KV at once."""
    ways = attention_ways(tp, ep)
    value = kv_bytes_per_gpu(model, tokens, ways, layers)
    return max(0, floor(memory.kv_bytes / value)) * (tp // ways) if value > 0 else 1 << 20


def kv_tokens(
    model: Model, memory: StageMemory, tp: int, tokens: float, layers: range, ep: Ep = "none"
) -> float:
    """Tokens of KV that `tp` GPUs have room for, in requests of about so many; infinite where they take none."""
    ways = attention_ways(tp, ep)
    value = kv_bytes_per_gpu(model, tokens, ways, layers)
    return memory.kv_bytes / value * tokens * (tp // ways) if value > 0 else inf


def require_fit(model: Model, memory: StageMemory, node: NodeType, tp: int) -> None:
    """An error that says by how much the weights are too large."""
    if memory.kv_bytes <= 0:
        raise CapacityError(
            f"{model.name} does not fit on {node.name} with tensor parallelism {tp}: each GPU needs "
            f"{(memory.weight_bytes + memory.activation_bytes) / 1e9:.1f} GB and has "
            f"{memory.usable_bytes / 1e9:.1f} GB usable; take more or larger GPUs"
        )


def _table_bytes(model: Model, layers: range) -> float:
    """The embedding stands on the first stage, the head on the last; tied, each has the same table."""
    first, last = layers.start == 0, layers.stop == model.layer_count
    table = first or (last and model.tied_embeddings)
    return (embedding_bytes(model) if table else 0.0) + (head_bytes(model) if last else 0.0)


def _activation_bytes(model: Model, tp: int) -> float:
    """The widest moment of a layer: residual, normed input and the inner activation, in 16 bits."""
    widest = 0.0
    # Most are the very same, and hashing one takes longer than all the rest.
    for layer in {id(layer): layer for layer in model.layers}.values():
        attention = layer.attention
        heads = attention.value_heads if isinstance(attention, LinearAttention) else attention.heads
        dim = attention.value_head_dim if isinstance(attention, LinearAttention) else attention.v_head_dim
        inner = getattr(layer.ffn, "intermediate", 0) * getattr(layer.ffn, "active", 1)
        widest = max(widest, 3.0 * heads * dim / tp, 3.0 * inner / tp)
    return 2.0 * STEP_TOKENS * (2.0 * model.hidden + widest)
