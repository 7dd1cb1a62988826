"""Files and switches named in the paper pages exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from potluck.core.state.policy import Policy
from potluck.plan.strategies import STRATEGIES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "lab" / "papers" / "results"
PAGES = sorted(set(RESULTS.glob("*.md")) - {RESULTS / "together.md"})
HEAD = "| mechanism (section) |"


def rows(page: Path) -> list[list[str]]:
    """Cells of the page's table of mechanisms, without its head."""
    parts = page.read_text(encoding="utf-8").split("\n\n")
    table = next(part.splitlines() for part in parts if part.startswith(HEAD))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_every_paper_has_a_page() -> None:
    assert [page.stem for page in PAGES] == ["cauchy", "coral", "cronus", "prfaas", "thunderserve"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_paper_mechanism_names_existing_files(page: Path) -> None:
    result = rows(page)
    assert result
    for mechanism, where, printed, switch in result:
        assert printed, mechanism
        if where == "not implemented":
            assert not switch, mechanism
            continue
        assert switch, mechanism
        places = re.findall(r"`([^`]+)`", where)
        assert places, mechanism
        for place in places:
            assert (ROOT / "src" / "potluck" / place).is_file(), f"{mechanism}: {place}"


def test_every_switch_named_in_paper_pages_exists() -> None:
    names = {field.name for field in fields(Policy)}
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for rule in re.findall(r"--policy (\w+)=", text):
        assert rule in names
    for strategy in re.findall(r"--strategy ([\w-]+)", text):
        assert strategy in STRATEGIES
