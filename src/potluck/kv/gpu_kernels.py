"""Quantise and restore on a GPU with Triton: the same bits as `cpu_kernels.py`, without a detour over the host.

    encode(x, part, codec, parameters, payload, bad)    bad[0] becomes 1 when something is not finite
    decode(parameters, payload, part, codec, out)

Tensors come from the caller (parameters int16, payload uint8, bad int32), so torch is not needed here. Numbers are
bfloat16, float16 or float32, and contiguous. Triton may not fuse a product with a sum: that would round otherwise.
Import this only where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from potluck.kv.codec_layout import (
    COLUMN_GROUP,
    FINITE,
    LEVELS,
    ROW_GROUP,
    Codec,
    Part,
    QuantizedMatrix,
    layout,
    share_of,
)

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

COLUMNS = 64
ROWS = 64


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _order(x):  # type: ignore[no-untyped-def]
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        place = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        place = bits ^ ((bits >> 31) & 0x7FFF)
    return place


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _from_order(place, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    if kind == tl.float32:
        bits = place ^ ((place >> 31) & 0x7FFFFFFF)
        number = bits.to(tl.float32, bitcast=True)
    else:
        bits = place ^ ((place >> 31) & 0x7FFF)
        number = bits.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    return number


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _parameters(least, greatest, kind: tl.constexpr, share):  # type: ignore[no-untyped-def]
    """(low, scale, 1 / scale, whether the spread is finite) of groups."""
    bits = _from_order(least, kind).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    size = tl.where(bits < 0, size + 0xFFFF, size)
    low = ((size & 0x7FFF0000) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    spread = _from_order(greatest, kind) - low
    exact = tl.maximum(spread * share, 1.1754943508222875e-38)
    bits = (exact.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    scale = tl.where(spread > 0, bits.to(tl.float32, bitcast=True), 0.0)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    return low, scale, inverse, spread < float("inf")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _q(x, low, inverse):  # type: ignore[no-untyped-def]
    return ((x.to(tl.float32) - low) * inverse + 0.5).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _brain(number):  # type: ignore[no-untyped-def]
    return (number.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _float(brain):  # type: ignore[no-untyped-def]
    return (brain.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _stored(number, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest of a kind, at most the last finite one."""
    if kind == tl.float16:
        number = tl.minimum(tl.maximum(number, -65504.0), 65504.0)
    if kind == tl.bfloat16:
        number = tl.minimum(tl.maximum(number, -3.3895313892515355e38), 3.3895313892515355e38)
    return number.to(kind)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _encode_columns(  # type: ignore[no-untyped-def]
    x, lows, scales, out, bad, rows, columns, stride, offset, share, finite,
    FOUR: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    i = tl.arange(0, GROUP // 2)
    first = number * GROUP
    count = tl.minimum(rows - first, GROUP)
    half = (count + 1) // 2
    inside = column[None, :] < columns
    in_one, in_two = (i[:, None] < half) & inside, (i[:, None] < count - half) & inside
    at = offset + (first + i[:, None]) * stride + column[None, :]
    one = tl.load(x + at, in_one, 0.0)
    two = tl.load(x + at + half * stride, in_two, 0.0)
    orders, others = _order(one), _order(two)
    top, bottom = -0x7FFFFFFF, 0x7FFFFFFF
    least = tl.minimum(
        tl.min(tl.where(in_one, orders, bottom), 0), tl.min(tl.where(in_two, others, bottom), 0)
    )
    greatest = tl.maximum(tl.max(tl.where(in_one, orders, top), 0), tl.max(tl.where(in_two, others, top), 0))
    fine = (greatest <= finite) & (least >= -finite - 1)
    low, scale, inverse, narrow = _parameters(least, greatest, x.dtype.element_ty, share)
    wrong = tl.where((fine & narrow) | (column >= columns), 0, 1)
    tl.atomic_max(bad, tl.max(wrong, 0))
    where = number * columns + column
    tl.store(lows + where, _brain(low), column < columns)
    tl.store(scales + where, _brain(scale), column < columns)
    a, b = _q(one, low[None, :], inverse[None, :]), _q(two, low[None, :], inverse[None, :])
    if FOUR:
        place = number * (GROUP // 2) * columns + i[:, None] * columns + column[None, :]
        tl.store(out + place, (a | tl.where(in_two, b << 4, 0)).to(tl.uint8), in_one)
    else:
        place = (first + i[:, None]) * columns + column[None, :]
        tl.store(out + place, a.to(tl.uint8), in_one)
        tl.store(out + place + half * columns, b.to(tl.uint8), in_two)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode_columns(  # type: ignore[no-untyped-def]
    packs, lows, scales, out, rows, columns, stride, offset,
    FOUR: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    i = tl.arange(0, GROUP // 2)
    first = number * GROUP
    count = tl.minimum(rows - first, GROUP)
    half = (count + 1) // 2
    inside = column[None, :] < columns
    in_one, in_two = (i[:, None] < half) & inside, (i[:, None] < count - half) & inside
    where = number * columns + column
    low = _float(tl.load(lows + where, column < columns, 0))[None, :]
    scale = _float(tl.load(scales + where, column < columns, 0))[None, :]
    if FOUR:
        place = number * (GROUP // 2) * columns + i[:, None] * columns + column[None, :]
        both = tl.load(packs + place, in_one, 0).to(tl.int32)
        a, b = both & 15, both >> 4
    else:
        place = (first + i[:, None]) * columns + column[None, :]
        a = tl.load(packs + place, in_one, 0).to(tl.int32)
        b = tl.load(packs + place + half * columns, in_two, 0).to(tl.int32)
    at = offset + (first + i[:, None]) * stride + column[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(out + at, _stored(low + a.to(tl.float32) * scale, kind), in_one)
    tl.store(out + at + half * stride, _stored(low + b.to(tl.float32) * scale, kind), in_two)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _encode_rows(  # type: ignore[no-untyped-def]
    x, lows, scales, out, bad, rows, columns, stride, offset, row_bytes, groups, share, finite,
    FOUR: tl.constexpr, GROUP: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1)
    row = (tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    j = tl.arange(0, GROUP // 2)
    count = tl.minimum(columns - number * GROUP, GROUP)
    half = (count + 1) // 2
    inside = row[:, None] < rows
    in_one, in_two = (j[None, :] < half) & inside, (j[None, :] < count - half) & inside
    at = offset + row[:, None] * stride + number * GROUP + j[None, :]
    one = tl.load(x + at, in_one, 0.0)
    two = tl.load(x + at + half, in_two, 0.0)
    orders, others = _order(one), _order(two)
    top, bottom = -0x7FFFFFFF, 0x7FFFFFFF
    least = tl.minimum(
        tl.min(tl.where(in_one, orders, bottom), 1), tl.min(tl.where(in_two, others, bottom), 1)
    )
    greatest = tl.maximum(tl.max(tl.where(in_one, orders, top), 1), tl.max(tl.where(in_two, others, top), 1))
    fine = (greatest <= finite) & (least >= -finite - 1)
    low, scale, inverse, narrow = _parameters(least, greatest, x.dtype.element_ty, share)
    wrong = tl.where((fine & narrow) | (row >= rows), 0, 1)
    tl.atomic_max(bad, tl.max(wrong, 0))
    where = row * groups + number
    tl.store(lows + where, _brain(low), row < rows)
    tl.store(scales + where, _brain(scale), row < rows)
    a, b = _q(one, low[:, None], inverse[:, None]), _q(two, low[:, None], inverse[:, None])
    if FOUR:
        place = row[:, None] * row_bytes + number * (GROUP // 2) + j[None, :]
        tl.store(out + place, (a | tl.where(in_two, b << 4, 0)).to(tl.uint8), in_one)
    else:
        place = row[:, None] * row_bytes + number * GROUP + j[None, :]
        tl.store(out + place, a.to(tl.uint8), in_one)
        tl.store(out + place + half, b.to(tl.uint8), in_two)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode_rows(  # type: ignore[no-untyped-def]
    packs, lows, scales, out, rows, columns, stride, offset, row_bytes, groups,
    FOUR: tl.constexpr, GROUP: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1)
    row = (tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    j = tl.arange(0, GROUP // 2)
    count = tl.minimum(columns - number * GROUP, GROUP)
    half = (count + 1) // 2
    inside = row[:, None] < rows
    in_one, in_two = (j[None, :] < half) & inside, (j[None, :] < count - half) & inside
    where = row * groups + number
    low = _float(tl.load(lows + where, row < rows, 0))[:, None]
    scale = _float(tl.load(scales + where, row < rows, 0))[:, None]
    if FOUR:
        place = row[:, None] * row_bytes + number * (GROUP // 2) + j[None, :]
        both = tl.load(packs + place, in_one, 0).to(tl.int32)
        a, b = both & 15, both >> 4
    else:
        place = row[:, None] * row_bytes + number * GROUP + j[None, :]
        a = tl.load(packs + place, in_one, 0).to(tl.int32)
        b = tl.load(packs + place + half, in_two, 0).to(tl.int32)
    at = offset + row[:, None] * stride + number * GROUP + j[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(out + at, _stored(low + a.to(tl.float32) * scale, kind), in_one)
    tl.store(out + at + half, _stored(low + b.to(tl.float32) * scale, kind), in_two)


def encode(x: Any, part: Part, codec: Codec, parameters: Any, payload: Any, bad: Any) -> None:
    """Quantise `x` (its shape is the part's) into tensors of the sizes that `codec.sizes` gives."""
    finite = FINITE[str(x.dtype).removeprefix("torch.")]
    for m, lows, scales, packs in _cut(part, tuple(x.shape), codec, parameters, payload):
        share, four = float(share_of(LEVELS[m.bits])), m.bits == 4
        common = (x, lows, scales, packs, bad, m.rows, m.columns, m.stride, m.offset)
        if m.down:
            grid = (m.groups[0], triton.cdiv(m.columns, COLUMNS))
            _encode_columns[grid](
                *common, share, finite, FOUR=four, GROUP=COLUMN_GROUP, WIDTH=COLUMNS, enable_fp_fusion=False
            )
        else:
            grid = (triton.cdiv(m.rows, ROWS), m.groups[1])
            sizes = (m.payload_bytes // m.rows, m.groups[1])
            _encode_rows[grid](
                *common,
                *sizes,
                share,
                finite,
                FOUR=four,
                GROUP=ROW_GROUP,
                HEIGHT=ROWS,
                enable_fp_fusion=False,
            )


def decode(parameters: Any, payload: Any, part: Part, codec: Codec, out: Any) -> None:
    """Restore into `out`. The parameters must have been checked (`codec.check_parameters`)."""
    for m, lows, scales, packs in _cut(part, tuple(out.shape), codec, parameters, payload):
        common = (packs, lows, scales, out, m.rows, m.columns, m.stride, m.offset)
        if m.down:
            grid = (m.groups[0], triton.cdiv(m.columns, COLUMNS))
            _decode_columns[grid](
                *common, FOUR=m.bits == 4, GROUP=COLUMN_GROUP, WIDTH=COLUMNS, enable_fp_fusion=False
            )
        else:
            grid = (triton.cdiv(m.rows, ROWS), m.groups[1])
            sizes = (m.payload_bytes // m.rows, m.groups[1])
            _decode_rows[grid](
                *common, *sizes, FOUR=m.bits == 4, GROUP=ROW_GROUP, HEIGHT=ROWS, enable_fp_fusion=False
            )


def _cut(
    part: Part, shape: tuple[int, ...], codec: Codec, parameters: Any, payload: Any
) -> Iterator[tuple[QuantizedMatrix, Any, Any, Any]]:
    at, place = 0, 0
    for matrix in layout(part, shape, codec) or ():
        count = matrix.groups[0] * matrix.groups[1]
        if count:
            lows, scales = parameters[at : at + count], parameters[at + count : at + 2 * count]
            yield matrix, lows, scales, payload[place : place + matrix.payload_bytes]
        at += 2 * count
        place += matrix.payload_bytes
