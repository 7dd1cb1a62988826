"""Whether this machine keeps up with the GPUs that its engines act as.

An engine that acts as a GPU sleeps through what is left of each step's time. Where its own computing takes longer
than the GPU's would, nothing can be slept away: steps are late, and what clients see is this machine's doing, not the
plan's. Engines say how long their steps should have taken and how long they did; here both are added up.
"""

from __future__ import annotations

WINDOW_S = 30.0
"""Seconds of the GPUs' steps, of all engines together, that are looked back upon."""
LEAST_S = 1.0
"""With less than this nothing is said."""
SLOW = 1.25
"""Times as long as they should that steps may take before it is said."""


class EmulationLag:
    """Of all engines of a fleet; `told` is its one mutator."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}
        self._predicted_s = self._took_s = 0.0

    def told(self, engine: str, predicted_s: float, took_s: float) -> None:
        """Both since the engine started. What it did before it was first asked, its very first steps, is left out."""
        before = self._last.get(engine)
        self._last[engine] = (predicted_s, took_s)
        if before is None or predicted_s <= before[0]:  # it is new, or has done nothing since
            return
        self._predicted_s += predicted_s - before[0]
        self._took_s += took_s - before[1]
        keep = min(1.0, WINDOW_S / self._predicted_s)
        self._predicted_s, self._took_s = keep * self._predicted_s, keep * self._took_s

    @property
    def slowdown(self) -> float | None:
        """Times as long as they should that steps took lately; None where hardly any were seen."""
        return None if self._predicted_s < LEAST_S else max(1.0, self._took_s / self._predicted_s)


def slow_lines(slowdown: float | None) -> list[str]:
    """What is said of it: nothing where this machine keeps up."""
    if slowdown is None or slowdown < SLOW:
        return []
    return [
        f"this machine computes {slowdown:.1f} times slower than the GPUs it stands for: "
        "latencies are the CPU's, not the plan's"
    ]
