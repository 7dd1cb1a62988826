"""Memory that two engines of one machine share, in place of the connection between them.

The receiver makes it and names it in its greeting; the sender uses it if it can open it and finds in it the secret
that the greeting names, which only works on one machine and for one user. The name is gone as soon as the sender has
answered. Piece n of a connection lies in slot n modulo the number of slots, and a slot is free once its piece was
acknowledged: everything else of the protocol stays as it is.

A receiver that is killed before it was answered leaves the name, and the memory with it. So the owner holds a lock
(flock) on the file for as long as it has the memory, which the kernel ends with the process: `sweep` removes what
nobody holds. Where there is no such folder (macOS), none is offered.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
from pathlib import Path

from potluck.kv.frames import SharedMemoryOffer

FOLDER = Path("/dev/shm")
_PAGE = 4096
_PROOF_BYTES = 16
_PREFIX = "potluck-kv-"


class SharedSlots:
    def __init__(
        self, memory: mmap.mmap, shared: SharedMemoryOffer, slot_bytes: int, path: Path | None
    ) -> None:
        self.shared, self.slot_bytes = shared, slot_bytes
        self._memory, self._view, self._path = memory, memoryview(memory), path
        self.closed = False

    def slot(self, number: int, count: int) -> memoryview:
        start = _PAGE + number % self.shared.slots * self.slot_bytes
        return self._view[start : start + count]

    def forget_name(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def close(self) -> None:
        self.closed = True
        self.forget_name()
        self._view.release()
        self._memory.close()


def create(slots: int, slot_bytes: int) -> SharedSlots | None:
    """The receiver's side; None where there is no such memory, or none left."""
    if not hasattr(os, "posix_fallocate"):
        return None
    name, proof = secrets.token_bytes(16), secrets.token_bytes(_PROOF_BYTES)
    path = _path(name)
    size = _PAGE + slots * slot_bytes
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        if not _lock(fd):  # Somebody sweeps, and took it for one whose owner is gone.
            return None
        os.posix_fallocate(fd, 0, size)  # A page that cannot be had later would kill the process.
        memory = mmap.mmap(fd, size)  # It has a copy of the descriptor, and so keeps the lock.
    except OSError:
        path.unlink(missing_ok=True)
        return None
    finally:
        os.close(fd)
    memory[:_PROOF_BYTES] = proof
    return SharedSlots(memory, SharedMemoryOffer(name, proof, slots), slot_bytes, path)


def join(shared: SharedMemoryOffer, slot_bytes: int) -> SharedSlots | None:
    """The sender's side; None unless it is the very memory that the receiver means."""
    size = _PAGE + shared.slots * slot_bytes
    try:
        fd = os.open(_path(shared.name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        result = os.fstat(fd)
        private = stat.S_ISREG(result.st_mode) and stat.S_IMODE(result.st_mode) == 0o600
        if not private or result.st_uid != os.geteuid() or result.st_size != size:
            return None
        memory = mmap.mmap(fd, size)
    except OSError:
        return None
    finally:
        os.close(fd)
    if not secrets.compare_digest(memory[:_PROOF_BYTES], shared.proof):
        memory.close()
        return None
    return SharedSlots(memory, shared, slot_bytes, None)


def sweep() -> int:
    """Remove what receivers of this user have left behind that are no more; how many that were."""
    removed = 0
    with contextlib.suppress(OSError):
        for path in FOLDER.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # It is gone, or another's.
                removed += _orphan(path)
    return removed


def _orphan(path: Path) -> bool:
    """Remove a file that nobody holds; whether it was one."""
    if path.lstat().st_uid != os.geteuid():
        return False
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or not _lock(fd):
            return False
        path.unlink()
        return True
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Whether the file is ours alone now, and still has its name."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(fd).st_nlink > 0


def _path(name: bytes) -> Path:
    return FOLDER / f"{_PREFIX}{name.hex()}"
