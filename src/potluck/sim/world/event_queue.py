"""The event queue. Ties are ordered by insertion, so that a run is deterministic.

A heap of all events of a large fleet would not fit a core's caches, and most events are far in the future. So events
of the current time slice are in a heap, those of later slices in unsorted lists. The length of a slice is a power of
two of a second: the slice of a time is then computed without rounding, and the order is exactly that of one heap.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import frexp, inf
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from potluck.sim.world.sim_state import SimReplica

REPLICA: Final = 0
PIPE: Final = 1
HANDED: Final = 2
TICK: Final = 3
COLLECT: Final = 4
DELIVER: Final = 5
READY: Final = 6
FAULT: Final = 7
SAMPLE: Final = 8
PLAN: Final = 9
CALL: Final = 10
END: Final = 11
"""Kinds of events: next event of a replica or a pipe, KV that has arrived, the Brain's tick, reports collected and
delivered, a replica ready, a fault, a sample for plots, a plan, a plain call, the end of the run.
"""

Entry = tuple[float, int, int, Any]

ONE_HEAP_MAX_REPLICAS: Final = 63  # Up to here all events are in one heap.
EVENTS_PER_SLICE: Final = 32
EVENTS_PER_REQUEST: Final = 3.0
SLICED_MIN_REQUESTS_PER_S: Final = 1e-6  # Below this rate slices save nothing.
LAST_SLICE_S: Final = 2.0**40  # All later times are one slice; some events have an infinite time.


class EventQueue:
    """Entries (time, sequence, kind, what); the sequence settles ties, so `what` is never compared."""

    def __init__(self, slices_per_s: float = 0.0) -> None:
        self.heap: list[Entry] = []
        """Events of the current slice; when it is empty, `turn` fills it with the next slice."""
        self.sequence = 0
        self._slices_per_s = slices_per_s
        """A power of two; 0: all events are in one slice."""
        self._until_s = 0.0 if slices_per_s else inf
        """End of the current slice."""
        self._later: dict[int, list[Entry]] = {}
        self._order: list[int] = []
        """A heap of the numbers of later slices with events."""

    def push(self, at_s: float, kind: int, what: Any) -> None:
        self.sequence += 1
        entry = (at_s, self.sequence, kind, what)
        if at_s < self._until_s:
            heappush(self.heap, entry)
            return
        place = int(min(at_s, LAST_SLICE_S) * self._slices_per_s)
        later = self._later.get(place)
        if later is not None:
            later.append(entry)
        else:
            self._later[place] = [entry]
            heappush(self._order, place)

    def turn(self) -> None:
        """Advance to the next slice that has events. There must be one."""
        place = heappop(self._order)
        if self._slices_per_s:  # without slices only events of infinite time are here
            self._until_s = (place + 1) / self._slices_per_s
        self.heap += sorted(self._later.pop(place))

    def look(self, replica: SimReplica) -> None:
        """Enqueue a replica's next wake-up, unless the queue has an earlier one of it."""
        due_s = replica.replica.wake_s
        if due_s < replica.due_s:
            replica.due_s = due_s
            self.push(due_s, REPLICA, replica)


def slices_per_s(replicas: int, requests_per_s: float) -> float:
    """Slices per second for about EVENTS_PER_SLICE events in each; 0 for few replicas."""
    if replicas <= ONE_HEAP_MAX_REPLICAS or not SLICED_MIN_REQUESTS_PER_S < requests_per_s < inf:
        return 0.0
    return 2.0 ** frexp(EVENTS_PER_REQUEST * requests_per_s / EVENTS_PER_SLICE)[1]
