"""The table of docs/terms.md: every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_is_named_is_there() -> None:
    told = (ROOT / "docs" / "terms.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", told))
    assert len(named) > 15
    written: set[str] = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        written |= set(re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE))
    assert not named - written
