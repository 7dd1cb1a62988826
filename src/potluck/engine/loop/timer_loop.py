"""A driver without a thread, for an executor whose steps end by themselves: an event loop's timers turn the loop.

Everything happens in the event loop that serves the face, so that a step costs one wake-up, and many engines can
share a process. What is asked by other threads (those of hand-overs) is brought there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Protocol

from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.loop.loop_thread import LoopThread

MOST_TURNS = 64
"""At once, before others get their turn."""


class SelfTimedExecutor(Protocol):
    """What an executor has whose steps end by themselves."""

    @property
    def due_s(self) -> float | None:
        """When there is something to do; None while no step is under way."""

    def deliver(self, now_s: float) -> None:
        """Hand out what is due."""


class TimerLoop(LoopThread):
    """Turns a loop that does not await its steps."""

    def __init__(
        self, loop: EngineLoop, timed: SelfTimedExecutor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(loop, clock)
        self._timed = timed
        self._events: asyncio.AbstractEventLoop | None = None
        self._home = 0
        self._soon = False
        """Whether a look is coming anyway."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From within the event loop that is to turn it."""
        self._events, self._home = asyncio.get_running_loop(), threading.get_ident()
        self._wake_up()

    def stop(self, timeout_s: float = 10.0) -> None:
        """From another thread than the event loop's, which is still running, or once it is closed."""
        with self._door:
            self._stopping = True
        if self._events is None or self._events.is_closed():
            self._end()
            return
        ended = threading.Event()
        self._events.call_soon_threadsafe(self._end, ended)
        ended.wait(timeout_s)

    def _end(self, ended: threading.Event | None = None) -> None:
        self._refuse()
        self._loop.prefixes.flush()
        self._loop.executor.shutdown()
        if ended is not None:
            ended.set()

    def _wake_up(self) -> None:
        if self._events is None or self._events.is_closed():
            return
        if threading.get_ident() != self._home:
            self._events.call_soon_threadsafe(self._look_soon)
        else:
            self._look_soon()

    def _look_soon(self) -> None:
        if not self._soon and self._events is not None:
            self._soon = True
            self._events.call_soon(self._look)

    def _look(self) -> None:
        """Do what was asked and what is due; then come back when something is due again."""
        self._soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stopping:
            return
        try:
            self._serve()
            self._turns()
        except Exception as error:  # it must never end in silence
            self._fail(error)
            return
        self._come_back()

    def _turns(self) -> None:
        for _ in range(MOST_TURNS):
            now_s = self._clock()
            self._timed.deliver(now_s)
            due_s = self._timed.due_s
            if due_s is not None and due_s > now_s:
                break
            if not self._loop.turn(now_s, self._clock):
                self._check(now_s)
                break
        else:
            self._look_soon()
        self._loop.flush()

    def _come_back(self) -> None:
        assert self._events is not None
        when_s = self._timed.due_s
        if when_s is None:
            when_s = self._loop.next_expiry_s()
        if when_s is not None:
            # In the event loop's own time, which may not be this clock's.
            wait_s = max(0.0, when_s - self._clock())
            self._timer = self._events.call_later(wait_s, self._look)
