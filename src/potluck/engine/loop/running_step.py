"""A step under way: what it computes, for which jobs, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from potluck.core.replica.batch import BatchStep, Happening
from potluck.core.values.sampling import SampledToken
from potluck.engine.compute.executor import CacheExport, SequenceWork, TokenDraw
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
