"""Scaling a plan in which copies take different requests: each part by its own demand."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scale_builders import fleet_of, observed, plan_of, template, traffic

from potluck.core.scaling.cauchy_scaling import CauchyScaling
from potluck.core.scaling.partial_service import busy_copies, missing_copies, served_by
from potluck.core.scaling.rule import Resize
from potluck.core.scaling.traffic_window import LengthCount
from potluck.core.state.policy import Policy
from potluck.core.values.plan import BucketCapacity, LengthBucket, Plan, PlannedShare
from potluck.core.values.types import NodeOffer, Region

SHORT, LONG = 1000, 100_000
BUCKETS = (LengthBucket("m", 0, SHORT, 6.0), LengthBucket("m", 1, LONG, 2.0))
REGIONS = (Region("east", (NodeOffer("n", 1.0, 40),)),)


def a_template(name: str, *rates: tuple[float, float, float]) -> object:
    """(prefill, decode, closed) a second for each bucket."""
    capacity = tuple(BucketCapacity(i, p, d, c, 0.1, 0.01) for i, (p, d, c) in enumerate(rates))
    return replace(template(name, 1.0), capacity=capacity)


def split_plan(prefills: int = 2, decodes: int = 1, wholes: int = 2) -> Plan:
    """Short prompts are handed over, long ones go to replicas that do all: which could do the short ones too."""
    templates = (
        a_template("prefill", (4.0, 0.0, 0.0), (1.0, 0.0, 0.0)),
        a_template("decode", (0.0, 8.0, 0.0), (0.0, 8.0, 0.0)),
        a_template("whole", (0.0, 0.0, 5.0), (0.0, 0.0, 1.25)),
    )
    counts = {("prefill", "east"): prefills, ("decode", "east"): decodes, ("whole", "east"): wholes}
    shares = (
        PlannedShare("prefill", "east", 0, "prefill", 6.0),
        PlannedShare("decode", "east", 0, "decode", 6.0),
        PlannedShare("whole", "east", 1, "closed", 2.0),
    )
    return replace(plan_of(templates, counts, BUCKETS), shares=shares)


def seen(rate_per_s: float, short_share: float = 0.75, **more: object) -> object:
    arrivals = round(rate_per_s * 120)
    short = round(arrivals * short_share)
    lengths = (
        LengthCount(500, 501, short, short * 500),
        LengthCount(5000, 5001, arrivals - short, (arrivals - short) * 5000),
    )
    return replace(traffic(rate_per_s), lengths=lengths, error_per_s=0.01, **more)


def asked(rate_per_s: float, plan: Plan, short_share: float = 0.75, **more: object) -> dict[str, int]:
    rule = CauchyScaling(Policy(scaling="cauchy"), REGIONS)
    found = rule.on_tick(
        1000.0, observed(1000.0, seen(rate_per_s, short_share, **more)), fleet_of(plan), plan
    )
    return {each.template: each.copies for each in found if isinstance(each, Resize)}


def test_every_part_grows_with_its_own_demand() -> None:
    """16 a second: 12 short ones need 12 / 4 / 0.8 prefills, 12 / 8 / 0.8 decodes; 4 long ones 4 / 1.25 / 0.8."""
    assert asked(16.0, split_plan()) == {"prefill": 4, "decode": 2, "whole": 4}


def test_only_what_the_longer_prompts_use_grows_with_them() -> None:
    assert asked(8.0, split_plan(2, 1, 2), short_share=0.25) == {"whole": 6}


def test_a_part_that_queues_is_not_answered_with_copies_that_it_never_reaches() -> None:
    found = asked(8.0, split_plan(1, 1, 2))
    assert found["prefill"] == 2
    assert "whole" not in found or found["whole"] <= 3


def test_each_part_shrinks_to_its_own_need_and_none_vanishes() -> None:
    found = asked(2.0, split_plan(4, 3, 6))
    assert found == {"prefill": 1, "decode": 1, "whole": 1}


def test_a_plan_whose_copies_all_take_everything_is_no_plan_of_parts() -> None:
    plan = split_plan()
    closed = tuple(
        PlannedShare("whole", "east", bucket, "closed", rate) for bucket, rate in ((0, 6.0), (1, 2.0))
    )
    assert busy_copies(replace(plan, shares=closed), "m", {0: 0.75, 1: 0.25}) is None
    apart = tuple(
        PlannedShare(name, "east", bucket, name, rate)
        for name in ("prefill", "decode")
        for bucket, rate in ((0, 6.0), (1, 2.0))
    )
    assert busy_copies(replace(plan, shares=apart), "m", {0: 0.75, 1: 0.25}) is None
    assert busy_copies(replace(plan, shares=()), "m", {0: 1.0}) is None
    assert busy_copies(plan, "m", {0: 0.75, 1: 0.25}) is not None


@given(
    mix=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-6, 1.0 - 1e-6)),
    rate=st.floats(0.1, 200.0),
    counts=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    free=st.integers(0, 60),
)
def test_what_is_added_serves_the_rate_and_no_copy_of_it_is_too_many(
    mix: float, rate: float, counts: tuple[int, int, int], free: int
) -> None:
    busy = busy_copies(split_plan(), "m", {0: mix, 1: 1.0 - mix})
    assert busy is not None
    keys = (("prefill", "east"), ("decode", "east"), ("whole", "east"))
    there = dict(zip(keys, counts, strict=True))
    needs = {key: {("east", "n"): 1} for key in keys}
    more, partly = missing_copies(busy, there, rate, needs, {("east", "n"): free})
    after = {key: there[key] + more.get(key, 0) for key in keys}
    assert sum(more.values()) <= free
    if not partly:
        assert served_by(busy, after).served_per_s >= rate * (1 - 1e-6)
        for key, added in more.items():
            fewer = {**after, key: after[key] - 1}
            assert added > 0
            assert served_by(busy, fewer).served_per_s < rate * (1 + 1e-6)
    else:
        assert sum(more.values()) == free
    assert busy.get(keys[0], 0.0) == pytest.approx(mix / 4.0)
    assert ceil(rate * busy.get(keys[2], 0.0) - 1e-6) <= after[keys[2]] or partly
