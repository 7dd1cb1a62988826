"""Make the machine code that is made at first use, once, before many processes start that would each make it.

python tools/warm.py
"""

from __future__ import annotations

from pathlib import Path

import potluck.kv.checksum_kernel
import potluck.kv.cpu_kernels
from potluck.cli.engine.fork_server import warm
from potluck.cli.main import run

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    warm()
    spec = str(ROOT / "examples" / "pool.yaml")
    raise SystemExit(run(["plan", spec, "--strategy", "thunderserve", "--averages", "--time-limit", "5", "--json"]))
