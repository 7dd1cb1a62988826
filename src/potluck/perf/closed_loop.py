"""What a benchmark sees of a replica that always has C requests under way, all of one length.

A client sends the next request when one ends. Of C requests B are in the engine, the others wait for its memory.
With steps of T seconds on average (`throughput.py`) and O tokens an answer, the first of them with the prompt,

    throughput X = C / (request + C T (O - 1) / B)             request: tokenising, HTTP
    TTFT = request + what is left of the running step + own steps (1 + ahead) + burst x all others' / 2 + (C - B) / X
    TPOT = (C / X - TTFT) / (O - 1)                            Little's law: what is no wait is answering

`ahead` and `burst` say how the client's requests meet: a share of them (those that a run begins with; all of them
where an engine puts prompts first) finds all others' prompts at once; the others find as many as came back together.
A service whose requests come by chance has neither, but queues: that is for the planner (`plan.timing.rates`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.perf.kv_capacity import STEP_TOKENS
from potluck.perf.phases import prompts_in_step, prompts_s
from potluck.perf.step_timer import Floats, StepTimer
from potluck.perf.throughput import MAX_BATCH, MixedSteps, mixed_steps
from potluck.perf.timers.engine_host import BenchClient, EngineHost


@dataclass(frozen=True, slots=True)
class BenchReport:
    """As a benchmark would report it, run by run."""

    requests_per_s: Floats
    ttft_s: Floats
    tpot_s: Floats


@dataclass(frozen=True, slots=True)
class RunWork:
    """The GPU's part of several runs: steps without a host, and what surrounds them."""

    concurrency: Floats
    answers: Floats
    """Tokens of an answer after the first."""
    layers: Floats
    crowd_s: Floats
    """A step of as many whole prompts as there is room for, alone."""
    crowd: Floats
    """How many these are."""
    steps: MixedSteps

    def where(self, mask: NDArray[np.bool_]) -> RunWork:
        """Some of the runs."""
        return _columns(lambda arrays: arrays[0][mask], (self,))


def run_work(
    timer: StepTimer,
    layers: int,
    concurrency: int,
    input_tokens: int,
    output_tokens: int,
    memory_batch: int,
    budget_tokens: int = STEP_TOKENS,
) -> RunWork:
    """One run on a replica whose memory holds so many requests; `timer` has no host."""
    batch = np.array([float(max(1, min(concurrency, memory_batch, MAX_BATCH)))])
    answers, crowd = max(output_tokens - 1.0, 1.0), prompts_in_step(input_tokens, budget_tokens)
    return RunWork(
        np.array([float(concurrency)]),
        np.array([answers]),
        np.array([float(layers)]),
        prompts_s(timer, crowd, input_tokens, 0.0, budget_tokens),
        np.array([float(crowd)]),
        mixed_steps(timer, batch, input_tokens, answers, 0, budget_tokens),
    )


def together(works: Sequence[RunWork]) -> RunWork:
    """Runs side by side."""
    return _columns(np.concatenate, works)


def slowed(plain_work: RunWork, doubled_work: RunWork, times: float) -> RunWork:
    """Runs with some part of all their steps so many times as long, from those with it as it is and twice as long."""
    return _columns(
        lambda arrays: arrays[0] + (times - 1.0) * (arrays[1] - arrays[0]), (plain_work, doubled_work)
    )


def _columns(change: Callable[[list[Floats]], Floats], works: Sequence[RunWork]) -> RunWork:
    """Every column changed alike."""
    steps = [item.steps for item in works]
    parts = {item.name: change([getattr(step, item.name) for step in steps]) for item in fields(MixedSteps)}
    plain: dict[str, Any] = {"steps": MixedSteps(**parts)}
    for field in fields(RunWork):
        if field.name not in plain:
            plain[field.name] = change([getattr(work, field.name) for work in works])
    return RunWork(**plain)


def served(work: RunWork, host: EngineHost, client: BenchClient) -> BenchReport:
    """What the runs report with an engine's host and a client."""
    steps, open_requests = work.steps.hosted(host, work.layers), work.concurrency
    whole_s = client.request_s + open_requests * steps.step_s * work.answers / steps.decodes
    between_s = whole_s / open_requests
    ttft_s = client.request_s + steps.wait_s + steps.prompt_s * (1.0 + client.ahead)
    crowd_s = work.crowd_s + host.fixed_s + host.sequence_s * work.crowd
    crowd_s = np.maximum(crowd_s, host.launch_s * work.layers) / work.crowd
    ttft_s = ttft_s + client.burst * crowd_s * (steps.decodes - 1.0) / 2
    ttft_s = ttft_s + (open_requests - steps.decodes) * between_s
    ttft_s = np.minimum(ttft_s, 0.95 * whole_s)
    return BenchReport(1.0 / between_s, ttft_s, (whole_s - ttft_s) / work.answers)
