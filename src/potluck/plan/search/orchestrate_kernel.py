"""The compiled inner loops of `plan.search.orchestrate` and `evaluate`, which explain them; letters as there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from potluck.plan.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOLERANCE = 1e-9
ROUNDS = 8
"""How often links that turn out too thin are added as rows."""
CAPPED, OPEN, COMPLETE = 0, 1, 2
"""Places in a result: attained rate within the offered one, without that limit, and 1 if no link is overfull."""


class ConfigurationStore(NamedTuple):
    """Every (group, phase) that was deduced, by number, and the links between nodes."""

    owner: Ints
    """[number, layer]: the node that holds a layer."""
    rate: Floats
    latency_s: Floats
    service_s: Floats
    attained: Floats
    kv_alpha_s: Floats
    kv_s_per_byte: Floats
    layer_bytes: float
    """KV of one layer on the wire."""
    ttft_s: float
    headroom: float


class TransportProgram(NamedTuple):
    """A transportation program in the making: a condensed tableau and what it is made of."""

    tableau: Floats
    """[rows + 1, columns + 1]: constraints, then the objective; the last column is the right-hand side."""
    basis: Ints
    """[rows]: which variable a row stands for: a column, or columns + row for its slack."""
    outside: Ints
    """[columns]: likewise of a column."""
    weight: Floats
    """[columns]: D_ij of a pair, row by row, then of each mixed group."""
    flow: Floats
    """[columns]: the answer."""
    crossing: Ints
    """[nodes, nodes]: layers that cross; kept at 0 between uses."""
    load: Floats
    """[nodes, nodes]: seconds a second that a link is busy."""
    links: Ints
    """[rows]: links that have a row, as from * nodes + to."""


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
                each = flow * store.layer_bytes
                for layer in range(layers):
                    a, b = store.owner[pre[x], layer], store.owner[dec[y], layer]
                    if a != b:
                        program.load[a, b] += each * store.kv_s_per_byte[a, b]


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
        each = store.layer_bytes * store.kv_s_per_byte[a, b]
        for x in range(m):
            for y in range(n):
                count = 0
                for layer in range(layers):
                    if store.owner[pre[x], layer] == a and store.owner[dec[y], layer] == b:
                        count += 1
                tableau[rows + k, x * n + y] = count * each
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
