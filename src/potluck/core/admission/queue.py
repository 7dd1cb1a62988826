"""Requests that wait for room, of one model: classes that matter more go first, tenants share by weight.

Within a level it is start-time fair queueing (Goyal, Vin, Cheng 1996): the tenant with the least tag goes, virtual
time becomes that tag, and the tag grows by work / weight. Within a tenant: higher priority, then earlier arrival."""

from __future__ import annotations

from collections.abc import Container, Mapping
from heapq import heappop, heappush

from potluck.core.state.request_state import QUEUED, Kind, QueuePosition, RequestState

Stuck = tuple[str, Kind]


Line = list[tuple[int, int, QueuePosition]]  # A heap by priority, then arrival; may hold some that left it.


class TenantTurn:
    __slots__ = ("count", "entry", "lines", "tag", "weight", "work")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.tag = 0.0
        self.count = 0
        self.entry = -1  # Its place in the level's order, by number; -1 when it is in none.
        self.work = 0.0
        self.lines: dict[Kind, Line] = {}

    def head(self, kinds: Container[Stuck], tenant: str) -> QueuePosition | None:
        """The first of those whose kind is not among these."""
        best: tuple[int, int, QueuePosition] | None = None
        for kind, line in list(self.lines.items()):
            while line and not _waits(line[0][2]):
                heappop(line)
            if not line:
                del self.lines[kind]
            elif (tenant, kind) not in kinds and (best is None or line[0][:2] < best[:2]):
                best = line[0]
        return best[2] if best is not None else None


class PriorityLevel:
    """All that matter alike."""

    __slots__ = ("_entry", "aside", "kinds", "now", "order", "turns", "waiting", "work")

    def __init__(self) -> None:
        self.now = 0.0
        self.turns: dict[str, TenantTurn] = {}  # All tenants that ever waited, for their tags.
        self.waiting: dict[str, TenantTurn] = {}
        self.order: list[tuple[float, int, str]] = []
        """A heap of tags, numbers and tenants; only the number that a turn names is its own."""
        self.aside: list[str] = []
        self.kinds: dict[Kind, int] = {}
        self.work = 0.0
        self._entry = 0

    def stand(self, tenant: str, turn: TenantTurn) -> None:
        self._entry += 1
        turn.entry = self._entry
        heappush(self.order, (turn.tag, self._entry, tenant))

    def head(self, stuck: Container[Stuck]) -> QueuePosition | None:
        """Whose turn it is; those who find no room go aside."""
        order = self.order
        while order:
            _, entry, tenant = order[0]
            turn = self.turns[tenant]
            if turn.entry == entry and turn.count:
                position = turn.head(stuck, tenant)
                if position is not None:
                    return position
                self.aside.append(tenant)
            if turn.entry == entry:
                turn.entry = -1
            heappop(order)
        return None

    def back(self) -> None:
        for tenant in self.aside:
            turn = self.turns[tenant]
            if turn.count and turn.entry < 0:
                self.stand(tenant, turn)
        self.aside.clear()


class RequestQueue:
    """All that wait for one model. Changed by `Admission` alone."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._levels: dict[int, PriorityLevel] = {}
        self._stamp = 0
        self.count = 0
        self.stuck: set[Stuck] = set()  # Tenants and kinds that found no room, and nothing has ended since.
        self.cut = False  # Whether some have not been tried since those did.

    def add(self, at_s: float, request: RequestState, level: int, kind: Kind, work: float) -> QueuePosition:
        tenant = request.request.tenant
        held = self._levels.get(level)
        if held is None:
            held = self._levels[level] = PriorityLevel()
            self._levels = dict(sorted(self._levels.items(), reverse=True))
        turn = held.turns.get(tenant)
        if turn is None:
            turn = held.turns[tenant] = TenantTurn(self._weights.get(tenant, 1.0))
        if not turn.count:
            turn.tag = max(turn.tag, held.now)
            turn.entry = -1
            held.waiting[tenant] = turn
        if turn.entry < 0:
            held.stand(tenant, turn)
        self._stamp += 1
        position = QueuePosition(request, tenant, level, kind, work, at_s, self._stamp)
        heappush(turn.lines.setdefault(kind, []), (-request.request.priority, self._stamp, position))
        turn.count += 1
        turn.work += work
        held.work += work
        held.kinds[kind] = held.kinds.get(kind, 0) + 1
        self.count += 1
        request.state, request.place = QUEUED, position
        return position

    def head(self) -> QueuePosition | None:
        for level in self._levels.values():
            position = level.head(self.stuck)
            if position is not None:
                return position
        return None

    @property
    def matters(self) -> int:
        """How much those matter that matter most."""
        return next(iter(self._levels))

    def again(self) -> None:
        """Something has ended: all may be tried again, once those were that have not been."""
        if not self.cut:
            self.stuck.clear()
            for level in self._levels.values():
                level.back()
        self.cut = False

    def take(self, position: QueuePosition) -> None:
        level = self._levels[position.level]
        turn = level.turns[position.tenant]
        level.now = max(level.now, turn.tag)
        turn.tag += position.work / turn.weight
        if turn.entry >= 0:
            level.stand(position.tenant, turn)
        self.remove(position)

    def remove(self, position: QueuePosition) -> None:
        level = self._levels[position.level]
        turn = level.turns[position.tenant]
        position.req.place = None
        turn.count -= 1
        turn.work -= position.work
        level.work -= position.work
        level.kinds[position.kind] -= 1
        if not level.kinds[position.kind]:
            del level.kinds[position.kind]
        self.count -= 1
        if not turn.count:
            turn.entry = -1
            del level.waiting[position.tenant]
        if not level.waiting:
            del self._levels[position.level]
        if not self.count:
            self._levels.clear()
            self.stuck.clear()

    def waits(self, tenant: str, level: int, kind: Kind) -> bool:
        """Whether somebody of this kind waits that goes before a newcomer: of its tenant, or who matters more."""
        for rank, held in self._levels.items():
            if rank < level:
                return False
            if rank > level:
                if kind in held.kinds:
                    return True
                continue
            turn = held.waiting.get(tenant)
            if turn is not None and any(_waits(item[2]) for item in turn.lines.get(kind, ())):
                return True
        return False

    def ahead(self, tenant: str, level: int) -> float:
        """Work done before a newcomer's turn: all that matters more, and of the others their due meanwhile."""
        before = 0.0
        for rank, held in self._levels.items():
            if rank < level:
                break
            if rank > level:
                before += held.work
                continue
            own = held.waiting.get(tenant)
            if own is None:
                continue
            before += own.work
            due = own.work / own.weight
            for turn in held.waiting.values():
                if turn is not own:
                    before += min(turn.work, due * turn.weight)
        return before

    def others(self, tenant: str, level: int) -> bool:
        """Whether another tenant waits that matters as much."""
        levels = [held for rank, held in self._levels.items() if rank >= level]
        return any(len(held.waiting) > (tenant in held.waiting) for held in levels)

    def tenant_count(self, tenant: str) -> int:
        return sum(held.turns[tenant].count for held in self._levels.values() if tenant in held.turns)

    def least(self, tenant: str) -> QueuePosition | None:
        """The one of a tenant's that matters least and came last."""
        for held in reversed(self._levels.values()):
            turn = held.turns.get(tenant)
            if turn is not None and turn.count:
                waiting = (item for line in turn.lines.values() for item in line if _waits(item[2]))
                return max(waiting, key=lambda item: item[:2])[2]
        return None

    def places(self) -> list[QueuePosition]:
        turns = [turn for held in self._levels.values() for turn in held.turns.values()]
        lines = [line for turn in turns for line in turn.lines.values()]
        return [item[2] for line in lines for item in line if _waits(item[2])]


def _waits(position: QueuePosition) -> bool:
    return position.req.place is position
