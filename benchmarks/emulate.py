"""Emulated GPUs on this machine's clock: how far steps are off from what `perf` predicts, at speed-up 1.

A tiny model computes while the engine acts as a GPU with a large one. Per shape the mean of steps in a row counts,
end to end: a busy machine wakes sleepers late, which the next step makes up for.
"""

from __future__ import annotations

import itertools
import statistics
import time

from parts.common import run
from potluck.catalog import models, nodes
from potluck.core.values.model import DenseFfn, FullAttention, Layer, Model
from potluck.core.values.sampling import Sampling
from potluck.engine.compute.emulated import StepPacer, steps_of
from potluck.engine.compute.executor import Executor, RunnerSize, SequenceWork, TokenDraw
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import Runner
from potluck.engine.model.checkpoint import RandomSource
from potluck.engine.model.config import EngineModelConfig
from potluck.perf.step_timer import StepTimer
from potluck.perf.timers.roofline import roofline

LAYER = Layer(FullAttention(2, 1, 16, 16), DenseFfn(64))
SMALL = EngineModelConfig(Model("tiny", 32, 256, (LAYER,) * 2, 8192))
SIZE = RunnerSize(34, 34 * 160, 2560, 2048)
DECODES, PROMPTS = ((0, 1, 128), (0, 8, 512), (0, 32, 1024)), ((128, 0, 0), (512, 0, 0), (1024, 0, 0))
SHAPES = (*DECODES, *PROMPTS, (256, 8, 512), (512, 16, 1024))  # (prompt tokens, decodes, context of each).
CASES = {"a10_8b": ("A10", "Llama-3.1-8B"), "l40s_8b": ("L40S", "Llama-3.1-8B")}
TARGETS = {"worst_mean_step_error": ("<=", 0.03)}


def measure(quick: bool) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    local = LocalExecutor(Runner(SMALL, RandomSource(1), SIZE), SIZE)
    figures: dict[str, float] = {}
    means, singles, late = [], [], 0
    for name, (node, model) in list(CASES.items())[: 1 if quick else None]:
        timer = roofline(models.model(model), nodes.node_type(node), 1)
        paced = LocalExecutor(local.runner, local.size, StepPacer(timer))
        for shape in SHAPES:
            mean, item = step_errors(paced, local, shape, timer, 12 if quick else 30)
            figures[f"{name}_{shape[0]}_new_{shape[1]}x{shape[2]}"] = mean
            means.append(abs(mean))
            singles += item
        late += paced.pacer.late_steps
    singles.sort()
    figures["worst_mean_step_error"] = max(means)
    figures["single_step_error_median"] = statistics.median(singles)
    figures["single_step_error_p90"] = singles[len(singles) * 9 // 10]
    figures["late_steps"] = float(late)
    return figures


def step_errors(
    paced: LocalExecutor, inner: Executor, shape: tuple[int, int, int], timer: StepTimer, repeats: int
) -> tuple[float, list[float]]:
    """(error of the mean time from one step's end to the next one's, errors of the single ones) of one shape.

    Contexts are filled by the inner executor, without waiting for a GPU.
    """
    new, decodes, context = shape
    rows = [inner.open() for _ in range(decodes)]
    for row in rows:
        inner.grow(row, context + repeats + 2)
        inner.step([SequenceWork(row, 0, [1] * context, "none")], [])
    ends, asked = [], []
    for _ in range(repeats + 1):
        works = [SequenceWork(row, paced.held(row), [1]) for row in rows]
        extra = [paced.open()] if new else []
        for row in extra:
            paced.grow(row, new)
            works.append(SequenceWork(row, 0, [1] * new))
        paced.step(works, [TokenDraw(Sampling(), 1)] * len(works))
        ends.append(time.monotonic())
        asked.append(works)
        for row in extra:
            paced.close(row)
    for row in rows:
        paced.close(row)
    dues = [float(timer.step_s(steps_of(works))[0]) for works in asked[1:]]
    gaps = [after - before for before, after in itertools.pairwise(ends)]
    return sum(gaps) / sum(dues) - 1, [abs(gap / due - 1) for gap, due in zip(gaps, dues, strict=True)]


if __name__ == "__main__":
    run("emulate", measure, TARGETS, seeds=(1,), quick_without="all cases but one, most steps")
