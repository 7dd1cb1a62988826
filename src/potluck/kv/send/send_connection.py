"""The sender's side of one connection that has attached to a shipment: it sends and listens by turns."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from potluck.kv.link import shared_memory
from potluck.kv.link.kv_connection import KvConnection, expect
from potluck.kv.link.link_report import info
from potluck.kv.send.outgoing_transfer import OutgoingTransfer
from potluck.kv.send.throttle import LinkThrottle
from potluck.kv.wire.checksum import sums
from potluck.kv.wire.frames import Ack, ChunkPiece, Heartbeat, Hello, SenderProblem, TransferDone, TransferEnd


@dataclass(frozen=True, slots=True)
class SenderLimits:
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
class PeerLink:
    """What is known of the link to another machine."""

    moved_bytes: int = 0
    sent_again_bytes: int = 0
    busy_s: float = 0.0
    """While chunks were under way to it."""
    retransmits: int = 0
    under_way: int = 0
    since_s: float = 0.0
    conns: dict[int, KvConnection] = field(default_factory=dict)
    throttle: LinkThrottle | None = None
    """Where a grant holds for the link to it."""

    def add(self, chunks: int, now_s: float) -> None:
        """So many more chunks are under way, or fewer."""
        if self.under_way:
            self.busy_s += now_s - self.since_s
        self.under_way += chunks
        self.since_s = now_s


class SendConnection:
    """A connection that has attached to a shipment."""

    def __init__(
        self,
        conn: KvConnection,
        transfer: OutgoingTransfer,
        slots: shared_memory.SharedSlots | None,
        limits: SenderLimits,
    ) -> None:
        self._strand, self._shipment, self._slots, self._limits = conn, transfer, slots, limits
        self._lock = transfer.room.changed
        self._sent = 0
        self._under_way = 0
        self._key = id(transfer)
        most = limits.most_unacked
        self._most_unacked = most if slots is None else min(most, slots.shared.slots)
        self._done = False

    def run(self, hello: Hello, peer: PeerLink) -> bool:
        self._peer = peer
        conn, transfer = self._strand, self._shipment
        with self._lock:
            transfer.load.open(hello.window_bytes)
            transfer.load.join(conn.key, self._most_unacked)
            transfer.conns[conn.key] = conn
            peer.conns[conn.key] = conn
        try:
            while not self._done:
                while conn.wait(0):
                    self._listen()
                    if self._done:
                        return True
                if not self._step():
                    return False
            return True
        finally:
            closing = info(conn.connection)
            with self._lock:
                peer.add(-self._under_way, time.monotonic())
                before = transfer.load.sent_again_bytes
                transfer.load.lost(conn.key)
                transfer.conns.pop(conn.key, None)
                peer.conns.pop(conn.key, None)
                peer.sent_again_bytes += transfer.load.sent_again_bytes - before
                peer.retransmits += closing.retransmits if closing else 0
                if peer.throttle is not None and not transfer.conns:
                    peer.throttle.leave(self._key)
                transfer.ring()

    def _listen(self) -> None:
        message, _ = self._strand.read()
        expect(message, Ack, TransferDone)
        transfer = self._shipment
        with self._lock:
            transfer.stirred_s = time.monotonic()
            if isinstance(message, TransferDone):
                transfer.end("fetched")
                self._done = True
            elif isinstance(message, Ack) and not transfer.over:
                with transfer.counted():
                    new = transfer.load.ack(self._strand.key, message)
                self._under_way -= new
                self._peer.add(-new, transfer.stirred_s)
                transfer.ring()

    def _step(self) -> bool:
        """Send one thing, or wait for one; whether to go on."""
        conn, transfer = self._strand, self._shipment
        with self._lock:
            if transfer.state == "gone":
                return False
            if transfer.over and time.monotonic() - transfer.stirred_s > self._limits.hello_s:
                return False  # Its receiver has said so elsewhere, and should have said it here.
            now_s = time.monotonic()
            later_s = self._turn_s(now_s)
            with transfer.counted():
                todo = None if transfer.over or later_s > 0 else transfer.load.next(conn.key)
            conn.idle = todo is None and not later_s
            if isinstance(todo, tuple):
                self._under_way += 1
                self._peer.add(1, now_s)
                self._peer.moved_bytes += todo[0].count
            self._taken(todo[0].count if isinstance(todo, tuple) else 0, later_s)
        if todo is None:
            conn.woken = False
            whole = not later_s or later_s >= self._limits.beat_s
            if not conn.wait(self._limits.beat_s if whole else later_s) and whole and not conn.woken:
                conn.send(Heartbeat())
        elif isinstance(todo, SenderProblem):
            conn.send(todo)
            conn.linger(self._limits.hello_s)
            return False
        elif isinstance(todo, TransferEnd):
            conn.send(todo)
        else:
            self._chunk(*todo)
        return True

    def _turn_s(self, now_s: float) -> float:
        """Seconds until this connection may take something: what a throttle says, where there is work for it."""
        throttle, transfer = self._peer.throttle, self._shipment
        if throttle is None or transfer.over or transfer.load.failed:
            return 0.0
        if not transfer.load.may_take(self._strand.key) or not transfer.load.work:
            return 0.0
        return throttle.wait_s(self._key, transfer.tenant, transfer.weight, now_s)

    def _taken(self, size_bytes: int, later_s: float) -> None:
        """Tell the throttle what became of a turn."""
        throttle = self._peer.throttle
        if throttle is not None and size_bytes:
            throttle.sent(self._key, size_bytes)
        elif throttle is not None and not later_s:
            throttle.rest(self._key)

    def _chunk(self, chunk: ChunkPiece, data: memoryview) -> None:
        if chunk.sums is None:
            chunk = replace(chunk, sums=sums(data))
        if self._slots is not None:
            shared_memory.copy(data, self._slots.slot(self._sent, len(data)))
            head = ChunkPiece(
                chunk.label, chunk.parcel_bytes, chunk.offset, chunk.count, chunk.sums, inline=False
            )
            self._strand.send(head)
        else:
            self._strand.send(chunk, data)
        self._sent += 1
