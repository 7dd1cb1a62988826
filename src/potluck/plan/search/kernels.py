"""The compiled inner loop of `plan.search.deduce`, which explains it; letters as there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from potluck.native.machine_code import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PREFILL, DECODE, MIXED = 0, 1, 2
GOODPUT, RATE, LATENCY_S, SERVICE_S, BATCH, SHARE = range(6)  # Places in a result.


class CostTables(NamedTuple):
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
    token_bytes: float  # Activations of one token between two stages.
    ttft_s: float  # What is left of the objective without the hand-over of KV.
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


TOLERANCE = 1e-9
ROUNDS = 8  # How often links that turn out too thin are added as rows.
CAPPED, OPEN, COMPLETE = 0, 1, 2
"""Places in a result: attained rate within the offered one, without that limit, and 1 if no link is overfull."""


class ConfigurationStore(NamedTuple):
    """Every (group, phase) that was deduced, by number, and the links between nodes."""

    owner: Ints  # [number, layer]: the node that holds a layer.
    rate: Floats
    latency_s: Floats
    service_s: Floats
    attained: Floats
    kv_alpha_s: Floats
    kv_s_per_byte: Floats
    layer_bytes: float  # KV of one layer on the wire.
    ttft_s: float
    headroom: float


class TransportProgram(NamedTuple):
    """A transportation program in the making: a condensed tableau and what it is made of."""

    tableau: Floats
    """[rows + 1, columns + 1]: constraints, then the objective; the last column is the right-hand side."""
    basis: Ints  # [rows]: which variable a row stands for: a column, or columns + row for its slack.
    outside: Ints  # [columns]: likewise of a column.
    weight: Floats  # [columns]: D_ij of a pair, row by row, then of each mixed group.
    flow: Floats  # [columns]: the answer.
    crossing: Ints  # [nodes, nodes]: layers that cross; kept at 0 between uses.
    load: Floats  # [nodes, nodes]: seconds a second that a link is busy.
    links: Ints  # [rows]: links that have a row, as from * nodes + to.


@compiled
def pivot(tableau: Floats, rows: int, columns: int, r: int, c: int) -> None:
    """Exchange the variable of row r with that of column c."""
    p = 1.0 / tableau[r, c]
    for j in range(columns + 1):
        tableau[r, j] *= p
    tableau[r, c] = p
    for i in range(rows + 1):
        if i != r:
            factor = tableau[i, c]
            if factor != 0.0:
                for j in range(columns + 1):
                    tableau[i, j] -= factor * tableau[r, j]
                tableau[i, c] = -factor * p


@compiled
def simplex(tableau: Floats, basis: Ints, outside: Ints, rows: int, columns: int) -> None:
    """Maximise c.x, A x <= b, x >= 0 with b >= 0, in place: x = 0 is a start, so there is one phase.

    The steepest column enters; after many steps without end, the first one does (Bland), which ends surely.
    """
    for j in range(columns):
        outside[j] = j
    for i in range(rows):
        basis[i] = columns + i
    steps = 0
    patience = 20 * (rows + columns)
    while True:
        c, steepest = -1, TOLERANCE
        for j in range(columns):
            gain = tableau[rows, j]
            if steps < patience:
                if gain > steepest:
                    c, steepest = j, gain
            elif gain > TOLERANCE and (c < 0 or outside[j] < outside[c]):
                c = j
        if c < 0 or steps > 10 * patience:
            return
        r, least = -1, np.inf
        for i in range(rows):
            if tableau[i, c] > TOLERANCE:
                ratio = tableau[i, columns] / tableau[i, c]
                if ratio < least - 1e-15 or (ratio <= least and r >= 0 and basis[i] < basis[r]):
                    r, least = i, ratio
        if r < 0:
            return  # unbounded; cannot be, every column has a capacity
        pivot(tableau, rows, columns, r, c)
        basis[r], outside[c] = outside[c], basis[r]
        steps += 1


@compiled
def kv_s(i: int, j: int, store: ConfigurationStore, crossing: Ints) -> float:
    """Seconds from the end of prefill until all KV is there: alpha-beta on each link used, side by side."""
    layers = store.owner.shape[1]
    for layer in range(layers):
        crossing[store.owner[i, layer], store.owner[j, layer]] += 1
    slowest = 0.0
    for layer in range(layers):
        a, b = store.owner[i, layer], store.owner[j, layer]
        count = crossing[a, b]
        if count:
            time = store.kv_alpha_s[a, b] + count * store.layer_bytes * store.kv_s_per_byte[a, b]
            slowest = max(slowest, time)
            crossing[a, b] = 0
    return slowest


@compiled
def weigh(pre: Ints, dec: Ints, mix: Ints, store: ConfigurationStore, program: TransportProgram) -> None:
    """D_ij: the share of requests within TTFT when i prefills at the planned utilisation and j decodes."""
    h = store.headroom
    for x in range(len(pre)):
        i = pre[x]
        for y in range(len(dec)):
            slack_s = store.ttft_s - store.latency_s[i] - kv_s(i, dec[y], store, program.crossing)
            share = 0.0
            if slack_s >= 0.0:
                share = 1.0 - h * np.exp(-2.0 * (1.0 - h) * slack_s / store.service_s[i])
            program.weight[x * len(dec) + y] = share
    for z in range(len(mix)):
        program.weight[len(pre) * len(dec) + z] = store.attained[mix[z]]


@compiled
def load_links(pre: Ints, dec: Ints, store: ConfigurationStore, program: TransportProgram) -> None:
    """How busy the answer keeps every link between two nodes."""
    program.load[:] = 0.0
    layers = store.owner.shape[1]
    for x in range(len(pre)):
        for y in range(len(dec)):
            flow = program.flow[x * len(dec) + y]
            if flow > 0.0:
                item = flow * store.layer_bytes
                for layer in range(layers):
                    a, b = store.owner[pre[x], layer], store.owner[dec[y], layer]
                    if a != b:
                        program.load[a, b] += item * store.kv_s_per_byte[a, b]


@compiled
def state(
    pre: Ints,
    dec: Ints,
    mix: Ints,
    offered: float,
    linked: int,
    store: ConfigurationStore,
    program: TransportProgram,
) -> int:
    """Write the program down; returns its number of rows."""
    m, n, q = len(pre), len(dec), len(mix)
    columns = m * n + q
    rows = m + n + q + (1 if offered > 0.0 else 0)
    tableau = program.tableau
    tableau[: rows + linked + 1, : columns + 1] = 0.0
    for x in range(m):
        tableau[x, columns] = store.headroom * store.rate[pre[x]]
    for y in range(n):
        tableau[m + y, columns] = store.headroom * store.rate[dec[y]]
    for z in range(q):
        tableau[m + n + z, columns] = store.headroom * store.rate[mix[z]]
        tableau[m + n + z, m * n + z] = 1.0
    for x in range(m):
        for y in range(n):
            column = x * n + y
            if program.weight[column] > 0.0:  # a useless pair stays out: its column gains nothing
                tableau[x, column] = tableau[m + y, column] = 1.0
    if offered > 0.0:
        tableau[rows - 1, :columns] = 1.0
        tableau[rows - 1, columns] = offered
    nodes = program.load.shape[0]
    layers = store.owner.shape[1]
    for k in range(linked):
        a, b = program.links[k] // nodes, program.links[k] % nodes
        item = store.layer_bytes * store.kv_s_per_byte[a, b]
        for x in range(m):
            for y in range(n):
                count = 0
                for layer in range(layers):
                    if store.owner[pre[x], layer] == a and store.owner[dec[y], layer] == b:
                        count += 1
                tableau[rows + k, x * n + y] = count * item
        tableau[rows + k, columns] = 1.0
    rows += linked
    for column in range(columns):
        tableau[rows, column] = program.weight[column]
    return rows


@compiled
def optimum(
    pre: Ints,
    dec: Ints,
    mix: Ints,
    offered: float,
    store: ConfigurationStore,
    program: TransportProgram,
    result: Floats,
) -> float:
    """The best flow with all links within their bandwidth; links get rows once they turn out too thin."""
    columns = len(pre) * len(dec) + len(mix)
    nodes = program.load.shape[0]
    linked = 0
    value: float = 0.0
    worst: float = 1.0
    most = len(program.links)
    for _ in range(ROUNDS):
        rows = state(pre, dec, mix, offered, linked, store, program)
        simplex(program.tableau, program.basis, program.outside, rows, columns)
        value = -program.tableau[rows, columns]
        program.flow[:columns] = 0.0
        for i in range(rows):
            if program.basis[i] < columns:
                program.flow[program.basis[i]] = max(0.0, program.tableau[i, columns])
        load_links(pre, dec, store, program)
        before = linked
        worst = 0.0
        for a in range(nodes):
            for b in range(nodes):
                worst = max(worst, program.load[a, b])
                if program.load[a, b] > 1.0 + 1e-7 and linked < most:
                    program.links[linked] = a * nodes + b
                    linked += 1
        if worst <= 1.0 + 1e-7:
            return value
        if linked == before:
            break
    # Too many links at once: keep to what fits.
    result[COMPLETE] = 0.0
    for column in range(columns):
        program.flow[column] /= worst
    return value / worst


@compiled
def evaluate_weighed(
    pre: Ints,
    dec: Ints,
    mix: Ints,
    offered: float,
    store: ConfigurationStore,
    program: TransportProgram,
    result: Floats,
) -> None:
    """The same where `program.weight` has D already."""
    result[:] = 0.0
    result[COMPLETE] = 1.0
    if len(pre) * len(dec) + len(mix) == 0:
        return
    columns = len(pre) * len(dec) + len(mix)
    result[OPEN] = optimum(pre, dec, mix, 0.0, store, program, result)
    result[CAPPED] = result[OPEN]
    total = 0.0
    for column in range(columns):
        total += program.flow[column]
    if total > offered:
        result[CAPPED] = optimum(pre, dec, mix, offered, store, program, result)


@compiled
def evaluate(
    pre: Ints,
    dec: Ints,
    mix: Ints,
    offered: float,
    store: ConfigurationStore,
    program: TransportProgram,
    result: Floats,
) -> None:
    """Attained rates of a set of groups; the flow of the first stays in `program.flow`."""
    weigh(pre, dec, mix, store, program)
    evaluate_weighed(pre, dec, mix, offered, store, program, result)


class StageCuts(NamedTuple):
    """How the nodes of a pool may be cut, and what lies between them."""

    ways: Ints  # [node, GPUs]: so many ways to cut them into stages.
    stages: Ints  # [node, GPUs, way]
    tp: Ints  # [node, GPUs, way, stage]
    kind: Ints  # [node, tp]: the row of a stage in the cost tables.
    hop_s: Floats  # [node, node]: a prompt from a stage to the next.
    alpha_s: Floats  # [node, node]: a token's way back, and the constant part of a hop.
    beta_s: Floats  # [node, node]: seconds per byte of a hop.
    equal: bool = False  # Whether all stages of a candidate must be of one degree; each way then is.


class StageListing(NamedTuple):
    node: Ints
    tp: Ints
    kind: Ints
    stages: Ints  # [candidate]: how many it has.
    path: Floats  # [candidate, 3]: see `deduce_kernel.walk`.


class ListingScratch(NamedTuple):
    """What the listing writes on; k is the number of nodes of a group."""

    way: Ints  # [k]: the present way of each node.
    used: Ints  # [k]: stages of each node that are placed.
    stages: Ints  # [k]: stages of each node.
    key: Ints  # [slot, 2]: nodes with their stages whose best order is known, packed; 0 in a free slot.
    order: Ints  # [slot, stage]: that order, as places among the group's nodes.
    known: Ints  # [1]: slots in use.
    hop_s: Floats
    back_s: Floats
    time_s: Floats
    turn: Ints


@compiled
def best_path(counts: Ints, hop_s: Floats, back_s: Floats, time_s: Floats, turn: Ints, path: Ints) -> float:
    """The order of stages, so many of each of k nodes, whose hops and way back take least; see `deduce`.

    time_s[left, last] is the least time to visit what is left after `last`, turn[left, last] the next node;
    `left` counts the stages of each node in mixed radix, so smaller numbers are known before larger ones.
    """
    k = len(counts)
    total, all_left = 0, 1
    for i in range(k):
        total += counts[i]
        all_left *= counts[i] + 1
    best = np.inf
    for first in range(k):
        for left in range(all_left):
            for last in range(k):
                time_s[left, last] = np.inf if left else back_s[last, first]
                radix, rest = 1, left
                for i in range(k):
                    if rest % (counts[i] + 1):
                        way_s = hop_s[last, i] + time_s[left - radix, i]
                        if way_s < time_s[left, last]:
                            time_s[left, last], turn[left, last] = way_s, i
                    rest //= counts[i] + 1
                    radix *= counts[i] + 1
        radix = 1
        for i in range(first):
            radix *= counts[i] + 1
        left, last = all_left - 1 - radix, first
        if time_s[left, last] < best:
            best = time_s[left, last]
            path[0] = first
            for step in range(1, total):
                last = turn[left, last]
                path[step] = last
                radix = 1
                for i in range(last):
                    radix *= counts[i] + 1
                left -= radix
    return best


@compiled
def list_candidates(
    nodes: Ints, gpus: Ints, most: int, cuts: StageCuts, scratch: ListingScratch, listing: StageListing
) -> int:
    """Every cut of so many GPUs of these nodes into at most `most` stages; returns how many there are."""
    k = len(nodes)
    for i in range(k):
        scratch.way[i] = 0
        for j in range(k):
            scratch.hop_s[i, j] = cuts.hop_s[nodes[i], nodes[j]]
            scratch.back_s[i, j] = cuts.alpha_s[nodes[i], nodes[j]]
    listed = 0
    while True:
        total = 0
        for i in range(k):
            scratch.stages[i] = cuts.stages[nodes[i], gpus[i], scratch.way[i]]
            total += scratch.stages[i]
        if total <= most and (not cuts.equal or of_one_degree(nodes, gpus, cuts, scratch)):
            write(nodes, gpus, total, known_order(nodes, total, scratch), listed, cuts, scratch, listing)
            listed += 1
        i = k - 1  # the next combination of ways, the last node's first
        while i >= 0:
            scratch.way[i] += 1
            if scratch.way[i] < cuts.ways[nodes[i], gpus[i]]:
                break
            scratch.way[i] = 0
            i -= 1
        if i < 0:
            return listed


@compiled
def of_one_degree(nodes: Ints, gpus: Ints, cuts: StageCuts, scratch: ListingScratch) -> bool:
    """Whether the present ways of all nodes are of the same degree."""
    unlike, first = 0, cuts.tp[nodes[0], gpus[0], scratch.way[0], 0]
    for i in range(1, len(nodes)):
        unlike += cuts.tp[nodes[i], gpus[i], scratch.way[i], 0] != first
    return unlike == 0


@compiled
def known_order(nodes: Ints, total: int, scratch: ListingScratch) -> int:
    """The slot with the best order for the present numbers of stages; solved when it is a new question.

    Groups ask the same questions again and again, so the answers are kept, in a table with open addressing
    that is emptied when it fills up.
    """
    k, slots = len(nodes), len(scratch.key)
    first, second = 0, 0
    for i in range(k):
        part = (nodes[i] << 4) + scratch.stages[i]
        if i < 4:
            first = (first << 15) + part
        else:
            second = (second << 15) + part
    slot = ((first * 1000003) ^ (second * 10007)) & 0x7FFFFFFFFFFFFFFF
    slot = (slot ^ (slot >> 17)) % slots
    while scratch.key[slot, 0] != 0:
        if scratch.key[slot, 0] == first and scratch.key[slot, 1] == second:
            return slot
        slot = (slot + 1) % slots
    if scratch.known[0] >= slots // 2:
        scratch.key[:] = 0
        scratch.known[0] = 0
    scratch.key[slot, 0], scratch.key[slot, 1] = first, second
    scratch.known[0] += 1
    if k == 1:
        scratch.order[slot, :total] = 0
    else:
        best_path(
            scratch.stages[:k],
            scratch.hop_s,
            scratch.back_s,
            scratch.time_s,
            scratch.turn,
            scratch.order[slot],
        )
    return slot


@compiled
def write(
    nodes: Ints,
    gpus: Ints,
    total: int,
    place: int,
    row: int,
    cuts: StageCuts,
    scratch: ListingScratch,
    listing: StageListing,
) -> None:
    """The present candidate, its stages in order; those of one node as they come."""
    for i in range(len(nodes)):
        scratch.used[i] = 0
    alphas, betas, thinnest = 0.0, 0.0, 0.0
    for s in range(total):
        i = scratch.order[place, s]
        node = nodes[i]
        tp = cuts.tp[node, gpus[i], scratch.way[i], scratch.used[i]]
        scratch.used[i] += 1
        listing.node[row, s], listing.tp[row, s], listing.kind[row, s] = node, tp, cuts.kind[node, tp]
        if s > 0:
            before = listing.node[row, s - 1]
            alphas += cuts.alpha_s[before, node]
            betas += cuts.beta_s[before, node]
            thinnest = max(thinnest, cuts.beta_s[before, node])
    if total > 1:
        alphas += cuts.alpha_s[listing.node[row, total - 1], listing.node[row, 0]]
    listing.stages[row] = total
    listing.path[row, 0], listing.path[row, 1], listing.path[row, 2] = alphas, betas, thinnest
