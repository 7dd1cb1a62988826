"""A CPU's matrix tiles (Intel AMX), as instructions that compiled functions can use.

There are eight tiles of up to 16 rows of 64 bytes. One instruction multiplies a tile of bfloat16 numbers with another
and adds the products to a tile of float32, 16 x 16 sums of 32 products, as fast as an ordinary vector instruction
multiplies a sixteenth of that. In these functions the first argument is a tile's number and must be written out.
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

from potluck.engine.numbers.kernels.compiled import instruction

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
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in given])
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
    """No tile is in use any more: the system need not save them."""
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
