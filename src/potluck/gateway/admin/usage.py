"""Usage records that one can bill from: one JSON object per request and line, appended to a file.

A record is in the file before the end of its answer is sent. All processes of a gateway append to one file, so that
killing any of them loses no record of an answer that a client has. Of lines with the same `id` one counts.

No lock is taken to append: a process that is stopped must not hold up the others. What keeps records apart instead:

- A full disk may take a part of a record. The record stays in memory and is written again, whole, on a new line.
- A process begins a new line if the file does not end with one. If another process's torn record comes between that
  check and the append, the record stands on the torn line; the byte before it shows that, and it is written again.

Room for the next records is reserved on the disk beyond the end of the file (`fallocate`), so that records can be
written when the disk is full. Only once the reserved room is used up do records wait in memory, where they are lost
if their process dies.

A new day (UTC) or a large file begins a new one: `usage.jsonl` is then called `usage-2031-01-31.jsonl`, or
`usage-2031-01-31.1.jsonl` where that is taken. The process that notices first renames it, if the disk has room to
reserve for the next one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from potluck.core.errors import InputError
from potluck.gateway.values import RequestOutcome

log = logging.getLogger(__name__)

DAY_S = 86_400
LARGEST_BYTES = 256_000_000
WAITING_MAX_BYTES = 16_000_000
"""Of records that could not be written; beyond it the oldest are dropped, counted in `lost`."""
RESERVED_BYTES = 1 << 22  # Some 10,000 records.
RESERVED_MIN_BYTES = 1 << 16  # Less than this is not worth reserving on a disk that is nearly full.
APPEND_TRIES = 3  # Each but the first follows another process's torn record.
FALLOC_FL_KEEP_SIZE = 1
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reserve(file: int, begin: int, length_bytes: int) -> None:
    """Allocate room on the disk for bytes of a file beyond its end, without changing its size."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    if libc.fallocate(file, FALLOC_FL_KEEP_SIZE, ctypes.c_int64(begin), ctypes.c_int64(length_bytes)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def free_bytes(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


class UsageFile:
    def __init__(
        self, path: str | Path, calendar: Callable[[], float], largest_bytes: int = LARGEST_BYTES
    ) -> None:
        self._path, self._calendar, self._largest = Path(path), calendar, largest_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._file: int | None = None
        self._day, self._ends_s = "", 0.0
        self._synced_bytes = -1
        self._can_reserve = True  # Until the file system says that it cannot.
        self._reserved_to = 0
        self._reserve_problem = ""
        self.lost = 0
        self.problem = ""
        """Why records wait in memory; empty if none does."""
        try:
            self._open()
        except OSError as error:
            raise InputError(str(path), f"cannot be written ({error.strerror or error})") from error

    @property
    def notice(self) -> str:
        """What an operator should mend: records wait, or soon will."""
        return self.problem or self._reserve_problem

    def record(self, outcome: RequestOutcome, monotonic_s: float) -> None:
        ended_s = self._calendar() - (monotonic_s - outcome.ended_s)
        time_utc = datetime.fromtimestamp(ended_s, UTC).isoformat(timespec="milliseconds")

        def fields(*names: str) -> dict[str, object]:
            return {name: getattr(outcome, name) for name in names}

        record = {
            "time": time_utc,
            **fields("id", "request", "key", "tenant", "model"),
            "class": outcome.request_class,
            **fields("prompt_tokens", "cached_tokens", "output_tokens", "outcome", "status"),
            "seconds": round(outcome.ended_s - outcome.came_s, 6),
            "estimated": outcome.estimated,
        }
        data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        while self._waiting_bytes > WAITING_MAX_BYTES:
            self._dequeue()
            self.lost += 1
        if not self.problem:  # else `look` tries again, at intervals
            self._write()

    def look(self) -> None:
        """Follow a renamed file, begin a new one when it is time, reserve room, and write the records that wait."""
        try:
            if self._file is not None and not self._is_current():
                self._close()
            if self._file is None:
                self._open()
            assert self._file is not None
            size = os.fstat(self._file).st_size
            if size and (self._calendar() >= self._ends_s or size > self._largest):
                self._rotate()
            self._reserve()
        except OSError as error:
            self._failed(error)
            return
        self._write()

    def _write(self) -> None:
        if not self._waiting:
            return
        try:
            if self._file is None or self._calendar() >= self._ends_s:
                self._renew()
            for _ in range(APPEND_TRIES):
                if not self._append():
                    break
        except OSError as error:
            self._failed(error)
            return
        if self._waiting:
            self._failed(OSError(errno.ENOSPC, "only a part could be written"))
        else:
            self.problem = ""

    def _append(self) -> bool:
        """Write the records that wait; whether the first one joined a torn line, so that all is to be tried again.

        Records that are not whole on lines of their own afterwards go on waiting.
        """
        assert self._file is not None
        torn = not self._is_line_start(os.fstat(self._file).st_size)
        written = os.write(self._file, b"".join((b"\n", *self._waiting) if torn else self._waiting))
        begin = os.lseek(self._file, 0, os.SEEK_CUR) - written  # of an append: where it was put
        joined = not torn and not self._is_line_start(begin)
        first = self._waiting[0]
        left = written - torn
        while self._waiting and left >= len(self._waiting[0]):
            left -= len(self._waiting[0])
            self._dequeue()
        if joined and not (self._waiting and self._waiting[0] is first):
            self._waiting.appendleft(first)
            self._waiting_bytes += len(first)
        return joined

    def _is_line_start(self, place: int) -> bool:
        assert self._file is not None
        return place <= 0 or os.pread(self._file, 1, place - 1) == b"\n"

    def _dequeue(self) -> None:
        self._waiting_bytes -= len(self._waiting.popleft())

    def _renew(self) -> None:
        if self._file is None:
            self._open()
        elif os.fstat(self._file).st_size:
            self._rotate()
        else:
            self._set_day(self._calendar())

    def _failed(self, error: OSError) -> None:
        if not self.problem:
            log.error("usage cannot be written: %s", error.strerror or error)
        self.problem = str(error.strerror or error)

    def _reserve(self) -> None:
        """Have at least half of RESERVED_BYTES allocated beyond the end of the file, or as much as the disk has."""
        assert self._file is not None
        stats = os.fstat(self._file)
        if not self._can_reserve or stats.st_size + RESERVED_BYTES // 2 <= self._reserved_to:
            return
        length_bytes = RESERVED_BYTES
        while length_bytes >= RESERVED_MIN_BYTES:
            try:
                reserve(self._file, stats.st_size, length_bytes)
            except OSError as error:
                if error.errno not in NO_ROOM:  # EINTR: the next `look` tries again
                    self._can_reserve = error.errno == errno.EINTR
                    return
                length_bytes //= 4
            else:
                # A process that starts later takes the day of the last record from this time.
                os.utime(self._file, ns=(stats.st_atime_ns, stats.st_mtime_ns))
                self._reserved_to = max(self._reserved_to, stats.st_size + length_bytes)
                break
        left_kb = max(0, self._reserved_to - stats.st_size) // 1024
        before, self._reserve_problem = self._reserve_problem, ""
        if length_bytes < RESERVED_BYTES:
            self._reserve_problem = f"disk is full; {left_kb} KB are reserved for further records"
            if not before:
                log.warning("usage: %s", self._reserve_problem)

    def unsynced(self) -> Callable[[], None] | None:
        """A call for a thread that makes what was written outlive a power loss; None if nothing was written since."""
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
        """The last process to close a file that has been renamed frees the room reserved beyond its end."""
        if self._file is None:
            return
        file, current = self._file, self._is_current()
        self._file = None
        try:
            if not current and self._can_reserve:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another process may append
                os.ftruncate(file, os.fstat(file).st_size)
        except OSError as error:
            log.debug("the room beyond a former usage file stays reserved: %s", error)
        finally:
            os.close(file)

    def _open(self) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:  # held until the file is closed: see `_close`
            fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:
            self._can_reserve = False
        stats = os.fstat(file)
        first = not self._day
        self._file, self._synced_bytes, self._reserved_to = file, -1, 0
        # Later, what lies there was begun a moment ago, by this process or another.
        self._set_day(stats.st_mtime if first and stats.st_size else self._calendar())
        self._reserve()

    def _set_day(self, at_s: float) -> None:
        self._day, self._ends_s = _day(at_s), (at_s // DAY_S + 1) * DAY_S

    def _is_current(self) -> bool:
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        """Rename the file and begin a new one, unless another process is at it or room for the new one is lacking."""
        assert self._file is not None
        if self._can_reserve and free_bytes(self._path.parent) < RESERVED_BYTES:
            return
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_current():
                os.fdatasync(self._file)
                os.rename(self._path, self._free_name())
        except BlockingIOError:
            return
        finally:
            os.close(folder)
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
