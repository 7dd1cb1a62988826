"""What troubleshooting quotes is what is really said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = [
    line
    for line in (ROOT / "docs" / "troubleshooting.md").read_text("utf-8").splitlines()
    if line[:2] == "| "
]
QUOTED = sorted({words for row in ROWS for words in re.findall(r"\*([^*]+)\*", row.split(" | ")[0])})


@pytest.fixture(scope="module")
def said() -> str:
    """All that may be printed; strings that go over lines are joined."""
    files = [ROOT / "Makefile", *(ROOT / "src").rglob("*.py")]
    text = "\n".join(each.read_text("utf-8") for each in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("words", QUOTED)
def test_what_is_quoted_is_said_somewhere(words: str, said: str) -> None:
    assert len(QUOTED) > 5
    assert words in said
