"""Engines that hand on to each other, in rings or in any way, with more requests than rows: all are answered.

Loops without threads, and a transport in which an engine fetches only a few caches at once, in any order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random

import pytest
from engine_models import prompt
from face_kit import face, played, tokens_in
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_kit import PretendDesk, pretend_service

from potluck.core.errors import InputError
from potluck.engine.loop.messages import NOT_FETCHED, LayerSent, RowReady
from potluck.engine.server import kv_connector
from potluck.kv.chunks import KvManifest
from potluck.kv.handles import new_handle

FETCHES = 2
"""That an engine has at once."""
OUTPUT = 3


class Leg:
    """A request that is computed at one desk and answered at another."""

    def __init__(self, sender: PretendDesk, receiver: PretendDesk, tokens: Sequence[int]) -> None:
        self.sender, self.receiver = sender, receiver
        whole = len(tokens) - 1
        self.source = sender.submit(tokens, stop=whole)
        self.target = receiver.submit(tokens, OUTPUT, start=whole)
        self.about: KvManifest | None = None
        self.wanted = self.expected = False
        self.taken = 0

    @property
    def fetched(self) -> bool:
        """Take a step of the fetch; whether it is over."""
        if self.about is None:
            have = self.receiver.loop.look_up(self.target)
            self.about = self.sender.loop.attach(self.source, have, self.sender.now_s)
        sent = [event for event in self.sender.said.get(self.source, []) if isinstance(event, LayerSent)]
        if sent and not self.wanted:
            self.receiver.loop.want(self.target)
            self.wanted = True
        said = self.receiver.said.get(self.target, [])
        if not any(isinstance(event, RowReady) for event in said):
            return False
        if not self.expected:
            self.receiver.loop.expect(self.target, self.about)
            self.expected = True
        for event in sent[self.taken :]:
            for parcel in event.parcels:
                self.receiver.loop.accept(self.target, parcel)
        self.taken = len(sent)
        if sent[-1].last:
            self.receiver.loop.arrived(self.target)
        return sent[-1].last


def finished(desks: list[PretendDesk], hops: list[Leg]) -> bool:
    """Run all until nothing changes any more."""
    lines = {brain_loop: [hop for hop in hops if hop.receiver is brain_loop] for brain_loop in desks}
    still = 0
    while still < 50:
        busy = [brain_loop.turn() for brain_loop in desks]
        for line in lines.values():
            for hop in line[:FETCHES]:
                if hop.fetched:
                    line.remove(hop)
                    busy.append(True)
        still = 0 if any(busy) else still + 1
    return not any(lines.values()) and all(brain_loop.loop.idle for brain_loop in desks)


def desks_of(count: int, **fields: int) -> list[PretendDesk]:
    return [PretendDesk(**fields) for _ in range(count)]  # type: ignore[arg-type]


def put_aside(brain_loop: PretendDesk, hops: list[Leg]) -> list[Leg]:
    """Those whose parcels went out, though nobody came."""
    return [
        hop
        for hop in hops
        if any(isinstance(event, LayerSent) for event in brain_loop.said.get(hop.source, ()))
    ]


def test_a_ring_whose_fetches_come_in_the_other_order_goes_on() -> None:
    """Those that are fetched first are computed last: they wait for rows of caches that nobody fetches yet."""
    desks = desks_of(3)
    hops = [
        Leg(desks[place % 3], desks[(place + 1) % 3], prompt(40 + place, seed=place)) for place in range(45)
    ]
    assert finished(desks, hops[::-1])
    assert all(hop.receiver.end(hop.target).reason == "length" for hop in hops)
    for brain_loop in desks:
        brain_loop.loop.check()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=60),
    st.integers(0, 1 << 16),
    st.sampled_from([20, 60, 1000]),
)
def test_whoever_hands_on_to_whom_all_are_answered(
    pairs: list[tuple[int, int]], seed: int, blocks: int
) -> None:
    chance, desks = Random(seed), desks_of(4, blocks=blocks)
    hops = [
        Leg(desks[first], desks[(first + step) % 4], prompt(chance.randint(20, 250), seed=place))
        for place, (first, step) in enumerate(pairs)
    ]
    chance.shuffle(hops)
    assert finished(desks, hops)
    assert all(hop.receiver.end(hop.target).reason == "length" for hop in hops)
    for brain_loop in desks:
        brain_loop.loop.check()


def test_a_cache_that_nobody_came_for_leaves_its_row_only_when_somebody_waits() -> None:
    sender, receiver = desks_of(2)
    hops = [Leg(sender, receiver, prompt(100, seed=place)) for place in range(3)]
    sender.run()
    assert put_aside(sender, hops) == []
    sender.now_s += 61.0
    sender.turn()
    assert sender.end(hops[0].source).code == NOT_FETCHED
    more = [Leg(sender, receiver, prompt(100, seed=10 + place)) for place in range(9)]
    sender.run()
    gone = put_aside(sender, more)
    assert len(gone) >= len(more) - 3
    about = sender.loop.attach(gone[0].source, 16, sender.now_s)
    assert (about.start, about.stop) == (0, 99)
    with pytest.raises(InputError, match="handle"):
        sender.loop.attach(gone[0].source, 16, sender.now_s)


def test_what_is_put_aside_is_bounded_and_may_be_dropped() -> None:
    sender, receiver = desks_of(2)
    sender.loop.aside.most_bytes = 1
    hops = [Leg(sender, receiver, prompt(100, seed=place)) for place in range(9)]
    sender.run()
    gone = put_aside(sender, hops)
    assert len(gone) == 1  # the bound is asked before the next one
    sender.loop.aside.taken(gone[0].source)
    sender.run()
    assert len(put_aside(sender, hops)) == 2


def test_a_ring_of_engines_goes_on_over_their_faces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three engines with a few rows and fewer fetches at once; who is fetched first is computed last."""
    monkeypatch.setattr(kv_connector, "MOST_AT_ONCE", 2)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            ring = [
                await stack.enter_async_context(
                    face(pretend_service(max_running=4, handover_rows=4, prefix_cache_bytes=0))
                )
                for _ in range(3)
            ]
            computed, answered = [], []
            for place in range(24):
                first, second = ring[place % 3], ring[(place + 1) % 3]
                tokens, handle, name = prompt(60, seed=place), new_handle(), f"r{place}"
                computed.append(first.segment(tokens, request=name, stop=59, handle=handle))
                source = {"kv": first.kv, "handle": handle}
                answered.append(
                    second.segment(
                        tokens, request=name, start=59, max_tokens=4, ignore_eos=True, source=source
                    )
                )
            replies = await asyncio.gather(*computed, *reversed(answered))
            assert {status for status, _ in replies} == {200}
            assert all(lines[-1]["ended"] == "handed_on" for _, lines in replies[:24])
            assert all(len(tokens_in(lines)) == 4 for _, lines in replies[24:])
            for engine in ring:
                await engine.until_idle()

    played(scenario)
