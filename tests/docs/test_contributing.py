"""The example changes of CONTRIBUTING work in a copy of the source."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import test_architecture
import test_tidy

ROOT = Path(__file__).parent.parent.parent
COMMANDS = {
    "catalog gpus": "L4-Next",
    "estimate --model Llama-3.1-8B --node 2xL4-Next --input 512 --output 64": "2xL4-Next",
    "simulate examples/one-node.yaml --policy balance=fewest --requests 100 --time-limit 5": "requests",
    "plan examples/one-node.yaml --strategy single --averages": "single",
}
"""With a word of what each prints."""
RUN = """
import contextlib, io, json, sys
from potluck.cli.main import run
ended = {}
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = run(command.split())
    ended[command] = code, printed.getvalue()
json.dump(ended, sys.stdout)
"""


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


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """With times and compiled files, so that what stays as it is need not be compiled again."""
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.tmp*", "*.pyc.*", "*.egg-info"))
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
    first = "from potluck.plan.strategies.single_strategy import single\n\nWHOLE_NODE_COMBOS ="
    (strategies / "__init__.py").write_text(known.replace("WHOLE_NODE_COMBOS =", first), "utf-8")
    return source


def test_documented_example_changes_work(changed: Path) -> None:
    where = os.environ | {"PYTHONPATH": str(changed), "COLUMNS": "100"}
    command = [sys.executable, "-c", RUN, *COMMANDS]
    ended = subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    for words, (code, printed) in json.loads(ended.stdout).items():
        assert code == 0, f"{words}: {ended.stderr}"
        assert COMMANDS[words] in printed, words


def test_documented_example_changes_pass_import_and_style_rules(changed: Path) -> None:
    package = changed / "potluck"
    balance, strategies = package / "core/routing/balance.py", package / "plan/strategies"
    for path in (balance, strategies / "single_strategy.py", strategies / "__init__.py"):
        text, name = path.read_text("utf-8"), path.relative_to(package.parent).as_posix()
        module = name.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
        assert test_architecture.violations(module, text, path.name == "__init__.py") == []
        assert [problem for rule in test_tidy.rules_for(f"src/{name}") for problem in rule(text)] == []
