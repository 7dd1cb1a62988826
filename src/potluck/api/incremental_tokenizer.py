"""Texts turned into tokens stretch by stretch: what was said before in a conversation is not tokenised again.

A text is cut where that changes no token (`seams.py`), and the tokens of each stretch are remembered, of those used
last up to a number of bytes. Cuts depend only on what stands before them: a conversation that grows keeps its own.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict

from tokenizers import Tokenizer

from potluck.api.token_boundaries import TokenBoundaries, seams_of

STRETCH_CHARS = 256
"""At least; shorter ones cost more to keep than to tokenise."""
ENTRY_BYTES = 300
"""Beside text and tokens, for each stretch."""

Around = tuple[list[int], list[int]]


class IncrementalTokenizer:
    """Of one tokenizer; threads may share it."""

    def __init__(self, tokenizer: Tokenizer, seams: TokenBoundaries, around: Around, most_bytes: int) -> None:
        self._tokenizer, self._seams, self._most_bytes = tokenizer, seams, most_bytes
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.held_bytes = 0
        self.hits = self.misses = 0
        self._before, self._after = around

    def encode(self, text: str, special: bool, apart: str = "") -> list[int]:
        """As the tokenizer does. Who is `apart` cannot tell, by the time that it takes, what others have sent."""
        tokens = list(self._before) if special else []
        start = behind = 0
        for stop, next_behind in self._seams.cuts(text, STRETCH_CHARS):
            found = self._stretch(text[start - behind : stop], apart)
            tokens.extend(found[1:] if behind else found)
            start, behind = stop, next_behind
        # The last one ends where the text does: when more is said it will be another.
        last = self._tokenised(text[start - behind :])
        tokens.extend(last[1:] if behind else last)
        if special:
            tokens.extend(self._after)
        return tokens

    def _stretch(self, text: str, apart: str) -> array[int]:
        key = (apart, text)
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                self.hits += 1
                return found
        found = array("I", self._tokenised(text))
        with self._lock:
            self.misses += 1
            if key not in self._known:
                self._known[key] = found
                self.held_bytes += _bytes(text, found)
            while self.held_bytes > self._most_bytes:
                (_, old_text), old = self._known.popitem(last=False)
                self.held_bytes -= _bytes(old_text, old)
        return found

    def _tokenised(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _bytes(text: str, tokens: array[int]) -> int:
    return sys.getsizeof(text) + len(tokens) * tokens.itemsize + ENTRY_BYTES


def stretches_of(tokenizer: Tokenizer, most_bytes: int) -> IncrementalTokenizer | None:
    """None where a tokenizer's texts cannot be cut."""
    seams = seams_of(tokenizer)
    around = None if seams is None else _around(tokenizer)
    return (
        None
        if seams is None or around is None
        else IncrementalTokenizer(tokenizer, seams, around, most_bytes)
    )


def _around(tokenizer: Tokenizer) -> Around | None:
    """What is added before and behind every text; None where it is not as simple as that."""
    inner = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True)
    if 0 not in whole.special_tokens_mask:
        return None
    first = whole.special_tokens_mask.index(0)
    last = first + len(inner)
    return (whole.ids[:first], whole.ids[last:]) if whole.ids[first:last] == inner else None
