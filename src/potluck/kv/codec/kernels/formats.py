"""Numbers in 16 bits for loops compiled by numba, which knows no such numbers on a CPU.

An array's element type says what its bits mean: uint16 is float16, int16 is bfloat16, float32 is itself. So one loop
is compiled three times, each with its own way to read and write. All arithmetic is in float32. Every integer step is
cast back to 32 bits, since numba would widen it to 64 and halve the speed.

`order` maps numbers to integers of the same order, by which the least and greatest of a group are found; whatever is
not finite lies beyond the finite ones, so the same search finds it.

numba keeps compiled code as long as `cpu.py` is unchanged, and does not look at this file: after a change here, touch
that one.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, overload

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
    found = small.view(np.uint32) if size < U(0x00800000) else normal
    return U(U(found) | sign).view(np.float32)


@numba.njit
def narrow_by_hand(number):  # type: ignore[no-untyped-def]
    bits = F(number).view(np.uint32)
    sign = U(U(bits >> U(16)) & U(0x8000))
    size = U(bits & U(0x7FFFFFFF))
    odd = U(U(size >> U(13)) & U(1))
    normal = U(U(size + U(U(0xC8000FFF) + odd)) >> U(13))
    small = U(F(size.view(np.float32) + F(0.5)).view(np.uint32) - U(0x3F000000))
    found = small if size < U(0x38800000) else normal
    found = U(0x7BFF) if size > U(0x477FE000) else found
    return np.uint16(U(found) | sign)


_half_to_float = widen_by_processor if HAS_HALF else widen_by_hand
_float_to_half = narrow_by_processor if HAS_HALF else narrow_by_hand


@numba.njit
def _float_to_brain(number):  # type: ignore[no-untyped-def]
    bits = F(number).view(np.uint32)
    sign = U(U(bits >> U(16)) & U(0x8000))
    size = U(bits & U(0x7FFFFFFF))
    odd = U(U(size >> U(16)) & U(1))
    found = U(U(size + U(U(0x7FFF) + odd)) >> U(16))
    found = U(0x7F7F) if found > U(0x7F7F) else found
    return np.int16(np.uint16(U(found) | sign))


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
