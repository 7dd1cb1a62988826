"""How long an engine takes to say how it fares, and from when on it is silent: learned of each, no clock in it."""

from __future__ import annotations

from typing import NamedTuple

LEAST_S, MOST_S = 0.7, 2.0
FACTOR = 3.0
KEEP = 0.95
"""Of the longest answer, at each one after it: it counts half after 14."""


class ResponseTimes(NamedTuple):
    """What is remembered of an engine's answers."""

    longest_s: float = MOST_S / FACTOR
    """Of late. One that is new is given the most time."""

    @property
    def limit_s(self) -> float:
        """Without an answer for so long it is silent."""
        return min(MOST_S, max(LEAST_S, FACTOR * self.longest_s))

    def heard(self, took_s: float) -> ResponseTimes:
        """After another answer. One that stood still counts as little more than what was borne before: else the next
        time would be noticed late. If it is merely slower than it was, a few answers are enough."""
        return ResponseTimes(max(KEEP * self.longest_s, min(took_s, self.limit_s / 2)))
