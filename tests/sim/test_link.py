"""Processor sharing on links against a reference."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf, nextafter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.sim.links.link import SharedPipe
from potluck.sim.world.event_queue import (
    CALL,
    ONE_HEAP_MAX_REPLICAS,
    SLICED_MIN_REQUESTS_PER_S,
    Entry,
    EventQueue,
    slices_per_s,
)

WEIGHTS = {"": 1.0, "gold": 4.0, "iron": 0.5}


Op = tuple[str, float, float, str]


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.floats(0, 3), st.floats(0.1, 100), st.sampled_from(sorted(WEIGHTS))),
        st.tuples(st.just("abort"), st.floats(0, 3), st.floats(0, 0.999), st.just("")),
        st.tuples(st.just("rate"), st.floats(0, 3), st.sampled_from([0.0, 1.0, 5.0, 50.0]), st.just("")),
    ),
    max_size=25,
)


class SlowReference:
    """Shares by going through all transfers at every change: all of the rate is used while one is open, tenants have
    it by weight, and each one's transfers evenly."""

    def __init__(self, rate: float) -> None:
        self.at_s, self.rate = 0.0, rate
        self.left: dict[int, float] = {}
        self.whose: dict[int, str] = {}
        self.ends: dict[int, float] = {}

    def each(self) -> dict[int, float]:
        tenants = [self.whose[key] for key in self.left]
        weight = sum(WEIGHTS[tenant] for tenant in set(tenants))
        return {
            key: self.rate * WEIGHTS[tenant] / weight / tenants.count(tenant)
            for key, tenant in zip(self.left, tenants, strict=True)
        }

    def go(self, to_s: float) -> None:
        while True:
            item = self.each()
            key = min(self.left, key=lambda k: self.left[k] / item[k] if item[k] else inf, default=None)
            due_s = self.at_s + self.left[key] / item[key] if key is not None and item[key] > 0 else inf
            step_s = min(due_s, to_s) - self.at_s
            for k in self.left:
                self.left[k] -= step_s * item[k]
            self.at_s = min(due_s, to_s)
            if due_s > to_s or key is None:
                return
            del self.left[key]
            self.ends[key] = due_s


@given(OPS)
def test_shared_pipe_equals_the_reference_and_conserves_bytes(ops: list[Op]) -> None:
    pipe, slow = SharedPipe("link", "a", "b", 10.0, 0.0), SlowReference(10.0)
    ends: dict[int, float] = {}
    now_s, keys = 0.0, 0

    def go(to_s: float) -> None:
        while pipe.next_s() <= to_s:
            at_s = pipe.next_s()
            for key in pipe.done(at_s):
                ends[key] = at_s
        slow.go(to_s)

    for what, wait_s, value, tenant in ops:
        now_s += wait_s
        go(now_s)
        if what == "start":
            pipe.start(now_s, keys, value, tenant, WEIGHTS[tenant])
            slow.left[keys], slow.whose[keys] = value, tenant
            keys += 1
        elif what == "abort" and pipe.keys and len(pipe.keys) == len(slow.left):
            key = pipe.keys[int(value * len(pipe.keys))]
            if key in slow.left:
                pipe.abort(now_s, key)
                del slow.left[key]
        elif what == "rate":
            pipe.set_rate(now_s, value)
            slow.rate = value
        message = pipe.sent_bytes + pipe.open_bytes(now_s)
        assert message == pytest.approx(pipe.served_bytes, rel=1e-9, abs=1e-6)
    pipe.set_rate(now_s, 10.0)
    slow.rate = 10.0
    go(now_s + 1e6)
    assert len(pipe) == 0
    assert pipe.next_s() == inf
    assert ends == pytest.approx(slow.ends, rel=1e-6, abs=1e-6)
    assert pipe.sent_bytes == pytest.approx(pipe.served_bytes, rel=1e-9, abs=1e-6)


def test_two_transfers_share_a_pipe_and_the_second_gets_the_rest() -> None:
    pipe = SharedPipe("link", "a", "b", 10.0, 0.0)
    pipe.start(0.0, 1, 10.0)
    pipe.start(0.0, 2, 20.0)
    assert pipe.next_s() == pytest.approx(2.0)
    assert pipe.done(2.0) == [1]
    assert pipe.next_s() == pytest.approx(3.0)
    assert pipe.share_bytes_per_s(1) == pytest.approx(5.0)
    assert pipe.queued_bytes(2.5) == pytest.approx(5.0)
    assert pipe.done(3.0) == [2]
    assert (pipe.sent_bytes, pipe.busy_s) == (30.0, pytest.approx(3.0))


def test_tenant_gets_its_share_of_a_pipe_whatever_others_send() -> None:
    """And of one tenant's, whoever began earlier with no more to send is over no later."""
    pipe = SharedPipe("link", "a", "b", 10.0, 0.0)
    for key in range(20):
        pipe.start(0.0, key, 10.0, "flood")
    assert pipe.share_bytes_per_s(1, "other") == pytest.approx(5.0)
    assert pipe.share_bytes_per_s(1, "other", 4.0) == pytest.approx(8.0)
    pipe.start(0.0, 99, 10.0, "other")
    assert pipe.next_s() == pytest.approx(2.0)
    assert pipe.done(2.0) == [99]
    pipe.start(2.0, 100, 8.0, "gold", 4.0)
    assert pipe.done(3.0) == [100]
    assert pipe.next_s() == pytest.approx(3.0 + (200.0 - 10.0 - 2.0) / 10.0)
    assert pipe.done(30.0) == list(range(20))
    assert pipe.sent_bytes == pytest.approx(pipe.served_bytes) == pytest.approx(218.0)


def test_transfer_on_a_dead_pipe_waits_and_its_sent_bytes_are_counted_when_aborted() -> None:
    pipe = SharedPipe("link", "a", "b", 10.0, 0.0)
    pipe.start(0.0, 1, 10.0)
    pipe.set_rate(0.5, 0.0)
    assert pipe.next_s() == inf
    assert pipe.done(100.0) == []
    assert pipe.abort(100.0, 1) == pytest.approx(5.0)
    assert pipe.abort(100.0, 7) == 0.0


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
def test_event_queue_order_equals_one_heap(what: list[float | None], per_s: float) -> None:
    events, heap, now_s = EventQueue(per_s), list[tuple[float, int]](), 0.0
    for item in what:
        if item is not None:  # nothing is put down for a time that is over
            events.push(max(item, now_s), CALL, None)
            heappush(heap, (max(item, now_s), events.sequence))
        elif heap:
            at_s, sequence, *_ = popped(events)
            assert (at_s, sequence) == heappop(heap)
            now_s = at_s
    while heap:
        assert popped(events)[:2] == heappop(heap)


@given(st.integers(0, 100_000), st.floats(0.0, 1e9))
def test_event_queue_slices_are_powers_of_two_for_large_fleets_only(replicas: int, rate_per_s: float) -> None:
    per_s = slices_per_s(replicas, rate_per_s)
    if replicas <= ONE_HEAP_MAX_REPLICAS or rate_per_s <= SLICED_MIN_REQUESTS_PER_S:
        assert per_s == 0.0
    else:
        mantissa, _ = per_s.hex().split("p")
        assert mantissa == "0x1.0000000000000"
