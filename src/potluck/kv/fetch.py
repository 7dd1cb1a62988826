"""Fetch KV: attach to a handle over several connections and pass each complete chunk to a sink.

Each connection has a thread that receives pieces into the buffers of their chunks; the caller's thread runs the sink,
one chunk at a time, while further chunks arrive. A failed connection is replaced; only its unfinished pieces are sent
again. The fetch fails when no connection is left, the sender reports a problem or is silent on all connections for
too long, the sink raises, or the deadline passes; then all its resources are freed. A successful connect proves
nothing: the kernel accepts connections for a stopped process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.core.values.kv_layout import Address, KvCut
from potluck.kv import checksum, frames
from potluck.kv.assembly import ChunkAssembly
from potluck.kv.chunks import KvChunk, KvManifest, TransferDeclined, TransferError
from potluck.kv.handles import bound_to, checked_handle, new_session
from potluck.kv.kv_connection import KvConnection, expect
from potluck.kv.peer_connections import PeerConnections

REFUSED = "hand-over: the handle is unknown, has expired, was used, or is for another request"

PIECES_PER_ACK = 2  # At most; fewer when no more pieces can be read at once.


class StaleConnection(TransferError):
    """A pooled connection was dead; the fetch retries over a new one."""


class FinalError(Exception):
    """An error that another connection would not avoid."""

    def __init__(self, error: PotluckError) -> None:
        self.error = error


class ReceiveConnection:
    """One connection of a fetch: attaches, receives pieces and acknowledges them."""

    def __init__(self, fetch: KvFetch, conn: KvConnection) -> None:
        self._fetch, self._conn = fetch, conn
        self._received_pieces = 0
        self._last_ack = frames.Ack(0, 0)
        self._shared = False
        self.attached = False

    def run(self) -> bool:
        """Receive until the fetch is over; returns whether the connection may be reused."""
        fetch, conn = self._fetch, self._conn
        self._attach()
        while not fetch.over:
            more = self._received_pieces - self._last_ack.pieces < PIECES_PER_ACK and conn.wait(0)
            if more or self._wait():
                self._read_message()
        if not fetch.complete:
            return False
        conn.send(frames.TransferDone())
        return True

    def _wait(self) -> bool:
        """Send an acknowledgement and wait; returns whether data can be read."""
        conn = self._conn
        conn.idle = True  # Before the ack: a thread that frees room either sees this or is seen by `_ack`.
        self._ack()
        readable = not conn.woken and conn.wait(conn.silence_s)
        conn.idle = False
        if not readable and not conn.woken:
            raise TimeoutError(f"said nothing for {conn.silence_s:g} s")
        conn.woken = False
        return readable

    def _attach(self) -> None:
        fetch, conn = self._fetch, self._conn
        conn.send(fetch.hello(conn))
        while True:
            message, _ = conn.read()
            if isinstance(message, frames.TransferOpening) and message.session == fetch.session:
                break
            if isinstance(message, frames.HandleRefused):
                raise (
                    FinalError(TransferDeclined(REFUSED))
                    if fetch.opening is None
                    else TransferDeclined(REFUSED)
                )
            if isinstance(message, frames.SenderProblem):
                raise _failed(message)
            # A reused connection may still deliver messages of the previous fetch.
            expect(message, frames.Heartbeat, frames.TransferEnd)
        if conn.slots is not None:
            conn.slots.forget_name()
        if message.shared and conn.slots is None:
            raise FormatError("hand-over", "uses shared memory that was not offered")
        self._shared = message.shared
        fetch.open(message, conn)
        self.attached = True

    def _read_message(self) -> None:
        message, _ = self._conn.read()
        if isinstance(message, frames.ChunkPiece):
            self._piece(message)
        elif isinstance(message, frames.TransferEnd):
            self._fetch.ended(message)
        elif isinstance(message, frames.SenderProblem):
            raise _failed(message)
        else:
            expect(message, frames.Heartbeat)

    def _piece(self, piece: frames.ChunkPiece) -> None:
        if piece.count and piece.inline == self._shared:
            raise FormatError("hand-over", "has a piece on the wrong way")
        place = self._fetch.place(piece, self._conn)
        if place is None:
            if piece.inline:
                self._conn.receive(memoryview(bytearray(piece.count)))
        else:
            sound = False
            try:
                if self._data(piece, place) != piece.sums:
                    raise FormatError("hand-over", "has a piece whose checksum is wrong")
                sound = True
            finally:
                self._fetch.placed(piece, sound)
        self._received_pieces += 1

    def _data(self, piece: frames.ChunkPiece, place: memoryview) -> checksum.Sums:
        if not self._shared:
            return self._conn.receive(place)
        assert self._conn.slots is not None
        return checksum.copied(self._conn.slots.slot(self._received_pieces, piece.count), place)

    def _ack(self) -> None:
        ack = frames.Ack(self._received_pieces, self._fetch.released_bytes)
        if ack != self._last_ack:
            self._conn.send(ack)
            self._last_ack = ack


def _failed(problem: frames.SenderProblem) -> FinalError:
    return FinalError(TransferDeclined(f"hand-over: the sender failed ({problem.line})"))


GRACE_S = 0.2  # For connections to send TransferDone after the last chunk.

Sink = Callable[[KvChunk], None]  # Consumes a chunk: its bytes are valid until the call returns.


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A handle and the request, model and tokens that it must be bound to."""

    handle: str
    request: str
    fingerprint: str
    token_hash: str
    have: int = 0
    cut: KvCut = KvCut()
    session: bytes = b""  # The same for all workers of a receiver; generated if empty.


@dataclass(frozen=True, slots=True)
class FetchResult:
    manifest: KvManifest
    chunks: int
    moved_bytes: int
    wall_s: float
    lost_connections: int
    shared_memory: bool


class KvFetch:
    """One fetch; call `run` in its own thread and `cancel` from any thread."""

    def __init__(
        self,
        peer_connections: PeerConnections,
        address: Address,
        fetch_request: FetchRequest,
        *,
        degree: int = 4,
        deadline_s: float = 30.0,
    ) -> None:
        peer_connections.checked(address)
        checked_handle(fetch_request.handle)
        if not 1 <= degree <= peer_connections.limits.most_degree:
            raise InputError("degree", f"must be 1 to {peer_connections.limits.most_degree}, is {degree}")
        self._links, self._address, self._fetch_request = peer_connections, address, fetch_request
        self._begun_s = self._heard_s = self._told_s = time.monotonic()
        self._until_s = self._begun_s + deadline_s
        self.session = fetch_request.session or new_session()
        self._changed = threading.Condition()
        self._assembly: ChunkAssembly | None = None
        self.opening: frames.TransferOpening | None = None
        self._ready: deque[tuple[int, KvChunk]] = deque()
        self._failure: Exception | None = None
        self._other = ""  # The latest problem of a sender of another version.
        self.over = False
        self._connections: dict[int, KvConnection] = {}
        self._attached: set[int] = set()
        self._live = 0
        self._retries = peer_connections.limits.retries
        self._lost = 0
        self._shared = False
        self._threads: list[threading.Thread] = []
        self._degree = degree

    def cancel(self) -> None:
        """Nobody wants it any more: `run` raises before long."""
        with self._changed:
            if self._failure is None:
                self._failure = TransferError("hand-over: was cancelled")
            self._changed.notify_all()

    # The caller's thread.

    def run(
        self, opened: Callable[[KvManifest], None], sink: Sink, whole: Callable[[], None] | None = None
    ) -> FetchResult:
        """Bring a cache here. `opened` is told once what is coming, before the first chunk; `whole` is called when
        all is there, before the connections are ended, which takes a while. One connection waits for a sender that
        has nothing yet, as hundreds may; the others join it at the first piece."""
        self._connect(1)
        moved_bytes = number = 0
        try:
            while (next_one := self._await()) is not None:
                index, chunk = next_one
                assert self.opening is not None
                if not number:
                    opened(self.opening.manifest)
                    number = 1
                sink(chunk)
                moved_bytes += len(chunk.data) + len(chunk.parameters)
                self._used_up(index)
            assert self.opening is not None
            if not number:
                opened(self.opening.manifest)
            if whole is not None:
                whole()
        finally:
            self._stop()
        wall_s = time.monotonic() - self._begun_s
        chunks = self._assembly.chunks if self._assembly else 0
        return FetchResult(self.opening.manifest, chunks, moved_bytes, wall_s, self._lost, self._shared)

    def _await(self) -> tuple[int, KvChunk] | None:
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if not self._ready and self._assembly is not None and self._assembly.complete:
                    return None
                now_s = time.monotonic()
                if now_s >= self._until_s:
                    raise TransferError(f"hand-over: was not there within its {self._given_s():g} s")
                if self._ready:
                    return self._ready.popleft()
                patience_s = self._patience_s(now_s)
                if patience_s <= 0:
                    raise TransferError(
                        f"hand-over: the sender said nothing for {self._links.limits.silence_s:g} s"
                    )
                self._changed.wait(min(patience_s, self._until_s - now_s))

    def _patience_s(self, now_s: float) -> float:
        """How long the sender may still say nothing, on any connection."""
        for conn in self._connections.values():
            self._heard_s = max(self._heard_s, conn.last_heard_s(now_s))
        return self._heard_s + self._links.limits.silence_s - now_s

    def _given_s(self) -> float:
        return round(self._until_s - self._begun_s, 3)

    def _used_up(self, index: int) -> None:
        with self._changed:
            assert self._assembly is not None
            self._assembly.release(index)
            self._wake_one()

    def _wake_one(self) -> None:
        """Somebody must tell the sender of room. Connections that are receiving do, before they wait for more."""
        conns = [conn for key, conn in self._connections.items() if key in self._attached]
        if conns and all(conn.idle for conn in conns):
            conns[0].wake()

    def _connect(self, most: int) -> None:
        while len(self._threads) < most:
            self._live += 1
            name = f"kv-in-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._connection, name=name, daemon=True))
            self._threads[-1].start()

    def _stop(self) -> None:
        """Nothing of the fetch goes on after this: no thread, no connection that is not sound, no memory."""
        with self._changed:
            self.over = True
            well = self._assembly is not None and self._assembly.complete
            for key, conn in self._connections.items():
                if well and key in self._attached:
                    conn.wake()
                else:
                    conn.abort()  # One that has not attached yet has nothing to say either.
        patience_s = time.monotonic() + (GRACE_S if well else 0.0)
        for thread in self._threads:
            thread.join(max(0.0, patience_s - time.monotonic()))
        with self._changed:
            for conn in self._connections.values():
                conn.abort()
        for thread in self._threads:
            thread.join()
        if self._assembly is not None:
            self._assembly.close()

    # A connection's thread.

    def _connection(self) -> None:
        try:
            while not self.over:
                problem = self._attempt()
                if problem is None or not self._again(problem):
                    return
        finally:
            with self._changed:
                self._live -= 1
                if not self._live and not self.over and self._failure is None:
                    self._failure = TransferError("hand-over: all connections to the sender are lost")
                self._changed.notify_all()

    def _attempt(self) -> Exception | None:
        """One connection from its greeting to its end; what went wrong, if something did."""
        peer_connections, conn, sound, used, intake = self._links, None, False, False, None
        try:
            with self._changed:
                now_s = time.monotonic()
                within_s = min(self._until_s - now_s, self._patience_s(now_s))
            conn, used = peer_connections.borrow(self._address, within_s)
            with self._changed:
                if self.over:
                    return None
                self._connections[conn.key] = conn
            intake = ReceiveConnection(self, conn)
            sound = intake.run()
            return None
        except frames.OtherVersion as error:
            # Once it may be a byte that was harmed on the way; what is said twice is meant.
            with self._changed:
                before, self._other = self._other, str(error)
            return FinalError(error) if before == str(error) else error
        except (OSError, PotluckError, FinalError) as error:
            stale = used and intake is not None and not intake.attached
            return StaleConnection(str(error)) if stale and not isinstance(error, FinalError) else error
        finally:
            if conn is not None:
                with self._changed:
                    self._heard_s = max(self._heard_s, conn.heard_s)
                    self._connections.pop(conn.key, None)
                    self._attached.discard(conn.key)
                    self._wake_one()  # What it should have told the sender, another one must.
                peer_connections.give_back(self._address, conn, sound)

    def _again(self, problem: Exception) -> bool:
        with self._changed:
            if self.over or self._failure is not None:
                return False
            if isinstance(problem, StaleConnection):
                return True
            if isinstance(problem, FinalError):
                self._failure = problem.error
                return False
            self._lost += 1
            self._retries -= 1
            gone = isinstance(problem, ConnectionRefusedError)
            if self._retries >= 0 and not gone:
                return True
            if self._live == 1 and isinstance(problem, InputError):
                self._failure = problem
            elif self._live == 1:
                line = " ".join(str(problem).split()) or type(problem).__name__
                host, port = self._address
                self._failure = TransferError(f"hand-over: {host}:{port} is lost ({line[:200]})")
            return False

    # What connections ask and tell.

    @property
    def complete(self) -> bool:
        return self._assembly is not None and self._assembly.complete

    @property
    def released_bytes(self) -> int:
        return self._assembly.released_bytes if self._assembly else 0

    def hello(self, conn: KvConnection) -> frames.Hello:
        fetch_request, limits = self._fetch_request, self._links.limits
        if conn.slots is None and self._links.shared_memory and conn.here:
            conn.slots = self._links.share()
        return frames.Hello(
            self.session,
            bound_to(fetch_request.request, fetch_request.fingerprint, fetch_request.token_hash),
            fetch_request.handle,
            fetch_request.have,
            limits.window_bytes,
            limits.piece_bytes,
            max(0, int((self._until_s - time.monotonic()) * 1000)),
            conn.slots.shared if conn.slots is not None else None,
            fetch_request.cut,
        )

    def open(self, opening: frames.TransferOpening, conn: KvConnection) -> None:
        manifest, fetch_request, limits = opening.manifest, self._fetch_request, self._links.limits
        problem = ""
        if (manifest.fingerprint, manifest.token_hash) != (
            fetch_request.fingerprint,
            fetch_request.token_hash,
        ):
            problem = "is the cache of another model, or of other tokens"
        elif manifest.start > fetch_request.have:
            problem = f"begins at {manifest.start}, behind the {fetch_request.have} tokens held"
        elif opening.piece_bytes > limits.piece_bytes:
            problem = f"has pieces of {opening.piece_bytes} bytes, {limits.piece_bytes} are taken"
        if problem:
            raise FinalError(FormatError("hand-over", problem))
        with self._changed:
            if self.over:
                raise TransferError("hand-over: is over")
            if self.opening is None:
                self.opening = opening
                take, give = self._links.buffers.take, self._links.buffers.give
                self._assembly = ChunkAssembly(
                    limits.window_bytes, opening.piece_bytes, take, give, limits.chunk_bytes
                )
            elif (self.opening.manifest, self.opening.piece_bytes) != (manifest, opening.piece_bytes):
                raise FinalError(FormatError("hand-over", "says two things about one cache"))
            self._shared = self._shared or opening.shared
            self._attached.add(conn.key)

    def ended(self, end: frames.TransferEnd) -> None:
        with self._changed:
            assert self._assembly is not None
            self._assembly.ended(end)
            self._changed.notify_all()

    def place(self, piece: frames.ChunkPiece, conn: KvConnection) -> memoryview | None:
        """Where a piece goes. If it comes twice at once, the sender has given the other connection up."""
        with self._changed:
            assert self._assembly is not None
            while (writer := self._assembly.writer(piece)) is not None and not self.over:
                other = self._connections.get(writer)
                if other is not None:
                    other.abort()
                self._changed.wait(0.1)
            if self.over:
                raise TransferError("hand-over: is over")
            self._connect(self._degree)
            return self._assembly.place(piece, conn.key)

    def placed(self, piece: frames.ChunkPiece, sound: bool) -> None:
        with self._changed:
            assert self._assembly is not None
            if not sound:
                self._assembly.spoiled(piece)
            else:
                chunk = self._assembly.landed(piece)
                before_s, self._told_s = self._told_s, time.monotonic()
                self._links.moved(self._address, piece.count, self._told_s - before_s)
                if chunk is None:
                    return
                self._ready.append((piece.index, chunk))
            self._changed.notify_all()


class GroupFetch:
    """Fetches from several workers of one sender as one: all come, or none counts. `run` it in a thread."""

    def __init__(
        self,
        peer_connections: PeerConnections,
        wanted: Sequence[tuple[Address, FetchRequest]],
        *,
        degree: int,
        deadline_s: float,
    ) -> None:
        self._lock = threading.Lock()
        self._left = len(wanted)
        self._problem: Exception | None = None
        self._results: list[FetchResult] = []
        self._fetches = [
            KvFetch(peer_connections, address, one, degree=degree, deadline_s=deadline_s)
            for address, one in wanted
        ]

    @property
    def failed(self) -> bool:
        return self._problem is not None

    def cancel(self) -> None:
        for fetch in self._fetches:
            fetch.cancel()

    def run(
        self,
        opened: Callable[[int, KvManifest], None],
        sink: Callable[[int, KvChunk], None],
        whole: Callable[[], None] | None = None,
    ) -> FetchResult:
        """As `KvFetch.run`; `opened` and `sink` are told of which worker, and called in a thread for each of them."""

        def one(place: int) -> None:
            try:
                result = self._fetches[place].run(
                    lambda manifest: opened(place, manifest), lambda piece: sink(place, piece), last
                )
                self._results.append(result)
            except Exception as error:
                with self._lock:
                    self._problem = self._problem or error
                self.cancel()

        def last() -> None:
            with self._lock:
                self._left -= 1
                left = self._left
            if not left and whole is not None:
                whole()

        threads = [
            threading.Thread(target=one, args=(place,), name=f"kv-from-{place}", daemon=True)
            for place in range(1, len(self._fetches))
        ]
        for thread in threads:
            thread.start()
        one(0)
        for thread in threads:
            thread.join()
        if self._problem is not None:
            raise self._problem
        results = self._results
        return FetchResult(
            results[0].manifest,
            sum(result.chunks for result in results),
            sum(result.moved_bytes for result in results),
            max(result.wall_s for result in results),
            sum(result.lost_connections for result in results),
            all(result.shared_memory for result in results),
        )
