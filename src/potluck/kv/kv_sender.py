"""The sender's door: receivers connect, name a handle, and get its parcels as they are made.

One thread accepts and looks after leases; each connection has a thread of its own, which sends and listens by turns.
It listens on the loopback address unless told otherwise.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from potluck.core.errors import CapacityError, FormatError, PotluckError
from potluck.kv import shared_memory
from potluck.kv.checksum import sums
from potluck.kv.chunks import KvChunk, KvManifest, TransferError
from potluck.kv.frames import (
    Ack,
    ChunkPiece,
    HandleRefused,
    Heartbeat,
    Hello,
    OtherVersion,
    SenderProblem,
    TransferDone,
    TransferEnd,
    TransferOpening,
)
from potluck.kv.handles import TransferHandles
from potluck.kv.kv_connection import KvConnection, expect, shut
from potluck.kv.peer_connections import LinkReport, info, report
from potluck.kv.send_queue import SendQueue, pack
from potluck.kv.throttle import LinkThrottle

State = Literal["offered", "attached", "fetched", "failed", "gone"]
Opened = Callable[[int], KvManifest]
"""What the engine does when a receiver attaches that has so many tokens already: it says what it will send."""
Closed = Callable[[State], None]
"""Told once, when it is known whether the cache was fetched: `fetched`, `failed` or `gone`."""

KEEPS_UP = 2
"""Checks are made by whoever puts parcels in, at some 7 GB/s; more connections than these are faster than that, and
make their own."""


class SenderMemory:
    """The memory that all shipments of an outbox share, and the lock that all of them are under."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self.changed = threading.Condition()


class OutgoingTransfer:
    """`put` parcels as layers are computed, then `finish`, or `fail`."""

    def __init__(
        self,
        room: SenderMemory,
        chunk_bytes: int,
        opened: Opened,
        expires_s: float,
        closed: Closed | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> None:
        self.room = room
        self.tenant, self.weight = tenant, weight
        """Whose share of a throttled link it takes."""
        self._closed = closed
        self.load = SendQueue(chunk_bytes)
        self.state: State = "offered"
        self.conns: dict[int, KvConnection] = {}
        self.expires_s = expires_s
        self.stirred_s = time.monotonic()
        """When something last went right, or when it was over."""
        self._opened = opened
        self._manifest: KvManifest | None = None
        self._opening = False
        self.problem = ""
        self.claimed = False
        """Whether a receiver ever came."""
        self.peer = ""
        """The machine that it came from."""
        self.asking: threading.Thread | None = None

    @property
    def opening(self) -> bool:
        """Whether the engine was asked what it has, and has not said it."""
        return self._opening and self._manifest is None

    @property
    def over(self) -> bool:
        return self.state in ("fetched", "failed", "gone")

    # The engine's side.

    def put(self, parcel: KvChunk, wait_s: float = 0.0) -> None:
        """Add a parcel, whose bytes must stay as they are. Waits for room in the outbox."""
        packed = pack(parcel, self.load.chunk_bytes, now=len(self.conns) <= KEEPS_UP)
        size, room = len(packed.body), self.room
        with room.changed:
            room.changed.wait_for(lambda: self.over or room.held_bytes + size <= room.most_bytes, wait_s)
            if self.over:
                raise TransferError(f"hand-over: the shipment is {self.state}, nobody waits for it")
            if room.held_bytes + size > room.most_bytes:
                raise CapacityError(
                    f"outbox: no room for {size} bytes beside the {room.held_bytes} that wait"
                )
            with self.counted():
                self.load.put(packed)
            self.ring()

    def finish(self) -> None:
        with self.room.changed:
            self.load.finish()
            self.ring()

    def fail(self, line: str) -> None:
        """Tell the receiver that the rest will not come."""
        with self.room.changed:
            if not self.over:
                with self.counted():
                    self.load.fail(line)
                self.problem = self.problem or line
                self.ring()
                self._tell("failed")

    def wait(self, timeout_s: float) -> State:
        with self.room.changed:
            self.room.changed.wait_for(lambda: self.over, timeout_s)
            return self.state

    # The connections' side; all but `manifest` under the lock.

    def attach(self, chunk_bytes: int, most_strands: int, now_s: float) -> bool:
        """Whether a connection may join that takes chunks of so many bytes. The first one says how large they are."""
        if self.over or len(self.conns) >= most_strands:
            return False
        if self.state == "offered":
            self.load.cut(chunk_bytes)
            self.state = "attached"
            self.claimed = True
        self.stirred_s = now_s
        return chunk_bytes >= self.load.chunk_bytes

    def manifest(self, have: int, timeout_s: float, beat_s: float, beat: Callable[[], None]) -> KvManifest:
        """Asked of the engine once, for all connections; while it thinks, the receiver hears that we are here."""
        with self.room.changed:
            first, self._opening = not self._opening, True
            if first:
                self.asking = threading.Thread(target=self._ask, args=(have,), name="kv-open", daemon=True)
                self.asking.start()
        until_s = time.monotonic() + timeout_s
        while True:
            with self.room.changed:
                self.room.changed.wait_for(lambda: self._manifest is not None or self.over, beat_s)
                if self._manifest is not None:
                    return self._manifest
                if self.over or time.monotonic() > until_s:
                    raise TransferError(self.problem or "the engine did not say what it has")
            beat()

    def _ask(self, have: int) -> None:
        try:
            opened = self._opened(have)
        except Exception as error:
            with self.room.changed:
                self.problem = " ".join(str(error).split()) or type(error).__name__
                self.end("failed")
            return
        with self.room.changed:
            self._manifest = opened
            self.room.changed.notify_all()

    def end(self, state: State) -> None:
        """Nothing more is going to be sent; its memory is free."""
        if self.over:
            return
        self.state = state
        self.stirred_s = time.monotonic()
        with self.counted():
            self.load.drop()
        self.room.changed.notify_all()
        self._tell(state)

    def _tell(self, state: State) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            closed(state)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Carries what a change of the queue's bytes means over to the room."""
        before = self.load.held_bytes
        yield
        self.room.held_bytes += self.load.held_bytes - before

    def ring(self) -> None:
        """Wake as many idle connections as there is work for, and whoever waits for room."""
        work = self.load.work if not self.over else len(self.conns)
        for key, conn in self.conns.items():
            if work <= 0:
                break
            if conn.idle and (self.over or self.load.may_take(key) or self.load.failed):
                conn.idle = False
                conn.wake()
                work -= 1
        self.room.changed.notify_all()


MOST_PEERS = 256
ANSWER_S = 60.0
"""An engine answers between two steps."""


@dataclass(frozen=True, slots=True)
class BandwidthGrant:
    """So many bytes a second may be sent over a link, which leads to these machines."""

    link: str
    peers: frozenset[str]
    bytes_per_s: float
    until_s: float = inf
    """When it ends, unless it is given again: whoever grants may be gone."""


class KvSender:
    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: SenderLimits | None = None,
        tls: ssl.SSLContext | None = None,
        shared_memory: bool = True,
    ) -> None:
        self.limits = limits or SenderLimits()
        self._tls, self._shared = tls, shared_memory and tls is None
        self._room = SenderMemory(self.limits.most_bytes)
        self._changed = self._room.changed
        self._handles: TransferHandles[OutgoingTransfer] = TransferHandles()
        self._transfers: dict[str, OutgoingTransfer] = {}
        self._peers: dict[str, PeerLink] = {}
        self._grants: dict[str, BandwidthGrant] = {}
        self._throttles: dict[str, LinkThrottle] = {}
        self._keys = itertools.count(1)
        self._connections: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._listener.settimeout(min(0.25, self.limits.lease_s / 4))
        self._acceptor = threading.Thread(target=self._accept, name="kv-outbox", daemon=True)
        self._acceptor.start()

    # The engine's side.

    def offer(
        self,
        handle: str,
        bound: bytes,
        opened: Opened,
        lasts_s: float,
        closed: Closed | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> OutgoingTransfer:
        """A cache that can be fetched, once, within a time; `closed` is told how it went, in whatever thread."""
        expires_s = time.monotonic() + lasts_s
        transfer = OutgoingTransfer(
            self._room, self.limits.chunk_bytes, opened, expires_s, closed, tenant, weight
        )
        with self._changed:
            if self._closed:
                raise CapacityError("outbox: is closed")
            self._handles.offer(handle, bound, transfer, expires_s)
            self._transfers[handle] = transfer
            self._changed.notify_all()
        return transfer

    def withdraw(self, handle: str) -> None:
        """Nobody may attach any more; whoever has goes on."""
        with self._changed:
            transfer = self._transfers.get(handle)
            if transfer is not None and transfer.state == "offered":
                transfer.end("gone")
            self._forget()

    def granted(self, grants: Iterable[BandwidthGrant], now_s: float) -> None:
        """What may be sent over which links from now on, in place of all that was granted before."""
        with self._changed:
            self._grants = {grant.link: grant for grant in grants}
            throttles = {}
            for link, grant in self._grants.items():
                throttle = self._throttles.get(link)
                if throttle is None:
                    throttle = LinkThrottle(grant.bytes_per_s, now_s)
                else:
                    throttle.grant(grant.bytes_per_s, now_s)
                throttles[link] = throttle
            self._throttles = throttles
            for name, peer in self._peers.items():
                peer.throttle = self._throttle(name)

    @property
    def grants(self) -> tuple[BandwidthGrant, ...]:
        with self._changed:
            return tuple(self._grants.values())

    @property
    def throttles(self) -> tuple[LinkThrottle, ...]:
        return tuple(self._throttles.values())

    def _throttle(self, peer: str) -> LinkThrottle | None:
        links = (link for link, grant in self._grants.items() if peer in grant.peers)
        return self._throttles.get(next(links, ""))

    @property
    def held_bytes(self) -> int:
        return self._room.held_bytes

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def transfers(self) -> int:
        return len(self._transfers)

    def links(self) -> tuple[LinkReport, ...]:
        with self._changed:
            queued: dict[str, int] = {}
            for transfer in self._transfers.values():
                for name in {conn.peer for conn in transfer.conns.values()}:
                    queued[name] = queued.get(name, 0) + transfer.load.queued_bytes
            return tuple(
                report(
                    name,
                    [info(conn.connection) for conn in peer.conns.values()],
                    moved_bytes=peer.moved_bytes,
                    busy_s=peer.busy_s,
                    sent_again_bytes=peer.sent_again_bytes,
                    past_retransmits=peer.retransmits,
                    queued_bytes=queued.get(name, 0),
                )
                for name, peer in self._peers.items()
            )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            asking = [transfer.asking for transfer in self._transfers.values()]
            for transfer in self._transfers.values():
                transfer.end("gone")
            for connection in self._connections.values():
                shut(connection)
            self._changed.notify_all()
        self._acceptor.join()
        for thread in [*self._threads, *asking]:
            if thread is not None:
                thread.join()

    # Accepting, and leases.

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    self._sweep(time.monotonic())
                    continue
                except OSError:
                    time.sleep(0.05)  # Out of descriptors, say: those in use come free again.
                    continue
                self._sweep(time.monotonic())
                self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        with self._changed:
            if self._closed or len(self._connections) >= self.limits.most_connections:
                connection.close()
                return
            key = next(self._keys)
            thread = threading.Thread(
                target=self._serve, args=(connection, key), name=f"kv-out-{key}", daemon=True
            )
            self._connections[key] = connection
            self._threads = [one for one in self._threads if one.is_alive()]
        thread.start()
        self._threads.append(thread)

    def _sweep(self, now_s: float) -> None:
        with self._changed:
            kept = [grant for grant in self._grants.values() if grant.until_s > now_s]
            if len(kept) < len(self._grants):
                self.granted(kept, now_s)
            for transfer in self._transfers.values():
                if transfer.opening or (transfer.conns and not transfer.load.outstanding):
                    transfer.stirred_s = now_s  # The receiver is there; it is we who have nothing for it.
                waited_s = now_s - transfer.stirred_s
                attached = transfer.state != "offered"
                if not transfer.over and (
                    now_s >= transfer.expires_s or (attached and waited_s > self.limits.lease_s)
                ):
                    transfer.end("gone")
                    for conn in transfer.conns.values():
                        conn.abort()
            self._forget()

    def _forget(self) -> None:
        for handle in [handle for handle, transfer in self._transfers.items() if transfer.over]:
            self._handles.withdraw(handle)
            del self._transfers[handle]

    # One connection.

    def _serve(self, connection: socket.socket, key: int) -> None:
        conn = None
        try:
            connection.settimeout(self.limits.hello_s)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
                with self._changed:
                    self._connections[key] = connection
            conn = KvConnection(connection, self.limits.silence_s, key)
            patience_s = self.limits.hello_s
            while not self._closed and self._hear(conn, patience_s):
                patience_s = self.limits.idle_s
        except (OSError, PotluckError):
            pass  # Its chunks went back to the shipment; the receiver sees that the connection is closed.
        finally:
            if conn is not None:
                conn.close()
            connection.close()
            with self._changed:
                self._connections.pop(key, None)

    def _hear(self, conn: KvConnection, patience_s: float) -> bool:
        """Serve one fetch; whether the connection may be used for another."""
        if not conn.wait(patience_s):
            return False
        try:
            hello, _ = conn.read(self.limits.hello_s)
        except OtherVersion:  # It can tell from any frame of ours.
            return self._last_words(conn, HandleRefused())
        if not isinstance(hello, Hello):
            raise FormatError("hand-over", "does not begin with a greeting")
        transfer = self._claim(conn, hello)
        if transfer is None:
            return self._last_words(conn, HandleRefused())
        try:
            about = transfer.manifest(
                hello.have, ANSWER_S, self.limits.beat_s, lambda: conn.send(Heartbeat())
            )
        except TransferError as error:
            return self._last_words(conn, SenderProblem(str(error)))
        slots = self._slots(conn, hello)
        conn.send(TransferOpening(hello.session, about, transfer.load.chunk_bytes, slots is not None))
        with self._changed:
            peer = self._peer(conn.peer)
        return SendConnection(conn, transfer, slots, self.limits).run(hello, peer)

    def _slots(self, conn: KvConnection, hello: Hello) -> shared_memory.SharedSlots | None:
        if hello.shared is None or not self._shared:
            return None
        if conn.slots is None or (conn.slots.shared, conn.slots.slot_bytes) != (
            hello.shared,
            hello.chunk_bytes,
        ):
            if conn.slots is not None:
                conn.slots.close()
            conn.slots = shared_memory.join(hello.shared, hello.chunk_bytes)
        return conn.slots

    def _last_words(self, conn: KvConnection, message: HandleRefused | SenderProblem) -> bool:
        conn.send(message)
        conn.linger(self.limits.hello_s)
        return False

    def _claim(self, conn: KvConnection, hello: Hello) -> OutgoingTransfer | None:
        """The shipment of a handle, which may be offered only after it was asked for."""
        now_s = beat_s = time.monotonic()
        until_s = now_s + min(hello.wait_ms / 1000, self.limits.attach_s)
        while not self._closed:
            with self._changed:
                outgoing_transfer = self._handles.claim(hello.handle, hello.bound, hello.session, now_s)
                chunk_bytes = hello.chunk_bytes
                if outgoing_transfer is not None and outgoing_transfer.state == "offered":
                    chunk_bytes = self._chunk_bytes(conn.peer, chunk_bytes)
                if outgoing_transfer is not None and outgoing_transfer.attach(
                    chunk_bytes, self.limits.most_lanes, now_s
                ):
                    outgoing_transfer.peer = conn.peer
                    return outgoing_transfer
                if now_s >= until_s:
                    return None
                self._changed.wait(min(self.limits.beat_s, until_s - now_s))
            now_s = time.monotonic()
            if now_s - beat_s >= self.limits.beat_s:
                beat_s = now_s
                conn.send(Heartbeat())
                if conn.wait(0):
                    raise FormatError("hand-over", "goes on before it was answered")
        return None

    def _chunk_bytes(self, peer: str, most_bytes: int) -> int:
        """Smaller on a thin link, so that shipments can take turns there."""
        throttle = self._throttle(peer)
        return most_bytes if throttle is None else min(most_bytes, throttle.chunk_bytes)

    def _peer(self, name: str) -> PeerLink:
        """Under the lock."""
        while len(self._peers) >= MOST_PEERS and name not in self._peers:
            idle = next((key for key, peer in self._peers.items() if not peer.conns), None)
            if idle is None:
                break
            del self._peers[idle]
        if name not in self._peers:
            self._peers[name] = PeerLink(throttle=self._throttle(name))
        return self._peers[name]


@dataclass(frozen=True, slots=True)
class SenderLimits:
    chunk_bytes: int = 1 << 23
    most_bytes: int = 1 << 32
    """Of parcels that wait to be fetched."""
    most_connections: int = 256
    most_lanes: int = 32
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
        if self.under_way:
            self.busy_s += now_s - self.since_s
        self.under_way += chunks
        self.since_s = now_s


class SendConnection:
    def __init__(
        self,
        conn: KvConnection,
        transfer: OutgoingTransfer,
        slots: shared_memory.SharedSlots | None,
        limits: SenderLimits,
    ) -> None:
        self._conn, self._transfer, self._slots, self._limits = conn, transfer, slots, limits
        self._lock = transfer.room.changed
        self._sent = 0
        self._under_way = 0
        self._key = id(transfer)
        most = limits.most_unacked
        self._most_unacked = most if slots is None else min(most, slots.shared.slots)
        self._done = False

    def run(self, hello: Hello, peer: PeerLink) -> bool:
        self._peer = peer
        conn, transfer = self._conn, self._transfer
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
        message, _ = self._conn.read()
        expect(message, Ack, TransferDone)
        transfer = self._transfer
        with self._lock:
            transfer.stirred_s = time.monotonic()
            if isinstance(message, TransferDone):
                transfer.end("fetched")
                self._done = True
            elif isinstance(message, Ack) and not transfer.over:
                with transfer.counted():
                    new = transfer.load.ack(self._conn.key, message)
                self._under_way -= new
                self._peer.add(-new, transfer.stirred_s)
                transfer.ring()

    def _step(self) -> bool:
        """Send one thing, or wait for one; whether to go on."""
        conn, transfer = self._conn, self._transfer
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
        throttle, transfer = self._peer.throttle, self._transfer
        if throttle is None or transfer.over or transfer.load.failed:
            return 0.0
        if not transfer.load.may_take(self._conn.key) or not transfer.load.work:
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
            self._conn.send(head)
        else:
            self._conn.send(chunk, data)
        self._sent += 1
