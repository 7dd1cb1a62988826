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

ROOT = Path(__file__).parents[2]
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
    quick_without: str = "",
) -> int:
    """Measure, print, and return the exit code: 0 unless a target names a figure that is not there.

    A quick run says what it always does without; it may leave figures out (see `Budget`), and names those that have
    a target.
    """
    parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py")
    parser.add_argument("--quick", action="store_true", help="end within 60 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    started = context(seeds, quick=options.quick)
    if options.quick and quick_without:
        print(f"{name}: --quick does without {quick_without}", file=sys.stderr)
    figures = {key: float(value) for key, value in measure(options.quick).items()}
    missing = sorted(set(targets) - set(figures))
    if missing and options.quick:
        print(f"{name}: left out by --quick: {', '.join(missing)}", file=sys.stderr)
        targets = {key: target for key, target in targets.items() if key in figures}
    elif missing:
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


def skip(name: str, why: str) -> int:
    """For a benchmark that cannot run here: says why, as one object where that is asked for, and returns 0."""
    print(f"{name}: skipped, {why}", file=sys.stderr)
    if "--json" in sys.argv:
        print(json.dumps({"name": name, "skipped": why}))
    return 0


class Budget:
    """CPU-seconds for a quick run, so that it ends in time on a slow machine: what would take longer is left out, and
    named. A run that is not quick has no end."""

    def __init__(self, quick: bool, cpu_s: float = 30.0) -> None:
        self._quick, self._left_s, self._before_s = quick, cpu_s, self._now_s()

    def spend(self, cpu_s: float) -> None:
        """What a process has spent that has not ended."""
        self._left_s -= cpu_s

    def allows(self, what: str, cpu_s: float = 0.0) -> bool:
        """Whether something that takes about so long may begin; if not, says that it is left out."""
        if not self._quick or self._now_s() - self._before_s + cpu_s <= self._left_s:
            return True
        print(f"left out, for lack of time: {what}", file=sys.stderr)
        return False

    @staticmethod
    def _now_s() -> float:
        """Of this process and those of its children that have ended."""
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system


def holds(figure: float, target: tuple[str, float]) -> bool:
    """Whether a figure meets `(op, number)`."""
    return OPERATORS[target[0]](figure, target[1])


def as_table(report: Mapping[str, object], targets: Targets) -> str:
    """Figures, their targets and whether they hold, then the context."""
    figures, known = report["figures"], report["context"]
    assert isinstance(figures, dict)
    assert isinstance(known, dict)
    width = max(map(len, figures), default=0)
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
        "versions": {library: _version(library) for library in LIBRARIES},
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


def spent_cpu_s(pid: int) -> float:
    """CPU-seconds of another process that is still running."""
    if sys.platform == "linux":
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    days, _, rest = _ps(pid, "time").rpartition("-")
    total_s = 0.0
    for part in rest.split(":"):
        total_s = total_s * 60 + float(part)
    return total_s + 86_400 * int(days or 0)


def most_resident_mb(pid: int) -> float:
    """Of another process, up to now; where only the present is known, that."""
    if sys.platform == "linux":
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1000
        raise RuntimeError("the kernel does not say how much is resident")
    return int(_ps(pid, "rss")) / 1000


def peak_bytes() -> float:
    """Memory that this process had at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _ps(pid: int, field: str) -> str:
    command = ["ps", "-o", f"{field}=", "-p", str(pid)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _once_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _version(library: str) -> str | None:
    """None where it is used from its source, without being installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return completed.stdout.strip() or None
