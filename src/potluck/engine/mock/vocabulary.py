"""Tokens drawn from a history: ordinary words, and now and then the end.

Greedy requests draw by the history alone, others by their seed as well, and JSON from what its grammar allows.
Temperatures, cuts, biases and penalties change nothing else: there are no probabilities here, and those that are
reported are made up.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from itertools import count
from math import log

from potluck.core.errors import InputError
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.logit_edits import LogitEdit
from potluck.engine.mock.history import MASK, mixed

LIKELY, LIKELIER = 0.5, 0.4
"""What is drawn is said to have had a probability of 0.5 to 0.9."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What can be drawn."""

    vocab: int
    ordinary: tuple[int, ...]
    """Tokens of plain text."""
    end: int | None = None
    """A token that ends the output ..."""
    mean_tokens: int = 0
    """... once in so many draws; 0: never, so that outputs are as long as they may be."""

    def __post_init__(self) -> None:
        if not self.ordinary:
            raise InputError("--model", "its tokenizer has no token of plain text")
        if self.mean_tokens and self.end is None:
            raise InputError("--mean-output", "this model has no token that ends its output")

    @property
    def digest(self) -> str:
        """The same for those who draw the same."""
        numbers = (self.vocab, -1 if self.end is None else self.end, self.mean_tokens, *self.ordinary)
        return hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).hexdigest()

    def draw(self, history: int, way: Sampling, position: int, edit: LogitEdit | None = None) -> SampledToken:
        """The token behind a history, which will take this place."""
        number = mixed(history)
        if way.temperature > 0:
            number = mixed(number ^ mixed((way.seed + 1) & MASK))
        token = self._token(number)
        if edit is not None and edit.allowed:
            allowed = edit.allows(self.vocab).nonzero()[0]
            token = int(allowed[number % len(allowed)])
        if way.barred and position < way.barred_before and token in way.barred:
            token = self._allowed(number, way.barred)
        if way.logprobs is None:
            return SampledToken(token)
        return self._likely(number, token, way.logprobs)

    def _token(self, number: int) -> int:
        if self.mean_tokens and self.end is not None and (number >> 32) % self.mean_tokens == 0:
            return self.end
        return self.ordinary[(number & 0xFFFFFFFF) % len(self.ordinary)]

    def _allowed(self, number: int, barred: tuple[int, ...]) -> int:
        words = self.ordinary
        for place in count(number % len(words)):
            if words[place % len(words)] not in barred:
                return words[place % len(words)]
            if place - number % len(words) > len(words):  # All plain words are barred: any token will do.
                return next(token for token in range(self.vocab) if token not in barred)
        raise AssertionError("there is no end to counting")

    def _likely(self, number: int, token: int, most: int) -> SampledToken:
        """With probabilities as a model might have them: the token's, and then each half of what was left."""
        share = LIKELY + LIKELIER * (mixed(number) >> 11) / (1 << 53)
        chosen = log(share)
        top = [(token, chosen)]
        place = number % len(self.ordinary)
        while len(top) < min(most, len(self.ordinary)):
            place = (place + 1) % len(self.ordinary)
            if self.ordinary[place] != token:
                top.append((self.ordinary[place], log((1 - share) / 2 ** len(top))))
        return SampledToken(token, chosen, tuple(top[:most]))
