"""Step times of pipelines, and the choice of table for any timer.

A pipeline of several nodes keeps as many batches under way as it has nodes (`lanes`), so that no node waits. A
sequence is in one of them. The simulated replica keeps one set of sequences and steps through *rounds*: in a
round each sequence gets its step once, in one of the lanes, and the lanes follow each other every `interval_s`:

    round = max( longest latency of a lane's step,  sum over lanes of the interval of its step )

The first is what a lone prompt takes, the second the pace of the slowest stage under load; no drain between
rounds, as lanes overlap. Decodes are spread evenly over the lanes, each chunk goes to the lane with the fewest
tokens. What this leaves out: lanes really begin one after another, so a newcomer may find one that begins sooner
than the next round; it waits half a round too long at most, on average.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from potluck.core.values.plan import Confidence
from potluck.perf.step_timer import Floats, StepBatch, StepTimer, steps
from potluck.perf.timers.pipeline_timer import PipelineTimer
from potluck.perf.timers.roofline import RooflineTimer
from potluck.sim.replicas.step_table import CONTEXTS, ROWS, Chunks, DecodeRow, StepTable


class StepTimes(Protocol):
    """What a replica asks about time."""

    lanes: int
    rows: dict[int, DecodeRow]
    """Those made so far."""

    def row(self, decodes: int) -> DecodeRow:
        """Steps of so many decodes and nothing else."""

    def step_s(self, chunks: Chunks, decodes: int, context: int) -> float:
        """A step of chunks beside decodes."""


def step_table(timer: StepTimer) -> StepTimes:
    """The table for a timer. Make one and share it among replicas of the same kind."""
    if isinstance(timer, PipelineTimer) and sum(map(len, timer.stages)) > 1:
        return RoundTable(timer)
    if isinstance(timer, RooflineTimer | PipelineTimer):
        return StepTable(timer.unlaunched, timer.least_s)
    return StepTable(timer)


class _Pace:
    """A pipeline's intervals as if they were step times."""

    def __init__(self, timer: PipelineTimer) -> None:
        self._timer = timer
        self.confidence: Confidence = timer.confidence

    def step_s(self, batch: StepBatch) -> Floats:
        return self._timer.interval_s(batch)


class RoundTable:
    """Scalar round times of one pipeline."""

    __slots__ = ("_latency", "_pace", "lanes", "rows", "timer")

    def __init__(self, timer: PipelineTimer) -> None:
        self.timer = timer
        self.lanes = sum(map(len, timer.stages))
        plain = timer.unlaunched
        self._latency = StepTable(plain, timer.least_s)
        self._pace = StepTable(_Pace(plain), timer.least_interval_s)
        self.rows: dict[int, DecodeRow] = {}

    def row(self, decodes: int) -> DecodeRow:
        found = self.rows.get(decodes)
        return found if found is not None else self._make_rows(decodes)

    def step_s(self, chunks: Chunks, decodes: int, context: int) -> float:
        if not chunks:
            return self.row(decodes).step_s(context)
        each, more = divmod(decodes, self.lanes)
        counts = [each + (lane < more) for lane in range(self.lanes)]
        given: list[list[tuple[int, int, int]]] = [[] for _ in counts]
        loads = list(counts)
        for chunk in chunks:
            lane = loads.index(min(loads))
            given[lane].append(chunk)
            loads[lane] += chunk[1]
        longest = total = 0.0
        for part, count in zip(given, counts, strict=True):
            if part or count:
                share = context * count // decodes if count else 0
                longest = max(longest, self._latency.step_s(part, count, share))
                total += self._pace.step_s(part, count, share)
        return max(longest, total)

    def _make_rows(self, decodes: int) -> DecodeRow:
        low = (decodes - 1) // ROWS * ROWS + 1
        block = range(low, low + ROWS)
        largest = (block[-1] - 1) // self.lanes + 1
        count = np.repeat(np.arange(largest + 1, dtype=np.float64), len(CONTEXTS))
        batch = steps(decodes=count, decode_context=count * np.tile(CONTEXTS, largest + 1))
        shape = (largest + 1, len(CONTEXTS))
        latency, pace = self.timer.step_s(batch).reshape(shape), self.timer.interval_s(batch).reshape(shape)
        for each in block:
            full, more = divmod(each, self.lanes)
            longest = latency[full + 1] if more else latency[full]
            total = more * pace[full + 1] if more else np.zeros(len(CONTEXTS))
            total = total + (self.lanes - more) * pace[full]
            self.rows[each] = DecodeRow(each, np.maximum(longest, total))
        return self.rows[decodes]
