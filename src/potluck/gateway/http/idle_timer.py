"""Silence, noticed at the cost of one timer for all.

Whoever must not be silent for too long is put into the slot of the moment at which it would be. When that comes,
those that were heard in between move on to their next slot. So hearing something costs one assignment. What is
watched is a connection, which stays in its slot when its next request is to be watched as long: a request costs a
comparison, and nothing of it is kept.

Time in which the event loop itself stood still does not count: what came meanwhile has not been read yet.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

TICK_S = 0.05


class IdleWatched(Protocol):
    heard_s: float
    """By the wheel's clock."""
    silence_s: float
    slot: int
    """Where it is looked at next, which only the wheel writes; 0: nowhere."""

    def awaited(self) -> bool | None:
        """Whether its silence counts; None when nothing is awaited."""

    def silent(self) -> None:
        """It was, for too long."""


class TimerWheel:
    def __init__(self) -> None:
        self.now_s = 0.0
        """Time in which there was somebody to listen."""
        self._slots: dict[int, list[IdleWatched]] = {}
        self._slot = 0
        self._ticked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, watched: IdleWatched) -> None:
        """From now on, as long as something is awaited of it. Need not be called for one whose slot comes in time."""
        watched.heard_s = self.now_s
        self._put(watched)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._slots.clear()

    def _put(self, watched: IdleWatched) -> None:
        if self._timer is None:
            self._ticked_s = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        slot = max(int((watched.heard_s + watched.silence_s) / TICK_S) + 1, self._slot + 1)
        watched.slot = slot
        self._slots.setdefault(slot, []).append(watched)

    def _tick(self) -> None:
        now_s = time.monotonic()
        self.now_s += min(now_s - self._ticked_s, 2 * TICK_S)
        self._ticked_s = now_s
        last = int(self.now_s / TICK_S)
        while self._slot < last:
            self._slot += 1
            for watched in self._slots.pop(self._slot, ()):
                if watched.slot == self._slot:  # else it was to be looked at sooner, and was
                    watched.slot = 0
                    self._look(watched)
        if self._slots:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        else:
            self._timer = None

    def _look(self, watched: IdleWatched) -> None:
        counts = watched.awaited()
        if counts is None:
            return
        if not counts:
            watched.heard_s = self.now_s
        if self.now_s - watched.heard_s >= watched.silence_s:
            watched.silent()
        else:
            self._put(watched)
