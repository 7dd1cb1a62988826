"""Who used what, as records one can bill from: one JSON object per request and line, kept in a file.

Lines are written together, a moment after they come. A new day (UTC) or a large file begins a new one: what was
`usage.jsonl` is then called `usage-2031-01-31.jsonl`, or `usage-2031-01-31.1.jsonl` where that is taken.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from potluck.core.errors import InputError
from potluck.gateway.parts import Told

log = logging.getLogger(__name__)

LARGEST_BYTES = 256_000_000
MOST_WAITING_BYTES = 16_000_000
"""Of lines that could not be written; beyond it the oldest are lost, which is logged."""


class UsageFile:
    """The file of records. `calendar` says the time; `flush` is called every moment by whoever runs the gateway."""

    def __init__(
        self, path: str | Path, calendar: Callable[[], float], largest_bytes: int = LARGEST_BYTES
    ) -> None:
        self._path, self._calendar, self._largest = Path(path), calendar, largest_bytes
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.lost = 0
        """Records that could not be written."""
        self.problem = ""
        try:
            self._file: int | None = self._opened()
            found = os.fstat(self._file)
        except OSError as error:
            raise InputError(str(path), f"cannot be written ({error.strerror or error})") from error
        self._day = self._today() if not found.st_size else _day(found.st_mtime)

    def record(self, told: Told, monotonic_s: float) -> None:
        ended_s = self._calendar() - (monotonic_s - told.ended_s)
        line = json.dumps(
            {
                "time": datetime.fromtimestamp(ended_s, UTC).isoformat(timespec="milliseconds"),
                "request": told.request,
                "key": told.key,
                "tenant": told.tenant,
                "model": told.model,
                "class": told.request_class,
                "prompt_tokens": told.prompt_tokens,
                "cached_tokens": told.cached_tokens,
                "output_tokens": told.output_tokens,
                "outcome": told.outcome,
                "status": told.status,
                "seconds": round(told.ended_s - told.came_s, 6),
                "estimated": told.estimated,
            },
            separators=(",", ":"),
        )
        data = line.encode() + b"\n"
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        while self._waiting_bytes > MOST_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.pop(0))
            self.lost += 1

    def flush(self) -> None:
        """Write what waits. What cannot be written waits on, and `problem` says why."""
        if not self._waiting:
            return
        try:
            if self._file is None:
                self._file = self._opened()
            if self._today() != self._day or os.fstat(self._file).st_size > self._largest:
                self._turn()
            data = b"".join(self._waiting)
            left = data[os.write(self._file, data) :]  # A disk that is full may take a part.
        except OSError as error:
            if not self.problem:
                log.error("usage cannot be written: %s", error.strerror or error)
            self.problem = str(error.strerror or error)
            return
        self._waiting, self._waiting_bytes, self.problem = [left] if left else [], len(left), ""

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _opened(self) -> int:
        """At a line's beginning: whoever wrote before may have been killed, or found no room, within one."""
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
        return file

    def _turn(self) -> None:
        """Begin a new file; the old one gets the day's name."""
        assert self._file is not None
        os.close(self._file)
        self._file = None
        if self._path.exists() and self._path.stat().st_size:
            os.rename(self._path, self._free_name())
        self._file = self._opened()
        self._day = self._today()

    def _free_name(self) -> Path:
        stem, suffix = self._path.stem, self._path.suffix
        number = 0
        while True:
            name = f"{stem}-{self._day}{f'.{number}' if number else ''}{suffix}"
            if not (found := self._path.with_name(name)).exists():
                return found
            number += 1

    def _today(self) -> str:
        return _day(self._calendar())


def _day(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).date().isoformat()
