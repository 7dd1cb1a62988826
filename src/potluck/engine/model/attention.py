"""Attention with keys and values for each token: full (over everything, or over a window) and latent.

Heads are ordered so that no copy is needed: with `heads` key heads and G queries to each, query head g x heads + h
belongs to key head h. The G queries of a decoding sequence then count as G rows that share their keys; those of a
chunk as G batches over the same keys.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.model import FullAttention, LatentAttention
from potluck.engine.compute.batch_layout import AttentionCall, BatchLayout
from potluck.engine.memory.kv_cache import Kept, Pages
from potluck.engine.model.checkpoint import LayerLoader
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.model.rope import RopeAngles, halves_apart, latent_sharpness, turn
from potluck.engine.numbers import Heads, KeyLocations
from potluck.engine.numbers.exact import LANE, attention, on_gpu, per_head, rms_norm, sigmoid
from potluck.engine.numbers.matrix import Norm, across, add_product, over_threads, product, thread_count


def rotated(config: EngineModelConfig, attention: FullAttention) -> int:
    """Numbers of each head that positions turn."""
    return int(attention.head_dim * config.rope.share)


class FullLayer:
    """One product makes queries, keys and values (and the output gate), keys and values side by side as they are
    kept."""

    def __init__(self, config: EngineModelConfig, attention: FullAttention, load: LayerLoader) -> None:
        self._part = attention
        self._scale = attention.head_dim**-0.5
        self._eps = config.norm_eps
        self._turned = rotated(config, attention)
        heads, kv_heads, dim, hidden = (
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            config.model.hidden,
        )
        groups = heads // kv_heads
        pairs = halves_apart(config.rope, dim, self._turned)
        # Query head h x G + g becomes g x heads + h (see above); within a head halves are turned (rope.py).
        order = torch.arange(heads).view(kv_heads, groups).T.flatten()
        load = load.under("self_attn")

        def rows(kind: str) -> Tensor:
            """Weights of a projection with its bias as a last column."""
            count = kv_heads if kind in "kv" else heads
            size = 2 * dim if kind == "q" and attention.output_gate else dim
            weight = load.take(f"{kind}_proj.weight", count * size, hidden)
            bias = (
                load.take(f"{kind}_proj.bias", count * size)
                if attention.bias
                else weight.new_zeros(count * size)
            )
            return torch.cat([weight, bias[:, None]], 1).view(count, size, hidden + 1)

        query, key, value = rows("q"), rows("k"), rows("v")
        parts = [query[order][:, :dim][:, pairs], key[:, pairs], value]
        if attention.output_gate:
            parts.append(query[order][:, dim:])
        packed = torch.cat([tensor.flatten(0, 1) for tensor in parts])
        self._weight = across(packed[:, :hidden])
        self._bias = packed[:, hidden].contiguous() if attention.bias else None
        out = load.take("o_proj.weight", hidden, heads * dim).view(hidden, heads, dim)
        self._out = across(out[:, order].reshape(hidden, heads * dim))
        self._out_bias = load.take("o_proj.bias", hidden) if attention.output_bias else None
        self._qk_norm = None
        if attention.qk_norm == "head":
            q_norm, k_norm = (load.norm(f"{kind}_norm.weight", dim)[pairs] for kind in "qk")
            self._qk_norm = torch.cat([q_norm.expand(heads, dim), k_norm.expand(kv_heads, dim)])

    def __call__(
        self,
        norm: Norm,
        residual: Tensor,
        pages: Kept,
        batch_layout: BatchLayout,
        rope_angles: RopeAngles,
        wanted: Tensor | None,
    ) -> Tensor:
        """The residual plus attention of its norm, of those tokens that are wanted; all keys and values are kept."""
        assert isinstance(pages, Pages)
        attention, tokens = self._part, residual.shape[0]
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
        packed = product(residual, self._weight, self._bias, norm=norm)
        queries_keys = packed[:, : (heads + kv_heads) * dim].view(tokens, heads + kv_heads, dim)
        if self._qk_norm is not None and not on_gpu(packed):
            queries_keys.copy_(rms_norm(queries_keys, self._qk_norm, self._eps))
        group = batch_layout.groups[pages.group]
        if pages.keys is not None:
            self._place(packed, queries_keys, pages, batch_layout, rope_angles)
            rows, places = batch_layout.rows, batch_layout.places
            if wanted is not None:
                residual, packed = residual.index_select(0, wanted), packed.index_select(0, wanted)
                rows, places = rows[wanted.numpy()], places[wanted.numpy()]
            out = self._attend(packed, pages, group.table, rows, places)
        else:
            if on_gpu(packed):
                queries = self._place_by_gpu(packed, pages, batch_layout, rope_angles)
            else:
                turn(queries_keys, rope_angles.by(self._turned))
                pages.entries.index_copy_(
                    0, group.slots, packed[:, heads * dim : (heads + 2 * kv_heads) * dim]
                )
                queries = packed[:, : heads * dim]
            if group.followed is None:
                by_head = queries.view(tokens, heads // kv_heads, kv_heads, dim)
                out = attend(by_head, pages, group.pieces, self._scale)
            else:
                out = attend_pages(queries, pages, group.followed, self._scale)
            if wanted is not None:
                residual, packed, out = (x.index_select(0, wanted) for x in (residual, packed, out))
        if attention.output_gate:
            out = out * sigmoid(packed[:, (heads + 2 * kv_heads) * dim :])
        residual = add_product(residual, out, self._out)
        return residual if self._out_bias is None else residual.add_(self._out_bias)

    def _place_by_gpu(
        self, packed: Tensor, pages: Pages, batch_layout: BatchLayout, rope_angles: RopeAngles
    ) -> Tensor:
        from potluck.engine.numbers import triton_kernels

        attention = self._part
        where = (
            rope_angles.tables[self._turned],
            batch_layout.positions,
            batch_layout.groups[pages.group].slots,
        )
        norm = None if self._qk_norm is None else (self._qk_norm, self._eps)
        shape = Heads(attention.heads // attention.kv_heads, attention.kv_heads, attention.head_dim)
        return triton_kernels.place(packed, pages.entries, where, norm, shape)

    def _place(
        self,
        packed: Tensor,
        queries_keys: Tensor,
        pages: Pages,
        batch_layout: BatchLayout,
        rope_angles: RopeAngles,
    ) -> None:
        """Turn queries and keys, and keep keys and values, by kernels/attention.py."""
        from potluck.engine.numbers.kernels.attention import place

        assert pages.keys is not None
        turned = self._turned
        if turned % (2 * LANE):
            turn(queries_keys, rope_angles.by(turned))
            turned = 0
        angles = rope_angles.tables[self._turned].data_ptr()
        slots, cache = (
            batch_layout.groups[pages.group].places,
            (pages.keys.data_ptr(), pages.entries.data_ptr()),
        )
        place(*self._packed(packed), angles, turned, batch_layout.places, slots, *cache)

    def _packed(self, packed: Tensor) -> tuple[int, int, int, int, int]:
        attention = self._part
        return (
            packed.data_ptr(),
            4 * packed.stride(0),
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
        )

    def _attend(
        self, packed: Tensor, pages: Pages, table: np.ndarray, rows: np.ndarray, places: np.ndarray
    ) -> Tensor:
        from potluck.engine.numbers.kernels import attention

        assert pages.keys is not None
        part = self._part
        out = torch.empty(len(rows), part.heads * part.head_dim)
        address, stride, *sizes = self._packed(packed)
        cache = pages.keys.data_ptr(), pages.entries.data_ptr(), self._scale

        def some(begin: int, stop: int) -> None:
            scores, state = torch.empty(2 * attention.TILE), np.empty((attention.TOGETHER, 4), np.float32)
            seen = (rows[begin:stop], places[begin:stop], table, part.window or 0)
            target = out.data_ptr() + 4 * begin * out.shape[1]
            given = (address + begin * stride, stride, *sizes, *seen, *cache)
            attention.attend(*given, scores.data_ptr(), state, target)

        work = 2 * int(places.sum()) * part.heads * part.head_dim
        over_threads(len(rows), thread_count(work), some)
        return out


LATENT_NORM_EPS = 1e-6
"""The norms inside take this, whatever the model's own is."""


class LatentLayer:
    """Multi-head latent attention (DeepSeek): per token one compressed latent and one rotary key, for all heads.

    With the latent c of a token, head h has the key K_h c and the value V_h c. Instead of expanding every token of
    the context, the query goes down to the latent: q (K_h c) = (q K_h) c, and the weighted latents come up through
    V_h at the end ("absorbed"). So all heads share one key head, the latent and the rotary key side by side, which is
    its own value: what the rotary part adds to the output is cut off.
    """

    def __init__(self, config: EngineModelConfig, attention: LatentAttention, load: LayerLoader) -> None:
        self._part = attention
        hidden, heads, rank = config.model.hidden, attention.heads, attention.kv_lora_rank
        plain, rotary = attention.qk_nope_head_dim, attention.qk_rope_head_dim
        self._scale = (plain + rotary) ** -0.5 * latent_sharpness(config.rope)
        load = load.under("self_attn")
        pairs = halves_apart(config.rope, rotary, rotary)
        both = torch.cat([torch.arange(plain), plain + pairs])
        down = load.take("kv_a_proj_with_mqa.weight", rank + rotary, hidden)
        down = torch.cat([down[:rank], down[rank:][pairs]])
        self._latent_norm = load.take("kv_a_layernorm.weight", rank)
        width = heads * (plain + rotary)
        if attention.q_lora_rank is None:
            query = load.take("q_proj.weight", width, hidden)
            self._up = self._query_norm = None
        else:
            query = load.take("q_a_proj.weight", attention.q_lora_rank, hidden)
            self._query_norm = load.take("q_a_layernorm.weight", attention.q_lora_rank)
            up = load.take("q_b_proj.weight", width, attention.q_lora_rank)
            self._up = across(up.view(heads, plain + rotary, -1)[:, both].flatten(0, 1))
        if self._up is None:
            query = query.view(heads, plain + rotary, hidden)[:, both].flatten(0, 1)
        self._weight = across(torch.cat([down, query]))
        expand = load.take("kv_b_proj.weight", heads * (plain + attention.v_head_dim), rank)
        expand = expand.view(heads, plain + attention.v_head_dim, rank)
        self._to_latent = expand[:, :plain].contiguous()
        self._from_latent = expand[:, plain:].transpose(1, 2).contiguous()
        self._out = across(load.take("o_proj.weight", hidden, heads * attention.v_head_dim))

    def __call__(
        self,
        norm: Norm,
        residual: Tensor,
        pages: Kept,
        batch_layout: BatchLayout,
        rope_angles: RopeAngles,
        wanted: Tensor | None,
    ) -> Tensor:
        assert isinstance(pages, Pages)
        attention, tokens, rank = self._part, residual.shape[0], self._part.kv_lora_rank
        plain, rotary, entry = attention.qk_nope_head_dim, attention.qk_rope_head_dim, pages.dim
        packed = product(residual, self._weight, norm=norm)
        queries = packed[:, entry:]
        if self._up is not None:
            assert self._query_norm is not None
            queries = product(rms_norm(queries, self._query_norm, LATENT_NORM_EPS), self._up)
        queries = queries.view(tokens, attention.heads, plain + rotary)
        latent = rms_norm(packed[:, :rank], self._latent_norm, LATENT_NORM_EPS)
        by = rope_angles.by(rotary)
        rotary_keys = turn(packed[:, None, rank:entry].clone(), by)
        group = batch_layout.groups[pages.group]
        pages.entries.index_copy_(0, group.slots, torch.cat([latent, rotary_keys[:, 0]], 1))
        lowered = per_head(queries[..., :plain], self._to_latent)
        turned = turn(queries[..., plain:].clone(), by)
        out = attend(torch.cat([lowered, turned], -1)[:, :, None], pages, group.pieces, self._scale)
        latents = out.view(tokens, attention.heads, entry)[..., :rank]
        tensor = add_product(residual, per_head(latents, self._from_latent).reshape(tokens, -1), self._out)
        return tensor if wanted is None else tensor.index_select(0, wanted)


def attend(queries: Tensor, pages: Pages, pieces: tuple[AttentionCall, ...], scale: float) -> Tensor:
    """[tokens, G, heads, dim] packed queries over pages to [tokens, G x heads x dim]."""
    tensors = [_piece(queries, pages, call, scale) for call in pieces]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _piece(queries: Tensor, pages: Pages, call: AttentionCall, scale: float) -> Tensor:
    count = call.sequences * call.queries
    rows = queries[call.first : call.first + count]
    keys, values = _keys_and_values(pages, call)
    if call.queries == 1:
        mask = call.mask.expand(-1, -1, rows.shape[1], -1)
        out = attention(rows.transpose(1, 2), keys, values, mask, scale)
        return out.transpose(1, 2).reshape(count, -1)
    keys, values = (x.expand(rows.shape[1], -1, -1, -1) for x in (keys, values))
    out = attention(rows.permute(1, 2, 0, 3), keys, values, call.mask, scale)
    return out.permute(2, 0, 1, 3).reshape(count, -1)


def _keys_and_values(pages: Pages, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Two of [sequences, heads, columns, dim]; the same twice where keys are values."""
    heads, dim = pages.heads, pages.dim
    size = pages.parts * heads * dim
    if call.blocks is None:
        entries, base, stride = pages.entries, call.base * size, call.stride * size
    else:
        entries = pages.entries.view(-1, BLOCK_TOKENS * size).index_select(0, call.blocks)
        base, stride = 0, call.columns * size
    shape = (call.sequences, heads, call.columns, dim)
    strides = (stride, dim, size, 1)
    keys = entries.as_strided(shape, strides, base)
    return keys, keys if pages.parts == 1 else entries.as_strided(shape, strides, base + heads * dim)


def attend_pages(queries: Tensor, pages: Pages, keys: KeyLocations, scale: float) -> Tensor:
    """[tokens, G x heads x dim] queries to the same, over pages where they lie: by triton_kernels.py on a GPU, in
    plain words elsewhere, to check by."""
    shape = Heads(queries.shape[1] // (pages.heads * pages.dim), pages.heads, pages.dim)
    if on_gpu(queries):
        from potluck.engine.numbers import triton_kernels

        return triton_kernels.attend(queries, pages.entries, keys, shape, scale)
    out = torch.zeros(queries.shape, dtype=queries.dtype)
    entries = pages.entries.view(-1, BLOCK_TOKENS, 2, pages.heads, pages.dim)
    for sequence, first, count in [*((i, i, 1) for i in range(int(keys.singles[1]))), *keys.tiles.tolist()]:
        if not count:  # a tile that is left over
            continue
        own = keys.positions[first : first + count, None]
        start, last = int(keys.starts[sequence]), int(own[-1])
        kept = entries[keys.blocks[start : start + last // BLOCK_TOKENS + 1]].flatten(0, 1).float()
        places = torch.arange(len(kept))
        seen = places <= own
        if keys.window is not None:
            seen &= places > own - keys.window
        rows = queries[first : first + count].view(count, *shape).float()
        scores = torch.einsum("tghd,khd->tghk", rows, kept[:, 0]) * scale
        weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        out[first : first + count] = torch.einsum("tghk,khd->tghd", weights, kept[:, 1]).flatten(1)
    return out
