"""Micro-batches: several batches of requests that take turns, so that all stages of a pipeline have work.

A decode goes through the stages one after the other, and its next token only begins when it is out: with one step at
a time a pipeline of k stages would use one. So an executor may want k micro-batches: each has a Batcher of its own
with its share of slots and blocks, and at most one step under way. A request stays in its micro-batch. There are
fewer where there are too few blocks for the longest request in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from potluck.core.replica.batch import Batcher, BatchLimits, BatchStep, Happening
from potluck.core.values.sampling import SampledToken
from potluck.engine.compute.executor import CacheExport, SequenceWork, TokenDraw, WorkerLost
from potluck.engine.loop.jobs import RunningJob


@dataclass(slots=True)
class RunningStep:
    """A step under way. Changed by the loop alone."""

    step: BatchStep
    began_s: float
    works: list[SequenceWork]
    draws: list[TokenDraw]
    exports: list[CacheExport]
    runs: dict[int, RunningJob] = field(default_factory=dict)
    """By row: a row may be another's by the time that the step lands."""
    result: list[Happening] | None = None
    """What the Batcher says of it, once it is committed."""
    land: Callable[[], list[SampledToken]] | None = None
    left: list[RunningJob] = field(default_factory=list)
    """Those that ended meanwhile; their rows are closed when it lands."""

    def lost(self, error: Exception) -> set[int]:
        """Rows that an error has taken; some of this step's in any case, so that it can go on without them."""
        rows = set(error.rows) if isinstance(error, WorkerLost) else set()
        mine = {work.row for work in self.works}
        return rows if rows & mine else rows | mine

    def without(self, lost: set[int]) -> None:
        kept = [row not in lost for row in self.drawn]
        self.draws = [draw for draw, keep in zip(self.draws, kept, strict=True) if keep]
        self.works = [work for work in self.works if work.row not in lost]
        self.exports = [export for export in self.exports if export.row not in lost]

    @property
    def tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works)

    @property
    def drawn(self) -> list[int]:
        return [work.row for work in self.works if work.logits == "last"]

    def let_out(self, job: RunningJob, join: Callable[[CacheExport], bool]) -> None:
        """The receiver of a job came while its step is under way."""
        work = next(work for work in self.works if work.row == job.row)
        sent, leaving = job.sent, job.leaving(work.row, work.start + len(work.tokens))
        if all(map(join, leaving)):
            self.exports += leaving
        else:
            job.sent = sent


class Microbatch:
    def __init__(self, limits: BatchLimits) -> None:
        self.batcher = Batcher(limits)
        self.step: RunningStep | None = None


class Microbatches:
    """Several Batchers as one, for whoever does not care which one a request is in."""

    def __init__(self, limits: BatchLimits, wanted: int, longest_tokens: int) -> None:
        room = limits.total_blocks * limits.block_tokens // longest_tokens
        count = max(1, min(wanted, room, limits.max_running))
        batch_limits = replace(
            limits, total_blocks=limits.total_blocks // count, max_running=limits.max_running // count
        )
        self.all = [Microbatch(batch_limits) for _ in range(count)]
        self.limits = replace(
            limits,
            total_blocks=count * batch_limits.total_blocks,
            max_running=count * batch_limits.max_running,
        )
        self.most_tokens = batch_limits.total_blocks * batch_limits.block_tokens
        """Of one sequence."""
        self._turn = 0
        self._of: dict[int, Microbatch] = {}

    def next(self) -> Microbatch:
        self._turn = (self._turn + 1) % len(self.all)
        return self.all[self._turn]

    def add(
        self,
        key: int,
        compute: int,
        context: int,
        output: int,
        priority: int,
        tenant: str = "",
        weight: float = 1.0,
    ) -> None:
        """Where a cache has room already, or else where the fewest are."""
        microbatch = self._of.get(key) or min(self.all, key=lambda each: (each.batcher.queued, _load(each)))
        microbatch.batcher.add(key, compute, context, output, priority, tenant, weight)
        self._of[key] = microbatch

    def reserve(self, key: int, tokens: int) -> bool:
        for microbatch in sorted(self.all, key=_load):
            if microbatch.batcher.reserve(key, tokens):
                self._of[key] = microbatch
                return True
        return False

    def cancel(self, key: int) -> None:
        microbatch = self._of.pop(key, None)
        if microbatch is not None:
            microbatch.batcher.cancel(key)

    def step_of(self, key: int, row: int | None) -> RunningStep | None:
        microbatch = self._of.get(key)
        step = None if microbatch is None else microbatch.step
        return step if step is not None and any(work.row == row for work in step.works) else None

    @property
    def under_way(self) -> bool:
        return any(microbatch.step is not None for microbatch in self.all)

    @property
    def short(self) -> bool:
        """Whether somebody waits who found no slot or no blocks."""
        return any(microbatch.batcher.queued and microbatch.batcher.blocked for microbatch in self.all)

    def keys(self) -> Sequence[int]:
        return list(self._of)

    @property
    def queued(self) -> int:
        return sum(microbatch.batcher.queued for microbatch in self.all)

    @property
    def running(self) -> int:
        return sum(microbatch.batcher.running for microbatch in self.all)

    @property
    def held_tokens(self) -> int:
        return sum(microbatch.batcher.held_tokens for microbatch in self.all)

    @property
    def todo_tokens(self) -> int:
        return sum(microbatch.batcher.todo_tokens for microbatch in self.all)

    @property
    def free_blocks(self) -> int:
        return sum(microbatch.batcher.free_blocks for microbatch in self.all)


def _load(microbatch: Microbatch) -> int:
    return len(microbatch.batcher.keys()) + len(microbatch.batcher.reserved)
