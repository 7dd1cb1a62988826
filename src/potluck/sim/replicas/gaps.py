"""Gaps between output tokens, in logarithmic bins: millions of tokens in a few hundred counts.

A run of decode steps counts at its mean gap; steps within a run differ by less than a bin is wide, as a rule.
"""

from __future__ import annotations

import numpy as np

from potluck.perf.step import Floats

BINS_PER_DOUBLING = 16
"""Bins are 4.4 % wide."""
LEAST_S = 2.0**-20
BINS = 40 * BINS_PER_DOUBLING
BUFFER = 1 << 14

EDGES_S: Floats = LEAST_S * 2.0 ** (np.arange(BINS + 1) / BINS_PER_DOUBLING)
"""Bin i holds gaps from EDGES_S[i] to EDGES_S[i + 1]; what lies outside is in the first or last bin."""


class Gaps:
    """Counts of gaps. Sorting them into bins waits until there are many, which makes it nearly free."""

    __slots__ = ("_counts", "gaps_s", "tokens")

    def __init__(self) -> None:
        self._counts: Floats = np.zeros(BINS)
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
        self.count()
        return [round(count) for count in self._counts.tolist()]

    def count(self) -> None:
        """Empty the lists into the bins."""
        if self.tokens:
            where = np.clip(np.searchsorted(EDGES_S, self.gaps_s, side="right") - 1, 0, BINS - 1)
            self._counts += np.bincount(where, self.tokens, BINS)
            self.gaps_s.clear()
            self.tokens.clear()
