"""Turns: shares hold after every pick, and changes of the members cause neither bursts nor starvation."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.routing.round_robin import WeightedRoundRobin

weights = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12)


def turns_of(each: list[float]) -> WeightedRoundRobin[int]:
    turns: WeightedRoundRobin[int] = WeightedRoundRobin()
    for member, weight in enumerate(each):
        turns.set(member, weight)
    return turns


@given(weights, st.integers(1, 300))
def test_every_count_is_within_one_of_its_share_after_every_pick(each: list[float], picks: int) -> None:
    turns, counts, total = turns_of(each), Counter[int](), sum(each)
    for n in range(1, picks + 1):
        member = turns.pick()
        assert member is not None
        counts[member] += 1
        for i, weight in enumerate(each):
            assert abs(counts[i] - n * weight / total) < 1 + 1e-6


def nginx_counts(each: list[int], picks: int) -> list[list[int]]:
    """nginx's smooth weighted round robin, as its documentation describes it: the counts after every pick."""
    current, counts, seen = [0] * len(each), [0] * len(each), []
    for _ in range(picks):
        current = [now + weight for now, weight in zip(current, each, strict=True)]
        best = max(range(len(each)), key=current.__getitem__)
        current[best] -= sum(each)
        counts[best] += 1
        seen.append(list(counts))
    return seen


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_it_spreads_at_least_as_evenly_as_nginx(each: list[int]) -> None:
    period, total = sum(each), sum(each)
    turns, counts = turns_of([float(w) for w in each]), [0] * len(each)
    worst = nginx_worst = 0.0
    for n, theirs in enumerate(nginx_counts(each, period), 1):
        counts[turns.pick()] += 1  # type: ignore[index]
        for i, weight in enumerate(each):
            worst = max(worst, abs(counts[i] - n * weight / total))
            nginx_worst = max(nginx_worst, abs(theirs[i] - n * weight / total))
    assert counts == each  # a whole period gives everyone exactly its weight
    assert worst <= max(nginx_worst, 1.0) + 1e-6


changes = st.lists(
    st.one_of(
        st.tuples(st.just("pick"), st.integers(1, 20), st.just(0.0)),
        st.tuples(st.just("set"), st.integers(0, 5), st.floats(0.1, 10.0)),
        st.tuples(st.just("remove"), st.integers(0, 5), st.just(0.0)),
    ),
    max_size=40,
)


@given(changes)
@settings(max_examples=150)
def test_lags_always_add_up_to_nothing_and_stay_small(steps: list[tuple[str, int, float]]) -> None:
    turns: WeightedRoundRobin[int] = WeightedRoundRobin()
    present: dict[int, float] = {}
    removals = 0
    for what, number, weight in steps:
        if what == "pick":
            for _ in range(number):
                assert (turns.pick() is None) == (not present)
        else:
            removals += what == "remove" and number in present
            turns.set(number, weight)
            present.pop(number, None)
            if weight:
                present[number] = weight
        assert set(turns.members()) == set(present)
        assert turns.total == pytest.approx(sum(present.values()))
        lags = [turns.lag(member) for member in present]
        assert sum(lags) == pytest.approx(0.0, abs=1e-6)
        # Each removal hands on at most one turn of lag.
        assert all(abs(lag) <= 1 + removals + 1e-6 for lag in lags)


@given(weights, st.floats(0.01, 100.0), st.integers(0, 60))
def test_a_newcomer_neither_floods_nor_starves(each: list[float], weight: float, before: int) -> None:
    turns = turns_of(each)
    for _ in range(before):
        turns.pick()
    turns.set(99, weight)
    counts, share = Counter[int](), weight / (sum(each) + weight)
    for n in range(1, 100):
        counts[turns.pick()] += 1  # type: ignore[index]
        assert abs(counts[99] - n * share) < 2


def test_after_a_change_of_weight_the_new_shares_hold() -> None:
    turns = turns_of([1.0, 1.0, 1.0])
    for _ in range(10):
        turns.pick()
    turns.set(0, 6.0)
    counts = Counter(turns.pick() for _ in range(80))
    assert abs(counts[0] - 60) < 2
    assert abs(counts[1] - 10) < 2


def test_a_turn_given_to_another_counts_as_its_own() -> None:
    turns = turns_of([1.0, 1.0])
    for _ in range(4):
        picked = turns.pick()
        assert picked is not None
        turns.swap(picked, 0)
    assert Counter(turns.pick() for _ in range(4)) == {1: 4}


def test_a_member_that_is_given_everything_is_not_shut_out_for_long() -> None:
    turns = turns_of([1.0, 1.0])
    for _ in range(1000):
        picked = turns.pick()
        assert picked is not None
        turns.swap(picked, 0)
    assert 0 in [turns.pick() for _ in range(30)]


def test_a_thousand_members_have_their_turn_once_each() -> None:
    turns = turns_of([1.0] * 1000)
    assert sorted(turns.pick() for _ in range(1000)) == list(range(1000))  # type: ignore[type-var]


def test_nobody_is_picked_from_nobody() -> None:
    turns: WeightedRoundRobin[int] = WeightedRoundRobin()
    assert turns.pick() is None
    turns.set(1, 1.0)
    turns.set(1, 0.0)
    assert turns.pick() is None
    assert turns.total == 0
