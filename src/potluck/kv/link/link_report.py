"""How a link fares: what the scheduler is told about congestion, read from the kernel's books on each connection."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass

TCP_INFO = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
"""Elsewhere the book looks otherwise, where there is one."""
_COUNTS = struct.Struct("<8B24I")
_LATER = struct.Struct("<4Q6I")
_RATE = struct.Struct("<Q")
_RTT, _TOTAL_RETRANS = 8 + 15, 8 + 23
_NOT_SENT, _MIN_RTT = 4 + 2, 4 + 3
_LATER_AT = 104
_RATE_AT = 160
UNKNOWN_RTT = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """One connection, as Linux's struct tcp_info has it."""

    rtt_s: float
    least_rtt_s: float
    retransmits: int
    """Segments sent again since the beginning."""
    acked_bytes: int
    received_bytes: int
    not_sent_bytes: int
    delivery_bytes_per_s: float


def parse(raw: bytes) -> TcpInfo | None:
    """None where the kernel is too old to say it."""
    if len(raw) < _RATE_AT + _RATE.size:
        return None
    counts = _COUNTS.unpack_from(raw)
    later = _LATER.unpack_from(raw, _LATER_AT)
    (rate,) = _RATE.unpack_from(raw, _RATE_AT)
    least = later[_MIN_RTT]
    rtt_us = counts[_RTT]
    return TcpInfo(
        rtt_us * 1e-6,
        (rtt_us if least == UNKNOWN_RTT else least) * 1e-6,
        counts[_TOTAL_RETRANS],
        later[2],
        later[3],
        later[_NOT_SENT],
        float(rate),
    )


def info(connection: socket.socket) -> TcpInfo | None:
    """None where there is no such book: another system, or not TCP."""
    if TCP_INFO is None:
        return None
    try:
        return parse(connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256))
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class LinkReport:
    """All connections with one other machine."""

    peer: str
    connections: int
    goodput_bytes_per_s: float
    """Bytes of sound chunks over the time that transfers were under way."""
    moved_bytes: int
    sent_again_bytes: int
    rtt_s: float
    """The mean over connections, smoothed by the kernel; 0 where there is none."""
    least_rtt_s: float
    retransmits: int
    queue_bytes: int
    """What waits here to be sent, in the outbox and in the kernel."""


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
