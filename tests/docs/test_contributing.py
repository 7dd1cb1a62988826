"""The three changes that CONTRIBUTING shows work, made as it says in a copy of the source: 1, 1 and 2 files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RUN = "from potluck.cli.main import main; main()"


def shown(heading: str) -> str:
    """The first block of code below a heading."""
    lines: list[str] = []
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for line in text[text.index(f"### {heading}\n") :].splitlines()[1:]:
        if line.startswith("    ") or (lines and not line.strip()):
            lines.append(line[4:])
        elif lines:
            break
    return "\n".join(lines).strip() + "\n"


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("changed") / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    gpus = source / "potluck/catalog/data/gpus.toml"
    gpus.write_text(gpus.read_text("utf-8") + "\n" + shown("Add a GPU"), "utf-8")
    balances = source / "potluck/core/routing/balance.py"
    table = "BALANCES: Final[dict[str, type[BalanceRule]]] = {\n"
    before, after = balances.read_text("utf-8").split(table)
    rule = shown("Add a routing rule")
    balances.write_text(f'{before}{rule}\n\n{table}    "fewest": FewestBalance,\n{after}', "utf-8")
    strategies = source / "potluck/plan/strategies"
    (strategies / "single_strategy.py").write_text(
        shown("Add a planner strategy").split("\nSTRATEGIES")[0], "utf-8"
    )
    known = (strategies / "__init__.py").read_text("utf-8")
    row = '    "single": Strategy(single, "single nodes"),\n'
    known = known.replace("STRATEGIES = {\n", f"STRATEGIES = {{\n{row}")
    first = "from potluck.plan.strategies.single_strategy import single\n\nWHOLE ="
    (strategies / "__init__.py").write_text(known.replace("WHOLE =", first), "utf-8")
    return source


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("catalog gpus", "L4-Next"),
        ("estimate --model Llama-3.1-8B --node 2xL4-Next --input 512 --output 64", "2xL4-Next"),
        ("simulate examples/one-node.yaml --policy balance=fewest --requests 100 --time-limit 5", "requests"),
        ("plan examples/one-node.yaml --strategy single --averages", "single"),
    ],
    ids=("gpu", "node", "balance", "strategy"),
)
def test_a_change_made_as_contributing_says_works(changed: Path, words: str, expected: str) -> None:
    where = os.environ | {"PYTHONPATH": str(changed), "COLUMNS": "100"}
    ended = subprocess.run(
        [sys.executable, "-c", RUN, *words.split()],
        cwd=ROOT,
        env=where,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert expected in ended.stdout
