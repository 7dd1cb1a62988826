"""Smooth weighted round robin: every member gets its share of any run of picks, not just in the long run.

Earliest eligible virtual deadline first (Stoica, Abdel-Wahab 1995) with unit jobs, O(log n) a pick:

    V             virtual time; one pick advances it by 1 / W, W the sum of weights
    e_i, d_i      member i's next job may run from e_i on and is due at d_i = e_i + 1 / w_i
    pick          of those with e_i <= V the one with the least d_i; then e_i = d_i
    lag_i         w_i (V - e_i): picks it is owed; always within (-1, 1), and the lags add up to 0

So after N picks each count is within 1 of N w_i / W. A newcomer starts with no lag, one that leaves hands its lag to
the others, a new weight keeps it."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, TypeVar

Member = TypeVar("Member")

_SLACK = 1e-9  # Share of a turn by which rounding may move V: who is eligible but for that, is.
_MOST_AHEAD = 8.0  # Turns that a member may be ahead because others' turns were given to it.


class _Entry(Generic[Member]):
    """One member. Heap items whose stamp is not the entry's are old and skipped."""

    __slots__ = ("due", "eligible", "member", "stamp", "weight")

    def __init__(self, member: Member, weight: float, eligible: float, stamp: int) -> None:
        self.member = member
        self.weight = weight
        self.eligible = eligible
        self.due = eligible + 1.0 / weight
        self.stamp = stamp


class WeightedRoundRobin(Generic[Member]):
    """Members with weights; `pick` says whose turn it is. Members are told apart by identity or hash."""

    __slots__ = ("_due", "_entries", "_later", "_now", "_only", "_stamp", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self._entries: dict[Member, _Entry[Member]] = {}
        self._due: list[tuple[float, int, _Entry[Member]]] = []  # Heap by deadline: those that may run.
        self._later: list[tuple[float, int, _Entry[Member]]] = []
        """Heap by when they may run: those that had their turn."""
        self._now = 0.0
        self._only: Member | None = None  # The member when there is one: its turn never ends.
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, member: Member) -> bool:
        return member in self._entries

    def members(self) -> tuple[Member, ...]:
        return tuple(self._entries)

    def lag(self, member: Member) -> float:
        """Picks that a member is owed; negative when it is ahead."""
        entry = self._entries[member]
        return entry.weight * (self._now - entry.eligible)

    def set(self, member: Member, weight: float) -> None:
        """Add a member, change its weight, or remove it with a weight of 0."""
        entry = self._entries.get(member)
        if not 0 < weight < inf:
            if entry is not None:
                self._remove(member, entry)
            return
        if entry is None:
            self.total += weight
            self._entries[member] = self._queue(_Entry(member, weight, self._now, 0))
            self._only = member if len(self._entries) == 1 else None
        elif weight != entry.weight:
            lag = entry.weight * (self._now - entry.eligible)
            self.total += weight - entry.weight
            entry.weight = weight
            entry.eligible = self._now - lag / weight
            entry.due = entry.eligible + 1.0 / weight
            self._queue(entry)
            self._compact()

    def pick(self) -> Member | None:
        if self._only is not None:
            return self._only
        due, later = self._due, self._later
        now = self._now
        horizon = now + _SLACK / self.total if self.total else now
        while later and (later[0][0] <= horizon or later[0][1] != later[0][2].stamp):
            _, stamp, entry = heappop(later)
            if entry.stamp == stamp:
                heappush(due, (entry.due, stamp, entry))
        while due:
            _, stamp, entry = heappop(due)
            if entry.stamp == stamp:
                return self._take(entry)
        # Rounding can leave nobody eligible; then the next one is.
        while later:
            _, stamp, entry = heappop(later)
            if entry.stamp == stamp:
                return self._take(entry)
        return None

    def swap(self, picked: Member, other: Member) -> None:
        """The turn just picked goes to another member after all, and counts as its own unless it is far ahead."""
        giver, taker = self._entries.get(picked), self._entries.get(other)
        if giver is None or taker is None or giver is taker or self._only is not None:
            return
        if self.lag(other) <= -_MOST_AHEAD:
            return
        for entry, sign in ((giver, -1.0), (taker, 1.0)):
            entry.eligible += sign / entry.weight
            entry.due += sign / entry.weight
            self._queue(entry)
        self._compact()

    def _take(self, entry: _Entry[Member]) -> Member:
        entry.eligible = eligible = entry.due
        entry.due = eligible + 1.0 / entry.weight
        self._stamp = entry.stamp = self._stamp + 1
        heappush(self._later, (eligible, entry.stamp, entry))
        self._now += 1.0 / self.total
        return entry.member

    def _queue(self, entry: _Entry[Member]) -> _Entry[Member]:
        self._stamp = entry.stamp = self._stamp + 1
        heappush(self._later, (entry.eligible, entry.stamp, entry))
        return entry

    def _remove(self, member: Member, entry: _Entry[Member]) -> None:
        lag = entry.weight * (self._now - entry.eligible)
        del self._entries[member]
        entry.stamp = -1
        if not self._entries:
            self.total = self._now = 0.0
            self._due, self._later, self._only = [], [], None
            return
        self.total -= entry.weight
        if self.total < 1e-6 * entry.weight:
            self.total = sum(item.weight for item in self._entries.values())
        self._now += lag / self.total
        self._only = next(iter(self._entries)) if len(self._entries) == 1 else None
        self._compact()

    def _compact(self) -> None:
        """Drop old heap items once they outnumber the live ones, and sum again what rounding may have moved."""
        if len(self._due) + len(self._later) > 2 * len(self._entries) + 32:
            self.total = sum(entry.weight for entry in self._entries.values())
            self._due = []
            self._later = [(entry.eligible, entry.stamp, entry) for entry in self._entries.values()]
            heapify(self._later)
