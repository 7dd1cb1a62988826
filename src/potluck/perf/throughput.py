"""How many requests a second a replica sustains within an objective, and what stops it.

*Mixed* replicas batch prefill chunks with decodes. With B requests decoding, each iteration of T seconds
finishes B / O of them (O output tokens each), so as many new prompts enter and each iteration carries
c = B L / O prompt tokens:

    T(B) = step(chunk c, decodes B, mean context L + O/2)       rate = B / (O T)      TPOT = T
    TTFT = time to prefill L tokens in chunks beside the B decodes

The rate grows with B until memory is full, TPOT or TTFT would break, or a step is all arithmetic. Queueing
is not in here: at the rate returned the replica is busy all the time, and a planner keeps headroom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from potluck.core.values.types import Role, Slo
from potluck.perf.phases import (
    CHUNK_TOKENS,
    chunked_iteration_s,
    chunked_prefills_s,
    decode_step_s,
    prefill_s,
)
from potluck.perf.step import Floats, StepTimer

Limit = Literal["memory", "tpot", "ttft", "compute", "batch"]
MAX_COLUMNS = 64
"""Prompts of an iteration that are told apart; very short ones are lumped."""
MAX_BATCH = 1024
"""Sequences an engine keeps running at once, at most (vLLM's default on large GPUs)."""


@dataclass(frozen=True, slots=True)
class Operating:
    """The best steady state of a replica."""

    requests_per_s: float
    batch: int
    ttft_s: float
    tpot_s: float
    chunk_tokens: float
    """Prompt tokens in each iteration; 0 for a decode replica."""
    limit: Limit
    """What keeps the rate from growing."""


def best_operating(
    timer: StepTimer,
    input_tokens: int,
    output_tokens: int,
    memory_batch: int,
    slo: Slo | None,
    role: Role = "mixed",
    *,
    cached_tokens: int = 0,
) -> Operating | None:
    """The operating point with the highest rate within the objective; None when there is none.

    The first `cached_tokens` of every prompt are there already: in a prefix cache, or from another replica.
    """
    if memory_batch < 1:
        return None
    new_tokens = max(1, input_tokens - cached_tokens)
    if role == "prefill":
        return _prefill(timer, new_tokens, cached_tokens, slo)
    batches = _candidates(min(memory_batch, MAX_BATCH))
    context = input_tokens + output_tokens / 2
    if role == "decode":
        chunk = np.zeros_like(batches)
        step_s = decode_step_s(timer, batches, context)
        ttft_s = step_s
    else:
        chunk = np.minimum(batches * new_tokens / output_tokens, CHUNK_TOKENS)
        behind = cached_tokens + np.maximum(new_tokens - chunk, 0.0) / 2
        prompts = _prompts(chunk, new_tokens)
        # A request that is mid-prefill is not decoding: with more chunk than budget, prefill paces the rest.
        paced = batches * new_tokens / output_tokens / np.maximum(chunk, 1e-9)
        step_s = chunked_iteration_s(timer, prompts, behind[:, None], batches, context)
        step_s = step_s * np.maximum(paced, 1.0)
        ttft_s = chunked_prefills_s(
            timer, new_tokens, requests=batches, context=context, cached=cached_tokens
        )
    rate = batches / (output_tokens * step_s)
    return _choose(batches, chunk, step_s, ttft_s, rate, slo, memory_batch)


def _prompts(chunk: Floats, new_tokens: int) -> Floats:
    """An iteration's prompt tokens as prompts, one column each: attention stays within a prompt."""
    most = float(chunk.max())
    width = max(float(new_tokens), most / MAX_COLUMNS)
    starts = np.arange(int(np.ceil(most / width))) * width
    columns: Floats = np.clip(chunk[:, None] - starts, 0.0, width)
    return columns


def _prefill(timer: StepTimer, new_tokens: int, cached_tokens: int, slo: Slo | None) -> Operating | None:
    """Prompts one after another; batching them gains little once one fills the GPU."""
    ttft_s = float(prefill_s(timer, new_tokens, cached_tokens)[0])
    if slo is not None and ttft_s > slo.ttft_s:
        return None
    return Operating(1.0 / ttft_s, 1, ttft_s, 0.0, float(new_tokens), "compute")


def _candidates(largest: int) -> Floats:
    """1, 2, 3, ... growing by an eighth: fine enough that nothing better lies between by more than that."""
    grid = np.unique(np.geomspace(1, largest, 64).round())
    return np.asarray(grid, np.float64)


def _choose(
    batches: Floats,
    chunk: Floats,
    step_s: Floats,
    ttft_s: Floats,
    rate: Floats,
    slo: Slo | None,
    memory_batch: int,
) -> Operating | None:
    within = np.ones(len(batches), bool)
    if slo is not None:
        within = (step_s <= slo.tpot_s) & (ttft_s <= slo.ttft_s)
    if not within.any():
        return None
    top = int(np.argmax(np.where(within, rate, -1.0)))
    # The last hundredth of the rate would cost a far larger batch, and with it latency.
    best = int(np.flatnonzero(within & (rate >= 0.99 * rate[top]))[0])
    # Steps grow in waves, so the batch just above may serve no more although a larger one would.
    better = np.flatnonzero(rate > rate[top])
    limit: Limit = "compute"
    if slo is not None and len(better):
        limit = "tpot" if step_s[better[0]] > slo.tpot_s else "ttft"
    elif top + 1 == len(batches):
        limit = "memory" if memory_batch <= MAX_BATCH else "batch"
    return Operating(
        float(rate[best]),
        int(batches[best]),
        float(ttft_s[best]),
        float(step_s[best]),
        float(chunk[best]),
        limit,
    )
