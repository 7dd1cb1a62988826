"""The receiver's side of one connection: it attaches, and then takes what comes."""

from __future__ import annotations

from typing import Protocol

from potluck.core.errors import FormatError, PotluckError
from potluck.kv.chunks import TransferDeclined, TransferError
from potluck.kv.link import shared_memory
from potluck.kv.link.kv_connection import KvConnection, expect
from potluck.kv.wire import checksum
from potluck.kv.wire.frames import (
    Ack,
    ChunkPiece,
    HandleRefused,
    Heartbeat,
    Hello,
    SenderProblem,
    TransferDone,
    TransferEnd,
    TransferOpening,
)

REFUSED = "hand-over: the handle is unknown, has expired, was used, or is for another request"

ACK_EVERY = 2
"""Chunks; fewer when no more are there to be read."""


class StaleConnection(TransferError):
    """A connection kept from before was dead: nobody's fault, and no reason to give up."""


class FinalError(Exception):
    """Another connection would not help."""

    def __init__(self, error: PotluckError) -> None:
        self.error = error


class FetchContext(Protocol):
    """What one connection needs to know and to tell of the fetch that it is part of."""

    @property
    def session(self) -> bytes: ...

    @property
    def opening(self) -> TransferOpening | None: ...

    @property
    def over(self) -> bool: ...

    @property
    def complete(self) -> bool: ...

    @property
    def released_bytes(self) -> int: ...

    def hello(self, conn: KvConnection) -> Hello: ...

    def open(self, opening: TransferOpening, conn: KvConnection) -> None: ...

    def ended(self, end: TransferEnd) -> None: ...

    def place(self, chunk: ChunkPiece, conn: KvConnection) -> memoryview | None: ...

    def placed(self, chunk: ChunkPiece, sound: bool) -> None: ...


class ReceiveConnection:
    """A connection that attaches, and then takes what comes."""

    def __init__(self, fetch: FetchContext, conn: KvConnection) -> None:
        self._fetch, self._strand = fetch, conn
        self._taken = 0
        self._said = Ack(0, 0)
        self._shared = False
        self.attached = False

    def run(self) -> bool:
        """Until all is there; whether the connection may be used again."""
        fetch, conn = self._fetch, self._strand
        self._attach()
        while not fetch.over:
            more = self._taken - self._said.chunks < ACK_EVERY and conn.wait(0)
            if more or self._wait():
                self._take()
        if not fetch.complete:
            return False
        conn.send(TransferDone())
        return True

    def _wait(self) -> bool:
        """Tell the sender what is new; then whether there is something to read, before somebody rings."""
        conn = self._strand
        conn.idle = True  # First: whoever makes room now either sees this, or is seen by the next line.
        self._ack()
        readable = not conn.woken and conn.wait(conn.silence_s)
        conn.idle = False
        if not readable and not conn.woken:
            raise TimeoutError(f"said nothing for {conn.silence_s:g} s")
        conn.woken = False
        return readable

    def _attach(self) -> None:
        fetch, conn = self._fetch, self._strand
        conn.send(fetch.hello(conn))
        while True:
            message, _ = conn.read()
            if isinstance(message, TransferOpening) and message.session == fetch.session:
                break
            if isinstance(message, HandleRefused):
                raise (
                    FinalError(TransferDeclined(REFUSED))
                    if fetch.opening is None
                    else TransferDeclined(REFUSED)
                )
            if isinstance(message, SenderProblem):
                raise _failed(message)
            # A used connection may still bring what was on its way when the fetch before was complete.
            expect(message, Heartbeat, TransferEnd)
        if conn.slots is not None:
            conn.slots.forget_name()
        if message.shared and conn.slots is None:
            raise FormatError("hand-over", "uses shared memory that was not offered")
        self._shared = message.shared
        fetch.open(message, conn)
        self.attached = True

    def _take(self) -> None:
        message, _ = self._strand.read()
        if isinstance(message, ChunkPiece):
            self._chunk(message)
        elif isinstance(message, TransferEnd):
            self._fetch.ended(message)
        elif isinstance(message, SenderProblem):
            raise _failed(message)
        else:
            expect(message, Heartbeat)

    def _chunk(self, chunk: ChunkPiece) -> None:
        if chunk.count and chunk.inline == self._shared:
            raise FormatError("hand-over", "has a chunk on the wrong way")
        place = self._fetch.place(chunk, self._strand)
        if place is None:
            if chunk.inline:
                self._strand.receive(memoryview(bytearray(chunk.count)))
        else:
            sound = False
            try:
                if self._data(chunk, place) != chunk.sums:
                    raise FormatError("hand-over", "has a chunk whose checksum is wrong")
                sound = True
            finally:
                self._fetch.placed(chunk, sound)
        self._taken += 1

    def _data(self, chunk: ChunkPiece, place: memoryview) -> checksum.Sums:
        if not self._shared:
            return self._strand.receive(place)
        assert self._strand.slots is not None
        shared_memory.copy(self._strand.slots.slot(self._taken, chunk.count), place)
        return checksum.sums(place)

    def _ack(self) -> None:
        ack = Ack(self._taken, self._fetch.released_bytes)
        if ack != self._said:
            self._strand.send(ack)
            self._said = ack


def _failed(problem: SenderProblem) -> FinalError:
    return FinalError(TransferDeclined(f"hand-over: the sender failed ({problem.line})"))
