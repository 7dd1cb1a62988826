"""The queue of requests that wait for room, one per model: classes go by priority level, tenants share by weight.

Within a level it is start-time fair queueing (Goyal, Vin, Cheng 1996): the tenant with the least tag goes, virtual
time becomes that tag, and the tag grows by work / weight. Within a tenant: higher priority, then earlier arrival."""

from __future__ import annotations

from collections.abc import Container, Mapping
from heapq import heappop, heappush

from potluck.core.state.request_state import QUEUED, QueuePosition, RequestKind, RequestState

BlockedKind = tuple[str, RequestKind]


# A heap by priority, then arrival; may hold requests that left the queue.
RequestHeap = list[tuple[int, int, QueuePosition]]


class TenantQueue:
    """One tenant's waiting requests on one level, and its fair-queueing tag."""

    __slots__ = ("count", "entry", "heaps", "tag", "weight", "work")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.tag = 0.0
        self.count = 0
        self.entry = -1  # Number of its entry in the level's order; -1 when it has none.
        self.work = 0.0
        self.heaps: dict[RequestKind, RequestHeap] = {}

    def head(self, blocked: Container[BlockedKind], tenant: str) -> QueuePosition | None:
        """The first waiting request whose kind is not blocked."""
        best_item: tuple[int, int, QueuePosition] | None = None
        for kind, heap in list(self.heaps.items()):
            while heap and not _is_waiting(heap[0][2]):
                heappop(heap)
            if not heap:
                del self.heaps[kind]
            elif (tenant, kind) not in blocked and (best_item is None or heap[0][:2] < best_item[:2]):
                best_item = heap[0]
        return best_item[2] if best_item is not None else None


class PriorityLevel:
    """The tenants that wait on one priority level."""

    __slots__ = ("_entry", "blocked_tenants", "kinds", "order", "tenants", "virtual_time", "waiting", "work")

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.tenants: dict[str, TenantQueue] = {}  # All tenants that ever waited, with their tags.
        self.waiting: dict[str, TenantQueue] = {}
        self.order: list[tuple[float, int, str]] = []
        """A heap of (tag, entry number, tenant); entries other than the tenant's current one are outdated."""
        self.blocked_tenants: list[str] = []
        self.kinds: dict[RequestKind, int] = {}
        self.work = 0.0
        self._entry = 0

    def enqueue_tenant(self, tenant: str, tenant_queue: TenantQueue) -> None:
        self._entry += 1
        tenant_queue.entry = self._entry
        heappush(self.order, (tenant_queue.tag, self._entry, tenant))

    def head(self, blocked: Container[BlockedKind]) -> QueuePosition | None:
        """The next request by fair queueing; tenants whose kinds are all blocked are set aside."""
        order = self.order
        while order:
            _, entry, tenant = order[0]
            tenant_queue = self.tenants[tenant]
            if tenant_queue.entry == entry and tenant_queue.count:
                position = tenant_queue.head(blocked, tenant)
                if position is not None:
                    return position
                self.blocked_tenants.append(tenant)
            if tenant_queue.entry == entry:
                tenant_queue.entry = -1
            heappop(order)
        return None

    def requeue_blocked(self) -> None:
        for tenant in self.blocked_tenants:
            tenant_queue = self.tenants[tenant]
            if tenant_queue.count and tenant_queue.entry < 0:
                self.enqueue_tenant(tenant, tenant_queue)
        self.blocked_tenants.clear()


class RequestQueue:
    """All requests that wait for one model; changed by `Admission` alone."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._levels: dict[int, PriorityLevel] = {}
        self._stamp = 0
        self.count = 0
        # (tenant, kind) pairs that found no room since the last completion.
        self.blocked: set[BlockedKind] = set()
        self.has_untried = False  # Whether requests remain that were not tried since that completion.

    def add(
        self, at_s: float, request: RequestState, level: int, kind: RequestKind, work: float
    ) -> QueuePosition:
        tenant = request.request.tenant
        level_queue = self._levels.get(level)
        if level_queue is None:
            level_queue = self._levels[level] = PriorityLevel()
            self._levels = dict(sorted(self._levels.items(), reverse=True))
        tenant_queue = level_queue.tenants.get(tenant)
        if tenant_queue is None:
            tenant_queue = level_queue.tenants[tenant] = TenantQueue(self._weights.get(tenant, 1.0))
        if not tenant_queue.count:
            tenant_queue.tag = max(tenant_queue.tag, level_queue.virtual_time)
            tenant_queue.entry = -1
            level_queue.waiting[tenant] = tenant_queue
        if tenant_queue.entry < 0:
            level_queue.enqueue_tenant(tenant, tenant_queue)
        self._stamp += 1
        position = QueuePosition(request, tenant, level, kind, work, at_s, self._stamp)
        heappush(tenant_queue.heaps.setdefault(kind, []), (-request.request.priority, self._stamp, position))
        tenant_queue.count += 1
        tenant_queue.work += work
        level_queue.work += work
        level_queue.kinds[kind] = level_queue.kinds.get(kind, 0) + 1
        self.count += 1
        request.state, request.position = QUEUED, position
        return position

    def head(self) -> QueuePosition | None:
        for level in self._levels.values():
            position = level.head(self.blocked)
            if position is not None:
                return position
        return None

    @property
    def highest_level(self) -> int:
        """The highest level with waiting requests."""
        return next(iter(self._levels))

    def unblock(self) -> None:
        """A request ended: unblock all kinds, unless some requests are still untried."""
        if not self.has_untried:
            self.blocked.clear()
            for level in self._levels.values():
                level.requeue_blocked()
        self.has_untried = False

    def take(self, position: QueuePosition) -> None:
        level = self._levels[position.level]
        tenant_queue = level.tenants[position.tenant]
        level.virtual_time = max(level.virtual_time, tenant_queue.tag)
        tenant_queue.tag += position.work / tenant_queue.weight
        if tenant_queue.entry >= 0:
            level.enqueue_tenant(position.tenant, tenant_queue)
        self.remove(position)

    def remove(self, position: QueuePosition) -> None:
        level = self._levels[position.level]
        tenant_queue = level.tenants[position.tenant]
        position.request.position = None
        tenant_queue.count -= 1
        tenant_queue.work -= position.work
        level.work -= position.work
        level.kinds[position.kind] -= 1
        if not level.kinds[position.kind]:
            del level.kinds[position.kind]
        self.count -= 1
        if not tenant_queue.count:
            tenant_queue.entry = -1
            del level.waiting[position.tenant]
        if not level.waiting:
            del self._levels[position.level]
        if not self.count:
            self._levels.clear()
            self.blocked.clear()

    def has_earlier(self, tenant: str, level: int, kind: RequestKind) -> bool:
        """Whether a waiting request of this kind goes before a newcomer: of its tenant, or of a higher level."""
        for rank, level_queue in self._levels.items():
            if rank < level:
                return False
            if rank > level:
                if kind in level_queue.kinds:
                    return True
                continue
            tenant_queue = level_queue.waiting.get(tenant)
            if tenant_queue is not None and any(
                _is_waiting(item[2]) for item in tenant_queue.heaps.get(kind, ())
            ):
                return True
        return False

    def work_ahead(self, tenant: str, level: int) -> float:
        """Work done before a newcomer's turn: all of higher levels, and the other tenants' fair shares meanwhile."""
        work = 0.0
        for rank, level_queue in self._levels.items():
            if rank < level:
                break
            if rank > level:
                work += level_queue.work
                continue
            own_queue = level_queue.waiting.get(tenant)
            if own_queue is None:
                continue
            work += own_queue.work
            work_per_weight = own_queue.work / own_queue.weight
            for tenant_queue in level_queue.waiting.values():
                if tenant_queue is not own_queue:
                    work += min(tenant_queue.work, work_per_weight * tenant_queue.weight)
        return work

    def has_other_tenants(self, tenant: str, level: int) -> bool:
        """Whether another tenant waits on this or a higher level."""
        levels = [level_queue for rank, level_queue in self._levels.items() if rank >= level]
        return any(len(level_queue.waiting) > (tenant in level_queue.waiting) for level_queue in levels)

    def tenant_count(self, tenant: str) -> int:
        return sum(
            level_queue.tenants[tenant].count
            for level_queue in self._levels.values()
            if tenant in level_queue.tenants
        )

    def least_important(self, tenant: str) -> QueuePosition | None:
        """The tenant's request of the lowest level that came last."""
        for level_queue in reversed(self._levels.values()):
            tenant_queue = level_queue.tenants.get(tenant)
            if tenant_queue is not None and tenant_queue.count:
                waiting = (
                    item for heap in tenant_queue.heaps.values() for item in heap if _is_waiting(item[2])
                )
                return max(waiting, key=lambda item: item[:2])[2]
        return None

    def positions(self) -> list[QueuePosition]:
        tenants = [
            tenant_queue
            for level_queue in self._levels.values()
            for tenant_queue in level_queue.tenants.values()
        ]
        heaps = [heap for tenant_queue in tenants for heap in tenant_queue.heaps.values()]
        return [item[2] for heap in heaps for item in heap if _is_waiting(item[2])]


def _is_waiting(position: QueuePosition) -> bool:
    return position.request.position is position
