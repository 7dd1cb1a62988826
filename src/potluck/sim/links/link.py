"""A pipe of given bandwidth, shared by tenants in proportion to their weights and by a tenant's transfers evenly.

With W the weights of the tenants that have transfers open, each of tenant t's n transfers gets rate x w / (W n):
processor sharing within processor sharing. Let v(t) be the bytes that a transfer of tenant t open all the time would
have got: dv/dt = rate w / (W n). A transfer of b bytes ends when v has grown by b since it began, so one heap of ends
per tenant suffices. A change of the bandwidth only changes the slope of v.

Bytes are counted twice, from elapsed time (`served_bytes`) and from transfers (`sent_bytes`); both must agree.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf


class TenantTransfers:
    """The transfers of one tenant on a pipe."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.count = 0
        self.virtual = 0.0
        """v"""
        self.heap: list[tuple[float, int]] = []
        """(end in v, transfer); may contain transfers that were aborted."""


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
        """The earliest time at which the event queue has this pipe; written by the owner of the queue."""
        self._at_s = 0.0
        self._open: dict[int, tuple[float, float, str]] = {}
        """Transfer to (its end in v, its bytes, its tenant)."""
        self._tenants: dict[str, TenantTransfers] = {}
        """Tenants with transfers under way."""
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
        """Start a transfer; `key` must be new. A tenant's weight is that of its latest transfer."""
        self._advance(now_s)
        transfers = self._tenants.get(tenant)
        if transfers is None:
            transfers = self._tenants[tenant] = TenantTransfers(weight)
            self._weigh()
        elif transfers.weight != weight:
            transfers.weight = weight
            self._weigh()
        end = transfers.virtual + size_bytes
        self._open[key] = (end, size_bytes, tenant)
        transfers.count += 1
        heappush(transfers.heap, (end, key))

    def next_s(self) -> float:
        """When the next transfer ends if nothing changes; inf if none does."""
        return self._next()[0]

    def done(self, now_s: float) -> list[int]:
        done_keys: list[int] = []
        while True:
            due_s, tenant = self._next()
            if due_s > now_s:
                break
            self._advance(due_s)
            transfers = self._tenants[tenant]
            end, key = heappop(transfers.heap)
            self.sent_bytes += self._open[key][1]
            # Elapsed time and the sum of shares differ by rounding; the end is more exact.
            transfers.virtual = end
            self._close(key)
            done_keys.append(key)
        self._advance(now_s)
        return done_keys

    def abort(self, now_s: float, key: int) -> float:
        """Abort a transfer and return the bytes sent; 0 for an unknown one."""
        self._advance(now_s)
        transfer = self._open.get(key)
        if transfer is None:
            return 0.0
        end, size_bytes, tenant = transfer
        sent_bytes = min(size_bytes, max(0.0, size_bytes - (end - self._tenants[tenant].virtual)))
        self._close(key)
        self.sent_bytes += sent_bytes
        return sent_bytes

    def _next(self) -> tuple[float, str]:
        if self.rate_bytes_per_s <= 0:
            return inf, ""
        open_transfers, soonest_s, soonest_tenant = self._open, inf, ""
        for tenant, transfers in self._tenants.items():
            heap = transfers.heap
            while heap:
                end, key = heap[0]
                transfer = open_transfers.get(key)
                if transfer is not None and transfer[0] == end:
                    break
                heappop(heap)
            if not heap:
                continue
            left = heap[0][0] - transfers.virtual
            wait_s = left * transfers.count * (self._weight / transfers.weight) / self.rate_bytes_per_s
            if wait_s < soonest_s:
                soonest_s, soonest_tenant = wait_s if wait_s > 0 else 0.0, tenant
        return self._at_s + soonest_s, soonest_tenant

    def _close(self, key: int) -> None:
        tenant = self._open.pop(key)[2]
        transfers = self._tenants[tenant]
        transfers.count -= 1
        if not transfers.count:
            del self._tenants[tenant]
            self._weigh()

    def _weigh(self) -> None:
        weight = 0.0
        for transfers in self._tenants.values():
            weight += transfers.weight
        self._weight = weight

    def set_rate(self, now_s: float, rate_bytes_per_s: float) -> None:
        self._advance(now_s)
        self.rate_bytes_per_s = rate_bytes_per_s

    def share_bytes_per_s(self, more: int = 0, tenant: str = "", weight: float = 1.0) -> float:
        """The rate of each transfer of a tenant, with `more` transfers of that tenant than there are."""
        transfers = self._tenants.get(tenant)
        others = self._weight - (transfers.weight if transfers is not None else 0.0)
        own = (transfers.count if transfers is not None else 0) + more
        return self.rate_bytes_per_s * (weight / (weight + max(0.0, others))) / max(1, own)

    def queued_bytes(self, now_s: float) -> float:
        self._advance(now_s)
        queued = 0.0
        for end, _, tenant in self._open.values():
            queued += max(0.0, end - self._tenants[tenant].virtual)
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
        if self._tenants:
            served = passed_s * self.rate_bytes_per_s
            for transfers in self._tenants.values():
                transfers.virtual += served * (transfers.weight / self._weight) / transfers.count
            self.served_bytes += served
            self.busy_s += passed_s
