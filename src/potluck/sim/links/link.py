"""A pipe of given bandwidth, shared evenly by the transfers under way: processor sharing, exact.

With n transfers open each gets rate / n. Let v(t) be the bytes that a transfer open all the time would have got:
dv/dt = rate / n. A transfer of b bytes that starts at t ends when v has grown by b, whoever else comes and goes, so
its end in v is fixed when it starts and one heap of ends is all there is to keep: O(log n) per change. A change
of the bandwidth only bends v.

What passes is counted twice, by the clock (`served_bytes`, the rate over the busy time) and by the transfers
(`sent_bytes`, what each asked for or had got when it was broken off); both must agree.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from potluck.core.errors import InputError


class Pipe:
    """One direction of a link, or one network card. Times must not go back; the caller keeps them."""

    __slots__ = (
        "_at_s",
        "_heap",
        "_open",
        "_virtual",
        "alpha_s",
        "busy_s",
        "due_s",
        "kind",
        "lost_bytes",
        "name",
        "rate_bytes_per_s",
        "sent_bytes",
        "served_bytes",
        "source",
        "target",
        "transfers",
    )

    def __init__(self, kind: str, source: str, target: str, rate_bytes_per_s: float, alpha_s: float) -> None:
        if not 0 <= rate_bytes_per_s < inf:
            raise InputError(f"pipe {source}->{target}", f"must not be negative, is {rate_bytes_per_s}")
        self.kind = kind
        self.source = source
        self.target = target
        self.name = f"{source}->{target}" if target else source
        self.rate_bytes_per_s = rate_bytes_per_s
        self.alpha_s = alpha_s
        self.sent_bytes = 0.0
        self.served_bytes = 0.0
        self.lost_bytes = 0.0
        self.busy_s = 0.0
        self.transfers = 0
        self.due_s = inf
        """The earliest time at which the agenda has this pipe; kept by whoever has the agenda."""
        self._at_s = 0.0
        self._virtual = 0.0
        self._open: dict[int, tuple[float, float]] = {}
        """Transfer to (its end in v, its bytes)."""
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Transfers under way."""
        return len(self._open)

    def __contains__(self, key: int) -> bool:
        return key in self._open

    @property
    def keys(self) -> list[int]:
        """Transfers under way, oldest first."""
        return list(self._open)

    def start(self, now_s: float, key: int, size_bytes: float) -> None:
        """Let a transfer begin; `key` must not be under way."""
        self._advance(now_s)
        end = self._virtual + size_bytes
        self._open[key] = (end, size_bytes)
        heappush(self._heap, (end, key))
        self.transfers += 1

    def next_s(self) -> float:
        """When the next transfer ends if nothing changes; inf when none will."""
        heap, opened = self._heap, self._open
        while heap:
            end, key = heap[0]
            held = opened.get(key)
            if held is not None and held[0] == end:
                if self.rate_bytes_per_s <= 0:
                    return inf
                wait_s = (end - self._virtual) * len(opened) / self.rate_bytes_per_s
                return self._at_s + (wait_s if wait_s > 0 else 0.0)
            heappop(heap)
        return inf

    def done(self, now_s: float) -> list[int]:
        """The transfers that have ended by now, in the order of their ends."""
        found: list[int] = []
        while True:
            due_s = self.next_s()
            if due_s > now_s:
                break
            self._advance(due_s)
            end, key = heappop(self._heap)
            size_bytes = self._open.pop(key)[1]
            # The clock and the sum of shares differ by rounding; the end is the better number.
            self._virtual = end if self._open else 0.0
            self.sent_bytes += size_bytes
            found.append(key)
        self._advance(now_s)
        if not self._open:
            self._heap.clear()
        return found

    def abort(self, now_s: float, key: int) -> float:
        """Break a transfer off; the bytes it had got. Unknown ones are ignored."""
        self._advance(now_s)
        held = self._open.pop(key, None)
        if held is None:
            return 0.0
        end, size_bytes = held
        got = min(size_bytes, max(0.0, size_bytes - (end - self._virtual)))
        self.sent_bytes += got
        self.lost_bytes += got
        return got

    def set_rate(self, now_s: float, rate_bytes_per_s: float) -> None:
        """From now on it carries so much."""
        self._advance(now_s)
        self.rate_bytes_per_s = rate_bytes_per_s

    def share_bytes_per_s(self, more: int = 0) -> float:
        """What each transfer gets with so many more than there are."""
        return self.rate_bytes_per_s / max(1, len(self._open) + more)

    def queued_bytes(self, now_s: float) -> float:
        """Bytes that still have to pass for the transfers under way."""
        self._advance(now_s)
        return sum((max(0.0, end - self._virtual) for end, _ in self._open.values()), start=0.0)

    def open_bytes(self, now_s: float) -> float:
        """Bytes that the transfers under way have already got."""
        return sum(size for _, size in self._open.values()) - self.queued_bytes(now_s)

    def _advance(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now_s
        count = len(self._open)
        if count:
            served = passed_s * self.rate_bytes_per_s
            self._virtual += served / count
            self.served_bytes += served
            self.busy_s += passed_s
