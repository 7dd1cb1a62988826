"""A route covers the prompt from token 0 without a gap, and exactly its last segment is open."""

from __future__ import annotations

import core_strategies as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.core.values.route import Route, Segment, aggregated, handed_over

LENGTH = 6
"""Prompt tokens in the brute-force check; segments are drawn from 0 to here."""

bounds = st.integers(0, LENGTH)
segments = st.tuples(bounds, st.none() | bounds).filter(lambda pair: pair[1] is None or pair[0] < pair[1])
rows = st.lists(segments, max_size=4)


def is_route(pairs: list[tuple[int, int | None]]) -> bool:
    """The rule by counting: each token, far beyond the prompt, is run once, in the order of the list."""
    if sum(stop is None for _, stop in pairs) != 1:
        return False
    end = 2 * LENGTH
    tokens = [token for start, stop in pairs for token in range(start, end if stop is None else stop)]
    return tokens == list(range(end))


def accepted(pairs: list[tuple[int, int | None]]) -> bool:
    try:
        Route(tuple(Segment("r", start, stop) for start, stop in pairs))
    except InputError:
        return False
    return True


@given(rows)
def test_the_constructor_agrees_with_counting_tokens(pairs: list[tuple[int, int | None]]) -> None:
    assert accepted(pairs) == is_route(pairs)


def test_the_constructor_agrees_with_counting_tokens_on_all_short_lists() -> None:
    ends: list[int | None] = [1, 2, 3, None]
    every = [(start, stop) for start in range(4) for stop in ends if stop is None or start < stop]
    lists = [[], *([a] for a in every), *([a, b] for a in every for b in every)]
    lists += [[a, b, c] for a in every for b in every for c in every]
    verdicts = [accepted(pairs) for pairs in lists]
    assert verdicts == [is_route(pairs) for pairs in lists]
    # One uncut, cut after 1, 2 or 3 tokens, or cut twice.
    assert sum(verdicts) == 1 + 3 + 3


@given(build.routes())
def test_segments_cover_the_prompt_and_the_last_is_open(route: Route) -> None:
    assert route.segments[0].start == 0
    assert [s.stop for s in route.segments[:-1]] == [s.start for s in route.segments[1:]]
    assert [s.stop is None for s in route.segments] == [False] * (len(route.segments) - 1) + [True]
    assert route.decoder == route.segments[-1].replica


@given(build.routes())
def test_a_handover_moves_all_tokens_before_the_cut_and_only_between_unlike_replicas(route: Route) -> None:
    expected = []
    for i in range(1, len(route.segments)):
        before, after = route.segments[i - 1], route.segments[i]
        if before.replica != after.replica:
            expected.append((before.replica, after.replica, before.stop))
    assert list(route.handovers) == expected


def test_the_routes_of_the_design() -> None:
    assert aggregated("X").segments == (Segment("X", 0, None),)
    assert aggregated("X").handovers == ()
    disaggregated = handed_over("P", "D", 100)
    assert disaggregated.segments == (Segment("P", 0, 100), Segment("D", 100, None))
    assert disaggregated.handovers == (("P", "D", 100),)
    assert disaggregated.decoder == "D"


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ([], "route: segments: a route needs at least one"),
        ([(1, None)], "route: segments: one starts at 1, not at 0"),
        ([(0, 2), (3, None)], "route: segments: one starts at 3, not at 2"),
        ([(0, None), (0, None)], "route: segments: only the last one may be open"),
        ([(0, 2)], "route: segments: the last one must be open: it decodes"),
        ([(-1, None)], "segment: start: must not be negative, is -1"),
        ([(2, 2)], "segment: stop: must be beyond its start 2, is 2"),
    ],
)
def test_what_is_not_a_route_says_why(pairs: list[tuple[int, int | None]], says: str) -> None:
    with pytest.raises(InputError) as caught:
        Route(tuple(Segment("r", start, stop) for start, stop in pairs))
    assert str(caught.value) == says


@pytest.mark.parametrize("at_token", [0, -1])
def test_nothing_can_be_handed_over_before_the_first_token(at_token: int) -> None:
    with pytest.raises(InputError, match="segment: stop"):
        handed_over("a", "b", at_token)
