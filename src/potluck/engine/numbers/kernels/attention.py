"""Attention over paged keys and values, one token at a time.

Keys lie in blocks of 16 tokens, in each block number by number: sixteen products with a query are one instruction.
The context is gone through 64 keys at a time, from a multiple of 64 on, with a running maximum and sum (as in flash
attention). So what a query gets depends on its own position and context alone, however they were cut into steps.

Two query heads that share their keys are computed together. Floats are given by address: `packed` has rows of
queries, keys and values [heads + 2 kv heads, dim], where query head g x kv heads + h belongs to key head h;
`keys` [blocks, kv heads, dim, 16]; `values` [blocks, 16, kv heads, dim]. `table` [rows, blocks] is an array.
"""

from __future__ import annotations

import numpy as np

from potluck.engine.numbers.kernels.vector import (
    BYTES,
    COUNT,
    compiled,
    copy_one,
    exp,
    fetch,
    keep,
    larger,
    largest,
    load,
    multiply_add,
    spread,
    spread_from,
    store,
    total,
)

TILE = 64
"""Keys that are gone through together."""
_BLOCKS = TILE // COUNT
TOGETHER = 8
"""Tokens of one sequence that go through its keys together."""
_NEVER = np.float32(-1e30)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@compiled
def turn(x, cos, sin, half):  # type: ignore[no-untyped-def]
    """Turn a head's pairs of numbers, which stand `half` bytes apart; all are addresses."""
    for place in range(0, half, BYTES):
        a, b = load(x + place), load(x + half + place)
        store(x + place, multiply_add(b, load(sin + place), a * load(cos + place)))
        store(x + half + place, multiply_add(a, load(sin + half + place), b * load(cos + half + place)))


@compiled
def place(packed, stride, heads, kv_heads, dim, angles, turned, positions, slots, keys, values):  # type: ignore[no-untyped-def]
    """Turn `turned` numbers of queries and keys by their positions, and keep keys and values."""
    kept = 4 * kv_heads * dim
    for token in range(len(positions)):
        row = packed + token * stride
        cos = angles + positions[token] * 8 * turned
        if turned:
            for head in range(heads + kv_heads):
                turn(row + 4 * head * dim, cos, cos + 4 * turned, 2 * turned)
        block, lane = divmod(slots[token], COUNT)
        source, target = row + 4 * heads * dim, keys + block * kept * COUNT + 4 * lane
        for number in range(kv_heads * dim):
            copy_one(source + 4 * number, target + BYTES * number)
        source, target = source + kept, values + slots[token] * kept
        for number in range(0, kept, BYTES):
            store(target + number, load(source + number))


@compiled
def collect(slots, size, keys, values, out):  # type: ignore[no-untyped-def]
    """What is kept of tokens: `size` numbers of key, then as many of value, of each."""
    for token in range(len(slots)):
        block, lane = divmod(slots[token], COUNT)
        source, target = keys + block * size * BYTES + 4 * lane, out + token * 8 * size
        for number in range(size):
            copy_one(source + BYTES * number, target + 4 * number)
        source, target = values + slots[token] * 4 * size, target + 4 * size
        for number in range(0, 4 * size, BYTES):
            store(target + number, load(source + number))


@compiled
def attend(  # type: ignore[no-untyped-def]
    packed,
    stride,
    heads,
    kv_heads,
    dim,
    rows,
    positions,
    table,
    window,
    keys,
    values,
    scale,
    scratch,
    state,
    out,
):
    """`out` [tokens, heads, dim]. `window` 0: everything is seen. Scratch: 2 x 64 numbers, and `state` [8, 4]."""
    token, spots = 0, (scratch, scratch + 4 * TILE)
    while token < len(rows):
        row, count = rows[token], 1
        while count < TOGETHER and token + count < len(rows) and rows[token + count] == row:
            count += 1
        places = positions[token : token + count]
        first = _first_seen(places[0], window)
        following = token + count if token + count < len(rows) else token
        for head in range(kv_heads):
            # What comes next is fetched meanwhile: the next head of the same keys, or the next token's first.
            more = head + 1 < kv_heads
            after = token if more else following
            tile, beside = _first_seen(positions[after], window) // TILE, 4 * (head + 1 if more else 0) * dim
            ahead = table[rows[after], tile * _BLOCKS :], keys + beside * COUNT, values + beside
            own = (table[row], keys + 4 * head * dim * COUNT, values + 4 * head * dim)
            for group in range(0, heads // kv_heads, 2):
                one = 4 * (group * kv_heads + head) * dim
                # With an odd number of queries to a key, the last is computed twice.
                two = one + 4 * kv_heads * dim if (group + 1) * kv_heads < heads else one
                source, target = packed + token * stride, out + token * 4 * heads * dim
                pair = (source + one, source + two, stride), (target + one, target + two, 4 * heads * dim)
                _pairs(pair, places, first, window, kv_heads, dim, own, ahead, scale, spots, state)
        token += count


@compiled
def _first_seen(position, window):  # type: ignore[no-untyped-def]
    return max(0, position - window + 1) if window else 0


@compiled
def _pairs(pair, places, first, window, kv_heads, dim, own, ahead, scale, spots, state):  # type: ignore[no-untyped-def]
    """Two query heads of up to 8 tokens in a row over the keys of one head: all of them while a tile is near."""
    (source_a, source_b, source_stride), (target_a, target_b, target_stride) = pair
    table, keys, values = own
    last = places[-1] // TILE
    for token in range(len(places)):
        state[token, 0] = state[token, 1] = _NEVER
        state[token, 2] = state[token, 3] = _ZERO
        for number in range(token * target_stride, token * target_stride + 4 * dim, BYTES):
            store(target_a + number, spread(_ZERO))
            store(target_b + number, spread(_ZERO))
    for tile in range(first // TILE, last + 1):
        blocks = table[tile * _BLOCKS :]
        coming = (table[(tile + 1) * _BLOCKS :], keys, values) if tile < last else ahead
        for token in range(len(places)):
            begin = max(_first_seen(places[token], window) - tile * TILE, 0)
            stop = min(places[token] + 1 - tile * TILE, TILE)
            if begin < stop:
                queries = source_a + token * source_stride, source_b + token * source_stride
                targets = target_a + token * target_stride, target_b + token * target_stride
                lies = kv_heads, dim, blocks, keys, values, coming, token == 0
                _tile(queries, begin, stop, lies, scale, spots, state[token], targets)
    for token in range(len(places)):
        share_a, share_b = spread(_ONE / state[token, 2]), spread(_ONE / state[token, 3])
        for number in range(token * target_stride, token * target_stride + 4 * dim, BYTES):
            store(target_a + number, load(target_a + number) * share_a)
            if target_a != target_b:
                store(target_b + number, load(target_b + number) * share_b)


@compiled
def _tile(queries, begin, stop, lies, scale, spots, state, targets):  # type: ignore[no-untyped-def]
    """Two queries over the keys [begin, stop) of a tile. `state` has the maxima and sums so far."""
    kv_heads, dim, blocks, keys, values, coming, fetches = lies
    count, width = -(-stop // COUNT), 4 * kv_heads * dim
    _scores(queries, kv_heads, dim, blocks, keys, coming, fetches, spots)
    most_a = _weigh(spots[0], count, begin, stop, scale, state[0])
    most_b = _weigh(spots[1], count, begin, stop, scale, state[1])
    shrink_a, shrink_b = exp(spread(state[0] - most_a)), exp(spread(state[1] - most_b))
    state[0], state[1] = most_a, most_b
    state[2] = largest(shrink_a) * state[2] + _sum(spots[0], count)
    state[3] = largest(shrink_b) * state[3] + _sum(spots[1], count)
    wide = dim // TILE * TILE
    for number in range(0, wide, TILE):
        places = targets[0] + 4 * number, targets[1] + 4 * number
        _mix_four(
            blocks,
            begin,
            stop,
            width,
            values + 4 * number,
            coming,
            fetches,
            spots,
            shrink_a,
            shrink_b,
            places,
        )
    for number in range(wide, dim, COUNT):
        places = targets[0] + 4 * number, targets[1] + 4 * number
        _mix_one(blocks, begin, stop, width, values + 4 * number, spots, shrink_a, shrink_b, places)


@compiled
def _scores(queries, kv_heads, dim, table, keys, coming, fetches, spots):  # type: ignore[no-untyped-def]
    """Products of two queries with the keys of four blocks. Where a row has no block, the table has the empty one."""
    size = kv_heads * dim * BYTES
    k0, k1 = keys + table[0] * size, keys + table[1] * size
    k2, k3 = keys + table[2] * size, keys + table[3] * size
    later, base = coming[0], coming[1]
    n0, n1 = base + later[0] * size, base + later[1] * size
    n2, n3 = base + later[2] * size, base + later[3] * size
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = spread(_ZERO)
    for number in range(dim):
        a, b = spread_from(queries[0] + 4 * number), spread_from(queries[1] + 4 * number)
        here = number * BYTES
        if fetches:
            fetch(n0 + here)
            fetch(n1 + here)
            fetch(n2 + here)
            fetch(n3 + here)
        key = load(k0 + here)
        a0, b0 = multiply_add(a, key, a0), multiply_add(b, key, b0)
        key = load(k1 + here)
        a1, b1 = multiply_add(a, key, a1), multiply_add(b, key, b1)
        key = load(k2 + here)
        a2, b2 = multiply_add(a, key, a2), multiply_add(b, key, b2)
        key = load(k3 + here)
        a3, b3 = multiply_add(a, key, a3), multiply_add(b, key, b3)
    _store_four(spots[0], a0, a1, a2, a3)
    _store_four(spots[1], b0, b1, b2, b3)


@compiled
def _store_four(target, v0, v1, v2, v3):  # type: ignore[no-untyped-def]
    store(target, v0)
    store(target + BYTES, v1)
    store(target + 2 * BYTES, v2)
    store(target + 3 * BYTES, v3)


@compiled
def _weigh(spot, blocks, begin, stop, scale, most):  # type: ignore[no-untyped-def]
    """Scores become weights, e ** (score - maximum), 0 outside [begin, stop); returns the maximum so far."""
    best, scales = spread(most), spread(scale)
    if begin == 0 and stop == TILE:
        s0, s1 = load(spot) * scales, load(spot + BYTES) * scales
        s2, s3 = load(spot + 2 * BYTES) * scales, load(spot + 3 * BYTES) * scales
        new = largest(larger(larger(best, larger(s0, s1)), larger(s2, s3)))
        top = spread(new)
        _store_four(spot, exp(s0 - top), exp(s1 - top), exp(s2 - top), exp(s3 - top))
        return new
    for block in range(blocks):
        score = load(spot + block * BYTES) * scales
        score = keep(score, begin - block * COUNT, stop - block * COUNT, _NEVER)
        store(spot + block * BYTES, score)
        best = larger(best, score)
    new = largest(best)
    for block in range(blocks):
        weight = exp(load(spot + block * BYTES) - spread(new))
        store(spot + block * BYTES, keep(weight, begin - block * COUNT, stop - block * COUNT, _ZERO))
    return new


@compiled
def _sum(spot, blocks):  # type: ignore[no-untyped-def]
    result = load(spot)
    for block in range(1, blocks):
        result = result + load(spot + block * BYTES)
    return total(result)


@compiled
def _mix_four(table, begin, stop, width, values, coming, fetches, spots, shrink_a, shrink_b, targets):  # type: ignore[no-untyped-def]
    """Add weighted values to 64 numbers of both outputs, which shrink first. `table` begins with the tile."""
    one, two = targets
    a0, a1 = load(one) * shrink_a, load(one + BYTES) * shrink_a
    a2, a3 = load(one + 2 * BYTES) * shrink_a, load(one + 3 * BYTES) * shrink_a
    b0, b1 = load(two) * shrink_b, load(two + BYTES) * shrink_b
    b2, b3 = load(two + 2 * BYTES) * shrink_b, load(two + 3 * BYTES) * shrink_b
    for block in range(begin // COUNT, -(-stop // COUNT)):
        low, high = max(begin, block * COUNT), min(stop, (block + 1) * COUNT)
        value = values + (table[block] * COUNT + low - block * COUNT) * width
        later = coming[2] + (coming[0][block] * COUNT + low - block * COUNT) * width
        for key in range(low, high):
            a, b = spread_from(spots[0] + 4 * key), spread_from(spots[1] + 4 * key)
            if fetches:
                fetch(later)
                fetch(later + BYTES)
                fetch(later + 2 * BYTES)
                fetch(later + 3 * BYTES)
                later += width
            v = load(value)
            a0, b0 = multiply_add(a, v, a0), multiply_add(b, v, b0)
            v = load(value + BYTES)
            a1, b1 = multiply_add(a, v, a1), multiply_add(b, v, b1)
            v = load(value + 2 * BYTES)
            a2, b2 = multiply_add(a, v, a2), multiply_add(b, v, b2)
            v = load(value + 3 * BYTES)
            a3, b3 = multiply_add(a, v, a3), multiply_add(b, v, b3)
            value += width
    _store_four(two, b0, b1, b2, b3)
    _store_four(one, a0, a1, a2, a3)


@compiled
def _mix_one(table, begin, stop, width, values, spots, shrink_a, shrink_b, targets):  # type: ignore[no-untyped-def]
    a0, b0 = load(targets[0]) * shrink_a, load(targets[1]) * shrink_b
    for key in range(begin, stop):
        v = load(values + (table[key // COUNT] * COUNT + key % COUNT) * width)
        a0 = multiply_add(spread_from(spots[0] + 4 * key), v, a0)
        b0 = multiply_add(spread_from(spots[1] + 4 * key), v, b0)
    store(targets[1], b0)
    store(targets[0], a0)
