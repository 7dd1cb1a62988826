"""Smooth weighted round robin: every member gets its share of any run of picks, not just in the long run.

Earliest eligible virtual deadline first (Stoica, Abdel-Wahab 1995) with unit jobs, O(log n) a pick:

    V             virtual time; one pick advances it by 1 / W, W the sum of weights
    e_i, d_i      member i's next job is eligible from e_i and due at d_i = e_i + 1 / w_i
    pick          of those with e_i <= V the one with the least d_i; then e_i = d_i
    lag_i         w_i (V - e_i): picks that it is behind; always within (-1, 1), and the lags add up to 0

So after N picks each count is within 1 of N w_i / W. A new member starts with no lag, a removed one passes its lag to
the others, a changed weight keeps the lag."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, TypeVar

Member = TypeVar("Member")

_ROUNDING_TURNS = 1e-9  # Share of a turn by which rounding may shift V: members within it count as eligible.
_MAX_TURNS_AHEAD = 8.0  # Turns that a member may be ahead after others' turns were swapped to it.


class _Entry(Generic[Member]):
    """One member. Heap items with a stamp other than the entry's are outdated and skipped."""

    __slots__ = ("due", "eligible", "member", "stamp", "weight")

    def __init__(self, member: Member, weight: float, eligible: float, stamp: int) -> None:
        self.member = member
        self.weight = weight
        self.eligible = eligible
        self.due = eligible + 1.0 / weight
        self.stamp = stamp


class WeightedRoundRobin(Generic[Member]):
    """Members with weights; `pick` returns the next one. Members are identified by hash."""

    __slots__ = ("_due", "_entries", "_later", "_now", "_only", "_stamp", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self._entries: dict[Member, _Entry[Member]] = {}
        self._due: list[tuple[float, int, _Entry[Member]]] = []  # Heap of eligible entries by deadline.
        self._later: list[tuple[float, int, _Entry[Member]]] = []
        """Heap of entries that had their turn, by when they become eligible again."""
        self._now = 0.0
        self._only: Member | None = None  # Set while there is one member: it is always picked.
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, member: Member) -> bool:
        return member in self._entries

    def members(self) -> tuple[Member, ...]:
        return tuple(self._entries)

    def lag(self, member: Member) -> float:
        """Picks that a member is behind its share; negative when it is ahead."""
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
        horizon = now + _ROUNDING_TURNS / self.total if self.total else now
        while later and (later[0][0] <= horizon or later[0][1] != later[0][2].stamp):
            _, stamp, entry = heappop(later)
            if entry.stamp == stamp:
                heappush(due, (entry.due, stamp, entry))
        while due:
            _, stamp, entry = heappop(due)
            if entry.stamp == stamp:
                return self._take(entry)
        # Rounding can leave no member eligible; then the next one is picked.
        while later:
            _, stamp, entry = heappop(later)
            if entry.stamp == stamp:
                return self._take(entry)
        return None

    def swap(self, picked: Member, other: Member) -> None:
        """Give the turn just picked to another member. It counts as that member's own unless it is far ahead
        already."""
        giver, taker = self._entries.get(picked), self._entries.get(other)
        if giver is None or taker is None or giver is taker or self._only is not None:
            return
        if self.lag(other) <= -_MAX_TURNS_AHEAD:
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
        """Drop outdated heap items once they outnumber the live ones, and recompute the total against rounding
        errors."""
        if len(self._due) + len(self._later) > 2 * len(self._entries) + 32:
            self.total = sum(entry.weight for entry in self._entries.values())
            self._due = []
            self._later = [(entry.eligible, entry.stamp, entry) for entry in self._entries.values()]
            heapify(self._later)
