"""Quantise and restore on a CPU: the loops, compiled.

A part is a matrix: rows lie `stride` elements apart, from `offset` on. Groups run down a column (`columns`: keys, a
channel over tokens) or along a row (`rows`: values, channels of a token). A group's numbers are

    low + q x scale        low at most the least, scale such that the greatest has at most the last q

with low and scale as bfloat16, rounded down and up, so that no q can leave its range and nothing needs clamping.
Two 4-bit numbers share a byte: the first half of a group lies in the lower four bits, the second half in the upper.
So every step is the same for neighbours, and the compiler makes vectors of it.

Compiled functions create no arrays; scratch space comes from the caller. The tests have the same in NumPy.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, overload

from potluck.kv.codec_layout import ROW_GROUP
from potluck.native.machine_code import compiled

U = np.uint32
I32 = np.int32
F = np.float32

LOWEST_NORMAL = np.float32(2.0**-126)


def load(bits: Any) -> Any:
    """The number as float32."""


def order(bits: Any) -> Any:
    """Its place among all others, as int32."""


def from_order(place: Any, like: Any) -> Any:
    """The float32 at a place; `like` is any element of the array that it came from."""


def store(number: Any, like: Any) -> Any:
    """The nearest element of the kind of `like`, ties to even; beyond the finite ones the last of these."""


HAS_HALF = platform.machine() in ("aarch64", "arm64") or bool(binding.get_host_cpu_features().get("f16c"))
"""Whether the processor itself converts float16, as all 64-bit ARM ones do; without it LLVM would call a library that
may not be there."""


@intrinsic
def _widen(context, bits):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _narrow(context, number):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@numba.njit
def narrow_by_processor(number):  # type: ignore[no-untyped-def]
    number = number if number < F(65504) else F(65504)
    return _narrow(F(number if number > F(-65504) else F(-65504)))  # type: ignore[call-arg]


@numba.njit
def widen_by_processor(bits):  # type: ignore[no-untyped-def]
    return _widen(bits)  # type: ignore[call-arg]


@numba.njit
def widen_by_hand(bits):  # type: ignore[no-untyped-def]
    size = U(U(bits & np.uint16(0x7FFF)) << U(13))
    sign = U(U(bits & np.uint16(0x8000)) << U(16))
    normal = U(size + U(0x38000000))
    small = F(U(size + U(0x38800000)).view(np.float32) - F(2.0**-14))
    result = small.view(np.uint32) if size < U(0x00800000) else normal
    return U(U(result) | sign).view(np.float32)


@numba.njit
def narrow_by_hand(number):  # type: ignore[no-untyped-def]
    bits = F(number).view(np.uint32)
    sign = U(U(bits >> U(16)) & U(0x8000))
    size = U(bits & U(0x7FFFFFFF))
    odd = U(U(size >> U(13)) & U(1))
    normal = U(U(size + U(U(0xC8000FFF) + odd)) >> U(13))
    small = U(F(size.view(np.float32) + F(0.5)).view(np.uint32) - U(0x3F000000))
    result = small if size < U(0x38800000) else normal
    result = U(0x7BFF) if size > U(0x477FE000) else result
    return np.uint16(U(result) | sign)


_half_to_float = widen_by_processor if HAS_HALF else widen_by_hand
_float_to_half = narrow_by_processor if HAS_HALF else narrow_by_hand


@numba.njit
def _float_to_brain(number):  # type: ignore[no-untyped-def]
    bits = F(number).view(np.uint32)
    sign = U(U(bits >> U(16)) & U(0x8000))
    size = U(bits & U(0x7FFFFFFF))
    odd = U(U(size >> U(16)) & U(1))
    result = U(U(size + U(U(0x7FFF) + odd)) >> U(16))
    result = U(0x7F7F) if result > U(0x7F7F) else result
    return np.int16(np.uint16(U(result) | sign))


@overload(load)
def _load(bits):  # type: ignore[no-untyped-def]
    if bits == types.uint16:
        return lambda bits: _half_to_float(bits)
    if bits == types.int16:
        return lambda bits: U(U(np.uint16(bits)) << U(16)).view(np.float32)
    return lambda bits: bits


@overload(order)
def _order(bits):  # type: ignore[no-untyped-def]
    if bits == types.float32:

        def wide(bits):  # type: ignore[no-untyped-def]
            place = F(bits).view(np.int32)
            return I32(place ^ I32(I32(place >> I32(31)) & I32(0x7FFFFFFF)))

        return wide

    def narrow(bits):  # type: ignore[no-untyped-def]
        place = np.int16(bits)
        return I32(np.int16(place ^ np.int16(np.int16(place >> np.int16(15)) & np.int16(0x7FFF))))

    return narrow


@overload(from_order)
def _from_order(place, like):  # type: ignore[no-untyped-def]
    if like == types.float32:

        def wide(place, like):  # type: ignore[no-untyped-def]
            return I32(place ^ I32(I32(place >> I32(31)) & I32(0x7FFFFFFF))).view(np.float32)

        return wide
    if like == types.uint16:

        def half(place, like):  # type: ignore[no-untyped-def]
            bits = I32(place ^ I32(I32(place >> I32(31)) & I32(0x7FFF)))
            return _half_to_float(np.uint16(bits))

        return half

    def brain(place, like):  # type: ignore[no-untyped-def]
        bits = I32(place ^ I32(I32(place >> I32(31)) & I32(0x7FFF)))
        return U(U(np.uint16(bits)) << U(16)).view(np.float32)

    return brain


@overload(store)
def _store(number, like):  # type: ignore[no-untyped-def]
    if like == types.uint16:
        return lambda number, like: _float_to_half(number)
    if like == types.int16:
        return lambda number, like: _float_to_brain(number)
    return lambda number, like: F(number)


WIDTH = 256  # Columns that are worked on at a time: their scratch space stays in the nearest cache.


@numba.njit
def _low(least):  # type: ignore[no-untyped-def]
    """The bfloat16 at or below, as float32."""
    bits = F(least).view(np.uint32)
    size = U(bits & U(0x7FFFFFFF))
    size = U(size + U(0xFFFF)) if bits > U(0x7FFFFFFF) else size
    return U(U(size & U(0x7FFF0000)) | U(bits & U(0x80000000))).view(np.float32)


@numba.njit
def _scale(spread, share):  # type: ignore[no-untyped-def]
    """The bfloat16 at or above spread x share (share: just above 1 / levels), as float32; 0 for no spread."""
    exact = F(F(spread) * F(share))
    exact = exact if exact > LOWEST_NORMAL else LOWEST_NORMAL
    bits = U(U(F(exact).view(np.uint32) + U(0xFFFF)) & U(0xFFFF0000))
    return bits.view(np.float32) if spread > F(0) else F(0)


@numba.njit
def _brain(number):  # type: ignore[no-untyped-def]
    return np.uint16(U(F(number).view(np.uint32) >> U(16)))


@numba.njit
def _float(brain):  # type: ignore[no-untyped-def]
    return U(U(brain) << U(16)).view(np.float32)


@numba.njit
def _q(number, low, inverse):  # type: ignore[no-untyped-def]
    return np.uint8(np.int32(F(F(F(number) - low) * inverse) + F(0.5)))


@compiled
def encode_columns(  # type: ignore[no-untyped-def]
    source, rows, columns, stride, offset, group, share, finite, lows, scales, out, packed, ints, floats
):
    """True when all is finite. `lows`, `scales`: [groups, columns]; `out`: the bytes of the groups in turn."""
    least, greatest = ints[0], ints[1]
    low, inverse = floats[0], floats[1]
    place = 0
    for number in range((rows + group - 1) // group):
        first = number * group
        count = min(group, rows - first)
        half = (count + 1) // 2 if packed else count
        for left in range(0, columns, WIDTH):
            width = min(WIDTH, columns - left)
            for j in range(width):
                least[j] = 0x7FFFFFFF
                greatest[j] = -0x80000000
            for i in range(first, first + count):
                row = source[offset + i * stride + left : offset + i * stride + left + width]
                for j in range(width):
                    result = order(row[j])
                    least[j] = min(least[j], result)
                    greatest[j] = max(greatest[j], result)
            for j in range(width):
                if greatest[j] > finite or least[j] < -finite - 1:
                    return False
                bottom = _low(from_order(least[j], source[0]))
                spread = F(from_order(greatest[j], source[0]) - bottom)
                if not spread < F(np.inf):
                    return False
                scale = _scale(spread, share)
                lows[number, left + j] = _brain(bottom)
                scales[number, left + j] = _brain(scale)
                low[j] = bottom
                inverse[j] = F(F(1) / scale) if scale > F(0) else F(0)
            for i in range(half):
                start = offset + (first + i) * stride + left
                row = source[start : start + width]
                target = out[place + i * columns + left : place + i * columns + left + width]
                if packed and half + i < count:
                    other = source[start + half * stride : start + half * stride + width]
                    for j in range(width):
                        upper = _q(load(other[j]), low[j], inverse[j])
                        target[j] = _q(load(row[j]), low[j], inverse[j]) | np.uint8(upper << np.uint8(4))
                else:
                    for j in range(width):
                        target[j] = _q(load(row[j]), low[j], inverse[j])
        place += half * columns
    return True


@compiled
def decode_columns(  # type: ignore[no-untyped-def]
    source, rows, columns, lows, scales, group, packed, target, stride, offset, floats
):
    low, scale = floats[0], floats[1]
    place = 0
    for number in range((rows + group - 1) // group):
        first = number * group
        count = min(group, rows - first)
        half = (count + 1) // 2 if packed else count
        for left in range(0, columns, WIDTH):
            width = min(WIDTH, columns - left)
            for j in range(width):
                low[j] = _float(lows[number, left + j])
                scale[j] = _float(scales[number, left + j])
            for i in range(half):
                begin = place + i * columns + left
                packs = source[begin : begin + width]
                start = offset + (first + i) * stride + left
                row = target[start : start + width]
                if packed:
                    for j in range(width):
                        q = np.int32(packs[j] & np.uint8(15))
                        row[j] = store(F(low[j] + F(F(q) * scale[j])), row[j])
                else:
                    for j in range(width):
                        q = np.int32(packs[j])
                        row[j] = store(F(low[j] + F(F(q) * scale[j])), row[j])
                if packed and half + i < count:
                    start += half * stride
                    row = target[start : start + width]
                    for j in range(width):
                        q = np.int32(packs[j] >> np.uint8(4))
                        row[j] = store(F(low[j] + F(F(q) * scale[j])), row[j])
        place += half * columns


@numba.njit(inline="always")
def _encode_group(source, start, count, share, finite, out, place, packed):  # type: ignore[no-untyped-def]
    """(low, scale, whether all is finite) of one group within a row."""
    row = source[start : start + count]
    least, greatest = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for j in range(count):
        result = order(row[j])
        least = min(least, result)
        greatest = max(greatest, result)
    low = _low(from_order(least, source[0]))
    spread = F(from_order(greatest, source[0]) - low)
    scale = _scale(spread, share)
    inverse = F(F(1) / scale) if scale > F(0) else F(0)
    half = (count + 1) // 2 if packed else count
    target = out[place : place + half]
    if packed:
        other = source[start + half : start + count]
        for j in range(count // 2):
            upper = _q(load(other[j]), low, inverse)
            target[j] = _q(load(row[j]), low, inverse) | np.uint8(upper << np.uint8(4))
        if count % 2:
            target[half - 1] = _q(load(row[half - 1]), low, inverse)
    else:
        for j in range(count):
            target[j] = _q(load(row[j]), low, inverse)
    return low, scale, greatest <= finite and least >= -finite - 1 and spread < F(np.inf)


@compiled
def encode_rows(  # type: ignore[no-untyped-def]
    source, rows, columns, stride, offset, share, finite, lows, scales, out, packed
):
    """True when all is finite. `lows`, `scales`: [rows, groups]; `out`: the bytes of the rows in turn."""
    place = 0
    fine = True
    for i in range(rows):
        for number in range((columns + ROW_GROUP - 1) // ROW_GROUP):
            start = offset + i * stride + number * ROW_GROUP
            count = min(ROW_GROUP, columns - number * ROW_GROUP)
            # The same twice, so that the compiler sees a constant in the usual case.
            if count == ROW_GROUP:
                low, scale, good = _encode_group(source, start, ROW_GROUP, share, finite, out, place, packed)
            else:
                low, scale, good = _encode_group(source, start, count, share, finite, out, place, packed)
            lows[i, number] = _brain(low)
            scales[i, number] = _brain(scale)
            fine &= good
            place += (count + 1) // 2 if packed else count
    return fine


@compiled
def decode_rows(  # type: ignore[no-untyped-def]
    source, rows, columns, lows, scales, packed, target, stride, offset
):
    place = 0
    for i in range(rows):
        for number in range((columns + ROW_GROUP - 1) // ROW_GROUP):
            count = min(ROW_GROUP, columns - number * ROW_GROUP)
            start = offset + i * stride + number * ROW_GROUP
            row = target[start : start + count]
            low, scale = _float(lows[i, number]), _float(scales[i, number])
            half = (count + 1) // 2 if packed else count
            packs = source[place : place + half]
            if packed:
                other = target[start + half : start + count]
                for j in range(half):
                    q = np.int32(packs[j] & np.uint8(15))
                    row[j] = store(F(low + F(F(q) * scale)), row[j])
                for j in range(count - half):
                    q = np.int32(packs[j] >> np.uint8(4))
                    other[j] = store(F(low + F(F(q) * scale)), row[j])
            else:
                for j in range(count):
                    q = np.int32(packs[j])
                    row[j] = store(F(low + F(F(q) * scale)), row[j])
            place += half
