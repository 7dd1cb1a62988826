"""Attention with keys and values of its own for each token: over everything, or over a window.

One product makes queries, keys and values (and the output gate, where there is one). Keys and values come out side by
side, as they are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.core.model import FullAttention
from potluck.engine.attention.paged import attend
from potluck.engine.cache import Kept, Pages
from potluck.engine.config import Config
from potluck.engine.exact import across, product, rms_norm, sigmoid
from potluck.engine.loading import Loader
from potluck.engine.rope import Turns, halves_apart, turn
from potluck.engine.step import Step


def rotated(config: Config, part: FullAttention) -> int:
    """Numbers of each head that positions turn."""
    return int(part.head_dim * config.rope.share)


class FullLayer:
    def __init__(self, config: Config, part: FullAttention, load: Loader) -> None:
        self._part = part
        self._scale = part.head_dim**-0.5
        self._eps = config.norm_eps
        self._turned = rotated(config, part)
        heads, kv_heads, dim, hidden = part.heads, part.kv_heads, part.head_dim, config.model.hidden
        groups = heads // kv_heads
        pairs = halves_apart(config.rope, dim, self._turned)
        # Query head h x G + g becomes g x heads + h (paged.py); within a head halves are turned (rope.py).
        order = torch.arange(heads).view(kv_heads, groups).T.flatten()
        load = load.under("self_attn")

        def rows(kind: str) -> Tensor:
            """Weights of a projection with its bias as a last column."""
            count = kv_heads if kind in "kv" else heads
            size = 2 * dim if kind == "q" and part.output_gate else dim
            weight = load.take(f"{kind}_proj.weight", count * size, hidden)
            bias = (
                load.take(f"{kind}_proj.bias", count * size) if part.bias else weight.new_zeros(count * size)
            )
            return torch.cat([weight, bias[:, None]], 1).view(count, size, hidden + 1)

        query, key, value = rows("q"), rows("k"), rows("v")
        parts = [query[order][:, :dim][:, pairs], key[:, pairs], value]
        if part.output_gate:
            parts.append(query[order][:, dim:])
        packed = torch.cat([each.flatten(0, 1) for each in parts])
        self._weight = across(packed[:, :hidden])
        self._bias = packed[:, hidden].contiguous() if part.bias else None
        out = load.take("o_proj.weight", hidden, heads * dim).view(hidden, heads, dim)
        self._out = across(out[:, order].reshape(hidden, heads * dim))
        self._out_bias = load.take("o_proj.bias", hidden) if part.output_bias else None
        self._qk_norm = None
        if part.qk_norm == "head":
            q_norm, k_norm = (load.norm(f"{kind}_norm.weight", dim)[pairs] for kind in "qk")
            self._qk_norm = torch.cat([q_norm.expand(heads, dim), k_norm.expand(kv_heads, dim)])

    def __call__(self, x: Tensor, residual: Tensor, kept: Kept, step: Step, turned_by: Turns) -> Tensor:
        """The residual plus attention of `x`; the new keys and values are kept."""
        assert isinstance(kept, Pages)
        part, tokens = self._part, x.shape[0]
        heads, kv_heads, dim = part.heads, part.kv_heads, part.head_dim
        packed = product(x, self._weight, self._bias)
        queries_keys = packed[:, : (heads + kv_heads) * dim].view(tokens, heads + kv_heads, dim)
        if self._qk_norm is not None:
            queries_keys.copy_(rms_norm(queries_keys, self._qk_norm, self._eps))
        turn(queries_keys, turned_by[self._turned])
        group = step.groups[kept.group]
        kept.entries.index_copy_(0, group.slots, packed[:, heads * dim : (heads + 2 * kv_heads) * dim])
        queries = queries_keys[:, :heads].view(tokens, heads // kv_heads, kv_heads, dim)
        out = attend(queries, kept, group.pieces, self._scale)
        if part.output_gate:
            out = out * sigmoid(packed[:, (heads + 2 * kv_heads) * dim :])
        residual = torch.addmm(residual, out, self._out)
        return residual if self._out_bias is None else residual.add_(self._out_bias)
