"""Scale-out over all that is on offer: which templates may be started where, and what they are sent then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from scale_builders import fleet_of, observed, plan_of, template, traffic

from potluck.core.routing.template_weights import merged, offers
from potluck.core.scaling.cauchy_scaling import CauchyScaling
from potluck.core.scaling.copy_capacity import blueprints
from potluck.core.scaling.rule import Resize
from potluck.core.scaling.startable import startable
from potluck.core.scaling.traffic_window import LengthCount
from potluck.core.state.policy import Policy
from potluck.core.values.plan import BucketCapacity, LengthBucket, Plan, PlannedFlow, PlannedShare, Template
from potluck.core.values.types import NodeOffer, Region

SMALL = template("small", 10.0)
OTHER = template("other", 30.0, nodes={"big": 1})
DEAR = template("dear", 40.0, nodes={"big": 2})
MARKET = (
    Region("east", (NodeOffer("n", 1.0, 2), NodeOffer("big", 3.0, 1))),
    Region("west", (NodeOffer("big", 2.5, 3),)),
)


def plan(*candidates: Template, strategy: str = "auto") -> Plan:
    made = plan_of((SMALL,), {("small", "east"): 2})
    return replace(made, candidates=candidates, strategy=strategy)


def resized(
    there: Plan, rate_per_s: float, regions: tuple[Region, ...] = MARKET
) -> tuple[dict[tuple[str, str], int], str]:
    rule = CauchyScaling(Policy(scaling="cauchy"), regions)
    found = rule.on_tick(1000.0, observed(1000.0, traffic(rate_per_s)), fleet_of(there), there)
    return {(r.template, r.region): r.copies for r in found if isinstance(r, Resize)}, rule.why()


def test_what_the_plan_does_not_deploy_is_started_where_it_is_cheapest() -> None:
    """All nodes of the plan's own template are taken: 24 / 0.8 - 20 = 10 a second are missing."""
    nothing, why = resized(plan(), 24.0)
    assert nothing == {}
    assert "no nodes are free" in why
    assert resized(plan(OTHER, DEAR), 24.0)[0] == {("other", "west"): 1}
    # 75 missing: the three of the west, or two of them with a dear one on the others; the cheapest serves it all
    found, _ = resized(plan(OTHER, DEAR), 76.0)
    assert found == {("other", "west"): 3}
    found, why = resized(plan(OTHER), 500.0)
    assert found == {("other", "east"): 1, ("other", "west"): 3}
    assert "all that nodes allow" in why


def test_what_was_started_counts_and_goes_again() -> None:
    there = plan(OTHER)
    grown = there.holding({("small", "east"): 2, ("other", "west"): 1})
    assert {each.name for each in grown.templates} == {"small", "other"}
    assert grown.candidates == ()
    rule = CauchyScaling(Policy(scaling="cauchy"), MARKET)
    rule.on_tick(1000.0, observed(1000.0, traffic(24.0)), fleet_of(there), there)
    found = rule.on_tick(2000.0, observed(2000.0, traffic(36.0)), fleet_of(grown), there)
    assert found == (), "50 are served, 40 counted on"
    found = rule.on_tick(3000.0, observed(3000.0, traffic(10.0)), fleet_of(grown), there)
    assert {(r.template, r.copies) for r in found if isinstance(r, Resize)} == {("other", 0)}


def test_a_template_that_lacks_a_length_is_not_started() -> None:
    both = (BucketCapacity(0, 0.0, 0.0, 20.0, 0.1, 0.01), BucketCapacity(1, 0.0, 0.0, 5.0, 0.1, 0.01))
    cut = replace(OTHER, name="cut", capacity=(both[0], replace(both[1], closed_per_s=0.0)))
    there = replace(plan(replace(OTHER, capacity=both), cut), buckets=two_buckets())
    found = startable(there, "m", {0: 0.5, 1: 0.5}, MARKET, ())
    assert {name for name, _ in found} == {"small", "other"}
    assert found["other", "west"].closed_per_s == pytest.approx(8.0)


def test_phases_are_started_where_they_have_somebody_to_work_with() -> None:
    """Prefill replicas for a region from which the plan has a flow, and nowhere else."""
    first = template("first", prefill=10.0, roles=("prefill",), nodes={"big": 1})
    there = replace(plan(first), flows=(PlannedFlow("m", 0, "west", "east", 1.0),))
    assert ("first", "west") in startable(there, "m", {0: 1.0}, MARKET, ())
    assert ("first", "east") not in startable(there, "m", {0: 1.0}, MARKET, ())


def test_where_copies_take_different_lengths_one_that_takes_all_may_be_better() -> None:
    """Short prompts go to one deployment, long ones to another; one copy of `all` covers what two would."""
    short, long = (
        replace(template(name, nodes={"n": 1}), capacity=capacity)
        for name, capacity in (("short", buckets(20.0, 0.0)), ("long", buckets(0.0, 20.0)))
    )
    whole = replace(template("all", nodes={"big": 1}), capacity=buckets(40.0, 40.0))
    made = plan_of((short, long), {("short", "east"): 1, ("long", "east"): 1}, two_buckets())
    shares = (PlannedShare("short", "east", 0, "closed", 8.0), PlannedShare("long", "east", 1, "closed", 8.0))
    there = replace(made, shares=shares, candidates=(whole,), strategy="auto")
    seen = traffic(60.0, prompt=100)
    half = seen.arrivals // 2
    long_too = replace(
        seen, lengths=(LengthCount(100, 101, half, 100 * half), LengthCount(5000, 5001, half, 5000 * half))
    )
    cheap = (Region("east", (NodeOffer("n", 3.0, 9), NodeOffer("big", 1.0, 9))),)
    dear = (Region("east", (NodeOffer("n", 0.1, 9), NodeOffer("big", 9.0, 9))),)
    for regions, names in ((cheap, {"all"}), (dear, {"short", "long"})):
        rule = CauchyScaling(Policy(scaling="cauchy"), regions)
        found = rule.on_tick(1000.0, observed(1000.0, long_too), fleet_of(there), there)
        assert {r.template for r in found if isinstance(r, Resize)} == names, rule.why()


def test_a_copy_that_scaling_began_is_sent_what_it_serves_of_the_mix() -> None:
    there = replace(
        plan(replace(OTHER, capacity=buckets(30.0, 10.0))),
        buckets=two_buckets(),
        shares=(
            PlannedShare("small", "east", 0, "closed", 15.0),
            PlannedShare("small", "east", 1, "closed", 5.0),
        ),
    )
    read = offers(there, "goodput")["m"]
    assert ("other", "west") not in read.copies
    weights = read.copy(("other", "west"))
    assert weights is not None
    assert sum(w / c for w, c in zip(weights.closed, (30.0, 10.0), strict=True)) == pytest.approx(1.0)
    assert weights.closed[0] / weights.closed[1] == pytest.approx(1.0), "as much of each as is asked for"
    assert read.copy(("unknown", "west")) is None
    # Under another plan it goes on until it is drained.
    after = merged(offers(plan(), "goodput")["m"], read, {("other", "west")})
    assert after.copies["other", "west"].closed[0] == weights.closed[1]
    assert set(blueprints(there)) == {"small", "other"}


def buckets(short: float, long: float) -> tuple[BucketCapacity, ...]:
    return tuple(BucketCapacity(b, 0.0, 0.0, rate, 0.1, 0.01) for b, rate in enumerate((short, long)))


def two_buckets() -> Sequence[LengthBucket]:
    return (LengthBucket("m", 0, 1000, 8.0), LengthBucket("m", 1, 10**6, 8.0))
