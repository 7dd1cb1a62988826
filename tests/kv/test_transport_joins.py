"""Connections that join a shipment, in whatever state it is, and agree with it on chunks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from kv_kit import ABOUT, BOUND, SMALL, SMALL_LINKS, Ends, ends, made, plain, until

from potluck.core.errors import InputError
from potluck.kv import checksum
from potluck.kv.chunks import KvManifest
from potluck.kv.frames import (
    ChunkPiece,
    FrameReader,
    HandleRefused,
    Heartbeat,
    Hello,
    Message,
    SenderProblem,
    TransferDone,
    TransferEnd,
    TransferOpening,
    frame,
)
from potluck.kv.handles import new_handle, new_session
from potluck.kv.kv_sender import OutgoingTransfer
from potluck.kv.send_queue import SendQueue, pack

PARCELS = made(3, 8)
RIGHT = {parcel.layer: plain(parcel) for parcel in PARCELS}
SLACK_S = 2.5


class Late:
    """One connection of a session, by hand."""

    def __init__(
        self, address: tuple[str, int], handle: str, session: bytes, chunk_bytes: int = 4096
    ) -> None:
        self.connection = socket.create_connection(address, timeout=0.1)
        self._reader = FrameReader()
        self.heard: list[Message] = []
        self.closed = False
        self.say(Hello(session, BOUND, handle, 0, 1 << 20, chunk_bytes, 200))

    def say(self, message: Message) -> None:
        self.connection.sendall(frame(message))

    def hear(self, enough: Callable[[Late], bool], within_s: float = 30.0) -> bool:
        """Whether it heard enough before long; beats alone never are."""
        end_s = time.monotonic() + within_s
        while not enough(self):
            if self.closed or time.monotonic() > end_s:
                return False
            try:
                data = self.connection.recv(1 << 16)
            except TimeoutError:
                continue
            except ConnectionError:
                data = b""
            self.closed = not data
            self.heard += [message for message, _ in self._reader.feed(data) if message != Heartbeat()]
        return True

    def has(self, kind: type) -> bool:
        return any(isinstance(message, kind) for message in self.heard)


@contextmanager
def late(pair: Ends, handle: str, session: bytes, chunk_bytes: int = 4096) -> Iterator[Late]:
    one = Late(pair.address, handle, session, chunk_bytes)
    try:
        yield one
    finally:
        one.connection.close()


# Joining a shipment, whatever its state.


def test_a_connection_that_joins_while_all_is_well_is_opened() -> None:
    thinking = threading.Event()

    def opened(have: int) -> KvManifest:
        thinking.wait(5)
        return ABOUT

    with ends() as pair:
        handle, session = new_handle(), new_session()
        transfer = pair.sender.offer(handle, BOUND, opened, 10.0)
        with late(pair, handle, session) as first, late(pair, handle, session) as second:
            assert until(lambda: transfer.opening)
            thinking.set()
            assert first.hear(lambda one: one.has(TransferOpening))
            assert second.hear(lambda one: one.has(TransferOpening))
            with late(pair, handle, session) as third:  # While it is being filled.
                assert third.hear(lambda one: one.has(TransferOpening))


def _fetched(pair: Ends, handle: str, session: bytes) -> OutgoingTransfer:
    transfer = pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
    transfer.finish()
    with late(pair, handle, session) as first:
        assert first.hear(lambda one: one.has(TransferEnd))
        first.say(TransferDone())
        assert transfer.wait(30) == "fetched"
    return transfer


def _failed(pair: Ends, handle: str, session: bytes) -> OutgoingTransfer:
    transfer = pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
    with late(pair, handle, session) as first:
        assert first.hear(lambda one: one.has(TransferOpening))
        transfer.fail("no more")
        assert first.hear(lambda one: one.has(SenderProblem))
    return transfer


def _engine_failed(pair: Ends, handle: str, session: bytes) -> OutgoingTransfer:
    def opened(have: int) -> KvManifest:
        raise InputError("have", "is wrong")

    transfer = pair.sender.offer(handle, BOUND, opened, 10.0)
    with late(pair, handle, session) as first:
        assert first.hear(lambda one: one.has(SenderProblem))
    return transfer


def _gone(pair: Ends, handle: str, session: bytes) -> OutgoingTransfer:
    transfer = pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
    with late(pair, handle, session) as first:
        assert first.hear(lambda one: one.has(TransferOpening))
    assert transfer.wait(SMALL.lease_s + SLACK_S) == "gone"
    return transfer


def _withdrawn(pair: Ends, handle: str, session: bytes) -> OutgoingTransfer:
    transfer = pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
    pair.sender.withdraw(handle)
    return transfer


@pytest.mark.parametrize("ending", [_fetched, _failed, _engine_failed, _gone, _withdrawn])
def test_whoever_joins_after_the_end_gets_an_answer(
    ending: Callable[[Ends, str, bytes], OutgoingTransfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ends() as pair:
        forgotten = pair.sender._forget
        # Ended shipments are forgotten when somebody looks; nobody does between the end and the replay.
        monkeypatch.setattr(pair.sender, "_forget", lambda: None)
        handle, session = new_handle(), new_session()
        ending(pair, handle, session)
        with late(pair, handle, session) as replay:
            assert replay.hear(lambda one: one.has(HandleRefused) or one.has(SenderProblem))
            assert not replay.has(TransferOpening) or ending is _failed
        monkeypatch.setattr(pair.sender, "_forget", forgotten)


def test_a_connection_whose_fetch_is_done_elsewhere_is_not_kept_for_ever() -> None:
    with ends() as pair:
        handle, session = new_handle(), new_session()
        transfer = pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
        transfer.finish()
        with late(pair, handle, session) as first, late(pair, handle, session) as second:
            assert first.hear(lambda one: one.has(TransferOpening))
            assert second.hear(lambda one: one.has(TransferOpening))
            first.say(TransferDone())
            assert transfer.wait(30) == "fetched"
            second.hear(lambda one: False)
            assert second.closed


# Chunks that a receiver takes.


def test_a_receiver_that_takes_smaller_chunks_gets_them() -> None:
    with ends(limits=replace(SMALL, chunk_bytes=1 << 14), link_limits=SMALL_LINKS) as pair:
        handle, transfer = pair.offer()
        for parcel in PARCELS[:4]:  # Cut and checked before anybody came.
            transfer.put(parcel)
        feeding = threading.Timer(0.1, lambda: [transfer.put(parcel) for parcel in PARCELS[4:]])
        feeding.start()
        finishing = threading.Timer(0.3, transfer.finish)
        finishing.start()
        _, got = pair.fetch(handle)
        assert got == RIGHT
        feeding.join()
        finishing.join()
        assert transfer.wait(30) == "fetched"
        assert pair.sender.limits.chunk_bytes == 1 << 14


def test_all_connections_of_a_fetch_agree_on_their_chunks() -> None:
    with ends(limits=replace(SMALL, chunk_bytes=1 << 15)) as pair:
        handle, session = new_handle(), new_session()
        pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
        with late(pair, handle, session, 1 << 14) as first:
            assert first.hear(lambda one: one.has(TransferOpening))
            with late(pair, handle, session, 1 << 20) as more, late(pair, handle, session, 1 << 13) as less:
                assert more.hear(lambda one: one.has(TransferOpening))
                assert less.hear(lambda one: one.has(HandleRefused))
            sizes = {
                m.chunk_bytes for one in (first, more) for m in one.heard if isinstance(m, TransferOpening)
            }
            assert sizes == {1 << 14}


def test_chunks_that_are_too_small_do_not_take_the_handle() -> None:
    with ends() as pair:
        handle, _ = pair.send(PARCELS)
        with late(pair, handle, new_session(), 16) as tiny:
            tiny.hear(lambda one: False)
            assert tiny.closed
            assert not tiny.heard
        _, got = pair.fetch(handle)
        assert got == RIGHT


@pytest.mark.parametrize("most_bytes", [4096, 5000, 8192, 1 << 20])
def test_a_load_that_is_cut_anew_gives_out_every_byte_once(most_bytes: int) -> None:
    load = SendQueue(8192)
    load.put(pack(PARCELS[0], 8192))
    load.cut(most_bytes)
    load.put(pack(PARCELS[1], 8192))  # It was cut before it was known.
    load.finish()
    load.open(1 << 30)
    load.join(1, 1 << 20)
    found = [b"", b""]
    while isinstance(todo := load.next(1), tuple):
        chunk, data = todo
        assert isinstance(chunk, ChunkPiece)
        assert len(data) <= min(8192, most_bytes)
        assert chunk.sums in (None, checksum.sums(data))
        found[chunk.label.index] += bytes(data)
    assert found == [bytes(parcel.parameters) + bytes(parcel.data) for parcel in PARCELS[:2]]
