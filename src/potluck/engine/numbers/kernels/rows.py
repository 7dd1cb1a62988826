"""What is done to each row by itself: norms, and the gate of the feed-forward part.

Rows are given by address and the bytes from one to the next; `count` of them, `width` numbers wide, a multiple of 16.
"""

from __future__ import annotations

import numpy as np

from potluck.engine.numbers.kernels.compiled import compiled
from potluck.engine.numbers.kernels.vector import BYTES, exp, load, multiply_add, spread, store, total

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@compiled
def norm(count, width, x, x_stride, weight, eps, out):  # type: ignore[no-untyped-def]
    """x / sqrt(mean(x²) + eps) * weight."""
    size = 4 * width
    for row in range(count):
        source, target = x + row * x_stride, out + row * size
        squares = spread(_ZERO)
        for place in range(0, size, BYTES):
            number = load(source + place)
            squares = multiply_add(number, number, squares)
        factor = spread(_ONE / np.sqrt(total(squares) / np.float32(width) + eps))
        for place in range(0, size, BYTES):
            store(target + place, load(source + place) * factor * load(weight + place))


@compiled
def gate(count, width, packed, packed_stride, out):  # type: ignore[no-untyped-def]
    """n m / (1 + exp(n)) of the two halves of each row (ffn.py)."""
    size = 4 * width
    for row in range(count):
        source, target = packed + row * packed_stride, out + row * size
        for place in range(0, size, BYTES):
            n, m = load(source + place), load(source + size + place)
            store(target + place, n * m / (exp(n) + spread(_ONE)))
