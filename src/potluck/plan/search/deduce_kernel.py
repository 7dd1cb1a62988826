"""The compiled inner loop of `plan.search.deduce`, which explains it; letters as there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from potluck.plan.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PREFILL, DECODE, MIXED = 0, 1, 2
GOODPUT, RATE, LATENCY_S, SERVICE_S, BATCH, SHARE = range(6)
"""Places in a result."""


class CostTables(NamedTuple):
    """Costs, and the figures of the work."""

    batches: Floats
    prefill: Floats
    decode: Floats
    mixed: Floats
    room: Floats
    layer_bytes: Floats
    kv_bytes: Floats
    chunk_tokens: Floats
    layers: int
    input_tokens: float
    output_tokens: float
    token_bytes: float
    """Activations of one token between two stages."""
    ttft_s: float
    """What is left of the objective without the hand-over of KV."""
    tpot_s: float
    mixed_tpot_s: float
    """A pipeline that does both phases has turns of one length, however busy it is: admission's margin is kept."""
    headroom: float


class DeduceScratch(NamedTuple):
    """What the search writes on: [stage] each."""

    a: Floats
    r: Floats
    cap: Ints
    held: Ints
    order: Ints


@compiled
def attained(busy: float, service_s: float, slack_s: float) -> float:
    """Share of requests that wait at most `slack_s` in an M/D/1 queue."""
    if slack_s < 0.0:
        return 0.0
    share: float = 1.0 - busy * np.exp(-2.0 * (1.0 - busy) * slack_s / service_s)
    return share


@compiled
def fill(count: int, layers: int, scratch: DeduceScratch) -> bool:
    """The split of least latency: one layer each, the rest on the fastest stages that have room."""
    total = 0
    for s in range(count):
        if scratch.cap[s] < 1:
            return False
        total += scratch.cap[s]
        scratch.held[s] = 1
        scratch.order[s] = s
    if total < layers or layers < count:
        return False
    for i in range(1, count):  # insertion sort by seconds per layer
        j = i
        while j > 0 and scratch.a[scratch.order[j]] < scratch.a[scratch.order[j - 1]]:
            scratch.order[j], scratch.order[j - 1] = scratch.order[j - 1], scratch.order[j]
            j -= 1
    left = layers - count
    for i in range(count):
        s = scratch.order[i]
        more = min(left, scratch.cap[s] - 1)
        scratch.held[s] += more
        left -= more
    return True


@compiled
def given(count: int, layers: Ints, scratch: DeduceScratch) -> bool:
    """The split in `layers`, if memory takes it."""
    for s in range(count):
        scratch.held[s] = layers[s]
        if scratch.held[s] > scratch.cap[s]:
            return False
    return True


@compiled
def relieve(count: int, slowest: int, interval_s: float, scratch: DeduceScratch) -> bool:
    """Move a layer off the slowest stage to the fastest one that stays below it; False when none does."""
    if scratch.held[slowest] <= 1:
        return False
    for i in range(count):
        s = scratch.order[i]
        if s != slowest and scratch.held[s] < scratch.cap[s]:
            after = scratch.r[s] + (scratch.held[s] + 1) * scratch.a[s]
            if after < interval_s:
                scratch.held[slowest] -= 1
                scratch.held[s] += 1
                return True
    return False


@compiled
def load(phase: int, kinds: Ints, count: int, b: int, tables: CostTables, scratch: DeduceScratch) -> None:
    """Seconds and room of every stage for a batch."""
    only = 1 if count == 1 else 0
    for s in range(count):
        k = kinds[s]
        if phase == PREFILL:
            scratch.a[s], scratch.r[s] = tables.prefill[k, 0], tables.prefill[k, 1]
            kv = (count + 1) * tables.kv_bytes[k, 0]
        elif phase == DECODE:
            scratch.a[s], scratch.r[s] = tables.decode[k, b, 0], tables.decode[k, b, 1]
            kv = count * tables.batches[b] * tables.kv_bytes[k, 1]
        else:
            scratch.a[s], scratch.r[s] = tables.mixed[k, b, 0], tables.mixed[k, b, 1]
            kv = (count * tables.batches[b] + 1) * tables.kv_bytes[k, 1]
        room = tables.room[k, only]
        # Room beyond any model would not fit an integer.
        cap = room / (tables.layer_bytes[k] + kv)
        scratch.cap[s] = max(0, int(min(cap, 1e6)))


@compiled
def hopeless(
    count: int, batch: float, tpot_s: float, tables: CostTables, scratch: DeduceScratch, best: float
) -> bool:
    """Whether even layers in fractions, without regard to memory or hops, would not beat `best`.

    Balanced, all stages take I = (L + sum r/a) / sum 1/a; the latency is at least L min a + sum r.
    """
    speed, ahead, rest_s, least = 0.0, 0.0, 0.0, np.inf
    for s in range(count):
        speed += 1.0 / scratch.a[s]
        ahead += scratch.r[s] / scratch.a[s]
        rest_s += scratch.r[s]
        least = min(least, scratch.a[s])
    cycle_s = max(count * (tables.layers + ahead) / speed, tables.layers * least + rest_s)
    # A touch of slack, so that rounding never drops what is as good as the best.
    cycle_s *= 1.0 - 1e-12
    return cycle_s > tpot_s or count * batch / (cycle_s * tables.output_tokens) < best


@compiled
def walk(
    phase: int,
    kinds: Ints,
    count: int,
    b: int,
    path: tuple[float, float, float],
    tables: CostTables,
    scratch: DeduceScratch,
    fixed: bool,
    result: Floats,
    layers: Ints,
) -> None:
    """All splits on the way from least latency to least interval; keeps the best in `result`, `layers`.

    `path` is the sum of the hops' alphas, the sum and the largest of their seconds per byte. When the split
    is `fixed`, it is the one in `layers`.
    """
    load(phase, kinds, count, b, tables, scratch)
    tpot_s = tables.mixed_tpot_s if phase == MIXED else tables.tpot_s
    if phase != PREFILL and hopeless(count, tables.batches[b], tpot_s, tables, scratch, result[0]):
        return
    if not (given(count, layers, scratch) if fixed else fill(count, tables.layers, scratch)):
        return
    batch = tables.batches[b]
    tokens = tables.input_tokens if phase == PREFILL else batch
    if phase == MIXED:
        tokens = batch + tables.chunk_tokens[b]
    sent = tokens * tables.token_bytes
    hops_s = path[0] + sent * path[1]
    wire_s = sent * path[2]
    best_cycle = np.inf
    while True:
        interval_s, latency_s, slowest = wire_s, hops_s, -1
        peak = -1.0
        for s in range(count):
            time = scratch.r[s] + scratch.held[s] * scratch.a[s]
            latency_s += time
            if time > peak:
                peak, slowest = time, s
        interval_s = max(interval_s, peak)
        cycle_s = max(count * interval_s, latency_s)
        if phase == PREFILL:
            rate = 1.0 / interval_s
            share = attained(tables.headroom, interval_s, tables.ttft_s - latency_s)
            _keep(rate * share, rate, latency_s, interval_s, 1.0, share, count, scratch, result, layers)
        elif cycle_s < best_cycle and cycle_s <= tpot_s:
            best_cycle = cycle_s
            rate = count * batch / (cycle_s * tables.output_tokens)
            share, first_s = 1.0, 0.0
            if phase == MIXED:
                first_s = hops_s
                for s in range(count):
                    k = kinds[s]
                    first_s += tables.mixed[k, b, 3] + scratch.held[s] * tables.mixed[k, b, 2]
                service_s = first_s / count
                busy = tables.headroom * min(1.0, rate * service_s)
                share = attained(busy, service_s, tables.ttft_s - first_s)
            _keep(rate * share, rate, first_s, cycle_s, batch, share, count, scratch, result, layers)
        if phase != PREFILL and latency_s >= count * interval_s:
            return  # beyond here the cycle only grows
        if fixed or not relieve(count, slowest, peak, scratch):
            return


@compiled
def _keep(
    goodput: float,
    rate: float,
    latency_s: float,
    service_s: float,
    batch: float,
    share: float,
    count: int,
    scratch: DeduceScratch,
    result: Floats,
    layers: Ints,
) -> None:
    better = goodput > result[0] or (goodput == result[0] and result[1] > 0.0 and latency_s < result[2])
    if better:
        result[0], result[1], result[2] = goodput, rate, latency_s
        result[3], result[4], result[5] = service_s, batch, share
        for s in range(count):
            layers[s] = scratch.held[s]


@compiled
def best_split(
    phase: int,
    kinds: Ints,
    count: int,
    path: tuple[float, float, float],
    tables: CostTables,
    scratch: DeduceScratch,
    fixed: bool,
    above: float,
    result: Floats,
    layers: Ints,
) -> None:
    """The best batch and split of one list of stages, above a goodput; `result[1]` stays 0 if there is none."""
    result[:] = 0.0
    result[0] = above
    if phase == PREFILL:
        walk(phase, kinds, count, 0, path, tables, scratch, fixed, result, layers)
        return
    for b in range(len(tables.batches) - 1, -1, -1):  # large batches are best where they fit
        walk(phase, kinds, count, b, path, tables, scratch, fixed, result, layers)


@compiled
def best_candidate(
    phase: int,
    count: int,
    kinds: Ints,
    counts: Ints,
    paths: Floats,
    tables: CostTables,
    scratch: DeduceScratch,
    tried: tuple[Floats, Ints],
    result: Floats,
    layers: Ints,
) -> int:
    """Which list of stages, of the first `count` rows of `kinds`, is best; -1 when none can do the phase."""
    best = -1
    result[0] = 0.0
    for c in range(count):
        path = (paths[c, 0], paths[c, 1], paths[c, 2])
        best_split(phase, kinds[c], counts[c], path, tables, scratch, False, result[0], tried[0], tried[1])
        if tried[0][1] > 0.0:
            best = c
            for i in range(len(result)):
                result[i] = tried[0][i]
            for s in range(counts[c]):
                layers[s] = tried[1][s]
    return best
