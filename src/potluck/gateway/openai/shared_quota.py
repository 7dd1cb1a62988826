"""What each worker's keys have used, in memory that all workers of a gateway see: so limits hold across processes.

A `SharedUse` is a file, mapped by every worker. A key has a row, found by the hash of its name; in a row each worker
has three numbers that only it writes: requests and tokens taken since the beginning, and requests under way. Others
read them; nothing waits, but for the lock under which a key gets its row, once.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from pathlib import Path
from typing import NamedTuple

from potluck.core.errors import CapacityError, InputError

ROWS = 16_384
NAME_BYTES = 16
NUMBERS = 3


class QuotaUse(NamedTuple):
    """What was used of a quota."""

    requests: float
    tokens: float
    open: float


class SharedKeyUse:
    """One key's use, by each worker."""

    __slots__ = ("_base", "_numbers", "_worker", "_workers")

    def __init__(self, numbers: memoryview[float], base: int, worker: int, workers: int) -> None:
        self._numbers, self._base, self._worker, self._workers = numbers, base, worker, workers
        self._numbers[self._mine + 2] = 0.0  # what an earlier process of this place had under way is gone

    @property
    def _mine(self) -> int:
        return self._base + self._worker * NUMBERS

    def add(self, requests: float, tokens: float, open_now: int) -> None:
        place = self._mine
        self._numbers[place] += requests
        self._numbers[place + 1] += tokens
        self._numbers[place + 2] = open_now

    def others(self) -> QuotaUse:
        requests = tokens = under_way = 0.0
        for worker in range(self._workers):
            if worker != self._worker:
                place = self._base + worker * NUMBERS
                requests += self._numbers[place]
                tokens += self._numbers[place + 1]
                under_way += self._numbers[place + 2]
        return QuotaUse(requests, tokens, under_way)


class SharedUse:
    """The file. Whoever starts the workers makes it and removes it; every worker opens it with its own number."""

    def __init__(self, path: str | Path, worker: int, workers: int) -> None:
        if not 0 <= worker < workers:
            raise InputError("worker", f"must be 0 to {workers - 1}, is {worker}")
        self._worker, self._workers = worker, workers
        self._names_bytes = ROWS * NAME_BYTES
        size = self._names_bytes + ROWS * workers * NUMBERS * 8
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        self._map = mmap.mmap(self._file, size)
        self._numbers = memoryview(self._map)[self._names_bytes : size].cast("d")

    def row(self, name: str) -> SharedKeyUse:
        """The row of a key; made if it has none."""
        wanted = hashlib.sha256(name.encode()).digest()[:NAME_BYTES]
        first = int.from_bytes(wanted[:8], "big") % ROWS
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            for step in range(ROWS):
                place = (first + step) % ROWS
                at = place * NAME_BYTES
                there = self._map[at : at + NAME_BYTES]
                if there == bytes(NAME_BYTES):
                    self._map[at : at + NAME_BYTES] = wanted
                    there = wanted
                if there == wanted:
                    return SharedKeyUse(
                        self._numbers, place * self._workers * NUMBERS, self._worker, self._workers
                    )
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        raise CapacityError(f"limits are kept for at most {ROWS} keys")

    def close(self) -> None:
        self._numbers.release()
        self._map.close()
        os.close(self._file)
