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
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck.api.http import HttpRefusal
from potluck.api.segments import UNSUPPORTED
from potluck.api.tokenizer import ModelTokenizer
from potluck.core.values.sampling import Sampling


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

    def __init__(self, way: Sampling, prompt: Sequence[int], generated: int, guide: JsonGuide | None) -> None:
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
        if self._follows:
            for token in tokens:
                place = self._place(token)
                self._counts[place] += 1
                self._repeated[place] = self._repeats
        if self._guide is not None:
            self._guide.consume(tokens)

    def next(self) -> LogitEdit:
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


MOST_KEPT = 64
"""Compiled grammars, of those used last."""
STYLE: dict[str, object] = {
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "item_separator": r",\x20?",
    "key_separator": r":\x20?",
    "coerce_one_of": True,
    "lenient": False,
}
"""One line, with a blank behind commas and colons or none: weak models would go on with blanks for ever. What a
schema says of these (`x-guidance`) does not count."""
LIMITS: dict[str, object] = {
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "verbose_errors": False,
}
"""Some tenths of a second to compile, some milliseconds for a token, some 40 MB, at the very most."""


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
            raise UnfitFormat(f"the grammar cannot go on ({_line(self._matcher.get_error())})")
        if bits[self._end >> 3] >> (self._end & 7) & 1:
            for token in self._ends:  # The grammar knows one end; a model may have several.
                bits[token >> 3] |= 1 << (token & 7)
        return bits.tobytes()


class Grammars:
    def __init__(self, text: ModelTokenizer | None, vocab: int, ends: frozenset[int]) -> None:
        self._text, self._vocab = text, vocab
        self._ends = sorted(token for token in ends if 0 <= token < vocab)
        self._tokenizer: Any = None
        self._known: OrderedDict[str, JsonGuide] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    async def guide(self, schema: str) -> JsonGuide | None:
        """For one request; None where it asks for no format. UnfitFormat says what is wrong with the schema."""
        if not schema:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammars")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.compiled, schema)

    def compiled(self, schema: str) -> JsonGuide:
        """One thread's affair."""
        json_guide = self._known.get(schema)
        if json_guide is None:
            json_guide = self._known[schema] = self._compile(schema)
            if len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(schema)
        return json_guide.copy()

    def _compile(self, schema: str) -> JsonGuide:
        if self._text is None or not self._ends:
            missing = "a tokenizer" if self._text is None else "a token that ends its output"
            raise UnfitFormat(f"only text is possible: this model has not {missing}")
        try:
            library: Any = importlib.import_module("llguidance")
        except ImportError as error:
            line = "JSON needs llguidance beside this engine: pip install 'potluck[engine]'"
            raise UnfitFormat(line) from error
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer(library, self._text)
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(schema, overrides=STYLE)
        except ValueError as error:
            raise UnfitFormat(f"the schema cannot be used ({_line(str(error))})") from error
        limits = library.LLParserLimits(**LIMITS)
        matcher = library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise UnfitFormat(f"the schema cannot be used ({_line(matcher.get_error())})")
        return JsonGuide(matcher, self._ends, self._ends[0])

    def _read_tokenizer(self, library: Any, text: ModelTokenizer) -> Any:
        described = {**json.loads(text.described()), "truncation": None, "padding": None}
        try:
            return library.LLTokenizer(
                json.dumps(described),
                n_vocab=self._vocab,
                eos_token=self._ends[0],
                slices=library.LLTokenizer.json_slices(),
            )
        except Exception as error:  # the library raises bare ones
            raise UnfitFormat(
                f"this model's tokenizer cannot be used for JSON ({_line(str(error))})"
            ) from error


def _line(text: str) -> str:
    return " ".join(text.split())[:200] or "it is at its end"
