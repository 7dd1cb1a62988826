"""What is due when. Ties go by the order in which they were put down, so that a run is the same every time."""

from __future__ import annotations

from heapq import heappush
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from potluck.sim.world.state import Site

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
"""Kinds: a replica's or a pipe's next happening, KV that has arrived, the Brain's clock, reports taken and
delivered, a replica up, something from outside, a sample for plots, a plan, a plain call, the end of the run."""

Entry = tuple[float, int, int, Any]


class Agenda:
    """A heap of (time, sequence, kind, what); the sequence settles ties, so `what` is never compared."""

    __slots__ = ("heap", "sequence")

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self.sequence = 0

    def push(self, at_s: float, kind: int, what: Any) -> None:
        self.sequence += 1
        heappush(self.heap, (at_s, self.sequence, kind, what))

    def look(self, site: Site) -> None:
        """Look at a replica when its next happening is due, unless an earlier look is there already."""
        due_s = site.replica.wake_s
        if due_s < site.due_s:
            site.due_s = due_s
            self.push(due_s, REPLICA, site)
