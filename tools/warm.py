"""Make the machine code that is made at first use, once, before many processes start that would each make it.

python tools/warm.py [plan]    # plan: only that of the planner
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from potluck.cli.engine.fork_server import load
from potluck.cli.main import run

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PLANS = (("one-node.yaml",), ("pool.yaml", "--strategy", "thunderserve"))


def main(parts: list[str]) -> int:
    if parts != ["plan"]:
        import_module("potluck.kv.cpu_kernels")
        load()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # what is kept there would not be computed
        words = [
            ["plan", str(EXAMPLES / name), *more, "--averages", "--time-limit", "5"] for name, *more in PLANS
        ]
        return max(map(run, words))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
