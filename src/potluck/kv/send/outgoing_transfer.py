"""One request's cache on its way out: filled by the engine, emptied by connections, given up when nobody comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from potluck.core.errors import CapacityError
from potluck.kv.chunks import KvChunk, KvManifest, TransferError
from potluck.kv.link.kv_connection import KvConnection
from potluck.kv.send.send_queue import SendQueue, pack

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
        """Why it failed."""
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
            with _Counted(self):
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
                with _Counted(self):
                    self.load.fail(line)
                self.problem = self.problem or line
                self.ring()
                self._tell("failed")

    def wait(self, timeout_s: float) -> State:
        """Until it is over, one way or the other."""
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
            found = self._opened(have)
        except Exception as error:
            with self.room.changed:
                self.problem = " ".join(str(error).split()) or type(error).__name__
                self.end("failed")
            return
        with self.room.changed:
            self._manifest = found
            self.room.changed.notify_all()

    def end(self, state: State) -> None:
        """Nothing more is going to be sent; its memory is free."""
        if self.over:
            return
        self.state = state
        self.stirred_s = time.monotonic()
        with _Counted(self):
            self.load.drop()
        self.room.changed.notify_all()
        self._tell(state)

    def _tell(self, state: State) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            closed(state)

    def counted(self) -> _Counted:
        return _Counted(self)

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


class _Counted:
    """Carries what a change of the load's bytes means over to the room."""

    def __init__(self, transfer: OutgoingTransfer) -> None:
        self._shipment = transfer
        self._before = 0

    def __enter__(self) -> None:
        self._before = self._shipment.load.held_bytes

    def __exit__(self, *_: object) -> None:
        self._shipment.room.held_bytes += self._shipment.load.held_bytes - self._before
