"""Questions about phases, answered by any StepTimer: prefill, decode, chunked prefill."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from potluck.perf.step import Floats, StepTimer, steps

CHUNK_TOKENS = 2048
"""Token budget of a chunked-prefill iteration when nothing else is said."""


def prefill_s(timer: StepTimer, tokens: ArrayLike, cached: ArrayLike = 0.0) -> Floats:
    """Seconds to prefill prompts alone, each in one step, behind a cached prefix."""
    return timer.step_s(steps(tokens, cached))


def decode_step_s(timer: StepTimer, requests: ArrayLike, context: ArrayLike) -> Floats:
    """Seconds of one decode step of so many requests with a mean context of so many tokens."""
    count = np.asarray(requests, np.float64)
    return timer.step_s(steps(decodes=count, decode_context=count * np.asarray(context, np.float64)))


def chunked_iteration_s(
    timer: StepTimer, chunk: ArrayLike, cached: ArrayLike, requests: ArrayLike, context: ArrayLike
) -> Floats:
    """Seconds of an iteration that carries a prefill chunk beside decodes."""
    count = np.asarray(requests, np.float64)
    return timer.step_s(steps(chunk, cached, count, count * np.asarray(context, np.float64)))


def chunked_prefill_s(
    timer: StepTimer,
    tokens: int,
    chunk: int = CHUNK_TOKENS,
    *,
    requests: float = 0.0,
    context: float = 0.0,
) -> float:
    """Seconds until a prompt is prefilled in chunks, `requests` decodes riding along in every iteration."""
    starts = np.arange(0, tokens, chunk, dtype=np.float64)
    sizes = np.minimum(chunk, tokens - starts)
    return float(chunked_iteration_s(timer, sizes, starts, requests, context).sum())
