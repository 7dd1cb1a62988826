"""Step times at a microsecond each: tables over any StepTimer, filled as they are needed.

*Decodes alone*, n of them with contexts adding up to x: for each n a line through the timer's values at x = n u,
with u on a grid of mean contexts. Contexts grow by n a step, so a run of steps within a cell is an arithmetic series:
`DecodeRow.run_s` has its sum and `DecodeRow.cut` the inverse.

*Chunks beside decodes*: with T new tokens in all, chunks of c_i tokens behind k_i of context, n decodes,

    t = B(T) + max(max Q(c_i, k_i), sum of S(c_i, k_i)) - q(T) w + R(n, x)
    B(T)     one fresh prompt of T tokens: all the dense work, exact
    Q(c, k)  what a context of k adds to a chunk of c
    S(c, k)  the same when many such chunks share the GPU: several take as long as the longest, or as all at full use
    w        (T^2 - sum of c_i^2) / 2T: the pairs of tokens within B(T) that do not see each other here are as many
             as those of T tokens with a context of w, which would take q(T) w, q(T) = Q(T, T/2) / (T/2)
    R(n, x)  what n decodes with contexts x add: measured beside one chunk of REFERENCE tokens

No step with a chunk is shorter than it takes to launch (`perf.timers.host`). Exact for one chunk alone, else within a
hundredth where the timer adds up, as kernels one after another do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, inf, sqrt
from typing import Final

import numpy as np

from potluck.core.values.plan import Confidence
from potluck.perf.step_timer import Floats, StepTimer, steps
from potluck.perf.timers.pipeline_timer import PipelineTimer
from potluck.perf.timers.roofline import RooflineTimer

REFERENCE: Final = 512  # Tokens of the chunk beside which the cost of decodes is taken.
CONTEXTS: Final = sorted({0, *(round(2 ** (i / 4)) for i in range(89))})
"""Mean contexts of decodes at which the timer is asked; beyond the last the line goes on."""
BEHIND: Final = sorted({0, 1, 16, *(round(2 ** (i / 4)) for i in range(20, 85))})
SHARED_BEHIND: Final = [0, 1, *(4**i for i in range(2, 11))]
COPIES: Final = 4  # Chunks that share a GPU: as many as a step has where it has several.
TILE: Final = 16
LARGEST_TILE: Final = 64
"""Tokens of a chunk that one part of a GPU works on, in multiples of TILE: no step is shorter than the longest."""
ROWS: Final = 16
LENGTHS: Final = 16
TOKENS: Final = 64
"""Batches, tiles and totals asked for together: one question costs little more than one row of it."""

Chunks = Sequence[tuple[int, int, int]]  # (key, new tokens, context before them)
Line = tuple[list[float], list[float], float]
"""What contexts add to a chunk of some tokens: at a tile's first length, at its last, and how far it is between."""


class DecodeRow:
    """Steps of `count` decodes: start[i] + slope[i] x seconds while the mean context is in [u_i, u_i+1)."""

    def __init__(self, count: int, seconds: Floats) -> None:
        edges = np.array(CONTEXTS, np.float64) * count
        slope = np.diff(seconds) / np.diff(edges)
        self.count = count
        self.slope: list[float] = [*slope.tolist(), float(slope[-1])]
        self.start: list[float] = (seconds - np.array(self.slope) * edges).tolist()
        self.edge: list[float] = [*(u * count for u in CONTEXTS[1:]), inf]
        """Where the next cell begins."""

    def step_s(self, context: int) -> float:
        """One step with contexts adding up to so many tokens."""
        cell = bisect_right(CONTEXTS, context // self.count) - 1
        return self.start[cell] + self.slope[cell] * context

    def run_s(self, context: int, count: int) -> float:
        """So many steps in a row, the first with this context."""
        n = self.count
        cell = bisect_right(CONTEXTS, context // n) - 1
        slope = self.slope[cell]
        if context + (count - 1) * n < self.edge[cell]:
            return count * (self.start[cell] + slope * (context + 0.5 * n * (count - 1)))
        inside = -int((context - self.edge[cell]) // n)
        part_s = inside * (self.start[cell] + slope * (context + 0.5 * n * (inside - 1)))
        return part_s + self.run_s(context + inside * n, count - inside)

    def cut(self, context: int, seconds: float, most: int) -> tuple[int, float]:
        """The fewest steps, from 1 to `most`, that take at least so long (`most` if none do), and how long."""
        n = self.count
        cell = bisect_right(CONTEXTS, context // n) - 1
        slope, start = self.slope[cell], self.start[cell]
        half = 0.5 * slope * n
        linear = start + slope * context - half
        # j linear + half j^2 = seconds, as if the whole run lay in this cell
        inside = linear * linear + 4.0 * half * seconds
        number = ceil(2.0 * seconds / (linear + sqrt(inside))) if inside > 0.0 else most
        if number < 1:
            number = 1
        elif number > most:
            number = most
        # and now what it really is: `run_s`, written out for the cell
        if context + (number - 1) * n < self.edge[cell]:
            found_s = number * (start + slope * (context + 0.5 * n * (number - 1)))
            before_s = (number - 1) * (start + slope * (context + 0.5 * n * (number - 2)))
        else:
            found_s, before_s = self.run_s(context, number), self.run_s(context, number - 1)
        if found_s < seconds and number < most:
            number = self._search(context, seconds, number, most)
            return number, self.run_s(context, number)
        if number > 1 and before_s >= seconds:
            number = self._search(context, seconds, 0, number)
            return number, self.run_s(context, number)
        return number, found_s

    def _search(self, context: int, seconds: float, low: int, high: int) -> int:
        """Between `low`, which is too few, and `high`, which is the most."""
        while high - low > 1:
            middle = (low + high) // 2
            if self.run_s(context, middle) < seconds:
                low = middle
            else:
                high = middle
        return high


class StepTable:
    """Scalar step times of one timer. Share it among replicas of the same kind."""

    def __init__(self, timer: StepTimer, least_s: float = 0.0) -> None:
        """`least_s` is what a step with a chunk takes at least; the timer does not know of it."""
        self.timer = timer
        self._least_s = least_s
        self.lanes = 1
        """Batches that are under way at once."""
        self.rows: dict[int, DecodeRow] = {}
        self._beside: dict[int, DecodeRow] = {}
        self._behind: dict[int, Line] = {}
        self._shared: dict[int, Line] = {}
        self._edges: dict[tuple[int, int, int], list[list[float]]] = {}
        self._base: list[float] = [0.0]
        """B(T)"""
        self._pair: list[float] = [0.0]
        """q(T) / 2T: seconds of two tokens that see each other"""

    def row(self, decodes: int) -> DecodeRow:
        decode_row = self.rows.get(decodes)
        return decode_row if decode_row is not None else self._make_rows(decodes)

    def step_s(self, chunks: Chunks, decodes: int, context: int) -> float:
        """A step of chunks beside decodes whose contexts add up to `context` tokens."""
        if not chunks:
            return self.row(decodes).step_s(context)
        if len(chunks) == 1:
            _, new, behind = chunks[0]
            tokens, pairs = new + decodes, new * new
            seconds = self._behind_s(new, behind) if behind else 0.0
        else:
            tokens, pairs = decodes, 0
            for _, new, _ in chunks:
                tokens += new
                pairs += new * new
            seconds = self._behinds_s(chunks)
        if decodes:
            beside = self._beside.get(decodes)
            if beside is None:
                beside = self._make_beside(decodes)
            cell = bisect_right(CONTEXTS, context // decodes) - 1
            seconds += beside.start[cell] + beside.slope[cell] * context
        if tokens >= len(self._base):
            self._make_base(tokens)
        seconds += self._base[tokens] - self._pair[tokens] * (tokens * tokens - pairs)
        return seconds if seconds > self._least_s else self._least_s

    def _make_base(self, tokens: int) -> None:
        more = np.arange(len(self._base), tokens + TOKENS, dtype=np.float64)
        fresh = self.timer.step_s(steps(more))
        pairs = (self.timer.step_s(steps(more, more / 2)) - fresh) / (more * more)
        self._base.extend(fresh.tolist())
        self._pair.extend(pairs.tolist())

    def _behinds_s(self, chunks: Chunks) -> float:
        longest = shared = 0.0
        for _, new, behind in chunks:
            if behind:
                line = self._shared.get(new)
                if line is None:
                    line = self._fill(self._shared, new, SHARED_BEHIND, COPIES)
                shared += _between(SHARED_BEHIND, line, behind)
                longest = max(longest, self._behind_s(min(new, LARGEST_TILE), behind))
        return max(longest, shared)

    def _behind_s(self, new: int, behind: float) -> float:
        line = self._behind.get(new)
        if line is None:
            line = self._fill(self._behind, new, BEHIND, 1)
        return _between(BEHIND, line, behind)

    def _make_rows(self, decodes: int) -> DecodeRow:
        block, seconds = self._grid(decodes, 0)
        for i, count in enumerate(block):
            self.rows[count] = DecodeRow(count, seconds[i])
        return self.rows[decodes]

    def _make_beside(self, decodes: int) -> DecodeRow:
        block, seconds = self._grid(decodes, REFERENCE)
        if block[-1] + REFERENCE >= len(self._base):
            self._make_base(block[-1] + REFERENCE)
        for i, count in enumerate(block):
            tokens = REFERENCE + count
            unseen = tokens * tokens - REFERENCE * REFERENCE
            self._beside[count] = DecodeRow(
                count, seconds[i] - self._base[tokens] + self._pair[tokens] * unseen
            )
        return self._beside[decodes]

    def _grid(self, decodes: int, chunk: int) -> tuple[range, Floats]:
        """Timed steps of a block of batches around `decodes` beside one chunk, at all mean contexts."""
        low = (decodes - 1) // ROWS * ROWS + 1
        block = range(low, low + ROWS)
        count = np.repeat(np.array(block, np.float64), len(CONTEXTS))
        context = count * np.tile(np.array(CONTEXTS, np.float64), ROWS)
        batch = steps(np.full(len(count), float(chunk)), 0.0, count, context)
        return block, self.timer.step_s(batch).reshape(ROWS, len(CONTEXTS))

    def _fill(self, table: dict[int, Line], new: int, grid: list[int], copies: int) -> Line:
        """What contexts add to a chunk of `new` tokens among so many like it.

        The timer is asked at every length up to 64 and then at 65, 80, 81, 96, ...: within a GPU's tile of 16, times
        grow evenly or not at all.
        """
        number = 1 if new <= LARGEST_TILE else TILE
        low = (new - 1) // (LENGTHS * number) * LENGTHS * number
        known = self._edges.get((low, copies, number))
        if known is None:
            starts = np.arange(low + 1, low + LENGTHS * number + 1, number, dtype=np.float64)
            count = np.repeat(np.column_stack([starts, starts + number - 1]).ravel(), len(grid))
            behind = np.tile(np.array(grid, np.float64), 2 * LENGTHS)
            shape = (len(count), copies)
            batch = steps(np.broadcast_to(count[:, None], shape), np.broadcast_to(behind[:, None], shape))
            seconds = self.timer.step_s(batch).reshape(2 * LENGTHS, len(grid)) / copies
            known = self._edges[(low, copies, number)] = (seconds - seconds[:, :1]).tolist()
        place, within = divmod(new - low - 1, number)
        fill = table[new] = (known[2 * place], known[2 * place + 1], within / max(number - 1, 1))
        return fill


def _between(grid: list[int], line: Line, at: float) -> float:
    """On the line through the neighbours; beyond the last, on the last line."""
    cell = min(bisect_right(grid, at), len(grid) - 1)
    first, last, share = line
    low, value = grid[cell - 1], first[cell - 1] + (last[cell - 1] - first[cell - 1]) * share
    further = first[cell] + (last[cell] - first[cell]) * share
    return value + (further - value) * (at - low) / (grid[cell] - low)


def step_table(timer: StepTimer) -> StepTimes:
    if isinstance(timer, PipelineTimer) and sum(map(len, timer.stages)) > 1:
        return RoundTable(timer)
    if isinstance(timer, RooflineTimer | PipelineTimer):
        return StepTable(timer.unlaunched, timer.least_s)
    return StepTable(timer)


class _Pace:
    """A pipeline's intervals as if they were step times."""

    def __init__(self, timer: PipelineTimer) -> None:
        self.step_s = timer.interval_s
        self.confidence: Confidence = timer.confidence


class RoundTable:
    """Scalar round times of one pipeline, which keeps as many batches under way as it has nodes (`lanes`).

    The simulated replica keeps one set of sequences and steps through *rounds*: in a round each sequence gets its
    step once, in one of the lanes, and the lanes follow each other every `interval_s`:

        round = max( longest latency of a lane's step,  sum over lanes of the interval of its step )

    The first is what a lone prompt takes, the second the pace of the slowest stage under load. Decodes are spread
    evenly over the lanes, each chunk goes to the lane with the fewest tokens. Lanes really begin one after another,
    so a newcomer waits half a round too long at most, on average.
    """

    def __init__(self, timer: PipelineTimer) -> None:
        self.timer = timer
        self.lanes = sum(map(len, timer.stages))
        plain = timer.unlaunched
        self._latency = StepTable(plain, timer.least_s)
        self._pace = StepTable(_Pace(plain), timer.least_interval_s)
        self.rows: dict[int, DecodeRow] = {}

    def row(self, decodes: int) -> DecodeRow:
        decode_row = self.rows.get(decodes)
        return decode_row if decode_row is not None else self._make_rows(decodes)

    def step_s(self, chunks: Chunks, decodes: int, context: int) -> float:
        if not chunks:
            return self.row(decodes).step_s(context)
        number, more = divmod(decodes, self.lanes)
        counts = [number + (lane < more) for lane in range(self.lanes)]
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
        for number in block:
            full, more = divmod(number, self.lanes)
            longest = latency[full + 1] if more else latency[full]
            total = more * pace[full + 1] if more else np.zeros(len(CONTEXTS))
            total = total + (self.lanes - more) * pace[full]
            self.rows[number] = DecodeRow(number, np.maximum(longest, total))
        return self.rows[decodes]


StepTimes = StepTable | RoundTable  # What a replica asks about time.
