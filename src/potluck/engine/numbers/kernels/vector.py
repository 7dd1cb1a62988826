"""Compiling inner loops, and sixteen float32 numbers at once, as a value that compiled functions can compute with.

Loops over numbers can be turned into vector instructions by a compiler, or not, and differently at their ends; here
every operation is written out, each with one rounding, so that a number comes out the same wherever it stands. Where
a processor's vectors are shorter, the compiler uses several. Addresses are those of arrays of float32.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from potluck.native.machine_code import Function
from potluck.native.machine_code import compiled as inner_loop

COUNT = 16
BYTES = 4 * COUNT
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_FLOAT, COUNT), ir.VectorType(_INT, COUNT)
_INDICES = ir.Constant(_INTS, list(range(COUNT)))


def compiled(function: Function) -> Function:
    """Compile a function on its first call. It must not create arrays, and lets other threads run meanwhile.

    As `native/machine_code.py` does, with liberties that change no result from run to run: a product followed by a
    sum has one rounding, and sums may be cut into vectors, but in a way that depends on their length alone.
    """
    fast = inner_loop(function, fastmath={"contract", "reassoc", "nsz", "arcp"})
    # numba looks only at the file that a function stands in, but what is called from other files becomes part of it.
    cache_file = getattr(getattr(fast, "_cache", None), "_cache_file", None)
    if cache_file is not None and hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _stamp()
    return fast


@cache
def _stamp() -> tuple[tuple[str, float, int], ...]:
    """Of all files in this folder; code compiled from others than these is compiled anew."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple((file.name, file.stat().st_mtime, file.stat().st_size) for file in files)


def instruction(function: Function) -> Function:
    """Something that compiled functions can use and that is written in the compiler's own language: `function` takes
    the types of its arguments, or their values where those are written out, and says how to generate it."""
    return cast(Function, intrinsic(prefer_literal=True)(function))


def emits(kind: Any) -> Callable[[Callable[..., Any]], Any]:
    """The same of a function of a builder and the arguments' values, whose result has no other types than these."""

    def wrap(generate: Callable[..., Any]) -> Any:
        @wraps(generate)
        def typing(context: Any, *arguments: Any) -> Any:
            return (
                kind,
                lambda context, builder, _, arguments: (
                    generate(builder, *arguments) or context.get_dummy_value()
                ),
            )

        return instruction(typing)

    return wrap


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__("Lanes")


LANES = _Vector()


@register_model(_Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)  # type: ignore[no-untyped-call]


def _arithmetic(symbol: Any, name: str) -> None:
    @infer_global(symbol)  # type: ignore[no-untyped-call]
    class _(ConcreteTemplate):
        cases = (signature(LANES, LANES, LANES),)  # type: ignore[no-untyped-call]

    @lower_builtin(symbol, _Vector, _Vector)  # type: ignore[no-untyped-call, untyped-decorator]
    def _lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, name)(*arguments)


for _symbol, _name in zip(
    (operator.add, operator.sub, operator.mul, operator.truediv),
    ("fadd", "fsub", "fmul", "fdiv"),
    strict=True,
):
    _arithmetic(_symbol, _name)


def _pointer(builder: Any, address: Any, kind: Any = _FLOATS) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _call(builder: Any, name: str, kind: Any, arguments: list[Any]) -> Any:
    function = ir.FunctionType(kind, [argument.type for argument in arguments])
    callee = cgutils.get_or_insert_function(builder.module, function, name)  # type: ignore[no-untyped-call]
    return builder.call(callee, arguments)


def _spread(builder: Any, value: Any, kind: Any = _FLOATS) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_INTS, [0] * COUNT))


@emits(LANES(types.int64))
def load(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address), align=4)


@emits(types.void(types.int64, LANES))
def store(builder: Any, address: Any, lanes: Any) -> None:
    builder.store(lanes, _pointer(builder, address), align=4)


@emits(LANES(types.float32))
def spread(builder: Any, number: Any) -> Any:
    return _spread(builder, number)


@emits(LANES(types.int64))
def spread_from(builder: Any, address: Any) -> Any:
    """The one number at `address` in all places."""
    return _spread(builder, builder.load(_pointer(builder, address, _FLOAT), align=4))


@emits(types.void(types.int64))
def fetch(builder: Any, address: Any) -> None:
    """Have the 64 bytes at `address` brought near; they will be read soon."""
    numbers = [ir.Constant(_INT, number) for number in (0, 3, 1)]  # to read, to keep, data
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [_pointer(builder, address), *numbers])


@emits(types.void(types.int64, types.int64))
def copy_one(builder: Any, source: Any, target: Any) -> None:
    number = builder.load(_pointer(builder, source, _FLOAT), align=4)
    builder.store(number, _pointer(builder, target, _FLOAT), align=4)


@emits(LANES(LANES, LANES, LANES))
def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""
    return _call(builder, "llvm.fma.v16f32", _FLOATS, [a, b, c])


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@emits(LANES(LANES, LANES))
def larger(builder: Any, a: Any, b: Any) -> Any:
    return _larger(builder, a, b)


def _fold(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Halves are combined with each other until one number is left."""
    width = COUNT
    while width > 1:
        width //= 2
        order = [(i + width) % COUNT for i in range(COUNT)]
        value = combine(value, builder.shuffle_vector(value, value, ir.Constant(_INTS, order)))
    return builder.extract_element(value, ir.Constant(_INT, 0))


@emits(types.float32(LANES))
def largest(builder: Any, lanes: Any) -> Any:
    return _fold(builder, lanes, lambda a, b: _larger(builder, a, b))


@emits(types.float32(LANES))
def total(builder: Any, lanes: Any) -> Any:
    return _fold(builder, lanes, builder.fadd)


@emits(LANES(LANES, types.int64, types.int64, types.float32))
def keep(builder: Any, lanes: Any, first: Any, stop: Any, other: Any) -> Any:
    """`lanes` in the places [first, stop), `other` in those around them."""
    low, high = (_spread(builder, builder.trunc(value, _INT), _INTS) for value in (first, stop))
    inside = builder.and_(builder.icmp_signed(">=", _INDICES, low), builder.icmp_signed("<", _INDICES, high))
    return builder.select(inside, lanes, _spread(builder, other))


@emits(LANES(LANES, LANES))
def _times_power_of_two(builder: Any, lanes: Any, shifted: Any) -> Any:
    """lanes * 2 ** n, with n in the lowest bits of `shifted`."""
    power = builder.shl(builder.bitcast(shifted, _INTS), ir.Constant(_INTS, [23] * COUNT))
    return builder.bitcast(builder.add(builder.bitcast(lanes, _INTS), power), _FLOATS)


_HIGHEST, _LOWEST = np.float32(88.0), np.float32(-87.0)
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
_ROUND = np.float32(12582912.0)
"""1.5 x 2 ** 23: added, it leaves a whole number in the lowest bits."""
_C2, _C3, _C4 = np.float32(5.0000001201e-1), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C5, _C6, _C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
_ONE = np.float32(1.0)


@compiled
def exp(x):  # type: ignore[no-untyped-def]
    """e ** x to about one unit in the last place, for x from -87 to 88; beyond that as at the ends.

    x = n ln 2 + r with n whole and |r| <= ln 2 / 2; e ** r is a polynomial (Cephes' coefficients).
    """
    x = larger(x, spread(_LOWEST))
    x = spread(np.float32(0.0)) - larger(spread(np.float32(0.0)) - x, spread(-_HIGHEST))
    shifted = multiply_add(x, spread(_LOG2_E), spread(_ROUND))
    n = shifted - spread(_ROUND)
    r = multiply_add(n, spread(_LN2_LOW), multiply_add(n, spread(_LN2_HIGH), x))
    p = multiply_add(spread(_C7), r, spread(_C6))
    p = multiply_add(p, r, spread(_C5))
    p = multiply_add(p, r, spread(_C4))
    p = multiply_add(p, r, spread(_C3))
    p = multiply_add(p, r, spread(_C2))
    return _times_power_of_two(multiply_add(p, r * r, r) + spread(_ONE), shifted)


@emits(types.void(types.int64, types.int64, types.int64, types.int64))
def split(builder: Any, source: Any, low: Any, middle: Any, high: Any) -> None:
    """Write the low, middle and high 8 significant bits of the 32 numbers at `source`, as bfloat16 each."""
    halves = ir.VectorType(ir.IntType(16), 2 * COUNT)
    upper = ir.Constant(ir.VectorType(_INT, 2 * COUNT), [2 * i + 1 for i in range(2 * COUNT)])
    mask = ir.Constant(_INTS, [0xFFFF0000] * COUNT)
    second = builder.add(source, ir.Constant(ir.IntType(64), BYTES))
    rests = [builder.load(_pointer(builder, place), align=4) for place in (source, second)]
    for target in (high, middle, low):
        kept = builder.shuffle_vector(*(builder.bitcast(rest, halves) for rest in rests), upper)
        builder.store(kept, _pointer(builder, target, halves), align=2)
        for i, rest in enumerate(rests):
            part = builder.and_(builder.bitcast(rest, _INTS), mask)
            rests[i] = builder.fsub(rest, builder.bitcast(part, _FLOATS))
