"""Closed-loop benchmark figures of a replica: C concurrent requests of one length.

A client sends the next request when one ends. Of C requests B run in the engine, the others wait for its memory.
With mean steps of T seconds (`throughput.py`) and O tokens an answer, the first of them with the prompt,

    throughput X = C / (request + C T (O - 1) / B)             request: tokenising, HTTP
    TTFT = request + rest of the running step + own steps (1 + ahead) + burst x all others' / 2 + (C - B) / X
    TPOT = (C / X - TTFT) / (O - 1)                            Little's law

`ahead` and `burst` describe how the client's requests meet: a share of them (those at the start of a run; all where
an engine puts prompts first) waits for all others' prompts; the rest for as many as returned together. Services with
random arrivals have neither, but queues, which the planner models (`plan.timing.rates`)."""

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
    """The figures that a benchmark reports, per run."""

    requests_per_s: Floats
    ttft_s: Floats
    tpot_s: Floats


@dataclass(frozen=True, slots=True)
class RunWork:
    """GPU times of several runs: steps without a host, and what surrounds them."""

    concurrency: Floats
    answers: Floats
    """Tokens of an answer after the first."""
    layers: Floats
    full_prompt_step_s: Floats
    """Seconds of a step with as many whole prompts as fit, without decodes."""
    prompts_per_step: Floats
    """The number of those prompts."""
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
    answers, prompts_per_step = max(output_tokens - 1.0, 1.0), prompts_in_step(input_tokens, budget_tokens)
    return RunWork(
        np.array([float(concurrency)]),
        np.array([answers]),
        np.array([float(layers)]),
        prompts_s(timer, prompts_per_step, input_tokens, 0.0, budget_tokens),
        np.array([float(prompts_per_step)]),
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
    full_prompt_step_s = work.full_prompt_step_s + host.fixed_s + host.sequence_s * work.prompts_per_step
    full_prompt_step_s = np.maximum(full_prompt_step_s, host.launch_s * work.layers) / work.prompts_per_step
    ttft_s = ttft_s + client.burst * full_prompt_step_s * (steps.decodes - 1.0) / 2
    ttft_s = ttft_s + (open_requests - steps.decodes) * between_s
    ttft_s = np.minimum(ttft_s, 0.95 * whole_s)
    return BenchReport(1.0 / between_s, ttft_s, (whole_s - ttft_s) / work.answers)
