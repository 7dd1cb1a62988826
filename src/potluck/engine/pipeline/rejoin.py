"""Workers that were lost and come back: reached beside what goes on, and taken in by the driver between two steps.

A worker of this machine is started again; one that runs elsewhere is asked for at its address until it is there
again, which is up to whoever looks after it. It gets its layers as at the first time, and begins with empty caches.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from potluck.core.errors import PotluckError
from potluck.engine.pipeline.remote_worker import Event, RemoteWorker, WorkerReturned

RETRY_S, RETRY_MOST_S = 1.0, 30.0


Reach = Callable[[RemoteWorker], tuple[RemoteWorker, WorkerReturned]]
"""Makes a worker in the place of one that is lost, ready for steps; raises a PotluckError while that cannot be."""


class WorkerRejoin:
    """A thread for each worker that is missed. The driver hears of those that are back through its inbox."""

    def __init__(self, reach: Reach, inbox: queue.SimpleQueue[Event], retry_s: float = RETRY_S) -> None:
        self._reach, self._inbox, self._retry_s = reach, inbox, retry_s
        self._over = threading.Event()
        self._back: set[int] = set()

    def miss(self, lost: RemoteWorker) -> None:
        threading.Thread(target=self._seek, args=(lost,), daemon=True, name=f"seek {lost.name}").start()

    def awaited(self, stage: int) -> bool:
        """Whether a worker of a stage is back that the driver has not taken in yet. Any thread may ask."""
        return stage in self._back

    def taken_in(self, stage: int) -> None:
        self._back.discard(stage)

    def close(self) -> None:
        self._over.set()

    def _seek(self, lost: RemoteWorker) -> None:
        wait_s = self._retry_s
        while not self._over.wait(wait_s):
            try:
                remote, where = self._reach(lost)
            except PotluckError:
                wait_s = min(RETRY_MOST_S, 1.5 * wait_s)
                continue
            if self._over.is_set():
                remote.stop()
                return
            remote.report_to(self._inbox)
            self._back.add(lost.stage)
            self._inbox.put((remote, where, bytearray()))
            return
