"""A start made of the best groups that walks have come across, by an integer program.

Columns j are (group, phase)s that were deduced; w_j is the goodput of one (for a decoder: its rate), times the
planned utilisation, with KV that takes no time.

    maximise   F + sum_{j mixed} w_j n_j                n_j whole
    prefill    F <= sum_{j prefill} w_j n_j
    decode     F <= sum_{j decode} w_j n_j
    offered    F + sum_{j mixed} w_j n_j <= R
    gpus_v     sum_j U_jv n_j <= G_v

First with n in fractions: a column whose reduced cost would bring the bound below what is already there cannot be
part of anything better; of the rest the `MOST_COLUMNS` nearest are taken whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from math import comb
from random import Random

import numpy as np

from potluck.plan.allocate.highs import INFINITY, Milp, MilpResult, solve_milp
from potluck.plan.search.deduce import GroupConfiguration
from potluck.plan.search.evaluate import GpuGroup, PoolEvaluator, PoolUse
from potluck.plan.search.kernels import DECODE, MIXED, PREFILL, Floats, Ints, attained
from potluck.plan.search.moves import MAX_NODES, NeighbourMoves, joined, make_state, without
from potluck.plan.search.workload import PoolWorkload

MOST_COLUMNS = 150
MOST_LOOKED_AT = 2000
GAP = 0.01
LENIENCY = 1.05  # How much more than it got a decoder may be counted for.
SAFETY_LIMIT_S = 20.0
"""Such programs take a fraction of a second; a limit that is reached would make the answer depend on the clock."""


def look_around(evaluator: PoolEvaluator, moves: NeighbourMoves, rng: Random) -> None:
    """Deduce groups of whole and half nodes, which walks rarely come across when they span many.

    All of them if they are few; else the same number at random, single nodes first.
    """
    pool = evaluator.deducer.pool
    parts = [sorted({node.gpus, node.gpus // 2} - {0}) for node in pool.nodes]
    having = [i for i, options in enumerate(parts) if options]
    left = MOST_LOOKED_AT
    for size in range(1, min(MAX_NODES, len(having)) + 1):
        several = size < min(MAX_NODES, len(having))
        budget = left // 2 if several else left
        if comb(len(having), size) * 2**size <= budget:
            chosen: Iterable[tuple[int, ...]] = combinations(having, size)
        else:
            chosen = [tuple(sorted(rng.sample(having, size))) for _ in range(budget >> size)]
        for nodes in chosen:
            for counts in product(*(parts[node] for node in nodes)):
                takes = tuple(zip(nodes, counts, strict=True))
                left -= 1
                if moves.possible(takes):
                    for phase in moves.phases:
                        evaluator.number(GpuGroup(takes, phase))


def recombined(
    evaluator: PoolEvaluator, moves: NeighbourMoves, best_per_s: float, learnt: dict[GpuGroup, float]
) -> PoolUse | None:
    """The best state of groups seen so far, links aside; None when it promises no more than `best_per_s`.

    Where the routing of that state gives a decoder less than it was counted for, since the links to it are too
    thin, `learnt` takes down what it got: the next call knows, and mixes something else.
    """
    groups = [
        group
        for group, number in evaluator.numbers.items()
        if number >= 0 and group.phase in moves.phases and moves.possible(group.takes)
    ]
    if not groups:
        return None
    worth = np.array([min(_worth(evaluator, group), learnt.get(group, INFINITY)) for group in groups])
    state = _mixture(evaluator, groups, worth, best_per_s)
    if state is not None:
        _learn(evaluator, state, learnt)
    return state


def _learn(evaluator: PoolEvaluator, pool_use: PoolUse, learnt: dict[GpuGroup, float]) -> None:
    """What decoders get where it is less than their fair part of what prefill replicas hand over."""
    got = [0.0] * len(pool_use.groups)
    for pairing in evaluator.orchestrated(pool_use.groups).pairings:
        got[pairing.target] += pairing.rate_per_s
    worth = [min(_worth(evaluator, group), learnt.get(group, INFINITY)) for group in pool_use.groups]
    sums = [
        sum(w for w, group in zip(worth, pool_use.groups, strict=True) if group.phase == phase)
        for phase in (PREFILL, DECODE)
    ]
    for group, mine, real in zip(pool_use.groups, worth, got, strict=True):
        if group.phase == DECODE and real * LENIENCY < mine * min(1.0, sums[0] / sums[1]):
            learnt[group] = real * LENIENCY


def _mixture(
    evaluator: PoolEvaluator, groups: list[GpuGroup], worth: Floats, best_per_s: float
) -> PoolUse | None:
    pool, offered = evaluator.deducer.pool, evaluator.deducer.work.rate_per_s
    gpus = np.array([float(node.gpus) for node in pool.nodes])
    uses = np.zeros((len(groups), len(gpus)))
    for j, group in enumerate(groups):
        for node, count in group.takes:
            uses[j, node] = count
    phases = np.array([group.phase for group in groups])
    relaxed = _solve(worth, phases, uses, gpus, offered, relax=True)
    if relaxed.row_dual is None or -relaxed.objective <= best_per_s * (1.0 + GAP):
        return None
    loss = _reduced(relaxed.row_dual, worth, phases, uses)
    near = np.argsort(loss, kind="stable")[:MOST_COLUMNS]
    near = near[loss[near] <= -relaxed.objective - best_per_s]
    whole = _solve(worth[near], phases[near], uses[near], gpus, offered, relax=False)
    if whole.x is None:
        return None
    copies = np.rint(whole.x[1:]).astype(int)
    chosen = [groups[j] for j, n in zip(near.tolist(), copies.tolist(), strict=True) for _ in range(n)]
    everything = tuple((i, node.gpus) for i, node in enumerate(pool.nodes) if node.gpus)
    return make_state(chosen, without(everything, joined(group.takes for group in chosen)))


def _worth(evaluator: PoolEvaluator, group: GpuGroup) -> float:
    configuration, work = evaluator.deduced(group), evaluator.deducer.work
    assert configuration is not None
    share = 1.0 if group.phase == DECODE else kv_free_share(work, group.phase, configuration)
    return work.headroom * configuration.rate_per_s * share


def _coefficients(worth: Floats, phases: Ints, uses: Floats) -> Floats:
    """[row, n]: of prefill, decode, offered and the GPUs of every node."""
    return np.vstack(
        [
            np.where(phases == PREFILL, -worth, 0.0),
            np.where(phases == DECODE, -worth, 0.0),
            np.where(phases == MIXED, worth, 0.0),
            uses.T,
        ]
    )


def _solve(
    worth: Floats, phases: Ints, uses: Floats, gpus: Floats, offered: float, *, relax: bool
) -> MilpResult:
    table = _coefficients(worth, phases, uses)
    flow = np.zeros((len(table), 1))
    flow[:3] = 1.0
    table = np.hstack([flow, table])
    row, column = np.nonzero(table)
    size = table.shape[1]
    cost = np.concatenate([[-1.0], np.where(phases == MIXED, -worth, 0.0)])
    upper = np.concatenate([[0.0, 0.0, offered], gpus])
    milp = Milp(
        cost,
        np.zeros(size),
        np.full(size, INFINITY),
        np.arange(size) > 0,
        np.full(len(upper), -INFINITY),
        upper,
        row,
        column,
        table[row, column],
    )
    return solve_milp(milp, time_limit_s=SAFETY_LIMIT_S, relax=relax, gap_rel=GAP)


def _reduced(dual: Floats, worth: Floats, phases: Ints, uses: Floats) -> Floats:
    """How much one copy of each column costs of the relaxed value, at least."""
    cost = np.where(phases == MIXED, -worth, 0.0)
    return np.maximum(cost - dual @ _coefficients(worth, phases, uses), 0.0)


def kv_free_share(work: PoolWorkload, phase: int, group_configuration: GroupConfiguration) -> float:
    """D_j: the share within TTFT if KV took no time; 0 for a decoder, whose requests others count."""
    if phase == PREFILL:
        return float(
            attained(
                work.headroom, group_configuration.service_s, work.slo.ttft_s - group_configuration.latency_s
            )
        )
    return 0.0 if phase == DECODE else group_configuration.attained
