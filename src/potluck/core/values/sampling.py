"""How one request's tokens are drawn, what a model says where the request does not, and what was drawn."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.errors import InputError

MOST_LOGPROBS = 20
MOST_BIASES = 1024
LARGEST_PENALTY = 2.0
LARGEST_REPETITION = 100.0
LARGEST_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a token is drawn from logits. Temperature 0 is greedy."""

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
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Sampling(Drawing):
    """How one request's tokens are drawn: the same, and what changes logits before."""

    presence_penalty: float = 0.0
    """Taken off the logit of every token that the output has already ..."""
    frequency_penalty: float = 0.0
    """... and once more for each time that it has it."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that the prompt or the output has, and multiplies negative ones."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    json_schema: str = ""
    """The output is JSON that is valid under this schema; empty: any text."""

    def __post_init__(self) -> None:
        Drawing.__post_init__(self)  # `super()` does not know classes with slots
        if not self.edits:
            return
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not abs(value) <= LARGEST_PENALTY:
                raise InputError(name, f"must be {-LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}, is {value:g}")
        if not 0 < self.repetition_penalty <= LARGEST_REPETITION:
            limits = f"above 0 and at most {LARGEST_REPETITION:g}"
            raise InputError("repetition_penalty", f"must be {limits}, is {self.repetition_penalty:g}")
        if len(self.logit_bias) > MOST_BIASES:
            raise InputError("logit_bias", f"at most {MOST_BIASES} tokens, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias:
            if not abs(bias) <= LARGEST_BIAS:
                limits = f"{-LARGEST_BIAS:g} to {LARGEST_BIAS:g}"
                raise InputError("logit_bias", f"must be {limits}, is {bias:g} for token {token}")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise InputError("logit_bias", "names a token twice")

    @property
    def edits(self) -> bool:
        """Whether logits change with what was said, or by token, before anything is drawn."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias or self.json_schema)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request does not say; a model may bring its own."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        # Says what is wrong with them.
        Sampling(
            self.temperature, self.top_k, self.top_p, self.min_p, repetition_penalty=self.repetition_penalty
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: int
    logprob: float | None = None
    """Under the model itself, before temperature and cuts."""
    top: tuple[tuple[int, float], ...] = ()
