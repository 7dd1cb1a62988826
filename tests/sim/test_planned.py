"""What a plan said beside what ran: agreement where it was followed, a name for everything that was not."""

from __future__ import annotations

from dataclasses import replace
from math import exp, isclose

import pytest
from sim_fleets import (
    FAST,
    MODEL,
    SLOW,
    closed_plan,
    decode_only,
    flow_plan,
    load,
    mixed,
    prefill_only,
    problem,
)

from potluck.core.values.plan import Plan, PlannedShare
from potluck.core.values.types import Slo
from potluck.runtime.expectations import BucketLengths, ValueRange, busy_span
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import Workload
from potluck.sim.results.plan_comparison import PlanDeviation, compared, described, disagreements
from potluck.sim.run import simulate
from potluck.sim.world.faults import parse_faults


def named(plan: Plan, **rates: float) -> Plan:
    """With these requests a second on the templates whose names end so."""
    shares = tuple(
        PlannedShare(t.name, "east", 0, "closed", rate)
        for end, rate in rates.items()
        for t in plan.templates
        if t.name.endswith(end)
    )
    return replace(plan, shares=shares)


def two_kinds() -> ResolvedPlan:
    plan = closed_plan((mixed(FAST), "east", 1), (mixed(SLOW), "east", 1))
    return replace(problem(named(plan, H100=9.0, L4=1.0)), slos={MODEL: Slo(2.0, 0.2)})


def found_in(
    resolved: ResolvedPlan, requests: Workload, ran: ResolvedPlan | None = None
) -> dict[str, list[PlanDeviation]]:
    result = simulate(ran or resolved, requests)
    found: dict[str, list[PlanDeviation]] = {}
    for each in compared(resolved, result):
        found.setdefault(each.what, []).append(each)
    return found


def test_a_plan_that_is_followed_agrees_in_everything() -> None:
    resolved = problem(flow_plan((prefill_only(), "east", 1), (decode_only(), "west", 1)))
    found = found_in(resolved, load(2000, 10.0, prompt=(900, 1100), output=(80, 120)))
    assert set(found) == {"served", "attainment", "rate", "flow", "busy", "link"}
    wrong = disagreements(each for part in found.values() for each in part)
    assert not wrong, wrong
    (link,) = found["link"]
    assert link.name == "east -> west"
    assert link.ran > 1e9


def test_a_replica_that_is_counted_on_and_gets_nothing_is_broken() -> None:
    resolved = two_kinds()
    other = replace(resolved, plan=named(resolved.plan, H100=10.0))
    found = found_in(resolved, load(1000, 10.0), other)
    (idle,) = found["work"]
    assert idle.verdict == "broken"
    assert "L4" in idle.name
    assert described(idle) == (f"{idle.planned.low:.0f} requests", "none")
    assert disagreements(each for part in found.values() for each in part)[0] is idle


def test_bytes_that_were_not_planned_are_named() -> None:
    ends = (prefill_only(), "east", 1), (decode_only(), "west", 1)
    found = found_in(problem(flow_plan(*ends, codec="int4")), load(500, 10.0), problem(flow_plan(*ends)))
    (link,) = found["link"]
    assert link.verdict == "differs"
    assert link.ran > 3 * link.planned.high


def test_a_link_that_carries_nothing_is_named() -> None:
    ends = (prefill_only(), "east", 1), (decode_only(), "west", 1)
    found = found_in(problem(flow_plan(*ends)), load(500, 10.0), problem(closed_plan((mixed(), "east", 1))))
    (link,) = found["link"]
    assert (link.ran, link.verdict) == (0.0, "differs")


def test_what_is_not_served_is_named() -> None:
    resolved = replace(problem(closed_plan((mixed(SLOW), "east", 1))), slos={MODEL: Slo(1.0, 0.06)})
    found = found_in(resolved, load(1500, 10.0))
    assert [each.verdict for each in found["served"] + found["attainment"]] == ["differs", "differs"]


def test_fewer_requests_than_planned_are_no_disagreement() -> None:
    found = found_in(problem(closed_plan((mixed(), "east", 1))), load(400, 2.0))
    assert not disagreements(each for part in found.values() for each in part)
    assert found["rate"][0].planned.high < 3.0


def test_a_fleet_that_changed_is_not_compared() -> None:
    resolved = two_kinds()
    faults = parse_faults("faults: [{at_s: 20, kind: replica, replica: '*L4*'}]", "f")
    assert compared(resolved, simulate(resolved, load(400, 5.0), faults=faults)) == ()


@pytest.mark.parametrize("rate", [0.01, 0.2, 5.0])
def test_busy_lies_between_chance_and_turns(rate: float) -> None:
    """With steps of one second whatever is in them, both bounds have closed forms."""

    class OneSecond:
        confidence = "measured"

        def step_s(self, batch):  # type: ignore[no-untyped-def]
            return batch.tokens * 0 + 1.0

    lengths = {("m", 0): BucketLengths(100.0, 5.0, 100.0)}
    span = busy_span("m", OneSecond(), {0: [rate, 0.0]}, {0: [rate, 0.0]}, lengths, 0)  # type: ignore[arg-type]
    assert isclose(span.high, min(1.0, 6 * rate))
    assert isclose(span.low, 1 - (1 - min(1.0, rate)) * exp(-5 * rate))
    assert ValueRange(0.2, 0.4).away(0.5) == pytest.approx(0.1)
