"""The receiver's side of one connection: it attaches, and then takes what comes."""

from __future__ import annotations

from typing import Protocol

from potluck.core.errors import FormatError, PotluckError
from potluck.kv.link import shm
from potluck.kv.link.strand import Strand, expect
from potluck.kv.parcels import Declined, TransferError
from potluck.kv.wire import check
from potluck.kv.wire.frames import Ack, Beat, Chunk, Done, End, Hello, Opening, Problem, Refused

REFUSED = "hand-over: the handle is unknown, has expired, was used, or is for another request"

ACK_EVERY = 2
"""Chunks; fewer when no more are there to be read."""


class Stale(TransferError):
    """A connection kept from before was dead: nobody's fault, and no reason to give up."""


class Final(Exception):
    """Another connection would not help."""

    def __init__(self, error: PotluckError) -> None:
        self.error = error


class Whole(Protocol):
    """What one connection needs to know and to tell of the fetch that it is part of."""

    @property
    def session(self) -> bytes: ...

    @property
    def opening(self) -> Opening | None: ...

    @property
    def over(self) -> bool: ...

    @property
    def complete(self) -> bool: ...

    @property
    def released_bytes(self) -> int: ...

    def hello(self, strand: Strand) -> Hello: ...

    def open(self, opening: Opening, strand: Strand) -> None: ...

    def ended(self, end: End) -> None: ...

    def place(self, chunk: Chunk, strand: Strand) -> memoryview | None: ...

    def placed(self, chunk: Chunk, sound: bool) -> None: ...


class Intake:
    """A connection that attaches, and then takes what comes."""

    def __init__(self, fetch: Whole, strand: Strand) -> None:
        self._fetch, self._strand = fetch, strand
        self._taken = 0
        self._said = Ack(0, 0)
        self._shared = False
        self.attached = False

    def run(self) -> bool:
        """Until all is there; whether the connection may be used again."""
        fetch, strand = self._fetch, self._strand
        self._attach()
        while not fetch.over:
            more = self._taken - self._said.chunks < ACK_EVERY and strand.wait(0)
            if more or self._wait():
                self._take()
        if not fetch.complete:
            return False
        strand.send(Done())
        return True

    def _wait(self) -> bool:
        """Tell the sender what is new; then whether there is something to read, before somebody rings."""
        strand = self._strand
        strand.idle = True  # First: whoever makes room now either sees this, or is seen by the next line.
        self._ack()
        readable = not strand.woken and strand.wait(strand.silence_s)
        strand.idle = False
        if not readable and not strand.woken:
            raise TimeoutError(f"said nothing for {strand.silence_s:g} s")
        strand.woken = False
        return readable

    def _attach(self) -> None:
        fetch, strand = self._fetch, self._strand
        strand.send(fetch.hello(strand))
        while True:
            message, _ = strand.read()
            if isinstance(message, Opening) and message.session == fetch.session:
                break
            if isinstance(message, Refused):
                raise Final(Declined(REFUSED)) if fetch.opening is None else Declined(REFUSED)
            if isinstance(message, Problem):
                raise _failed(message)
            # A used connection may still bring what was on its way when the fetch before was complete.
            expect(message, Beat, End)
        if strand.slots is not None:
            strand.slots.forget_name()
        if message.shared and strand.slots is None:
            raise FormatError("hand-over", "uses shared memory that was not offered")
        self._shared = message.shared
        fetch.open(message, strand)
        self.attached = True

    def _take(self) -> None:
        message, _ = self._strand.read()
        if isinstance(message, Chunk):
            self._chunk(message)
        elif isinstance(message, End):
            self._fetch.ended(message)
        elif isinstance(message, Problem):
            raise _failed(message)
        else:
            expect(message, Beat)

    def _chunk(self, chunk: Chunk) -> None:
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

    def _data(self, chunk: Chunk, place: memoryview) -> check.Sums:
        if not self._shared:
            return self._strand.receive(place)
        assert self._strand.slots is not None
        shm.copy(self._strand.slots.slot(self._taken, chunk.count), place)
        return check.sums(place)

    def _ack(self) -> None:
        ack = Ack(self._taken, self._fetch.released_bytes)
        if ack != self._said:
            self._strand.send(ack)
            self._said = ack


def _failed(problem: Problem) -> Final:
    return Final(Declined(f"hand-over: the sender failed ({problem.line})"))
