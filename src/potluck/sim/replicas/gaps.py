"""Gaps between output tokens, in logarithmic bins: millions of tokens in a few hundred counts.

A run of decode steps counts at its mean gap; steps within a run differ by less than a bin is wide, as a rule.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import numpy as np

from potluck.perf.step_timer import Floats

BINS_PER_DOUBLING: Final = 16
"""Bins are 4.4 % wide."""
LEAST_S: Final = 2.0**-20
BINS: Final = 40 * BINS_PER_DOUBLING
BUFFER: Final = 1 << 14
FEW: Final = 64
"""So many are sorted one by one, which takes less time than an array does."""

EDGES_S: Floats = LEAST_S * 2.0 ** (np.arange(BINS + 1) / BINS_PER_DOUBLING)
"""Bin i holds gaps from EDGES_S[i] to EDGES_S[i + 1]; what lies outside is in the first or last bin."""
EDGES: list[float] = EDGES_S.tolist()
UPPER_S: Final = [LEAST_S * 2.0 ** ((place + 1) / BINS_PER_DOUBLING) for place in range(BINS)]
"""Where each bin ends."""


class TokenGaps:
    """Counts of gaps. Sorting them into bins waits until there are many, which makes it nearly free.

    Bins are made when they are first needed: in a fleet of thousands most replicas have a few gaps, and would have
    far more bins.
    """

    __slots__ = ("_counts", "gaps_s", "tokens")

    def __init__(self) -> None:
        self._counts: Floats | None = None
        self.gaps_s: list[float] = []
        """Not yet counted; `tokens` has as many."""
        self.tokens: list[int] = []

    def add(self, gap_s: float, tokens: int) -> None:
        """So many tokens came this long after the one before them."""
        self.gaps_s.append(gap_s)
        self.tokens.append(tokens)
        if len(self.tokens) >= BUFFER:
            self.count()

    @property
    def counts(self) -> list[int]:
        """Tokens in each bin."""
        counts = [0] * BINS
        for place, count in self.filled():
            counts[place] = count
        return counts

    def filled(self) -> list[tuple[int, int]]:
        """The bins that hold any, and how many."""
        if self._counts is None and len(self.tokens) < FEW:
            few: dict[int, int] = {}
            for gap_s, tokens in zip(self.gaps_s, self.tokens, strict=True):
                if tokens:
                    place = min(max(bisect_right(EDGES, gap_s) - 1, 0), BINS - 1)
                    few[place] = few.get(place, 0) + tokens
            return sorted(few.items())
        self.count()
        if self._counts is None:
            return []
        places = np.flatnonzero(self._counts)
        return [*zip(places.tolist(), np.rint(self._counts[places]).astype(np.int64).tolist(), strict=True)]

    def count(self) -> None:
        """Empty the lists into the bins."""
        if self.tokens:
            where = np.clip(np.searchsorted(EDGES_S, self.gaps_s, side="right") - 1, 0, BINS - 1)
            more: Floats = np.bincount(where, self.tokens, BINS).astype(np.float64)
            self._counts = more if self._counts is None else self._counts + more
            self.gaps_s.clear()
            self.tokens.clear()
