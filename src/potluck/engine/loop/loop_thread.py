"""The thread that turns the loop; all other threads reach the loop through it.

Calls go into one queue and are run between two turns, in order. The loop publishes its events from this thread. No
other thread touches the loop.
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
LoopCall = Callable[[EngineLoop, float], T]
"""A call with the loop and the time by its clock."""
MAX_SLEEP_S = 1.0
CHECK_EVERY_S = 1.0

log = logging.getLogger(__name__)


class LoopStopped(PotluckError):
    """The loop accepts no calls: it was stopped or has failed."""


class LoopThread:
    def __init__(self, loop: EngineLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._queued_calls: deque[tuple[LoopCall[Any], Future[Any]]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        """Held to change `_stopping` and to queue a call, so that no call is queued after the last one is refused."""
        self._stopping = False
        self._checked_s = 0.0
        self._thread = threading.Thread(target=self._run, name="potluck-engine", daemon=True)
        self.problem = ""
        """Why the loop has failed; empty if it has not."""

    def start(self) -> None:
        self._thread.start()

    def ask(self, call: LoopCall[T]) -> Future[T]:
        """Queue a call to be run between two turns. The future holds its result or exception."""
        future: Future[T] = Future()
        with self._lock:
            if self._stopping:
                future.set_exception(LoopStopped(self._refusal))
                return future
            self._queued_calls.append((call, future))
        self._wake_up()
        return future

    def _wake_up(self) -> None:
        self._wake.set()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; queued calls that were not run are refused."""
        with self._lock:
            self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._refuse_queued()
        if not self._thread.is_alive():
            self._loop.prefixes.flush()

    @property
    def _refusal(self) -> str:
        return f"the engine has failed ({self.problem})" if self.problem else "the engine is stopping"

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._run_queued()
                if not self._loop.turn(self._clock(), self._clock) and not self._queued_calls:
                    self._sleep_until_work()
        except Exception as error:  # the thread must not end without a log line
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        log.error("the engine's loop has failed", exc_info=error)
        with self._lock:
            self._stopping = True
        self._refuse_queued()

    def _run_queued(self) -> None:
        while self._queued_calls:
            call, future = self._queued_calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call(self._loop, self._clock()))
            except Exception as error:
                future.set_exception(error)
        self._loop.flush()

    def _sleep_until_work(self) -> None:
        now_s = self._clock()
        self._check(now_s)
        expiry_s = self._loop.next_expiry_s()
        sleep_s = MAX_SLEEP_S if expiry_s is None else max(0.0, min(MAX_SLEEP_S, expiry_s - now_s))
        self._wake.wait(sleep_s)

    def _check(self, now_s: float) -> None:
        if self._loop.idle and now_s - self._checked_s > CHECK_EVERY_S:
            self._checked_s = now_s
            self._loop.check()

    def _refuse_queued(self) -> None:
        while self._queued_calls:
            _, future = self._queued_calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(LoopStopped(self._refusal))


MAX_TURNS_PER_CALL = 64
"""Turns in one callback, before the event loop runs other callbacks."""


class TimerLoop(LoopThread):
    """A LoopThread without a thread, for a mock executor, whose steps end by time: timers of the event loop that
    serves HTTP turn the loop, so that many engines share a process. Calls of other threads are run there."""

    def __init__(
        self, loop: EngineLoop, mock_executor: MockExecutor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(loop, clock)
        self._mock_executor = mock_executor
        self._events: asyncio.AbstractEventLoop | None = None
        self._home_thread = 0
        self._turns_scheduled = False
        """Whether a callback of `_run_turns` is scheduled."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From within the event loop that is to turn it."""
        self._events, self._home_thread = asyncio.get_running_loop(), threading.get_ident()
        self._wake_up()

    def stop(self, timeout_s: float = 10.0) -> None:
        """From another thread than the event loop's, which is still running, or once it is closed."""
        with self._lock:
            self._stopping = True
        if self._events is None or self._events.is_closed():
            self._end()
            return
        ended = threading.Event()
        self._events.call_soon_threadsafe(self._end, ended)
        ended.wait(timeout_s)

    def _end(self, ended: threading.Event | None = None) -> None:
        self._refuse_queued()
        self._loop.prefixes.flush()
        if ended is not None:
            ended.set()

    def _wake_up(self) -> None:
        if self._events is None or self._events.is_closed():
            return
        if threading.get_ident() != self._home_thread:
            self._events.call_soon_threadsafe(self._schedule_turns)
        else:
            self._schedule_turns()

    def _schedule_turns(self) -> None:
        if not self._turns_scheduled and self._events is not None:
            self._turns_scheduled = True
            self._events.call_soon(self._run_turns)

    def _run_turns(self) -> None:
        self._turns_scheduled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stopping:
            return
        try:
            self._run_queued()
            self._turn_until_step_due()
        except Exception as error:  # must not end without a log line
            self._fail(error)
            return
        self._set_timer()

    def _turn_until_step_due(self) -> None:
        for _ in range(MAX_TURNS_PER_CALL):
            now_s = self._clock()
            self._mock_executor.deliver(now_s)
            due_s = self._mock_executor.due_s
            if due_s is not None and due_s > now_s:
                break
            if not self._loop.turn(now_s, self._clock):
                self._check(now_s)
                break
        else:
            self._schedule_turns()
        self._loop.flush()

    def _set_timer(self) -> None:
        assert self._events is not None
        when_s = self._mock_executor.due_s
        if when_s is None:
            when_s = self._loop.next_expiry_s()
        if when_s is not None:
            # In the event loop's own time, which may not be this clock's.
            wait_s = max(0.0, when_s - self._clock())
            self._timer = self._events.call_later(wait_s, self._run_turns)
