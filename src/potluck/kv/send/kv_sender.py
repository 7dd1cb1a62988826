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
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from potluck.core.errors import CapacityError, FormatError, PotluckError
from potluck.kv.chunks import TransferError
from potluck.kv.handles import TransferHandles
from potluck.kv.link import shared_memory
from potluck.kv.link.kv_connection import KvConnection, shut
from potluck.kv.link.link_report import LinkReport, info, report
from potluck.kv.send.outgoing_transfer import Closed, Opened, OutgoingTransfer, SenderMemory
from potluck.kv.send.send_connection import PeerLink, SendConnection, SenderLimits
from potluck.kv.send.throttle import LinkThrottle
from potluck.kv.wire.frames import (
    HandleRefused,
    Heartbeat,
    Hello,
    OtherVersion,
    SenderProblem,
    TransferOpening,
)

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
        self._shipments: dict[str, OutgoingTransfer] = {}
        self._peers: dict[str, PeerLink] = {}
        self._grants: dict[str, BandwidthGrant] = {}
        self._throttles: dict[str, LinkThrottle] = {}
        """By link; those of `_grants`."""
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
            self._shipments[handle] = transfer
            self._changed.notify_all()
        return transfer

    def withdraw(self, handle: str) -> None:
        """Nobody may attach any more; whoever has goes on."""
        with self._changed:
            transfer = self._shipments.get(handle)
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
        return len(self._shipments)

    def links(self) -> tuple[LinkReport, ...]:
        """How the links fare to all that fetched from here."""
        with self._changed:
            queued: dict[str, int] = {}
            for transfer in self._shipments.values():
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
            asking = [transfer.asking for transfer in self._shipments.values()]
            for transfer in self._shipments.values():
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
            for transfer in self._shipments.values():
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
        for handle in [handle for handle, transfer in self._shipments.items() if transfer.over]:
            self._handles.withdraw(handle)
            del self._shipments[handle]

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
        return SendConnection(conn, transfer, slots, self.limits).run(hello, self._peer(conn.peer))

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
                found = self._handles.claim(hello.handle, hello.bound, hello.session, now_s)
                chunk_bytes = hello.chunk_bytes
                if found is not None and found.state == "offered":
                    chunk_bytes = self._chunk_bytes(conn.peer, chunk_bytes)
                if found is not None and found.attach(chunk_bytes, self.limits.most_lanes, now_s):
                    found.peer = conn.peer
                    return found
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
        with self._changed:
            return self._known(name)

    def _known(self, name: str) -> PeerLink:
        while len(self._peers) >= MOST_PEERS and name not in self._peers:
            idle = next((key for key, peer in self._peers.items() if not peer.conns), None)
            if idle is None:
                break
            del self._peers[idle]
        if name not in self._peers:
            self._peers[name] = PeerLink(throttle=self._throttle(name))
        return self._peers[name]
