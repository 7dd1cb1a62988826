"""The receiver's ways to the senders of its fleet: whom it may connect to, idle connections, memory to receive into.

An address must be one of the fleet's: an engine never connects to what a user named. Connections are kept for the
next fetch from the same sender, which then begins with a warm congestion window and, under TLS, without a handshake.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import cast

import numpy as np

from potluck.core.errors import InputError
from potluck.core.values.kv import MOST_CONNECTIONS, PIECE_BYTES
from potluck.core.values.kv_layout import Address
from potluck.kv.chunks import Buffer
from potluck.kv.kv_connection import SOON_S, KvConnection, connect
from potluck.kv.shared_memory import SharedSlots, create, sweep

TCP_INFO = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
"""Elsewhere the struct has another layout, where there is one."""
_COUNTS = struct.Struct("<8B24I")
_LATER = struct.Struct("<4Q6I")
_RTT, _TOTAL_RETRANS = 8 + 15, 8 + 23
_NOT_SENT, _MIN_RTT = 4 + 2, 4 + 3
_LATER_AT = 104
UNKNOWN_RTT = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """One connection, as Linux's struct tcp_info has it."""

    rtt_s: float
    least_rtt_s: float
    retransmits: int  # Segments sent again since the beginning.
    not_sent_bytes: int


def parse(raw: bytes) -> TcpInfo | None:
    """None where the kernel is too old to say it."""
    if len(raw) < _LATER_AT + _LATER.size:
        return None
    counts = _COUNTS.unpack_from(raw)
    later = _LATER.unpack_from(raw, _LATER_AT)
    least = later[_MIN_RTT]
    rtt_us = counts[_RTT]
    return TcpInfo(
        rtt_us * 1e-6,
        (rtt_us if least == UNKNOWN_RTT else least) * 1e-6,
        counts[_TOTAL_RETRANS],
        later[_NOT_SENT],
    )


def info(connection: socket.socket) -> TcpInfo | None:
    """None where there is no such struct: another system, or not TCP."""
    if TCP_INFO is None:
        return None
    try:
        return parse(connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256))
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class LinkReport:
    peer: str
    connections: int
    goodput_bytes_per_s: float  # Bytes of sound pieces over the time that transfers were under way.
    moved_bytes: int
    sent_again_bytes: int
    rtt_s: float  # The mean over connections, smoothed by the kernel; 0 where there is none.
    least_rtt_s: float
    retransmits: int
    queue_bytes: int  # What waits here to be sent, in the send queue and in the kernel.


def report(
    peer: str,
    infos: Iterable[TcpInfo | None],
    *,
    moved_bytes: int,
    busy_s: float,
    sent_again_bytes: int = 0,
    past_retransmits: int = 0,
    queued_bytes: int = 0,
) -> LinkReport:
    every = list(infos)
    known = [one for one in every if one is not None]
    return LinkReport(
        peer,
        len(every),
        moved_bytes / busy_s if busy_s > 0 else 0.0,
        moved_bytes,
        sent_again_bytes,
        sum(one.rtt_s for one in known) / len(known) if known else 0.0,
        min((one.least_rtt_s for one in known), default=0.0),
        past_retransmits + sum(one.retransmits for one in known),
        queued_bytes + sum(one.not_sent_bytes for one in known),
    )


ANY_PORT = 0  # In a fleet's addresses: whatever listens on that host.
MOST_SENDERS = 256
SWEEP_S = 60.0  # Between looks for memory that others have left behind.


@dataclass(frozen=True, slots=True)
class LinkLimits:
    window_bytes: int = 1 << 26
    """Of one fetch's chunks that are under way or not used up."""
    chunk_bytes: int = 1 << 30
    """Of one chunk; one that is larger than the window comes alone."""
    piece_bytes: int = PIECE_BYTES
    keep_bytes: int = 1 << 28
    """Of buffers that are kept for later fetches."""
    most_degree: int = MOST_CONNECTIONS
    retries: int = 4
    """Connections that may be lost in one fetch beside those it began with."""
    most_idle: int = MOST_CONNECTIONS
    """Connections kept per sender."""
    idle_s: float = 30.0
    connect_s: float = 3.0
    stall_s: float = 3.0
    """How long one connection may say nothing before it is replaced."""
    silence_s: float = 5.0
    """How long a sender may say nothing on any connection before the fetch fails; more than `stall_s`."""
    slots: int = 2
    shared_bytes: int = 1 << 28
    """Of memory shared with senders on this machine; what goes beyond crosses by the connection."""

    def __post_init__(self) -> None:
        if not 0 < self.stall_s < self.silence_s:
            raise InputError("stall_s", f"must be above 0 and below silence_s, {self.silence_s:g}")


def pageable(size: int) -> memoryview:
    return np.empty(size, dtype=np.uint8).data


class ReceiveBuffers:
    """Memory for chunks, used again: fresh memory costs a page fault for every 4 KiB, and to pin it (`make`)
    milliseconds. Pieces are powers of two, so that a chunk of another length finds one."""

    def __init__(self, keep_bytes: int, make: Callable[[int], memoryview] = pageable) -> None:
        self._keep_bytes, self._make = keep_bytes, make
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self.kept_bytes = 0
        self.out_bytes = 0

    def take(self, size: int) -> memoryview:
        whole, piece = 1 << max(0, size - 1).bit_length(), None
        with self._lock:
            self.out_bytes += size
            if kept := self._free.get(whole):
                self.kept_bytes -= whole
                piece = kept.pop()
        return (self._make(whole) if piece is None else piece)[:size]

    def give(self, buffer: memoryview) -> None:
        piece = memoryview(cast(Buffer, buffer.obj))
        size = len(piece)
        with self._lock:
            self.out_bytes -= len(buffer)
            while self.kept_bytes + size > self._keep_bytes and self.kept_bytes:
                other = next(key for key, kept in self._free.items() if kept)
                self._free[other].pop()
                self.kept_bytes -= other
                if not self._free[other]:
                    del self._free[other]
            if self.kept_bytes + size <= self._keep_bytes:
                self._free.setdefault(size, []).append(piece)
                self.kept_bytes += size


@dataclass(slots=True)
class _SenderLinks:
    idle: list[tuple[KvConnection, float]] = field(default_factory=list)
    busy: dict[int, KvConnection] = field(default_factory=dict)
    moved_bytes: int = 0
    busy_s: float = 0.0
    lost: int = 0


class PeerConnections:
    def __init__(
        self,
        fleet: Iterable[Address],
        *,
        limits: LinkLimits | None = None,
        tls: ssl.SSLContext | None = None,
        shared_memory: bool = True,
    ) -> None:
        self.limits = limits or LinkLimits()
        self.shared_memory = shared_memory and tls is None
        self.buffers = ReceiveBuffers(self.limits.keep_bytes)
        self._tls = tls
        self._lock = threading.Lock()
        self._fleet = frozenset(fleet)
        self._senders: dict[Address, _SenderLinks] = {}
        self._keys = itertools.count(1)
        self._shared: list[SharedSlots] = []
        self._swept_s = -inf
        if self.shared_memory:
            self._sweep()

    def share(self) -> SharedSlots | None:
        """Shared memory for one more connection, while there is not too much of it."""
        each_bytes = self.limits.slots * self.limits.piece_bytes
        self._sweep()
        with self._lock:
            self._shared = [slots for slots in self._shared if not slots.closed]
            if (len(self._shared) + 1) * each_bytes > self.limits.shared_bytes:
                return None
            made = create(self.limits.slots, self.limits.piece_bytes)
            if made is not None:
                self._shared.append(made)
            return made

    def _sweep(self) -> None:
        now_s = time.monotonic()
        if now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            sweep()

    def allow(self, fleet: Iterable[Address]) -> None:
        with self._lock:
            self._fleet = frozenset(fleet)

    def checked(self, address: Address) -> Address:
        if address not in self._fleet and (address[0], ANY_PORT) not in self._fleet:
            raise InputError("hand-over", f"{address[0]}:{address[1]} is not an address of this fleet")
        return address

    def borrow(self, address: Address, within_s: float = inf) -> tuple[KvConnection, bool]:
        """A connection, and whether it was used before: that one may be dead without anybody's fault."""
        self.checked(address)
        idle = self._idle(address)
        if idle is not None:
            return idle, True
        connection = connect(*address, max(SOON_S, min(self.limits.connect_s, within_s)), self._tls)
        try:
            conn = KvConnection(connection, self.limits.stall_s, next(self._keys))
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._senders.setdefault(address, _SenderLinks()).busy[conn.key] = conn
        return conn, False

    def _idle(self, address: Address) -> KvConnection | None:
        with self._lock:
            self._tidy(time.monotonic())
            link = self._senders.setdefault(address, _SenderLinks())
            while link.idle:
                conn, _ = link.idle.pop()
                if not conn.wait(0):  # Else the sender has closed it.
                    conn.key = next(self._keys)
                    link.busy[conn.key] = conn
                    return conn
                conn.close()
        return None

    def _tidy(self, now_s: float) -> None:
        """Close what was not used for long, and forget senders that were not, if there are many."""
        for link in self._senders.values():
            while link.idle and now_s - link.idle[0][1] > self.limits.idle_s:
                link.idle.pop(0)[0].close()
        if len(self._senders) >= MOST_SENDERS:
            self._senders = {key: link for key, link in self._senders.items() if link.idle or link.busy}

    def give_back(self, address: Address, conn: KvConnection, sound: bool) -> None:
        with self._lock:
            link = self._senders[address]
            link.busy = {key: one for key, one in link.busy.items() if one is not conn}
            if sound and len(link.idle) < self.limits.most_idle:
                link.idle.append((conn, time.monotonic()))
                return
            link.lost += not sound
        conn.close()

    def moved(self, address: Address, moved_bytes: int, busy_s: float) -> None:
        with self._lock:
            link = self._senders.setdefault(address, _SenderLinks())
            link.moved_bytes += moved_bytes
            link.busy_s += busy_s

    def reports(self) -> tuple[LinkReport, ...]:
        with self._lock:
            return tuple(
                report(
                    f"{address[0]}:{address[1]}",
                    [info(conn.connection) for conn in self._connections(link)],
                    moved_bytes=link.moved_bytes,
                    busy_s=link.busy_s,
                )
                for address, link in self._senders.items()
            )

    @staticmethod
    def _connections(link: _SenderLinks) -> list[KvConnection]:
        return [*link.busy.values(), *(conn for conn, _ in link.idle)]

    def close(self) -> None:
        with self._lock:
            for link in self._senders.values():
                for conn, _ in link.idle:
                    conn.close()
                link.idle.clear()


def server_context(certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    return _context(ssl.Purpose.CLIENT_AUTH, certificate, key, authority)


def client_context(certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    """The sender's certificate must also name the host that was asked for."""
    return _context(ssl.Purpose.SERVER_AUTH, certificate, key, authority)


def _context(purpose: ssl.Purpose, certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    protocol = ssl.PROTOCOL_TLS_SERVER if purpose is ssl.Purpose.CLIENT_AUTH else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=str(authority))
        context.load_cert_chain(str(certificate), str(key))
    except (OSError, ssl.SSLError) as error:
        raise InputError("tls", f"cannot use {certificate}, {key} and {authority} ({error})") from error
    return context
