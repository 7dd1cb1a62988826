"""Arrays kept on disk, in files named by a hash of all that they follow from.

Whatever changes has another name, so nothing is ever out of date. Files are arrays only, written aside and moved into
place; one that cannot be read is made anew, and where the folder cannot be written to, everything works without it.
Those that were not used for longest go when there is more than MOST_BYTES.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from potluck import __version__

FORMAT = 2
MOST_BYTES = 256 << 20
BUILT = (".so", ".pyd")
"""Compiled from sources that are there too."""
Arrays = dict[str, NDArray[Any]]


def default_folder() -> Path | None:
    """`$XDG_CACHE_HOME/potluck` or `~/.cache/potluck`; None where there is no such place."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):
        return Path(chosen) / "potluck"
    try:
        return Path.home() / ".cache" / "potluck"
    except RuntimeError:
        return None


def load(folder: Path | None, key: str) -> Arrays | None:
    """The arrays of a file; None when it is not there or not whole."""
    if folder is None:
        return None
    path = folder / f"{key}.npz"
    try:
        stored = np.load(BytesIO(path.read_bytes()), allow_pickle=False)
        found = {name: stored[name] for name in stored.files} if isinstance(stored, NpzFile) else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    with suppress(OSError):
        os.utime(path)  # used just now
    return found


def save(folder: Path | None, key: str, arrays: Arrays) -> bool:
    """Write a file as a whole or not at all; False where that is not possible."""
    if folder is None:
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(suffix=".tmp", dir=folder)
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(aside, folder / f"{key}.npz")
    except OSError:
        Path(aside).unlink(missing_ok=True)
        return False
    trim(folder)
    return True


def trim(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Remove what was not used for longest, until the rest is small enough."""
    try:
        there = [(entry.stat(), entry.path) for entry in os.scandir(folder) if entry.name.endswith(".npz")]
    except OSError:
        return
    size = sum(each.st_size for each, _ in there)
    if size <= most_bytes:
        return
    for each, path in sorted(there, key=lambda one: one[0].st_mtime):
        with suppress(OSError):
            os.unlink(path)
        size -= each.st_size
        if size <= most_bytes * 3 // 4:
            return


@lru_cache(maxsize=16)
def sources(package: str) -> bytes:
    """A hash of a package's own files, data included: a change of code gives results of another name."""
    digest = hashlib.sha256()
    for entry in sorted(_files(resources.files(package)), key=lambda each: each.name):
        digest.update(entry.name.encode() + b"\0" + hashlib.sha256(entry.read_bytes()).digest())
    return digest.digest()


def _files(folder: Any) -> Iterable[Any]:
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _files(entry)
        elif not entry.name.endswith(BUILT):
            yield entry


@lru_cache(maxsize=16)
def own(path: str) -> bytes:
    """The same of one file of the planner."""
    return hashlib.sha256(resources.files("potluck.plan").joinpath(path).read_bytes()).digest()


def name_of(*parts: bytes) -> str:
    """What follows from these parts, by these versions, is kept under this name."""
    digest = hashlib.sha256(f"{FORMAT} {__version__} {np.__version__}".encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:40]
