"""A pretended network card: what crosses takes the time, and is told with the bytes, of a large model's KV.

Both ends have a card, and the slower one says how long it takes: parcels leave the sender's one behind the other, and
are there when the receiver's, which takes them one behind the other as well, has them. A parcel stands for several
layers, computed one after the other, each of which leaves as soon as it is computed (`perf.moves.transfer`):

    F_m = max(F_m-1, C_m) + t        so, with C_1 .. C_k evenly apart,  F_k = max(F_0 + k t, C_1 + k t, C_k + t)

The receiver takes layer m from when its first byte left, F_m - t, at its own rate. What comes from one sender comes
in order; between senders the card is free whenever nothing is there to be taken, so that one who sends over a thin
link holds up nobody else (`bookings.py`). All of this is reckoned, from the times that parcels carry: they themselves
go at once, and wait at the receiver until they would be there.

The parcels that cross are a few bytes, over connections that are really there. What those say of themselves (how
many, how far, how often something was lost) stays; bytes and rates are put in their place.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from potluck.core.errors import FormatError
from potluck.engine.compute.emulated import Clock
from potluck.engine.mock.kv_sizes import KvSizes
from potluck.engine.mock.mock_chunks import (
    CONTENT,
    MORE,
    RAW_BYTES,
    ChunkTimes,
    since_of,
    times_of,
    with_times,
)
from potluck.engine.mock.nic_schedule import NicSchedule
from potluck.kv.chunks import KvChunk
from potluck.kv.codec_layout import Codec, sizes
from potluck.kv.peer_connections import LinkReport
from potluck.perf.delays.transfer import AlphaBeta


@dataclass(slots=True)
class _Book:
    moved_bytes: int = 0
    busy_s: float = 0.0


class MockKvTransfer:
    """How the parcels of an engine that pretends go over the wire. Used from the event loop, but for `here_s`."""

    light = True

    def __init__(
        self, cargo: KvSizes, link: AlphaBeta, speed_up: float = 1.0, clock: Clock = time.monotonic
    ) -> None:
        self._cargo, self._speed_up, self._clock = cargo, speed_up, clock
        self._bytes_per_s = link.beta_bytes_per_s * speed_up
        self._alpha_s = link.alpha_s / speed_up
        self._free_s = -float("inf")
        self._taken_s: dict[str, float] = {}
        """When the last parcel that came from a sender is here."""
        self._card = NicSchedule()
        self._taking = threading.Lock()
        self._books: dict[str, _Book] = {}

    def change_rate(self, gbps: float) -> None:
        """From now on what crosses here has so much of the way; what is on its way was reckoned before."""
        self._bytes_per_s = gbps * 1e9 / 8 * self._speed_up

    def kv_bytes(self, parcel: KvChunk) -> int:
        since = since_of(parcel)
        return self._cargo.kv_bytes(parcel, None if since == MORE else since)

    def packed(self, parcel: KvChunk, codec: Codec) -> KvChunk:
        size = sizes(parcel.part, parcel.dtype, parcel.shape, codec)
        whole = bytes(parcel.data)[: CONTENT.size].ljust(size.total_bytes, b"\0")
        cut = size.parameter_bytes
        return replace(parcel, codec=codec, parameters=whole[:cut], data=whole[cut:])

    def restored(self, parcel: KvChunk) -> KvChunk:
        if parcel.codec == "raw":
            return parcel
        whole = bytes(parcel.parameters) + bytes(parcel.data)
        if len(whole) < CONTENT.size or any(whole[CONTENT.size :]):
            raise FormatError(f"hand-over: layer {parcel.layer}", "is not what an engine that pretends sends")
        data = whole[: CONTENT.size].ljust(RAW_BYTES, b"\0")
        return replace(parcel, codec="raw", parameters=b"", data=data)

    def due_s(self, parcel: KvChunk) -> float | None:
        """At once: the receiver waits for what is on its way."""
        return None

    def leaves(self, peer: str, parcel: KvChunk) -> KvChunk:
        now_s, took_s = self._clock(), self._took_s(parcel)
        self._moved(peer, self.kv_bytes(parcel), took_s)
        computed = times_of(parcel) or ChunkTimes(now_s, now_s, now_s)
        count = self._cargo.stands_for(parcel)
        one_s = took_s / count
        first_s = computed.first_s + (computed.last_s - computed.first_s) / count
        began_s = max(self._free_s, first_s)
        self._free_s = max(began_s + took_s, computed.last_s + one_s)
        away_s = now_s - self._alpha_s
        return with_times(
            parcel, ChunkTimes(away_s - began_s, away_s - (self._free_s - one_s), away_s - self._free_s)
        )

    def here_s(self, peer: str, parcel: KvChunk) -> float:
        now_s, took_s = self._clock(), self._took_s(parcel)
        left = times_of(parcel) or ChunkTimes(took_s, 0.0, 0.0)
        one_s = took_s / self._cargo.stands_for(parcel)
        with self._taking:
            begins_s = max(self._taken_s.get(peer, -float("inf")), now_s - left.first_s)
            booked_s = self._card.book(begins_s, took_s, now_s)
            self._taken_s[peer] = max(booked_s, now_s - left.last_s + one_s, now_s - left.end_s)
            return self._taken_s[peer]

    def fetched(self, peer: str, kv_bytes: int, wall_s: float) -> None:
        self._moved(peer, kv_bytes, wall_s)

    def told(self, report: LinkReport) -> LinkReport:
        """A report as it would be."""
        book = self._books.get(report.peer, _Book())
        rate = book.moved_bytes / book.busy_s if book.busy_s > 0 else 0.0
        waiting_s = max(0.0, self._free_s - self._clock())
        return replace(
            report,
            moved_bytes=book.moved_bytes,
            goodput_bytes_per_s=rate,
            queue_bytes=round(waiting_s * self._bytes_per_s) if report.queue_bytes or waiting_s else 0,
        )

    def _took_s(self, parcel: KvChunk) -> float:
        return self.kv_bytes(parcel) / self._bytes_per_s

    def _moved(self, peer: str, kv_bytes: int, busy_s: float) -> None:
        book = self._books.setdefault(peer, _Book())
        book.moved_bytes += kv_bytes
        book.busy_s += busy_s
