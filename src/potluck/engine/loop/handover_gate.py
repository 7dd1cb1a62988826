"""Who may begin a hand-over, and who waits: rows are few, and set apart for each kind of hand-over."""

from __future__ import annotations

from collections import deque

from potluck.core.errors import InputError
from potluck.core.replica.sequences import BatchLimits
from potluck.engine.compute.work import RunnerSize


def spare_rows(size: RunnerSize, limits: BatchLimits) -> int:
    """Rows for hand-overs, beside those that run; InputError where an executor is too small."""
    if limits.total_blocks > size.blocks:
        raise InputError("blocks", f"{limits.total_blocks} are more than the executor's")
    if size.rows < limits.max_running + 2:
        raise InputError("rows", f"must be at least two more than the {limits.max_running} that may run")
    return size.rows - limits.max_running


class HandoverGate:
    """Hand-overs of one kind: who waits for a row or for blocks, and who has a row set apart."""

    def __init__(self, places: int) -> None:
        self._places = places
        self.lobby: deque[int] = deque()
        self.inside: set[int] = set()

    def next(self) -> list[int]:
        """Those that may enter, in order."""
        free = self._places - len(self.inside)
        return [self.lobby[place] for place in range(min(free, len(self.lobby)))]

    def enter(self, key: int) -> None:
        self.lobby.remove(key)
        self.inside.add(key)

    def leave(self, key: int) -> None:
        self.inside.discard(key)
        if key in self.lobby:
            self.lobby.remove(key)

    @property
    def empty(self) -> bool:
        return not self.lobby and not self.inside
