"""The model that comes with this package. Torch is not needed to find it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from potluck.core.errors import InputError


def shipped_model() -> Path:
    path = Path(str(resources.files("potluck.engine") / "data" / "words"))
    if not (path / "config.json").is_file():
        raise InputError("--model", "this installation ships no model; give a model's directory")
    return path
