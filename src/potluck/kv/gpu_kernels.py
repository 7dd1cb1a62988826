"""KV on a GPU, with Triton: gathered out of blocks, and codecs with the same bits as `cpu_kernels.py`.

    gather(cache, blocks, places, out)                                     keys and values of some tokens
    room = torch.empty(room_bytes(part, shape, codec), dtype=torch.uint8, device="cuda")
    encode(values, part, codec, room)                                      queued on the present stream
    chunk = coded(chunk without data, codec, room on the host)             InputError: something is not finite
    values = restored(chunk, device)

A room is the parameters, and from the next multiple of 16 bytes on the payload. A group with something that is not
finite has a step that is none. Keys and values are made by one kernel, since to launch one takes as long as it runs.
Triton may not fuse a product with a sum, which would round otherwise. Import this only where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.errors import InputError
from potluck.kv.chunks import Buffer, KvChunk
from potluck.kv.codec_layout import (
    COLUMN_GROUP,
    LEVELS,
    ROW_GROUP,
    Codec,
    Part,
    layout,
    share_of,
    sizes,
)
from potluck.kv.kv_codec import check_coded

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")
COLUMNS, TOKENS, STEP, WARPS = 32, 64, 8, 2
"""Groups of keys and of values that a program has side by side; numbers of half a group of keys read at once."""
GATHERED = 32  # Tokens that a program gathers.
NOT_FINITE = 0x7F80  # All bits of a bfloat16's exponent.


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _least(a, b):  # type: ignore[no-untyped-def]
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _greatest(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _parameters(least, greatest, share):  # type: ignore[no-untyped-def]
    """(low, scale, 1 / scale, whether the spread is finite) of groups: low rounded down, scale up to bfloat16."""
    bits = least.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    size = tl.where(bits < 0, size + 0xFFFF, size)
    low = ((size & 0x7FFF0000) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    spread = greatest - low
    exact = tl.maximum(spread * share, 1.1754943508222875e-38)
    bits = (exact.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    scale = tl.where(spread > 0, bits.to(tl.float32, bitcast=True), 0.0)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    return low, scale, inverse, spread < float("inf")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _number(x, low, inverse):  # type: ignore[no-untyped-def]
    """In the last 8 bits. What is added to 2^23 without rounding up ends in its whole part; a GPU converts at an
    eighth of the speed at which it adds."""
    exact = (x.to(tl.float32) - low) * inverse + 0.5
    whole = tl.inline_asm_elementwise(
        "add.rz.f32 $0, $1, 0f4B000000;", "=f,f", [exact], dtype=tl.float32, is_pure=True, pack=1
    )
    return whole.to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _stored(number, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest of a kind, at most the last finite one."""
    if kind == tl.float16:
        number = tl.minimum(tl.maximum(number, -65504.0), 65504.0)
    if kind == tl.bfloat16:
        number = tl.minimum(tl.maximum(number, -3.3895313892515355e38), 3.3895313892515355e38)
    return number.to(kind)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _masks(i, there, half, held, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where there are numbers i of the first and of the second half. A mask along the axis that lies in a row would
    keep loads from being wide ones, even where it is true everywhere."""
    in_one, in_two = there[None, :], there[None, :]
    if not EVEN:
        in_one, in_two = (i < half) & in_one, (i < held - half) & in_two
    return in_one, in_two


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _encode_tile(  # type: ignore[no-untyped-def]
    x, room, lows, scales, group, first, count, lines, along, across, group_step, line_step, out_along, out_across,
    share, finite, FOUR: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`STEP` numbers of each half at a time: those of a whole group would not fit into registers. They are read again
    when the group's parameters are known, and are near then."""
    line = tl.arange(0, LINES)
    there = tl.full((LINES,), True, tl.int1) if FULL else first + line < lines
    held = GROUP if EVEN else tl.minimum(count - group * GROUP, GROUP)
    half = (held + 1) // 2
    group, first = group.to(tl.int64), first.to(tl.int64)
    at = x + group * GROUP * along + first * across + line[None, :] * across
    least = tl.full((STEP, LINES), float("inf"), tl.float32)
    greatest = tl.full((STEP, LINES), float("-inf"), tl.float32)
    for start in tl.static_range(0, GROUP // 2, STEP):
        i = start + tl.arange(0, STEP)[:, None]
        in_one, in_two = _masks(i, there, half, held, EVEN)
        one, two = tl.load(at + i * along, in_one, 0.0), tl.load(at + (half + i) * along, in_two, 0.0)
        one, two = one.to(tl.float32), two.to(tl.float32)
        if EVEN:
            least, greatest = _least(least, _least(one, two)), _greatest(greatest, _greatest(one, two))
        else:
            least = _least(least, tl.where(in_one, one, float("inf")))
            least = _least(least, tl.where(in_two, two, float("inf")))
            greatest = _greatest(greatest, tl.where(in_one, one, float("-inf")))
            greatest = _greatest(greatest, tl.where(in_two, two, float("-inf")))
    least, greatest = tl.reduce(least, 0, _least), tl.reduce(greatest, 0, _greatest)
    low, scale, inverse, narrow = _parameters(least, greatest, share)
    fine = (greatest <= finite) & (least >= -finite) & narrow
    where = group * group_step + first * line_step + line * line_step
    step = tl.where(fine, scale.to(tl.int32, bitcast=True) >> 16, 0x7F80)
    tl.store(lows + where, (low.to(tl.int32, bitcast=True) >> 16).to(tl.int16), there)
    tl.store(scales + where, step.to(tl.int16), there)
    place = room + first * out_across + line[None, :] * out_across
    place += group * (GROUP // 2 if FOUR else GROUP) * out_along
    for start in tl.static_range(0, GROUP // 2, STEP):
        i = start + tl.arange(0, STEP)[:, None]
        in_one, in_two = _masks(i, there, half, held, EVEN)
        one, two = tl.load(at + i * along, in_one, 0.0), tl.load(at + (half + i) * along, in_two, 0.0)
        a, b = _number(one, low[None, :], inverse[None, :]), _number(two, low[None, :], inverse[None, :])
        if FOUR:
            b = b << 4 if EVEN else tl.where(in_two, b << 4, 0)
            tl.store(place + i * out_along, (a | b).to(tl.uint8), in_one)
        else:
            tl.store(place + i * out_along, a.to(tl.uint8), in_one)
            tl.store(place + (half + i) * out_along, b.to(tl.uint8), in_two)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode_tile(  # type: ignore[no-untyped-def]
    x, room, lows, scales, group, first, count, lines, along, across, group_step, line_step, out_along, out_across,
    FOUR: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    i, line = tl.arange(0, GROUP // 2)[:, None], tl.arange(0, LINES)
    there = tl.full((LINES,), True, tl.int1) if FULL else first + line < lines
    held = GROUP if EVEN else tl.minimum(count - group * GROUP, GROUP)
    half = (held + 1) // 2
    in_one, in_two = _masks(i, there, half, held, EVEN)
    group, first = group.to(tl.int64), first.to(tl.int64)
    where = group * group_step + first * line_step + line * line_step
    low = (tl.load(lows + where, there, 0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    scale = (tl.load(scales + where, there, 0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    place = room + first * out_across + i * out_along + line[None, :] * out_across
    if FOUR:
        both = tl.load(place + group * (GROUP // 2) * out_along, in_one, 0).to(tl.int32)
        a, b = both & 15, both >> 4
    else:
        place += group * GROUP * out_along
        a = tl.load(place, in_one, 0).to(tl.int32)
        b = tl.load(place + half * out_along, in_two, 0).to(tl.int32)
    at = x + group * GROUP * along + first * across + i * along + line[None, :] * across
    kind: tl.constexpr = x.dtype.element_ty
    tl.store(at, _stored(low[None, :] + a.to(tl.float32) * scale[None, :], kind), in_one)
    tl.store(at + half * along, _stored(low[None, :] + b.to(tl.float32) * scale[None, :], kind), in_two)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator, unused-ignore]
def _convert(  # type: ignore[no-untyped-def]
    x, room, payload_at, tokens, share, finite, ENCODE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    FOUR: tl.constexpr, EVEN: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    DOWN: tl.constexpr, ALONG: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Keys (or latents), `WIDTH` numbers of each token, in groups down the columns, and values in groups along."""
    program, wide, groups = tl.program_id(0), tl.cdiv(WIDTH, COLUMNS), tl.cdiv(tokens, DOWN)
    halves, packs = room.to(tl.pointer_type(tl.int16)), room + payload_at
    step: tl.constexpr = 2 * WIDTH if VALUES else WIDTH
    whole: tl.constexpr = WIDTH % COLUMNS == 0
    if program < wide * groups:
        group, first = program // wide, program % wide * COLUMNS
        if ENCODE:
            _encode_tile(
                x, packs, halves, halves + groups * WIDTH, group, first, tokens, WIDTH, step, 1, WIDTH, 1, WIDTH, 1,
                share, finite, FOUR, DOWN, COLUMNS, EVEN, whole, STEP,
            )  # fmt: skip
        else:
            _decode_tile(
                x, packs, halves, halves + groups * WIDTH, group, first, tokens, WIDTH, step, 1, WIDTH, 1, WIDTH, 1,
                FOUR, DOWN, COLUMNS, EVEN, whole,
            )  # fmt: skip
    elif VALUES:
        lows, each = halves + 2 * groups * WIDTH, tl.cdiv(WIDTH, ALONG)
        row: tl.constexpr = WIDTH // ALONG * (ALONG // 2) + (WIDTH % ALONG + 1) // 2 if FOUR else WIDTH
        held = tokens // DOWN * (DOWN // 2) + (tokens % DOWN + 1) // 2 if FOUR else tokens
        numbers = packs + held.to(tl.int64) * WIDTH
        group, first = (program - wide * groups) % each, (program - wide * groups) // each * TOKENS
        even: tl.constexpr = WIDTH % ALONG == 0
        if ENCODE:
            _encode_tile(
                x + WIDTH, numbers, lows, lows + tokens * each, group, first, WIDTH, tokens, 1, step, 1, each, 1, row,
                share, finite, FOUR, ALONG, TOKENS, even, False, ALONG // 2,
            )  # fmt: skip
        else:
            _decode_tile(
                x + WIDTH, numbers, lows, lows + tokens * each, group, first, WIDTH, tokens, 1, step, 1, each, 1, row,
                FOUR, ALONG, TOKENS, even, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator, unused-ignore]
def _gather(  # type: ignore[no-untyped-def]
    cache, blocks, places, out, tokens, block_step, head_step, place_step, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, SIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    program, d = tl.program_id(0), tl.arange(0, SIDE)
    token, head = program // (2 * HEADS) * TOKENS + tl.arange(0, TOKENS), program % HEADS
    part, there = program // HEADS % 2, token < tokens
    block, place = tl.load(blocks + token, there, 0), tl.load(places + token, there, 0)
    at = block * block_step + place * place_step + head * head_step + part * WIDTH
    mask = there[:, None] & (d < WIDTH)[None, :] if SIDE != WIDTH else there[:, None]
    to = token.to(tl.int64) * (2 * HEADS * WIDTH) + (part * HEADS + head) * WIDTH
    tl.store(out + to[:, None] + d[None, :], tl.load(cache + at[:, None] + d[None, :], mask), mask)


def gather(cache: Tensor, blocks: Tensor, places: Tensor, out: Tensor) -> None:
    """Tokens by their block and place: (blocks, heads, places, keys and values) to (tokens, 2, heads, width)."""
    tokens, _, heads, width = out.shape
    programs = triton.cdiv(tokens, GATHERED) * 2 * heads
    kinds = {"HEADS": heads, "WIDTH": width, "SIDE": triton.next_power_of_2(width), "TOKENS": GATHERED}
    _gather[programs,](cache, blocks, places, out, tokens, *cache.stride()[:3], **kinds)


@lru_cache(maxsize=256)
def room_bytes(part: Part, shape: Sequence[int], codec: Codec) -> int:
    return _payload_at(part, shape, codec) + sizes(part, "bfloat16", shape, codec).payload_bytes


def encode(x: Tensor, part: Part, codec: Codec, room: Tensor) -> None:
    """`x` is contiguous, in one of the formats that codecs take."""
    _launch(True, x, part, codec, room)


def decode(room: Tensor, part: Part, codec: Codec, x: Tensor) -> None:
    """The parameters must have been checked."""
    _launch(False, x, part, codec, room)


def restored(chunk: KvChunk, device: torch.device) -> Tensor:
    """Its numbers, on the present stream; FormatError when it is not what its codec makes."""
    check_coded(chunk)
    size = room_bytes(chunk.part, chunk.shape, chunk.codec)
    room = uploaded(device, size, (0, chunk.parameters), (size - len(chunk.data), chunk.data))
    values = torch.empty(chunk.shape, dtype=getattr(torch, chunk.dtype), device=device)
    decode(room, chunk.part, chunk.codec, values)
    return values


def uploaded(device: torch.device, size: int, *parts: tuple[int, Buffer]) -> Tensor:
    """So many bytes there, with these parts from these places on: nobody waits for the copy, nor for the driver's."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    lies = host.numpy()
    for at, data in parts:
        np.copyto(lies[at : at + len(data)], np.frombuffer(data, np.uint8))
    return host.to(device, non_blocking=True)


def pinned(size: int) -> memoryview:
    """Memory of the host from which copies are fast."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data


def coded(chunk: KvChunk, codec: Codec, room: Tensor) -> KvChunk:
    """A chunk with what was made of it."""
    size, lies = sizes(chunk.part, chunk.dtype, chunk.shape, codec), memoryview(room.numpy().data)
    parameters, at = lies[: size.parameter_bytes], _payload_at(chunk.part, chunk.shape, codec)
    if (np.frombuffer(parameters, np.uint16) & NOT_FINITE == NOT_FINITE).any():
        raise InputError(
            f"codec: {chunk.part}", "has values that are not finite, or too far apart for float32"
        )
    return replace(chunk, codec=codec, parameters=parameters, data=lies[at : at + size.payload_bytes])


@lru_cache(maxsize=256)
def _payload_at(part: Part, shape: Sequence[int], codec: Codec) -> int:
    return -(-sizes(part, "bfloat16", shape, codec).parameter_bytes // 16) * 16


@lru_cache(maxsize=256)
def _launch_of(part: Part, shape: tuple[int, ...], codec: Codec) -> tuple[int, float, dict[str, int | bool]]:
    """Programs, the share of a step, and what the kernel is compiled for."""
    (keys, *values), tokens = layout(part, shape, codec) or (), shape[0]
    wide, groups = triton.cdiv(keys.columns, COLUMNS), triton.cdiv(tokens, COLUMN_GROUP)
    programs = wide * groups
    if values:
        programs += triton.cdiv(tokens, TOKENS) * triton.cdiv(keys.columns, ROW_GROUP)
    kinds = {"WIDTH": keys.columns, "VALUES": bool(values), "FOUR": keys.bits == 4, "num_warps": WARPS}
    kinds |= {"EVEN": not tokens % COLUMN_GROUP, "COLUMNS": COLUMNS, "TOKENS": TOKENS}
    kinds |= {"DOWN": COLUMN_GROUP, "ALONG": ROW_GROUP, "STEP": STEP}
    return programs, float(share_of(LEVELS[keys.bits])), kinds | {"enable_fp_fusion": False}


def _launch(encodes: bool, x: Tensor, part: Part, codec: Codec, room: Tensor) -> None:
    shape = tuple(x.shape)
    if not prod(shape):
        return
    programs, share, kinds = _launch_of(part, shape, codec)
    finite = torch.finfo(x.dtype).max
    at = _payload_at(part, shape, codec)
    _convert[programs,](x, room, at, shape[0], share, finite, ENCODE=encodes, **kinds)
