"""The pool search against enumeration and bounds; time limit and determinism."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from papers.peak_costs import PeakCosts
from papers.pool_bound import exact_bound
from search_pools import catalog_node, paper_pool, random_pool, workload

from potluck.core.errors import CapacityError, InputError, UnknownNameError
from potluck.core.values.types import Slo
from potluck.plan.problem import model_demand
from potluck.plan.search.deduce import Takes, deducer
from potluck.plan.search.evaluate import GpuGroup, PoolEvaluator
from potluck.plan.search.moves import clusters, joined, size_of
from potluck.plan.search.tabu import SearchLimits, SearchSettings, search, search_with
from potluck.plan.search.workload import (
    CalibratedCosts,
    Pool,
    PoolNode,
    PoolWorkload,
    uniform_pool,
    workload_of,
)

KINDS = ("A5000", "RTX3090Ti", "A40", "L4")
SHORT = SearchLimits(walks=6)


def small_workload(rate_per_s: float = 40.0, ttft_s: float = 1.0) -> PoolWorkload:
    return workload("Llama-3.1-8B", (1155, 211), rate_per_s, Slo(ttft_s, 0.06))


def partitions(left: tuple[int, ...], top: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """All multisets of groups of at most these GPUs, groups in descending order; GPUs may stay idle."""
    yield []
    for part in product(*(range(n + 1) for n in left)):
        if any(part) and part <= top:
            for more in partitions(tuple(a - b for a, b in zip(left, part, strict=True)), part):
                yield [part, *more]


def best_of_all(evaluator: PoolEvaluator) -> float:
    counts = tuple(node.gpus for node in evaluator.deducer.pool.nodes)
    best = 0.0
    for parts in partitions(counts, counts):
        takes = [tuple((n, c) for n, c in enumerate(part) if c) for part in parts]
        for phases in product(range(3), repeat=len(takes)):
            groups = tuple(sorted(GpuGroup(t, p) for t, p in zip(takes, phases, strict=True)))
            best = max(best, evaluator.score(groups).value)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_search_finds_the_best_of_all_states_on_tiny_pools(seed: int) -> None:
    pool = random_pool(np.random.default_rng(seed), 5, KINDS, largest=3)
    evaluator = PoolEvaluator(deducer(pool, small_workload(), PeakCosts()))
    result = search_with(evaluator, SearchSettings(seed=seed))
    assert result.score.value == pytest.approx(best_of_all(evaluator), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_search_is_within_three_percent_of_the_bound_on_pools_of_twelve_gpus(seed: int) -> None:
    pool = random_pool(np.random.default_rng(100 + seed), 12, KINDS)
    work = small_workload(500.0)
    result = search(pool, work, SearchSettings(seed=seed, timing=PeakCosts()))
    known = 0.97 * result.score.goodput_per_s
    bound = exact_bound(pool, work, PeakCosts(), known_per_s=known, time_limit_s=600.0)
    assert result.score.goodput_per_s <= bound * (1 + 1e-3)
    assert result.score.goodput_per_s >= 0.97 * bound


def test_search_with_the_same_seed_gives_the_same_result_and_a_rising_trace() -> None:
    settings = SearchSettings(seed=3, timing=PeakCosts(), limits=SearchLimits(walks=2))
    first, second = (search(paper_pool(), workload(), settings) for _ in range(2))
    assert (first.state, first.score, first.steps) == (second.state, second.score, second.steps)
    values = [value for _, value in first.trace]
    assert values == sorted(values)
    assert values[-1] == first.score.value
    assert first.converged


def test_search_keeps_its_time_limit() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    result = search(
        paper_pool(),
        workload(),
        SearchSettings(timing=PeakCosts(), limits=SearchLimits(time_limit_s=1.0), clock=clock),
    )
    assert not result.converged
    assert now[0] <= 1.1


def test_search_puts_every_gpu_in_one_group_or_leaves_it_idle() -> None:
    pool = paper_pool()
    result = search(
        pool, workload(), SearchSettings(timing=CalibratedCosts(), limits=SHORT, max_group_gpus=6)
    )
    everything = joined([*(group.takes for group in result.state.groups), result.state.idle])
    assert everything == tuple((i, node.gpus) for i, node in enumerate(pool.nodes))
    assert all(size_of(group.takes) <= 6 for group in result.state.groups)
    assert result.orchestration.rate_per_s <= workload().rate_per_s * (1 + 1e-9)


def test_search_without_the_mixed_phase_has_no_mixed_replicas() -> None:
    settings = SearchSettings(phases=("prefill", "decode"), timing=PeakCosts(), limits=SHORT)
    result = search(paper_pool(), workload(), settings)
    assert {group.phase for group in result.state.groups} == {0, 1}


def test_initial_clusters_join_nodes_over_fast_links() -> None:
    def two(takes: Takes) -> bool:
        return size_of(takes) >= 2

    nodes = tuple(catalog_node(f"n{i}", "A5000", 1) for i in range(4))
    near = [[0.0, 1.0, 1.0, 50.0], [1.0, 0.0, 50.0, 1.0], [1.0, 50.0, 0.0, 1.0], [50.0, 1.0, 1.0, 0.0]]
    pool = Pool(nodes, tuple(map(tuple, near)), ((0.0,) * 4,) * 4)
    assert clusters(pool, two) == [((0, 1), (3, 1)), ((1, 1), (2, 1))]


def test_search_refuses_a_model_that_fits_nowhere_in_one_line() -> None:
    pool = uniform_pool([catalog_node("a", "L4", 1)], 10.0)
    with pytest.raises(CapacityError, match="LLaMA-30B cannot be served on this pool within 3 s"):
        search(pool, workload(), SearchSettings(limits=SHORT))


def test_pool_refuses_invalid_nodes_and_links_in_one_line() -> None:
    nodes = (catalog_node("a", "A40", 2), catalog_node("b", "A40", 2))
    square = ((0.0, 1.0), (1.0, 0.0))
    with pytest.raises(InputError, match="must be 2 x 2"):
        Pool(nodes, ((0.0, 1.0),), square)
    with pytest.raises(InputError, match="a to b must be positive, is 0"):
        Pool(nodes, ((0.0, 0.0), (1.0, 0.0)), square)
    with pytest.raises(InputError, match="same name"):
        Pool((nodes[0], nodes[0]), square, square)
    with pytest.raises(InputError, match="has no GPUs"):
        Pool((), (), ())
    with pytest.raises(InputError, match="has 3 GPUs of 2"):
        PoolNode("a", nodes[0].type, 3)
    pool = Pool(nodes, square, square)
    with pytest.raises(UnknownNameError, match="unknown 'c'"):
        pool.without({"c": 1})
    with pytest.raises(InputError, match="cannot lose 3 GPUs of 2"):
        pool.without({"a": 3})


def test_demand_becomes_a_workload_with_the_same_mean_tokens() -> None:
    from potluck.catalog import models
    from potluck.core.values.types import LengthBin, Traffic

    model = models.model("Llama-3.1-8B")
    traffic = Traffic("chat", 5.0, (LengthBin(300, 250, 0.5), LengthBin(2000, 100, 0.5)))
    work = workload_of(model_demand("chat", model, Slo(1.0, 0.05), traffic))
    assert (work.input_tokens, work.output_tokens, work.rate_per_s) == (1150, 175, 5.0)
