"""Keeps a sender to what it was granted on a link, and shares that fairly. No I/O, no threads, no clock of its own.

A bucket of tokens: so many bytes a second come in, and BURST_S's worth is kept at most. A piece may be sent while
there is anything in it, and takes its whole size out, so that the bucket may be in debt; then everybody waits.

Whose turn it is: every transfer that has something to send has a tag. Sending b bytes moves its tag on by b / w, and
the lowest tag goes next; one that comes, or comes back, begins at the tag of who was sent last. That is start-time
fair queueing: over any time, transfers get bytes in proportion to w, to a piece. w is the tenant's weight over how
many transfers it has here, so tenants share a link as they weigh and each one's transfers evenly, as in simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

BURST_S = 0.02
LEAST_BURST_BYTES = 1 << 16
PIECE_S = 0.02  # How long one piece may take of a link, so that many can take turns.
LEAST_PIECE_BYTES = 1 << 16
TURN_S = 0.002  # Until one whose turn it is not looks again.
FORGOTTEN_S = 1.0  # A transfer that wanted to send and has not asked for so long wants nothing any more.


@dataclass(slots=True)
class _Flow:
    tenant: str
    weight: float
    tag: float
    asked_s: float
    wants: bool = False


class LinkThrottle:
    """One link. Its caller sees to it that one thread at a time is in here, and says what time it is."""

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        self._flows: dict[int, _Flow] = {}
        self._tag = 0.0
        self._at_s = now_s
        self._tokens = self._burst_bytes = 0.0
        self.bytes_per_s = bytes_per_s
        self.sent_bytes = 0
        self.grant(bytes_per_s, now_s)
        self._tokens = self._burst_bytes

    def grant(self, bytes_per_s: float, now_s: float) -> None:
        """From now on; what was saved up or is owed stays."""
        self._fill(now_s)
        self.bytes_per_s = max(1.0, bytes_per_s)
        self._burst_bytes = max(float(LEAST_BURST_BYTES), self.bytes_per_s * BURST_S)
        self._tokens = min(self._tokens, self._burst_bytes)

    @property
    def piece_bytes(self) -> int:
        """How large pieces should be at most, rounded down to a power of two."""
        wanted = max(LEAST_PIECE_BYTES, int(self.bytes_per_s * PIECE_S))
        return 1 << (wanted.bit_length() - 1)

    def wait_s(self, key: int, tenant: str, weight: float, now_s: float) -> float:
        """Seconds until a transfer should ask again; 0: it may send now."""
        self._fill(now_s)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(tenant, weight, self._tag, now_s)
        if not flow.wants:
            flow.wants, flow.tag = True, max(flow.tag, self._tag)
        flow.asked_s = now_s
        if self._tokens <= 0.0:
            return -self._tokens / self.bytes_per_s + 1e-6
        for other, item in self._flows.items():
            if item.wants and (item.tag, other) < (flow.tag, key):
                if now_s - item.asked_s < FORGOTTEN_S:
                    return TURN_S
                item.wants = False
        return 0.0

    def sent(self, key: int, size_bytes: int) -> None:
        flow = self._flows[key]
        alike = sum(item.tenant == flow.tenant for item in self._flows.values())
        self._tag = flow.tag
        flow.tag += size_bytes * alike / flow.weight
        self._tokens -= size_bytes
        self.sent_bytes += size_bytes

    def rest(self, key: int) -> None:
        flow = self._flows.get(key)
        if flow is not None:
            flow.wants = False

    def leave(self, key: int) -> None:
        self._flows.pop(key, None)

    def _fill(self, now_s: float) -> None:
        passed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        if passed_s > 0.0:
            self._tokens = min(self._burst_bytes, self._tokens + passed_s * self.bytes_per_s)
