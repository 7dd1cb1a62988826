"""What a request does to logits before its next token is drawn: biases, penalties, and what a grammar allows.

All of it is a function of the request and its tokens so far, wherever they were drawn: an engine that goes on where
another ended draws the same. With b the bias of a token, r the repetition penalty, f and p those by frequency and
presence, c how often the output has it, in vLLM's order:

    x = logit + b
    x = (x / r if x > 0 else x * r)   if the prompt or the output has it
    x = x - f c - p                   if c > 0
    x = -inf                          if the grammar does not allow it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from potluck.api.http import HttpRefusal
from potluck.api.segments import UNSUPPORTED
from potluck.core.values.sampling import Sampling


class UnfitFormat(HttpRefusal):
    """A `response_format` that cannot be kept."""

    def __init__(self, problem: str) -> None:
        super().__init__(400, f"response_format: {problem}", UNSUPPORTED, "response_format")


@dataclass(frozen=True, slots=True)
class LogitEdit:
    """One row's changes; the arrays are of the same length, in any order of tokens."""

    tokens: np.ndarray
    bias: np.ndarray
    repetition: np.ndarray
    """1 where it changes nothing."""
    penalty: np.ndarray
    allowed: bytes = b""
    """A bit for each token, the first in the lowest bit; empty: all are."""

    def allows(self, vocab: int) -> np.ndarray:
        """Whether each token is allowed."""
        return np.unpackbits(np.frombuffer(self.allowed, np.uint8), count=vocab, bitorder="little") > 0


class Guide(Protocol):
    """A grammar's state in one request."""

    def consume(self, tokens: Sequence[int]) -> None: ...

    def allowed(self) -> bytes:
        """Tokens that may come next, as `LogitEdit` has them; UnfitFormat where none may."""


class LogitEdits:
    """The changes of one request, token by token. Its only mutator is whoever draws."""

    def __init__(self, way: Sampling, prompt: Sequence[int], generated: int, guide: Guide | None) -> None:
        """The last `generated` tokens of the prompt are output of an attempt before."""
        self._way, self._guide = way, guide
        self._places: dict[int, int] = {}
        """Of tokens that are not as the model has them, in the arrays."""
        self._tokens, self._counts = np.zeros(16, np.int32), np.zeros(16, np.int32)
        self._bias = np.zeros(16, np.float32)
        self._repeats, self._repeated = way.repetition_penalty != 1, np.zeros(16, np.bool_)
        self._follows = self._repeats or bool(way.presence_penalty or way.frequency_penalty)
        for token, bias in way.logit_bias:
            place = self._place(token)
            self._bias[place] = bias
        split = len(prompt) - generated
        if self._repeats:
            for token in dict.fromkeys(prompt[:split]):
                place = self._place(token)
                self._repeated[place] = True
        self.drew(prompt[split:])

    def drew(self, tokens: Sequence[int]) -> None:
        """More of the output."""
        if self._follows:
            for token in tokens:
                place = self._place(token)
                self._counts[place] += 1
                self._repeated[place] = self._repeats
        if self._guide is not None:
            self._guide.consume(tokens)

    def next(self) -> LogitEdit:
        """What changes for the next token."""
        way, size = self._way, len(self._places)
        counts = self._counts[:size]
        return LogitEdit(
            self._tokens[:size].copy(),
            self._bias[:size].copy(),
            np.where(self._repeated[:size], np.float32(way.repetition_penalty), np.float32(1)),
            (way.frequency_penalty * counts + way.presence_penalty * (counts > 0)).astype(np.float32),
            b"" if self._guide is None else self._guide.allowed(),
        )

    def _place(self, token: int) -> int:
        """A token's place; makes the arrays longer where it needs to."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            for name in ("_tokens", "_counts", "_bias", "_repeated"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate((old, np.zeros_like(old))))
        self._tokens[place] = token
        return place
