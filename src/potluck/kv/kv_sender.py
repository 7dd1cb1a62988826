"""The sending side: receivers connect, name a handle, and get its chunks as they are made.

One thread accepts and looks after leases; each connection has a thread of its own, which sends and listens by turns.
It listens on the loopback address unless told otherwise.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from potluck.core.errors import CapacityError, FormatError, PotluckError
from potluck.core.values.kv import MOST_CONNECTIONS, PIECE_BYTES
from potluck.core.values.kv_layout import KvCut, Span
from potluck.kv import frames, shared_memory
from potluck.kv.checksum import copied, sums
from potluck.kv.chunks import KvChunk, KvManifest, TransferError, cut_chunk
from potluck.kv.codec_layout import ITEM_BYTES
from potluck.kv.handles import TransferHandles
from potluck.kv.kv_connection import KvConnection, expect, shut
from potluck.kv.peer_connections import LinkReport, info, report
from potluck.kv.send_queue import SendQueue, pack

State = Literal["offered", "attached", "fetched", "failed", "gone"]
Opened = Callable[[int], KvManifest]
"""Called with the number of tokens that an attaching receiver has; returns the manifest of what will be sent."""
Closed = Callable[[State], None]
"""Called once with the final state of a transfer: `fetched`, `failed` or `gone`."""

OVER: frozenset[State] = frozenset({"fetched", "failed", "gone"})
MAX_CONNECTIONS_WITH_ONE_CHECKSUM_THREAD = 2
"""Up to here the thread that adds chunks computes their checksums, at about 7 GB/s; more connections, and those that
copy into shared memory, compute their own."""


class SenderMemory:
    """The send queue's memory and the lock, shared by all transfers of a sender."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self._lock = threading.RLock()
        self.changed, self.offered = self.condition(), self.condition()
        """Notified when memory may be free, and when a handle is offered; apart, as hundreds of threads may wait."""

    def condition(self) -> threading.Condition:
        return threading.Condition(self._lock)


class TransferPart:
    """The part of a transfer for one worker of the receiver: its chunks, connections and state."""

    def __init__(self, transfer: OutgoingTransfer, piece_bytes: int) -> None:
        self.transfer, self.memory = transfer, transfer.memory
        self.cut = KvCut()
        self.queue = SendQueue(piece_bytes)
        self.state: State = "offered"
        self.conns: dict[int, KvConnection] = {}
        self.active_s = time.monotonic()  # Time of the last progress, or of the end.

    @property
    def over(self) -> bool:
        return self.state in OVER

    # All of these are called under the lock.

    def takes(self, size: int) -> bool:
        """Whether the send queue has room for a chunk; always true once the receiver has taken all chunks so far: it
        has reserved a row, and the transfers that fill the queue may wait for that row."""
        drained, held_bytes = self.queue.begun and not self.queue.held_bytes, self.memory.held_bytes
        return self.over or drained or held_bytes + size <= self.memory.most_bytes or not held_bytes

    def attach(self, piece_bytes: int, most_connections: int, now_s: float) -> bool:
        """Whether a connection with this piece size may join; the first one sets the size."""
        if self.over or len(self.conns) >= most_connections:
            return False
        if self.state == "offered":
            self.queue.cut(piece_bytes)
            self.state = "attached"
        self.active_s = now_s
        return piece_bytes >= self.queue.piece_bytes

    def end(self, state: State) -> None:
        """End the part and free its memory."""
        if self.over:
            return
        self.state = state
        self.active_s = time.monotonic()
        with self.counted():
            self.queue.drop()
        self.memory.changed.notify_all()
        self.transfer.updated.notify_all()
        self.transfer.part_over(state)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add a change of the queue's bytes within the block to the sender's total."""
        before = self.queue.held_bytes
        yield
        self.memory.held_bytes += self.queue.held_bytes - before

    def wake_idle(self) -> None:
        """Wake as many idle connections as there is work for, and all threads that wait for memory."""
        work = self.queue.work if not self.over else len(self.conns)
        for key, conn in self.conns.items():
            if work <= 0:
                break
            if conn.idle and (self.over or self.queue.may_take(key) or self.queue.failed):
                conn.idle = False
                conn.wake()
                work -= 1
        self.memory.changed.notify_all()


class OutgoingTransfer:
    """A KV transfer: `put` chunks as layers are computed, then `finish` or `fail`. A receiver with several workers
    has a part for each; the engine is called when all have attached."""

    def __init__(
        self,
        memory: SenderMemory,
        piece_bytes: int,
        opened: Opened,
        expires_s: float,
        closed: Closed | None = None,
    ) -> None:
        self.memory, self.updated = memory, memory.condition()
        self._closed = closed
        self._piece_bytes = piece_bytes
        self.readers = 1
        self.parts = {0: TransferPart(self, piece_bytes)}
        self.expires_s = expires_s
        self._opened = opened
        self._manifest: KvManifest | None = None
        self._opening = False
        self.problem = ""
        self.claimed = False  # Whether a receiver has attached.
        self.peer = ""  # The receiver's host.
        self.asking: threading.Thread | None = None

    @property
    def opening(self) -> bool:
        """Whether the engine was called for the manifest and has not returned."""
        return self._opening and self._manifest is None

    @property
    def state(self) -> State:
        states = {part.state for part in self.parts.values()}
        for state in ("failed", "gone"):
            if state in states:
                return state
        whole = len(self.parts) == self.readers
        return states.pop() if len(states) == 1 and whole else "attached"

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def cut(self) -> KvCut:
        """The cut of the receiver's first worker: the fields that all workers share."""
        return self.parts[0].cut

    # Called by the engine.

    def takes_whole(self, dtype: str, heads: Span) -> bool:
        """Whether each attached worker takes all of these heads in this format: then encoding may precede cutting."""
        return all(
            (cut.heads == (0, 0) or cut.heads[0] <= heads[0] < heads[1] <= cut.heads[1])
            and not (cut.dtype and ITEM_BYTES[cut.dtype] < ITEM_BYTES[dtype])
            for cut in [part.cut for part in tuple(self.parts.values())]
        )

    def cuts(self, chunk: KvChunk) -> Iterator[tuple[TransferPart, KvChunk]]:
        """The pieces of an unencoded chunk for each of the receiver's workers."""
        for part in tuple(self.parts.values()):
            piece = cut_chunk(chunk, part.cut)
            if piece is not None:
                yield part, piece

    def put(self, chunk: KvChunk, wait_s: float = 0.0, part: TransferPart | None = None) -> None:
        """Add a chunk, whose bytes must not change. Waits for room in the send queue."""
        part = part or self.parts[0]
        conns = tuple(part.conns.values())
        apart = len(conns) > MAX_CONNECTIONS_WITH_ONE_CHECKSUM_THREAD or any(
            conn.slots is not None for conn in conns
        )
        encoded_chunk = pack(chunk, part.queue.piece_bytes, now=not apart)
        size, memory = len(encoded_chunk.body), self.memory
        with memory.changed:
            fits = memory.changed.wait_for(lambda: part.takes(size), wait_s)
            if part.over:
                raise TransferError(f"hand-over: the transfer is {part.state}, nobody waits for it")
            if not fits:
                raise CapacityError(
                    f"KV send queue: no room for {size} bytes beside the {memory.held_bytes} that wait"
                )
            with part.counted():
                part.queue.put(encoded_chunk)
            part.wake_idle()

    def finish(self) -> None:
        with self.memory.changed:
            for part in self.parts.values():
                part.queue.finish()
                part.wake_idle()

    def fail(self, line: str) -> None:
        """End the transfer with a problem that the receiver is told."""
        with self.memory.changed:
            if not self.over:
                for part in self.parts.values():
                    with part.counted():
                        part.queue.fail(line)
                    part.wake_idle()
                self.problem = self.problem or line
                self._tell("failed")

    def wait(self, timeout_s: float) -> State:
        with self.memory.changed:
            self.updated.wait_for(lambda: self.over, timeout_s)
            return self.state

    # Called by connections; all but `manifest` under the lock.

    def part(self, cut: KvCut) -> TransferPart | None:
        """The part of a receiver's worker; None if its cut differs from before."""
        if not self.claimed:
            self.readers, self.claimed = cut.readers, True
        elif cut.readers != self.readers:
            return None
        part = self.parts.setdefault(cut.reader, TransferPart(self, self._piece_bytes))
        if part.state == "offered":
            part.cut = cut
        return part if part.cut == cut else None

    def manifest(self, have: int, timeout_s: float, beat_s: float, beat: Callable[[], None]) -> KvManifest:
        """The engine's manifest, requested once for all connections; heartbeats go to the receiver meanwhile."""
        until_s = time.monotonic() + timeout_s
        while True:
            with self.memory.changed:
                come = sum(part.state != "offered" for part in self.parts.values())
                if not self._opening and come == self.readers:
                    self._opening = True
                    self.asking = threading.Thread(
                        target=self._ask, args=(have,), name="kv-open", daemon=True
                    )
                    self.asking.start()
                self.updated.wait_for(lambda: self._manifest is not None or self.over, beat_s)
                if self._manifest is not None:
                    return self._manifest
                if self.over or time.monotonic() > until_s:
                    raise TransferError(self.problem or "the engine did not say what it has")
            beat()

    def _ask(self, have: int) -> None:
        try:
            opened = self._opened(have)
        except Exception as error:
            with self.memory.changed:
                self.problem = " ".join(str(error).split()) or type(error).__name__
                self.end("failed")
            return
        with self.memory.changed:
            self._manifest = opened
            for part in self.parts.values():
                if part.cut.nothing:
                    part.queue.finish()
            self.updated.notify_all()

    def end(self, state: State) -> None:
        for part in tuple(self.parts.values()):
            part.end(state)

    def part_over(self, state: State) -> None:
        """End all parts when one has failed."""
        if state != "fetched":
            self.end(state)
        if self.over:
            self._tell(self.state)

    def _tell(self, state: State) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            closed(state)


MOST_PEERS, BACKLOG = 256, 1024
MANIFEST_TIMEOUT_S = 60.0  # The engine answers between two steps.


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
        self._memory = SenderMemory(self.limits.most_bytes)
        self._changed = self._memory.changed
        self._handles: TransferHandles[OutgoingTransfer] = TransferHandles()
        self._transfers: dict[str, OutgoingTransfer] = {}
        self._peers: dict[str, PeerLink] = {}
        self._keys = itertools.count(1)
        self._connections: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._sweep_s, self._swept_s = min(0.25, self.limits.lease_s / 4), -inf
        self._listener.settimeout(self._sweep_s)
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    # The engine's side.

    def offer(
        self,
        handle: str,
        bound: bytes,
        opened: Opened,
        lasts_s: float,
        closed: Closed | None = None,
    ) -> OutgoingTransfer:
        """Offer a cache that can be fetched once within `lasts_s`; `closed` is called in any thread."""
        expires_s = time.monotonic() + lasts_s
        transfer = OutgoingTransfer(self._memory, self.limits.piece_bytes, opened, expires_s, closed)
        with self._changed:
            if self._closed:
                raise CapacityError("KV sender: is closed")
            self._handles.offer(handle, bound, transfer, expires_s)
            self._transfers[handle] = transfer
            self._memory.offered.notify_all()
        return transfer

    def withdraw(self, handle: str) -> None:
        """Withdraw an offer; receivers that have attached continue."""
        with self._changed:
            transfer = self._transfers.get(handle)
            if transfer is not None and transfer.state == "offered":
                transfer.end("gone")
            self._forget()

    @property
    def held_bytes(self) -> int:
        return self._memory.held_bytes

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
                for part in transfer.parts.values():
                    for name in {conn.peer for conn in part.conns.values()}:
                        queued[name] = queued.get(name, 0) + part.queue.queued_bytes
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
            self._memory.offered.notify_all()
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
        if now_s - self._swept_s < self._sweep_s:
            return
        self._swept_s = now_s
        with self._changed:
            for transfer in self._transfers.values():
                for part in transfer.parts.values():
                    if transfer.opening or (part.conns and not part.queue.outstanding):
                        part.active_s = now_s  # The receiver is there; it is we who have nothing for it.
                waiting = [part for part in transfer.parts.values() if part.state == "attached"]
                lost = any(now_s - part.active_s > self.limits.lease_s for part in waiting)
                if not transfer.over and (now_s >= transfer.expires_s or lost):
                    transfer.end("gone")
                    for part in transfer.parts.values():
                        for conn in part.conns.values():
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
            pass  # Its pieces went back to the transfer; the receiver sees that the connection is closed.
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
        except frames.OtherVersion:
            # It can tell from any frame of ours; if a byte of its own was harmed, it tries again.
            return self._last_words(conn, frames.Heartbeat())
        if not isinstance(hello, frames.Hello):
            raise FormatError("hand-over", "does not begin with a greeting")
        part = self._claim(conn, hello)
        if part is None:
            return self._last_words(conn, frames.HandleRefused())
        try:
            manifest = part.transfer.manifest(
                hello.have, MANIFEST_TIMEOUT_S, self.limits.beat_s, lambda: conn.send(frames.Heartbeat())
            )
        except TransferError as error:
            return self._last_words(conn, frames.SenderProblem(str(error)))
        slots = self._slots(conn, hello)
        conn.send(frames.TransferOpening(hello.session, manifest, part.queue.piece_bytes, slots is not None))
        with self._changed:
            peer = self._peer(conn.peer)
        return SendConnection(conn, part, slots, self.limits).run(hello, peer)

    def _slots(self, conn: KvConnection, hello: frames.Hello) -> shared_memory.SharedSlots | None:
        if hello.shared is None or not self._shared:
            return None
        slots, wanted = conn.slots, (hello.shared, hello.piece_bytes)
        if slots is not None and (slots.shared, slots.slot_bytes) != wanted:
            slots.close()
            conn.slots = None
        if conn.slots is None:
            conn.slots = shared_memory.join(*wanted)
        return conn.slots

    def _last_words(self, conn: KvConnection, message: frames.Message) -> bool:
        conn.send(message)
        conn.linger(self.limits.hello_s)
        return False

    def _claim(self, conn: KvConnection, hello: frames.Hello) -> TransferPart | None:
        """The transfer of a handle, which may be offered only after it was asked for."""
        now_s = beat_s = time.monotonic()
        until_s = now_s + min(hello.wait_ms / 1000, self.limits.attach_s)
        while not self._closed:
            with self._changed:
                transfer = self._handles.claim(hello.handle, hello.bound, hello.session, now_s)
                part = None if transfer is None else transfer.part(hello.cut)
                if part is not None and part.attach(
                    hello.piece_bytes, self.limits.most_connections_each, now_s
                ):
                    part.transfer.peer = conn.peer
                    part.transfer.updated.notify_all()
                    return part
                if now_s >= until_s:
                    return None
                self._memory.offered.wait(min(self.limits.beat_s, until_s - now_s))
            now_s = time.monotonic()
            if now_s - beat_s >= self.limits.beat_s:
                beat_s = now_s
                conn.send(frames.Heartbeat())
                if conn.wait(0):
                    raise FormatError("hand-over", "goes on before it was answered")
        return None

    def _peer(self, name: str) -> PeerLink:
        """Under the lock."""
        while len(self._peers) >= MOST_PEERS and name not in self._peers:
            idle = next((key for key, peer in self._peers.items() if not peer.conns), None)
            if idle is None:
                break
            del self._peers[idle]
        if name not in self._peers:
            self._peers[name] = PeerLink()
        return self._peers[name]


@dataclass(frozen=True, slots=True)
class SenderLimits:
    piece_bytes: int = PIECE_BYTES
    most_bytes: int = 1 << 32
    """Of chunks that wait to be fetched."""
    most_connections: int = 1024
    most_connections_each: int = MOST_CONNECTIONS
    most_unacked: int = 4
    """Pieces that one connection may have under way."""
    hello_s: float = 3.0
    attach_s: float = 30.0
    """How long a receiver may wait for a handle that is not known yet."""
    silence_s: float = 5.0
    """How long a connection may take nothing, before its pieces are sent over another."""
    beat_s: float = 1.0
    lease_s: float = 10.0
    """How long a cache that was asked for is kept when its receiver is heard of no more."""
    idle_s: float = 60.0


@dataclass(slots=True)
class PeerLink:
    moved_bytes: int = 0
    sent_again_bytes: int = 0
    busy_s: float = 0.0  # While pieces were under way to it.
    retransmits: int = 0
    under_way: int = 0
    since_s: float = 0.0
    conns: dict[int, KvConnection] = field(default_factory=dict)

    def add(self, pieces: int, now_s: float) -> None:
        if self.under_way:
            self.busy_s += now_s - self.since_s
        self.under_way += pieces
        self.since_s = now_s


class SendConnection:
    def __init__(
        self,
        conn: KvConnection,
        part: TransferPart,
        slots: shared_memory.SharedSlots | None,
        limits: SenderLimits,
    ) -> None:
        self._conn, self._part, self._slots, self._limits = conn, part, slots, limits
        self._lock = part.memory.changed
        self._sent = 0
        self._under_way = 0
        most = limits.most_unacked
        self._most_unacked = most if slots is None else min(most, slots.shared.slots)
        self._done = False

    def run(self, hello: frames.Hello, peer: PeerLink) -> bool:
        self._peer = peer
        conn, part = self._conn, self._part
        with self._lock:
            part.queue.open(hello.window_bytes)
            part.queue.join(conn.key, self._most_unacked)
            part.conns[conn.key] = conn
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
                before = part.queue.sent_again_bytes
                part.queue.lost(conn.key)
                part.conns.pop(conn.key, None)
                peer.conns.pop(conn.key, None)
                peer.sent_again_bytes += part.queue.sent_again_bytes - before
                peer.retransmits += closing.retransmits if closing else 0
                part.wake_idle()

    def _listen(self) -> None:
        message, _ = self._conn.read()
        expect(message, frames.Ack, frames.TransferDone)
        part = self._part
        with self._lock:
            part.active_s = time.monotonic()
            if isinstance(message, frames.TransferDone):
                part.end("fetched")
                self._done = True
            elif isinstance(message, frames.Ack) and not part.over:
                with part.counted():
                    new = part.queue.ack(self._conn.key, message)
                self._under_way -= new
                self._peer.add(-new, part.active_s)
                part.wake_idle()

    def _step(self) -> bool:
        """Send one thing, or wait for one; whether to go on."""
        conn, part = self._conn, self._part
        with self._lock:
            if part.state == "gone":
                return False
            if part.over and time.monotonic() - part.active_s > self._limits.hello_s:
                return False  # Its receiver has said so elsewhere, and should have said it here.
            now_s = time.monotonic()
            with part.counted():
                todo = None if part.over else part.queue.next(conn.key)
            conn.idle = todo is None
            if isinstance(todo, tuple):
                self._under_way += 1
                self._peer.add(1, now_s)
                self._peer.moved_bytes += todo[0].count
        if todo is None:
            conn.woken = False
            if not conn.wait(self._limits.beat_s) and not conn.woken:
                conn.send(frames.Heartbeat())
        elif isinstance(todo, frames.SenderProblem):
            conn.send(todo)
            conn.linger(self._limits.hello_s)
            return False
        elif isinstance(todo, frames.TransferEnd):
            conn.send(todo)
        else:
            self._piece(*todo)
        return True

    def _piece(self, piece: frames.ChunkPiece, data: memoryview) -> None:
        if self._slots is not None:
            made = copied(data, self._slots.slot(self._sent, len(data)))
            self._conn.send(replace(piece, inline=False, sums=piece.sums or made))
        else:
            self._conn.send(replace(piece, sums=piece.sums or sums(data)), data)
        self._sent += 1
