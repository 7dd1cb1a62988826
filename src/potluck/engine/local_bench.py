"""Measuring an executor: how long steps of many shapes take, as points of a profile that `perf` reads.

Prompts of several lengths behind several contexts, decodes of several batches at several contexts, and both at once.
Each shape is run a few times and its median counts. Contexts are filled once and used by all shapes that have them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from potluck.core.errors import CapacityError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.sampling import Sampling
from potluck.engine.compute.executor import Executor, SequenceWork, TokenDraw
from potluck.perf.timers.profile import MIN_POINTS, ProfilePoint

WARM_UP = 2
"""Runs of a shape that do not count: buffers grow, kernels are chosen."""


@dataclass(frozen=True, slots=True)
class EngineBounds:
    max_tokens: int
    """Of one sequence."""
    max_running: int
    chunk_tokens: int
    """New tokens of one step."""
    total_tokens: int
    """Whose KV fits at once."""


@dataclass(frozen=True, slots=True)
class ShapeGrid:
    chunks: tuple[int, ...]
    cached: tuple[int, ...]
    """Contexts before a chunk."""
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    """Of each decode."""
    mixed: tuple[tuple[int, int], ...]
    """(new tokens, decodes), at every context."""

    @property
    def count(self) -> int:
        decodes = len(self.contexts) * len(self.batches)
        return len(self.chunks) * len(self.cached) + decodes + len(self.contexts) * len(self.mixed)


def grid(bounds: EngineBounds, quick: bool = False) -> ShapeGrid:
    """Shapes within the bounds: contexts a factor of four apart, the rest two, or four when `quick`."""
    every = 2 if quick else 1
    spare = 64
    """Tokens that decodes grow by while they are measured."""
    room = bounds.max_tokens - spare
    chunks = _powers(16, min(bounds.chunk_tokens, room // 2))[::every]
    contexts = _powers(64, max(64, min(room, 8192)))[::2]
    batches = _powers(1, min(bounds.max_running, 256))[::every]
    fits = [b for b in batches if b * (contexts[-1] + spare) <= bounds.total_tokens]
    cached = (0, *(c for c in contexts if c + chunks[-1] <= room and c % BLOCK_TOKENS == 0))
    beside = [b for b in fits if b < bounds.max_running][1::2]
    mixed = tuple((new, b) for new in chunks[1::2] for b in beside if new + b <= bounds.chunk_tokens)
    shape_grid = ShapeGrid(tuple(chunks), cached[: 3 if quick else 5], tuple(fits), tuple(contexts), mixed)
    if not chunks or not fits or shape_grid.count < MIN_POINTS:
        raise CapacityError("the engine holds too few tokens to be measured; give it more KV blocks")
    return shape_grid


def _powers(first: int, last: int) -> list[int]:
    return [first << place for place in range(32) if first << place <= last]


class LocalBench:
    def __init__(
        self,
        executor: Executor,
        repeats: int = 5,
        clock: Callable[[], float] = time.perf_counter,
        seed: int = 0,
    ) -> None:
        self._executor, self._repeats, self._clock = executor, repeats, clock
        self._chance = random.Random(seed)

    @property
    def bounds(self) -> EngineBounds:
        size = self._executor.size
        return EngineBounds(size.max_tokens, size.rows - 1, size.max_chunk_tokens, size.blocks * BLOCK_TOKENS)

    def points(self, what: ShapeGrid) -> Iterator[ProfilePoint]:
        for cached in what.cached:
            for new in what.chunks:
                yield self._chunk(new, cached)
        for context in what.contexts:
            rows = [self._filled(context) for _ in range(max(what.batches))]
            try:
                for batch in what.batches:
                    yield self._decodes(rows[:batch])
                for new, batch in what.mixed:
                    yield self._decodes(rows[:batch], new)
            finally:
                for row in rows:
                    self._executor.close(row)

    def _tokens(self, count: int) -> list[int]:
        vocab = self._executor.config.model.vocab
        return [self._chance.randrange(vocab) for _ in range(count)]

    def _filled(self, tokens: int) -> int:
        row = self._executor.open()
        while (held := self._executor.held(row)) < tokens:
            part = self._tokens(min(self.bounds.chunk_tokens, tokens - held))
            self._executor.grow(row, held + len(part), since=held)
            self._executor.step([SequenceWork(row, held, part, "none")], [])
        return row

    def _chunk(self, new: int, cached: int) -> ProfilePoint:
        times = []
        for _ in range(WARM_UP + self._repeats):
            row = self._filled(cached)
            times.append(self._timed([self._work(row, new)]))
            self._executor.close(row)
        return ProfilePoint(new, cached, 0, 0, median(times[WARM_UP:]), self._repeats)

    def _decodes(self, rows: list[int], new: int = 0) -> ProfilePoint:
        """Decodes, beside a prompt's chunk where `new` is not 0."""
        times, contexts = [], []
        for _ in range(WARM_UP + self._repeats):
            extra = [self._executor.open()] if new else []
            contexts.append(sum(self._executor.held(row) for row in rows))
            works = [self._work(row, 1) for row in rows] + [self._work(row, new) for row in extra]
            times.append(self._timed(works))
            for row in extra:
                self._executor.close(row)
        context = round(median(contexts[WARM_UP:]))
        return ProfilePoint(new, 0, len(rows), context, median(times[WARM_UP:]), self._repeats)

    def _work(self, row: int, new: int) -> SequenceWork:
        held = self._executor.held(row)
        self._executor.grow(row, held + new, since=held)
        return SequenceWork(row, held, self._tokens(new))

    def _timed(self, works: list[SequenceWork]) -> float:
        draws = [TokenDraw(Sampling(), work.start + len(work.tokens)) for work in works]
        began = self._clock()
        self._executor.step(works, draws)
        return max(self._clock() - began, 1e-9)
