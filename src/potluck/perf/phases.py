"""Questions about phases, answered by any StepTimer: prefill, decode, chunked prefill."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from potluck.perf.kv_capacity import STEP_TOKENS
from potluck.perf.step_timer import Floats, StepTimer, steps

CHUNK_TOKENS = 2048
"""Token budget of a step with prompts beside answers when nothing else is said; prompts alone have STEP_TOKENS."""
STRAIGHT = 0.05
"""Decode steps that are no farther from a line count as on it."""
MOST_KNEES = 6
MOST_PROMPTS = 64
"""Whole prompts that are reckoned with in one step: more of them gain nothing that could be seen."""


def prefill_s(timer: StepTimer, tokens: ArrayLike, cached: ArrayLike = 0.0) -> Floats:
    """Seconds to prefill prompts alone, each in one step, behind a cached prefix."""
    return timer.step_s(steps(tokens, cached))


def decode_step_s(timer: StepTimer, requests: ArrayLike, context: ArrayLike) -> Floats:
    """Seconds of one decode step of so many requests with a mean context of so many tokens."""
    count = np.asarray(requests, np.float64)
    return timer.step_s(steps(decodes=count, decode_context=count * np.asarray(context, np.float64)))


def decode_knees(timer: StepTimer, batch: int, context: float) -> tuple[tuple[int, float], ...]:
    """Batches below this one, and their steps, so that lines between them are off by no more than STRAIGHT: the worst
    are added until that is so, or there are MOST_KNEES."""
    powers = [2**power for power in range(1, 12) if 2**power < batch]
    sizes = np.unique([1, *powers, *(item + 1 for item in powers), 3 * batch // 4, batch])
    if batch < 4:
        return ()
    times = decode_step_s(timer, sizes, context)
    chosen = [0, len(sizes) - 1]
    for _ in range(MOST_KNEES):
        off = np.abs(np.interp(sizes, sizes[chosen], times[chosen]) / times - 1.0)
        if off.max() <= STRAIGHT:
            break
        chosen = sorted([*chosen, int(off.argmax())])
    return tuple((int(sizes[place]), float(times[place])) for place in chosen[1:-1])


def chunked_iteration_s(
    timer: StepTimer, chunk: ArrayLike, cached: ArrayLike, requests: ArrayLike, context: ArrayLike
) -> Floats:
    """Seconds of an iteration that carries a prefill chunk beside decodes."""
    count = np.asarray(requests, np.float64)
    return timer.step_s(steps(chunk, cached, count, count * np.asarray(context, np.float64)))


def prompts_in_step(tokens: int, budget: int = STEP_TOKENS) -> int:
    """How many whole prompts of so many new tokens a prefill replica takes into one step."""
    return min(max(1, budget // max(1, tokens)), MOST_PROMPTS)


def prompts_s(
    timer: StepTimer, prompts: ArrayLike, tokens: int, cached: float = 0.0, budget: int = STEP_TOKENS
) -> Floats:
    """Seconds until so many prompts are prefilled together: in one step within the budget, else one in chunks."""
    if tokens > budget:
        alone_s = chunked_prefill_s(timer, tokens, budget, cached=cached)
        return np.atleast_1d(np.asarray(prompts, np.float64)) * alone_s
    count = np.atleast_1d(np.asarray(prompts, np.int64))
    there = np.arange(int(count.max()))[None, :] < count[:, None]
    return timer.step_s(steps(np.where(there, float(tokens), 0.0), np.where(there, float(cached), 0.0)))


def chunked_prefill_s(
    timer: StepTimer,
    tokens: int,
    chunk: int = CHUNK_TOKENS,
    *,
    requests: float = 0.0,
    context: float = 0.0,
    cached: float = 0.0,
) -> float:
    """Seconds until a prompt is prefilled in chunks, `requests` decodes riding along in every iteration."""
    times = chunked_prefills_s(timer, tokens, chunk, requests=requests, context=context, cached=cached)
    return float(times[0])


def chunked_prefills_s(
    timer: StepTimer,
    tokens: int,
    chunk: int = CHUNK_TOKENS,
    *,
    requests: ArrayLike = 0.0,
    context: ArrayLike = 0.0,
    cached: float = 0.0,
) -> Floats:
    """`chunked_prefill_s` for many numbers of decodes at once, behind a cached prefix."""
    count, behind = np.broadcast_arrays(np.atleast_1d(np.asarray(requests, np.float64)), context)
    starts = np.arange(0, tokens, chunk, dtype=np.float64)
    sizes = np.minimum(chunk, tokens - starts)
    rows, number = len(count), len(starts)
    times = chunked_iteration_s(
        timer,
        np.tile(sizes, rows),
        np.tile(starts + cached, rows),
        np.repeat(count, number),
        np.repeat(behind, number),
    )
    return np.asarray(times.reshape(rows, number).sum(axis=1), np.float64)
