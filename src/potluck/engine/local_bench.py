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
    behind: tuple[int, ...] = (0,)
    """Contexts before chunks beside decodes, where both fill a step."""
    total_tokens: int = 1 << 40
    """Whose KV fits: of many decodes at long contexts those are left out that do not."""

    @property
    def count(self) -> int:
        beside = sum(len(self.batches_at(c)) + len(self.behind_at(c)) for c in self.contexts)
        return len(self.chunks) * len(self.cached) + beside

    def batches_at(self, context: int) -> list[int]:
        return [batch for batch in self.batches if batch * grown(context) <= self.total_tokens]

    def mixed_at(self, context: int) -> list[tuple[int, int]]:
        room = self.total_tokens - max(self.behind) - BLOCK_TOKENS
        return [(new, batch) for new, batch in self.mixed if new + batch * grown(context) <= room]

    def behind_at(self, context: int) -> list[tuple[int, int, int]]:
        """(new tokens, their context, decodes)."""
        full = max(map(sum, self.mixed), default=0)
        shapes = [(shape, self.behind if sum(shape) == full else (0,)) for shape in self.mixed_at(context)]
        return [(new, cached, batch) for (new, batch), before in shapes for cached in before]


def grown(context: int) -> int:
    """What decodes that begin with a context have at most while they are measured."""
    return context + max(64, context // 4)


def grid(bounds: EngineBounds, quick: bool = False, *, behind: bool = False) -> ShapeGrid:
    """Shapes within the bounds: contexts a factor of four apart, the rest two, or four when `quick`.

    Chunks beside decodes also fill a step up to its budget, as engines do; with `behind`, behind contexts too."""
    every = 2 if quick else 1
    room = min(bounds.max_tokens - 64, bounds.total_tokens)
    budget = min(bounds.chunk_tokens, room // 2)
    chunks = _powers(16, budget)[::every]
    contexts = [c for c in _powers(64, 8192)[::2] if c == 64 or grown(c) <= bounds.max_tokens]
    batches = _powers(1, min(bounds.max_running, 256))[::every]
    fits = [b for b in batches if b * grown(contexts[0]) <= bounds.total_tokens]
    cached = (0, *(c for c in contexts if c + chunks[-1] <= room and c % BLOCK_TOKENS == 0))
    cached = cached[: 3 if quick else 5]
    beside = [b for b in fits if b < bounds.max_running][1::2]
    mixed = {(min(new, budget - b), b) for new in (*chunks[1::2], budget) for b in beside if b < budget}
    shape_grid = ShapeGrid(
        tuple(chunks),
        cached,
        tuple(fits),
        tuple(contexts),
        tuple(sorted(mixed)),
        (0, *(c for c in cached[2::2] if c + budget <= room)) if behind else (0,),
        bounds.total_tokens,
    )
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

    def points(self, grid: ShapeGrid) -> Iterator[ProfilePoint]:
        for cached in grid.cached:
            for new in grid.chunks:
                yield self._chunk(new, cached)
        for context in (context for context in grid.contexts if grid.batches_at(context)):
            batches = grid.batches_at(context)
            rows = [self._filled(context) for _ in range(max(batches))]
            try:
                for batch in batches:
                    yield self._decodes(self._fresh(rows, context)[:batch])
                for new, cached, batch in grid.behind_at(context):
                    yield self._decodes(self._fresh(rows, context)[:batch], new, cached)
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
            # Steps that draw nothing may still run on a GPU when they return: what is timed next would wait for them.
            ends = [TokenDraw(Sampling(), tokens)] if held + len(part) == tokens else []
            self._executor.step([SequenceWork(row, held, part, "last" if ends else "none")], ends)
        return row

    def _fresh(self, rows: list[int], context: int) -> list[int]:
        """Those that have grown too long begin again."""
        for place, row in enumerate(rows):
            if context < self._executor.held(row) > grown(context) - WARM_UP - self._repeats:
                self._executor.close(row)
                rows[place] = self._filled(context)
        return rows

    def _chunk(self, new: int, cached: int) -> ProfilePoint:
        times = []
        for _ in range(WARM_UP + self._repeats):
            row = self._filled(cached)
            times.append(self._timed([self._work(row, new)]))
            self._executor.close(row)
        return ProfilePoint(new, cached, 0, 0, median(times[WARM_UP:]), self._repeats)

    def _decodes(self, rows: list[int], new: int = 0, cached: int = 0) -> ProfilePoint:
        """Decodes, beside a prompt's chunk where `new` is not 0."""
        times, contexts = [], []
        for _ in range(WARM_UP + self._repeats):
            extra = [self._filled(cached)] if new else []
            contexts.append(sum(self._executor.held(row) for row in rows))
            works = [self._work(row, 1) for row in rows] + [self._work(row, new) for row in extra]
            times.append(self._timed(works))
            for row in extra:
                self._executor.close(row)
        context = round(median(contexts[WARM_UP:]))
        return ProfilePoint(new, cached, len(rows), context, median(times[WARM_UP:]), self._repeats)

    def _work(self, row: int, new: int) -> SequenceWork:
        held = self._executor.held(row)
        self._executor.grow(row, held + new, since=held)
        return SequenceWork(row, held, self._tokens(new))

    def _timed(self, works: list[SequenceWork]) -> float:
        draws = [TokenDraw(Sampling(), work.start + len(work.tokens)) for work in works]
        began = self._clock()
        self._executor.step(works, draws)
        return max(self._clock() - began, 1e-9)
