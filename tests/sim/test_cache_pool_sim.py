"""Pooled prefix caches of a region in simulation."""

from __future__ import annotations

import numpy as np
from sim_fleets import (
    MODEL,
    PrefixBlocks,
    closed_plan,
    combo,
    decode_only,
    flow_plan,
    load,
    prefill_only,
    problem,
    workload,
)

from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.sim.run import simulate

SIZE = 64
POOLED, APART = Policy(), Policy(pool_caches=False)
FLOW = flow_plan((prefill_only(), "east", 2), (decode_only(), "east", 3))
COMBOS = closed_plan((combo(1, 3), "east", 2))


def shared_prefixes(count: int, rate_per_s: float, groups: int, shared: int, own: int):  # type: ignore[no-untyped-def]
    """Prompts that begin in one of a few ways and end each in its own."""
    rng = np.random.default_rng(0)
    arrival_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    number, group = (shared + own) // SIZE, rng.integers(0, groups, count)
    ids = [
        int(group[request]) * 100_000 + place if place < shared // SIZE else 10**7 + request * 1000 + place
        for request in range(count)
        for place in range(number)
    ]
    held = PrefixBlocks(np.arange(count + 1) * number, np.array(ids, np.int64), SIZE)
    outputs = rng.integers(20, 60, count)
    return workload(MODEL, arrival_s, np.full(count, shared + own), outputs, blocks=held)


def computed(plan: Plan, policy: Policy) -> tuple[int, int]:
    """Prompt tokens that were computed, and requests answered."""
    result = simulate(problem(plan), shared_prefixes(200, 16.0, 8, 6400, 320), policy)
    answered = int(np.isfinite(np.array(result.records.finish_s)).sum())
    return sum(replica.prefill_tokens for replica in result.replicas), answered


def test_pooled_region_cache_computes_a_shared_prefix_once() -> None:
    for plan in (COMBOS, FLOW):
        (pooled, all_of_them), (apart, as_many) = computed(plan, POOLED), computed(plan, APART)
        assert all_of_them == as_many == 200
        # Eight prefixes at least once, and what is new; some are asked for again before anybody holds them.
        assert 8 * 6400 + 200 * 320 <= pooled < apart


def test_pooled_cache_changes_nothing_without_shared_prefixes() -> None:
    for plan in (COMBOS, FLOW):
        one, other = (simulate(problem(plan), load(80, 8.0), policy) for policy in (POOLED, APART))
        assert np.array_equal(one.records.finish_s, other.records.finish_s, equal_nan=True)
