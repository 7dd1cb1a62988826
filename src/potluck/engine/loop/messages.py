"""What the loop is asked to do, and what it says while doing it. Values only; they cross between threads."""

from __future__ import annotations

from dataclasses import dataclass, field

from potluck.core.errors import CapacityError, InputError
from potluck.core.replica.sequences import require_weight
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.logit_edits import Guide
from potluck.kv.chunks import KvChunk

NOT_FETCHED = "not_fetched"
"""The code of a cache that nobody came for."""


@dataclass(frozen=True, slots=True)
class Job:
    """One segment of a request: the tokens [start, stop) of its prompt; without a stop it also decodes.

    The cache of [0, start) comes from elsewhere. Whoever decodes computes the prompt's last token itself, since the
    first output token comes of it: a segment that is to go on to the prompt's very end stops one token before.
    """

    key: int
    prompt: tuple[int, ...]
    """All of it, whatever the segment."""
    start: int = 0
    stop: int | None = None
    output_tokens: int = 0
    """At most so many; only where there is no stop."""
    sampling: Sampling = field(default_factory=Sampling)
    ends: frozenset[int] = frozenset()
    """Tokens that end the output."""
    priority: int = 0
    """Higher first."""
    tenant: str = ""
    """Tenants share what is computed, by their weights."""
    weight: float = 1.0
    salt: str = ""
    """Prefixes are shared only with those of the same salt."""
    generated: int = 0
    """How many of the prompt's last tokens are output already."""
    guide: Guide | None = field(default=None, compare=False)
    """For output of `sampling.json_schema`; of this job alone, and the loop's once it is submitted."""

    def __post_init__(self) -> None:
        require_weight(self.weight)
        if not 0 <= self.generated < max(len(self.prompt), 1):
            raise InputError("generated", f"must leave a prompt of the {len(self.prompt)} tokens")
        length = len(self.prompt)
        if not length:
            raise InputError("prompt", "must have at least one token")
        if not 0 <= self.start <= length:
            raise InputError("start", f"must be 0 to {length}, is {self.start}")
        if self.stop is None:
            if self.output_tokens < 1:
                raise InputError("max_tokens", f"must be at least 1, is {self.output_tokens}")
            return
        if not self.start < self.stop <= length:
            raise InputError("stop", f"must be {self.start + 1} to {length}, is {self.stop}")
        if self.whole < 1:
            raise InputError("stop", "a prompt of one token has nothing to hand on")
        if self.received >= self.whole:
            raise InputError("start", f"leaves nothing to compute before {self.whole}")

    def must_fit(self, vocab: int, most_tokens: int) -> None:
        """Raise why an engine with this vocabulary and room for so many tokens can never run it."""
        if min(self.prompt) < 0 or max(self.prompt) >= vocab:
            wrong = next(token for token in self.prompt if not 0 <= token < vocab)
            raise InputError("prompt", f"token {wrong} is not in the vocabulary of {vocab}")
        strange = next((token for token, _ in self.sampling.logit_bias if not 0 <= token < vocab), None)
        if strange is not None:
            raise InputError("logit_bias", f"token {strange} is not in the vocabulary of {vocab}")
        if self.whole + max(self.output_tokens - 1, 0) > most_tokens:
            raise CapacityError(
                f"{self.whole} + {self.output_tokens} tokens are more than the {most_tokens} that fit"
            )

    @property
    def received(self) -> int:
        """Tokens whose cache comes from elsewhere."""
        return min(self.start, len(self.prompt) - 1)

    @property
    def whole(self) -> int:
        """Tokens that the row holds when the prompt is done."""
        return len(self.prompt) if self.stop is None else min(self.stop, len(self.prompt) - 1)

    @property
    def hands_on(self) -> bool:
        return self.stop is not None

    @property
    def standing(self) -> tuple[int, str, float]:
        """Its place among others: priority, tenant, weight."""
        return self.priority, self.tenant, self.weight


@dataclass(frozen=True, slots=True)
class JobTimes:
    """When what happened to a request, by the loop's clock."""

    came_s: float
    began_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One more output token."""

    choice: SampledToken
    gap_s: float | None = None
    """Since the one before; None for the first."""


@dataclass(frozen=True, slots=True)
class RowReady:
    """A row and blocks are set apart for a cache that is coming in."""


@dataclass(frozen=True, slots=True)
class LayerSent:
    """Parcels of one layer for the receiver; `last` with the final layer."""

    parcels: tuple[KvChunk, ...]
    last: bool
    exact: bool = True
    """Whether nothing in them came through a codec that loses something."""


@dataclass(frozen=True, slots=True)
class JobComputed:
    """A segment that hands on is done; it keeps its blocks until its cache is fetched."""

    times: JobTimes


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The last thing said about a request. `reason`: stop, length, handed_on, cancelled or error."""

    reason: str
    times: JobTimes
    problem: str = ""
    again: bool = False
    """It ended for want of a worker or of room: asked again, here or elsewhere, it may go well."""
    code: str = ""
    """A word for the problem, where others can act on it."""


Event = OutputToken | RowReady | LayerSent | JobComputed | JobEnded
