"""The values of batching: what bounds a replica's steps, one step, one sequence. `batch.py` has the rules."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop
from typing import Final

from potluck.core.errors import CapacityError, InputError
from potluck.core.state.facts import BLOCK_TOKENS

FIRST: Final = 0
DONE: Final = 1
FINISHED: Final = 2
PREEMPTED: Final = 3
RESUMED: Final = 4
"""What may happen to a sequence: its first output token, the end of a segment that hands over, its last output
token, the loss of its blocks, the first token after that."""
WAITING: Final = 0
PREFILL: Final = 1
DECODE: Final = 2
KEPT: Final = 3
GONE: Final = 4

LATE: Final = -1_000_000
"""Priority of prompts that are late anyway, below all that users may ask for. One of them is computed at a time: its
KV takes room from those that can be in time."""
LOWEST: Final = -(1 << 60)
"""Below every priority."""

Happening = tuple[int, int]
"""What, to whom (key)."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What bounds a replica's steps."""

    total_blocks: int
    token_budget: int = 2048
    """New tokens of one step, prompts and decodes together."""
    max_running: int = 1024
    """Sequences that have begun: slots."""
    chunk_tokens: int | None = None
    """New tokens of one prompt in one step, where that is less than the budget."""
    spare_blocks: int = -1
    """Blocks left free when a sequence begins beside others; a hundredth of all unless said."""
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        for name in ("total_blocks", "token_budget", "max_running", "block_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"limits: {name}", f"must be at least 1, is {getattr(self, name)}")
        if self.token_budget < self.max_running:
            raise InputError(
                "limits: token_budget", f"must give each of the {self.max_running} sequences a token"
            )
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise InputError("limits: chunk_tokens", f"must be at least 1, is {self.chunk_tokens}")

    @property
    def spare(self) -> int:
        return self.spare_blocks if self.spare_blocks >= 0 else self.total_blocks // 100


class BatchStep:
    """One step: what is to be computed, and who had to go for it."""

    __slots__ = ("chunks", "context_tokens", "decodes", "newcomers", "preempted")

    def __init__(
        self,
        chunks: list[tuple[int, int, int]],
        decodes: int,
        context_tokens: int,
        newcomers: int,
        preempted: list[int],
    ) -> None:
        self.chunks = chunks
        """(key, new tokens, context before them)"""
        self.decodes = decodes
        self.context_tokens = context_tokens
        """Of the decodes, added up."""
        self.newcomers = newcomers
        """Decodes that make their first token here."""
        self.preempted = preempted

    @property
    def tokens(self) -> int:
        return self.decodes + sum(chunk[1] for chunk in self.chunks)


class Sequence:
    """A sequence as the Batcher keeps it; written by nobody else."""

    __slots__ = (
        "asked",
        "base",
        "blocks",
        "end",
        "held",
        "key",
        "left",
        "order",
        "priority",
        "state",
        "tenant",
        "todo",
    )

    base: int
    """Its context less the clock, once it decodes."""
    end: int
    """The clock at its last token, once it decodes."""

    def __init__(self, key: int, priority: int, order: int, todo: int, held: int, asked: int) -> None:
        self.key = key
        self.priority = priority
        self.order = order
        self.todo = todo
        """Prompt tokens to compute."""
        self.held = held
        """Tokens whose KV is there; while decoding it is base + clock instead."""
        self.asked = asked
        self.left = asked
        """Output tokens to make; while decoding it is end - clock instead."""
        self.blocks = 0
        """Blocks of the prompt; while decoding they follow from the context."""
        self.state = WAITING
        self.tenant = ""
        """Whose it is; not said while all are one tenant's."""

    def left_at(self, clock: int) -> int:
        """Output tokens to make, whether it decodes or not."""
        return self.end - clock if self.state == DECODE else self.left


Queue = list[tuple[int, int, Sequence]]
"""A heap by priority, highest first, then arrival; may hold some that left it."""


def head_of(queue: Queue) -> Sequence | None:
    """The next in line; those that left are removed."""
    while queue:
        if queue[0][2].state == WAITING:
            return queue[0][2]
        heappop(queue)
    return None


def require_fit(
    most_tokens: int, key: int, compute_tokens: int, context_tokens: int, output_tokens: int
) -> None:
    """A sequence must have a prompt, and room to end; nothing to compute is fine where there is context."""
    whole = compute_tokens + context_tokens
    if compute_tokens < 0 or context_tokens < 0 or output_tokens < 0 or not whole:
        raise InputError(f"sequence {key}", "needs a prompt of at least one token")
    # The last output token is not put in again, so it needs no room.
    if whole + max(output_tokens - 1, 0) > most_tokens:
        raise CapacityError(
            f"sequence {key} of {whole} + {output_tokens} tokens can never fit in {most_tokens}"
        )
