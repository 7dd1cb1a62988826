"""Who used what, as records one can bill from: one JSON object per request and line, kept in a file.

A record is in the file before the end of its answer is sent. All of a gateway's processes append to one file, a line
at a time, so that killing any of them loses no record of an answer that somebody has. Of lines with the same `id`
one counts.

A new day (UTC) or a large file begins a new one: `usage.jsonl` is then called `usage-2031-01-31.jsonl`, or
`usage-2031-01-31.1.jsonl` where that is taken. Whoever notices first does it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from potluck.core.errors import InputError
from potluck.gateway.values import RequestOutcome

log = logging.getLogger(__name__)

DAY_S = 86_400
LARGEST_BYTES = 256_000_000
MOST_WAITING_BYTES = 16_000_000
"""Of lines that could not be written; beyond it the oldest are lost, which is logged."""


class UsageFile:
    def __init__(
        self, path: str | Path, calendar: Callable[[], float], largest_bytes: int = LARGEST_BYTES
    ) -> None:
        self._path, self._calendar, self._largest = Path(path), calendar, largest_bytes
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._file: int | None = None
        self._day, self._ends_s = "", 0.0
        self._synced_bytes = -1
        self.lost = 0
        self.problem = ""
        try:
            self._open()
        except OSError as error:
            raise InputError(str(path), f"cannot be written ({error.strerror or error})") from error

    def record(self, told: RequestOutcome, monotonic_s: float) -> None:
        ended_s = self._calendar() - (monotonic_s - told.ended_s)
        time_utc = datetime.fromtimestamp(ended_s, UTC).isoformat(timespec="milliseconds")

        def told_of(*names: str) -> dict[str, object]:
            return {name: getattr(told, name) for name in names}

        record = {
            "time": time_utc,
            **told_of("id", "request", "key", "tenant", "model"),
            "class": told.request_class,
            **told_of("prompt_tokens", "cached_tokens", "output_tokens", "outcome", "status"),
            "seconds": round(told.ended_s - told.came_s, 6),
            "estimated": told.estimated,
        }
        line = json.dumps(record, separators=(",", ":"))
        data = line.encode() + b"\n"
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        while self._waiting_bytes > MOST_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.pop(0))
            self.lost += 1
        if not self.problem:  # else once in a moment, by `look`
            self._write()

    def look(self) -> None:
        """Find another file in its place, begin a new one when it is time, and write what could not be written."""
        try:
            if self._file is not None and not self._is_there():
                self._close()
            if self._file is None:
                self._open()
            assert self._file is not None
            size = os.fstat(self._file).st_size
            if size and (self._calendar() >= self._ends_s or size > self._largest):
                self._turn()
        except OSError as error:
            self._failed(error)
            return
        self._write()

    def _write(self) -> None:
        if not self._waiting:
            return
        try:
            if self._file is None or self._calendar() >= self._ends_s:
                self._file = self._renewed()
            data = b"".join(self._waiting)
            left = len(data) - os.write(self._file, data)
        except OSError as error:
            self._failed(error)
            return
        if left:  # A disk that is full took a part: that line is told again, behind a line end.
            whole = data[: len(data) - left].rfind(b"\n") + 1
            data = data[whole:]
            self._waiting, self._waiting_bytes = [b"\n" + data], len(data) + 1
            self.problem = self.problem or "only a part could be written"
            return
        self._waiting, self._waiting_bytes, self.problem = [], 0, ""

    def _renewed(self) -> int:
        if self._file is None:
            self._open()
        elif os.fstat(self._file).st_size:
            self._turn()
        else:
            self._dated(self._calendar())
        assert self._file is not None
        return self._file

    def _failed(self, error: OSError) -> None:
        if not self.problem:
            log.error("usage cannot be written: %s", error.strerror or error)
        self.problem = str(error.strerror or error)

    def unsynced(self) -> Callable[[], None] | None:
        """What a thread is to do, so that what was written outlives the machine's power; None where nothing was."""
        if self._file is None or (size := os.fstat(self._file).st_size) == self._synced_bytes:
            return None
        self._synced_bytes = size
        file = os.dup(self._file)

        def sync() -> None:
            try:
                os.fdatasync(file)
            except OSError as error:
                log.error("usage cannot be made to last: %s", error.strerror or error)
            finally:
                os.close(file)

        return sync

    def close(self) -> None:
        self._write()
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        """At a line's beginning: whoever wrote before may have been killed, or found no room, within one."""
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        result = os.fstat(file)
        first = not self._day
        self._file, self._synced_bytes = file, -1
        if result.st_size and os.pread(file, 1, result.st_size - 1) != b"\n":
            self._waiting.insert(0, b"\n")  # with the next record: there may be no room now
            self._waiting_bytes += 1
        # Later, what lies there was begun a moment ago, by this process or another.
        self._dated(result.st_mtime if first and result.st_size else self._calendar())

    def _dated(self, at_s: float) -> None:
        self._day, self._ends_s = _day(at_s), (at_s // DAY_S + 1) * DAY_S

    def _is_there(self) -> bool:
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _turn(self) -> None:
        assert self._file is not None
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            if self._is_there():
                os.fdatasync(self._file)
                os.rename(self._path, self._free_name())
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._close()
        self._open()

    def _free_name(self) -> Path:
        stem, suffix = self._path.stem, self._path.suffix
        number = 0
        while True:
            name = f"{stem}-{self._day}{f'.{number}' if number else ''}{suffix}"
            if not (free_name := self._path.with_name(name)).exists():
                return free_name
            number += 1


def _day(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).date().isoformat()
