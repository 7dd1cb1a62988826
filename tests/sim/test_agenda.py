"""The agenda in slices against one heap: the same entries in the same order, whatever is put down on the way."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf, nextafter

from hypothesis import example, given
from hypothesis import strategies as st

from potluck.sim.world.event_queue import CALL, FEW, SLOWEST_PER_S, Entry, EventQueue, slices_per_s

EDGES_S = [0.0, 0.125, 0.25, 1.0, 1.5, 7.0]
BESIDE_S = [nextafter(at_s, way_s) for at_s in EDGES_S for way_s in (0.0, inf)]
TIMES_S = st.one_of(st.floats(0.0, 10.0), st.sampled_from([*EDGES_S, *BESIDE_S, 1e6, 2.0**39, inf]))
PUSH_OR_POP = st.lists(st.one_of(TIMES_S, st.none()), max_size=200)


def popped(events: EventQueue) -> Entry:
    if not events.heap:
        events.turn()
    return heappop(events.heap)


@example([inf, None, 1.0], 0.0)
@given(PUSH_OR_POP, st.sampled_from([0.0, 2.0**-3, 1.0, 4.0, 8.0, 2.0**20]))
def test_order_is_that_of_one_heap(what: list[float | None], per_s: float) -> None:
    events, heap, now_s = EventQueue(per_s), list[tuple[float, int]](), 0.0
    for each in what:
        if each is not None:  # nothing is put down for a time that is over
            events.push(max(each, now_s), CALL, None)
            heappush(heap, (max(each, now_s), events.sequence))
        elif heap:
            at_s, sequence, *_ = popped(events)
            assert (at_s, sequence) == heappop(heap)
            now_s = at_s
    while heap:
        assert popped(events)[:2] == heappop(heap)


@given(st.integers(0, 100_000), st.floats(0.0, 1e9))
def test_slices_are_powers_of_two_and_only_for_large_fleets(replicas: int, rate_per_s: float) -> None:
    per_s = slices_per_s(replicas, rate_per_s)
    if replicas < FEW or rate_per_s <= SLOWEST_PER_S:
        assert per_s == 0.0
    else:
        mantissa, _ = per_s.hex().split("p")
        assert mantissa == "0x1.0000000000000"
