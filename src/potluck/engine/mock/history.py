"""What a sequence's KV stands for, as one number: a running hash of all its tokens.

    after(h, t) = h x FACTOR + (t + 1) x SPREAD        modulo 2^64

It can be taken further from any place, token by token or many at once, and comes to the same: as KV does. What is
drawn depends on it through `mixed`, which no two histories are likely to share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

BITS = 64
MASK = (1 << BITS) - 1
NOTHING = 0x243F6A8885A308D3
"""The history of no tokens."""
FACTOR = 0x9E3779B97F4A7C15
SPREAD = 0xD6E8FEB86659FD93
FEW = 12
"""Up to so many tokens are faster one by one."""


def after(history: int, tokens: Sequence[int]) -> int:
    """The history that goes on with these tokens."""
    if len(tokens) <= FEW:
        for token in tokens:
            history = (history * FACTOR + (token + 1) * SPREAD) & MASK
        return history
    count = len(tokens)
    spread = (np.asarray(tokens, np.uint64) + np.uint64(1)) * np.uint64(SPREAD)
    added = int(np.dot(spread[::-1], _powers(1 << (count - 1).bit_length())[:count]))
    return (history * pow(FACTOR, count, 1 << BITS) + added) & MASK


@lru_cache(maxsize=32)
def _powers(count: int) -> npt.NDArray[np.uint64]:
    """FACTOR to the power of 0, 1, 2, ..."""
    found = np.full(count, FACTOR, np.uint64)
    found[0] = 1
    return np.cumprod(found, dtype=np.uint64)


def mixed(number: int) -> int:
    """Another number of 64 bits, each of whose bits depends on all of this one's (the end of splitmix64)."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)
