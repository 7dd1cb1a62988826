"""An answer's text as its tokens come: special tokens, stop tokens and stop strings taken out. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.api.stops import StopScanner
from potluck.api.tokenizer import ModelTokenizer
from potluck.core.values.sampling import SampledToken


@dataclass(frozen=True, slots=True)
class TextRules:
    """What of an answer is shown, and which strings end it."""

    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    """Stop strings are looked for behind the first so many tokens."""
    include_stop: bool = False
    """Whether the string or the token that ended it is shown."""
    special: bool = False
    """Whether special tokens are."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of an answer; the last one says why it ended."""

    text: str
    choices: tuple[SampledToken, ...] = ()
    finish: str | None = None
    cached_tokens: int = 0


class TextStream:
    """Tokens in, text out that is safe to show. Without a tokenizer there is none."""

    def __init__(self, text: ModelTokenizer | None, shown: TextRules, ends: frozenset[int]) -> None:
        self._decoding = None if text is None else text.stream(special=shown.special)
        self._scanner = StopScanner(shown.stops, include=shown.include_stop)
        self._shown, self._ends = shown, ends
        self.tokens = 0

    def grow(self, choice: SampledToken) -> str:
        """One more token; the text that can be shown now. `met` says whether a stop string was."""
        self.tokens += 1
        hidden = choice.token in self._ends and not self._shown.include_stop
        piece = "" if hidden or self._decoding is None else self._decoding.feed(choice.token)
        return piece if self.tokens <= self._shown.min_tokens else self._scanner.feed(piece)

    @property
    def met(self) -> bool:
        """A stop string was found: the rest is of no use."""
        return self._scanner.found is not None

    def feed(self, choice: SampledToken) -> TextDelta:
        """One more token. `finish` is `stop` where a stop string was met."""
        return TextDelta(self.grow(choice), (choice,), "stop" if self.met else None)

    def end(self, reason: str, cached_tokens: int = 0) -> TextDelta:
        """No more tokens come: what was held back is shown."""
        text = self._scanner.feed("" if self._decoding is None else self._decoding.rest())
        if self._scanner.found is not None:
            reason = "stop"
        return TextDelta(text + self._scanner.rest(), (), reason, cached_tokens)
