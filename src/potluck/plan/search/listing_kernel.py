"""The compiled listing of a group's candidates: every cut into stages, in its best order. `deduce` explains it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from potluck.plan.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class StageCuts(NamedTuple):
    """How the nodes of a pool may be cut, and what lies between them."""

    ways: Ints
    """[node, GPUs]: so many ways to cut them into stages."""
    stages: Ints
    """[node, GPUs, way]"""
    tp: Ints
    """[node, GPUs, way, stage]"""
    kind: Ints
    """[node, tp]: the row of a stage in the cost tables."""
    hop_s: Floats
    """[node, node]: a prompt from a stage to the next."""
    alpha_s: Floats
    """[node, node]: a token's way back, and the constant part of a hop."""
    beta_s: Floats
    """[node, node]: seconds per byte of a hop."""


class StageListing(NamedTuple):
    """Candidates, one a row: the node, degree and kind of each stage."""

    node: Ints
    tp: Ints
    kind: Ints
    stages: Ints
    """[candidate]: how many it has."""
    path: Floats
    """[candidate, 3]: see `deduce_kernel.walk`."""


class ListingScratch(NamedTuple):
    """What the listing writes on; k is the number of nodes of a group."""

    way: Ints
    """[k]: the present way of each node."""
    used: Ints
    """[k]: stages of each node that are placed."""
    stages: Ints
    """[k]: stages of each node."""
    key: Ints
    """[slot, 2]: nodes with their stages whose best order is known, packed; 0 in a free slot."""
    order: Ints
    """[slot, stage]: that order, as places among the group's nodes."""
    known: Ints
    """[1]: slots in use."""
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
    nodes: Ints, gpus: Ints, most: int, cuts: StageCuts, desk: ListingScratch, out: StageListing
) -> int:
    """Every cut of so many GPUs of these nodes into at most `most` stages; returns how many there are."""
    k = len(nodes)
    for i in range(k):
        desk.way[i] = 0
        for j in range(k):
            desk.hop_s[i, j] = cuts.hop_s[nodes[i], nodes[j]]
            desk.back_s[i, j] = cuts.alpha_s[nodes[i], nodes[j]]
    listed = 0
    while True:
        total = 0
        for i in range(k):
            desk.stages[i] = cuts.stages[nodes[i], gpus[i], desk.way[i]]
            total += desk.stages[i]
        if total <= most:
            write(nodes, gpus, total, known_order(nodes, total, desk), listed, cuts, desk, out)
            listed += 1
        i = k - 1  # the next combination of ways, the last node's first
        while i >= 0:
            desk.way[i] += 1
            if desk.way[i] < cuts.ways[nodes[i], gpus[i]]:
                break
            desk.way[i] = 0
            i -= 1
        if i < 0:
            return listed


@compiled
def known_order(nodes: Ints, total: int, desk: ListingScratch) -> int:
    """The slot with the best order for the present numbers of stages; solved when it is a new question.

    Groups ask the same questions again and again, so the answers are kept, in a table with open addressing
    that is emptied when it fills up.
    """
    k, slots = len(nodes), len(desk.key)
    first, second = 0, 0
    for i in range(k):
        part = (nodes[i] << 4) + desk.stages[i]
        if i < 4:
            first = (first << 15) + part
        else:
            second = (second << 15) + part
    slot = ((first * 1000003) ^ (second * 10007)) & 0x7FFFFFFFFFFFFFFF
    slot = (slot ^ (slot >> 17)) % slots
    while desk.key[slot, 0] != 0:
        if desk.key[slot, 0] == first and desk.key[slot, 1] == second:
            return slot
        slot = (slot + 1) % slots
    if desk.known[0] >= slots // 2:
        desk.key[:] = 0
        desk.known[0] = 0
    desk.key[slot, 0], desk.key[slot, 1] = first, second
    desk.known[0] += 1
    if k == 1:
        desk.order[slot, :total] = 0
    else:
        best_path(desk.stages[:k], desk.hop_s, desk.back_s, desk.time_s, desk.turn, desk.order[slot])
    return slot


@compiled
def write(
    nodes: Ints,
    gpus: Ints,
    total: int,
    place: int,
    row: int,
    cuts: StageCuts,
    desk: ListingScratch,
    out: StageListing,
) -> None:
    """The present candidate, its stages in order; those of one node as they come."""
    for i in range(len(nodes)):
        desk.used[i] = 0
    alphas, betas, thinnest = 0.0, 0.0, 0.0
    for s in range(total):
        i = desk.order[place, s]
        node = nodes[i]
        tp = cuts.tp[node, gpus[i], desk.way[i], desk.used[i]]
        desk.used[i] += 1
        out.node[row, s], out.tp[row, s], out.kind[row, s] = node, tp, cuts.kind[node, tp]
        if s > 0:
            before = out.node[row, s - 1]
            alphas += cuts.alpha_s[before, node]
            betas += cuts.beta_s[before, node]
            thinnest = max(thinnest, cuts.beta_s[before, node])
    if total > 1:
        alphas += cuts.alpha_s[out.node[row, total - 1], out.node[row, 0]]
    out.stages[row] = total
    out.path[row, 0], out.path[row, 1], out.path[row, 2] = alphas, betas, thinnest
