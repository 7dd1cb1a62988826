"""What is done to each row by itself: norms, and the gate of the feed-forward part.

Rows are given by address and the bytes from one to the next; `count` of them, `width` numbers wide, a multiple of 16.
"""

from __future__ import annotations

import numpy as np

from potluck.engine.numbers.kernels.vector import (
    BYTES,
    compiled,
    exp,
    load,
    multiply_add,
    spread,
    spread_from,
    store,
    total,
)

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


@compiled
def walk(rows, firsts, sizes, sides, memory, query, key, value, decay, rate, out):  # type: ignore[no-untyped-def]
    """Sequences one after the other: tokens [first, first + size) move the state at `rows` on.

    `sides` is (heads, key dim, value dim). `memory` [rows, heads, key dim, value dim]; `query`, `key`, `value`, `out`
    [tokens, heads, dim]; `decay`, `rate` [tokens, heads]. The value dim is a multiple of 16.
    """
    heads, key_dim, value_dim = sides
    width = 4 * value_dim
    for sequence in range(len(rows)):
        for head in range(heads):
            state = memory + (rows[sequence] * heads + head) * key_dim * width
            for token in range(firsts[sequence], firsts[sequence] + sizes[sequence]):
                place = token * heads + head
                q, k = query + place * 4 * key_dim, key + place * 4 * key_dim
                shrink, pace = spread_from(decay + 4 * place), spread_from(rate + 4 * place)
                for column in range(0, width, BYTES):
                    wanted = load(value + place * width + column)
                    step = _step(state + column, width, key_dim, q, k, shrink, pace, wanted)
                    store(out + place * width + column, step)


@compiled
def _step(state, width, key_dim, query, key, shrink, pace, wanted):  # type: ignore[no-untyped-def]
    known = spread(_ZERO)
    for number in range(key_dim):
        entry = load(state + number * width) * shrink
        store(state + number * width, entry)
        known = multiply_add(spread_from(key + 4 * number), entry, known)
    change, step = (wanted - known) * pace, spread(_ZERO)
    for number in range(key_dim):
        entry = multiply_add(spread_from(key + 4 * number), change, load(state + number * width))
        store(state + number * width, entry)
        step = multiply_add(spread_from(query + 4 * number), entry, step)
    return step
