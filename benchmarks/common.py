"""What every benchmark shares: its two flags, its context, and the one object or table that it prints.

    python benchmarks/NAME.py [--quick] [--json]

A benchmark is a function from `quick` to figures; `run` does the rest. Costs are CPU-seconds or ratios to
something measured in the same run, since the machine may be busy with other things.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMPILED = ROOT / "build" / "compiled"
"""Where `make compiled` puts a compiled copy of the package."""
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
LIBRARIES = ("potluck", "numpy")

Figures = Mapping[str, float]
Targets = Mapping[str, tuple[str, float]]


def run(
    name: str,
    measure: Callable[[bool], Figures],
    targets: Targets,
    *,
    seeds: Sequence[int] = (),
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure, print, and return the exit code: 0 unless a target names a figure that is not there."""
    parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py")
    parser.add_argument("--quick", action="store_true", help="end within 60 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    started = context(seeds, quick=options.quick)
    figures = {key: float(value) for key, value in measure(options.quick).items()}
    missing = sorted(set(targets) - set(figures))
    if missing:
        print(f"{name}: no figure for the target(s) {', '.join(missing)}", file=sys.stderr)
        return 1
    report = {
        "name": name,
        "figures": figures,
        "targets": {key: list(target) for key, target in targets.items()},
        "met": all(holds(figures[key], target) for key, target in targets.items()),
        "context": started,
    }
    print(json.dumps(report, indent=1, allow_nan=False) if options.json else as_table(report, targets))
    return 0


def holds(figure: float, target: tuple[str, float]) -> bool:
    """Whether a figure meets `(op, number)`."""
    return OPERATORS[target[0]](figure, target[1])


def as_table(report: Mapping[str, object], targets: Targets) -> str:
    """Figures, their targets and whether they hold, then the context."""
    figures, known = report["figures"], report["context"]
    assert isinstance(figures, dict)
    assert isinstance(known, dict)
    width = max(map(len, figures))
    lines = [str(report["name"])]
    for key, value in figures.items():
        line = f"  {key:<{width}}  {value:>10.4g}"
        if key in targets:
            op, number = targets[key]
            line += f"  {op} {number:g}: {'met' if holds(value, targets[key]) else 'MISSED'}"
        lines.append(line)
    lines.append("  " + ", ".join(f"{key} {value}" for key, value in known.items()))
    return "\n".join(lines)


def context(seeds: Sequence[int], *, quick: bool) -> dict[str, object]:
    """Where and on what the figures were measured; the load is that before the measurement."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {library: metadata.version(library) for library in LIBRARIES},
        "commit": _commit(),
        "seeds": list(seeds),
        "quick": quick,
    }


def cpu_s(work: Callable[[], object], repeats: int = 1) -> float:
    """CPU-seconds of this process for a piece of work; the least of several runs."""
    return min(_once_s(work) for _ in range(repeats))


def child_cpu_s(command: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    """CPU-seconds, user and system, of a child process; an error when it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compiled_copy() -> bool:
    """Whether there is one in COMPILED, and of the present source."""
    made = COMPILED / ".made"
    files = [file for folder in ("core", "sim") for file in (ROOT / "src" / "potluck" / folder).rglob("*.py")]
    return made.exists() and made.stat().st_mtime >= max(file.stat().st_mtime for file in files)


def _once_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None
