"""Files that commands read and write: told by name when something is wrong, and before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from potluck.core.errors import InputError, PotluckError

T = TypeVar("T")


def require_writable(option: str, path: Path | None) -> None:
    """Refuse a place that cannot be written to, while that still costs nothing."""
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise InputError(option, f"there is no folder {str(folder)!r}; make it first")
    if path.is_dir():
        raise InputError(option, f"{str(path)!r} is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(option, f"{str(path)!r} may not be written")


def named(path: Path, read: Callable[[str], T]) -> T:
    """What a text file holds; whatever is wrong with it is said with its name."""
    try:
        return read(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(str(path), "is not text in UTF-8") from error
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read") from error
    except PotluckError as error:
        raise InputError(str(path), str(error)) from error
