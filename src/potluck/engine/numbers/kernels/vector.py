"""Sixteen float32 numbers at once, as a value that compiled functions can compute with.

Loops over numbers can be turned into vector instructions by a compiler, or not, and differently at their ends; here
every operation is written out, each with one rounding, so that a number comes out the same wherever it stands. Where
a processor's vectors are shorter, the compiler uses several. Addresses are those of arrays of float32.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from potluck.engine.numbers.kernels.compiled import compiled, instruction

COUNT = 16
BYTES = 4 * COUNT
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_FLOAT, COUNT), ir.VectorType(_INT, COUNT)
_INDICES = ir.Constant(_INTS, list(range(COUNT)))


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


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _arithmetic(_symbol, _name)

Generate = Callable[[Any, Any, Any, Any], Any]


def _pointer(builder: Any, address: Any, kind: Any = _FLOATS) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _call(builder: Any, name: str, kind: Any, arguments: list[Any]) -> Any:
    function = ir.FunctionType(kind, [each.type for each in arguments])
    callee = cgutils.get_or_insert_function(builder.module, function, name)  # type: ignore[no-untyped-call]
    return builder.call(callee, arguments)


@instruction
def load(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(builder, arguments[0]), align=4)

    return LANES(types.int64), generate


@instruction
def store(typing: Any, address: Any, microbatches: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _pointer(builder, arguments[0]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, LANES), generate


def _spread(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, [0] * COUNT))


@instruction
def spread(typing: Any, number: Any) -> Any:
    """The same number in all places."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, arguments[0])

    return LANES(types.float32), generate


@instruction
def spread_from(typing: Any, address: Any) -> Any:
    """The one number at `address` in all places."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, builder.load(_pointer(builder, arguments[0], _FLOAT), align=4))

    return LANES(types.int64), generate


@instruction
def fetch(typing: Any, address: Any) -> Any:
    """Have the 64 bytes at `address` brought near; they will be read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = [ir.Constant(_INT, number) for number in (0, 3, 1)]  # to read, to keep, data
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [_pointer(builder, arguments[0]), *numbers])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@instruction
def copy_one(typing: Any, source: Any, target: Any) -> Any:
    """One number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = (_pointer(builder, each, _FLOAT) for each in arguments)
        builder.store(builder.load(source, align=4), target, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@instruction
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.fma.v16f32", _FLOATS, list(arguments))

    return LANES(LANES, LANES, LANES), generate


@instruction
def larger(typing: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return LANES(LANES, LANES), generate


def _fold(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Halves are combined with each other until one number is left."""
    width = COUNT
    while width > 1:
        width //= 2
        order = [(i + width) % COUNT for i in range(COUNT)]
        value = combine(value, builder.shuffle_vector(value, value, ir.Constant(_INTS, order)))
    return builder.extract_element(value, ir.Constant(_INT, 0))


@instruction
def largest(typing: Any, microbatches: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        return _fold(builder, arguments[0], larger)

    return types.float32(LANES), generate


@instruction
def total(typing: Any, microbatches: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _fold(builder, arguments[0], builder.fadd)

    return types.float32(LANES), generate


@instruction
def keep(typing: Any, microbatches: Any, first: Any, stop: Any, other: Any) -> Any:
    """`lanes` in the places [first, stop), `other` in those around them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def everywhere(value: Any) -> Any:
            one = builder.insert_element(
                ir.Constant(_INTS, ir.Undefined), builder.trunc(value, _INT), ir.Constant(_INT, 0)
            )
            zeros = ir.Constant(_INTS, [0] * COUNT)
            return builder.shuffle_vector(one, ir.Constant(_INTS, ir.Undefined), zeros)

        microbatches, first, stop, other = arguments
        inside = builder.and_(
            builder.icmp_signed(">=", _INDICES, everywhere(first)),
            builder.icmp_signed("<", _INDICES, everywhere(stop)),
        )
        return builder.select(inside, microbatches, _spread(builder, other))

    return LANES(LANES, types.int64, types.int64, types.float32), generate


@instruction
def _times_power_of_two(typing: Any, microbatches: Any, shifted: Any) -> Any:
    """lanes * 2 ** n, with n in the lowest bits of `shifted`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        power = builder.shl(builder.bitcast(arguments[1], _INTS), ir.Constant(_INTS, [23] * COUNT))
        return builder.bitcast(builder.add(builder.bitcast(arguments[0], _INTS), power), _FLOATS)

    return LANES(LANES, LANES), generate


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


@instruction
def split(typing: Any, source: Any, low: Any, middle: Any, high: Any) -> Any:
    """Write the low, middle and high 8 significant bits of the 32 numbers at `source`, as bfloat16 each."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        halves = ir.VectorType(ir.IntType(16), 2 * COUNT)
        upper = ir.Constant(ir.VectorType(_INT, 2 * COUNT), [2 * i + 1 for i in range(2 * COUNT)])
        mask = ir.Constant(_INTS, [0xFFFF0000] * COUNT)
        second = builder.add(arguments[0], ir.Constant(ir.IntType(64), BYTES))
        rests = [builder.load(_pointer(builder, place), align=4) for place in (arguments[0], second)]
        for target in (arguments[3], arguments[2], arguments[1]):
            kept = builder.shuffle_vector(*(builder.bitcast(rest, halves) for rest in rests), upper)
            builder.store(kept, _pointer(builder, target, halves), align=2)
            for i, rest in enumerate(rests):
                part = builder.and_(builder.bitcast(rest, _INTS), mask)
                rests[i] = builder.fsub(rest, builder.bitcast(part, _FLOATS))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate
