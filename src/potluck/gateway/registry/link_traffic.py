"""How the links between regions fare, put together from what all engines say of their transfers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from potluck.core.state.events import LinkReported

LEAST_BUSY = 0.1
"""Share of a period in which something must have been on its way for its rate to say anything."""
LEAST_QUEUE_S = 0.1
"""So long bytes must have to wait at the planned rate for the rate seen to say anything: some layers of a prompt that
is being computed are always about to leave."""
SEGMENT_BYTES = 1448
"""Payload of a segment of TCP in a frame of 1,500 bytes."""


@dataclass(slots=True)
class LinkTraffic:
    """What crossed a link in a period."""

    moved_bytes: float = 0.0
    busy_s: float = 0.0
    """Of all transfers together."""
    queued_bytes: float = 0.0
    resent_segments: float = 0.0
    """By all senders of its region."""
    by_sender: dict[str, float] = field(default_factory=dict)
    """Bytes that each has sent or would, by replica."""

    def wants(self, replica: str, size_bytes: float) -> None:
        self.by_sender[replica] = self.by_sender.get(replica, 0.0) + size_bytes


def link_reports(
    passed: Mapping[tuple[str, str], LinkTraffic],
    planned_gbps: Mapping[tuple[str, str], float],
    period_s: float,
) -> list[LinkReported]:
    """One report for each link that is planned.

    Layers cross as they are computed, so a transfer is often slower than its link: the rate seen counts only where
    many bytes wait for the link. A link that nobody waits for is as fast as planned.
    """
    found = []
    for ends, gbps in planned_gbps.items():
        each = passed.get(ends, LinkTraffic())
        room_bytes = gbps * 1e9 / 8 * period_s
        share = min(1.0, each.moved_bytes / room_bytes) if room_bytes > 0 else 1.0
        busy_s = min(period_s, each.busy_s)
        if each.queued_bytes > LEAST_QUEUE_S * gbps * 1e9 / 8 and busy_s >= LEAST_BUSY * period_s:
            gbps = min(gbps, each.moved_bytes * 8e-9 / busy_s)
        resent_bytes = each.resent_segments * SEGMENT_BYTES
        lost = resent_bytes / (each.moved_bytes + resent_bytes) if resent_bytes > 0 else 0.0
        found.append(LinkReported(*ends, share, each.queued_bytes, gbps, lost))
    return found
