"""Arithmetic: products with matrices, why cutting the work changes no bit, and the compiled inner loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether cutting the work changes no bit of an answer, and by which row padding that was reached."""

    holds: bool
    products: str


TILE_TOKENS = 128
"""Of a chunk, that go together through the keys they see."""


class Heads(NamedTuple):
    """Key heads, with so many queries to each."""

    groups: int
    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class KeyLocations:
    """Where the keys are that each packed query looks at, for kernels that read pages where they lie."""

    blocks: Tensor
    """Tables of the sequences, one after the other."""
    starts: Tensor
    """Of each sequence: where its table begins."""
    positions: Tensor
    """Of each query: it sees itself and what is before."""
    singles: tuple[int, Tensor]
    """Leading queries that are their sequence's only one: how many at most, and how many there are."""
    tiles: Tensor
    """[tiles, 3] of the others: sequence, first query, number of queries."""
    window: int | None
