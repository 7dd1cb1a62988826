"""The thread that turns the loop, and the door to it for everybody else.

Whatever is asked goes into one queue and is done between two turns, in order; what the loop says comes out through
`tell`, called from this thread. Nobody else touches the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from potluck.core.errors import PotluckError
from potluck.engine.loop.engine_loop import EngineLoop

if TYPE_CHECKING:
    from potluck.engine.mock.mock_executor import MockExecutor

T = TypeVar("T")
Ask = Callable[[EngineLoop, float], T]
"""Something to be done with the loop, at a time of its clock."""
LONGEST_SLEEP_S = 1.0
CHECK_EVERY_S = 1.0

log = logging.getLogger(__name__)


class LoopStopped(PotluckError):
    """The loop takes nothing any more: it was told to stop, or has failed."""


class LoopThread:
    def __init__(self, loop: EngineLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._asked: deque[tuple[Ask[Any], Future[Any]]] = deque()
        self._wake = threading.Event()
        self._door = threading.Lock()
        """Held to change `_stopping` and to ask, so that nothing is asked after the last answer."""
        self._stopping = False
        self._checked_s = 0.0
        self._thread = threading.Thread(target=self._run, name="potluck-engine", daemon=True)
        self.problem = ""
        """Why the loop is broken; empty while it is not."""

    def start(self) -> None:
        self._thread.start()

    def ask(self, what: Ask[T]) -> Future[T]:
        """Have something done between two turns. The future holds the result or the exception."""
        future: Future[T] = Future()
        with self._door:
            if self._stopping:
                future.set_exception(LoopStopped(self._why))
                return future
            self._asked.append((what, future))
        self._wake_up()
        return future

    def _wake_up(self) -> None:
        self._wake.set()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; what was asked and not done is refused."""
        with self._door:
            self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._refuse()
        if not self._thread.is_alive():
            self._loop.prefixes.flush()

    @property
    def _why(self) -> str:
        return f"the engine has failed ({self.problem})" if self.problem else "the engine is stopping"

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._serve()
                if not self._loop.turn(self._clock(), self._clock) and not self._asked:
                    self._rest()
        except Exception as error:  # the thread must never end in silence
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        log.error("the engine's loop has failed", exc_info=error)
        with self._door:
            self._stopping = True
        self._refuse()

    def _serve(self) -> None:
        while self._asked:
            what, future = self._asked.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(what(self._loop, self._clock()))
            except Exception as error:
                future.set_exception(error)
        self._loop.flush()

    def _rest(self) -> None:
        now_s = self._clock()
        self._check(now_s)
        expiry_s = self._loop.next_expiry_s()
        sleep_s = LONGEST_SLEEP_S if expiry_s is None else max(0.0, min(LONGEST_SLEEP_S, expiry_s - now_s))
        self._wake.wait(sleep_s)

    def _check(self, now_s: float) -> None:
        if self._loop.idle and now_s - self._checked_s > CHECK_EVERY_S:
            self._checked_s = now_s
            self._loop.check()

    def _refuse(self) -> None:
        while self._asked:
            _, future = self._asked.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(LoopStopped(self._why))


MOST_TURNS = 64
"""At once, before others get their turn."""


class TimerLoop(LoopThread):
    """A driver without a thread, for an executor whose steps end by themselves: timers of the event loop that serves
    HTTP turn the loop, so that many engines can share a process. What other threads ask is brought there."""

    def __init__(
        self, loop: EngineLoop, mock_executor: MockExecutor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(loop, clock)
        self._timed = mock_executor
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
