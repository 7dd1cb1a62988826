"""A pipe of given bandwidth, shared by tenants as they weigh, and by each one's transfers evenly: exact.

With W the weights of the tenants that have transfers open, each of tenant t's n transfers gets rate x w / (W n):
processor sharing within processor sharing. Let v(t) be the bytes that a transfer of tenant t open all the time would
have got: dv/dt = rate w / (W n). A transfer of b bytes ends when v has grown by b since it began, so one heap of ends
per tenant is all there is to keep. A change of the bandwidth only bends v.

What passes is counted twice, by the clock (`served_bytes`) and by the transfers (`sent_bytes`); both must agree.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf


class TenantTransfers:
    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.count = 0
        self.virtual = 0.0
        """v"""
        self.heap: list[tuple[float, int]] = []
        """Ends in v, and whose; may hold some that were broken off."""


class SharedPipe:
    """One direction of a link, or one network card. Times must not go back; the caller keeps them."""

    def __init__(self, kind: str, source: str, target: str, rate_bytes_per_s: float, alpha_s: float) -> None:
        self.kind = kind
        self.source = source
        self.target = target
        self.name = f"{source}->{target}" if target else source
        self.rate_bytes_per_s = rate_bytes_per_s
        self.alpha_s = alpha_s
        self.sent_bytes = 0.0
        self.served_bytes = 0.0
        self.busy_s = 0.0
        self.due_s = inf
        """The earliest time at which the agenda has this pipe; kept by whoever has the agenda."""
        self._at_s = 0.0
        self._open: dict[int, tuple[float, float, str]] = {}
        """Transfer to (its end in v, its bytes, its tenant)."""
        self._lanes: dict[str, TenantTransfers] = {}
        """By tenant; only those with transfers under way."""
        self._weight = 0.0
        """W"""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, key: int) -> bool:
        return key in self._open

    @property
    def keys(self) -> list[int]:
        return list(self._open)

    def start(self, now_s: float, key: int, size_bytes: float, tenant: str = "", weight: float = 1.0) -> None:
        """Let a transfer begin; `key` must not be under way. A tenant weighs what its last transfer said."""
        self._advance(now_s)
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = TenantTransfers(weight)
            self._weigh()
        elif lane.weight != weight:
            lane.weight = weight
            self._weigh()
        end = lane.virtual + size_bytes
        self._open[key] = (end, size_bytes, tenant)
        lane.count += 1
        heappush(lane.heap, (end, key))

    def next_s(self) -> float:
        """When the next transfer ends if nothing changes; inf when none will."""
        return self._next()[0]

    def done(self, now_s: float) -> list[int]:
        numbers: list[int] = []
        while True:
            due_s, tenant = self._next()
            if due_s > now_s:
                break
            self._advance(due_s)
            lane = self._lanes[tenant]
            end, key = heappop(lane.heap)
            self.sent_bytes += self._open[key][1]
            # The clock and the sum of shares differ by rounding; the end is the better number.
            lane.virtual = end
            self._close(key)
            numbers.append(key)
        self._advance(now_s)
        return numbers

    def abort(self, now_s: float, key: int) -> float:
        """Break a transfer off; the bytes it had got. Unknown ones are ignored."""
        self._advance(now_s)
        held = self._open.get(key)
        if held is None:
            return 0.0
        end, size_bytes, tenant = held
        got = min(size_bytes, max(0.0, size_bytes - (end - self._lanes[tenant].virtual)))
        self._close(key)
        self.sent_bytes += got
        return got

    def _next(self) -> tuple[float, str]:
        if self.rate_bytes_per_s <= 0:
            return inf, ""
        opened, best_s, first = self._open, inf, ""
        for tenant, lane in self._lanes.items():
            heap = lane.heap
            while heap:
                end, key = heap[0]
                held = opened.get(key)
                if held is not None and held[0] == end:
                    break
                heappop(heap)
            if not heap:
                continue
            left = heap[0][0] - lane.virtual
            wait_s = left * lane.count * (self._weight / lane.weight) / self.rate_bytes_per_s
            if wait_s < best_s:
                best_s, first = wait_s if wait_s > 0 else 0.0, tenant
        return self._at_s + best_s, first

    def _close(self, key: int) -> None:
        tenant = self._open.pop(key)[2]
        lane = self._lanes[tenant]
        lane.count -= 1
        if not lane.count:
            del self._lanes[tenant]
            self._weigh()

    def _weigh(self) -> None:
        weight = 0.0
        for lane in self._lanes.values():
            weight += lane.weight
        self._weight = weight

    def set_rate(self, now_s: float, rate_bytes_per_s: float) -> None:
        self._advance(now_s)
        self.rate_bytes_per_s = rate_bytes_per_s

    def share_bytes_per_s(self, more: int = 0, tenant: str = "", weight: float = 1.0) -> float:
        """What each transfer of a tenant gets with so many more of its own than there are."""
        lane = self._lanes.get(tenant)
        others = self._weight - (lane.weight if lane is not None else 0.0)
        own = (lane.count if lane is not None else 0) + more
        return self.rate_bytes_per_s * (weight / (weight + max(0.0, others))) / max(1, own)

    def queued_bytes(self, now_s: float) -> float:
        self._advance(now_s)
        queued = 0.0
        for end, _, tenant in self._open.values():
            queued += max(0.0, end - self._lanes[tenant].virtual)
        return queued

    def open_bytes(self, now_s: float) -> float:
        asked = 0.0
        for _, size_bytes, _ in self._open.values():
            asked += size_bytes
        return asked - self.queued_bytes(now_s)

    def _advance(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now_s
        if self._lanes:
            served = passed_s * self.rate_bytes_per_s
            for lane in self._lanes.values():
                lane.virtual += served * (lane.weight / self._weight) / lane.count
            self.served_bytes += served
            self.busy_s += passed_s
