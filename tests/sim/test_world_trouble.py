"""What the world does when things go wrong: losses, notices, prices, supply, links, slow replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_fleets import closed_plan, decode_only, flow_plan, load, mixed, prefill_only, problem
from sim_minds import requests, ttft

from potluck.core.errors import UnknownNameError
from potluck.core.state.policy import Policy
from potluck.sim.results.records import ANSWERED, REFUSED
from potluck.sim.run import simulate
from potluck.sim.world.faults import Fault, Faults, PriceChange, SupplyChange

MIXED = "chat: mixed 1xH100@east"


def test_a_lost_replica_s_request_goes_on_elsewhere_from_what_was_streamed() -> None:
    plan = closed_plan((mixed(), "east", 2))
    work = requests((0.0, 1000, 400))
    calm = simulate(problem(plan), work).records
    half_s = float(calm.first_token_s[0] + calm.finish_s[0]) / 2
    result = simulate(problem(plan), work, faults=Faults((Fault(half_s, "replica", replica="*#0/0"),)))
    records = result.records
    assert (records.attempts[0], records.outcome[0], records.streamed_tokens[0]) == (2, ANSWERED, 400)
    assert records.first_token_s[0] == calm.first_token_s[0]
    assert float(records.finish_s[0]) > float(calm.finish_s[0])
    lost, other, _ = result.replicas
    # The third is the lost one's replacement, still starting.
    assert lost.changes[-1][:2] == (half_s, "lost")
    # What the user had is prompt there: nothing is made twice.
    again = other.prefill_tokens - 1000
    assert 150 < again < 250
    assert lost.decode_tokens + 1 == pytest.approx(again, abs=1)
    assert other.decode_tokens == 400 - again - 1


def test_with_notice_requests_finish_before_the_machine_goes() -> None:
    plan = closed_plan((mixed(), "east", 2))
    work = requests((0.0, 1000, 100), (1.0, 1000, 100))
    spot = Fault(0.5, "spot", region="east", node="1xH100-SXM", count=2, notice_s=30.0)
    result = simulate(problem(plan), work, faults=Faults((spot,)), policy=Policy(max_wait_s=1.0))
    assert result.records.outcome.tolist() == [ANSWERED, REFUSED]
    assert result.records.attempts.tolist() == [1, 0]


def test_nodes_are_paid_at_the_price_of_the_time() -> None:
    plan = closed_plan((mixed(), "east", 2))
    work = requests((0.0, 100, 2), (3600.0, 100, 2))
    result = simulate(
        problem(plan), work, faults=Faults(prices=(PriceChange(1800.0, "east", "1xH100-SXM", 10.0),))
    )
    assert result.cost_rates == ((0.0, 4.0), (1800.0, 20.0))
    assert result.cost_usd == pytest.approx((4.0 + 20.0) / 2, rel=1e-3)


def test_supply_that_falls_takes_machines_and_keeps_new_ones_from_starting() -> None:
    plan = closed_plan((mixed(), "east", 3))
    fall = SupplyChange(10.0, "east", "1xH100-SXM", 1, notice_s=2.0)
    result = simulate(problem(plan), load(100, 2.0), faults=Faults(availability=(fall,)))
    there = [replica for replica in result.replicas if replica.changes[-1][1] == "ready"]
    assert len(there) == 1
    assert (result.records.outcome == ANSWERED).all()
    assert result.cost_rates[-1] == (12.0, pytest.approx(2.0))
    assert len(result.replicas) == 3, "the Brain was told, so nothing is started that finds no machine"


def test_a_broken_link_fails_what_is_on_it_and_a_slow_one_delays() -> None:
    plan = flow_plan((prefill_only(), "west", 1), (decode_only(), "east", 1))
    work = requests((0.0, 4000, 5), (10.0, 4000, 5))
    down = Fault(0.05, "link", source="west", target="east", factor=0.0, duration_s=5.0)
    broken = simulate(problem(plan, gbps=10.0), work, Policy(opportunistic=False), faults=Faults((down,)))
    assert broken.records.attempts[0] > 1
    assert broken.links[1].lost_bytes > 0
    slow = Fault(0.0, "link", source="west", target="east", gbps=1.0)
    straight = Policy(balance="goodput")  # the default goes around a slow link
    calm = simulate(problem(plan, gbps=10.0), work, straight)
    delayed = simulate(problem(plan, gbps=10.0), work, straight, faults=Faults((slow,)))
    assert ttft(delayed) > 5 * ttft(calm)
    with pytest.raises(UnknownNameError, match="west->north"):
        simulate(problem(plan), work, faults=Faults((replace(slow, target="north"),)))


def test_a_slow_replica_is_slow_for_a_while() -> None:
    plan, work = closed_plan((mixed(), "east", 1)), requests((0.0, 1000, 100), (60.0, 1000, 100))
    calm = simulate(problem(plan), work).records
    fault = Fault(0.0, "slow", replica="*", factor=4.0, duration_s=30.0)
    records = simulate(problem(plan), work, faults=Faults((fault,))).records
    assert float(records.finish_s[0]) == pytest.approx(4.0 * float(calm.finish_s[0]), rel=1e-6)
    assert float(records.finish_s[1] - 60.0) == pytest.approx(float(calm.finish_s[1] - 60.0), rel=1e-6)
