"""How long a step, a transfer and a start take, how much fits in memory, and what it costs."""

from pathlib import Path

DATA = Path(__file__).parent / "data"


def shipped(name: str) -> str:
    """The text of a data file; `importlib.resources` would take longer to import than it takes to read."""
    return (DATA / name).read_text(encoding="utf-8")
