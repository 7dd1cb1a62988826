"""How one request's tokens are drawn, what a model says where the request does not, and what was drawn."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.errors import InputError

MOST_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are drawn. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """Only the so many likeliest; 0: all."""
    top_p: float = 1.0
    """Only the likeliest ones that together reach this probability."""
    min_p: float = 0.0
    """Only those at least this likely, relative to the likeliest."""
    seed: int = 0
    logprobs: int | None = None
    """Report the token's log probability, and those of so many likeliest tokens."""
    barred: tuple[int, ...] = ()
    """Tokens that are not drawn ..."""
    barred_before: int = 0
    """... for places before this one."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise InputError("temperature", f"must be 0 to 100, is {self.temperature}")
        if self.top_k < 0:
            raise InputError("top_k", f"must not be negative, is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InputError("top_p", f"must be above 0 and at most 1, is {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise InputError("min_p", f"must be 0 to 1, is {self.min_p}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise InputError("logprobs", f"must be 0 to {MOST_LOGPROBS}, is {self.logprobs}")

    @property
    def cuts(self) -> bool:
        """Whether some tokens are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request does not say; a model may bring its own."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        Sampling(self.temperature, self.top_k, self.top_p, self.min_p)  # says what is wrong with them


@dataclass(frozen=True, slots=True)
class Choice:
    token: int
    logprob: float | None = None
    """Under the model itself, before temperature and cuts."""
    top: tuple[tuple[int, float], ...] = ()
