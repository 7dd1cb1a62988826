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

import asyncio
import importlib
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck.api.http import HttpRefusal
from potluck.api.segments import UNSUPPORTED
from potluck.api.tokenizer import ModelTokenizer
from potluck.core.values.sampling import Sampling
from potluck.engine.compute.grammar_trial import (
    GrammarTokenizer,
    GrammarTrials,
    TrialFailed,
    TrialKilled,
    TrialServerLost,
    compile_schema,
    one_line,
)


class UnfitFormat(HttpRefusal):
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
        return np.unpackbits(np.frombuffer(self.allowed, np.uint8), count=vocab, bitorder="little") > 0


class LogitEdits:
    """The changes of one request, token by token. Its only mutator is whoever draws."""

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], generated: int, guide: JsonGuide | None
    ) -> None:
        """The last `generated` tokens of the prompt are output of an attempt before."""
        self._way, self._guide = sampling, guide
        self._places: dict[int, int] = {}
        """Of tokens that are not as the model has them, in the arrays."""
        self._tokens, self._counts = np.zeros(16, np.int32), np.zeros(16, np.int32)
        self._bias = np.zeros(16, np.float32)
        self._repeats, self._repeated = sampling.repetition_penalty != 1, np.zeros(16, np.bool_)
        self._follows = self._repeats or bool(sampling.presence_penalty or sampling.frequency_penalty)
        for token, bias in sampling.logit_bias:
            place = self._place(token)
            self._bias[place] = bias
        split = len(prompt) - generated
        if self._repeats:
            for token in dict.fromkeys(prompt[:split]):
                place = self._place(token)
                self._repeated[place] = True
        self.drew(prompt[split:])

    def drew(self, tokens: Sequence[int]) -> None:
        if self._follows:
            for token in tokens:
                place = self._place(token)
                self._counts[place] += 1
                self._repeated[place] = self._repeats
        if self._guide is not None:
            self._guide.consume(tokens)

    def next(self) -> LogitEdit:
        sampling, size = self._way, len(self._places)
        counts = self._counts[:size]
        return LogitEdit(
            self._tokens[:size].copy(),
            self._bias[:size].copy(),
            np.where(self._repeated[:size], np.float32(sampling.repetition_penalty), np.float32(1)),
            (sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)).astype(
                np.float32
            ),
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


GRAMMARS_MAX_KEPT = 64
GRAMMARS_MAX_KEPT_BYTES = 256 << 20
"""Of compiled grammars, those used last."""
REFUSALS_MAX_KEPT = 256
KILLED_KEPT_S = 60.0
"""A schema whose trial was killed is not tried again for so long."""
GRAMMAR_THREADS = 2
"""Schemas compiled at once: one that takes as long as it may delays others by no more than that."""
GRAMMARS_MAX_WAITING = 64


class JsonGuide:
    """How far one request's output has come in its grammar."""

    def __init__(self, matcher: Any, ends: Sequence[int], end: int) -> None:
        self._matcher, self._ends, self._end = matcher, ends, end

    def copy(self) -> JsonGuide:
        return JsonGuide(self._matcher.deep_copy(), self._ends, self._end)

    def consume(self, tokens: Sequence[int]) -> None:
        """More of the output; what does not fit is told by `allowed`."""
        self._matcher.consume_tokens([token for token in tokens if token not in self._ends])

    def allowed(self) -> bytes:
        mask = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        bits = np.frombuffer(mask, np.uint8).copy()
        if self._matcher.is_error() or not bits.any():
            raise UnfitFormat(f"the grammar cannot go on ({one_line(self._matcher.get_error())})")
        if bits[self._end >> 3] >> (self._end & 7) & 1:
            for token in self._ends:  # The grammar knows one end; a model may have several.
                bits[token >> 3] |= 1 << (token & 7)
        return bits.tobytes()


class Grammars:
    """Grammars of JSON schemas for one model: each is tried in a bounded process first, then compiled here."""

    def __init__(self, tokenizer: ModelTokenizer | None, vocab: int, ends: frozenset[int]) -> None:
        self._text, self._vocab = tokenizer, vocab
        self._ends = sorted(token for token in ends if 0 <= token < vocab)
        self._tokenizer: Any = None
        self._known: OrderedDict[str, tuple[JsonGuide, int]] = OrderedDict()
        """By schema, with the memory that it took on trial."""
        self._refused: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """By schema: why, and until when this counts."""
        self._lock = threading.Lock()
        self._waiting: dict[str, Future[JsonGuide]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self.trials: GrammarTrials | None = None

    async def guide(self, schema: str) -> JsonGuide | None:
        """For one request; None where it asks for no format. UnfitFormat says what is wrong with the schema."""
        if not schema:
            return None
        known = self._of(schema)
        if known is not None:
            return known
        waiting = self._waiting.get(schema)
        if waiting is None:
            if len(self._waiting) >= GRAMMARS_MAX_WAITING:
                line = f"{len(self._waiting)} schemas wait to be compiled; try again"
                raise HttpRefusal(429, line, "overloaded")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(GRAMMAR_THREADS, "grammars")
            waiting = self._waiting[schema] = self._threads.submit(self.compiled, schema)
            waiting.add_done_callback(lambda _: self._waiting.pop(schema, None))
        # Others may wait for the same schema, so a client that leaves does not cancel it.
        return (await asyncio.shield(asyncio.wrap_future(waiting))).copy()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self.trials is not None:
            self.trials.close()

    def compiled(self, schema: str) -> JsonGuide:
        json_guide = self._of(schema)
        if json_guide is not None:
            return json_guide
        try:
            json_guide = self._compile(schema)
        except TrialFailed as error:
            until_s = time.monotonic() + KILLED_KEPT_S if isinstance(error, TrialKilled) else math.inf
            with self._lock:
                self._refused[schema] = (str(error), until_s)
                if len(self._refused) > REFUSALS_MAX_KEPT:
                    self._refused.popitem(last=False)
            raise UnfitFormat(str(error)) from error
        return json_guide.copy()

    def _of(self, schema: str) -> JsonGuide | None:
        """What is known of a schema; raises UnfitFormat where it was refused."""
        with self._lock:
            known = self._known.get(schema)
            if known is not None:
                self._known.move_to_end(schema)
                return known[0].copy()
            problem, until_s = self._refused.get(schema, ("", 0.0))
            if problem and time.monotonic() < until_s:
                raise UnfitFormat(problem)
        return None

    def _compile(self, schema: str) -> JsonGuide:
        if self._text is None or not self._ends:
            missing = "a tokenizer" if self._text is None else "a token that ends its output"
            raise UnfitFormat(f"only text is possible: this model has not {missing}")
        try:
            library: Any = importlib.import_module("llguidance")
        except ImportError as error:
            line = "JSON needs llguidance beside this engine: pip install 'potluck[engine]'"
            raise UnfitFormat(line) from error
        with self._lock:
            if self._tokenizer is None or self.trials is None:
                described = {**json.loads(self._text.described()), "truncation": None, "padding": None}
                tokenizer = GrammarTokenizer(json.dumps(described), self._vocab, self._ends[0])
                try:
                    self._tokenizer = tokenizer.load(library)
                except Exception as error:  # the library raises bare ones
                    line = f"this model's tokenizer cannot be used for JSON ({one_line(str(error))})"
                    raise UnfitFormat(line) from error
                self.trials = GrammarTrials(tokenizer)
        try:
            size_bytes = self.trials.check(schema)
        except TrialServerLost as error:
            raise HttpRefusal(503, f"response_format: {error}; try again", "try_again") from error
        matcher = compile_schema(library, self._tokenizer, schema)
        json_guide = JsonGuide(matcher, self._ends, self._ends[0])
        with self._lock:
            self._known[schema] = (json_guide, size_bytes)
            while len(self._known) > 1 and (
                len(self._known) > GRAMMARS_MAX_KEPT
                or sum(size for _, size in self._known.values()) > GRAMMARS_MAX_KEPT_BYTES
            ):
                self._known.popitem(last=False)
        return json_guide
