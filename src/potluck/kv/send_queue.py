"""The send queue of one transfer: its chunks in pieces, assigned to connections. No I/O, no clock.

The next piece goes to the connection that is free first, so that a slow one carries less. Unacknowledged pieces of a
lost connection are assigned again before new ones. A chunk is started only if it fits into the receiver's window
together with the chunks that the receiver has not consumed, or if there are none. Its bytes are freed when all its
pieces are acknowledged.
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
    """A chunk's bytes as they are sent, with the checksums of its pieces."""

    chunk: KvChunk  # Without its bytes.
    body: memoryview
    checks: tuple[Sums | None, ...]  # Of each piece; None: computed by the connection that sends it.
    piece_bytes: int


@dataclass(slots=True)
class _Item:
    """A chunk of the queue."""

    index: int
    chunk: KvChunk  # Without its bytes.
    body: memoryview | None
    size: int
    checks: tuple[Sums | None, ...]
    left: int  # Unacknowledged pieces.


AssignedPiece = tuple[_Item, int]
"""(chunk, index of the piece)"""


@dataclass(slots=True)
class _ConnectionState:
    """The pieces that a connection has sent and that are not acknowledged."""

    most_unacked: int
    unacked: deque[AssignedPiece] = field(default_factory=deque)
    acked: int = 0
    end_sent: bool = False  # Whether it was assigned the end or the problem.


class SendQueue:
    """The chunks of one transfer; callers hold a lock."""

    def __init__(self, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self.held_bytes = 0  # Of unacknowledged chunks.
        self.queued_bytes = 0  # Of chunks that are not started.
        self.sent_again_bytes = 0
        self._window_bytes = 0
        self._not_started: deque[_Item] = deque()
        self._to_resend: deque[AssignedPiece] = deque()
        self._current: AssignedPiece | None = None
        self._connections: dict[int, _ConnectionState] = {}
        self._started_bytes = 0
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

    # Called by the sender.

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
        self._not_started.append(item)
        self._chunks += 1
        self._total_bytes += size
        self.held_bytes += size
        self.queued_bytes += size

    def cut(self, most_bytes: int) -> None:
        """Limit the size of pieces, before any piece is assigned."""
        if most_bytes < self.piece_bytes:
            self.piece_bytes = most_bytes
            for item in self._not_started:
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
        self._not_started.clear()
        self._to_resend.clear()
        self._current = None
        self.held_bytes = self.queued_bytes = 0

    # Called by connections.

    def open(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes

    def join(self, conn: int, most_unacked: int) -> None:
        self._connections[conn] = _ConnectionState(most_unacked)

    def may_take(self, conn: int) -> bool:
        state = self._connections.get(conn)
        return state is not None and len(state.unacked) < state.most_unacked

    @property
    def work(self) -> int:
        """Number of connections that could be assigned a piece now."""
        if self.failed:
            return len(self._connections)
        count = len(self._to_resend)
        if self._current is not None:
            item, k = self._current
            count += len(item.checks) - k
        under_way_bytes = self._started_bytes - self._released_bytes
        for item in self._not_started:
            if under_way_bytes and under_way_bytes + item.size > self._window_bytes:
                break
            under_way_bytes += item.size
            count += len(item.checks)
        return max(count, self._end_due())

    def _end_due(self) -> bool:
        """Whether a connection should send the end: all pieces are assigned and no connection has sent it."""
        all_assigned = self._current is None and not self._not_started and not self._to_resend
        return (
            all_assigned
            and self._last is not None
            and not any(one.end_sent for one in self._connections.values())
        )

    def next(self, conn: int) -> tuple[ChunkPiece, memoryview] | TransferEnd | SenderProblem | None:
        """The next message of a connection; None while there is none or the window is full."""
        state = self._connections[conn]
        if self.failed and not state.end_sent:
            state.end_sent = True
            return self._last
        if self._end_due():
            state.end_sent = True
            return self._last
        if len(state.unacked) >= state.most_unacked:
            return None
        given = self._to_resend.popleft() if self._to_resend else self._new()
        if given is None:
            return None
        state.unacked.append(given)
        item, k = given
        assert item.body is not None
        at = k * self.piece_bytes
        data = item.body[at : at + self.piece_bytes]
        return ChunkPiece(item.index, item.chunk, item.size, at, len(data), item.checks[k]), data

    def _new(self) -> AssignedPiece | None:
        if self._current is None:
            if not self._not_started or self.failed:
                return None
            item = self._not_started[0]
            under_way_bytes = self._started_bytes - self._released_bytes
            if under_way_bytes and under_way_bytes + item.size > self._window_bytes:
                return None
            self._not_started.popleft()
            self._started_bytes += item.size
            self.queued_bytes -= item.size
            self._current = (item, 0)
        item, k = self._current
        self._current = (item, k + 1) if k + 1 < len(item.checks) else None
        return item, k

    def ack(self, conn: int, ack: Ack) -> int:
        """The number of newly acknowledged pieces."""
        state = self._connections[conn]
        new = ack.pieces - state.acked
        if self.failed:
            return 0
        if not 0 <= new <= len(state.unacked) or ack.released_bytes > self._started_bytes:
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
            self._to_resend.extendleft(reversed(state.unacked))
            self.sent_again_bytes += sum(
                min(self.piece_bytes, item.size - k * self.piece_bytes) for item, k in state.unacked
            )


def pack(chunk: KvChunk, piece_bytes: int, *, now: bool = True) -> EncodedChunk:
    """Encode a chunk; `now` computes the checksums, the only expensive part of the sender's work."""
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
