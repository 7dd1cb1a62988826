"""Prompts that wait in the prefill cluster keep more of them at home, though the link has room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from sim_fleets import LONGEST, MODEL, closed_plan, decode_only, mixed, prefill_only, problem, workload

from potluck.core.state.policy import Policy
from potluck.core.values.plan import BucketCapacity, Deployment, LengthBucket, Plan, PlannedFlow, PlannedShare
from potluck.sim.run import simulate

SHORT = 4000


def divided() -> Plan:
    """Prompts above 4,000 tokens are prefilled in the west; two replicas in the east prefill the others."""
    prefill = replace(
        prefill_only(),
        capacity=(BucketCapacity(0, 20.0, 0.0, 0.0, 0.2, 0.03), BucketCapacity(1, 5.0, 0.0, 0.0, 0.2, 0.03)),
    )
    decode = replace(
        decode_only(),
        capacity=tuple(BucketCapacity(bucket, 0.0, 20.0, 0.0, 0.2, 0.03) for bucket in (0, 1)),
    )
    return replace(
        closed_plan((mixed(), "east", 1)),
        templates=(prefill, decode),
        deployments=(
            Deployment(prefill.name, "west", 1),
            Deployment(prefill.name, "east", 2),
            Deployment(decode.name, "east", 3),
        ),
        buckets=(LengthBucket(MODEL, 0, SHORT, 10.0), LengthBucket(MODEL, 1, LONGEST, 2.0)),
        shares=(
            PlannedShare(prefill.name, "east", 0, "prefill", 10.0),
            PlannedShare(prefill.name, "west", 1, "prefill", 2.0),
            PlannedShare(decode.name, "east", 0, "decode", 10.0),
            PlannedShare(decode.name, "east", 1, "decode", 2.0),
        ),
        flows=(
            PlannedFlow(MODEL, 0, "east", "east", 10.0),
            PlannedFlow(MODEL, 1, "west", "east", 2.0, "int4"),
        ),
    )


def mean_ttft_s(policy: Policy, long_share: float) -> float:
    rng, count = np.random.default_rng(1), 250
    arrival_s = np.cumsum(rng.exponential(1 / 6.0, count))
    long = rng.random(count) < long_share
    prompts = np.where(long, rng.integers(5000, 20_000, count), rng.integers(200, 3000, count))
    work = workload(MODEL, arrival_s, prompts, rng.integers(20, 100, count))
    records = simulate(problem(divided(), gbps=400.0), work, policy).records
    waits = np.array(records.first_token_s) - np.array(records.arrival_s)
    assert np.isfinite(waits).all()
    return float(waits.mean())


def test_a_queue_in_the_prefill_cluster_is_relieved() -> None:
    moved = mean_ttft_s(Policy(balance="goodput", admission=False), 0.6)
    fixed = mean_ttft_s(Policy(balance="goodput", admission=False, adapt_threshold=False), 0.6)
    assert moved < fixed / 2


def test_a_cluster_that_keeps_up_is_left_alone() -> None:
    moved = mean_ttft_s(Policy(balance="goodput", admission=False), 0.1)
    fixed = mean_ttft_s(Policy(balance="goodput", admission=False, adapt_threshold=False), 0.1)
    assert abs(moved - fixed) < 0.1 * fixed
