"""Files that are whole or as they were before, whatever happens while they are written."""

from __future__ import annotations

import os
from pathlib import Path

from potluck.core.errors import CapacityError


def written(path: Path, text: str) -> None:
    """A file with this text, readable by its owner alone; the one before stays where there is no room."""
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise CapacityError(
            f"{path} cannot be written ({error.strerror or error}); make room there, or name another --state"
        ) from error
