"""Hidden states that came from the stage before, until the step that they belong to takes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from potluck.engine.pipeline.pipeline_connection import LinkError


@dataclass(frozen=True, slots=True)
class ArrivedStates:
    """States as bytes, or why there are none."""

    dtype: str
    rows: int
    data: bytearray
    failed: str = ""


class StageInputs:
    """Filled by the threads that read, emptied by the one that computes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, int], tuple[ArrivedStates, float]] = {}
        """With the time before which a slower network, which is acted, would not have brought them."""
        self.hop_s = self.hop_s_per_row = 0.0
        self._lost: dict[int, str] = {}
        self._joined: dict[int, int] = {}
        """How often each sender has connected: one that comes back ends what its last connection was."""

    def join(self, sender: int) -> int:
        """A worker of the stage before has connected; the number of its connection."""
        with self._changed:
            self._lost.pop(sender, None)
            self._joined[sender] = self._joined.get(sender, 0) + 1
            return self._joined[sender]

    def put(self, step: int, sender: int, states: ArrivedStates) -> None:
        due = self._clock() + self.hop_s + self.hop_s_per_row * states.rows
        with self._changed:
            self._arrived[step, sender] = states, due
            self._changed.notify_all()

    def lose(self, sender: int, why: str, number: int) -> None:
        """Nothing more will come over one of a worker's connections."""
        with self._changed:
            if self._joined.get(sender, 0) == number:
                self._lost[sender] = why
                self._changed.notify_all()

    def take(self, step: int, sender: int, within_s: float) -> ArrivedStates:
        """What a worker sent for a step; an error when it said that there is none, is gone, or is late."""
        deadline = self._clock() + within_s
        with self._changed:
            while (step, sender) not in self._arrived:
                if sender in self._lost:
                    raise LinkError(self._lost[sender])
                left = deadline - self._clock()
                if left <= 0:
                    raise LinkError(f"the stage before sent nothing for {within_s:g} s")
                self._changed.wait(left)
            found, due = self._arrived.pop((step, sender))
        if found.failed:
            raise LinkError(found.failed)
        while (early := due - self._clock()) > 0:
            time.sleep(early)
        return found

    def forget_before(self, step: int) -> None:
        """Steps are taken in order: what is left of earlier ones, nobody will ask for."""
        with self._changed:
            for key in [key for key in self._arrived if key[0] < step]:
                del self._arrived[key]
