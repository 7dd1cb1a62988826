"""What replicas of one kind really take, beside what the facts say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LEAST: Final = 0.5
MOST: Final = 4.0
"""What is planned with at most: beyond it something is broken, and no plan helps."""
WORTH: Final = 0.1
"""A pace must be off by so much."""


@dataclass(frozen=True, slots=True)
class ObservedSpeed:
    """How long replicas of a model on one kind of node take, for each second of their facts."""

    model: str
    """As the plan names it."""
    node: str
    tp: int
    pace: float
    replicas: int = 1
    """In how many it was seen; it is their median."""

    @property
    def believed(self) -> float:
        return min(MOST, max(LEAST, self.pace))

    @property
    def matters(self) -> bool:
        return abs(self.pace - 1.0) > WORTH

    def __str__(self) -> str:
        shards = f" tp{self.tp}" if self.tp > 1 else ""
        return f"{self.node}{shards} at {self.believed:.2f} of its facts for {self.model}"


def spoken(paces: Sequence[ObservedSpeed]) -> str:
    """What is planned with, in a line; empty where it is the facts."""
    listed = ", ".join(str(each) for each in paces if each.matters)
    return f"plans with {listed}" if listed else ""
