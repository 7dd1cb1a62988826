"""Attention of packed queries over keys and values that lie in pages.

Heads are ordered so that no copy is needed: with `heads` key heads and G queries to each, query head g x heads + h
belongs to key head h. The G queries of a decoding sequence then count as G rows that share their keys; those of a
chunk as G batches over the same keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.compute.batch_layout import AttentionCall
from potluck.engine.memory.kv_cache import Pages
from potluck.engine.numbers.exact import chunk_attention


def attend(queries: Tensor, pages: Pages, pieces: tuple[AttentionCall, ...], scale: float) -> Tensor:
    """[tokens, G, heads, dim] queries to [tokens, G x heads x dim]."""
    found = [_piece(queries, pages, piece, scale) for piece in pieces]
    return found[0] if len(found) == 1 else torch.cat(found)


def _piece(queries: Tensor, pages: Pages, piece: AttentionCall, scale: float) -> Tensor:
    count = piece.sequences * piece.queries
    rows = queries[piece.first : piece.first + count]
    keys, values = _keys_and_values(pages, piece)
    if piece.queries == 1:
        mask = piece.mask.expand(-1, -1, rows.shape[1], -1)
        out = F.scaled_dot_product_attention(rows.transpose(1, 2), keys, values, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).reshape(count, -1)
    keys, values = (x.expand(rows.shape[1], -1, -1, -1) for x in (keys, values))
    out = chunk_attention(rows.permute(1, 2, 0, 3), keys, values, piece.mask, scale)
    return out.permute(2, 0, 1, 3).reshape(count, -1)


def _keys_and_values(pages: Pages, piece: AttentionCall) -> tuple[Tensor, Tensor]:
    """Two of [sequences, heads, columns, dim]; the same twice where keys are values."""
    heads, dim = pages.heads, pages.dim
    size = pages.parts * heads * dim
    if piece.blocks is None:
        entries, base, stride = pages.entries, piece.base * size, piece.stride * size
    else:
        entries = pages.entries.view(-1, BLOCK_TOKENS * size).index_select(0, piece.blocks)
        base, stride = 0, piece.columns * size
    shape = (piece.sequences, heads, piece.columns, dim)
    strides = (stride, dim, size, 1)
    keys = entries.as_strided(shape, strides, base)
    return keys, keys if pages.parts == 1 else entries.as_strided(shape, strides, base + heads * dim)
