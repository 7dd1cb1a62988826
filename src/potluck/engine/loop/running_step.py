"""A step under way: what it computes, for which jobs, and what is exported with it."""

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

    batch_step: BatchStep
    began_s: float
    works: list[SequenceWork]
    draws: list[TokenDraw]
    exports: list[CacheExport]
    jobs: dict[int, RunningJob] = field(default_factory=dict)
    """By row, as of the step's begin: the row may be another job's by its end."""
    result: list[Happening] | None = None
    """The Batcher's happenings, once the step is committed."""
    land: Callable[[], list[SampledToken]] | None = None
    left: list[RunningJob] = field(default_factory=list)
    """Jobs that ended during the step; their rows are closed at its end."""

    @property
    def edits_logits(self) -> bool:
        """Whether some job edits logits by the tokens drawn before, which must be known first."""
        return any(running_job.edits is not None for running_job in self.jobs.values())

    @property
    def tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works)

    @property
    def drawn(self) -> list[int]:
        return [work.row for work in self.works if work.logits == "last"]

    def join_receiver(self, running_job: RunningJob, join_step: Callable[[CacheExport], bool]) -> None:
        """Export a job's cache with this step, which was under way when the job's receiver connected."""
        work = next(work for work in self.works if work.row == running_job.row)
        sent_tokens = running_job.sent
        exports = running_job.leaving(work.row, work.start + len(work.tokens))
        if all(map(join_step, exports)):
            self.exports += exports
        else:
            running_job.sent = sent_tokens
