"""A log of a service that runs for months: cut into pieces of one size, which are packed, and so many bytes in all.

    brain.log               what is being written
    brain.log.000007        cut off, and about to be packed
    brain.log.000007.gz     packed; the one with the least number goes when there are too many

Packing is another thread's: whoever writes does not wait for it. A piece is replaced by its packed form in one step,
so that a crash at any moment leaves one of them; what is left over is put in order when the log is next opened.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from potluck.core.errors import InputError

NAME = "brain.log"
"""Of a service's log in its folder of state."""
PIECE_BYTES = 64_000_000
MOST_BYTES = 1_000_000_000
"""Of all packed pieces."""
BUFFER_BYTES = 1 << 18
CHUNK_BYTES = 1 << 20
DIGITS = 6
PACKED = ".gz"
LEVEL = 6


class LogFiles:
    """Writes to the end of a log. Several processes may, while one takes over from another: then nothing is cut."""

    def __init__(self, path: Path, piece_bytes: int = PIECE_BYTES, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._piece_bytes, self._most_bytes = path, piece_bytes, most_bytes
        self._packing: threading.Thread | None = None
        try:
            self._out = _open(path)
            self._size = path.stat().st_size
        except OSError as error:
            raise InputError(f"log {path}", error.strerror or "cannot be written") from error
        self._cut_at = piece_bytes
        self._pack()

    @property
    def full(self) -> bool:
        """Whether what is written next had better stand in another piece."""
        return self._size >= self._cut_at

    def write(self, text: str) -> int:
        self._size += len(text)
        return self._out.write(text)

    def flush(self) -> None:
        self._out.flush()

    def cut(self) -> bool:
        """Begin another piece, if nobody else writes to this one."""
        self._out.flush()
        own = self._out.fileno()
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(own, fcntl.LOCK_SH)
            self._cut_at = self._size + self._piece_bytes
            return False
        if self._path.stat().st_ino == os.fstat(own).st_ino:  # else somebody else has cut it off
            self._path.rename(self._path.with_name(f"{self._path.name}.{self._next():0{DIGITS}}"))
        before, self._out = self._out, _open(self._path)
        before.close()
        self._size, self._cut_at = self._path.stat().st_size, self._piece_bytes
        self._pack()
        return True

    def close(self) -> None:
        """All that was written is in the file; a piece that is being packed is packed."""
        self._out.close()
        if self._packing is not None:
            self._packing.join()

    def _next(self) -> int:
        return max((_number(each) for each in pieces_of(self._path)[:-1]), default=0) + 1

    def _pack(self) -> None:
        before = self._packing

        def work() -> None:
            if before is not None:
                before.join()
            with suppress(
                OSError
            ):  # the disk is full, say: what is not packed now is when the next piece is cut
                pack(self._path, self._most_bytes)

        self._packing = threading.Thread(target=work, name="pack-log", daemon=True)
        self._packing.start()


def _open(path: Path) -> IO[str]:
    """For its owner's eyes; what a killed writer left of a line gets its end."""
    opened = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    fcntl.flock(opened, fcntl.LOCK_SH)
    size = os.fstat(opened).st_size
    if size and os.pread(opened, 1, size - 1) != b"\n":
        os.write(opened, b"\n")
    return os.fdopen(opened, "a", buffering=BUFFER_BYTES, encoding="ascii", newline="\n")


def pieces_of(path: Path) -> list[Path]:
    """All that there is of a log, oldest first; where a piece is there packed and not, it is taken packed."""
    found: dict[int, Path] = {}
    for each in sorted(path.parent.glob(f"{path.name}.*")):
        number = _number(each)
        if number:
            found[number] = each
    return [*(found[number] for number in sorted(found)), *([path] if path.exists() else [])]


def _number(piece: Path) -> int:
    digits = piece.name.removesuffix(PACKED).rpartition(".")[2]
    return int(digits) if len(digits) >= DIGITS and digits.isdecimal() else 0


def pack(path: Path, most_bytes: int) -> None:
    """Pack what was cut off, and let the oldest go where that is too much."""
    for plain in sorted(path.parent.glob(f"{path.name}.*[0-9]")):
        if _number(plain):
            packed = plain.with_name(plain.name + PACKED)
            half = packed.with_name(f"{packed.name}.part")
            with plain.open("rb") as source, _private(half) as target, gzip.open(target, "wb", LEVEL) as out:
                shutil.copyfileobj(source, out, CHUNK_BYTES)
            half.rename(packed)
            plain.unlink()
    kept = [each for each in pieces_of(path) if each.suffix == PACKED]
    size = sum(each.stat().st_size for each in kept)
    for oldest in kept:
        if size <= most_bytes:
            break
        size -= oldest.stat().st_size
        oldest.unlink()


def _private(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
