"""Multisets of node types as numbers: all those of at most N nodes over G types, without gaps.

A multiset is written as its types in ascending order, t_1 ≤ ... ≤ t_n. Its rank among those of n nodes is

    r = Σ_i C(t_i + i - 1, i)

(the combinatorial number system, with repetition), and its id adds the number of smaller multisets:

    id = offset_n + r,   offset_n = C(G + n - 1, n - 1);   the empty multiset has id 0.

The rank is a sum of one term per node that depends on nothing but its type and its place. So the id of every
part of a multiset follows from that of a part with one node less by one look-up and one addition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError

MOST_MULTISETS = 20_000_000
"""More would not fit in memory beside what is stored of each."""


@dataclass(frozen=True)
class Multisets:
    """All multisets of at most `most` nodes over `kinds` types."""

    kinds: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.kinds <= 255:
            raise InputError("node types", f"must be 1 to 255, are {self.kinds}")
        if not 1 <= self.most <= 8:
            raise InputError("nodes per template", f"must be 1 to 8, are {self.most}")
        if self.count > MOST_MULTISETS:
            problem = f"{self.count} of up to {self.most} nodes of {self.kinds} types are too many"
            raise InputError("node combinations", f"{problem}; take fewer types or fewer nodes per template")

    @property
    def count(self) -> int:
        """How many there are, the empty one included."""
        return comb(self.kinds + self.most, self.most)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """(most + 2,) first id of each size; the last entry is the count."""
        sizes = [0, *(comb(self.kinds + n - 1, n - 1) for n in range(1, self.most + 2))]
        return np.array(sizes, np.int64)

    @cached_property
    def terms(self) -> NDArray[np.int64]:
        """(kinds, most + 1) C(t + i - 1, i): what type t in place i adds to the rank; column 0 is unused."""
        table = [[comb(t + i - 1, i) if i else 0 for i in range(self.most + 1)] for t in range(self.kinds)]
        return np.array(table, np.int64)

    @cached_property
    def members(self) -> NDArray[np.uint8]:
        """(count, most) types of every multiset in ascending order; what is beyond its size is 0."""
        table = np.zeros((self.count, self.most), np.uint8)
        for n in range(1, self.most + 1):
            left = np.arange(self.offsets[n + 1] - self.offsets[n])
            rows = slice(self.offsets[n], self.offsets[n + 1])
            for i in range(n, 0, -1):
                kind = np.searchsorted(self.terms[:, i], left, side="right") - 1
                table[rows, i - 1] = kind
                left = left - self.terms[kind, i]
        return table

    def sizes(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many nodes each multiset has."""
        return np.asarray(np.searchsorted(self.offsets, ids, side="right") - 1, np.int64)

    def counts(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """(len(ids), kinds) how many nodes of each type."""
        found = np.zeros((len(ids), self.kinds), np.uint8)
        sizes, rows = self.sizes(ids), np.arange(len(ids))
        for i in range(self.most):
            there = sizes > i
            # One place at a time: a row occurs once in each, so plain indexing counts right.
            found[rows[there], self.members[ids[there], i]] += 1
        return found

    def id_of(self, types: Iterable[int]) -> int:
        """The id of a multiset, given in any order."""
        ordered = sorted(types)
        if len(ordered) > self.most or any(not 0 <= t < self.kinds for t in ordered):
            raise InputError("nodes", f"{ordered} is not a multiset of at most {self.most} of {self.kinds}")
        rank = sum(comb(t + i - 1, i) for i, t in enumerate(ordered, 1))
        return int(self.offsets[len(ordered)]) + rank if ordered else 0

    def types_of(self, number: int) -> tuple[int, ...]:
        """The types of a multiset in ascending order."""
        if not 0 <= number < self.count:
            raise InputError("multiset", f"{number} is not below {self.count}")
        size = int(np.searchsorted(self.offsets, number, side="right")) - 1
        return tuple(int(t) for t in self.members[number, :size])

    def part_ids(self, types: Sequence[int]) -> NDArray[np.int64]:
        """(2^n,) ids of all parts: bit i of the index says whether the i-th type in ascending order is in."""
        if any(a > b for a, b in pairwise(types)):
            raise InputError("types", "must be in ascending order")
        ranks = [0] * (1 << len(types))
        ids = [0] * (1 << len(types))
        for mask in range(1, 1 << len(types)):
            high, size = mask.bit_length() - 1, mask.bit_count()
            ranks[mask] = ranks[mask ^ (1 << high)] + int(self.terms[types[high], size])
            ids[mask] = int(self.offsets[size]) + ranks[mask]
        return np.array(ids, np.int64)


@lru_cache(maxsize=4)
def multisets(kinds: int, most: int) -> Multisets:
    """The same object for the same question: its tables are made once."""
    return Multisets(kinds, most)
