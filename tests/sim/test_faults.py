"""Fault files, and random faults."""

from __future__ import annotations

import pytest

from potluck.core.errors import InputError
from potluck.sim.world.faults import Fault, FaultRates, Faults, parse_faults, random_faults

WHOLE = """
faults:
- {at_s: 60, kind: replica, replica: 'chat*#0/0'}
- {at_s: 60, kind: node, node: 'chat*#1/1xL40S/0', notice_s: 5}
- {at_s: 90, kind: region, region: east}
- {at_s: 90, kind: link, source: east, target: west, factor: 0.1, duration_s: 30}
- {at_s: 91, kind: link, source: east, target: west, gbps: 2}
- {at_s: 120, kind: slow, replica: '*', factor: 3, duration_s: 20}
- {at_s: 150, kind: reports, duration_s: 10}
- {at_s: 200, kind: spot, region: east, node: 1xL40S, count: 2}
- {at_s: 210, kind: cancel, request: 17}
random: {replica_per_h: 2}
prices: [{at_s: 3600, region: east, node: 1xL40S, usd_per_h: 2.5}]
availability: [{at_s: 1800, region: east, node: 1xL40S, available: 3}]
"""


def test_fault_file_with_every_kind_of_fault_is_parsed() -> None:
    result = parse_faults(WHOLE)
    kinds = ["replica", "node", "region", "link", "link", "slow", "reports", "spot", "cancel"]
    assert [fault.kind for fault in result.faults] == kinds
    assert result.faults[1].notice_s == 5.0
    assert result.faults[7].count == 2
    assert result.random == FaultRates(replica_per_h=2.0)
    assert result.prices[0].usd_per_h == 2.5
    assert result.availability[0].available == 3
    assert parse_faults("{}") == Faults()


BAD = [
    ("[1]", "must have"),
    ("faults: 3", "faults: must be a list"),
    ("faults: [3]", "faults[0]: must be an object"),
    ("fault: []", "fault: unknown key; did you mean 'faults'"),
    ("faults: [{at_s: 1, kind: replca, replica: x}]", "faults[0].kind: 'replca' is not one of its values"),
    ("faults: [{at_s: 1, kind: replica}]", "faults[0].replica: is missing"),
    ("faults: [{kind: replica, replica: x}]", "faults[0].at_s: is missing"),
    ("faults: [{at_s: -1, kind: replica, replica: x}]", "faults[0].at_s: must not be negative"),
    ("faults: [{at_s: soon, kind: replica, replica: x}]", "faults[0].at_s: must be a number"),
    ("faults: [{at_s: .nan, kind: replica, replica: x}]", "faults[0].at_s: must be a finite number"),
    ("faults: [{at_s: 1, kind: replica, replica: 3}]", "faults[0].replica: must be a string"),
    ("faults: [{at_s: 1, kind: replica, replica: x, gbps: 3}]", "gbps: is no key of a replica fault"),
    ("faults: [{at_s: 1, kind: link, source: a, target: b}]", "faults[0]: needs either `factor` or `gbps`"),
    ("faults: [{at_s: 1, kind: link, source: a, target: b, factor: 1, gbps: 1}]", "needs either"),
    ("faults: [{at_s: 1, kind: slow, replica: x, factor: 0, duration_s: 1}]", "factor: must be above 0"),
    ("faults: [{at_s: 1, kind: spot, region: a, node: b, count: 1.5}]", "count: must be an integer"),
    ("random: {replica: 1}", "random.replica: unknown key"),
    ("random: {replica_per_h: -1}", "random.replica_per_h: must not be negative"),
    ("random: 3", "random: must be an object"),
    ("prices: [{at_s: 1}]", "prices[0].region: is missing"),
    ("faults: [", "is not YAML"),
]


@pytest.mark.parametrize(("text", "says"), BAD)
def test_invalid_fault_file_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        parse_faults(text, "f.yaml")
    assert says in str(error.value)
    assert str(error.value).startswith("f.yaml")
    assert "\n" not in str(error.value)


def test_random_faults_follow_their_rates_and_seed() -> None:
    rates = FaultRates(*[3600.0] * 6)
    result = random_faults(rates, 1, 2000.0)
    assert result == random_faults(rates, 1, 2000.0)
    assert result != random_faults(rates, 2, 2000.0)
    for kind in ("replica", "node", "link", "slow", "reports", "spot"):
        own = [fault for fault in result if fault.kind == kind]
        assert 2000 - 5 * 45 < len(own) < 2000 + 5 * 45
        assert all(0 <= fault.at_s <= 2000 and fault.pick is not None for fault in own)
    more = random_faults(FaultRates(*[3600.0] * 5, 0.0), 1, 2000.0)
    assert [f for f in more if f.kind == "link"] == [f for f in result if f.kind == "link"]
    drawn = Faults((Fault(5.0, "cancel", request=1),), rates).drawn(1, 10.0)
    assert [fault.at_s for fault in drawn] == sorted(fault.at_s for fault in drawn)
