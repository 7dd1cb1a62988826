"""What is due when. Ties go by the order in which they were put down, so that a run is the same every time."""

from __future__ import annotations

from heapq import heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from potluck.sim.world.state import Site

REPLICA, PIPE, HANDED, TICK, COLLECT, DELIVER, READY, FAULT, SAMPLE, PLAN, CALL, END = range(12)
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
