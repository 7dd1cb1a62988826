"""The performance model's own cost: a million step times through the vectorised call, and `potluck estimate`.

H100 carries residual surfaces, H200 none; GPT-OSS-120B mixes full and windowed layers and has experts. The
plain loop asks for the same steps one at a time.
"""

from __future__ import annotations

import os
import statistics
import tempfile

import numpy as np

from parts.common import POTLUCK, child_cpu_s, cpu_s, run
from potluck.catalog import models, nodes
from potluck.perf.step_timer import StepBatch, steps
from potluck.perf.timers.roofline import RooflineTimer, roofline

SEED = 20
STEPS = 1_000_000
LOOP_STEPS = 1000
CASES = {
    "dense_with_surface": ("Llama-3.1-8B", "H100-SXM"),
    "dense_without_surface": ("Llama-3.1-8B", "H200"),
    "hybrid": ("GPT-OSS-120B", "H100-SXM"),
}
ESTIMATES = {"estimate": ("Llama-3.1-8B", "2xL40S"), "estimate_eight_gpus": ("GPT-OSS-120B", "8xH100-SXM")}
TARGETS = {f"million_{name}_cpu_s": ("<=", 1.0) for name in CASES} | {
    f"{name}_median_cpu_s": ("<", 0.5) for name in ESTIMATES
}


def mixed_steps(count: int, chunks: int = 1) -> StepBatch:
    """Steps as a planner asks for them: chunks behind cached context beside decodes, in any proportion."""
    rng = np.random.default_rng(SEED)
    decodes = rng.integers(0, 257, count)
    new, cached = (rng.integers(0, most, (count, chunks)) for most in (2049, 8193))
    return steps(new, cached, decodes, decodes * rng.integers(1, 4097, count))


def measure(quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    repeats = 3 if quick else 7
    many, few = mixed_steps(STEPS), mixed_steps(LOOP_STEPS)
    for name, (model, node) in CASES.items():
        timer = roofline(models.model(model), nodes.node_type(node), 1)
        figures[f"million_{name}_cpu_s"] = cpu_s(lambda timer=timer: timer.step_s(many), repeats)
        loop_s = cpu_s(lambda timer=timer: one_by_one(timer, few), 2) * STEPS / LOOP_STEPS
        figures[f"loop_over_vectorised_{name}"] = loop_s / figures[f"million_{name}_cpu_s"]
    figures["build_timer_cpu_s"] = cpu_s(build, repeats)
    quarter = mixed_steps(STEPS // 4, chunks=4)
    timer = roofline(models.model("Llama-3.1-8B"), nodes.node_type("H100-SXM"), 1)
    figures["quarter_million_of_four_chunks_cpu_s"] = cpu_s(lambda: timer.step_s(quarter), repeats)
    for name, (model, node) in ESTIMATES.items():
        figures |= estimate_figures(name, model, node, 5 if quick else 15)
    return figures


def one_by_one(timer: RooflineTimer, batch: StepBatch) -> float:
    total = 0.0
    for row in range(len(batch)):
        new, cached = batch.chunk_new[row : row + 1], batch.chunk_cached[row : row + 1]
        total += float(timer.step_s(steps(new, cached, batch.decodes[row], batch.decode_context[row]))[0])
    return total


def build() -> RooflineTimer:
    """What a planner pays once for each model, node type and degree."""
    return roofline(models.model("GPT-OSS-120B"), nodes.node_type("8xH100-SXM"), 8)


def estimate_figures(name: str, model: str, node: str, repeats: int) -> dict[str, float]:
    """CPU time of `potluck estimate` in fresh processes that find their bytecode, as once installed."""
    command = [*POTLUCK, "estimate", "--model", model, "--node", node, "--input", "1024", "--output", "256"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = folder
        child_cpu_s(command, environment)  # compiles
        times = [child_cpu_s(command, environment) for _ in range(repeats)]
    return {f"{name}_min_cpu_s": min(times), f"{name}_median_cpu_s": statistics.median(times)}


if __name__ == "__main__":
    run("step_time", measure, TARGETS, seeds=(SEED,), quick_without="half of the repeats")
