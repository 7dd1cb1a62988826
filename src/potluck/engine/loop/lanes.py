"""Lanes: several batches of requests that take turns, so that all stages of a pipeline have work.

A decode goes through the stages one after the other, and its next token only begins when it is out. With one step at
a time a pipeline of k stages would use one of them. So an executor may say that it wants k lanes: each has a Batcher
of its own with its share of slots and blocks, and at most one step under way. A request stays in its lane. There are
fewer lanes where there are too few blocks for the longest request in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from potluck.core.replica.batch import Batcher, Limits, Step
from potluck.core.values.sampling import Choice
from potluck.engine.compute.executor import Draw, Export, WorkerLost
from potluck.engine.compute.work import Work
from potluck.engine.loop.jobs import LiveJob


@dataclass(slots=True)
class StepUnderWay:
    """A step under way. Changed by the loop alone."""

    step: Step
    began_s: float
    works: list[Work]
    draws: list[Draw]
    exports: list[Export]
    land: Callable[[], list[Choice]] | None = None
    """Waits for its end."""
    left: list[LiveJob] = field(default_factory=list)
    """Those that ended meanwhile; their rows are closed when it lands."""

    def lost(self, error: Exception) -> set[int]:
        """Rows that an error has taken; some of this step's in any case, so that it can go on without them."""
        rows = set(error.rows) if isinstance(error, WorkerLost) else set()
        mine = {work.row for work in self.works}
        return rows if rows & mine else rows | mine

    def without(self, lost: set[int]) -> None:
        """Leave rows out."""
        kept = [row not in lost for row in self.drawn]
        self.draws = [draw for draw, keep in zip(self.draws, kept, strict=True) if keep]
        self.works = [work for work in self.works if work.row not in lost]
        self.exports = [export for export in self.exports if export.row not in lost]

    @property
    def tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works)

    @property
    def drawn(self) -> list[int]:
        """Rows for which a token is drawn, in order."""
        return [work.row for work in self.works if work.logits == "last"]

    def has(self, row: int | None) -> bool:
        return any(work.row == row for work in self.works)

    def let_out(self, run: LiveJob, join: Callable[[Export], bool]) -> None:
        """The receiver of a job came while its step is under way."""
        work = next(work for work in self.works if work.row == run.row)
        sent, leaving = run.sent, run.leaving(work.row, work.start + len(work.tokens))
        if all(map(join, leaving)):
            self.exports += leaving
        else:
            run.sent = sent


class Lane:
    def __init__(self, limits: Limits) -> None:
        self.batcher = Batcher(limits)
        self.flight: StepUnderWay | None = None


class Lanes:
    """Several Batchers as one, for whoever does not care which lane a request is in."""

    def __init__(self, limits: Limits, wanted: int, longest_tokens: int) -> None:
        room = limits.total_blocks * limits.block_tokens // longest_tokens
        count = max(1, min(wanted, room, limits.max_running))
        each = replace(
            limits, total_blocks=limits.total_blocks // count, max_running=limits.max_running // count
        )
        self.all = [Lane(each) for _ in range(count)]
        self.limits = replace(
            limits, total_blocks=count * each.total_blocks, max_running=count * each.max_running
        )
        self.most_tokens = each.total_blocks * each.block_tokens
        """Of one sequence."""
        self._turn = 0
        self._of: dict[int, Lane] = {}

    def next(self) -> Lane:
        """Whose turn it is."""
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
        lane = self._of.get(key) or min(self.all, key=lambda each: (each.batcher.queued, _load(each)))
        lane.batcher.add(key, compute, context, output, priority, tenant, weight)
        self._of[key] = lane

    def reserve(self, key: int, tokens: int) -> bool:
        for lane in sorted(self.all, key=_load):
            if lane.batcher.reserve(key, tokens):
                self._of[key] = lane
                return True
        return False

    def cancel(self, key: int) -> None:
        lane = self._of.pop(key, None)
        if lane is not None:
            lane.batcher.cancel(key)

    def flight_of(self, key: int, row: int | None) -> StepUnderWay | None:
        """The step under way that a request has a part in."""
        lane = self._of.get(key)
        flight = None if lane is None else lane.flight
        return flight if flight is not None and flight.has(row) else None

    @property
    def flying(self) -> bool:
        return any(lane.flight is not None for lane in self.all)

    @property
    def short(self) -> bool:
        """Whether somebody waits who found no slot or no blocks."""
        return any(lane.batcher.queued and lane.batcher.blocked for lane in self.all)

    def keys(self) -> Sequence[int]:
        return list(self._of)

    @property
    def queued(self) -> int:
        return sum(lane.batcher.queued for lane in self.all)

    @property
    def running(self) -> int:
        return sum(lane.batcher.running for lane in self.all)

    @property
    def held_tokens(self) -> int:
        return sum(lane.batcher.held_tokens for lane in self.all)

    @property
    def todo_tokens(self) -> int:
        return sum(lane.batcher.todo_tokens for lane in self.all)

    @property
    def free_blocks(self) -> int:
        return sum(lane.batcher.free_blocks for lane in self.all)


def _load(lane: Lane) -> int:
    return len(lane.batcher.keys()) + len(lane.batcher.reserved)
