"""Gated delta rule (Qwen3-Next): linear attention with a state of fixed size.

Per head, with the state S (key dim x value dim), decay a_t = exp(g_t) in (0, 1] and rate b_t in (0, 1):

    S <- a_t S
    S <- S + k_t (b_t (v_t - S' k_t))'        what the state already answers to k_t is corrected towards v_t
    o_t = S' q_t

Queries, keys and values pass a short causal convolution first, whose latest inputs are the rest of the state. The
rule is applied token by token: the state after n tokens is then the same however the n were cut (exact.py). On a CPU
that is a compiled loop; elsewhere all sequences of a step go at once, one call for each place of the longest chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.core.values.model import LinearAttention
from potluck.engine.compute.batch_layout import BatchLayout, LinearStep
from potluck.engine.memory.kv_cache import Kept, LinearStates
from potluck.engine.model.checkpoint import LayerLoader
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.model.rope import RopeAngles
from potluck.engine.numbers.exact import in_vectors, rms_norm, sigmoid, silu, softplus
from potluck.engine.numbers.matrix import Norm, across, add_product, product

L2_EPS = 1e-6


class LinearLayer:
    def __init__(self, config: EngineModelConfig, attention: LinearAttention, load: LayerLoader) -> None:
        self._part = attention
        self._eps = config.norm_eps
        hidden, values = config.model.hidden, attention.value_heads * attention.value_head_dim
        load = load.under("linear_attn")
        self._weight = across(_projections(config, attention, load))
        conv = load.take("conv1d.weight", attention.conv_channels, 1, attention.conv_kernel)
        self._conv = conv[:, 0].T.contiguous()
        self._rate = -load.take("A_log", attention.value_heads).float().exp()
        self._shift = load.take("dt_bias", attention.value_heads).float()
        self._norm = load.take("norm.weight", attention.value_head_dim)
        self._out = across(load.take("out_proj.weight", hidden, values))

    def __call__(
        self,
        norm: Norm,
        residual: Tensor,
        linear_states: Kept,
        batch_layout: BatchLayout,
        rope_angles: RopeAngles,
        wanted: Tensor | None,
    ) -> Tensor:
        assert isinstance(linear_states, LinearStates)
        assert batch_layout.linear is not None
        attention, tokens = self._part, residual.shape[0]
        channels, values = attention.conv_channels, attention.value_heads * attention.value_head_dim
        packed = product(residual, self._weight, norm=norm)
        mixed, gate, rate, step_size = torch.split(
            packed, [channels, values, attention.value_heads, attention.value_heads], 1
        )
        mixed = silu(self._convolve(mixed, linear_states, batch_layout.linear)).float()
        keys = attention.key_heads * attention.key_head_dim
        query = _unit(mixed[:, :keys].view(tokens, attention.key_heads, -1)) * attention.key_head_dim**-0.5
        key = _unit(mixed[:, keys : 2 * keys].view(tokens, attention.key_heads, -1))
        value = mixed[:, 2 * keys :].view(tokens, attention.value_heads, -1)
        repeats = attention.value_heads // attention.key_heads
        if repeats > 1:
            query, key = (y.repeat_interleave(repeats, 1) for y in (query, key))
        decay = torch.exp(self._rate * softplus(step_size.float() + self._shift))
        out = _walk(
            batch_layout.linear, linear_states.memory, query, key, value, decay, sigmoid(rate.float())
        ).to(packed.dtype)
        out = rms_norm(out, self._norm, self._eps).view(tokens, -1) * silu(gate)
        tensor = add_product(residual, out, self._out)
        return tensor if wanted is None else tensor.index_select(0, wanted)

    def _convolve(self, new: Tensor, linear_states: LinearStates, step: LinearStep) -> Tensor:
        inputs = torch.cat([linear_states.conv.index_select(0, step.rows).flatten(0, 1), new])
        # One rounding per operation: a fused sum would round differently at the ends of a tensor.
        out = inputs.index_select(0, step.taps[0]) * self._conv[0]
        for tap in range(1, self._part.conv_kernel):
            out += inputs.index_select(0, step.taps[tap]) * self._conv[tap]
        linear_states.conv.index_copy_(
            0, step.rows, inputs.index_select(0, step.tails).view(-1, *linear_states.conv.shape[1:])
        )
        return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _walk(
    step: LinearStep, memory: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor
) -> Tensor:
    """Outputs [tokens, heads, value dim]; the states in `memory` move on."""
    if in_vectors(value, value.shape[-1]):
        from potluck.engine.numbers.kernels.rows import walk

        out = torch.empty(value.shape)
        # Each stays alive until the call is over.
        given = [y.contiguous() for y in (query, key, value, decay, rate)]
        addresses = (y.data_ptr() for y in (memory, *given, out))
        walk(*step.sequences, tuple(memory.shape[1:]), *addresses)
        return out
    if step.by_time is not None:
        query, key, value, decay, rate = (
            y.index_select(0, step.by_time) for y in (query, key, value, decay, rate)
        )
    heads, key_dim, value_dim = memory.shape[1:]
    states = memory.index_select(0, step.rows).view(-1, key_dim, value_dim)
    query, key, value = query.flatten(0, 1)[:, None], key.flatten(0, 1)[:, None], value.flatten(0, 1)[:, None]
    upright = key.transpose(1, 2)
    decay, rate = decay.view(-1, 1, 1), rate.view(-1, 1, 1)
    out, first = torch.empty_like(value), 0
    for count in step.counts:
        now = slice(first, first + count * heads)
        state = states[: count * heads].mul_(decay[now])
        change = (value[now] - torch.bmm(key[now], state)).mul_(rate[now])
        state.baddbmm_(upright[now], change)
        torch.bmm(query[now], state, out=out[now])
        first = now.stop
    memory.index_copy_(0, step.rows, states.view(-1, heads, key_dim, value_dim))
    out = out.view(-1, heads, value_dim)
    return out if step.packed is None else out.index_select(0, step.packed)


def _projections(config: EngineModelConfig, attention: LinearAttention, load: LayerLoader) -> Tensor:
    """Rows for queries, keys, values (all heads of each), gate, rate and step size.

    Qwen3-Next packs them by key head; Qwen3.5, and our own files, keep them apart.
    """
    hidden, values = config.model.hidden, attention.value_heads * attention.value_head_dim
    if config.family != "qwen3_next":
        qkv = load.take("in_proj_qkv.weight", attention.conv_channels, hidden)
        gate = load.take("in_proj_z.weight", values, hidden)
        rate, step_size = (
            load.take(f"in_proj_{kind}.weight", attention.value_heads, hidden) for kind in "ba"
        )
        return torch.cat([qkv, gate, rate, step_size])
    repeats = attention.value_heads // attention.key_heads
    sizes = [attention.key_head_dim] * 2 + [repeats * attention.value_head_dim] * 2
    packed = load.take("in_proj_qkvz.weight", attention.conv_channels + values, hidden)
    pieces = torch.split(packed.view(attention.key_heads, sum(sizes), hidden), sizes, 1)
    rates = load.take("in_proj_ba.weight", 2 * attention.value_heads, hidden).view(
        attention.key_heads, 2, repeats, hidden
    )
    return torch.cat(
        [
            *(piece.reshape(-1, hidden) for piece in pieces),
            rates[:, 0].reshape(-1, hidden),
            rates[:, 1].reshape(-1, hidden),
        ]
    )
