"""Emulated GPUs on this machine's clock: how far steps are off from what `perf` predicts, at speed-up 1.

A tiny model computes while the engine acts as a GPU with a large one. Per shape the mean of steps in a row counts,
end to end: a busy machine wakes sleepers late, which the next step makes up for. Then a pipeline of two emulated
GPUs: two groups of requests at once take as long as one alone if stages overlap fully (1), twice as long if not at
all (2); a prompt in two micro-batches against one (0.75 at best); the engine's loop with two lanes against one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

from parts.common import run
from potluck.catalog import models, nodes
from potluck.cli.engine.emulate import emulation
from potluck.core.replica.batch import BatchLimits
from potluck.core.values.model import DenseFfn, FullAttention, Layer, Model
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.emulated import StepPacer, steps_of
from potluck.engine.compute.executor import Executor, RunnerSize, SequenceWork, StepInputs, TokenDraw
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import Runner
from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.loop.jobs import Job, OutputToken
from potluck.engine.model.checkpoint import RandomSource
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.pipeline.launch import launch, parse_stages
from potluck.perf.phases import decode_step_s
from potluck.perf.step_timer import StepTimer
from potluck.perf.timers.engine_host import NO_HOST
from potluck.perf.timers.roofline import roofline

LAYER = Layer(FullAttention(2, 1, 16, 16), DenseFfn(64))
SMALL = EngineModelConfig(Model("tiny", 32, 256, (LAYER,) * 2, 8192))
SIZE = RunnerSize(34, 34 * 160, 2560, 2048)
DECODES, PROMPTS = ((0, 1, 128), (0, 8, 512), (0, 32, 1024)), ((128, 0, 0), (512, 0, 0), (1024, 0, 0))
SHAPES = (*DECODES, *PROMPTS, (256, 8, 512), (512, 16, 1024))  # (prompt tokens, decodes, context of each).
CASES = {"a10_8b": ("A10", "Llama-3.1-8B"), "l40s_8b": ("L40S", "Llama-3.1-8B")}
TARGETS = {"worst_mean_step_error": ("<=", 0.03)}
BATCH = 16


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
    shape = (64, 500, 2.0) if quick else (128, 1000, 1.0)
    return figures | overlap(10 if quick else 30) | lanes(*shape)


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


def overlap(rounds: int) -> dict[str, float]:
    """A pipeline of two emulated A10, each a process: how far its stages work at once."""
    like = emulation("A10,A10:llama-3.1-8b")
    executor = launch(SMALL, like.stages(parse_stages("1,1")), SIZE, seed=1, threads=1)
    lanes = [[executor.open() for _ in range(BATCH)] for _ in range(2)]
    for row in (item for lane in lanes for item in lane):
        executor.grow(row, 2 * rounds + 20)
    executor.step([SequenceWork(row, 0, [1] * 8, "none") for lane in lanes for row in lane], [])

    def begin(lane: list[int]) -> Callable[[], list[SampledToken]]:
        works = [SequenceWork(row, executor.held(row), [1]) for row in lane]
        return executor.begin(StepInputs(works, [TokenDraw(Sampling(), 1)] * len(works)))

    began = time.monotonic()
    for _ in range(rounds):
        begin(lanes[0])()
    alone_s = time.monotonic() - began
    began = time.monotonic()
    under_way = [begin(lane) for lane in lanes]
    for _ in range(rounds - 1):
        for index, lane in enumerate(lanes):
            under_way[index]()
            under_way[index] = begin(lane)
    for land in under_way:
        land()
    both_s = time.monotonic() - began
    for row in (item for lane in lanes for item in lane):
        executor.close(row)
    prompt_s = {}
    for batches in (1, 2):
        executor._batches = batches
        times = []
        for _ in range(3):
            row = executor.open()
            executor.grow(row, 2048)
            began = time.monotonic()
            executor.step([SequenceWork(row, 0, [1] * 2048, "none")], [])
            times.append(time.monotonic() - began)
            executor.close(row)
        prompt_s[batches] = statistics.median(times)
    executor.shutdown()
    ratio = prompt_s[2] / prompt_s[1]
    return {"decode_two_lanes_over_one": both_s / alone_s, "prompt_two_micro_batches_over_one": ratio}


def lanes(requests: int, context: int, speed_up: float) -> dict[str, float]:
    """The same pipeline behind the engine's loop, with a batch for each stage against one for both: output tokens per
    second while all requests decode, over what `perf` says it should be."""
    like = emulation("A10,A10:llama-3.1-8b", speed_up)
    size = RunnerSize(requests + 4, requests * (context // 16 + 8), context + 100, 2048)
    executor = launch(SMALL, like.stages(parse_stages("1,1")), size, seed=1, threads=1)
    speeds = {}
    for count in (1, 2):
        executor.microbatches = count
        speeds[count] = decode_speed(executor, requests, context)
    executor.shutdown()
    stage = roofline(like.model, like.nodes[0][0], 1, layers=range(like.model.layer_count // 2), host=NO_HOST)
    alone, halved = (float(decode_step_s(stage, n, context)[0]) for n in (requests, requests // 2))
    return {"loop_lanes_speed_up": speeds[2] / speeds[1], "loop_lanes_speed_up_predicted": alone / halved}


def decode_speed(executor: Executor, requests: int, context: int) -> float:
    firsts: set[int] = set()
    loop = EngineLoop(
        executor,
        BatchLimits(executor.size.blocks, 2048, requests),
        lambda said: firsts.update(key for key, event in said if isinstance(event, OutputToken)),
    )
    for key in range(requests):
        prompt = tuple((key * 31 + place * 7) % 256 for place in range(context))
        loop.submit(Job(key, prompt, output_tokens=90), 0.0)
    while len(firsts) < requests:
        loop.turn(0.0)
    before, began = loop.counters.output_tokens, time.monotonic()
    for _ in range(40 * len(loop.microbatches.all)):
        loop.turn(0.0)
    speed = (loop.counters.output_tokens - before) / (time.monotonic() - began)
    for key in range(requests):
        loop.cancel(key, 0.0)
    while loop.turn(0.0):
        pass
    loop.check()
    return speed


if __name__ == "__main__":
    run("emulate", measure, TARGETS, seeds=(1,), quick_without="all cases but one, most steps")
