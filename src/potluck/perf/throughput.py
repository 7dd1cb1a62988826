"""Throughput of a replica within an SLO, and what limits it.

*Mixed* replicas batch prefill chunks with decodes, as engines do: a waiting prompt enters the next step, as much of
it as the token budget M has room for beside B decodes. With O output tokens a request, B / O prompts of L tokens
enter per step on average, so a share of all steps has a chunk of c tokens and the others have none:

    c = min(max(L, B L / O), M - B)                 share = B L / (O c)
    T(B) = share step(c, B) + (1 - share) step(0, B)         rate = B / (O T)         TPOT = T
    TTFT = the rest of the running step + the steps of a prompt's own chunks beside the B decodes

Where prompts need more than M - B tokens of every step (share > 1), they set the pace: T = share step(c, B). The rate
grows with B until memory is full, TPOT or TTFT would be missed, or steps are compute-bound. Queueing is not included:
at the returned rate the replica is always busy, and a planner keeps headroom.

*Prefill* replicas take as many whole prompts into a step as the budget has room for, and a longer one in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from potluck.core.values.types import Role, Slo
from potluck.perf.kv_capacity import STEP_TOKENS
from potluck.perf.phases import CHUNK_TOKENS, chunked_iteration_s, decode_step_s, prompts_in_step, prompts_s
from potluck.perf.step_timer import Floats, StepTimer, once, steps
from potluck.perf.timers.engine_host import EngineHost
from potluck.perf.timers.pipeline_timer import PipelineRounds, PipelineTimer

Limit = Literal["memory", "tpot", "ttft", "compute", "batch"]
MAX_COLUMNS = 64
"""Prompts of an iteration that are modelled separately; very short ones are merged."""
MAX_BATCH = 1024
"""Sequences an engine keeps running at once, at most (vLLM's default on large GPUs)."""


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The best steady state of a replica."""

    requests_per_s: float
    batch: int
    ttft_s: float
    tpot_s: float
    chunk_tokens: float
    """Prompt tokens of a step that has any; 0 for a decode replica."""
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
) -> OperatingPoint | None:
    """The operating point with the highest rate within the objective; None when there is none.

    The first `cached_tokens` of every prompt are there already: in a prefix cache, or from another replica.
    """
    if memory_batch < 1:
        return None
    new_tokens = max(1, input_tokens - cached_tokens)
    if role == "prefill":
        return _prefill_point(timer, new_tokens, cached_tokens, slo)
    batches = _batch_sizes(min(memory_batch, MAX_BATCH))
    context = input_tokens + output_tokens / 2
    if role == "decode":
        chunk = np.zeros_like(batches)
        step_s = decode_step_s(timer, batches, context)
        ttft_s = step_s
    else:
        mixed = mixed_steps(timer, batches, new_tokens, output_tokens, cached_tokens)
        chunk, step_s, ttft_s = mixed.chunk_tokens, mixed.step_s, mixed.wait_s + mixed.prompt_s
    rate = batches / (output_tokens * step_s)
    return _best_point(batches, chunk, step_s, ttft_s, rate, slo, memory_batch)


def shared_steps(
    timer: StepTimer, input_tokens: int, output_tokens: int, memory_batch: int, cached_tokens: Sequence[int]
) -> MixedSteps | None:
    """Steps of a mixed replica, a row for each number of prompt tokens that are there; None where no KV fits."""
    if memory_batch < 1 or not cached_tokens:
        return None
    batches = _batch_sizes(min(memory_batch, MAX_BATCH))
    cached = np.array(cached_tokens, np.float64)[:, None]
    new = np.maximum(1.0, input_tokens - cached)
    return mixed_steps(timer, batches, new, output_tokens, cached)


def best_shared(
    mixed: MixedSteps, row: int, output_tokens: int, memory_batch: int, slo: Slo
) -> OperatingPoint | None:
    """`best_operating` of a mixed replica for the prompts of one row of `shared_steps`."""
    step_s, ttft_s = mixed.step_s[row], (mixed.wait_s + mixed.prompt_s)[row]
    rate = mixed.decodes / (output_tokens * step_s)
    return _best_point(mixed.decodes, mixed.chunk_tokens[row], step_s, ttft_s, rate, slo, memory_batch)


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Steps of a mixed replica, for each of several numbers of decodes."""

    decodes: Floats
    chunk_tokens: Floats
    """Prompt tokens of a step that has any."""
    prompts: Floats
    """Prompts that these tokens belong to."""
    share: Floats
    """Share of steps with prompt tokens; above 1 prompts wait for room."""
    with_s: Floats
    without_s: Floats
    turns: Floats
    """Steps that a prompt takes."""
    turn_s: Floats

    @property
    def step_s(self) -> Floats:
        """The mean, with chunks and without."""
        return np.asarray(self._even_s * np.maximum(self.share, 1.0), np.float64)

    @property
    def wait_s(self) -> Floats:
        """The mean rest of the step that runs when a prompt arrives."""
        part = np.minimum(self.share, 1.0)
        squares = part * self.with_s**2 + (1.0 - part) * self.without_s**2
        return np.asarray(squares / (2.0 * self._even_s), np.float64)

    @property
    def prompt_s(self) -> Floats:
        """Seconds of a prompt's own steps."""
        return np.asarray(self.turns * self.turn_s, np.float64)

    @property
    def _even_s(self) -> Floats:
        part = np.minimum(self.share, 1.0)
        return np.asarray(part * self.with_s + (1.0 - part) * self.without_s, np.float64)

    def hosted(self, host: EngineHost, layers: float | Floats) -> MixedSteps:
        """These steps with an engine's host time added, where they were timed without one."""
        each_s = host.fixed_s + host.sequence_s * self.decodes
        least_s = host.launch_s * np.asarray(layers, np.float64)
        return replace(
            self,
            with_s=np.maximum(self.with_s + each_s + host.sequence_s * self.prompts, least_s),
            without_s=self.without_s + each_s,
            turn_s=np.maximum(self.turn_s + each_s + host.sequence_s, least_s),
        )


def mixed_steps(
    timer: StepTimer,
    batches: Floats,
    new_tokens: int | Floats,
    output_tokens: float,
    cached_tokens: int | Floats = 0,
    budget_tokens: int = CHUNK_TOKENS,
) -> MixedSteps:
    """Whole chunks under a token budget beside so many decodes.

    New and cached tokens may be columns, of many kinds of prompts at once; then all figures have a row for each.
    """
    context = cached_tokens + new_tokens + output_tokens / 2
    wanted = batches * new_tokens / output_tokens
    room = np.maximum(budget_tokens - batches, 1.0)
    chunk = np.minimum(np.maximum(wanted, new_tokens), room)
    behind = cached_tokens + np.maximum(new_tokens - chunk, 0.0) / 2
    prompts = _prompt_columns(chunk, new_tokens)
    turns = np.ceil(new_tokens / room)
    own = new_tokens / turns
    return MixedSteps(
        batches,
        chunk,
        np.asarray((prompts > 0).sum(axis=-1), np.float64),
        wanted / chunk,
        _iteration_s(timer, prompts, behind, batches, context),
        _iteration_s(timer, np.zeros((*chunk.shape, 1)), np.zeros(1), batches, context),
        turns,
        _iteration_s(timer, own[..., None], cached_tokens + (new_tokens - own) / 2, batches, context),
    )


def _iteration_s(
    timer: StepTimer, prompts: Floats, cached: Floats, batches: Floats, context: float | Floats
) -> Floats:
    """`chunked_iteration_s` for figures in rows, one for each kind of prompt."""
    shape = prompts.shape[:-1]
    cached_tokens, decodes, context_tokens = (
        np.broadcast_to(values, shape).ravel() for values in (cached, batches, context)
    )
    rows = prompts.reshape(-1, prompts.shape[-1])
    return chunked_iteration_s(timer, rows, cached_tokens[:, None], decodes, context_tokens).reshape(shape)


def _prompt_columns(chunk: Floats, new_tokens: int | Floats) -> Floats:
    """An iteration's prompt tokens as prompts, one column each: attention stays within a prompt."""
    most = chunk.max(axis=-1, keepdims=True)
    width = np.maximum(new_tokens, most / MAX_COLUMNS)[..., None]
    starts = np.arange(int(np.ceil(most[..., None] / width).max())) * width
    columns: Floats = np.clip(chunk[..., None] - starts, 0.0, width)
    return columns


def _prefill_point(
    timer: StepTimer, new_tokens: int, cached_tokens: int, slo: Slo | None
) -> OperatingPoint | None:
    most = prompts_in_step(new_tokens)
    step_s = prompts_s(timer, np.arange(1.0, most + 1), new_tokens, cached_tokens)
    within = step_s <= (np.inf if slo is None else slo.ttft_s)
    if not within[0]:
        return None
    rates = np.where(within, np.arange(1, most + 1) / step_s, 0.0)
    best = int(np.argmax(rates))
    limit: Limit = "compute" if within.all() else "ttft"
    chunk = float(min((best + 1) * new_tokens, STEP_TOKENS))
    return OperatingPoint(float(rates[best]), best + 1, float(step_s[best]), 0.0, chunk, limit)


def _batch_sizes(largest: int) -> Floats:
    """Batch sizes 1, 2, 3, ... growing by an eighth, so that a better one between them is better by at most that."""
    grid = once(np.geomspace(1, largest, 64).round())
    return np.asarray(grid, np.float64)


def _best_point(
    batches: Floats,
    chunk: Floats,
    step_s: Floats,
    ttft_s: Floats,
    rate: Floats,
    slo: Slo | None,
    memory_batch: int,
) -> OperatingPoint | None:
    within = np.ones(len(batches), bool)
    if slo is not None:
        within = (step_s <= slo.tpot_s) & (ttft_s <= slo.ttft_s)
    if not within.any():
        return None
    peak = int(np.argmax(np.where(within, rate, -1.0)))
    # The last hundredth of the rate would cost a far larger batch, and with it latency.
    chosen = int(np.flatnonzero(within & (rate >= 0.99 * rate[peak]))[0])
    # Steps grow in waves, so the batch just above may serve no more although a larger one would.
    higher_rates = np.flatnonzero(rate > rate[peak])
    limit: Limit = "compute"
    if slo is not None and len(higher_rates):
        limit = "tpot" if step_s[higher_rates[0]] > slo.tpot_s else "ttft"
    elif peak + 1 == len(batches):
        limit = "memory" if memory_batch <= MAX_BATCH else "batch"
    return OperatingPoint(
        float(rate[chosen]),
        int(batches[chosen]),
        float(ttft_s[chosen]),
        float(step_s[chosen]),
        float(chunk[chosen]),
        limit,
    )


MAX_TPOT_SHARE = 0.7
DEFAULT_UTILIZATION = 0.8
"""Default of h, the utilization by prompts."""
CHUNK_FACTORS = (1.15, 1.3, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Chunk sizes that are tried, in units of the mean need of B decodes."""
MIN_CHUNK_TOKENS, CHUNK_STEP_TOKENS = 16, 8


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of a pipeline's requests in tokens."""

    new: int
    """Prompt tokens that are computed."""
    cached: int
    output: int
    longest: int
    """The longest prompt, which must meet TTFT without a queue."""


@dataclass(frozen=True, slots=True)
class MixedPipeline:
    requests_per_s: float
    ttft_s: float
    tpot_s: float
    batch: int
    """Answers of each batch."""
    chunk_tokens: int

    @property
    def step_tokens(self) -> int:
        """New tokens of a batch's turn."""
        return self.batch + self.chunk_tokens


def best_mixed_pipeline(
    timer: PipelineTimer, lengths: RequestLengths, room: int, slo: Slo, headroom: float = DEFAULT_UTILIZATION
) -> MixedPipeline | None:
    """The best turns within the objective; None where there are none. `room` is how many requests' KV fits.

    N batches take turns, one for each node. A batch of B answers takes a chunk of c tokens of a prompt with it
    whenever one is to be computed; with L new tokens in a prompt and O in an answer that is a share u of its turns.
    With C(c) the time from one turn of a batch to its next,

        C(c)   = max(N I, T)             I: the slowest stage, T: all stages, of B answers and c tokens
        u      = B L / (O c)             as busy as it may be; less than 1, or prompts would wait without end
        TPOT   = u C(c) + (1 - u) C(0)
        TTFT  = ceil(L / c) C(c) (1 + h u / (2 (1 - h u))) + C(c) / 2  a prompt's turns, behind others (M/D/1) when
                                                                             h of that is asked for, after half a turn
        rate   = N B / (O TPOT)

    Larger chunks make turns longer and prompts wait less; B and c are those of the largest rate within the
    objective. A turn takes as long however busy the pipeline is, and a batch varies around its mean, so TPOT is
    kept to PACED of its objective: with nine tenths, four of fifteen pipelines kept 66 to 84 % of what was promised
    in simulation.
    """
    lanes = PipelineRounds(timer).lanes
    max_batch = min(room // lanes, MAX_BATCH)
    if max_batch < 1:
        return None
    batches = np.unique(np.geomspace(1, max_batch, 40).round())
    context = batches * (lengths.cached + lengths.new + lengths.output / 2)
    prefill_tokens_needed = batches * lengths.new / lengths.output

    def turns_s(chunks: Floats) -> Floats:
        cached = lengths.cached + np.maximum(lengths.new - chunks, 0.0) / 2
        cached[chunks == 0] = 0.0
        asked = (np.broadcast_to(array, chunks.shape).ravel() for array in (chunks, cached, batches, context))
        step_s, interval_s = timer.both_s(steps(*asked))
        return np.maximum(lanes * interval_s, step_s).reshape(chunks.shape)

    whole = np.ceil(np.outer(CHUNK_FACTORS, prefill_tokens_needed) / CHUNK_STEP_TOKENS) * CHUNK_STEP_TOKENS
    chunks = np.clip(whole, MIN_CHUNK_TOKENS, max(MIN_CHUNK_TOKENS, min(CHUNK_TOKENS, lengths.new)))
    without_chunk_s, *with_chunks_s = turns_s(np.vstack([np.zeros_like(batches), chunks]))
    best: MixedPipeline | None = None
    for chunk, with_chunk_s in zip(chunks, with_chunks_s, strict=True):
        chunk_share = prefill_tokens_needed / chunk
        tpot_s = chunk_share * with_chunk_s + (1.0 - chunk_share) * without_chunk_s
        busy = np.minimum(headroom * chunk_share, 0.99)
        ttft_s = (
            np.ceil(lengths.new / chunk) * with_chunk_s * (1.0 + busy / (2.0 * (1.0 - busy)))
            + with_chunk_s / 2
        )
        longest_s = np.ceil(lengths.longest / chunk) * with_chunk_s
        meets_slo = (
            (tpot_s <= MAX_TPOT_SHARE * slo.tpot_s)
            & (np.maximum(ttft_s, longest_s) <= slo.ttft_s)
            & (chunk_share < 1.0)
        )
        rate = np.where(meets_slo, lanes * batches / (tpot_s * lengths.output), 0.0)
        best_index = int(np.argmax(rate))
        if rate[best_index] > (0.0 if best is None else best.requests_per_s):
            result = (
                float(rate[best_index]),
                float(ttft_s[best_index]),
                float(tpot_s[best_index]),
                int(batches[best_index]),
                int(chunk[best_index]),
            )
            best = MixedPipeline(*result)
    return best


MAX_STEP_TPOTS = 2.0
MIN_BUDGET_TOKENS = 128


def paced_budget(
    timer: StepTimer, prompt_tokens: int, answer_tokens: int, memory_batch: int, slo: Slo
) -> int:
    """A power of two, from LEAST_TOKENS to CHUNK_TOKENS; CHUNK_TOKENS where the objective cannot be kept anyway.

    Whoever is being answered waits for the chunks of others' prompts. The planner reckons with the prompts of the
    long run, evenly spread over the steps; an engine that takes what its budget allows computes a prompt in few
    long steps, and short answers beside it miss their objective. Sarathi-Serve (OSDI '24) therefore takes the
    largest budget whose step is still short enough. Here that is LONGEST times the TPOT objective, with all the
    answers that a replica is planned to make at once: the short steps around it make up for one such step, and
    prompts still pass quickly.
    """
    operating_point = best_operating(timer, prompt_tokens, answer_tokens, memory_batch, slo)
    if operating_point is None:
        return CHUNK_TOKENS
    context = prompt_tokens + answer_tokens / 2
    budget = CHUNK_TOKENS
    while budget > MIN_BUDGET_TOKENS:
        step_s = float(
            chunked_iteration_s(timer, budget - operating_point.batch, 0.0, operating_point.batch, context)[0]
        )
        if step_s <= MAX_STEP_TPOTS * slo.tpot_s:
            break
        budget //= 2
    return budget
