"""The time that is left, by a clock the caller supplies."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]


class Deadline:
    """Counts down from a limit; `reserve_s` is kept back for writing down the answer."""

    def __init__(self, limit_s: float, clock: Clock) -> None:
        self.limit_s = limit_s
        self.reserve_s = min(0.5, 0.1 * limit_s)
        self._clock = clock
        self._start_s = clock()

    @property
    def spent_s(self) -> float:
        return self._clock() - self._start_s

    @property
    def left_s(self) -> float:
        return self.limit_s - self.reserve_s - self.spent_s

    @property
    def final_s(self) -> float:
        """For the last small steps: half of what is left, the reserve included."""
        return max(0.5 * (self.limit_s - self.spent_s), 0.0)

    @property
    def over(self) -> bool:
        return self.left_s <= 0

    def part(self, share: float) -> Deadline:
        """A deadline within this one, with so much of what is left."""
        return Deadline(max(share * self.left_s, 1e-3), self._clock)
