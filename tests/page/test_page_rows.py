"""What the page's rows are made of, without a gateway: requests that are followed, rates that fade."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from potluck.core.state.events import LinkReported, RequestArrived, RequestFinished
from potluck.core.values.types import Request
from potluck.gateway.page.snapshot import FleetSnapshot, KvFlows, Rates
from potluck.gateway.page.stream import LATEST, NEW_PER_S, Waterfall

MODEL = "chat"


def test_unwatched_only_some_are_followed_and_no_more_than_a_bound_is_kept() -> None:
    fall = Waterfall(0.0)

    def ends(name: str, at_s: float) -> None:
        fall(at_s, RequestArrived(Request(name, MODEL, at_s, 10, 1)), [])
        fall(at_s, RequestFinished(name, 0, 1), [])

    for at in range(1000):
        ends(f"a{at}", 5.0 + at * 1e-6)
    assert len(fall.latest()) == NEW_PER_S
    assert fall.changed() == {}, "which nobody reads"
    for second in range(6, 20):
        for at in range(NEW_PER_S):
            ends(f"b{second}-{at}", second)
    assert len(fall.latest()) == LATEST
    assert "b19-0" in fall.latest()
    fall.watched(True)
    ends("c", 30.0)
    assert list(fall.changed()) == ["c"]
    assert fall.changed() == {}


def test_rates_hold_what_was_added_and_fade() -> None:
    rates: Rates[str] = Rates(4.0, 0.01)
    rates.look(1e9)
    rates.add("a", 8.0)
    assert rates.look(1.0) == {"a": 2.0}
    later = [rates.look(1.0).get("a", 0.0) for _ in range(30)]
    assert later == sorted(later, reverse=True)
    assert later[0] == 1.5
    assert later[-1] == 0.0


def test_a_link_is_as_busy_as_what_crossed_it_lately() -> None:
    def links(used: float) -> tuple[LinkReported, ...]:
        return (LinkReported("east", "west", used, 0.0, 10.0),)

    core: Any = SimpleNamespace(
        links_gbps={}, plan=SimpleNamespace(wires=()), watch=SimpleNamespace(links=links(0.8))
    )
    sight = FleetSnapshot(core, KvFlows())
    assert sight._links(1e9)["east > west"]["used"] == 0.8
    core.watch.links = links(0.0)
    later = [sight._links(0.5)["east > west"]["used"] for _ in range(40)]
    assert later == sorted(later, reverse=True)
    assert 0.4 < float(str(later[0])) < 0.8, "a moment without transfers is not an idle link"
    assert later[-1] == 0.0
