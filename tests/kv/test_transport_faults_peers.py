"""Peers that are dead, lost, greedy, slow on purpose, or liars."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from kv_kit import (
    ABOUT,
    BOUND,
    FINGERPRINT,
    REQUEST,
    SMALL,
    SMALL_LINKS,
    TOKENS_HASH,
    ends,
    made,
    plain,
    until,
)

from potluck.core.errors import PotluckError
from potluck.kv.checksum import sums
from potluck.kv.chunks import TransferError
from potluck.kv.fetch import FetchRequest, fetch
from potluck.kv.frames import (
    Ack,
    ChunkHeader,
    ChunkPiece,
    FrameReader,
    Heartbeat,
    Hello,
    Message,
    SenderProblem,
    TransferEnd,
    TransferOpening,
    frame,
)
from potluck.kv.handles import bound_to, new_handle, new_session
from potluck.kv.peer_connections import PeerConnections

SLACK_S = 2.5
PARCELS = made(6, 8)
RIGHT = {parcel.layer: plain(parcel) for parcel in PARCELS}


def greeting(handle: str, session: bytes = bytes(16), bound: bytes = BOUND, wait_ms: int = 300) -> bytes:
    return frame(Hello(session, bound, handle, 0, 1 << 20, 4096, wait_ms))


def answer(address: tuple[str, int], said: bytes, most_s: float = 3.0) -> tuple[bytes, float]:
    """All that a sender answers until it closes, and how long that took."""
    begun_s = time.monotonic()
    found = b""
    with (
        socket.create_connection(address, timeout=most_s) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(said)
        while data := connection.recv(1 << 16):
            found += data
    return found, time.monotonic() - begun_s


# To the sender.


def test_whatever_is_wrong_with_a_handle_the_answer_is_the_same() -> None:
    with ends() as pair:
        used, _ = pair.send(PARCELS)
        pair.fetch(used)
        expired, _ = pair.offer(lasts_s=0.0)
        other, _ = pair.send(PARCELS)
        claimed, transfer = pair.offer()
        holder = socket.create_connection(pair.address)
        holder.sendall(greeting(claimed, new_session()))
        assert until(lambda: transfer.state == "attached")
        asked = {
            "unknown": greeting(new_handle()),
            "used": greeting(used),
            "expired": greeting(expired),
            "of another request": greeting(other, bound=bound_to("r-2", FINGERPRINT, TOKENS_HASH)),
            "of another session": greeting(claimed, new_session()),
        }
        found = {name: answer(pair.address, said) for name, said in asked.items()}
        holder.close()
        without_beats = {raw.replace(frame(Heartbeat()), b"") for raw, _ in found.values()}
        assert len(without_beats) == 1
        assert all(took_s >= 0.3 for _, took_s in found.values())
        _, got = pair.fetch(other)  # The one that was guessed at is not spoiled by it.
        assert got == RIGHT


def test_a_wrong_handle_is_an_error_within_the_deadline() -> None:
    with ends() as pair:
        begun_s = time.monotonic()
        with pytest.raises(TransferError, match="unknown, has expired, was used"):
            pair.fetch(new_handle(), deadline_s=3.0)
        assert time.monotonic() - begun_s < SMALL.attach_s + SLACK_S
        handle, _ = pair.send(PARCELS)
        with pytest.raises(TransferError, match="another request"):
            pair.fetch(handle, request="r-2")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"P",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(4096),
        greeting("x" * 43)[:60],
        frame(Ack(1, 1)),
        frame(Hello(bytes(16), bytes(32), "x" * 43, 0, 1, 1, 1))[:8] + b"\xff" * 8,
    ],
)
def test_who_does_not_greet_properly_is_shown_the_door(said: bytes) -> None:
    with ends() as pair:
        found, took_s = answer(pair.address, said)
        assert found == b""
        assert took_s < SMALL.hello_s + SLACK_S


def test_a_greeting_byte_by_byte_is_cut_off() -> None:
    with ends() as pair:
        begun_s = time.monotonic()
        with socket.create_connection(pair.address) as connection, contextlib.suppress(ConnectionError):
            for byte in greeting(new_handle()):
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
                if time.monotonic() - begun_s > 5:
                    break
        assert until(lambda: pair.sender.connections == 0, 3)
        assert time.monotonic() - begun_s < 2 * SMALL.hello_s + SLACK_S


def test_a_crowd_at_the_door_is_bounded_and_passes() -> None:
    with ends(limits=replace(SMALL, most_connections=8)) as pair:
        crowd = [socket.create_connection(pair.address) for _ in range(40)]
        assert until(lambda: pair.sender.connections == 8)
        handle, _ = pair.send(PARCELS)
        assert until(lambda: pair.sender.connections == 0, 4)
        _, got = pair.fetch(handle)
        assert got == RIGHT
        for one in crowd:
            one.close()


@pytest.mark.parametrize("reads", [False, True])
def test_a_receiver_that_dies_frees_the_senders_memory(reads: bool) -> None:
    with ends() as pair:
        handle, transfer = pair.send(PARCELS)
        with socket.create_connection(pair.address) as connection:
            connection.sendall(greeting(handle))
            if reads:
                connection.recv(20000)
            assert until(lambda: transfer.state == "attached")
        assert transfer.wait(SMALL.lease_s + SMALL.silence_s + SLACK_S) == "gone"
        assert pair.sender.held_bytes == 0
        with pytest.raises(TransferError, match="gone"):
            transfer.put(PARCELS[0])


def test_a_receiver_that_stays_and_takes_nothing_loses_its_lease() -> None:
    large = [replace(PARCELS[0], layer=n) for n in range(400)]
    with ends() as pair:
        handle, transfer = pair.send(large)
        with socket.create_connection(pair.address) as connection:
            connection.sendall(greeting(handle))
            assert transfer.wait(SMALL.lease_s + SMALL.silence_s + SLACK_S) == "gone"
            assert pair.sender.held_bytes == 0


def test_a_cache_that_nobody_fetches_is_let_go() -> None:
    with ends() as pair:
        _, transfer = pair.send(PARCELS, lasts_s=0.3)
        assert pair.sender.held_bytes > 0
        assert transfer.wait(30) == "gone"
        assert until(lambda: pair.sender.transfers == 0)


@pytest.mark.parametrize(
    "lie", [Ack(1000, 0), Ack(0, 1 << 50), TransferEnd(0, 0), Heartbeat(), SenderProblem("x")]
)
def test_a_receiver_that_lies_is_cut_off(lie: Message) -> None:
    with ends() as pair:
        handle, transfer = pair.send(PARCELS)
        answer(pair.address, greeting(handle) + frame(lie))
        assert transfer.wait(SMALL.lease_s + SLACK_S) == "gone"


# To the receiver.


def test_a_sender_that_dies_is_reported_at_once() -> None:
    with ends() as pair:
        handle, _ = pair.offer()
        problem: list[Exception] = []
        timed: list[float] = []

        def receive() -> None:
            try:
                pair.fetch(handle, deadline_s=30.0)
            except PotluckError as error:
                problem.append(error)
            timed.append(time.monotonic())

        thread = threading.Thread(target=receive)
        thread.start()
        assert until(lambda: any(link.connections == 3 for link in pair.sender.links()))
        pair.sender.close()
        died_s = time.monotonic()
        thread.join(10)
        assert isinstance(problem[0], TransferError)
        assert timed[0] - died_s < SLACK_S


def test_nobody_there_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    links = PeerConnections([address], limits=SMALL_LINKS)
    begun_s = time.monotonic()
    wanted = FetchRequest(new_handle(), REQUEST, FINGERPRINT, TOKENS_HASH)
    with pytest.raises(TransferError, match="is lost"):
        fetch(links, address, wanted, lambda _: None, lambda _: None, deadline_s=30.0)
    assert time.monotonic() - begun_s < SLACK_S


Script = Callable[[socket.socket, Hello], None]


@contextlib.contextmanager
def liar(script: Script) -> Iterator[Callable[..., None]]:
    """A sender that follows a script; gives a way to fetch from it."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    over = threading.Event()
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            reader, found = FrameReader(), []
            while not found:
                found = reader.feed(connection.recv(4096))
            assert isinstance(found[0][0], Hello)
            script(connection, found[0][0])
            while connection.recv(4096) and not over.is_set():
                pass

    def accept() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                threads.append(threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True))
                threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    address = listener.getsockname()
    links = PeerConnections([address], limits=replace(SMALL_LINKS, retries=2), shared_memory=False)

    def try_it(deadline_s: float = 1.0) -> None:
        wanted = FetchRequest(new_handle(), REQUEST, FINGERPRINT, TOKENS_HASH)
        fetch(links, address, wanted, lambda _: None, lambda _: None, degree=2, deadline_s=deadline_s)

    try:
        yield try_it
    finally:
        over.set()
        links.close()
        for thread in [acceptor, *threads]:
            thread.join(6)
        listener.close()
    assert links.buffers.out_bytes == 0


def opened(hello: Hello, chunk_bytes: int = 4096) -> bytes:
    return frame(TransferOpening(hello.session, ABOUT, chunk_bytes, False))


def large(index: int) -> bytes:
    """The first chunk of a parcel as large as the window."""
    label = ChunkHeader(index, 0, "kv", "float32", "raw", 0, 256, (256, 2, 8, 8))
    return frame(ChunkPiece(label, label.parcel_bytes, 0, 4096, sums(bytes(4096)))) + bytes(4096)


def wrong_sums(hello: Hello) -> bytes:
    label = ChunkHeader(0, 0, "kv", "float32", "raw", 0, 2, (2, 2, 2, 8))
    return frame(ChunkPiece(label, 256, 0, 256, (1, 2))) + bytes(256)


LIES: dict[str, Callable[[Hello], bytes]] = {
    "nothing": lambda hello: b"",
    "garbage": lambda hello: bytes(range(256)),
    "no opening": lambda hello: large(0),
    "another session's opening": lambda hello: frame(TransferOpening(bytes(16), ABOUT, 4096, False)),
    "chunks that are too large": lambda hello: opened(hello, 8192),
    "shared memory that was not offered": lambda hello: frame(
        TransferOpening(hello.session, ABOUT, 4096, True)
    ),
    "another model": lambda hello: frame(
        TransferOpening(hello.session, replace(ABOUT, fingerprint="y" * 32), 4096, False)
    ),
    "two openings": lambda hello: opened(hello) * 2,
    "beyond the window": lambda hello: opened(hello) + large(0) + large(1),
    "wrong sums": lambda hello: opened(hello) + wrong_sums(hello),
    "more than it has": lambda hello: opened(hello) + frame(TransferEnd(3, 10)),
    "an end before the last": lambda hello: opened(hello) + large(0) + frame(TransferEnd(0, 0)),
    "two ends": lambda hello: opened(hello) + frame(TransferEnd(1, 10)) + frame(TransferEnd(2, 10)),
    "a problem": lambda hello: opened(hello) + frame(SenderProblem("no\nmore")),
    "an ack": lambda hello: opened(hello) + frame(Ack(0, 0)),
    "half a chunk": lambda hello: opened(hello) + large(0)[:2000],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_sender_that_lies_is_an_error_in_time(lie: str) -> None:
    with liar(lambda connection, hello: connection.sendall(LIES[lie](hello))) as try_it:
        begun_s = time.monotonic()
        with pytest.raises(PotluckError):
            try_it()
        assert time.monotonic() - begun_s < 1.0 + SLACK_S


@pytest.mark.parametrize("first", [b"", None])
def test_beats_for_ever_end_at_the_deadline(first: bytes | None) -> None:
    def script(connection: socket.socket, hello: Hello) -> None:
        connection.sendall(opened(hello) if first is None else first)
        for _ in range(60):
            connection.sendall(frame(Heartbeat()))
            time.sleep(0.05)

    with liar(script) as try_it, pytest.raises(TransferError, match="within its 0.6 s"):
        try_it(0.6)


def test_data_byte_by_byte_ends_at_the_deadline() -> None:
    def script(connection: socket.socket, hello: Hello) -> None:
        connection.sendall(opened(hello))
        for byte in large(0):
            connection.sendall(bytes([byte]))
            time.sleep(0.01)

    with liar(script) as try_it:
        begun_s = time.monotonic()
        with pytest.raises(PotluckError):
            try_it(0.8)
        assert time.monotonic() - begun_s < 0.8 + SLACK_S
