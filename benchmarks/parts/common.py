"""What every benchmark shares: `python benchmarks/NAME.py [--quick] [--json]`.

A benchmark is a function from `quick` to figures; `run` does the rest. Costs are CPU-seconds or ratios to something
measured in the same run, since the machine may be busy with other things.
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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("POTLUCK_DATA", ROOT.parent / "shared" / "data"))
"""Recorded traces, rates and prices, which are not part of the repository."""
WORDS = ROOT / "src" / "potluck" / "engine" / "data" / "words"  # The model that ships.
COMPILED = ROOT / "build" / "compiled"  # Where `make compiled` puts a compiled copy of the package.
POTLUCK = (sys.executable, "-m", "potluck.cli.main")
OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}

Figures = Mapping[str, float]
Targets = Mapping[str, tuple[str, float]]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def options(**known: Any) -> argparse.Namespace:
    """A benchmark's own options, taken off the command line: flags (False), numbers, text, or words to
    choose from (a tuple: may be repeated, all unless given)."""
    parser = argparse.ArgumentParser(add_help=False)
    for name, default in known.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, tuple | list):
            parser.add_argument(f"--{name}", action="append", choices=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    given, sys.argv[1:] = parser.parse_known_args()
    for name, default in known.items():
        if getattr(given, name) is None:
            setattr(given, name, default)
    return given


def run(
    name: str,
    measure: Callable[[bool], Figures],
    targets: Targets,
    *,
    seeds: Sequence[int] = (),
    arguments: Sequence[str] | None = None,
    quick_without: str = "",
) -> None:
    """Measure and print; ends with 1 where a target names a figure that is not there, but a quick run may leave
    figures out (see `Budget`)."""
    parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py")
    parser.add_argument("--quick", action="store_true", help="end within 60 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    started = context(seeds, quick=chosen.quick)
    if chosen.quick and quick_without:
        say(f"{name}: --quick does without {quick_without}")
    figures = {key: float(value) for key, value in measure(chosen.quick).items()}
    missing = sorted(set(targets) - set(figures))
    if missing and not chosen.quick:
        sys.exit(f"{name}: no figure for the target(s) {', '.join(missing)}")
    if missing:
        say(f"{name}: left out by --quick: {', '.join(missing)}")
        targets = {key: target for key, target in targets.items() if key in figures}
    show(name, figures, targets, started, chosen.json)


def show(name: str, figures: Figures, targets: Targets, known: Mapping[str, object], as_json: bool) -> None:
    """A benchmark's report, as JSON or as a table."""
    report = {
        "name": name,
        "figures": figures,
        "targets": {key: list(target) for key, target in targets.items()},
        "met": all(holds(figures[key], target) for key, target in targets.items()),
        "context": known,
    }
    print(json.dumps(report, indent=1, allow_nan=False) if as_json else as_table(report, targets))


def skip(name: str, why: str) -> NoReturn:
    say(f"{name}: skipped, {why}")
    if "--json" in sys.argv:
        print(json.dumps({"name": name, "skipped": why}))
    sys.exit()


def prefixed(name: str, figures: Figures) -> dict[str, float]:
    """Say a part's figures as they come, since the whole may take minutes; they come back with its name in front."""
    say(f"  {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    return {f"{name}_{key}": value for key, value in figures.items()}


class Budget:
    """CPU-seconds for a quick run, so that it ends in time on a slow machine. Other runs have no end."""

    def __init__(self, quick: bool, cpu_s: float = 30.0) -> None:
        self._quick, self._left_s, self._before_s = quick, cpu_s, self._now_s()

    def spend(self, cpu_s: float) -> None:
        """What a process has spent that has not ended."""
        self._left_s -= cpu_s

    def allows(self, what: str, cpu_s: float = 0.0) -> bool:
        """Whether something that takes about so long may begin; if not, says that it is left out."""
        if not self._quick or self._now_s() - self._before_s + cpu_s <= self._left_s:
            return True
        say(f"left out, for lack of time: {what}")
        return False

    @staticmethod
    def _now_s() -> float:
        """Of this process and those of its children that have ended."""
        return sum(os.times()[:4])


class Background(threading.Thread):
    """Does its `work` until it is told to end; what went wrong there is raised then."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self._problem: Exception | None = None

    work: Callable[[], None]

    def run(self) -> None:
        try:
            self.work()
        except Exception as error:
            self._problem = error

    def end(self) -> None:
        self.over.set()
        self.join()
        if self._problem is not None:
            raise self._problem


def holds(figure: float, target: tuple[str, float]) -> bool:
    return OPERATORS[target[0]](figure, target[1])


def as_table(report: Mapping[str, Any], targets: Targets) -> str:
    figures, known = report["figures"], report["context"]
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
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {library: _version(library) for library in ("potluck", "numpy")},
        "commit": _commit(),
        "seeds": list(seeds),
        "quick": quick,
    }


def cpu_s(work: Callable[[], object], repeats: int = 1) -> float:
    """CPU-seconds of this process for a piece of work; the least of several runs."""
    spent_s = []
    for _ in range(repeats):
        start_s = time.process_time()
        work()
        spent_s.append(time.process_time() - start_s)
    return min(spent_s)


def child_cpu_s(command: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    """CPU-seconds, user and system, of a child process; an error when it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compiled_copy() -> bool:
    """Whether there is one in COMPILED, and of the present source."""
    made = COMPILED / ".made"
    files = [file for folder in ("core", "sim") for file in (ROOT / "src" / "potluck" / folder).rglob("*.py")]
    return made.exists() and made.stat().st_mtime >= max(file.stat().st_mtime for file in files)


def spent_cpu_s(pid: int) -> float:
    if sys.platform == "linux":
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    days, _, rest = _ps(pid, "time").rpartition("-")
    total_s = 0.0
    for part in rest.split(":"):
        total_s = total_s * 60 + float(part)
    return total_s + 86_400 * int(days or 0)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def most_resident_mb(pid: int) -> float:
    """Of another process, up to now; where only the present is known, that."""
    if sys.platform == "linux":
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM:"))
    return int(_ps(pid, "rss")) / 1000


def peak_bytes() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _ps(pid: int, field: str) -> str:
    command = ["ps", "-o", f"{field}=", "-p", str(pid)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


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
