"""What is asked of whoever computes: tokens of a sequence, and how much there may be at once. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """Tokens of one sequence to compute: they come right behind the `start` tokens that its row holds."""

    row: int
    start: int
    tokens: Sequence[int]
    logits: Literal["last", "all", "none"] = "last"


@dataclass(frozen=True, slots=True)
class RunnerSize:
    """How much a runner can hold at once."""

    rows: int
    """Sequences."""
    blocks: int
    """Blocks of 16 tokens, of each layer that keeps everything."""
    max_tokens: int
    """Of one sequence."""
    max_chunk_tokens: int = 2048
    """Of one sequence in one step: windows need room for so many beside themselves."""
