"""How long a step would take, asked often: steps that only decode are looked up.

The time of a step that decodes depends on how many do and on how much context they have together. For each number of
decodes the timer is asked once, for contexts of all lengths; in between it is as good as straight. Steps with prompts
in them are rarer and longer, and the timer is asked for each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from potluck.engine.compute.paced import steps_of
from potluck.engine.compute.work import Work
from potluck.perf.step import StepTimer, steps

LONGEST = 1 << 20
"""Tokens of context of one decode."""
POINTS = 160


class Lasting:
    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self._means = np.unique(np.geomspace(1, LONGEST, POINTS).round())
        self._grid: list[float] = self._means.tolist()
        self._tables: dict[int, list[float]] = {}

    def __call__(self, works: Sequence[Work]) -> float:
        """Seconds."""
        context = 0
        for work in works:
            if len(work.tokens) != 1 or not work.start:
                return float(self._timer.step_s(steps_of(works))[0])
            context += work.start
        return self._decoding(len(works), context)

    def _decoding(self, count: int, context: int) -> float:
        table = self._tables.get(count)
        if table is None:
            asked = steps(0.0, 0.0, count, self._means * count)
            table = self._tables[count] = self._timer.step_s(asked).tolist()
        grid, mean = self._grid, context / count
        place = min(max(bisect_right(grid, mean), 1), len(grid) - 1)
        low, high = grid[place - 1], grid[place]
        share = (mean - low) / (high - low)
        return table[place - 1] + share * (table[place] - table[place - 1])
