"""So that two controllers never act at once: a lease in the state file, renewed while its holder lives.

Whoever acts checks first that the lease is still its own and lasts long enough for what it is about to do. A
controller that was stopped for a while (its machine slept) finds that it is not, and does nothing.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable

from potluck.control.store.state_store import StateStore

LASTS_S = 6.0
ACT_S = 2.0
"""So much of it must be left to begin something."""


def gone(number: int) -> bool:
    """Whether no process has this number: then whoever had it cannot act any more."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class Lease:
    """One controller's claim. `clock` is the time of day, which all who share the file share."""

    def __init__(
        self, store: StateStore, clock: Callable[[], float] = time.time, lasts_s: float = LASTS_S
    ) -> None:
        self._store, self._clock, self._lasts_s = store, clock, lasts_s
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._until_s = 0.0

    def renew(self) -> bool:
        """Take it or keep it; False while somebody else has it."""
        now_s = self._clock()
        if self._store.claim(self.holder, now_s, self._lasts_s) is None:
            self._until_s = 0.0
            return False
        self._until_s = now_s + self._lasts_s
        return True

    def inherit(self) -> bool:
        """Take it at once where its holder was a process of this machine that is no more: nobody else can act."""
        holder = self._store.holder()
        if holder is not None and holder != self.holder:
            where, number = holder.rpartition("-")[0].rpartition("-")[::2]
            if where == socket.gethostname() and number.isdecimal() and gone(int(number)):
                self._store.release(holder)
        return self.renew()

    @property
    def held(self) -> bool:
        """Whether something may be begun now."""
        return self._until_s - self._clock() >= ACT_S

    def release(self) -> None:
        self._until_s = 0.0
        self._store.release(self.holder)
