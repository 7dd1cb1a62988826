"""The sender's side of one connection that has attached to a shipment: it sends and listens by turns."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from potluck.kv.link import shm
from potluck.kv.link.report import info
from potluck.kv.link.strand import Strand, expect
from potluck.kv.send.shipment import Shipment
from potluck.kv.send.throttle import Throttle
from potluck.kv.wire.check import sums
from potluck.kv.wire.frames import Ack, Beat, Chunk, Done, End, Hello, Problem


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """How much, and how long."""

    chunk_bytes: int = 1 << 23
    most_bytes: int = 1 << 32
    """Of parcels that wait to be fetched."""
    most_connections: int = 256
    most_lanes: int = 32
    """Per shipment."""
    most_unacked: int = 4
    """Chunks that one connection may have under way."""
    hello_s: float = 3.0
    attach_s: float = 30.0
    """How long a receiver may wait for a handle that is not known yet."""
    silence_s: float = 5.0
    """How long a connection may take nothing, before its chunks are sent over another."""
    beat_s: float = 1.0
    lease_s: float = 10.0
    """How long a cache that was asked for is kept when its receiver is heard of no more."""
    idle_s: float = 60.0


@dataclass(slots=True)
class Peer:
    """What is known of the link to another machine."""

    moved_bytes: int = 0
    sent_again_bytes: int = 0
    busy_s: float = 0.0
    """While chunks were under way to it."""
    retransmits: int = 0
    under_way: int = 0
    since_s: float = 0.0
    strands: dict[int, Strand] = field(default_factory=dict)
    throttle: Throttle | None = None
    """Where a grant holds for the link to it."""

    def add(self, chunks: int, now_s: float) -> None:
        """So many more chunks are under way, or fewer."""
        if self.under_way:
            self.busy_s += now_s - self.since_s
        self.under_way += chunks
        self.since_s = now_s


class Stream:
    """A connection that has attached to a shipment."""

    def __init__(
        self, strand: Strand, shipment: Shipment, slots: shm.Slots | None, limits: OutboxLimits
    ) -> None:
        self._strand, self._shipment, self._slots, self._limits = strand, shipment, slots, limits
        self._lock = shipment.room.changed
        self._sent = 0
        self._under_way = 0
        self._key = id(shipment)
        most = limits.most_unacked
        self._most_unacked = most if slots is None else min(most, slots.shared.slots)
        self._done = False

    def run(self, hello: Hello, peer: Peer) -> bool:
        self._peer = peer
        strand, shipment = self._strand, self._shipment
        with self._lock:
            shipment.load.open(hello.window_bytes)
            shipment.load.join(strand.key, self._most_unacked)
            shipment.strands[strand.key] = strand
            peer.strands[strand.key] = strand
        try:
            while not self._done:
                while strand.wait(0):
                    self._listen()
                    if self._done:
                        return True
                if not self._step():
                    return False
            return True
        finally:
            closing = info(strand.connection)
            with self._lock:
                peer.add(-self._under_way, time.monotonic())
                before = shipment.load.sent_again_bytes
                shipment.load.lost(strand.key)
                shipment.strands.pop(strand.key, None)
                peer.strands.pop(strand.key, None)
                peer.sent_again_bytes += shipment.load.sent_again_bytes - before
                peer.retransmits += closing.retransmits if closing else 0
                if peer.throttle is not None and not shipment.strands:
                    peer.throttle.leave(self._key)
                shipment.ring()

    def _listen(self) -> None:
        message, _ = self._strand.read()
        expect(message, Ack, Done)
        shipment = self._shipment
        with self._lock:
            shipment.stirred_s = time.monotonic()
            if isinstance(message, Done):
                shipment.end("fetched")
                self._done = True
            elif isinstance(message, Ack) and not shipment.over:
                with shipment.counted():
                    new = shipment.load.ack(self._strand.key, message)
                self._under_way -= new
                self._peer.add(-new, shipment.stirred_s)
                shipment.ring()

    def _step(self) -> bool:
        """Send one thing, or wait for one; whether to go on."""
        strand, shipment = self._strand, self._shipment
        with self._lock:
            if shipment.state == "gone":
                return False
            if shipment.over and time.monotonic() - shipment.stirred_s > self._limits.hello_s:
                return False  # Its receiver has said so elsewhere, and should have said it here.
            now_s = time.monotonic()
            later_s = self._turn_s(now_s)
            with shipment.counted():
                todo = None if shipment.over or later_s > 0 else shipment.load.next(strand.key)
            strand.idle = todo is None and not later_s
            if isinstance(todo, tuple):
                self._under_way += 1
                self._peer.add(1, now_s)
                self._peer.moved_bytes += todo[0].count
            self._taken(todo[0].count if isinstance(todo, tuple) else 0, later_s)
        if todo is None:
            strand.woken = False
            whole = not later_s or later_s >= self._limits.beat_s
            if not strand.wait(self._limits.beat_s if whole else later_s) and whole and not strand.woken:
                strand.send(Beat())
        elif isinstance(todo, Problem):
            strand.send(todo)
            strand.linger(self._limits.hello_s)
            return False
        elif isinstance(todo, End):
            strand.send(todo)
        else:
            self._chunk(*todo)
        return True

    def _turn_s(self, now_s: float) -> float:
        """Seconds until this connection may take something: what a throttle says, where there is work for it."""
        throttle, shipment = self._peer.throttle, self._shipment
        if throttle is None or shipment.over or shipment.load.failed:
            return 0.0
        if not shipment.load.may_take(self._strand.key) or not shipment.load.work:
            return 0.0
        return throttle.wait_s(self._key, shipment.tenant, shipment.weight, now_s)

    def _taken(self, size_bytes: int, later_s: float) -> None:
        """Tell the throttle what became of a turn."""
        throttle = self._peer.throttle
        if throttle is not None and size_bytes:
            throttle.sent(self._key, size_bytes)
        elif throttle is not None and not later_s:
            throttle.rest(self._key)

    def _chunk(self, chunk: Chunk, data: memoryview) -> None:
        if chunk.sums is None:
            chunk = replace(chunk, sums=sums(data))
        if self._slots is not None:
            shm.copy(data, self._slots.slot(self._sent, len(data)))
            head = Chunk(chunk.label, chunk.parcel_bytes, chunk.offset, chunk.count, chunk.sums, inline=False)
            self._strand.send(head)
        else:
            self._strand.send(chunk, data)
        self._sent += 1
