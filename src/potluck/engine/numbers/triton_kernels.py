"""What a step does on a GPU beside products: norms, gates, keys into pages, attention over pages. Only torch's builds
for GPUs have Triton.

Pages are read where they lie. Heads are ordered as in model/attention.py: query head g x heads + h looks at key head
h. What a kernel is compiled for comes in tuples.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.numbers import TILE_TOKENS, Heads, KeyLocations

LEAST = 16
"""Rows and columns of a product on tensor cores, filled up where there are fewer."""
LOG2_E = 1.4426950408889634
BLOCK = tl.constexpr(BLOCK_TOKENS)
HIDDEN = tl.constexpr(-1e30)
"""A score that none is below; finite, so that a whole block of keys may be hidden from a query."""
MOST_SPLITS = 32
WAVES = 4
"""Programs for each multiprocessor below which the keys of a sequence are shared out."""


class Tile(NamedTuple):
    """How a kernel goes through queries and keys."""

    rows: int
    keys: int
    width: int
    """Numbers of a head, filled up to a power of two."""
    parts: int
    """Programs for each tile of tokens, or each sequence."""
    windowed: bool


@cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _room(size: int) -> int:
    """The next power of two; Triton's own takes as long as a launch."""
    return max(1 << (size - 1).bit_length(), LEAST)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, row by row."""
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    width = _room(x.shape[1])
    _norm[(len(x),)](x, weight, out, eps, x.stride(0), x.shape[1], width, num_warps=8 if width > 1024 else 4)
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _norm(x, weight, out, eps, stride, columns: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    inside = column < columns
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / columns + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


def gate(packed: Tensor) -> Tensor:
    """n m / (1 + exp(n)) of rows that are n and m side by side (ffn.py)."""
    rows, half = packed.shape[0], packed.shape[1] // 2
    out = torch.empty(rows, half, device=packed.device, dtype=packed.dtype)
    _gate[(rows, -(-half // 2048))](packed, out, packed.stride(0), half, 2048, num_warps=8)
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gate(packed, out, stride, half: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * width + tl.arange(0, width)
    inside = column < half
    n = tl.load(packed + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(packed + row * stride + half + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * half + column, (n * m / (1 + tl.exp(n))).to(out.dtype.element_ty), mask=inside)


def place(
    packed: Tensor,
    entries: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    normed: tuple[Tensor, float] | None,
    heads: Heads,
) -> Tensor:
    """Queries [tokens, G x heads x dim], normed and turned; keys, likewise, and values go into their pages.

    `where` is (table of angles, position, slot) of each token, `normed` (weights by head, eps) of the norm of heads.
    """
    tokens = len(packed)
    queries = torch.empty(
        tokens, heads.groups * heads.heads * heads.dim, device=packed.device, dtype=packed.dtype
    )
    weights, eps = (packed, 0.0) if normed is None else normed
    given = (packed, packed.stride(0), queries, entries, (*where, weights), eps)
    some, count = 16, (heads.groups + 2) * heads.heads
    sizes = (where[0].shape[2], normed is not None, _room(heads.dim), some)
    _place[(tokens, -(-count // some))](*given, (heads, sizes))
    return queries


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _place(packed, stride, queries, entries, where, eps, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    angles, positions, slots, weights = where
    groups: tl.constexpr = shape[0][0]
    heads: tl.constexpr = shape[0][1]
    dim: tl.constexpr = shape[0][2]
    turned: tl.constexpr = shape[1][0]
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * shape[1][3] + tl.arange(0, shape[1][3])[:, None]
    column = tl.arange(0, shape[1][2])[None, :]
    asking: tl.constexpr = groups * heads
    inside = (head < asking + 2 * heads) & (column < dim)
    moves = (head < asking + heads) & (column < turned)
    half: tl.constexpr = turned // 2
    other = tl.where(column < half, column + half, column - half)
    here = packed + token * stride + head * dim
    value = tl.load(here + column, mask=inside, other=0.0).to(tl.float32)
    swapped = tl.load(here + other, mask=moves, other=0.0).to(tl.float32)
    if shape[1][1]:
        keyed = inside & (head < asking + heads)
        scale = tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
        value *= tl.where(keyed, scale * tl.load(weights + head * dim + column, mask=keyed, other=1.0), 1.0)
        swapped *= scale * tl.load(weights + head * dim + other, mask=moves, other=1.0)
    angle = angles + tl.load(positions + token) * (2 * turned) + column + head * 0
    value *= tl.load(angle, mask=moves, other=1.0)
    value += swapped * tl.load(angle + turned, mask=moves, other=0.0)
    result = value.to(queries.dtype.element_ty)
    tl.store(queries + (token * asking + head) * dim + column, result, mask=inside & (head < asking))
    entry = entries + tl.load(slots + token) * (2 * heads * dim) + (head - asking) * dim + column
    tl.store(entry, result, mask=inside & (head >= asking))


def attend(queries: Tensor, entries: Tensor, where: KeyLocations, heads: Heads, scale: float) -> Tensor:
    """[tokens, G x heads x dim] queries over pages to the same."""
    out = torch.empty_like(queries)
    (singles, count), tiles, windowed = where.singles, where.tiles.shape[0], where.window is not None
    places = (where.blocks, where.starts, where.positions, where.tiles, count)
    given = (queries, entries, places, out, (scale * LOG2_E, where.window or 0))
    if tiles and singles:  # the one waits for memory, the other computes: side by side
        beside, now = _beside(queries.device), torch.cuda.current_stream()
        beside.wait_stream(now)
        with torch.cuda.stream(beside):
            _attend_chunks(given, tiles, heads, windowed)
        _attend_singles(given, singles, heads, windowed)
        now.wait_stream(beside)
    elif tiles:
        _attend_chunks(given, tiles, heads, windowed)
    else:
        _attend_singles(given, singles, heads, windowed)
    return out


Given = tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor, tuple[float, int]]


def _attend_chunks(given: Given, tiles: int, heads: Heads, windowed: bool) -> None:
    wide, width = given[0].dtype == torch.float32, _room(heads.dim)
    rows, keys = (
        256 if tiles >= 16 else 128,
        64,
    )  # with many tiles there are programs enough for larger ones
    if wide or width > 128:  # what smaller GPUs have room for
        rows, keys = (32, 16) if wide else (64, 32)
    rows = max(rows, _room(heads.groups))
    size = Tile(rows, keys, width, -(-TILE_TOKENS // (rows // heads.groups)), windowed)
    how = {"num_warps": 8, "num_stages": 2 if wide else 3}
    _chunks[(heads.heads, tiles * size.parts)](*given, heads, size, **how)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _chunks(queries, entries, where, out, factors, shape: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks, starts, positions, tiles, _ = where
    scale, window = factors
    groups: tl.constexpr = shape.groups
    rows: tl.constexpr = size.rows
    keys: tl.constexpr = size.keys
    tokens: tl.constexpr = rows // groups
    # The last tiles of a prompt look at the most keys, so they go first.
    head, index = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    tile = tiles + index // size.parts * 3
    sequence, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    begin = index % size.parts * tokens
    if begin >= count:
        return
    row, column = tl.arange(0, rows), tl.arange(0, size.width)
    token = begin + row // groups
    inside = ((token < count) & (row < tokens * groups))[:, None] & (column < shape.dim)[None, :]
    low = (tl.load(positions + first) + begin).to(tl.int32)
    own = low - begin.to(tl.int32) + token.to(tl.int32)
    at = ((first + token) * groups + row % groups) * shape.heads + head
    at = at[:, None] * shape.dim + column[None, :]
    query = tl.load(queries + at, mask=inside, other=0.0)
    high = tl.minimum(low + tokens, low + (count - begin).to(tl.int32)) - 1
    pages = (blocks + tl.load(starts + sequence), entries + head * shape.dim)
    state = _nothing(rows, size.width)
    if size.windowed:
        middle = tl.maximum(low - window + 1, 0) // keys * keys
    else:
        middle = (low + 1) // keys * keys  # up to here every query sees every key
        for start in range(0, middle, keys):
            state = _look(query, pages, (start, own, high, scale, window), state, False, shape, size)
    for start in range(middle, high + 1, keys):
        state = _look(query, pages, (start, own, high, scale, window), state, True, shape, size)
    tl.store(out + at, (state[2] / state[1][:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _nothing(rows: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    most = tl.full([rows], HIDDEN, tl.float32)
    return most, tl.zeros([rows], tl.float32), tl.zeros([rows, width], tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _look(query, pages, at, state, masked: tl.constexpr, shape: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """One more block of keys, from `start` on, for queries at the positions `own`, the last of which is `high`."""
    table, entries = pages
    start, own, high, scale, window = at
    most, total, result = state
    plain: tl.constexpr = not masked and shape.dim == size.width
    key, column = start + tl.arange(0, size.keys), tl.arange(0, size.width)
    wanted = (key <= high)[:, None] & (column < shape.dim)[None, :]
    from_table = table + key // BLOCK
    block = tl.load(from_table, mask=key <= high, other=0) if masked else tl.load(from_table)
    slot = block * BLOCK + key % BLOCK
    here = entries + slot[:, None] * (2 * shape.heads * shape.dim) + column[None, :]
    k = tl.load(here) if plain else tl.load(here, mask=wanted, other=0.0)
    score = tl.dot(query, tl.trans(k), input_precision="ieee")
    if masked:
        seen = key[None, :] <= own[:, None]
        if size.windowed:
            seen &= key[None, :] > own[:, None] - window
        score = tl.where(seen, score, HIDDEN)
    new = tl.maximum(most, tl.max(score, 1))
    # Not score x scale - new x scale: fused, and rounded once, that is far above 0 where both are HIDDEN.
    weight = tl.exp2((score - new[:, None]) * scale)
    shrink = tl.exp2((most - new) * scale)
    here += shape.heads * shape.dim
    v = tl.load(here) if plain else tl.load(here, mask=wanted, other=0.0)
    result = tl.dot(weight.to(v.dtype), v, result * shrink[:, None], input_precision="ieee")
    return new, total * shrink + tl.sum(weight, 1), result


def _attend_singles(given: Given, singles: int, heads: Heads, windowed: bool) -> None:
    queries, entries, places, out, factors = given
    wide, count = queries.dtype == torch.float32, singles * heads.groups * heads.heads
    splits = WAVES * processors(queries.device) // (singles * heads.heads)
    splits = min(max(splits, 1), MOST_SPLITS)
    parts = MOST_SPLITS if splits > 1 else 1  # not the number itself, for which each would be compiled anew
    size = Tile(_room(heads.groups), 16 if wide else 32, _room(heads.dim), parts, windowed)
    if splits > 1:
        out = torch.empty(count * splits, size.width + 2, device=out.device, dtype=torch.float32)
    how = {"num_warps": 4 if wide else max(size.width // 128, 1), "num_stages": 4}
    _singles[(singles, heads.heads, splits)](queries, entries, places, out, factors, heads, size, **how)
    if splits > 1:
        _combine[(count,)](out, given[3], (places[4], splits), factors[0], heads, size)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _singles(queries, entries, where, out, factors, shape: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks, starts, positions, _, singles = where
    scale, window = factors
    rows: tl.constexpr = size.rows
    keys: tl.constexpr = size.keys
    width: tl.constexpr = size.width
    splits = tl.num_programs(2)
    sequence, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if sequence >= tl.load(singles):
        return
    row, column = tl.arange(0, rows), tl.arange(0, width)
    inside = (row < shape.groups)[:, None] & (column < shape.dim)[None, :]
    which = (sequence * shape.groups + row) * shape.heads + head
    query = tl.load(queries + which[:, None] * shape.dim + column[None, :], mask=inside, other=0.0)
    last = tl.load(positions + sequence).to(tl.int32)
    own = tl.zeros([rows], tl.int32) + last
    first = tl.maximum(last - window + 1, 0) // keys if size.windowed else last * 0
    share = (last // keys + splits - first) // splits * keys
    begin = first * keys + split * share
    pages = (blocks + tl.load(starts + sequence), entries + head * shape.dim)
    state = _nothing(rows, width)
    for start in range(begin, tl.minimum(begin + share, last + 1), keys):
        state = _look(query, pages, (start, own, last, scale, window), state, True, shape, size)
    if size.parts == 1:
        result = (state[2] / state[1][:, None]).to(out.dtype.element_ty)
        tl.store(out + which[:, None] * shape.dim + column[None, :], result, mask=inside)
    else:
        part = out + (which * splits + split) * (width + 2)
        tl.store(part[:, None] + column[None, :], state[2], mask=inside)
        tl.store(part + width, state[0], mask=row < shape.groups)
        tl.store(part + width + 1, state[1], mask=row < shape.groups)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _combine(parts, out, counts, scale, shape: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    which, column, split = tl.program_id(0).to(tl.int64), tl.arange(0, size.width), tl.arange(0, size.parts)
    singles, splits = counts
    if which >= tl.load(singles) * (shape.groups * shape.heads):
        return
    part = parts + (which * splits + split) * (size.width + 2)
    most = tl.load(part + size.width, mask=split < splits, other=HIDDEN)
    total = tl.load(part + size.width + 1, mask=split < splits, other=0.0)
    share = tl.exp2((most - tl.max(most)) * scale)
    inside = (column < shape.dim)[None, :] & (total > 0)[:, None]
    result = tl.load(part[:, None] + column[None, :], mask=inside, other=0.0)
    result = tl.sum(result * share[:, None], 0) / tl.sum(total * share)
    tl.store(out + which * shape.dim + column, result.to(out.dtype.element_ty), mask=column < shape.dim)
