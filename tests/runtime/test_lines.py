"""Whatever is told or asked for comes back from its line as it was, to the last bit."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_fleets import closed_plan, combo, flow_plan, mixed, prefill_only

from potluck.core.errors import FormatError
from potluck.core.state.actions import Action, Run, SeenLengths
from potluck.core.state.events import Event, ReplicaStatus, RequestArrived, Tick
from potluck.core.values.plan import Plan, ReplicaSpec
from potluck.core.values.route import Route, Segment, aggregated
from potluck.core.values.types import NodeOffer, Region, Request
from potluck.runtime.log_lines import ACTIONS, EVENTS, kind_of, line, read_line

text = st.text(max_size=8) | st.sampled_from(['"', "\\", "\n", "\ud800", "é", "東", '["Tick"]', ""])
whole = st.integers(-(2**70), 2**70) | st.integers(0, 9)
floats = st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0, 0.1 + 0.2, 5e-324, float("inf")])
names = st.lists(st.integers(0, 2**128 - 1) | st.integers(-(2**63), 9), max_size=4).map(tuple)


@st.composite
def routes(draw: st.DrawFn) -> Route:
    cuts = [0, *sorted(draw(st.sets(st.integers(1, 10**9), max_size=3)))]
    stops: list[int | None] = [*cuts[1:], None]
    return Route(tuple(Segment(draw(text), a, b) for a, b in zip(cuts, stops, strict=True)))


counts = st.integers(1, 10**9)
deadlines = st.none() | floats
requests = st.builds(Request, text, text, floats, counts, counts, whole, deadlines, names, text, text)
members = st.builds(
    ReplicaSpec, text, text, text, st.integers(0, 9), st.just("combo"), text, st.just("mixed"), text
)
seen = st.builds(SeenLengths, text, floats, st.lists(st.tuples(floats, floats), max_size=2).map(tuple))
prices = st.floats(0, 1e6)
offers = st.builds(NodeOffer, text, prices, st.integers(0, 99), st.booleans())
regions = st.builds(Region, text, st.lists(offers, max_size=2).map(tuple))
plans = st.sampled_from(
    [closed_plan((combo(1, 2), "east", 1)), flow_plan((prefill_only(), "west", 1), (mixed(), "east", 2))]
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    known: dict[Any, st.SearchStrategy[Any]] = {
        str: text,
        int: whole,
        float: floats,
        bool: st.booleans(),
        float | None: st.none() | floats,
        tuple[int, ...]: names,
        tuple[str, ...]: st.lists(text, max_size=3).map(tuple),
        tuple[tuple[str, float], ...]: st.lists(st.tuples(text, floats), max_size=3).map(tuple),
        tuple[SeenLengths, ...]: st.lists(seen, max_size=2).map(tuple),
        Request: requests,
        Route: routes(),
        Route | None: st.none() | routes(),
        Plan: plans,
        ReplicaSpec: members,
        tuple[Region, ...]: st.lists(regions, max_size=2).map(tuple),
    }
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    return of_kind(ReplicaStatus) if hint is ReplicaStatus else known[hint]


def of_kind(kind: Any) -> st.SearchStrategy[Any]:
    return st.tuples(*map(values, get_type_hints(kind).values())).map(lambda fields: kind(*fields))


told = st.one_of(*map(of_kind, get_args(Event)))
asked = st.lists(st.one_of(*map(of_kind, get_args(Action))), max_size=3)


@given(floats, told, asked)
def test_any_event_and_action_comes_back_from_its_line(at_s: float, event: Any, actions: Any) -> None:
    written = line(at_s, event, actions)
    assert written.endswith("]]\n")
    assert written.count("\n") == 1
    assert written.isascii()
    assert kind_of(written) == type(event).__name__
    found = read_line(written, "line 1")
    assert found == (at_s, event, actions)
    assert [type(each) for each in found[2]] == [type(each) for each in actions]
    # Equal numbers may still differ: 0.0 and -0.0, 1 and 1.0.
    assert repr(found) == repr((at_s, event, actions))


def test_all_that_can_be_told_or_asked_for_is_known() -> None:
    assert set(EVENTS.values()) == set(get_args(Event))
    assert set(ACTIONS.values()) == set(get_args(Action))


def test_half_a_line_is_never_taken_for_a_whole_one() -> None:
    request = Request("a", "chat", 1.25, 10, 5, blocks=(2**127, 5), exact=True)
    written = line(1.25, RequestArrived(request), [Run("a", aggregated("r"), 1, 10, 0)])
    for cut in range(1, len(written) - 1):
        with pytest.raises(FormatError, match="is not JSON"):
            read_line(written[:cut], "line 1")
    assert read_line(line(2, Tick(), []), "line 1") == (2.0, Tick(), [])
