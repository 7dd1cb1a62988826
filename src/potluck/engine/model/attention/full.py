"""Attention with keys and values of its own for each token: over everything, or over a window.

One product makes queries, keys and values (and the output gate, where there is one). Keys and values come out side by
side, as they are kept.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from potluck.core.values.model import FullAttention
from potluck.engine.compute.batch_layout import BatchLayout
from potluck.engine.memory.kv_cache import Kept, Pages
from potluck.engine.model.attention import decode
from potluck.engine.model.attention.paged import attend
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.model.loading import LayerLoader
from potluck.engine.model.rope import RopeAngles, halves_apart, turn
from potluck.engine.numbers import threads
from potluck.engine.numbers.exact import LANE, rms_norm, sigmoid
from potluck.engine.numbers.matrix import Norm, across, add_product, product


def rotated(config: EngineModelConfig, part: FullAttention) -> int:
    """Numbers of each head that positions turn."""
    return int(part.head_dim * config.rope.share)


class FullLayer:
    def __init__(self, config: EngineModelConfig, part: FullAttention, load: LayerLoader) -> None:
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

    def __call__(
        self,
        norm: Norm,
        residual: Tensor,
        kept: Kept,
        step: BatchLayout,
        turned_by: RopeAngles,
        wanted: Tensor | None,
    ) -> Tensor:
        """The residual plus attention of its norm, of those tokens that are wanted; all keys and values are kept."""
        assert isinstance(kept, Pages)
        part, tokens = self._part, residual.shape[0]
        heads, kv_heads, dim = part.heads, part.kv_heads, part.head_dim
        packed = product(residual, self._weight, self._bias, norm=norm)
        queries_keys = packed[:, : (heads + kv_heads) * dim].view(tokens, heads + kv_heads, dim)
        if self._qk_norm is not None:
            queries_keys.copy_(rms_norm(queries_keys, self._qk_norm, self._eps))
        group = step.groups[kept.group]
        if kept.keys is not None:
            self._place(packed, queries_keys, kept, kept.keys, step, turned_by)
            rows, places = step.rows, step.places
            if wanted is not None:
                residual, packed = residual.index_select(0, wanted), packed.index_select(0, wanted)
                rows, places = rows[wanted.numpy()], places[wanted.numpy()]
            out = self._attend(packed, kept, kept.keys, group.table, rows, places)
        else:
            turn(queries_keys, turned_by.by(self._turned))
            kept.entries.index_copy_(0, group.slots, packed[:, heads * dim : (heads + 2 * kv_heads) * dim])
            queries = queries_keys[:, :heads].view(tokens, heads // kv_heads, kv_heads, dim)
            out = (
                attend(queries, kept, group.pieces, self._scale)
                if group.followed is None
                else decode.attend(queries, kept, group.followed, self._scale)
            )
            if wanted is not None:
                residual, packed, out = (x.index_select(0, wanted) for x in (residual, packed, out))
        if part.output_gate:
            out = out * sigmoid(packed[:, (heads + 2 * kv_heads) * dim :])
        residual = add_product(residual, out, self._out)
        return residual if self._out_bias is None else residual.add_(self._out_bias)

    def _place(
        self,
        packed: Tensor,
        queries_keys: Tensor,
        kept: Pages,
        keys: Tensor,
        step: BatchLayout,
        turned_by: RopeAngles,
    ) -> None:
        """Turn queries and keys, and keep keys and values, by kernels/attention.py."""
        from potluck.engine.numbers.kernels.attention import place

        turned = self._turned
        if turned % (2 * LANE):
            turn(queries_keys, turned_by.by(turned))
            turned = 0
        angles = turned_by.tables[self._turned].data_ptr()
        slots, cache = step.groups[kept.group].places, (keys.data_ptr(), kept.entries.data_ptr())
        place(*self._packed(packed), angles, turned, step.places, slots, *cache)

    def _packed(self, packed: Tensor) -> tuple[int, int, int, int, int]:
        part = self._part
        return packed.data_ptr(), 4 * packed.stride(0), part.heads, part.kv_heads, part.head_dim

    def _attend(
        self,
        packed: Tensor,
        kept: Pages,
        keys: Tensor,
        table: np.ndarray,
        rows: np.ndarray,
        places: np.ndarray,
    ) -> Tensor:
        """Attention of packed tokens at these rows and places, by kernels/attention.py."""
        from potluck.engine.numbers.kernels import attention

        part = self._part
        out = torch.empty(len(rows), part.heads * part.head_dim)
        address, stride, *sizes = self._packed(packed)
        cache = keys.data_ptr(), kept.entries.data_ptr(), self._scale

        def some(begin: int, stop: int) -> None:
            scores, state = torch.empty(2 * attention.TILE), np.empty((attention.TOGETHER, 4), np.float32)
            seen = (rows[begin:stop], places[begin:stop], table, part.window or 0)
            target = out.data_ptr() + 4 * begin * out.shape[1]
            given = (address + begin * stride, stride, *sizes, *seen, *cache)
            attention.attend(*given, scores.data_ptr(), state, target)

        work = 2 * int(places.sum()) * part.heads * part.head_dim
        threads.over(len(rows), threads.parts(work), some)
        return out
