"""Peers that are dead, lost, greedy, slow on purpose, or liars."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
from kv_helpers import (
    ABOUT,
    BOUND,
    FINGERPRINT,
    REQUEST,
    SMALL,
    SMALL_LINKS,
    TOKENS_HASH,
    FrameReader,
    TransferEnds,
    chunk_value,
    fetch,
    sample_chunks,
    transfer_ends,
    wait_until,
)

from potluck.core.errors import InputError, PotluckError
from potluck.kv import checksum
from potluck.kv.checksum import sums
from potluck.kv.chunks import KvChunk, KvManifest, TransferError, sizes_of
from potluck.kv.fetch import FetchRequest
from potluck.kv.frames import (
    Ack,
    ChunkPiece,
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
from potluck.kv.handles import bound_to, new_handle, new_session
from potluck.kv.kv_sender import OutgoingTransfer
from potluck.kv.peer_connections import PeerConnections
from potluck.kv.send_queue import SendQueue, pack

SLACK_S = 2.5
CHUNKS = sample_chunks(6, 8)
RIGHT = {chunk.layer: chunk_value(chunk) for chunk in CHUNKS}


def greeting(handle: str, session: bytes = bytes(16), bound: bytes = BOUND, wait_ms: int = 300) -> bytes:
    return frame(Hello(session, bound, handle, 0, 1 << 20, 4096, wait_ms))


def raw_answer(address: tuple[str, int], said: bytes, most_s: float = 3.0) -> tuple[bytes, float]:
    """All that a sender answers until it closes, and how long that took."""
    begun_s = time.monotonic()
    text = b""
    with (
        socket.create_connection(address, timeout=most_s) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(said)
        while data := connection.recv(1 << 16):
            text += data
    return text, time.monotonic() - begun_s


def test_every_wrong_handle_gets_the_same_answer() -> None:
    with transfer_ends() as pair:
        used, _ = pair.send(CHUNKS)
        pair.fetch(used)
        expired, _ = pair.offer(lasts_s=0.0)
        other, _ = pair.send(CHUNKS)
        claimed, transfer = pair.offer()
        holder = socket.create_connection(pair.address)
        holder.sendall(greeting(claimed, new_session()))
        assert wait_until(lambda: transfer.state == "attached")
        asked = {
            "unknown": greeting(new_handle()),
            "used": greeting(used),
            "expired": greeting(expired),
            "of another request": greeting(other, bound=bound_to("r-2", FINGERPRINT, TOKENS_HASH)),
            "of another session": greeting(claimed, new_session()),
        }
        result = {name: raw_answer(pair.address, text) for name, text in asked.items()}
        holder.close()
        assert len({raw.replace(frame(Heartbeat()), b"") for raw, _ in result.values()}) == 1
        assert all(took_s >= 0.3 for _, took_s in result.values())
        _, got = pair.fetch(other)  # The one that was guessed at is not spoiled by it.
        assert got == RIGHT


def test_wrong_handle_fails_within_the_deadline() -> None:
    with transfer_ends() as pair:
        begun_s = time.monotonic()
        with pytest.raises(TransferError, match="unknown, has expired, was used"):
            pair.fetch(new_handle(), deadline_s=3.0)
        assert time.monotonic() - begun_s < SMALL.attach_s + SLACK_S
        handle, _ = pair.send(CHUNKS)
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
def test_invalid_greeting_closes_the_connection_without_an_answer(said: bytes) -> None:
    with transfer_ends() as pair:
        result, took_s = raw_answer(pair.address, said)
        assert result == b""
        assert took_s < SMALL.hello_s + SLACK_S


def test_slow_greeting_is_disconnected() -> None:
    with transfer_ends() as pair:
        begun_s = time.monotonic()
        with socket.create_connection(pair.address) as connection, contextlib.suppress(ConnectionError):
            for byte in greeting(new_handle()):
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
                if time.monotonic() - begun_s > 5:
                    break
        assert wait_until(lambda: pair.sender.connections == 0, 3)
        assert time.monotonic() - begun_s < 2 * SMALL.hello_s + SLACK_S


def test_unauthenticated_connections_are_bounded_and_expire() -> None:
    with transfer_ends(limits=replace(SMALL, most_connections=8)) as pair:
        crowd = [socket.create_connection(pair.address) for _ in range(40)]
        assert wait_until(lambda: pair.sender.connections == 8)
        handle, _ = pair.send(CHUNKS)
        assert wait_until(lambda: pair.sender.connections == 0, 4)
        _, got = pair.fetch(handle)
        assert got == RIGHT
        for one in crowd:
            one.close()


def test_transfers_waiting_with_one_connection_each_all_complete() -> None:
    """So many receivers as a sender takes connections: each has more than one only while something comes."""
    most = 60
    with transfer_ends(limits=replace(SMALL, most_connections=most)) as pair:
        offers = [pair.offer() for _ in range(most - 4)]
        with ThreadPoolExecutor(most) as pool:
            fetches = [pool.submit(pair.fetch, handle, degree=3, deadline_s=60.0) for handle, _ in offers]
            assert wait_until(lambda: all(transfer.state == "attached" for _, transfer in offers), 30)
            assert pair.sender.connections == len(offers)
            for _, transfer in offers:
                for chunk in CHUNKS:
                    transfer.put(chunk)
                transfer.finish()
        assert all(fetch.result()[1] == RIGHT for fetch in fetches)


@pytest.mark.parametrize("reads", [False, True])
def test_dead_receiver_frees_the_sender_memory(reads: bool) -> None:
    with transfer_ends() as pair:
        handle, transfer = pair.send(CHUNKS)
        with socket.create_connection(pair.address) as connection:
            connection.sendall(greeting(handle))
            if reads:
                connection.recv(20000)
            assert wait_until(lambda: transfer.state == "attached")
        assert transfer.wait(SMALL.lease_s + SMALL.silence_s + SLACK_S) == "gone"
        assert pair.sender.held_bytes == 0
        with pytest.raises(TransferError, match="gone"):
            transfer.put(CHUNKS[0])


def test_receiver_that_reads_nothing_loses_its_lease() -> None:
    large = [replace(CHUNKS[0], layer=n) for n in range(400)]
    with transfer_ends() as pair:
        handle, transfer = pair.send(large)
        with socket.create_connection(pair.address) as connection:
            connection.sendall(greeting(handle))
            assert transfer.wait(SMALL.lease_s + SMALL.silence_s + SLACK_S) == "gone"
            assert pair.sender.held_bytes == 0


def test_unclaimed_transfer_expires() -> None:
    with transfer_ends() as pair:
        _, transfer = pair.send(CHUNKS, lasts_s=0.3)
        assert pair.sender.held_bytes > 0
        assert transfer.wait(30) == "gone"
        assert wait_until(lambda: pair.sender.transfers == 0)


@pytest.mark.parametrize(
    "lie", [Ack(1000, 0), Ack(0, 1 << 50), TransferEnd(0, 0), Heartbeat(), SenderProblem("x")]
)
def test_receiver_with_invalid_messages_is_disconnected(lie: Message) -> None:
    with transfer_ends() as pair:
        handle, transfer = pair.send(CHUNKS)
        raw_answer(pair.address, greeting(handle) + frame(lie))
        assert transfer.wait(SMALL.lease_s + SLACK_S) == "gone"


def test_dead_sender_is_reported_at_once() -> None:
    with transfer_ends() as pair:
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
        assert wait_until(lambda: any(link.connections for link in pair.sender.links()))
        pair.sender.close()
        died_s = time.monotonic()
        thread.join(10)
        assert isinstance(problem[0], TransferError)
        assert timed[0] - died_s < SLACK_S


def test_unreachable_sender_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    peer_connections = PeerConnections([address], limits=SMALL_LINKS)
    begun_s = time.monotonic()
    fetch_request = FetchRequest(new_handle(), REQUEST, FINGERPRINT, TOKENS_HASH)
    with pytest.raises(TransferError, match="is lost"):
        fetch(peer_connections, address, fetch_request, lambda _: None, lambda _: None, deadline_s=30.0)
    assert time.monotonic() - begun_s < SLACK_S


Script = Callable[[socket.socket, Hello], None]


@contextlib.contextmanager
def scripted_sender(script: Script) -> Iterator[Callable[..., None]]:
    """A sender that follows a script; gives a way to fetch from it."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    over = threading.Event()
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            reader, result = FrameReader(), []
            while not result:
                result = reader.feed(connection.recv(4096))
            assert isinstance(result[0][0], Hello)
            script(connection, result[0][0])
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
    peer_connections = PeerConnections([address], limits=replace(SMALL_LINKS, retries=2), shared_memory=False)

    def try_it(deadline_s: float = 1.0) -> None:
        fetch_request = FetchRequest(new_handle(), REQUEST, FINGERPRINT, TOKENS_HASH)
        fetch(
            peer_connections,
            address,
            fetch_request,
            lambda _: None,
            lambda _: None,
            degree=2,
            deadline_s=deadline_s,
        )

    try:
        yield try_it
    finally:
        over.set()
        peer_connections.close()
        for thread in [acceptor, *threads]:
            thread.join(6)
        listener.close()
    assert peer_connections.buffers.out_bytes == 0


def opening_frame(hello: Hello, piece_bytes: int = 4096) -> bytes:
    return frame(TransferOpening(hello.session, ABOUT, piece_bytes, False))


def large_piece(index: int) -> bytes:
    """The first piece of a chunk as large as the window."""
    chunk = KvChunk(0, "kv", 0, 256, "float32", (256, 2, 8, 8), b"")
    return frame(ChunkPiece(index, chunk, sizes_of(chunk).total_bytes, 0, 4096, sums(bytes(4096)))) + bytes(
        4096
    )


def wrong_sums(hello: Hello) -> bytes:
    chunk = KvChunk(0, "kv", 0, 2, "float32", (2, 2, 2, 8), b"")
    return frame(ChunkPiece(0, chunk, 256, 0, 256, (1, 2))) + bytes(256)


LIES: dict[str, Callable[[Hello], bytes]] = {
    "nothing": lambda hello: b"",
    "garbage": lambda hello: bytes(range(256)),
    "no opening": lambda hello: large_piece(0),
    "another session's opening": lambda hello: frame(TransferOpening(bytes(16), ABOUT, 4096, False)),
    "pieces that are too large": lambda hello: opening_frame(hello, 8192),
    "shared memory that was not offered": lambda hello: frame(
        TransferOpening(hello.session, ABOUT, 4096, True)
    ),
    "another model": lambda hello: frame(
        TransferOpening(hello.session, replace(ABOUT, fingerprint="y" * 32), 4096, False)
    ),
    "two openings": lambda hello: opening_frame(hello) * 2,
    "beyond the window": lambda hello: opening_frame(hello) + large_piece(0) + large_piece(1),
    "wrong sums": lambda hello: opening_frame(hello) + wrong_sums(hello),
    "more than it has": lambda hello: opening_frame(hello) + frame(TransferEnd(3, 10)),
    "an end before the last": lambda hello: opening_frame(hello) + large_piece(0) + frame(TransferEnd(0, 0)),
    "two ends": lambda hello: opening_frame(hello) + frame(TransferEnd(1, 10)) + frame(TransferEnd(2, 10)),
    "a problem": lambda hello: opening_frame(hello) + frame(SenderProblem("no\nmore")),
    "an ack": lambda hello: opening_frame(hello) + frame(Ack(0, 0)),
    "half a piece": lambda hello: opening_frame(hello) + large_piece(0)[:2000],
}


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_invalid_sender_messages_fail_in_time(lie: str) -> None:
    with scripted_sender(lambda connection, hello: connection.sendall(LIES[lie](hello))) as try_it:
        begun_s = time.monotonic()
        with pytest.raises(PotluckError):
            try_it()
        assert time.monotonic() - begun_s < 1.0 + SLACK_S


@pytest.mark.parametrize("first", [b"", None])
def test_endless_heartbeats_end_at_the_deadline(first: bytes | None) -> None:
    def script(connection: socket.socket, hello: Hello) -> None:
        connection.sendall(opening_frame(hello) if first is None else first)
        for _ in range(60):
            connection.sendall(frame(Heartbeat()))
            time.sleep(0.05)

    with scripted_sender(script) as try_it, pytest.raises(TransferError, match="within its 0.6 s"):
        try_it(0.6)


def test_data_sent_byte_by_byte_ends_at_the_deadline() -> None:
    def script(connection: socket.socket, hello: Hello) -> None:
        connection.sendall(opening_frame(hello))
        for byte in large_piece(0):
            connection.sendall(bytes([byte]))
            time.sleep(0.01)

    with scripted_sender(script) as try_it:
        begun_s = time.monotonic()
        with pytest.raises(PotluckError):
            try_it(0.8)
        assert time.monotonic() - begun_s < 0.8 + SLACK_S


SENT = sample_chunks(3, 8)
SENT_RIGHT = {chunk.layer: chunk_value(chunk) for chunk in SENT}


class RawConnection:
    """One connection of a session, by hand."""

    def __init__(
        self, address: tuple[str, int], handle: str, session: bytes, piece_bytes: int = 4096
    ) -> None:
        self.connection = socket.create_connection(address, timeout=0.1)
        self._reader = FrameReader()
        self.heard: list[Message] = []
        self.closed = False
        self.say(Hello(session, BOUND, handle, 0, 1 << 20, piece_bytes, 200))

    def say(self, message: Message) -> None:
        self.connection.sendall(frame(message))

    def hear(self, enough: Callable[[RawConnection], bool], within_s: float = 30.0) -> bool:
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
def raw_connection(
    pair: TransferEnds, handle: str, session: bytes, piece_bytes: int = 4096
) -> Iterator[RawConnection]:
    one = RawConnection(pair.address, handle, session, piece_bytes)
    try:
        yield one
    finally:
        one.connection.close()


def test_connection_that_joins_a_running_transfer_is_opened() -> None:
    thinking = threading.Event()

    def opened(have: int) -> KvManifest:
        thinking.wait(5)
        return ABOUT

    with transfer_ends() as pair:
        handle, session = new_handle(), new_session()
        transfer = pair.sender.offer(handle, BOUND, opened, 10.0)
        with raw_connection(pair, handle, session) as first, raw_connection(pair, handle, session) as second:
            assert wait_until(lambda: transfer.opening)
            thinking.set()
            assert first.hear(lambda one: one.has(TransferOpening))
            assert second.hear(lambda one: one.has(TransferOpening))
            with raw_connection(pair, handle, session) as third:  # While it is being filled.
                assert third.hear(lambda one: one.has(TransferOpening))


def _fetched(pair: TransferEnds, handle: str, session: bytes) -> OutgoingTransfer:
    transfer = pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
    transfer.finish()
    with raw_connection(pair, handle, session) as first:
        assert first.hear(lambda one: one.has(TransferEnd))
        first.say(TransferDone())
        assert transfer.wait(30) == "fetched"
    return transfer


def _failed(pair: TransferEnds, handle: str, session: bytes) -> OutgoingTransfer:
    transfer = pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
    with raw_connection(pair, handle, session) as first:
        assert first.hear(lambda one: one.has(TransferOpening))
        transfer.fail("no more")
        assert first.hear(lambda one: one.has(SenderProblem))
    return transfer


def _engine_failed(pair: TransferEnds, handle: str, session: bytes) -> OutgoingTransfer:
    def opened(have: int) -> KvManifest:
        raise InputError("have", "is wrong")

    transfer = pair.sender.offer(handle, BOUND, opened, 10.0)
    with raw_connection(pair, handle, session) as first:
        assert first.hear(lambda one: one.has(SenderProblem))
    return transfer


def _gone(pair: TransferEnds, handle: str, session: bytes) -> OutgoingTransfer:
    transfer = pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
    with raw_connection(pair, handle, session) as first:
        assert first.hear(lambda one: one.has(TransferOpening))
    assert transfer.wait(SMALL.lease_s + SLACK_S) == "gone"
    return transfer


def _withdrawn(pair: TransferEnds, handle: str, session: bytes) -> OutgoingTransfer:
    transfer = pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
    pair.sender.withdraw(handle)
    return transfer


@pytest.mark.parametrize("ending", [_fetched, _failed, _engine_failed, _gone, _withdrawn])
def test_connection_that_joins_after_the_end_gets_an_answer(
    ending: Callable[[TransferEnds, str, bytes], OutgoingTransfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with transfer_ends() as pair:
        forgotten = pair.sender._forget
        # Ended transfers are forgotten when somebody looks; nobody does between the end and the replay.
        monkeypatch.setattr(pair.sender, "_forget", lambda: None)
        handle, session = new_handle(), new_session()
        ending(pair, handle, session)
        with raw_connection(pair, handle, session) as replay:
            assert replay.hear(lambda one: one.has(HandleRefused) or one.has(SenderProblem))
            assert not replay.has(TransferOpening) or ending is _failed
        monkeypatch.setattr(pair.sender, "_forget", forgotten)


def test_connection_of_a_finished_fetch_is_closed() -> None:
    with transfer_ends() as pair:
        handle, session = new_handle(), new_session()
        transfer = pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
        transfer.finish()
        with raw_connection(pair, handle, session) as first, raw_connection(pair, handle, session) as second:
            assert first.hear(lambda one: one.has(TransferOpening))
            assert second.hear(lambda one: one.has(TransferOpening))
            first.say(TransferDone())
            assert transfer.wait(30) == "fetched"
            second.hear(lambda one: False)
            assert second.closed


def test_receiver_with_a_smaller_piece_limit_gets_smaller_pieces() -> None:
    with transfer_ends(limits=replace(SMALL, piece_bytes=1 << 14), link_limits=SMALL_LINKS) as pair:
        handle, transfer = pair.offer()
        for chunk in SENT[:4]:  # Cut and checked before anybody came.
            transfer.put(chunk)

        def feed() -> None:  # The rest comes while somebody fetches.
            assert wait_until(lambda: transfer.state == "attached")
            for chunk in SENT[4:]:
                transfer.put(chunk)
            transfer.finish()

        feeding = threading.Thread(target=feed)
        feeding.start()
        _, got = pair.fetch(handle)
        assert got == SENT_RIGHT
        feeding.join()
        assert transfer.wait(30) == "fetched"
        assert pair.sender.limits.piece_bytes == 1 << 14


def test_all_connections_of_a_fetch_use_the_same_piece_size() -> None:
    with transfer_ends(limits=replace(SMALL, piece_bytes=1 << 15)) as pair:
        handle, session = new_handle(), new_session()
        pair.sender.offer(handle, BOUND, lambda have: ABOUT, 10.0)
        with raw_connection(pair, handle, session, 1 << 14) as first:
            assert first.hear(lambda one: one.has(TransferOpening))
            with (
                raw_connection(pair, handle, session, 1 << 20) as more,
                raw_connection(pair, handle, session, 1 << 13) as less,
            ):
                assert more.hear(lambda one: one.has(TransferOpening))
                assert less.hear(lambda one: one.has(HandleRefused))
            sizes = {
                m.piece_bytes for one in (first, more) for m in one.heard if isinstance(m, TransferOpening)
            }
            assert sizes == {1 << 14}


def test_connection_with_too_small_pieces_does_not_consume_the_handle() -> None:
    with transfer_ends() as pair:
        handle, _ = pair.send(SENT)
        with raw_connection(pair, handle, new_session(), 16) as tiny:
            tiny.hear(lambda one: False)
            assert tiny.closed
            assert not tiny.heard
        _, got = pair.fetch(handle)
        assert got == SENT_RIGHT


@pytest.mark.parametrize("most_bytes", [4096, 5000, 8192, 1 << 20])
def test_send_queue_with_a_changed_piece_size_sends_every_byte_once(most_bytes: int) -> None:
    load = SendQueue(8192)
    load.put(pack(SENT[0], 8192))
    load.cut(most_bytes)
    load.put(pack(SENT[1], 8192))  # It was cut before it was known.
    load.finish()
    load.open(1 << 30)
    load.join(1, 1 << 20)
    result = [b"", b""]
    while isinstance(todo := load.next(1), tuple):
        piece, data = todo
        assert isinstance(piece, ChunkPiece)
        assert len(data) <= min(8192, most_bytes)
        assert piece.sums in (None, checksum.sums(data))
        result[piece.index] += bytes(data)
    assert result == [bytes(chunk.parameters) + bytes(chunk.data) for chunk in SENT[:2]]
