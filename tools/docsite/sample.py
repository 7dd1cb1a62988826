"""The plan that `docs/planning.md` explains: PYTHONPATH=src:tools python -m docsite.sample writes it anew.

It is what `potluck plan` prints for the tutorial's file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from docsite.text import blocks

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "planning.md"
COLUMNS = "200"
COMMAND = ("plan", "potluck.yaml", "--out", "plan.json")


def spec() -> str:
    """The one file that the tutorial lets its reader write."""
    text = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
    (result,) = [block.text for block in blocks(text) if block.language == "yaml"]
    return result


def in_page() -> str:
    return next(block.text for block in blocks(PAGE.read_text("utf-8")) if block.language == "text")


def heads(output: str) -> list[list[str]]:
    result = [above for above, below in pairwise(output.splitlines()) if below.startswith("───")]
    return [re.split(r"\s{2,}", line.strip()) for line in result]


def printed() -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "potluck.yaml").write_text(spec(), "utf-8")
        command = [sys.executable, "-m", "potluck.cli.main", *COMMAND]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": COLUMNS}
        done = subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True)
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def main() -> None:
    block, text = f"```text\n{printed()}\n```", PAGE.read_text("utf-8")
    PAGE.write_text(re.sub(r"```text\n.*?```", lambda _: block, text, count=1, flags=re.DOTALL))


if __name__ == "__main__":
    main()
