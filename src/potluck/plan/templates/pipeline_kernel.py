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
def fill_holds(tables: PipelineTables, scratch: PipelineScratch, s: int, holds: Bytes, rests: Ints) -> None:
    """h_S(A, k) at holds[base + k·width + id of A], and rests[k, S-1, g] = max j·T̂_j(g) over j > h_S(g, k).

    Sums over nodes are kept from the highest node down, since ids in order change the lowest most often.
    """
    layers, top = tables.rates.shape[2], scratch.sums.shape[0] - 1
    # A stage leaves at least one node to each of the others.
    spare = tables.most_bytes - (s - 1) * tables.least_bytes
    # The last row is the sum above the highest node.
    scratch.weights[top] = 0
    for j in range(layers):
        scratch.sums[top, j] = 0
    for size in range(1, tables.tabulated[s] + 1):
        for number in range(tables.offsets[size], tables.offsets[size + 1]):
            changed = size - 1
            if number > tables.offsets[size]:
                while tables.members[number, changed] == tables.members[number - 1, changed]:
                    changed -= 1
            for node in range(changed, -1, -1):
                kind = tables.members[number, node]
                above = node + 1 if node + 1 < size else top
                scratch.weights[node] = scratch.weights[above] + tables.node_bytes[kind]
                for j in range(layers):
                    scratch.sums[node, j] = scratch.sums[above, j] + tables.upper[s - 1, kind, j]
            if scratch.weights[0] <= spare:
                _hold_row(tables, scratch, tables.bases[s] + number, tables.widths[s], holds)
    for g in range(tables.rates.shape[1]):
        _rest_row(tables, s, g, holds, rests)


@compiled
def _hold_row(tables: PipelineTables, scratch: PipelineScratch, at: int, width: int, holds: Bytes) -> None:
    j = tables.rates.shape[2]
    for k in range(tables.levels.shape[0]):
        while j > 0 and scratch.sums[0, j - 1] < tables.levels[k]:
            j -= 1
        if j == 0:
            break
        holds[at + k * width] = j


@compiled
def _rest_row(tables: PipelineTables, s: int, g: int, holds: Bytes, rests: Ints) -> None:
    layers = tables.rates.shape[2]
    most, j = 0, layers
    for k in range(tables.levels.shape[0]):
        held = holds[tables.bases[s] + k * tables.widths[s] + 1 + g]
        while j > held:
            most = max(most, j * tables.upper[s - 1, g, j - 1])
            j -= 1
        rests[k, s - 1, g] = most


@compiled
def solve_all(
    tables: PipelineTables,
    scratch: PipelineScratch,
    holds: Bytes,
    rests: Ints,
    prune: bool,
    best: Ints,
    stages: Bytes,
) -> None:
    """T* and S of every multiset within `most_bytes`; with `prune`, W, and S = 0 where a split is as good."""
    most, layers = tables.members.shape[1], tables.rates.shape[2]
    for size in range(1, most + 1):
        for number in range(tables.offsets[size], tables.offsets[size + 1]):
            weight = 0
            for i in range(size):
                scratch.kinds[i] = tables.members[number, i]
                weight += tables.node_bytes[scratch.kinds[i]]
            if weight > tables.most_bytes:
                continue
            _part_ids(tables, scratch, size)
            value, count = _incumbent(scratch.ids, size, prune, best, stages)
            alone = 0
            for i in range(size):
                alone += tables.rates[0, scratch.kinds[i], layers - 1]
            if alone > value:
                value, count = alone, 1
            level = _level(tables, value + 1)
            for s in range(max(2, size) if tables.alone else 2, min(size, tables.rates.shape[0], layers) + 1):
                if not _may_beat(tables, scratch, holds, rests, size, s, level, value + 1):
                    continue
                best_partition = _best_partition(tables, scratch, holds, size, s, level, value)
                if best_partition > value:
                    value, count = best_partition, s
                    level = _level(tables, value + 1)
            best[number] = value
            stages[number] = count


@compiled
def _part_ids(tables: PipelineTables, scratch: PipelineScratch, size: int) -> None:
    """Ids of all parts of a multiset; see `Multisets`."""
    scratch.ids[0] = 0
    for high in range(size):
        bit = 1 << high
        for rest in range(bit):
            # The id of the rest has the offset of its own size in it.
            count = tables.sizes[rest] + 1
            add = tables.terms[scratch.kinds[high], count] + tables.offsets[count] - tables.offsets[count - 1]
            scratch.ids[bit | rest] = scratch.ids[rest] + add


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
def _level(tables: PipelineTables, target: int) -> int:
    """The highest level that is not above the target."""
    k: int = min(code(target, tables.shift) - tables.first_code, tables.levels.shape[0] - 1)
    return max(0, k)


@compiled
def _may_beat(
    tables: PipelineTables,
    scratch: PipelineScratch,
    holds: Bytes,
    rests: Ints,
    size: int,
    s: int,
    level: int,
    target: int,
) -> bool:
    """Whether Σ_g max_j j·min(T̂_j(g), T) ≥ L·T."""
    at = tables.bases[s] + level * tables.widths[s] + 1
    total = 0
    for i in range(size):
        total += max(holds[at + scratch.kinds[i]] * target, rests[level, s - 1, scratch.kinds[i]])
    return bool(total >= tables.rates.shape[2] * target)


@compiled
def _best_partition(
    tables: PipelineTables, scratch: PipelineScratch, holds: Bytes, size: int, s: int, level: int, value: int
) -> int:
    """The best throughput above `value` with s stages, or `value` when there is none."""
    _gather(tables, scratch, holds, size, s, level)
    if s == 2 and size - 1 > tables.tabulated[2]:
        value = _one_and_rest(tables, scratch, size, s, value)
    pattern = 0
    for i in range(1, size):
        if scratch.kinds[i] == scratch.kinds[i - 1]:
            pattern |= 1 << (i - 1)
    row, last = tables.starts[size, pattern, s], tables.starts[size, pattern, s + 1]
    while True:
        row = _next_row(tables, scratch, s, row, last)
        if row == last:
            return value
        for stage in range(s):
            scratch.parts[stage] = tables.masks[row, stage]
            scratch.caps[stage] = scratch.held[tables.masks[row, stage]]
        row += 1
        settle = _settle(tables, scratch, s, value)
        if settle > value:
            value = settle
            if _level(tables, value + 1) > level:
                level = _level(tables, value + 1)
                _gather(tables, scratch, holds, size, s, level)


@compiled
def _next_row(tables: PipelineTables, scratch: PipelineScratch, s: int, row: int, last: int) -> int:
    """The next partition whose stages hold L layers at the level; most time goes in here."""
    layers, held, masks = tables.rates.shape[2], scratch.held, tables.masks
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
def _gather(
    tables: PipelineTables, scratch: PipelineScratch, holds: Bytes, size: int, s: int, level: int
) -> None:
    """h of all parts that can be a stage; those that are not tabulated hold nothing here."""
    at = tables.bases[s] + level * tables.widths[s]
    for mask in range(1, (1 << size) - 1):
        if scratch.ids[mask] < tables.widths[s]:
            scratch.held[mask] = holds[at + scratch.ids[mask]]
        else:
            scratch.held[mask] = 0


@compiled
def _one_and_rest(tables: PipelineTables, scratch: PipelineScratch, size: int, s: int, value: int) -> int:
    """Two stages, one of them a single node: the others are not tabulated, so their rates are added up."""
    layers = tables.rates.shape[2]
    for i in range(size):
        if i > 0 and scratch.kinds[i] == scratch.kinds[i - 1]:
            continue
        scratch.parts[0] = 1 << i
        scratch.parts[1] = (1 << size) - 1 - scratch.parts[0]
        one = scratch.held[scratch.parts[0]]
        while one > 0 and tables.upper[1, scratch.kinds[i], one - 1] <= value:
            one -= 1
        rest = max(layers - one, 1)
        if one == 0 or _rate(tables.upper, scratch, s, scratch.parts[1], rest) <= value:
            continue
        while rest < layers and _rate(tables.upper, scratch, s, scratch.parts[1], rest + 1) > value:
            rest += 1
        scratch.caps[0], scratch.caps[1] = one, rest
        value = max(value, _settle(tables, scratch, s, value))
    return value


@compiled
def _settle(tables: PipelineTables, scratch: PipelineScratch, s: int, value: int) -> int:
    """The best throughput of one partition if above `value`, else `value` or less.

    `caps` are the most layers of each stage at some throughput of at most value + 1.
    """
    layers, total = tables.rates.shape[2], 0
    for stage in range(s):
        total += scratch.caps[stage]
        if scratch.caps[stage] == 0:
            return value
    for stage in range(s):
        reached = _rate(tables.upper, scratch, s, scratch.parts[stage], scratch.caps[stage])
        while reached <= value:
            scratch.caps[stage] -= 1
            total -= 1
            if scratch.caps[stage] == 0 or total < layers:
                return value
            reached = _rate(tables.upper, scratch, s, scratch.parts[stage], scratch.caps[stage])
        scratch.tails[stage] = reached
    if not tables.monotone:
        return int(_settle_sets(tables, scratch, s, value))
    # Layers are given up where they are slowest until L are left.
    while True:
        slowest = 0
        for stage in range(1, s):
            if scratch.tails[stage] < scratch.tails[slowest]:
                slowest = stage
        if total == layers or scratch.caps[slowest] == 1:
            least: int = scratch.tails[slowest]
            return least
        scratch.caps[slowest] -= 1
        total -= 1
        scratch.tails[slowest] = _rate(
            tables.upper, scratch, s, scratch.parts[slowest], scratch.caps[slowest]
        )


@compiled
def _rate(rates: Ints, scratch: PipelineScratch, s: int, mask: int, j: int) -> int:
    """Σ T̂_j over the nodes of a stage."""
    total, node = 0, 0
    while mask:
        if mask & 1:
            total += rates[s - 1, scratch.kinds[node], j - 1]
        mask >>= 1
        node += 1
    return total


@compiled
def _settle_sets(tables: PipelineTables, scratch: PipelineScratch, s: int, value: int) -> int:
    """The best throughput of one partition above `value` where T̂ is not monotone, else `value`.

    Which numbers of layers a stage can hold at a throughput is then a set, not all up to a maximum. `caps`
    are those of the monotone table above, so no larger number is in any of the sets.
    """
    layers = tables.rates.shape[2]
    high = 1 << 62
    for stage in range(s):
        most = 0
        for j in range(scratch.caps[stage]):
            scratch.sums[stage, j] = _rate(tables.rates, scratch, s, scratch.parts[stage], j + 1)
            most = max(most, scratch.sums[stage, j])
        high = min(high, most)
    if high <= value or not _adds_up(scratch, s, value + 1, layers):
        return value
    low = value + 1
    while low < high:
        middle = low + (high - low + 1) // 2
        if _adds_up(scratch, s, middle, layers):
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def _adds_up(scratch: PipelineScratch, s: int, target: int, layers: int) -> bool:
    """Whether stages that each reach the target can hold L layers in all: sums of sets by shift and or.

    Bit b of (low, high) says that the stages so far can hold b layers beyond one each.
    """
    one, word = np.uint64(1), np.uint64(64)
    low, high = np.uint64(1), np.uint64(0)
    for stage in range(s):
        next_low, next_high = np.uint64(0), np.uint64(0)
        for j in range(scratch.caps[stage]):
            if scratch.sums[stage, j] >= target:
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
