"""How long a step would take, asked often: steps that only decode are looked up.

The time of a step that decodes depends on how many do and on how much context they have together. For each number of
decodes the timer is asked once, for contexts of all lengths; in between it is as good as straight. Steps with prompts
in them are rarer and longer, and the timer is asked for each.

A pipeline's step is a round, as the simulator has it: each sequence gets its step once, in one of as many batches as
there are nodes. Decodes are spread evenly over those, each prompt goes to the one with the fewest tokens, and all of
it takes as long as the longest of them alone, or as all of them one after another at the slowest stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from potluck.engine.compute.emulated import steps_of
from potluck.engine.compute.work import SequenceWork
from potluck.perf.step_timer import Floats, StepTimer, steps
from potluck.perf.timers.pipeline_timer import PipelineTimer

LONGEST = 1 << 20
"""Tokens of context of one decode."""
POINTS = 160


class StepDurations:
    """Of one node."""

    microbatches = 1

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self._means = np.unique(np.geomspace(1, LONGEST, POINTS).round())
        self._grid: list[float] = self._means.tolist()
        self._tables: dict[int, list[float]] = {}

    def __call__(self, works: Sequence[SequenceWork]) -> float:
        """Seconds."""
        context = 0
        for work in works:
            if len(work.tokens) != 1 or not work.start:
                return self._mixed_s(works)
            context += work.start
        return self._decoding(len(works), context)

    def _mixed_s(self, works: Sequence[SequenceWork]) -> float:
        return float(self._timer.step_s(steps_of(works))[0])

    def _decodes_s(self, count: int) -> Floats:
        """Of so many, for contexts of all lengths."""
        return self._timer.step_s(steps(0.0, 0.0, count, self._means * count))

    def _decoding(self, count: int, context: int) -> float:
        table = self._tables.get(count)
        if table is None:
            table = self._tables[count] = self._decodes_s(count).tolist()
        grid, mean = self._grid, context / count
        place = min(max(bisect_right(grid, mean), 1), len(grid) - 1)
        low, high = grid[place - 1], grid[place]
        share = (mean - low) / (high - low)
        return table[place - 1] + share * (table[place] - table[place - 1])


class RoundDurations(StepDurations):
    """Of a pipeline."""

    def __init__(self, timer: PipelineTimer) -> None:
        super().__init__(timer)
        self._pipeline = timer
        self.microbatches = sum(map(len, timer.stages))

    def _mixed_s(self, works: Sequence[SequenceWork]) -> float:
        chunks = [(len(work.tokens), work.start) for work in works if len(work.tokens) > 1 or not work.start]
        contexts = [work.start for work in works if len(work.tokens) == 1 and work.start]
        each, more = divmod(len(contexts), self.microbatches)
        counts = [each + (microbatch < more) for microbatch in range(self.microbatches)]
        given: list[list[tuple[int, int]]] = [[] for _ in counts]
        loads = list(counts)
        for new, cached in chunks:
            microbatch = loads.index(min(loads))
            given[microbatch].append((new, cached))
            loads[microbatch] += new
        width = max(map(len, given))
        rows = [part + [(0, 0)] * (width - len(part)) for part in given]
        mean = sum(contexts) / max(1, len(contexts))
        batch = steps(
            [[new for new, _ in row] for row in rows],
            [[cached for _, cached in row] for row in rows],
            counts,
            [mean * count for count in counts],
        )
        longest_s, paced_s = self._pipeline.step_s(batch).max(), self._pipeline.interval_s(batch).sum()
        return float(max(longest_s, paced_s))

    def _decodes_s(self, count: int) -> Floats:
        full, more = divmod(count, self.microbatches)
        most = full + 1 if more else full
        large, small = (steps(0.0, 0.0, each, self._means * each) for each in (most, full))
        paced_s = (more or self.microbatches) * self._pipeline.interval_s(large)
        if more:
            paced_s = paced_s + (self.microbatches - more) * self._pipeline.interval_s(small)
        return np.maximum(self._pipeline.step_s(large), paced_s)


def lasting(timer: StepTimer) -> StepDurations:
    """For any timer."""
    if isinstance(timer, PipelineTimer) and sum(map(len, timer.stages)) > 1:
        return RoundDurations(timer)
    return StepDurations(timer)
