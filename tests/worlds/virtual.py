"""The machine that a world stands on: its clock, its chance, its processes, and files that may lose what is unsynced.

A process is a context (`contextvars`): what it starts inherits it. So whatever it has under way can be dropped
(killed) or put aside (frozen) between any two callbacks, that is at any await.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import os
import random
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worlds.loop import Listener, Socket, WorldLoop

EPOCH_S = 1_900_000_000.0
RUNS, FROZEN, DEAD = "runs", "frozen", "dead"
active: WorldLoop | None = None
PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
_real = {
    name: getattr(os, name)
    for name in ("open", "close", "dup", "write", "fsync", "fdatasync", "kill", "getpid")
}
_owners: dict[int, Process] = {}
_synced: dict[tuple[int, int], int] = {}
_reserved: dict[tuple[int, int], int] = {}  # By file, to where its disk has room whatever becomes of it.


class Killed(BaseException):
    """This process is no more."""


class Host:
    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name, self.folder = name, folder
        self.skew_s = 0.0
        self.full = False  # Its disk has no room,
        self.reserves = True  # but what was reserved, where its file system can do that.
        self.down = False


class Process:
    _next = 1

    def __init__(self, loop: WorldLoop, name: str, host: Host) -> None:
        self.loop, self.name, self.host = loop, name, host
        self.pid = 100_000_000 + Process._next
        Process._next += 1
        self.state = RUNS
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        self.held: list[Any] = []  # What became due while it was frozen.
        self.sockets: dict[Socket, None] = {}
        self.listeners: dict[Listener, None] = {}
        self.signals: dict[int, Callable[[], None]] = {}
        self.remains: list[object] = []  # What nobody may collect: its `finally` would run.
        self.threads: dict[Any, None] = {}
        loop.processes[self.pid] = self

    def run(self, what: Callable[..., Any], *given: Any) -> Any:
        return self.context.run(what, *given)

    def freeze(self) -> None:
        if self.state == RUNS:
            self.state = FROZEN

    def thaw(self) -> None:
        if self.state == FROZEN:
            self.state = RUNS
            self.loop.again(self.held)
            self.held = []

    def kill(self, silent: bool = False) -> None:
        """`silent`: its machine lost power, and tells nobody."""
        if self.state == DEAD:
            return
        self.state = DEAD
        self.remains.append(self.held)
        for listener in tuple(self.listeners):
            listener.close()
        for item in tuple(self.sockets):
            item.orphaned(silent)
        for number in [number for number, owner in _owners.items() if owner is self]:
            del _owners[number]
            with contextlib.suppress(OSError):  # closed by what was made of it
                _real["close"](number)

    def signal(self, number: int) -> None:
        call = self.signals.get(number)
        if call is not None:
            self.loop.call_soon(call, context=self.context)


def running() -> Process | None:
    return None if active is None else PROCESS.get()


def lose_power(host: Host, chance: random.Random) -> None:
    """What was not synced is gone or torn: a file keeps what was synced and a part of what came behind."""
    for path in sorted(host.folder.rglob("*")) if host.folder is not None else ():
        if path.is_file() and path.suffix not in (".db", ".yaml"):
            stat = path.stat()
            kept = min(_synced.get((stat.st_dev, stat.st_ino), 0), stat.st_size)
            with open(path, "r+b") as file:
                file.truncate(chance.randint(kept, stat.st_size) if chance.random() < 0.7 else kept)


class InlineExecutor:
    """In place of threads: what is asked is done at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, what: Callable[..., Any], *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(what(*given))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, *_: object, **__: object) -> None: ...


class InlineThread:
    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target

    def join(self) -> None: ...


def _monotonic(real: Callable[[], float]) -> Callable[[], float]:
    def monotonic() -> float:
        return real() if active is None else active.now_s

    return monotonic


def _calendar(real: Callable[[], float]) -> Callable[[], float]:
    def calendar() -> float:
        if active is None:
            return real()
        process = PROCESS.get()
        return EPOCH_S + active.now_s + (0.0 if process is None else process.host.skew_s)

    return calendar


def _open(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
    number: int = _real["open"](path, flags, mode, **more)
    if (process := running()) is not None:
        _owners[number] = process
        if flags & os.O_CREAT:
            _stamp(number)
    return number


def _close(number: int) -> None:
    _owners.pop(number, None)
    _real["close"](number)


def _dup(number: int) -> int:
    made: int = _real["dup"](number)
    if (process := running()) is not None:
        _owners[made] = process
    return made


def _stamp(number: int) -> None:
    os.utime(number, (time.time(), time.time()))


def _write(number: int, data: Any) -> int:
    process = running()
    if process is None or number not in _owners:
        return int(_real["write"](number, data))
    if process.host.full and not _has_reserved(number, len(data)):
        part = process.loop.chance.randrange(len(data)) if process.loop.chance.random() < 0.3 else 0
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = bytes(data)[:part]
    count = int(_real["write"](number, data))
    _stamp(number)
    return count


def _has_reserved(number: int, count: int) -> bool:
    """Whether room for so many bytes was reserved beyond the end of a file."""
    stat = os.fstat(number)
    return stat.st_size + count <= _reserved.get((stat.st_dev, stat.st_ino), 0)


def reserve(number: int, begin: int, length_bytes: int) -> None:
    """In place of the product's call; the file systems of every other seed cannot do it."""
    process = running()
    if process is None or not process.host.reserves:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    if process.host.full:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    stat = os.fstat(number)
    _reserved[stat.st_dev, stat.st_ino] = begin + length_bytes


def free_bytes(folder: Path) -> int:
    process = running()
    return 0 if process is not None and process.host.full else 1 << 40


def _sync(name: str) -> Callable[[int], None]:
    def sync(number: int) -> None:
        if active is None:
            _real[name](number)
        else:
            stat = os.fstat(number)
            _synced[stat.st_dev, stat.st_ino] = stat.st_size

    return sync


def _kill(number: int, what: int) -> None:
    process = None if active is None else active.processes.get(number)
    if process is None and number < 100_000_000:
        _real["kill"](number, what)
    elif process is None or process.state == DEAD:
        raise ProcessLookupError(errno.ESRCH, "no such process")


def install() -> None:
    """Once, before the product is imported: it keeps some of these as defaults."""
    time.monotonic = _monotonic(time.monotonic)
    time.time = _calendar(time.time)
    drawn, named = secrets.token_bytes, socket.gethostname
    secrets.token_bytes = lambda count=32: drawn(count) if active is None else active.chance.randbytes(count)
    bits = secrets.randbits
    secrets.randbits = lambda count: bits(count) if active is None else active.chance.getrandbits(count)
    os.open, os.close, os.dup, os.write, os.kill = _open, _close, _dup, _write, _kill
    os.fsync, os.fdatasync = _sync("fsync"), _sync("fdatasync")
    os.getpid = lambda: _real["getpid"]() if (process := running()) is None else process.pid
    socket.gethostname = lambda: named() if (process := running()) is None else process.host.name
