"""The compiled inner loops of `plan.templates.pipeline`, which explains the method; letters as there.

All functions stand in this one file: numba's cache on disk notices a change of the file that a function stands
in, not of what it calls elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from potluck.native.machine_code import compiled

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class PipelineTables(NamedTuple):
    rates: Ints  # (S_max, G, L) T̂ in whole units.
    upper: Ints  # (S_max, G, L) the least table above T̂ that does not increase in j.
    monotone: bool  # Whether the two are the same.
    node_bytes: Ints
    least_bytes: int
    most_bytes: int
    members: Bytes  # (I, N) types of every multiset, ascending.
    offsets: Ints
    terms: Ints
    masks: Bytes
    starts: Ints  # Partitions; see `pipeline_partitions`.
    sizes: Ints  # (2^N,) how many nodes are in a mask.
    levels: Ints  # (K,) v_k, ascending.
    first_code: int
    shift: int  # The level of a throughput is its code less `first_code`; see `code`.
    bases: Ints
    widths: Ints
    tabulated: Ints
    """By S: where h_S starts, how many multisets it is for, and up to how many nodes those have."""
    alone: bool
    """Whether each node is a stage of its own: of all partitions only that into single nodes counts."""


class PipelineScratch(NamedTuple):
    """What the search writes on for one multiset after another."""

    kinds: Ints  # (N,) its types.
    ids: Ints  # (2^N,) ids of its parts.
    held: Ints  # (2^N,) h of its parts at the level of the incumbent.
    parts: Ints  # (N,) stages of a partition, as masks.
    caps: Ints
    tails: Ints  # (N,) layers of each stage, and what the stage reaches with them.
    sums: Ints  # (N + 1, L) rates of each stage, or of the highest nodes.
    weights: Ints  # (N + 1,) bytes of the highest nodes.


def scratch(max_nodes: int, layers: int) -> PipelineScratch:
    few, masks = np.zeros(max_nodes, np.int64), np.zeros(1 << max_nodes, np.int64)
    sums, weights = np.zeros((max_nodes + 1, layers), np.int64), np.zeros(max_nodes + 1, np.int64)
    return PipelineScratch(few, masks, masks.copy(), few.copy(), few.copy(), few.copy(), sums, weights)


@compiled
def code(value: int, shift: int) -> int:
    """The leading bits of a number as a float: they grow with it, in even steps between powers of two."""
    number: int = np.float64(value).view(np.int64) >> shift  # type: ignore[assignment]
    return number


@compiled
def fill_holds(t: PipelineTables, c: PipelineScratch, s: int, holds: Bytes, rests: Ints) -> None:
    """h_S(A, k) at holds[base + k·width + id of A], and rests[k, S-1, g] = max j·T̂_j(g) over j > h_S(g, k).

    Sums over nodes are kept from the highest node down, since ids in order change the lowest most often.
    """
    layers, top = t.rates.shape[2], c.sums.shape[0] - 1
    # A stage leaves at least one node to each of the others.
    spare = t.most_bytes - (s - 1) * t.least_bytes
    # The last row is the sum above the highest node.
    c.weights[top] = 0
    for j in range(layers):
        c.sums[top, j] = 0
    for size in range(1, t.tabulated[s] + 1):
        for number in range(t.offsets[size], t.offsets[size + 1]):
            changed = size - 1
            if number > t.offsets[size]:
                while t.members[number, changed] == t.members[number - 1, changed]:
                    changed -= 1
            for node in range(changed, -1, -1):
                kind = t.members[number, node]
                above = node + 1 if node + 1 < size else top
                c.weights[node] = c.weights[above] + t.node_bytes[kind]
                for j in range(layers):
                    c.sums[node, j] = c.sums[above, j] + t.upper[s - 1, kind, j]
            if c.weights[0] <= spare:
                _hold_row(t, c, t.bases[s] + number, t.widths[s], holds)
    for g in range(t.rates.shape[1]):
        _rest_row(t, s, g, holds, rests)


@compiled
def _hold_row(t: PipelineTables, c: PipelineScratch, at: int, width: int, holds: Bytes) -> None:
    j = t.rates.shape[2]
    for k in range(t.levels.shape[0]):
        while j > 0 and c.sums[0, j - 1] < t.levels[k]:
            j -= 1
        if j == 0:
            break
        holds[at + k * width] = j


@compiled
def _rest_row(t: PipelineTables, s: int, g: int, holds: Bytes, rests: Ints) -> None:
    layers = t.rates.shape[2]
    most, j = 0, layers
    for k in range(t.levels.shape[0]):
        held = holds[t.bases[s] + k * t.widths[s] + 1 + g]
        while j > held:
            most = max(most, j * t.upper[s - 1, g, j - 1])
            j -= 1
        rests[k, s - 1, g] = most


@compiled
def solve_all(
    t: PipelineTables, c: PipelineScratch, holds: Bytes, rests: Ints, prune: bool, best: Ints, stages: Bytes
) -> None:
    """T* and S of every multiset within `most_bytes`; with `prune`, W, and S = 0 where a split is as good."""
    most, layers = t.members.shape[1], t.rates.shape[2]
    for size in range(1, most + 1):
        for number in range(t.offsets[size], t.offsets[size + 1]):
            weight = 0
            for i in range(size):
                c.kinds[i] = t.members[number, i]
                weight += t.node_bytes[c.kinds[i]]
            if weight > t.most_bytes:
                continue
            _part_ids(t, c, size)
            value, count = _incumbent(c.ids, size, prune, best, stages)
            alone = 0
            for i in range(size):
                alone += t.rates[0, c.kinds[i], layers - 1]
            if alone > value:
                value, count = alone, 1
            level = _level(t, value + 1)
            for s in range(max(2, size) if t.alone else 2, min(size, t.rates.shape[0], layers) + 1):
                if not _may_beat(t, c, holds, rests, size, s, level, value + 1):
                    continue
                best_partition = _best_partition(t, c, holds, size, s, level, value)
                if best_partition > value:
                    value, count = best_partition, s
                    level = _level(t, value + 1)
            best[number] = value
            stages[number] = count


@compiled
def _part_ids(t: PipelineTables, c: PipelineScratch, size: int) -> None:
    """Ids of all parts of a multiset; see `Multisets`."""
    c.ids[0] = 0
    for high in range(size):
        bit = 1 << high
        for rest in range(bit):
            # The id of the rest has the offset of its own size in it.
            count = t.sizes[rest] + 1
            add = t.terms[c.kinds[high], count] + t.offsets[count] - t.offsets[count - 1]
            c.ids[bit | rest] = c.ids[rest] + add


@compiled
def _incumbent(ids: Ints, size: int, prune: bool, best: Ints, stages: Bytes) -> tuple[int, int]:
    """What is already reached: by the best split in two, or without pruning by leaving out one node."""
    full = (1 << size) - 1
    value, count = 0, 0
    if prune:
        for mask in range(1, full, 2):
            value = max(value, best[ids[mask]] + best[ids[full ^ mask]])
        return value, 0
    for i in range(size):
        smaller = ids[full ^ (1 << i)]
        if best[smaller] > value:
            value, count = best[smaller], stages[smaller]
    return value, count


@compiled
def _level(t: PipelineTables, target: int) -> int:
    """The highest level that is not above the target."""
    k: int = min(code(target, t.shift) - t.first_code, t.levels.shape[0] - 1)
    return max(0, k)


@compiled
def _may_beat(
    t: PipelineTables,
    c: PipelineScratch,
    holds: Bytes,
    rests: Ints,
    size: int,
    s: int,
    level: int,
    target: int,
) -> bool:
    """Whether Σ_g max_j j·min(T̂_j(g), T) ≥ L·T."""
    at = t.bases[s] + level * t.widths[s] + 1
    total = 0
    for i in range(size):
        total += max(holds[at + c.kinds[i]] * target, rests[level, s - 1, c.kinds[i]])
    return bool(total >= t.rates.shape[2] * target)


@compiled
def _best_partition(
    t: PipelineTables, c: PipelineScratch, holds: Bytes, size: int, s: int, level: int, value: int
) -> int:
    """The best throughput above `value` with s stages, or `value` when there is none."""
    _gather(t, c, holds, size, s, level)
    if s == 2 and size - 1 > t.tabulated[2]:
        value = _one_and_rest(t, c, size, s, value)
    pattern = 0
    for i in range(1, size):
        if c.kinds[i] == c.kinds[i - 1]:
            pattern |= 1 << (i - 1)
    row, last = t.starts[size, pattern, s], t.starts[size, pattern, s + 1]
    while True:
        row = _next_row(t, c, s, row, last)
        if row == last:
            return value
        for stage in range(s):
            c.parts[stage] = t.masks[row, stage]
            c.caps[stage] = c.held[t.masks[row, stage]]
        row += 1
        settle = _settle(t, c, s, value)
        if settle > value:
            value = settle
            if _level(t, value + 1) > level:
                level = _level(t, value + 1)
                _gather(t, c, holds, size, s, level)


@compiled
def _next_row(t: PipelineTables, c: PipelineScratch, s: int, row: int, last: int) -> int:
    """The next partition whose stages hold L layers at the level; most time goes in here."""
    layers, held, masks = t.rates.shape[2], c.held, t.masks
    if s == 2:
        while row < last and held[masks[row, 0]] + held[masks[row, 1]] < layers:
            row += 1
    elif s == 3:
        while row < last and held[masks[row, 0]] + held[masks[row, 1]] + held[masks[row, 2]] < layers:
            row += 1
    else:
        while row < last:
            total = held[masks[row, 0]] + held[masks[row, 1]] + held[masks[row, 2]] + held[masks[row, 3]]
            for stage in range(4, s):
                total += held[masks[row, stage]]
            if total >= layers:
                break
            row += 1
    return row


@compiled
def _gather(t: PipelineTables, c: PipelineScratch, holds: Bytes, size: int, s: int, level: int) -> None:
    """h of all parts that can be a stage; those that are not tabulated hold nothing here."""
    at = t.bases[s] + level * t.widths[s]
    for mask in range(1, (1 << size) - 1):
        if c.ids[mask] < t.widths[s]:
            c.held[mask] = holds[at + c.ids[mask]]
        else:
            c.held[mask] = 0


@compiled
def _one_and_rest(t: PipelineTables, c: PipelineScratch, size: int, s: int, value: int) -> int:
    """Two stages, one of them a single node: the others are not tabulated, so their rates are added up."""
    layers = t.rates.shape[2]
    for i in range(size):
        if i > 0 and c.kinds[i] == c.kinds[i - 1]:
            continue
        c.parts[0] = 1 << i
        c.parts[1] = (1 << size) - 1 - c.parts[0]
        one = c.held[c.parts[0]]
        while one > 0 and t.upper[1, c.kinds[i], one - 1] <= value:
            one -= 1
        rest = max(layers - one, 1)
        if one == 0 or _rate(t.upper, c, s, c.parts[1], rest) <= value:
            continue
        while rest < layers and _rate(t.upper, c, s, c.parts[1], rest + 1) > value:
            rest += 1
        c.caps[0], c.caps[1] = one, rest
        value = max(value, _settle(t, c, s, value))
    return value


@compiled
def _settle(t: PipelineTables, c: PipelineScratch, s: int, value: int) -> int:
    """The best throughput of one partition if above `value`, else `value` or less.

    `caps` are the most layers of each stage at some throughput of at most value + 1.
    """
    layers, total = t.rates.shape[2], 0
    for stage in range(s):
        total += c.caps[stage]
        if c.caps[stage] == 0:
            return value
    for stage in range(s):
        reached = _rate(t.upper, c, s, c.parts[stage], c.caps[stage])
        while reached <= value:
            c.caps[stage] -= 1
            total -= 1
            if c.caps[stage] == 0 or total < layers:
                return value
            reached = _rate(t.upper, c, s, c.parts[stage], c.caps[stage])
        c.tails[stage] = reached
    if not t.monotone:
        return int(_settle_sets(t, c, s, value))
    # Layers are given up where they are slowest until L are left.
    while True:
        slowest = 0
        for stage in range(1, s):
            if c.tails[stage] < c.tails[slowest]:
                slowest = stage
        if total == layers or c.caps[slowest] == 1:
            least: int = c.tails[slowest]
            return least
        c.caps[slowest] -= 1
        total -= 1
        c.tails[slowest] = _rate(t.upper, c, s, c.parts[slowest], c.caps[slowest])


@compiled
def _rate(rates: Ints, c: PipelineScratch, s: int, mask: int, j: int) -> int:
    """Σ T̂_j over the nodes of a stage."""
    total, node = 0, 0
    while mask:
        if mask & 1:
            total += rates[s - 1, c.kinds[node], j - 1]
        mask >>= 1
        node += 1
    return total


@compiled
def _settle_sets(t: PipelineTables, c: PipelineScratch, s: int, value: int) -> int:
    """The best throughput of one partition above `value` where T̂ is not monotone, else `value`.

    Which numbers of layers a stage can hold at a throughput is then a set, not all up to a maximum. `caps`
    are those of the monotone table above, so no larger number is in any of the sets.
    """
    layers = t.rates.shape[2]
    high = 1 << 62
    for stage in range(s):
        most = 0
        for j in range(c.caps[stage]):
            c.sums[stage, j] = _rate(t.rates, c, s, c.parts[stage], j + 1)
            most = max(most, c.sums[stage, j])
        high = min(high, most)
    if high <= value or not _adds_up(c, s, value + 1, layers):
        return value
    low = value + 1
    while low < high:
        middle = low + (high - low + 1) // 2
        if _adds_up(c, s, middle, layers):
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def _adds_up(c: PipelineScratch, s: int, target: int, layers: int) -> bool:
    """Whether stages that each reach the target can hold L layers in all: sums of sets by shift and or.

    Bit b of (low, high) says that the stages so far can hold b layers beyond one each.
    """
    one, word = np.uint64(1), np.uint64(64)
    low, high = np.uint64(1), np.uint64(0)
    for stage in range(s):
        next_low, next_high = np.uint64(0), np.uint64(0)
        for j in range(c.caps[stage]):
            if c.sums[stage, j] >= target:
                shift = np.uint64(j)
                if j == 0:
                    next_low, next_high = next_low | low, next_high | high
                elif j < 64:
                    next_low |= low << shift
                    next_high |= high << shift | low >> (word - shift)
                else:
                    next_high |= low << (shift - word)
        low, high = next_low, next_high
    spare = np.uint64(layers - s)
    bit = low >> spare if spare < word else high >> (spare - word)
    return bool(bit & one)


Floats = NDArray[np.float64]


@compiled
def best_rates(
    layer_s: Floats,
    rest_s: Floats,
    wire_s: Floats,
    most: Ints,
    within_s: Floats,
    units: float,
    floats: Floats,
) -> None:
    """found[S-1, j-1] = max B·units / τ_j(B) over the batches B that S stages of j layers allow.

    `most` (S_max, L) is the largest B whose KV fits, `within_s` (S_max) what a stage may take. From two stages on,
    what S allows is also allowed with fewer stages, so a batch is noted at the largest S that allows it and carried
    down at the end.
    """
    max_stages, layers = floats.shape
    for j in range(1, layers + 1):
        widest = most[0, j - 1]
        if max_stages > 1:
            widest = max(widest, most[1, j - 1])
        for b in range(1, min(widest, layer_s.shape[0]) + 1):
            step_s = j * layer_s[b - 1] + rest_s[b - 1]
            rate = b * units / step_s
            if step_s <= within_s[0] and b <= most[0, j - 1] and rate > floats[0, j - 1]:
                floats[0, j - 1] = rate
            stages = max_stages
            while stages > 1 and (
                step_s + 2.0 * wire_s[b - 1] > within_s[stages - 1] or b > most[stages - 1, j - 1]
            ):
                stages -= 1
            if stages > 1 and rate > floats[stages - 1, j - 1]:
                floats[stages - 1, j - 1] = rate
        for stages in range(max_stages - 1, 1, -1):
            floats[stages - 1, j - 1] = max(floats[stages - 1, j - 1], floats[stages, j - 1])
