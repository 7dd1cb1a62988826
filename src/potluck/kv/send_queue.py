"""What a sender has to send, and to whom it gave which piece of it. No I/O, no clock.

Chunks are cut into pieces; whichever connection is free takes the next, so that a slow one carries less. Pieces that
were given to a connection and not acknowledged are given out again when it is lost, before anything new. A chunk is
begun only if it fits into the receiver's window together with those that the receiver has not used up, or if there
are none of those; and its bytes are let go as soon as all its pieces are acknowledged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from potluck.core.errors import FormatError, InputError
from potluck.kv.checksum import Sums, sums
from potluck.kv.chunks import KvChunk, sizes_of
from potluck.kv.frames import Ack, ChunkPiece, SenderProblem, TransferEnd


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    chunk: KvChunk  # But for its bytes.
    body: memoryview
    checks: tuple[Sums | None, ...]  # Of each piece, or left to the connection that sends it.
    piece_bytes: int


@dataclass(slots=True)
class _Item:
    index: int
    chunk: KvChunk  # Without its bytes.
    body: memoryview | None
    size: int
    checks: tuple[Sums | None, ...]
    left: int  # Pieces that were not acknowledged.


Given = tuple[_Item, int]


@dataclass(slots=True)
class _ConnectionState:
    most_unacked: int
    unacked: deque[Given] = field(default_factory=deque)
    acked: int = 0
    told: bool = False  # Whether it was given the end, or the problem.


class SendQueue:
    """The chunks of one transfer; its caller sees to it that one thread at a time is in here."""

    def __init__(self, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self.held_bytes = 0  # Of chunks that were not acknowledged.
        self.queued_bytes = 0  # Of chunks that no connection was given yet.
        self.sent_again_bytes = 0
        self._window_bytes = 0
        self._fresh: deque[_Item] = deque()
        self._again: deque[Given] = deque()
        self._current: Given | None = None
        self._connections: dict[int, _ConnectionState] = {}
        self._begun_bytes = 0
        self._released_bytes = 0
        self._chunks = 0
        self._total_bytes = 0
        self._last: TransferEnd | SenderProblem | None = None

    @property
    def outstanding(self) -> int:
        return sum(len(conn.unacked) for conn in self._connections.values())

    @property
    def begun(self) -> bool:
        return self._chunks > 0

    @property
    def failed(self) -> bool:
        return isinstance(self._last, SenderProblem)

    # The sender's side.

    def put(self, encoded_chunk: EncodedChunk) -> None:
        if self._last is not None:
            raise InputError("transfer", "has ended: nothing can be added to it")
        size = len(encoded_chunk.body)
        item = _Item(
            self._chunks,
            encoded_chunk.chunk,
            encoded_chunk.body,
            size,
            encoded_chunk.checks,
            len(encoded_chunk.checks),
        )
        if encoded_chunk.piece_bytes != self.piece_bytes:
            self._cut(item)
        self._fresh.append(item)
        self._chunks += 1
        self._total_bytes += size
        self.held_bytes += size
        self.queued_bytes += size

    def cut(self, most_bytes: int) -> None:
        """Make pieces no larger than that, before any of them is given out."""
        if most_bytes < self.piece_bytes:
            self.piece_bytes = most_bytes
            for item in self._fresh:
                self._cut(item)

    def _cut(self, item: _Item) -> None:
        item.left = max(1, -(-item.size // self.piece_bytes))
        item.checks = (None,) * item.left

    def finish(self) -> None:
        if self._last is None:
            self._last = TransferEnd(self._chunks, self._total_bytes)

    def fail(self, line: str) -> None:
        self._last = SenderProblem(line)
        self.drop()

    def drop(self) -> None:
        for conn in self._connections.values():
            conn.unacked.clear()
        self._fresh.clear()
        self._again.clear()
        self._current = None
        self.held_bytes = self.queued_bytes = 0

    # The connections' side.

    def open(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes

    def join(self, conn: int, most_unacked: int) -> None:
        self._connections[conn] = _ConnectionState(most_unacked)

    def may_take(self, conn: int) -> bool:
        state = self._connections.get(conn)
        return state is not None and len(state.unacked) < state.most_unacked

    @property
    def work(self) -> int:
        """How many connections could be given something now."""
        if self.failed:
            return len(self._connections)
        count = len(self._again)
        if self._current is not None:
            item, k = self._current
            count += len(item.checks) - k
        under_way_bytes = self._begun_bytes - self._released_bytes
        for item in self._fresh:
            if under_way_bytes and under_way_bytes + item.size > self._window_bytes:
                break
            under_way_bytes += item.size
            count += len(item.checks)
        return max(count, self._end_due())

    def _end_due(self) -> bool:
        """Once everything is given out, one connection says so; another one if that is lost."""
        given_out = self._current is None and not self._fresh and not self._again
        return (
            given_out and self._last is not None and not any(one.told for one in self._connections.values())
        )

    def next(self, conn: int) -> tuple[ChunkPiece, memoryview] | TransferEnd | SenderProblem | None:
        """What a connection sends next; None while there is nothing, or no room."""
        state = self._connections[conn]
        if self.failed and not state.told:
            state.told = True
            return self._last
        if self._end_due():
            state.told = True
            return self._last
        if len(state.unacked) >= state.most_unacked:
            return None
        given = self._again.popleft() if self._again else self._new()
        if given is None:
            return None
        state.unacked.append(given)
        item, k = given
        assert item.body is not None
        at = k * self.piece_bytes
        data = item.body[at : at + self.piece_bytes]
        return ChunkPiece(item.index, item.chunk, item.size, at, len(data), item.checks[k]), data

    def _new(self) -> Given | None:
        if self._current is None:
            if not self._fresh or self.failed:
                return None
            item = self._fresh[0]
            under_way_bytes = self._begun_bytes - self._released_bytes
            if under_way_bytes and under_way_bytes + item.size > self._window_bytes:
                return None
            self._fresh.popleft()
            self._begun_bytes += item.size
            self.queued_bytes -= item.size
            self._current = (item, 0)
        item, k = self._current
        self._current = (item, k + 1) if k + 1 < len(item.checks) else None
        return item, k

    def ack(self, conn: int, ack: Ack) -> int:
        """How many pieces it acknowledges that were not before."""
        state = self._connections[conn]
        new = ack.pieces - state.acked
        if self.failed:
            return 0
        if not 0 <= new <= len(state.unacked) or ack.released_bytes > self._begun_bytes:
            raise FormatError("hand-over", "acknowledges what was never sent")
        state.acked = ack.pieces
        self._released_bytes = max(self._released_bytes, ack.released_bytes)
        for _ in range(new):
            item, _k = state.unacked.popleft()
            item.left -= 1
            if not item.left:
                item.body = None
                self.held_bytes -= item.size
        return new

    def lost(self, conn: int) -> None:
        state = self._connections.pop(conn, None)
        if state is not None:
            self._again.extendleft(reversed(state.unacked))
            self.sent_again_bytes += sum(
                min(self.piece_bytes, item.size - k * self.piece_bytes) for item, k in state.unacked
            )


def pack(chunk: KvChunk, piece_bytes: int, *, now: bool = True) -> EncodedChunk:
    """Cut a chunk, and check its pieces `now`, which is the one part of the sender's work that takes time."""
    body = memoryview(chunk.data).cast("B").toreadonly()
    if len(chunk.parameters):
        body = memoryview(b"".join((chunk.parameters, body)))
    size = sizes_of(chunk).total_bytes
    if size != len(body):
        raise InputError(f"layer {chunk.layer} {chunk.part}", f"has {len(body)} bytes, its shape says {size}")
    starts = range(0, max(size, 1), piece_bytes)
    return EncodedChunk(
        replace(chunk, data=b"", parameters=b""),
        body,
        tuple(sums(body[at : at + piece_bytes]) if now else None for at in starts),
        piece_bytes,
    )
