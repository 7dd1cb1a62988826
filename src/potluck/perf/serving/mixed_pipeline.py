"""A pipeline that computes prompts beside answers: how many answers at once, how many tokens of prompts in a turn.

N batches take turns, one for each node. A batch of B answers takes a chunk of c tokens of a prompt with it whenever
one is to be computed; with L new tokens in a prompt and O in an answer that is a share u of its turns. With C(c) the
time from one turn of a batch to its next,

    C(c)   = max(N I, T)             I: the slowest stage, T: all stages, of B answers and c tokens
    u      = B L / (O c)             as busy as it may be; less than 1, or prompts would wait without end
    TPOT   = u C(c) + (1 - u) C(0)
    TTFT   = ceil(L / c) C(c) (1 + h u / (2 (1 - h u))) + C(c) / 2       a prompt's turns, behind others (M/D/1) when
                                                                         h of that is asked for, after half a turn
    rate   = N B / (O TPOT)

Larger chunks make turns longer and prompts wait less; B and c are those of the largest rate within the objective. A
turn takes as long however busy the pipeline is, and a batch varies around its mean, so TPOT is kept to PACED of its
objective: with nine tenths, four of fifteen pipelines kept 66 to 84 % of what was promised in simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.core.values.types import Slo
from potluck.perf.serving.phases import CHUNK_TOKENS
from potluck.perf.serving.throughput import MAX_BATCH
from potluck.perf.step_timer import Floats, steps
from potluck.perf.timers.pipeline_timer import PipelineRounds, PipelineTimer

PACED = 0.7
BUSY = 0.8
"""h, where nothing else is said."""
CHUNKS = (1.15, 1.3, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Chunks that are tried, in units of what B answers need on average."""
LEAST_CHUNK, CHUNK_STEP = 16, 8


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Of requests, in tokens."""

    new: int
    """Of a prompt, what is computed."""
    cached: int
    output: int
    longest: int
    """The longest prompt, which must be in time too when nothing is before it."""


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


def together(
    timer: PipelineTimer, lengths: RequestLengths, room: int, slo: Slo, headroom: float = BUSY
) -> MixedPipeline | None:
    """The best turns within the objective; None where there are none. `room` is how many requests' KV fits."""
    lanes = PipelineRounds(timer).lanes
    most = min(room // lanes, MAX_BATCH)
    if most < 1:
        return None
    batches = np.unique(np.geomspace(1, most, 40).round())
    context = batches * (lengths.cached + lengths.new + lengths.output / 2)
    needed = batches * lengths.new / lengths.output

    def turns_s(chunks: Floats) -> Floats:
        cached = lengths.cached + np.maximum(lengths.new - chunks, 0.0) / 2
        cached[chunks == 0] = 0.0
        asked = (np.broadcast_to(each, chunks.shape).ravel() for each in (chunks, cached, batches, context))
        step_s, interval_s = timer.both_s(steps(*asked))
        return np.maximum(lanes * interval_s, step_s).reshape(chunks.shape)

    whole = np.ceil(np.outer(CHUNKS, needed) / CHUNK_STEP) * CHUNK_STEP
    chunks = np.clip(whole, LEAST_CHUNK, max(LEAST_CHUNK, min(CHUNK_TOKENS, lengths.new)))
    plain_s, *taken_s = turns_s(np.vstack([np.zeros_like(batches), chunks]))
    best: MixedPipeline | None = None
    for chunk, full_s in zip(chunks, taken_s, strict=True):
        used = needed / chunk
        tpot_s = used * full_s + (1.0 - used) * plain_s
        busy = np.minimum(headroom * used, 0.99)
        ttft_s = np.ceil(lengths.new / chunk) * full_s * (1.0 + busy / (2.0 * (1.0 - busy))) + full_s / 2
        longest_s = np.ceil(lengths.longest / chunk) * full_s
        kept = (tpot_s <= PACED * slo.tpot_s) & (np.maximum(ttft_s, longest_s) <= slo.ttft_s) & (used < 1.0)
        rate = np.where(kept, lanes * batches / (tpot_s * lengths.output), 0.0)
        at = int(np.argmax(rate))
        if rate[at] > (0.0 if best is None else best.requests_per_s):
            found = (float(rate[at]), float(ttft_s[at]), float(tpot_s[at]), int(batches[at]), int(chunk[at]))
            best = MixedPipeline(*found)
    return best
