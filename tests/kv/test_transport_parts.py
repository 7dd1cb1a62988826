"""The two ends of a transfer without a network: any order, any loss, any number of connections."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_helpers import BOUND, FrameReader, chunk_value, sample_chunks

from potluck.core.errors import FormatError, InputError
from potluck.kv.assembly import ChunkAssembly
from potluck.kv.checksum import sums
from potluck.kv.chunks import KvChunk
from potluck.kv.frames import Ack, ChunkPiece, SenderProblem, TransferEnd, frame
from potluck.kv.handles import TransferHandles, bound_to, checked_handle, new_handle, new_session
from potluck.kv.peer_connections import TcpInfo, parse, report
from potluck.kv.send_queue import SendQueue, pack


class Receiver:
    def __init__(self, window_bytes: int, piece_bytes: int) -> None:
        self.out_bytes = 0
        self.most_bytes = 0
        self.got: dict[int, tuple[object, ...]] = {}
        self.assembly = ChunkAssembly(window_bytes, piece_bytes, self._take, self._give)

    def _take(self, size: int) -> memoryview:
        self.out_bytes += size
        self.most_bytes = max(self.most_bytes, self.out_bytes)
        return memoryview(bytearray(size))

    def _give(self, buffer: memoryview) -> None:
        self.out_bytes -= len(buffer)

    def take(self, piece: ChunkPiece, data: bytes, conn: int) -> list[int]:
        """A piece arrives; which chunks are complete."""
        place = self.assembly.place(piece, conn)
        if place is None:
            return []
        place[:] = data
        assert sums(place) == piece.sums
        chunk = self.assembly.landed(piece)
        if chunk is None:
            return []
        assert chunk.layer not in self.got
        self.got[chunk.layer] = chunk_value(chunk)
        return [piece.index]


SMALLEST_PIECE_BYTES = 24
"""Of those drawn, since a chunk is then of hundreds already; a smaller one that divides nothing is given apart."""


@settings(max_examples=25, deadline=None)
@example(2, 7, 3, 0.2, random.Random(1))
@given(
    st.integers(0, 9),
    st.integers(SMALLEST_PIECE_BYTES, 9000),
    st.integers(1, 5),
    st.floats(0, 0.4),
    st.randoms(use_true_random=False),
)
def test_every_chunk_is_received_once_under_any_connection_losses(
    layers: int, piece_bytes: int, degree: int, loss: float, draw: random.Random
) -> None:
    chunks = sample_chunks(3, layers)
    window = max(len(p.data) + len(p.parameters) for p in chunks) + draw.randrange(20000)
    load, receiver = SendQueue(piece_bytes), Receiver(window, piece_bytes)
    load.open(window)
    conns, keys = list(range(degree)), degree
    for conn in conns:
        load.join(conn, 4)
    wire: dict[int, list[tuple[ChunkPiece, bytes]]] = {conn: [] for conn in conns}
    taken = dict.fromkeys(conns, 0)
    full: list[int] = []
    to_put = list(chunks)
    for step in range(200_000):
        if receiver.assembly.complete:
            break
        if to_put and draw.random() < 0.3:
            load.put(pack(to_put.pop(0), piece_bytes))
            if not to_put:
                load.finish()
        conn = draw.choice(conns)
        todo = load.next(conn)
        if isinstance(todo, TransferEnd):
            receiver.assembly.ended(todo)
        elif todo is not None:
            assert not isinstance(todo, SenderProblem)
            ((message, data),) = FrameReader().feed(frame(todo[0]) + bytes(todo[1]))
            assert isinstance(message, ChunkPiece)
            wire[conn].append((message, data))
        if draw.random() < loss and step % 7 == 0:
            load.lost(conn)  # What is on it is gone, or has come and nobody said so.
            for piece, data in wire.pop(conn)[: draw.randrange(3)]:
                full += receiver.take(piece, data, conn)
            conns.remove(conn)
            conns.append(keys)
            load.join(keys, 4)
            wire[keys], taken[keys] = [], 0
            keys += 1
        elif wire[conn] and draw.random() < 0.7:
            full += receiver.take(*wire[conn].pop(0), conn)
            taken[conn] += 1
            load.ack(conn, Ack(taken[conn], receiver.assembly.released_bytes))
        if full and draw.random() < 0.5:
            receiver.assembly.release(full.pop())
            load.ack(
                conn, Ack(taken.get(conn, 0), receiver.assembly.released_bytes)
            ) if conn in conns else None
    assert receiver.assembly.complete
    assert receiver.got == {chunk.layer: chunk_value(chunk) for chunk in chunks}
    assert receiver.most_bytes <= window
    assert receiver.out_bytes == 0


@settings(max_examples=25, deadline=None)
@example([3, 1, 7, 0, 5, 2, 6, 4], 7)
@given(st.permutations(range(8)), st.integers(SMALLEST_PIECE_BYTES, 700))
def test_pieces_in_any_order_and_repeated_make_the_same_chunk(order: list[int], piece_bytes: int) -> None:
    chunk = sample_chunks()[0]
    encoded_chunk = pack(chunk, piece_bytes)
    load = SendQueue(piece_bytes)
    load.open(1 << 20)
    load.join(0, 10**6)
    load.put(encoded_chunk)
    load.finish()
    pieces = []
    while isinstance(todo := load.next(0), tuple):
        pieces.append(todo)
    receiver = Receiver(1 << 20, piece_bytes)
    for cut in order:
        for piece, data in pieces[cut::8] * 2:
            receiver.take(piece, bytes(data), 0)
    assert receiver.got == {0: chunk_value(chunk)}


def piece(offset: int, count: int, tokens: int = 8, index: int = 0) -> ChunkPiece:
    chunk = KvChunk(0, "kv", 0, tokens, "float32", (tokens, 2, 2, 4), b"")
    return ChunkPiece(index, chunk, tokens * 64, offset, count, (0, 0))


@pytest.mark.parametrize(
    "bad", [piece(1, 256), piece(0, 255), piece(256, 255), piece(0, 256, tokens=17, index=1)]
)
def test_pieces_off_the_grid_or_beyond_the_window_are_refused(bad: ChunkPiece) -> None:
    receiver = Receiver(1024, 256)
    receiver.assembly.place(piece(0, 256), 0)
    with pytest.raises(FormatError):
        receiver.assembly.place(bad, 0)


def test_second_piece_that_describes_its_chunk_otherwise_is_refused() -> None:
    receiver = Receiver(4096, 256)
    receiver.assembly.place(piece(0, 256), 0)
    other = ChunkPiece(0, KvChunk(1, "kv", 0, 8, "float32", (8, 2, 2, 4), b""), 512, 256, 256, (0, 0))
    with pytest.raises(FormatError, match="two ways"):
        receiver.assembly.place(other, 0)


def test_valid_piece_is_not_rewritten_and_a_corrupted_one_is() -> None:
    receiver = Receiver(4096, 256)
    assert receiver.assembly.place(piece(0, 256), 1) is not None
    assert receiver.assembly.writer(piece(0, 256)) == 1
    receiver.assembly.spoiled(piece(0, 256))
    assert receiver.assembly.writer(piece(0, 256)) is None
    assert receiver.assembly.place(piece(0, 256), 2) is not None
    receiver.assembly.landed(piece(0, 256))
    assert receiver.assembly.place(piece(0, 256), 3) is None


@pytest.mark.parametrize("end", [TransferEnd(0, 512), TransferEnd(1, 511), TransferEnd(1, 513)])
def test_transfer_end_with_wrong_totals_is_refused(end: TransferEnd) -> None:
    receiver = Receiver(4096, 512)
    receiver.assembly.place(piece(0, 512), 0)
    receiver.assembly.landed(piece(0, 512))
    with pytest.raises(FormatError):
        receiver.assembly.ended(end)


def test_acks_for_unsent_pieces_are_refused() -> None:
    load = SendQueue(64)
    load.open(1 << 20)
    load.join(0, 4)
    load.put(pack(sample_chunks()[0], 64))
    assert load.next(0) is not None
    for bad in (Ack(2, 0), Ack(0, 1 << 40)):
        with pytest.raises(FormatError):
            load.ack(0, bad)


def test_chunk_larger_than_the_window_is_sent_alone() -> None:
    load = SendQueue(1 << 20)
    load.open(100)
    load.join(0, 4)
    for chunk in sample_chunks()[:2]:
        load.put(pack(chunk, 1 << 20))
    receiver = Receiver(100, 1 << 20)
    first = load.next(0)
    assert isinstance(first, tuple)
    assert load.next(0) is None
    with pytest.raises(FormatError, match="beyond the window"):
        receiver.assembly.place(first[0], 0)
    roomy = ChunkAssembly(100, 1 << 20, lambda size: memoryview(bytearray(size)), lambda _: None, 1 << 20)
    assert roomy.place(first[0], 0) is not None
    load.ack(0, Ack(1, first[0].count))
    second = load.next(0)
    assert isinstance(second, tuple)
    with pytest.raises(FormatError, match="beyond the window"):
        roomy.place(second[0], 0)


def test_failed_send_queue_reports_the_problem_once_per_connection() -> None:
    load = SendQueue(64)
    for conn in (0, 1):
        load.join(conn, 4)
    load.put(pack(sample_chunks()[0], 64))
    load.fail("no more")
    assert load.held_bytes == 0
    assert [load.next(0), load.next(1), load.next(0)] == [
        SenderProblem("no more"),
        SenderProblem("no more"),
        None,
    ]


def test_chunk_whose_bytes_contradict_its_shape_is_refused() -> None:
    with pytest.raises(InputError):
        pack(KvChunk(0, "kv", 0, 2, "float16", (2, 2, 1, 4), bytes(31)), 64)


# Handles.


def test_transfer_handle_is_valid_for_one_session_binding_and_time() -> None:
    handles: TransferHandles[str] = TransferHandles()
    handle, mine, other = new_handle(), new_session(), new_session()
    handles.offer(handle, BOUND, "cache", expires_s=10.0)
    assert handles.claim(new_handle(), BOUND, mine, 0.0) is None
    assert handles.claim(handle, bound_to("r-2", "x", "y"), mine, 0.0) is None
    assert handles.claim(handle, BOUND, mine, 10.0) is None
    assert handles.claim(handle, BOUND, mine, 1.0) == "cache"
    assert handles.claim(handle, BOUND, other, 1.0) is None
    assert handles.claim(handle, BOUND, mine, 2.0) == "cache"
    handles.withdraw(handle)
    assert handles.claim(handle, BOUND, mine, 2.0) is None


def test_failed_claim_does_not_consume_the_handle() -> None:
    handles: TransferHandles[str] = TransferHandles()
    handle = new_handle()
    handles.offer(handle, BOUND, "cache", expires_s=10.0)
    assert handles.claim(handle, bytes(32), new_session(), 0.0) is None
    assert handles.claim(handle, BOUND, new_session(), 0.0) == "cache"


def test_invalid_and_repeated_handles_are_refused() -> None:
    handles: TransferHandles[str] = TransferHandles()
    handle = new_handle()
    handles.offer(handle, BOUND, "a", 1.0)
    with pytest.raises(InputError, match="in use"):
        handles.offer(handle, BOUND, "b", 1.0)
    for bad in ("short", "x" * 129, "x" * 31 + "/", ""):
        with pytest.raises(InputError):
            checked_handle(bad)
    assert len({new_handle() for _ in range(100)}) == 100


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=9), st.text(max_size=9), st.text(max_size=9), st.text(max_size=9))
def test_handle_binding_separates_its_fields(a: str, b: str, c: str, d: str) -> None:
    if (a, b) != (c, d):
        assert bound_to(a, "f" + b, "t") != bound_to(c, "f" + d, "t")


# Signals.


def test_short_tcp_info_of_an_old_kernel_is_ignored() -> None:
    assert parse(bytes(104)) is None


def test_link_report_sums_its_connections() -> None:
    one = TcpInfo(0.010, 0.004, 2, 50)
    two = TcpInfo(0.030, 0.006, 3, 25)
    result = report("h", [one, None, two], moved_bytes=1000, busy_s=0.5, past_retransmits=7, queued_bytes=5)
    assert (result.connections, result.retransmits, result.queue_bytes) == (3, 12, 80)
    assert result.rtt_s == pytest.approx(0.020)
    assert result.least_rtt_s == 0.004
    assert result.goodput_bytes_per_s == 2000
