"""Files that ship with the package; `importlib.resources` would take longer to import than they take to read."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"


def shipped(name: str) -> str:
    """The text of one of them."""
    return (DATA / name).read_text(encoding="utf-8")
