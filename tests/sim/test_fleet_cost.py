"""One cost of a fleet: of plans, simulated runs, with reserved nodes, head nodes, storage and egress."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.values.fleet_cost import heads_usd_per_h, offers_in, rent_usd_per_h, storage_usd_per_h
from potluck.core.values.types import NodeOffer, Region
from potluck.sim.results.ledger import CostMeter

EAST = Region("east", (NodeOffer("1xL4", 0.7, 9, reserved=2), NodeOffer("1xA10G", 1.1, 9)), 0.25, 2.0)
WEST = Region("west", (NodeOffer("1xL4", 0.6, 9),), 0.5)
WEIGHTS = {"chat": 16e9}
STORAGE = storage_usd_per_h(EAST, 16e9)


def test_cost_meter_charges_nodes_beyond_reserved_ones_and_each_region_once() -> None:
    meter = CostMeter((EAST, WEST), WEIGHTS)
    for at_s in (0.0, 1.0, 2.0):
        meter.rent(at_s, "east", "1xL4")
        meter.store(at_s, "east", "chat", 1)
    meter.rent(3.0, "west", "1xL4")
    meter.reprice(4.0, "west", "1xL4", 0.1)
    meter.give_back(5.0, "east", "1xL4", served=False)
    meter.store(5.0, "east", "chat", -3)
    assert [at_s for at_s, _ in meter.rates] == [0.0, 2.0, 3.0, 4.0, 5.0]
    fixed = 0.25 + STORAGE
    expected = [fixed, 0.7 + fixed, 0.7 + fixed + 1.1, 0.7 + fixed + 0.6, 0.25 + 0.6]
    assert [rate for _, rate in meter.rates] == pytest.approx(expected)
    assert meter.start_rates[-1][1] == pytest.approx(0.1), "reserved nodes that start cost nothing"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["1xL4", "1xA10G"]), st.booleans()), max_size=20))
def test_cost_meter_equals_the_cost_of_the_running_machines(moves: list[tuple[str, bool]]) -> None:
    meter, there = CostMeter((EAST, WEST), WEIGHTS), {"1xL4": 0, "1xA10G": 0}
    for at_s, (node, more) in enumerate(moves):
        if more:
            meter.rent(float(at_s), "east", node)
        elif there[node]:
            meter.give_back(float(at_s), "east", node, served=False)
        there[node] += 1 if more else -bool(there[node])
    nodes = {("east", node): count for node, count in there.items()}
    used = {"east"} if sum(there.values()) else set()
    cost = rent_usd_per_h(offers_in([EAST]), nodes) + heads_usd_per_h([EAST], used)
    assert (meter.rates[-1][1] if meter.rates else 0.0) == pytest.approx(cost)
    assert all(rate >= 0 for _, rate in (*meter.rates, *meter.start_rates))
