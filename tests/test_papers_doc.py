"""docs/papers.md names places; each of them must be there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from potluck.core.brain.policy import Policy
from potluck.plan.strategies import STRATEGIES

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]


def rows(section: str) -> list[list[str]]:
    """Cells of the section's first table, without its head."""
    table = [line for line in section.split("\n\n")[2].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.split("\n")[0])
def test_every_mechanism_names_places_that_exist(section: str) -> None:
    found = rows(section)
    assert found
    for mechanism, where, printed, switch in found:
        assert printed, mechanism
        assert switch, mechanism
        places = re.findall(r"`([^`]+)`", where)
        assert places, mechanism
        for place in places:
            assert (ROOT / "src" / "potluck" / place).is_file(), f"{mechanism}: {place}"


def test_every_switch_exists() -> None:
    names = {each.name for each in fields(Policy)}
    for rule in re.findall(r"--policy (\w+)=", TEXT):
        assert rule in names
    for strategy in re.findall(r"--strategy ([\w-]+)", TEXT):
        assert strategy in STRATEGIES
