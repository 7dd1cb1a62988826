"""The live code in worlds of its own (tests/worlds), as many as fit into some minutes.

    python benchmarks/seeds.py [--minutes N] [--first SEED] [--cores N] [--bugs] [--quick] [--json]

`broken` counts seeds with a rule broken; each is named, and `cd tests && python -m worlds SEED` tells its story.
Faults are counted by kind, and what ran of the code that carries requests through failures: the gateway's dispatch,
the Brain's recovery, the controller's reconciler. `large` is a world of 20 replicas and 50 requests in flight. With
--bugs, how many seeds it takes to find each of the bugs in tests/worlds/bugs.py.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from parts.common import ROOT, options, run, say

sys.path.insert(0, str(ROOT / "tests"))

import worlds.bugs
from worlds import runner, transport
from worlds.clients import Ask
from worlds.world import Scenario, scenario_of

SOURCE = ROOT / "src" / "potluck"
PARTS = {
    "dispatch": sorted((SOURCE / "gateway" / "dispatch").glob("*.py")),
    "recovery": [SOURCE / "core" / "brain" / "recovery.py"],
    "reconcile": [SOURCE / "control" / "reconciler.py"],
}
TRACED = 12  # One seed in so many is watched line by line, which takes longer.
MOST_SEEDS = 500
TARGETS = {"broken": ("==", 0.0), "large_simulated_s_per_cpu_s": (">=", 1000.0)}


def watched() -> Callable[[], dict[str, list[int]]]:
    """Begin to note which lines run; what they were."""
    seen: defaultdict[str, set[int]] = defaultdict(set)
    files = {str(path) for paths in PARTS.values() for path in paths}

    def lines(frame: FrameType, event: str, _: Any) -> Any:
        seen[frame.f_code.co_filename].add(frame.f_lineno)
        return lines

    sys.settrace(lambda frame, event, _: lines if frame.f_code.co_filename in files else None)
    return lambda: {name: sorted(numbers) for name, numbers in seen.items()}


def lines_of(path: Path) -> set[int]:
    """Those within functions: others run when the file is imported."""
    todo, result = [compile(path.read_text("utf-8"), str(path), "exec")], set[int]()
    while todo:
        code = todo.pop()
        inner = [item for item in code.co_consts if isinstance(item, CodeType)]
        todo += inner
        if code.co_flags & 2:  # a function's
            result |= {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
    return result


def large(seed: int) -> Scenario:
    asks = tuple(Ask(number, 0.0, number % 3, 40, 240, 240, True) for number in range(50))
    plain = {"combos": 0, "workers": 1, "pieces": 0.0, "limits": (), "faults": (), "controlled": False}
    return replace(scenario_of(seed, shipped=False), mixed=20, token_s=0.5, asks=asks, **plain)


def measure(minutes: float, first: int, cores: int) -> dict[str, float]:
    runner.warm()
    end_s, faults, ran = time.monotonic() + 60 * minutes, Counter[str](), defaultdict[str, set[int]](set)
    figures = dict.fromkeys(("seeds", "broken", "requests", "simulated_s", "cpu_s"), 0.0)

    def one(seed: int) -> None:
        if time.monotonic() > end_s:
            return
        traced = seed % TRACED == 0
        result = runner.apart(scenario_of(seed), watched if traced else None)
        faults.update(result.faults)
        for name, numbers in result.lines.items():
            ran[name].update(numbers)
        added = (1.0, float(bool(result.broken)), result.requests, result.virtual_s, result.cpu_s)
        for name, value in zip(figures, added if not traced else (*added[:3], 0.0, 0.0), strict=True):
            figures[name] += value
        if result.broken:
            say(f"seeds: {seed}: {result.broken[0]}")

    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(one, range(first, first + int(minutes * 60 * cores * 20))))
    figures["simulated_s_per_cpu_s"] = figures["simulated_s"] / figures["cpu_s"]
    full = runner.apart(large(1))
    figures["large_simulated_s_per_cpu_s"] = full.virtual_s / full.cpu_s
    figures["broken"] += bool(full.broken)
    for part, paths in PARTS.items():
        known = {(str(path), line) for path in paths for line in lines_of(path)}
        covered = {(name, line) for name, numbers in ran.items() for line in numbers} & known
        figures[f"lines_{part}"] = len(covered) / len(known)
    return figures | {f"fault_{kind}": float(count) for kind, count in sorted(faults.items())}


def bugs(first: int) -> dict[str, float]:
    runner.warm()
    figures = {}
    for name, bug in worlds.bugs.BUGS.items():
        draw = transport.scenario_of if bug in worlds.bugs.TRANSPORT else scenario_of
        result = runner.found(bug, first, MOST_SEEDS, draw)
        figures[f"bug_{name}_seeds"] = float("1e9" if result is None else result[0])
        say(f"seeds: {name}: " + ("not found" if result is None else f"{result[0]}, {result[1].broken[0]}"))
    return figures


if __name__ == "__main__":
    given = options(minutes=0.0, first=1, cores=1, bugs=False)
    if given.bugs:
        run(
            "seeds",
            lambda quick: bugs(given.first),
            {f"bug_{name}_seeds": ("<=", 500.0) for name in worlds.bugs.BUGS},
        )
    else:
        play = lambda quick: measure(given.minutes or (0.5 if quick else 5.0), given.first, given.cores)  # noqa: E731
        run("seeds", play, TARGETS, seeds=[given.first])
