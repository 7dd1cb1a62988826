"""What `potluck plan` takes for each example: for the first time, and once more.

    python benchmarks/plan_time.py [--quick] [--json]

CPU-seconds (user and system) of the whole process, reasons included, on averages (a rehearsal is counted apart).
*Cold*: nothing was planned before on this machine; *warm*: the same again, with what the first run kept. Loops that
numba compiles once after an installation are compiled before, and modules to bytecode. Targets: 10 s cold, 2 s warm,
for every example.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory

from parts.common import run

EXAMPLES = Path(__file__).parent.parent / "examples"
BUNDLED = "bundled"
QUICK = ("one-node",)
COLD_S, WARM_S = 10.0, 2.0


def names() -> list[str]:
    return [BUNDLED, *sorted(path.stem for path in EXAMPLES.glob("*.yaml"))]


def cpu_s(name: str, folder: str, *options: str) -> float:
    """User and system time of one command."""
    spec = [] if name == BUNDLED else [str(EXAMPLES / f"{name}.yaml")]
    command = [sys.executable, "-m", "potluck.cli.main", "plan", *spec, "--averages", *options]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # An installation has its bytecode, a checkout in which none may be written does not.
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    bytecode = os.path.join(tempfile.gettempdir(), "potluck-plan-time")
    child = os.posix_spawn(
        sys.executable,
        command,
        installed | {"XDG_CACHE_HOME": folder, "PYTHONPYCACHEPREFIX": bytecode},
        file_actions=[(os.POSIX_SPAWN_DUP2, nowhere, 1), (os.POSIX_SPAWN_DUP2, nowhere, 2)],
    )
    _, status, used = os.wait4(child, 0)
    os.close(nowhere)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"potluck plan of {name} failed; run it by itself")
    return used.ru_utime + used.ru_stime


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
        figures[f"worst_{kind}_cpu_s"] = max(
            v for key, v in figures.items() if key.endswith(f"_{kind}_cpu_s")
        )
    return figures


if __name__ == "__main__":
    targets = {"worst_cold_cpu_s": ("<=", COLD_S), "worst_warm_cpu_s": ("<=", WARM_S)}
    sys.exit(run("plan_time", measure, targets, quick_without="all examples but one"))
