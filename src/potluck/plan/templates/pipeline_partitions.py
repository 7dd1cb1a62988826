"""All ways to divide nodes among stages: set partitions, once each where nodes are alike.

Nodes stand in order of their types, so which of them are alike is told by n - 1 bits: bit i of the *pattern*
is set when node i + 1 is of the same type as node i. A stage is a mask of nodes. With six unlike nodes there
are 203 partitions; with six alike, 11.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Partitions:
    """Partitions of up to `most` nodes for every pattern, in one array."""

    most: int
    masks: NDArray[np.uint8]
    """(P, most) stages of each partition; 0 beyond its number of stages."""
    starts: NDArray[np.int64]
    """(most + 1, 2^(most-1), most + 2): those of n nodes, a pattern and S stages are the rows
    starts[n, pattern, S] to starts[n, pattern, S + 1]."""

    def of(self, n: int, pattern: int, stages: int) -> NDArray[np.uint8]:
        """(P, stages) masks of the partitions of n nodes into so many stages."""
        first, last = self.starts[n, pattern, stages : stages + 2]
        return self.masks[first:last, :stages]


@lru_cache(maxsize=8)
def partitions(most: int) -> Partitions:
    """The table for up to `most` nodes."""
    starts = np.zeros((most + 1, 1 << (most - 1), most + 2), np.int64)
    blocks: list[NDArray[np.uint8]] = []
    total = 0
    for n in range(1, most + 1):
        every = np.array(list(_set_partitions(n, most)), np.uint8)
        for pattern in range(1 << (n - 1)):
            unlike = every[_first_of_alike(every, n, pattern)]
            stages = np.count_nonzero(unlike, axis=1)
            blocks.append(unlike[np.argsort(stages, kind="stable")])
            ends = np.cumsum(np.bincount(stages, minlength=most + 1))
            starts[n, pattern] = total + np.concatenate([[0], ends])
            total += len(unlike)
    return Partitions(most, np.concatenate(blocks), starts)


def pattern_of(types: tuple[int, ...]) -> int:
    """Which neighbours in a multiset, in ascending order, are of the same type."""
    return sum(1 << i for i, (a, b) in enumerate(pairwise(types)) if a == b)


def _set_partitions(n: int, width: int) -> Iterator[list[int]]:
    """Masks of the stages, padded with 0: node i joins one of the stages so far or opens the next."""

    def extend(node: int, masks: list[int]) -> Iterator[list[int]]:
        if node == n:
            yield masks + [0] * (width - len(masks))
            return
        for stage in range(len(masks)):
            yield from extend(node + 1, [m | (1 << node) * (s == stage) for s, m in enumerate(masks)])
        yield from extend(node + 1, [*masks, 1 << node])

    return extend(0, [])


def _first_of_alike(every: NDArray[np.uint8], n: int, pattern: int) -> NDArray[np.int64]:
    """Rows that no earlier row equals up to swapping nodes of one type and stages."""
    group, weights = 0, []
    for node in range(n):
        group += node > 0 and not pattern >> (node - 1) & 1
        weights.append((n + 1) ** group)  # how many of each type a mask has, as digits
    bits = np.arange(1 << n)[:, None] >> np.arange(n) & 1
    content = bits @ np.array(weights, np.int64)
    keys = np.sort(content[every], axis=1)
    _, first = np.unique(keys, axis=0, return_index=True)
    return np.sort(first)
