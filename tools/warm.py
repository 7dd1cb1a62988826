"""Make the machine code that is made at first use, once, before many processes start that would each make it.

python tools/warm.py
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from potluck.cli.engine.fork_server import warm
from potluck.cli.main import run

POOL = Path(__file__).resolve().parent.parent / "examples" / "pool.yaml"
SEARCH = ("--strategy", "thunderserve", "--averages", "--time-limit", "5", "--json")

if __name__ == "__main__":
    import_module("potluck.kv.cpu_kernels")
    warm()
    raise SystemExit(run(["plan", str(POOL), *SEARCH]))
