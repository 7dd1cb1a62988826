"""What is due when. Ties go by the order in which they were put down, so that a run is the same every time.

Of a large fleet most entries are far from due, and a heap of them all does not fit a core's caches. So what is due
within the present slice of time is in a heap, and the rest in unsorted lists, one for each later slice. Slices are
halves of a second, quarters or eighths and so on: which one a time lies in is then found without rounding, and the
order is that of one heap, to the last bit.
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
"""Kinds: a replica's or a pipe's next happening, KV that has arrived, the Brain's clock, reports taken and delivered,
a replica up, something from outside, a sample for plots, a plan, a plain call, the end of the run.
"""

Entry = tuple[float, int, int, Any]

FEW: Final = 64  # With fewer replicas everything is in the heap.
TOGETHER: Final = 32
SLOWEST_PER_S: Final = 1e-6  # With fewer requests a second than this there is nothing to gain.
LATEST_S: Final = 2.0**40  # Later than this is one slice; some entries are never due.


class EventQueue:
    """Entries (time, sequence, kind, what); the sequence settles ties, so `what` is never compared."""

    def __init__(self, slices_per_s: float = 0.0) -> None:
        self.heap: list[Entry] = []
        """The present slice; when it is empty, `turn` fills it with the next."""
        self.sequence = 0
        self._slices_per_s = slices_per_s
        """A power of two; 0: all is one slice."""
        self._until_s = 0.0 if slices_per_s else inf
        """Where the present slice ends."""
        self._later: dict[int, list[Entry]] = {}
        self._order: list[int] = []
        """A heap of the slices that have entries."""

    def push(self, at_s: float, kind: int, what: Any) -> None:
        self.sequence += 1
        entry = (at_s, self.sequence, kind, what)
        if at_s < self._until_s:
            heappush(self.heap, entry)
            return
        place = int(min(at_s, LATEST_S) * self._slices_per_s)
        later = self._later.get(place)
        if later is not None:
            later.append(entry)
        else:
            self._later[place] = [entry]
            heappush(self._order, place)

    def turn(self) -> None:
        """Go on to the next slice that has entries. There must be one."""
        place = heappop(self._order)
        if self._slices_per_s:  # without slices only what is never due comes here
            self._until_s = (place + 1) / self._slices_per_s
        self.heap += sorted(self._later.pop(place))

    def look(self, replica: SimReplica) -> None:
        """Look at a replica when its next happening is due, unless an earlier look is there already."""
        due_s = replica.replica.wake_s
        if due_s < replica.due_s:
            replica.due_s = due_s
            self.push(due_s, REPLICA, replica)


def slices_per_s(replicas: int, requests_per_s: float) -> float:
    """So that a slice has about TOGETHER entries, of the three or so that a request makes; 0 for few replicas."""
    if replicas < FEW or not SLOWEST_PER_S < requests_per_s < inf:
        return 0.0
    return 2.0 ** frexp(3.0 * requests_per_s / TOGETHER)[1]
