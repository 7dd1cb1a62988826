"""Bounds of the pool search against enumeration and the allocation program."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from papers.peak_costs import PeakCosts
from papers.pool_bound import _fit, _thresholds, class_bound, exact_bound, groups_of
from search_pools import catalog_node, random_pool, workload

from papers import pool_bound as bound
from potluck.core.values.types import Slo
from potluck.plan.allocate.program import DemandBucket, FlowProgram, ModelColumns, NodeSupply
from potluck.plan.allocate.solve import solve
from potluck.plan.search.deduce import deducer
from potluck.plan.search.kernels import DECODE, MIXED, PREFILL
from potluck.plan.search.tabu import SearchLimits, SearchSettings, search
from potluck.plan.search.workload import Pool, PoolWorkload, uniform_pool

KINDS = ("A5000", "RTX3090Ti", "A40", "L4")
LOOSE = Slo(1e4, 0.06)  # Nobody misses the first token, so attained and served are the same.


def small_pool_workload(rate_per_s: float, slo: Slo | None = None) -> PoolWorkload:
    return workload("Llama-3.1-8B", (1155, 211), rate_per_s, slo or Slo(1.0, 0.06))


def allocated_per_s(pool: Pool, work: PoolWorkload) -> float:
    """The most that the allocation program serves: GPUs of each node as nodes to rent, groups as templates."""
    source = deducer(pool, work, PeakCosts())
    uses, rates = [], []
    for takes in groups_of(pool):
        for phase in (PREFILL, DECODE, MIXED):
            result = source.best(takes, phase)
            if result is not None:
                row = np.zeros(len(pool.nodes), np.uint8)
                for node, count in takes:
                    row[node] = count
                uses.append(row)
                rates.append([result.rate_per_s if phase == index else 0.0 for index in range(3)])
    table = np.array(rates)
    node_supply = NodeSupply(
        ("pool",),
        tuple(node.name for node in pool.nodes),
        np.ones((1, len(pool.nodes))),
        np.array([[node.gpus for node in pool.nodes]]),
    )
    bucket = DemandBucket("all", work.rate_per_s, 0.0)
    sides = (table[:, [phase]] for phase in (PREFILL, DECODE, MIXED))
    model = ModelColumns("model", (bucket,), np.array(uses), *sides)
    allocation = solve(FlowProgram(node_supply, (model,), headroom=work.headroom), time_limit_s=600.0)
    assert allocation.shortfall is not None
    assert allocation.shortfall.fraction_bound == pytest.approx(allocation.shortfall.fraction, rel=1e-3)
    return allocation.shortfall.fraction * work.rate_per_s


@pytest.mark.parametrize("seed", range(3))
def test_exact_bound_of_a_pool_equals_the_allocation_optimum(seed: int) -> None:
    """Two programs, written apart, for one question: the pool's most where links and TTFT do not bind."""
    rng = np.random.default_rng(seed)
    sizes = (2, 1, int(rng.integers(1, 4)))
    members = [catalog_node(f"n{i}", str(rng.choice(KINDS)), size) for i, size in enumerate(sizes)]
    pool = uniform_pool(members, 1e4)
    bound = exact_bound(pool, small_pool_workload(1e3, LOOSE), PeakCosts(), time_limit_s=600.0)
    assert allocated_per_s(pool, small_pool_workload(2 * bound, LOOSE)) == pytest.approx(bound, rel=2e-3)


@pytest.mark.parametrize("seed", range(3))
def test_search_reaches_the_bound_when_links_do_not_bind(seed: int) -> None:
    rng = np.random.default_rng(20 + seed)
    pool = uniform_pool([catalog_node(f"n{i}", str(rng.choice(KINDS)), 2) for i in range(3)], 1e4)
    work = small_pool_workload(1e3, LOOSE)
    result = search(pool, work, SearchSettings(seed=seed, timing=PeakCosts(), limits=SearchLimits(walks=8)))
    assert result.score.goodput_per_s == pytest.approx(exact_bound(pool, work, PeakCosts()), rel=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_bound_with_a_known_value_or_fewer_columns_is_still_valid(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, work = (
        random_pool(np.random.default_rng(40 + seed), 7, KINDS, largest=3),
        small_pool_workload(500.0),
    )
    plain = exact_bound(pool, work, PeakCosts(), time_limit_s=600.0)
    known = exact_bound(pool, work, PeakCosts(), known_per_s=0.9 * plain, time_limit_s=600.0)
    assert known == pytest.approx(plain, rel=1e-3)
    assert exact_bound(pool, work, PeakCosts(), known_per_s=2 * plain) <= 2 * plain
    assert class_bound(pool, work, PeakCosts(), time_limit_s=600.0) >= plain * (1 - 1e-3)
    monkeypatch.setattr(bound, "MOST_COLUMNS", 10)
    assert exact_bound(pool, work, PeakCosts(), time_limit_s=600.0) >= plain * (1 - 1e-3)


@given(st.integers(1, 9), st.data())
def test_knapsack_rows_hold_for_every_partition_of_a_node(size: int, data: st.DataObject) -> None:
    parts, left = [], size
    while left:
        part = data.draw(st.integers(1, left))
        parts.append(part)
        left -= part
    for k in _thresholds(size):
        assert sum(_fit(part, size, k) for part in parts) <= 1.0 + 1e-12
