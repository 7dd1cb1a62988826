"""The simulator's speed: requests per CPU-second, memory, and whether the cost per request stays flat.

Lengths of Azure's conversation trace, at 0.7 of what the fleet sustains; per-request records are kept. For scale: a
bare loop that advances one replica in closed form. Queueing theory is checked on long runs. Disaggregated runs share
prefixes (0.3 of the prompt tokens) in blocks of 512 tokens, as Mooncake's traces do, and of 16. Where a compiled copy
lies in build/compiled (`make compiled`), figures are of that one, beside `interpreted_...` of the source.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from math import factorial, inf

import numpy as np

from parts import simulate_fleets as fleets
from parts.common import COMPILED, ROOT, compiled_copy, cpu_s, run, say
from potluck.core.replica.batch import FINISHED, BatchLimits
from potluck.core.values.plan import Confidence
from potluck.perf.step_timer import Floats, StepBatch
from potluck.perf.timers.roofline import roofline
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim import step_table as step_table_module
from potluck.sim.run import simulate
from potluck.sim.sim_engine import SimEngine, replica_limits
from potluck.sim.sim_settings import SimSettings
from potluck.sim.step_table import step_table

SEED = 5
TARGETS = {
    "aggregated_requests_per_cpu_s": (">=", 30_000.0),
    "eight_replicas_requests_per_cpu_s": (">=", 30_000.0),
    "disaggregated_requests_per_cpu_s": (">=", 10_000.0),
    "million_requests_gb": ("<=", 1.0),
    "cost_growth_with_requests": ("<=", 2.0),
    "cost_growth_with_replicas": ("<=", 2.0),
    "md1_wait_error": ("<=", 0.01),
    "mmc_sojourn_error": ("<=", 0.01),
}
MEMORY = """
import sys
sys.path[:0] = [{folder!r}]
from parts import common
from parts import simulate_fleets as fleets
from potluck.sim.run import simulate
problem = fleets.aggregated(8)
result = simulate(problem, fleets.requests(problem, {count}, {seed}))
print(common.peak_bytes())
"""


def measure(quick: bool) -> dict[str, float]:
    """Both, where there are both."""
    interpreted = step_table_module.__file__.endswith(".py")
    if not interpreted or not compiled_copy():
        return {"compiled": float(not interpreted)} | everything(quick)
    say("interpreted ...")
    ours = speeds(quick) | {"cost_growth_with_replicas": growth_with_replicas(quick)}
    say("compiled ...")
    command = [sys.executable, __file__, "--json", *(["--quick"] if quick else [])]
    environment = os.environ | {"PYTHONPATH": str(COMPILED)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout)["figures"]
    return figures | {f"interpreted_{name}": value for name, value in ours.items()}


def speeds(quick: bool) -> dict[str, float]:
    count, repeats = (10_000, 2) if quick else (50_000, 5)
    one, eight, combos = fleets.aggregated(1), fleets.aggregated(8), fleets.combos(4)
    return {
        "replica_alone_requests_per_cpu_s": count / replica_alone_s(count, repeats),
        "aggregated_requests_per_cpu_s": count / run_s(one, count, repeats),
        "eight_replicas_requests_per_cpu_s": count / run_s(eight, count, repeats),
        "disaggregated_requests_per_cpu_s": count / run_s(combos, count, repeats, 512),
    }


def everything(quick: bool) -> dict[str, float]:
    """Quick runs are shorter, so that flatness and memory are seen over a smaller range."""
    eight, combos = fleets.aggregated(8), fleets.combos(4)
    figures = speeds(quick)
    few = 2_000 if quick else 10_000
    figures["disaggregated_small_blocks_requests_per_cpu_s"] = few / run_s(combos, few, 1, 16)
    figures["stepping_over_jumping"] = stepping_over_jumping(2_000)
    small, large = (5_000, 40_000) if quick else (10_000, 1_000_000)
    each_s = {size: run_s(eight, size, 3 if size == small else 1) / size for size in (small, large)}
    figures["cost_growth_with_requests"] = each_s[large] / each_s[small]
    figures["cost_growth_with_replicas"] = growth_with_replicas(quick)
    figures["million_requests_gb"] = million_gb(quick)
    figures |= queueing(200_000 if quick else 2_000_000)
    return figures


def growth_with_replicas(quick: bool) -> float:
    """Cost per request with very many replicas, over that with one."""
    count, repeats, most = (10_000, 2, 100) if quick else (50_000, 5, 1000)
    many_s = run_s(fleets.aggregated(most), count, repeats)
    return many_s / run_s(fleets.aggregated(1), count, repeats)


def run_s(problem: ResolvedPlan, count: int, repeats: int, block_tokens: int = 0) -> float:
    """CPU-seconds of a whole run, from the plan to the records; with shared prefixes in such blocks, if any."""
    made = fleets.requests(problem, count, SEED, block_tokens)

    def once() -> None:
        gc.collect()
        simulate(problem, made, seed=SEED)

    return cpu_s(once, repeats)


def stepping_over_jumping(count: int) -> float:
    """What it costs to go step by step, as a multiple."""
    problem = fleets.aggregated(1)
    made = fleets.requests(problem, count, SEED)
    both = [
        cpu_s(lambda on=on: simulate(problem, made, seed=SEED, settings=SimSettings(fast_forward=on)))
        for on in (False, True)
    ]
    return both[0] / both[1]


def replica_alone_s(count: int, repeats: int) -> float:
    made = fleets.requests(fleets.aggregated(1), count, SEED)
    columns = (made.arrival_s, made.prompt_tokens, made.output_tokens)
    arrivals_s, prompts, outputs = (column.tolist() for column in columns)
    table = step_table(roofline(fleets.LLAMA, fleets.NODE, 1))
    limits = replica_limits(table, 28_000)
    return cpu_s(lambda: ends_s(SimEngine(table, limits), arrivals_s, prompts, outputs), repeats)


def ends_s(sim_engine: SimEngine, when_s: list[float], prompts: list[int], outputs: list[int]) -> list[float]:
    result, place, count = [0.0] * len(when_s), 0, len(when_s)
    while True:
        due_s = sim_engine.wake_s
        if place < count and when_s[place] < due_s:
            sim_engine.add(when_s[place], place, prompts[place], 0, outputs[place])
            place += 1
        elif due_s < inf:
            for at_s, kind, key in sim_engine.advance(due_s):
                if kind == FINISHED:
                    result[key] = at_s
        else:
            return result


def million_gb(quick: bool) -> float:
    """Peak memory of a process that simulates a million requests; quickly, on the line through two smaller runs."""
    if not quick:
        return peak_gb(1_000_000)
    few, more = 20_000, 60_000
    few_gb, more_gb = peak_gb(few), peak_gb(more)
    return few_gb + (more_gb - few_gb) * (1_000_000 - few) / (more - few)


def peak_gb(count: int) -> float:
    code = MEMORY.format(folder=str(ROOT / "benchmarks"), seed=SEED, count=count)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return float(done.stdout) / 1e9


class Steady:
    """A StepTimer: every step takes as long."""

    confidence: Confidence = "assumed"

    def __init__(self, seconds: float) -> None:
        self._s = seconds

    def step_s(self, batch: StepBatch) -> Floats:
        return np.where(batch.tokens > 0, self._s, 0.0)


def queueing(count: int) -> dict[str, float]:
    """A replica of equal steps against M/D/1 (one slot, one step) and M/M/c (c slots, geometric answers)."""
    rng, load = np.random.default_rng(SEED), 0.5
    arrivals_s = np.cumsum(rng.exponential(1.0 / load, count))
    ours = np.array(_served(arrivals_s, [1] * count, 1, 1.0)) - arrivals_s
    wait_s = load / (2.0 * (1.0 - load))
    servers, load, mean_steps = 4, 0.7, 400
    many_s = np.cumsum(rng.exponential(1.0 / (load * servers), count))
    outputs = rng.geometric(1.0 / mean_steps, count)
    # An arrival waits for the step under way: half a step when there is one, which is nearly always.
    step_s = 1.0 / mean_steps
    sojourn_s = np.array(_served(many_s, outputs.tolist(), servers, step_s)) - many_s - step_s / 2
    offered = servers * load
    full = offered**servers / factorial(servers) / (1.0 - load)
    busy = full / (sum(offered**k / factorial(k) for k in range(servers)) + full)
    expected_s = 1.0 + busy / (servers * (1.0 - load))
    return {
        "md1_wait_error": abs((float(ours.mean()) - 1.0) / wait_s - 1.0),
        "mmc_sojourn_error": abs(float(sojourn_s.mean()) / expected_s - 1.0),
    }


def _served(arrivals_s: Floats, outputs: list[int], slots: int, step_s: float) -> list[float]:
    limits = BatchLimits(1 << 24, token_budget=1 << 20, max_running=slots)
    sim_engine = SimEngine(step_table(Steady(step_s)), limits)
    return ends_s(sim_engine, arrivals_s.tolist(), [1] * len(outputs), outputs)


if __name__ == "__main__":
    run("simulate", measure, TARGETS, seeds=[SEED], quick_without="large runs, most repeats")
