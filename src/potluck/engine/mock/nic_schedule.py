"""When a pretended network card is busy: with one thing at a time; what is due later holds up nothing before it."""

from __future__ import annotations

from bisect import insort

KEPT_S = 10.0
"""What was busy longer ago is forgotten: nothing that comes now began so early."""


class NicSchedule:
    """State: spans that are busy, apart from each other, in order."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def book(self, from_s: float, for_s: float, now_s: float) -> float:
        """Take so many seconds of what is free from then on; when the last of them is over."""
        kept = [span for span in self._spans if span[1] > now_s - KEPT_S]
        at_s, left_s, taken = from_s, for_s, []
        for begin_s, end_s in kept:
            if end_s <= at_s:
                continue
            free_s = min(left_s, max(0.0, begin_s - at_s))
            if free_s > 0:
                taken.append((at_s, at_s + free_s))
                left_s -= free_s
            if left_s <= 0:
                break
            at_s = end_s
        if left_s > 0:
            taken.append((at_s, at_s + left_s))
        for span in taken:
            insort(kept, span)
        self._spans = _joined(kept)
        return taken[-1][1] if taken else from_s


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that touch become one."""
    found: list[tuple[float, float]] = []
    for begin_s, end_s in spans:
        if found and begin_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(end_s, found[-1][1]))
        else:
            found.append((begin_s, end_s))
    return found
