"""What `potluck plan` takes for each example: for the first time (cold), and once more (warm).

CPU-seconds (user and system) of the whole process, reasons included, on averages (a rehearsal is counted apart).
Loops that numba compiles once after an installation are compiled before, and modules to bytecode.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory

from parts.common import POTLUCK, ROOT, child_cpu_s, run

EXAMPLES = ROOT / "examples"
BUNDLED = "bundled"
QUICK = ("one-node",)
COLD_S, WARM_S = 10.0, 2.0


def names() -> list[str]:
    return [BUNDLED, *sorted(path.stem for path in EXAMPLES.glob("*.yaml"))]


def cpu_s(name: str, folder: str, *options: str) -> float:
    spec = [] if name == BUNDLED else [str(EXAMPLES / f"{name}.yaml")]
    # An installation has its bytecode, a checkout in which none may be written does not.
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    bytecode = os.path.join(tempfile.gettempdir(), "potluck-plan-time")
    environment = installed | {"XDG_CACHE_HOME": folder, "PYTHONPYCACHEPREFIX": bytecode}
    return child_cpu_s([*POTLUCK, "plan", *spec, "--averages", *options], environment)


def measure(quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    with TemporaryDirectory() as first:
        cpu_s(QUICK[0], first, "--no-explain")  # compiles what numba compiles
    for name in QUICK if quick else names():
        key = name.replace("-", "_")
        with TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                figures[f"{key}_{kind}_cpu_s"] = cpu_s(name, folder)
            figures[f"{key}_kept_mb"] = sum(path.stat().st_size for path in Path(folder).rglob("*.npz")) / 1e6
    for kind in ("cold", "warm"):
        figures[f"worst_{kind}_cpu_s"] = max(v for k, v in figures.items() if k.endswith(f"_{kind}_cpu_s"))
    return figures


if __name__ == "__main__":
    targets = {"worst_cold_cpu_s": ("<=", COLD_S), "worst_warm_cpu_s": ("<=", WARM_S)}
    run("plan_time", measure, targets, quick_without="all examples but one")
