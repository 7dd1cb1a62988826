"""Compiled and interpreted code give the same log (`make compiled` builds it)."""

from __future__ import annotations

import os
import subprocess
import sys
from filecmp import cmp
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE, COMPILED = ROOT / "src", ROOT / "build" / "compiled"
PROGRAM = """
import sys, hashlib
sys.path[:0] = [{tests!r}]
import io
from sim_fleets import closed_plan, combo, decode_only, flow_plan, load, mixed, prefill_only, problem
from potluck.sim.run import simulate
from potluck.sim.world.faults import FaultRates, Faults
import potluck.core.brain.brain, potluck.sim.sim_engine
print(potluck.core.brain.brain.__file__.endswith(".py"), potluck.sim.sim_engine.__file__.endswith(".py"))
plans = (
    closed_plan((combo(1, 2), "east", 1), (mixed(), "west", 2)),
    flow_plan((prefill_only(), "west", 1), (decode_only(), "east", 1)),
)
for plan in plans:
    for faults in (Faults(), Faults(random=FaultRates(*[300.0] * 6))):
        for fast in (True, False):
            log = io.StringIO()
            from potluck.sim.sim_settings import SimSettings
            result = simulate(problem(plan), load(150, 6.0, blocks=2), log=log, faults=faults,
                              settings=SimSettings(fast_forward=fast))
            print(hashlib.sha256(log.getvalue().encode()).hexdigest(), len(log.getvalue()))
"""


def stale() -> str:
    if not (COMPILED / ".made").exists():
        return "nothing is compiled: make compiled"
    for folder in ("core", "sim"):
        for file in (SOURCE / "potluck" / folder).rglob("*.py"):
            made = COMPILED / file.relative_to(SOURCE)
            if not made.exists() or not cmp(file, made, shallow=False):
                return f"{file.relative_to(ROOT)} was changed since: make compiled"
    return ""


def logs(path: Path) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(path)}
    program = PROGRAM.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=300,
    )
    return done.stdout.splitlines()


def test_compiled_and_interpreted_code_give_equal_logs() -> None:
    if why := stale():
        pytest.skip(why)
    interpreted, compiled = logs(SOURCE), logs(COMPILED)
    assert interpreted[0] == "True True"
    assert compiled[0] == "False False"
    assert interpreted[1:] == compiled[1:]
    assert len(set(interpreted)) > 4  # plans and faults do make a difference
