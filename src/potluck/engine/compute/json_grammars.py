"""JSON schemas as grammars over a model's tokens, by llguidance. Engines run without it, and then refuse formats.

A grammar is compiled once and copied for every request. Compiling is bounded in size and has one thread of its own,
so that no client's schema holds up the others' requests.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from potluck.api.tokenizer import ModelTokenizer
from potluck.engine.compute.logit_edits import UnfitFormat

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
    """Of one model."""

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
        found = self._known.get(schema)
        if found is None:
            found = self._known[schema] = self._compile(schema)
            if len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(schema)
        return found.copy()

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
