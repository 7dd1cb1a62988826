"""Products with matrices of 16-bit weights, exact to float32, on a CPU's matrix tiles.

The tiles multiply bfloat16 numbers, of 8 significant bits. A float32 number x has 24: it is the sum of three of them,
x = high + middle + low, with no rest. Weights that were stored in 16 bits are one each. So three products of tiles,
whose sums are float32, give what a float32 product gives, several times as fast as vector instructions do.

Every row is added up in the same order, whatever rows are beside it: 32 numbers at a time, low parts first.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from potluck.engine.numbers.kernels.rows import gate, norm
from potluck.engine.numbers.kernels.vector import compiled, instruction, split

ROWS = 16
DEPTH = 32
"""bfloat16 numbers in a row of a tile."""
_BYTE = ir.IntType(8)


def available() -> bool:
    """Whether this processor has tiles, and this process may use them. Linux wants to be asked first."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16") and features.get("avx512f")):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def _emit(name: str, operands: Callable[[Any, Any], Sequence[Any]]) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        given = operands(builder, arguments)
        kind = ir.FunctionType(ir.VoidType(), [item.type for item in given])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")  # type: ignore[no-untyped-call]
        builder.call(function, given)
        return context.get_dummy_value()

    return generate


def _number(tile: Any) -> Any:
    return ir.Constant(_BYTE, tile.literal_value)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _BYTE.as_pointer())


@instruction
def shape_tiles(typing: Any, address: Any) -> Any:
    """Set the rows and row lengths of all tiles, from 64 bytes at `address`."""
    return types.void(types.int64), _emit("ldtilecfg", lambda b, a: [_pointer(b, a[0])])


@instruction
def release_tiles(typing: Any) -> Any:
    return types.void(), _emit("tilerelease", lambda b, a: [])


@instruction
def clear_tile(typing: Any, tile: Any) -> Any:
    return types.void(tile), _emit("tilezero", lambda b, a: [_number(tile)])


@instruction
def load_tile(typing: Any, tile: Any, address: Any, stride: Any) -> Any:
    """`stride` is the bytes from one row to the next."""
    sizes = (types.int64, types.int64)
    return types.void(tile, *sizes), _emit(
        "tileloadd64", lambda b, a: [_number(tile), _pointer(b, a[1]), a[2]]
    )


@instruction
def store_tile(typing: Any, tile: Any, address: Any, stride: Any) -> Any:
    sizes = (types.int64, types.int64)
    return types.void(tile, *sizes), _emit(
        "tilestored64", lambda b, a: [_number(tile), _pointer(b, a[1]), a[2]]
    )


@instruction
def multiply_tiles(typing: Any, sums: Any, left: Any, right: Any) -> Any:
    """sums += left @ right, where `right` holds pairs of its rows side by side."""
    return types.void(sums, left, right), _emit(
        "tdpbf16ps", lambda b, a: [_number(sums), _number(left), _number(right)]
    )


PARTS = 3
TILE_ROW = 2 * DEPTH
TILE_BYTES = ROWS * TILE_ROW
WIDE = 4
"""Tiles of columns that are multiplied together."""
STRIP = 4 * ROWS
"""Rows that are multiplied with the same weights while those are near."""


@compiled
def split_rows(source, stride, rows, depth, parts):  # type: ignore[no-untyped-def]
    """The low, middle and high parts of rows, as tiles [rows / 16, depth, 3] at `parts`."""
    for row in range(rows):
        begin = parts + row // ROWS * depth * PARTS * TILE_BYTES + row % ROWS * TILE_ROW
        for block in range(depth):
            place = begin + block * PARTS * TILE_BYTES
            number = source + row * stride + block * 4 * DEPTH
            split(number, place, place + TILE_BYTES, place + 2 * TILE_BYTES)


@compiled
def multiply(  # type: ignore[no-untyped-def]
    rows, x, x_stride, scales, eps, weight, residual, residual_stride, out, out_stride, parts, shapes
):
    """out = norm(x) @ weight, plus `residual` unless that is 0; `scales` 0: without the norm.

    Matrices are addresses and bytes from row to row, but for `weight`: the address, blocks of 32 rows and tiles of 16
    columns of [columns, depth, 16, 32], tiles of pairs of rows. Scratch: `parts` for [4, depth, 3] tiles and, behind
    them, 64 rows of x; `shapes`, an array of 64 bytes.
    """
    tiles, depth, columns = weight
    size = depth * PARTS * TILE_BYTES
    normed = parts + STRIP // ROWS * size
    for first in range(0, rows, STRIP):
        count = min(STRIP, rows - first)
        if scales:
            norm(count, depth * DEPTH, x + first * x_stride, x_stride, scales, eps, normed)
            split_rows(normed, depth * DEPTH * 4, count, depth, parts)
        else:
            split_rows(x + first * x_stride, x_stride, count, depth, parts)
        source, target = residual + first * residual_stride, out + first * out_stride
        whole = count // ROWS
        for begin, stop in ((0, whole), (whole, -(-count // ROWS))):
            if begin == stop:
                continue
            _shape(shapes, min(ROWS, count - begin * ROWS))
            for column in range(0, columns, WIDE):
                right, place = tiles + column * depth * TILE_BYTES, column * ROWS * 4
                for strip in range(begin, stop):
                    base = source + strip * ROWS * residual_stride + place if residual else 0
                    there = target + strip * ROWS * out_stride + place
                    _four(parts + strip * size, right, depth, base, residual_stride, there, out_stride)
        release_tiles()


@compiled
def feed_forward(rows, x, stride, scales, eps, up, down, out, scratch, parts, shapes):  # type: ignore[no-untyped-def]
    """out = x + down(gate(up(norm(x)))), 64 rows at a time, so that what is between stays near the processor.

    `scratch` is for 64 rows of what `up` gives and half as much; all else is as for `multiply`.
    """
    wide, narrow = 4 * ROWS * up[2], 4 * ROWS * down[2]
    gated = scratch + STRIP * wide
    for first in range(0, rows, STRIP):
        count, here, target = min(STRIP, rows - first), x + first * stride, out + first * narrow
        multiply(count, here, stride, scales, eps, up, 0, 0, scratch, wide, parts, shapes)
        gate(count, wide // 8, scratch, wide, gated)
        multiply(count, gated, wide // 2, 0, eps, down, here, stride, target, narrow, parts, shapes)


@compiled
def _shape(shapes, rows):  # type: ignore[no-untyped-def]
    """Tiles 0 to 3 are sums, of four tiles of columns; 4 to 6 are the parts of the rows; 7 is weights."""
    shapes[0] = 1
    for tile in range(8):
        shapes[16 + 2 * tile] = TILE_ROW
        shapes[48 + tile] = ROWS if tile == 7 else rows
    shape_tiles(shapes.ctypes.data)


@compiled
def _four(left, right, depth, source, source_stride, target, stride):  # type: ignore[no-untyped-def]
    step = depth * TILE_BYTES
    if source:
        load_tile(0, source, source_stride)
        load_tile(1, source + TILE_ROW, source_stride)
        load_tile(2, source + 2 * TILE_ROW, source_stride)
        load_tile(3, source + 3 * TILE_ROW, source_stride)
    else:
        clear_tile(0)
        clear_tile(1)
        clear_tile(2)
        clear_tile(3)
    for block in range(depth):
        low, weights = left + block * PARTS * TILE_BYTES, right + block * TILE_BYTES
        load_tile(4, low, TILE_ROW)
        load_tile(5, low + TILE_BYTES, TILE_ROW)
        load_tile(6, low + 2 * TILE_BYTES, TILE_ROW)
        load_tile(7, weights, TILE_ROW)
        multiply_tiles(0, 4, 7)
        multiply_tiles(0, 5, 7)
        multiply_tiles(0, 6, 7)
        load_tile(7, weights + step, TILE_ROW)
        multiply_tiles(1, 4, 7)
        multiply_tiles(1, 5, 7)
        multiply_tiles(1, 6, 7)
        load_tile(7, weights + 2 * step, TILE_ROW)
        multiply_tiles(2, 4, 7)
        multiply_tiles(2, 5, 7)
        multiply_tiles(2, 6, 7)
        load_tile(7, weights + 3 * step, TILE_ROW)
        multiply_tiles(3, 4, 7)
        multiply_tiles(3, 5, 7)
        multiply_tiles(3, 6, 7)
    store_tile(0, target, stride)
    store_tile(1, target + TILE_ROW, stride)
    store_tile(2, target + 2 * TILE_ROW, stride)
    store_tile(3, target + 3 * TILE_ROW, stride)
