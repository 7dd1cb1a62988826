"""What a plan offers to routing: goodput in the time the plan gives a bucket, and old plans that still serve."""

from __future__ import annotations

from math import inf

import brain_builders as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.routing.template_weights import ModelWeights, merged, offers

A = build.template("a", closed=(1.0, 1.0))
B = build.template("b", closed=(1.0, 1.0))


def test_one_bucket_weighs_as_its_goodput() -> None:
    template = build.template("a", closed=(4.0,))
    plan = build.plan((template,), {("a", "near"): 2}, {("a", "near", "closed"): (1.0,)}, longest=(1000,))
    assert offers(plan, "goodput")["m"].copies["a", "near"].closed == (4.0,)
    assert offers(plan, "fixed")["m"].copies["a", "near"].closed == (0.5,)
    assert offers(plan, "round-robin")["m"].copies["a", "near"].closed == (1.0,)


def test_a_unit_that_is_planned_for_long_prompts_is_not_flooded_with_short_ones() -> None:
    # Two copies of A: a tenth of their time for short prompts, the rest for long ones; B: short ones only.
    plan = build.plan(
        (A, B),
        {("a", "near"): 2, ("b", "near"): 1},
        {("a", "near", "closed"): (0.2, 1.8), ("b", "near", "closed"): (0.8, 0.0)},
    )
    found = offers(plan, "goodput")["m"]
    assert found.copies["a", "near"].closed == pytest.approx((0.1, 0.9))
    assert found.copies["b", "near"].closed == pytest.approx((1.0, 0.0))


rates = st.floats(0.0, 5.0)


@given(
    st.lists(st.tuples(rates, rates, rates, st.integers(1, 4)), min_size=1, max_size=5), st.floats(0.3, 1.0)
)
def test_no_copy_is_sent_more_than_its_time_while_the_plan_suffices(
    rows: list[tuple[float, float, float, int]], headroom: float
) -> None:
    """Any plan whose copies are at most `headroom` busy, under the very demand it was made for."""
    capacity = (3.0, 2.0, 1.0)
    templates = [build.template(f"t{i}", closed=capacity) for i in range(len(rows))]
    shares, counts = {}, {}
    for i, (*each, count) in enumerate(rows):
        busy = sum(rate / (c * count) for rate, c in zip(each, capacity, strict=True))
        scale = min(1.0, headroom / busy) if busy else 1.0
        counts[f"t{i}", "near"] = count
        shares[f"t{i}", "near", "closed"] = [rate * scale for rate in each]
    plan = build.plan(templates, counts, shares, longest=(1000, 4000, 90000))  # type: ignore[arg-type]
    if not plan.shares:
        return
    found = offers(plan, "goodput")["m"].copies
    demand = [sum(s.rate_per_s for s in plan.shares if s.bucket == b) for b in range(3)]
    total = [sum(found[key].closed[b] * count for key, count in counts.items()) for b in range(3)]
    for key in counts:
        sent = [demand[b] * found[key].closed[b] / total[b] if total[b] else 0.0 for b in range(3)]
        assert sum(rate / c for rate, c in zip(sent, capacity, strict=True)) <= 1 + 1e-6


def test_a_plan_without_shares_offers_what_templates_can_do() -> None:
    plan = build.plan((A,), {("a", "near"): 1}, {})
    assert offers(plan, "goodput")["m"].copies["a", "near"].closed == (1.0, 1.0)


def test_every_prompt_has_a_bucket() -> None:
    found = offers(build.plan((A,), {("a", "near"): 1}, {}, longest=(100, 1000)), "goodput")["m"]
    assert found.longest_tokens == (100.0, inf)
    assert [found.bucket(tokens) for tokens in (1, 100, 101, 1000, 10**9)] == [0, 0, 1, 1, 1]


def test_what_an_old_plan_runs_keeps_its_weights_by_length() -> None:
    old = offers(
        build.plan((A,), {("a", "near"): 1}, {("a", "near", "closed"): (0.5, 0.0)}, longest=(1000, 9000)),
        "goodput",
    )["m"]
    new = offers(
        build.plan(
            (B,), {("b", "near"): 1}, {("b", "near", "closed"): (1.0, 1.0, 1.0)}, longest=(500, 1000, 9000)
        ),
        "goodput",
    )["m"]
    both = merged(new, old, {("a", "near"), ("b", "near")})
    assert both.copies["a", "near"].closed == (1.0, 1.0, 0.0)
    assert both.copies["b", "near"] == new.copies["b", "near"]
    assert merged(new, old, {("b", "near")}) == new  # its copies are gone
    assert isinstance(both, ModelWeights)
