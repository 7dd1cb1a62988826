"""Moves and climbs of the pool search."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from papers.peak_costs import PeakCosts
from search_pools import paper_pool, random_pool, workload

from potluck.core.values.types import Slo
from potluck.plan.search import deduce
from potluck.plan.search.deduce import deducer
from potluck.plan.search.evaluate import GpuGroup, PoolEvaluator, PoolUse
from potluck.plan.search.moves import (
    NeighbourMoves,
    all_moves,
    all_near,
    dealt_state,
    flips_only,
    joined,
    kinds_of,
    make_state,
    size_of,
    swap,
)
from potluck.plan.search.tabu import SearchLimits, SearchSettings, TabuSearch
from potluck.plan.search.workload import Pool, PoolWorkload

KINDS = ("A5000", "RTX3090Ti", "A40", "L4")
PHASES = (0, 1, 2)


def search_setting(seed: int) -> tuple[Pool, PoolWorkload, PoolEvaluator, NeighbourMoves]:
    pool = random_pool(np.random.default_rng(seed), 10, KINDS)
    work = workload("Llama-3.1-8B", (1155, 211), 40.0, Slo(1.0, 0.06))
    return pool, work, PoolEvaluator(deducer(pool, work, PeakCosts())), all_moves(pool, work, PHASES, 6)


def all_gpus(pool: Pool) -> tuple[tuple[int, int], ...]:
    return tuple((i, node.gpus) for i, node in enumerate(pool.nodes) if node.gpus)


def gpus_of(state: PoolUse) -> tuple[tuple[int, int], ...]:
    return joined([*(group.takes for group in state.groups), state.idle])


@pytest.mark.parametrize("seed", range(8))
def test_search_neighbours_keep_all_gpus_and_the_group_limits(seed: int) -> None:
    pool, _, evaluator, moves = search_setting(seed)
    rng = Random(seed)
    state = dealt_state(evaluator, PHASES, rng, kinds_of(pool), 6)
    assert gpus_of(state) == all_gpus(pool)
    for item in all_near(moves, state, rng):
        assert gpus_of(item) == all_gpus(pool)
        assert all(size_of(group.takes) <= 6 and moves.possible(group.takes) for group in item.groups)
        assert item.groups == tuple(sorted(item.groups))


@pytest.mark.parametrize("seed", range(4))
def test_climb_ends_where_no_single_move_is_better(seed: int) -> None:
    pool, _, evaluator, moves = search_setting(seed)
    hunt = TabuSearch(evaluator, moves, SearchSettings(seed=seed, timing=PeakCosts(), limits=SearchLimits()))
    start = dealt_state(evaluator, PHASES, hunt.rng, kinds_of(pool), 6)
    hunt._climb(start, evaluator.score(start.groups).value)
    top = hunt.best or start
    value = evaluator.score(top.groups).value
    best = max(evaluator.score(item.groups).value for item in all_near(moves, top, Random(0)))
    assert best <= value + 1e-12


def test_swapping_equal_nodes_twice_restores_the_state() -> None:
    pool, work = paper_pool(), workload()
    moves = all_moves(pool, work, PHASES, pool.gpus)
    assert moves.alike == ((0, 1), (2, 3), (5, 6))
    evaluator = PoolEvaluator(deducer(pool, work, PeakCosts()))
    state = dealt_state(evaluator, PHASES, Random(4), kinds_of(pool), pool.gpus)
    for seed in range(10):
        once = swap(moves, state, Random(seed))
        assert once is not None
        assert swap(moves, once, Random(seed)) == state
        # All links of this pool are alike, so like nodes are worth the same.
        assert evaluator.score(once.groups).value == pytest.approx(evaluator.score(state.groups).value)


def test_order_cache_at_capacity_does_not_change_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, work, evaluator, _ = search_setting(3)
    monkeypatch.setattr(deduce, "ORDERS", 4)
    forgetful = deducer(pool, work, PeakCosts())
    rng = Random(1)
    for _ in range(60):
        counts = [rng.randint(0, node.gpus) for node in pool.nodes]
        takes = tuple((i, count) for i, count in enumerate(counts) if count)
        if takes:
            for phase in PHASES:
                assert forgetful.best(takes, phase) == evaluator.deducer.best(takes, phase)


def test_flip_only_moves_keep_the_groups_of_the_state() -> None:
    """Light rescheduling names groups by places that may lie beyond the nodes: looking one up would break."""
    pool, work = paper_pool(), workload()
    moves = flips_only(pool, work, (0, 1, 2))
    places = len(pool.nodes) + 3
    state = make_state([GpuGroup(((place, 1),), place % 3) for place in range(places)], ())
    near = list(all_near(moves, state, Random(0)))
    assert len(near) == 2 * places
    assert all({g.takes for g in item.groups} == {g.takes for g in state.groups} for item in near)
