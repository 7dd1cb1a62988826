"""Senders keep to what they are granted, and share it as tenants weigh: by a clock that tests wind."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import SMALL, ends, made, plain

from potluck.kv.kv_sender import BandwidthGrant
from potluck.kv.throttle import BURST_S, LEAST_PIECE_BYTES, LinkThrottle

MIB = 1 << 20


def drive(
    throttle: LinkThrottle, flows: dict[int, tuple[str, float]], seconds: float, piece: int
) -> dict[int, int]:
    """All flows want to send all the time; each asks again when it was told to."""
    sent, due = dict.fromkeys(flows, 0), dict.fromkeys(flows, 0.0)
    now_s = 0.0
    while True:
        key = min(due, key=lambda each: (due[each], each))
        now_s = max(now_s, due[key])
        if now_s >= seconds:
            return sent
        wait_s = throttle.wait_s(key, *flows[key], now_s)
        if wait_s > 0:
            due[key] = now_s + wait_s
            continue
        throttle.sent(key, piece)
        sent[key] += piece


@given(st.floats(1e6, 1e10), st.integers(1, 64))
@settings(max_examples=10, deadline=None)
def test_no_more_is_sent_than_was_granted(bytes_per_s: float, pieces_per_s: int) -> None:
    piece = max(1, int(bytes_per_s / pieces_per_s))
    throttle = LinkThrottle(bytes_per_s, 0.0)
    whole = sum(drive(throttle, {1: ("a", 1.0), 2: ("b", 1.0)}, 5.0, piece).values())
    burst = max(bytes_per_s * BURST_S, 1 << 16)
    assert whole == throttle.sent_bytes
    assert whole <= 5.0 * bytes_per_s + burst + piece
    assert whole >= 0.9 * 5.0 * bytes_per_s - 2 * piece


def test_tenants_share_as_they_weigh_and_transfers_of_one_evenly() -> None:
    flows = {1: ("heavy", 3.0), 2: ("light", 1.0), 3: ("light", 1.0), 4: ("light", 1.0)}
    sent = drive(LinkThrottle(100 * MIB, 0.0), flows, 20.0, MIB // 4)
    whole = sum(sent.values())
    assert sent[1] / whole == pytest.approx(0.75, abs=0.02)
    for key in (2, 3, 4):
        assert sent[key] / whole == pytest.approx(0.25 / 3, abs=0.02)


def test_one_that_rests_or_leaves_holds_nobody_up() -> None:
    throttle = LinkThrottle(10 * MIB, 0.0)
    assert throttle.wait_s(1, "a", 1.0, 0.0) == 0.0
    throttle.sent(1, MIB)  # in debt
    assert throttle.wait_s(2, "b", 1.0, 0.0) > 0.0  # has the lower tag now
    later_s = 0.5
    assert throttle.wait_s(1, "a", 1.0, later_s) > 0.0
    throttle.rest(2)
    assert throttle.wait_s(1, "a", 1.0, later_s) == 0.0
    assert throttle.wait_s(2, "b", 1.0, later_s) == 0.0
    throttle.leave(2)
    assert throttle.wait_s(1, "a", 1.0, later_s) == 0.0
    assert throttle.wait_s(3, "c", 1.0, later_s) == 0.0  # a newcomer owes nothing
    assert throttle.wait_s(1, "a", 1.0, later_s) > 0.0
    # one that asked and is not heard of any more is passed by after a while
    assert throttle.wait_s(1, "a", 1.0, later_s + 10.0) == 0.0


def test_a_new_grant_holds_from_now_on_and_pieces_fit_it() -> None:
    throttle = LinkThrottle(10 * MIB, 0.0)
    slow = drive(throttle, {1: ("a", 1.0)}, 1.0, MIB // 8)[1]
    throttle.grant(100 * MIB, 1.0)
    assert throttle.piece_bytes == 1 << 21
    before = throttle.sent_bytes
    now_s = 1.0
    while now_s < 2.0:
        wait_s = throttle.wait_s(1, "a", 1.0, now_s)
        now_s += wait_s
        if not wait_s:
            throttle.sent(1, MIB // 8)
    assert throttle.sent_bytes - before == pytest.approx(10 * slow, rel=0.1)
    throttle.grant(1.0, 2.0)
    assert throttle.piece_bytes == LEAST_PIECE_BYTES


HERE = frozenset({"127.0.0.1"})


def test_caches_cross_a_throttled_link_whole_and_by_turns() -> None:
    chunks = {seed: made(seed, 6) for seed in range(4)}
    problems: list[Exception] = []
    with ends() as pair:
        pair.sender.granted([BandwidthGrant("a->b", HERE, 50 * MIB)], time.monotonic())

        def one(seed: int) -> None:
            try:
                handle, _ = pair.send(chunks[seed])
                _, got = pair.fetch(handle, degree=2)
                assert got == {chunk.layer: plain(chunk) for chunk in chunks[seed]}
            except Exception as error:
                problems.append(error)

        threads = [threading.Thread(target=one, args=(seed,)) for seed in chunks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        (throttle,) = pair.sender.throttles
        moved = sum(len(p.data) + len(p.parameters) for item in chunks.values() for p in item)
        assert throttle.sent_bytes == moved
        pair.sender.granted([], time.monotonic())
        handle, _ = pair.send(chunks[0])
        pair.fetch(handle)
        assert throttle.sent_bytes == moved  # nobody keeps to what is not granted any more


def test_what_was_not_granted_waits_and_its_receiver_hears_so() -> None:
    chunks = made(2, 64)
    whole = sum(len(p.data) + len(p.parameters) for p in chunks)
    burst = 1 << 16
    assert whole > 2 * burst
    with ends() as pair:
        pair.sender.granted(
            [BandwidthGrant("a->b", HERE, 1.0, until_s=time.monotonic() + 60.0)], time.monotonic()
        )
        handle, transfer = pair.send(chunks)
        (throttle,) = pair.sender.throttles
        result: list[object] = []
        receiver = threading.Thread(target=lambda: result.append(pair.fetch(handle, deadline_s=20.0)))
        receiver.start()
        transfer.wait(1.5)  # longer than the receiver's patience for silence
        assert 0 < throttle.sent_bytes <= burst + SMALL.piece_bytes
        assert not result
        pair.sender.granted(
            [BandwidthGrant("a->b", HERE, 1e9, until_s=time.monotonic() - 1.0)], time.monotonic()
        )
        receiver.join()
        assert result
    assert pair.sender.grants == ()  # it had ended, and was swept away
