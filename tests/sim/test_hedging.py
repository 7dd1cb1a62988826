"""Hedging in a simulated world: what a replica that is slow for a while costs, with it and without."""

from __future__ import annotations

import io

import numpy as np
import pytest
import sim_fleets as fleets

from potluck.core.brain.brain import Brain
from potluck.core.state.policy import Policy
from potluck.runtime.replay import replay
from potluck.sim.results.records import ANSWERED, SimResult
from potluck.sim.run import build, simulate
from potluck.sim.world.faults import Fault, Faults
from potluck.sim.world.invariants import check

FOUR = fleets.problem(fleets.closed_plan((fleets.mixed(), "east", 4)))
MIXED = fleets.problem(fleets.closed_plan((fleets.combo(2, 2), "east", 2), (fleets.mixed(), "west", 2)))
POLICY = Policy(balance="goodput", hedge=1.5)
SLOW = Faults(
    tuple(
        Fault(at_s, "slow", replica=f"*#{n}/0", factor=10.0, duration_s=8.0)
        for n, at_s in ((0, 5.0), (1, 35.0))
    )
)


def ttft_s(result: SimResult, share: float) -> float:
    records = result.records
    assert (records.outcome == ANSWERED).all()
    return float(np.quantile(records.first_token_s - records.arrival_s, share))


@pytest.mark.parametrize("balance", ["learned", "goodput"])
def test_a_replica_that_is_ten_times_as_slow_for_a_while_is_felt_less(balance: str) -> None:
    requests = fleets.load(600, 10.0, seed=3)
    without = simulate(FOUR, requests, Policy(balance=balance), faults=SLOW)
    hedged = simulate(FOUR, requests, Policy(balance=balance, hedge=3.0), faults=SLOW)
    assert without.counts["second attempts"] == 0
    assert 0 < hedged.counts["second attempts"] < 60
    # Who learns how fast replicas are sends the slow one little: hardly one in a hundred is late; the last is.
    late = (1.0,) if balance == "learned" else (0.99, 1.0)
    assert all(ttft_s(hedged, share) < 0.7 * ttft_s(without, share) for share in late)
    assert ttft_s(hedged, 0.99) < ttft_s(without, 0.99)
    assert ttft_s(hedged, 0.5) < 1.1 * ttft_s(without, 0.5)


def test_while_nobody_is_late_it_changes_nothing() -> None:
    requests = fleets.load(300, 10.0, seed=4)
    plain, hedged = (simulate(FOUR, requests, Policy(hedge=hedge)) for hedge in (0.0, 100.0))
    assert hedged.counts["second attempts"] == 0
    assert (plain.records.finish_s == hedged.records.finish_s).all()


def test_books_balance_over_routes_of_several_segments_and_the_log_replays() -> None:
    faults = Faults(
        (
            Fault(2.0, "slow", replica="*combo*#0/0", factor=30.0, duration_s=6.0),
            Fault(4.0, "slow", replica="*mixed*#0/0", factor=30.0, duration_s=6.0),
            Fault(6.0, "replica", replica="*combo*#0/0"),
            Fault(7.0, "replica", replica="*mixed*#0/0"),
            *(Fault(5.0 + n / 50, "cancel", request=40 + n) for n in range(40)),
        )
    )
    log = io.StringIO()
    world = build(MIXED, fleets.load(200, 15.0, seed=6, blocks=3), POLICY, log=log)
    world.outside.plan(faults, 1, 100.0)
    world.run()
    assert world.attempts.twinned > 2
    assert world.attempts.twins == {}
    assert check(world) == []
    log.seek(0)
    assert replay(log, Brain).difference == ""
