"""Attention of single queries over pages, on a GPU: one program for each sequence and key head (attention.py)."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from potluck.core.state.facts import BLOCK_TOKENS

KEYS = 64
"""Gone through at a time."""
LEAST = 16
"""Rows and columns of a product, filled up where there are fewer."""


def attend(
    queries: Tensor, entries: Tensor, table: Tensor, positions: Tensor, scale: float, window: int
) -> Tensor:
    """[sequences, G, heads, dim] queries to [sequences, G x heads x dim]."""
    sequences, groups, heads, dim = queries.shape
    out = torch.empty(sequences, groups * heads * dim, device=queries.device, dtype=queries.dtype)
    _follow[(sequences, heads)](
        queries,
        entries,
        table,
        positions,
        out,
        scale,
        window,
        queries.stride(0),
        entries.stride(0),
        table.stride(0),
        heads=heads,
        groups=groups,
        dim=dim,
        rows=triton.next_power_of_2(max(groups, LEAST)),
        width=triton.next_power_of_2(max(dim, LEAST)),
        keys=KEYS,
        block_tokens=BLOCK_TOKENS,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _follow(  # type: ignore[no-untyped-def]
    queries,
    entries,
    table,
    positions,
    out,
    scale,
    window,
    query_stride,
    entry_stride,
    table_stride,
    heads: tl.constexpr,
    groups: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    keys: tl.constexpr,
    block_tokens: tl.constexpr,
):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column, key = tl.arange(0, rows), tl.arange(0, width), tl.arange(0, keys)
    inside = (row[:, None] < groups) & (column[None, :] < dim)
    place = (row[:, None] * heads + head) * dim + column[None, :]
    query = tl.load(queries + sequence * query_stride + place, mask=inside, other=0.0)
    last = tl.load(positions + sequence)
    first = tl.maximum(last - window + 1, 0) if window > 0 else last * 0
    most = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    result = tl.zeros([rows, width], tl.float32)
    for start in range(first // keys * keys, last + 1, keys):
        at = start + key
        seen = (at <= last) & (at >= first)
        block = tl.load(table + sequence * table_stride + at // block_tokens, mask=seen, other=0)
        slot = block * block_tokens + at % block_tokens
        here = entries + slot[:, None] * entry_stride + head * dim + column[None, :]
        wanted = seen[:, None] & (column[None, :] < dim)
        k = tl.load(here, mask=wanted, other=0.0)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        new = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - new[:, None])
        shrink = tl.exp(most - new)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(here + heads * dim, mask=wanted, other=0.0)
        result = result * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        most = new
    result = result / total[:, None]
    tl.store(out + sequence * groups * heads * dim + place, result.to(out.dtype.element_ty), mask=inside)
