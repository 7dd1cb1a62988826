"""Steps put under way and landed; rows that are lost meanwhile are left out, and the rest goes on."""

from __future__ import annotations

from collections.abc import Callable

from potluck.api.segments import UNSUPPORTED
from potluck.core.errors import CapacityError, PotluckError
from potluck.core.values.sampling import SampledToken
from potluck.engine.compute.executor import Deliver, Executor, WorkerLost
from potluck.engine.compute.logit_edits import UnfitFormat
from potluck.engine.loop.jobs import CacheRows
from potluck.engine.loop.microbatches import RunningStep

FAILURES = (PotluckError, RuntimeError, ValueError, OSError)
"""What may go wrong inside an executor: the requests at hand fail, the engine lives on."""


def problem_of(error: Exception) -> tuple[str, bool, str]:
    """What the end of a request says of an error: a line, whether to ask again, and a code."""
    again = isinstance(error, WorkerLost | CapacityError)
    code = UNSUPPORTED if isinstance(error, UnfitFormat) else ""
    return (str(error).splitlines() or [type(error).__name__])[0], again, code


class StepRunner:
    """The loop's way to its executor."""

    def __init__(
        self,
        executor: Executor,
        rows: CacheRows,
        send: Deliver,
        lose: Callable[[list[int], Exception], None],
    ) -> None:
        self._executor, self._rows, self._send, self._lose = executor, rows, send, lose

    def begin(self, flight: RunningStep) -> None:
        """Put a step under way, without the rows that turn out to be lost."""
        while flight.works:
            try:
                flight.land = self._executor.begin(flight.works, flight.draws, flight.exports, self._send)
                return
            except FAILURES as error:
                self._leave_out(flight, error)

    def landed(self, flight: RunningStep) -> dict[int, SampledToken]:
        """Wait for a step; if rows are lost on the way it is run again without them. Tokens by key."""
        while flight.works:
            assert flight.land is not None
            try:
                found = zip(flight.drawn, flight.land(), strict=True)
                return {self._rows.keys[row]: choice for row, choice in found}
            except FAILURES as error:
                self._leave_out(flight, error)
                self.begin(flight)
        return {}

    def _leave_out(self, flight: RunningStep, error: Exception) -> None:
        lost = flight.lost(error) & set(self._rows.keys)
        self._lose([self._rows.keys[row] for row in lost], error)
        flight.without(lost)
