"""Threads in a world: each is a real one that runs only while the world's loop waits for it.

What blocks in one (a lock, a wait, a socket, a sleep) gives the loop its turn back; the loop turns to it again when
it is woken, after a moment that the seed draws. So one runs at a time, in an order that is the same for the same
seed; a thread that has no lock may also lose its turn at any lock or call to the kernel. It belongs to a process:
frozen, it is not turned to; killed, never again.
"""

from __future__ import annotations

import _thread
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import FrameType, SimpleNamespace
from typing import Any

from worlds import virtual

SWITCH_S = 1e-3  # The longest until a thread that was woken has its turn.
current: Thread | None = None
_real_result, _real_sleep = Future.result, time.sleep


class Thread:
    def __init__(
        self, target: Callable[..., object], args: tuple[Any, ...] = (), name: str = "", daemon: bool = True
    ) -> None:
        process = virtual.running()
        assert process is not None
        self.process, self.loop, self.name = process, process.loop, name
        self._call = target, args
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._ended = Waiters()
        self.turn = 0
        self.locks = 0
        self.begun = self.done = False

    def start(self) -> None:
        self.process.threads[self] = None
        self._context = contextvars.copy_context()
        wake(self)

    def is_alive(self) -> bool:
        return not self.done

    def join(self, timeout: float | None = None) -> None:
        wait_for(lambda: self.done, [self._ended], timeout)

    def resume(self, turn: int) -> None:
        """Called by the loop, which waits until the thread blocks again."""
        global current
        if turn != self.turn or self.done:
            return  # something else woke it before
        self.turn += 1
        current = self
        if self.begun:
            self._go.release()
        else:
            self.begun = True
            _thread.start_new_thread(self._context.run, (self._run,))
        self._back.acquire()
        current = None

    def _run(self) -> None:
        target, args = self._call
        if self.loop.preempts:
            sys.settrace(_trace)
        try:
            target(*args)
        except BaseException as error:  # nobody else hears of it
            told = {"message": f"thread {self.name} failed", "exception": error}
            self.loop.call_exception_handler(told)
        self.done = True
        self.process.threads.pop(self, None)
        self._ended.wake()
        self._back.release()

    def park(self) -> None:
        self._back.release()
        self._go.acquire()


class Waiters(dict[Thread, None]):
    """Threads that wait for one thing."""

    def wake(self) -> None:
        for thread in self:
            wake(thread)


def wake(thread: Thread) -> None:
    wait_s = thread.loop.chance.random() * SWITCH_S if thread.loop.chance.random() < 0.5 else 0.0
    thread.loop.call_later(wait_s, thread.resume, thread.turn, context=thread.process.context)


def wait_for(holds: Callable[[], object], where: Iterable[Waiters], timeout_s: float | None = None) -> bool:
    """Block until something holds, which is looked at whenever one of these is woken."""
    if holds():
        return True
    thread, active = current, virtual.active
    assert active is not None
    until_s = None if timeout_s is None else active.now_s + timeout_s
    if thread is None and timeout_s != 0:
        raise RuntimeError("the event loop would stand still")
    while until_s is None or active.now_s < until_s:
        assert thread is not None
        timer = None
        if until_s is not None:
            context = thread.process.context
            timer = active.call_at(until_s, thread.resume, thread.turn, context=context)
        for waiters in where:
            waiters[thread] = None
        thread.park()
        for waiters in where:
            waiters.pop(thread, None)
        if timer is not None:
            timer.cancel()
        if holds():
            return True
    return False


def _trace(frame: FrameType, event: str, arg: object) -> Any:
    """Another may have its turn before any line of the transport, also where this one has a lock."""
    thread = current
    if "/potluck/kv/" not in frame.f_code.co_filename:
        return None
    if event == "line" and thread is not None and thread.loop.chance.random() < thread.loop.preempts:
        wake(thread)
        thread.park()
    return _trace


def may_switch() -> None:
    """Another may have its turn here."""
    thread = current
    if thread is not None and not thread.locks and thread.loop.chance.random() < thread.loop.switches:
        wake(thread)
        thread.park()


class Lock:
    """Also where a thread may enter twice, which it does not where it must not."""

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._count = 0
        self._waiting = Waiters()

    def __enter__(self) -> bool:
        may_switch()
        thread = current
        wait_for(lambda: not self._count or self._owner is thread, [self._waiting])
        self._owner = thread
        self._count += 1
        if thread is not None:
            thread.locks += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if current is not None:
            current.locks -= 1
        if not self._count:
            self._waiting.wake()
        may_switch()

    def let_go(self) -> int:
        """By the thread that has it, however often it has entered."""
        assert current is not None
        count, self._count = self._count, 0
        current.locks -= count
        self._waiting.wake()
        return count

    def take_again(self, count: int) -> None:
        wait_for(lambda: not self._count, [self._waiting])
        assert current is not None
        self._owner, self._count = current, count
        current.locks += count


class Condition:
    """Several may share a lock."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = Lock() if lock is None else lock
        self._hearing: dict[Event, None] = {}

    def __enter__(self) -> Condition:
        self._lock.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()

    def wait(self, timeout: float | None = None) -> bool:
        thread, lock, heard = current, self._lock, Event()
        if thread is None:
            return bool(wait_for(lambda: False, [], timeout))
        self._hearing[heard] = None
        count = lock.let_go()
        told = heard.wait(timeout)
        self._hearing.pop(heard, None)
        lock.take_again(count)
        return told

    def wait_for(self, holds: Callable[[], Any], timeout: float | None = None) -> Any:
        active = virtual.active
        assert active is not None
        until_s = None if timeout is None else active.now_s + timeout
        while not (result := holds()):
            left_s = None if until_s is None else until_s - active.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify_all(self) -> None:
        for heard in self._hearing:
            heard.set()
        self._hearing.clear()


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiting = Waiters()

    def set(self) -> None:
        self._set = True
        self._waiting.wake()

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return wait_for(lambda: self._set, [self._waiting], timeout)


class Pool:
    """In place of an executor: a thread for each call."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*given))
                except Exception as error:
                    future.set_exception(error)

        Thread(work, name="pool").start()
        return future

    def shutdown(self, *_: object, **__: object) -> None: ...


def _result(self: Future[Any], timeout: float | None = None) -> Any:
    if current is not None and not self.done():
        waiting = Waiters()
        self.add_done_callback(lambda _: waiting.wake())
        if not wait_for(self.done, [waiting], timeout):
            raise TimeoutError
    return _real_result(self, timeout)


def _sleep(seconds: float) -> None:
    if current is None:
        _real_sleep(seconds)
    else:
        wait_for(lambda: False, [], seconds)


threads = SimpleNamespace(
    Thread=Thread, Condition=Condition, Lock=Lock, RLock=Lock, Event=Event, get_ident=threading.get_ident
)
"""In place of `threading`, in the modules that are to run in a world."""
Future.result = _result  # type: ignore[method-assign]
time.sleep = _sleep
