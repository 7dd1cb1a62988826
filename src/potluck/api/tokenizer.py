"""Where a text may be cut so that its parts, tokenised one by one, give the very tokens of the whole.

A tokenizer (Hugging Face's `tokenizer.json`) finds its added tokens first, leftmost and longest, in the text as it
is; then each piece between them is normalised, split and looked up by itself, and what a post-processor adds is added
to the whole. So:

    behind an added token    that is found in the text as it is, swallows no space behind it, and can neither lie
                             within another one nor overlap with one: wherever it stands, it is found. What follows is
                             tokenised behind the same token again: some splitters treat the first piece apart
    between lines            of a visible ASCII character, a line feed, and an ASCII letter: for three splitters that
                             are known, of which no piece can hold the line feed and the letter, nor look across. Only
                             where nothing is normalised, no space is put before, and no added token holds a line feed

Whatever a tokenizer does that is not known here, its texts are not cut at all.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from potluck.api.chat_templates import DEFAULT, ChatTemplates, Message, read_templates
from potluck.api.tokenizer_process import SLICE_TOKENS, TokenizerProcess
from potluck.core.errors import FormatError

NORMALIZERS = frozenset(
    {
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Lowercase",
        "Replace",
        "Prepend",
        "Strip",
        "StripAccents",
        "BertNormalizer",
    }
    | {"Precompiled", "Nmt", "ByteLevel"}
)
SPLITTERS = frozenset(
    {"ByteLevel", "Split", "Metaspace", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation"}
    | {"BertPreTokenizer", "CharDelimiterSplit", "UnicodeScripts"}
)
FINISHERS = frozenset({"TemplateProcessing", "ByteLevel", "BertProcessing", "RobertaProcessing"})
MODELS = frozenset(["BPE", "WordPiece", "WordLevel", "Unigram"])
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BY_LINE = frozenset(
    f"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}|{digits}|{_REST}" for digits in (r"\p{N}{1,3}", r"\p{N}")
)
"""Of cl100k and Llama 3, of Qwen 2. The third is GPT-2's, which `ByteLevel` has built in."""
LINE = r"[!-~]\n(?=[A-Za-z])"
SEARCH_CHARS = 32_768
"""Searched for boundaries in one call: 1 ms."""


class TokenBoundaries:
    def __init__(self, tokens: frozenset[str], lines: bool) -> None:
        self._tokens = tokens
        ways = [re.escape(token) for token in sorted(tokens)] + ([LINE] if lines else [])
        self._pattern = re.compile("|".join(ways))
        self._longest_chars = max(map(len, (*tokens, "!\na")))

    def cuts(self, text: str, apart_chars: int) -> Iterator[tuple[int, int]]:
        """(place, characters before it that the next part must be tokenised behind), at least so far apart. They
        depend on what stands before them alone."""
        result = self._search(text, apart_chars)
        while result is not None and result.end() < len(text):
            yield result.end(), len(result[0]) if result[0] in self._tokens else 0
            result = self._search(text, result.end() + apart_chars)

    def _search(self, text: str, start: int) -> re.Match[str] | None:
        """The first match from `start` on. One call of the pattern holds the interpreter, so that it searches a
        window, and as many characters behind it as a match may need."""
        for begin in range(start, len(text), SEARCH_CHARS):
            stop = begin + SEARCH_CHARS
            match = self._pattern.search(text, begin, stop + self._longest_chars)
            if match is not None and match.start() < stop:
                return match
        return None


def seams_of(tokenizer: Tokenizer) -> TokenBoundaries | None:
    model = tokenizer.model
    sampled = any(getattr(model, name, None) for name in ("dropout", "alpha", "nbest_size"))
    changed = tokenizer.truncation or tokenizer.padding or tokenizer.encode_special_tokens
    if sampled or changed or type(model).__name__ not in MODELS:
        return None
    try:
        normalizer, splitter, finisher = (
            _about(part) for part in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor)
        )
    except Exception:  # the library raises bare ones, for parts written in Python
        return None
    known = (
        _kinds(normalizer, "normalizers") <= NORMALIZERS
        and _kinds(splitter, "pretokenizers") <= SPLITTERS
        and _kinds(finisher, "processors") <= FINISHERS
    )
    added = list(tokenizer.get_added_tokens_decoder().values())
    if not known or any(
        added_token.single_word or added_token.content != added_token.content.strip() for added_token in added
    ):
        return None
    tokens, lines = _clean(added), normalizer is None and _by_line(splitter or {}, added)
    return TokenBoundaries(tokens, lines) if tokens or lines else None


def _about(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _kinds(part: Any, inner: str) -> set[str]:
    if part is None:
        return set()
    if part.get("type") == "Sequence":
        return {kind for item in part.get(inner, [{}]) for kind in _kinds(item, inner)}
    return {str(part.get("type"))}


def _clean(added: Sequence[AddedToken]) -> frozenset[str]:
    """Added tokens that are found wherever they stand."""
    first = [added_token for added_token in added if not added_token.normalized and added_token.content]
    contents = {added_token.content for added_token in first}
    ends = {content[place:] for content in contents for place in range(1, len(content))}
    return frozenset(
        added_token.content
        for added_token in first
        if not added_token.rstrip
        and not any(added_token.content in other for other in contents - {added_token.content})
        and not any(added_token.content[:place] in ends for place in range(1, len(added_token.content)))
    )


def _by_line(part: Mapping[str, Any], added: Sequence[AddedToken]) -> bool:
    if any("\n" in added_token.content or added_token.lstrip or added_token.rstrip for added_token in added):
        return False
    if part.get("type") == "Sequence":
        steps = part.get("pretokenizers", [])
        if len(steps) != 2 or steps[0].get("type") != "Split":
            return False
        split, part = steps
        pattern = (split.get("pattern") or {}).get("Regex")
        plain = split.get("behavior") == "Isolated" and not split.get("invert") and pattern in BY_LINE
        return plain and _is_byte_level(part, by_regex=False)
    return _is_byte_level(part, by_regex=True)


def _is_byte_level(part: Mapping[str, Any], *, by_regex: bool) -> bool:
    return (
        part.get("type") == "ByteLevel"
        and part.get("add_prefix_space") is False
        and part.get("use_regex", True) is by_regex
    )


STRETCH_CHARS = 256  # At least; shorter ones cost more to keep than to tokenise.
ENTRY_BYTES = 300

UNLOCKED_CHARS = 2_000
"""From here on the interpreter's lock is given up while a text is tokenised; for shorter ones that costs more."""
PROCESS_CHARS = 65_536
"""From here on a text is tokenised in another process: taking over its tokens would hold the lock too long."""

Around = tuple[list[int], list[int]]
Encode = Callable[[str], list[int]]


def token_ids(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    if len(text) < UNLOCKED_CHARS:
        encoding = tokenizer.encode(text, add_special_tokens=special)
    else:
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=special)
    ids: list[int] = encoding.ids
    return ids


class IncrementalTokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        token_boundaries: TokenBoundaries,
        around: Around,
        most_bytes: int,
        encode: Encode | None = None,
    ) -> None:
        """`encode` tokenises a stretch, without special tokens; None: the tokenizer itself."""
        self._seams, self._most_bytes = token_boundaries, most_bytes
        self._tokenised = encode or (lambda text: token_ids(tokenizer, text, special=False))
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
            stretch = self._stretch(text[start - behind : stop], apart)
            for place in range(1 if behind else 0, len(stretch), SLICE_TOKENS):
                tokens.extend(stretch[place : place + SLICE_TOKENS])
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
            stretch = self._known.get(key)
            if stretch is not None:
                self._known.move_to_end(key)
                self.hits += 1
                return stretch
        stretch = array("I", self._tokenised(text))
        with self._lock:
            self.misses += 1
            if key not in self._known:
                self._known[key] = stretch
                self.held_bytes += _bytes(text, stretch)
            while self.held_bytes > self._most_bytes:
                (_, old_text), old = self._known.popitem(last=False)
                self.held_bytes -= _bytes(old_text, old)
        return stretch


def _bytes(text: str, tokens: array[int]) -> int:
    return sys.getsizeof(text) + len(tokens) * tokens.itemsize + ENTRY_BYTES


def stretches_of(
    tokenizer: Tokenizer, most_bytes: int, encode: Encode | None = None
) -> IncrementalTokenizer | None:
    token_boundaries = seams_of(tokenizer)
    around = None if token_boundaries is None else _around(tokenizer)
    return (
        None
        if token_boundaries is None or around is None
        else IncrementalTokenizer(tokenizer, token_boundaries, around, most_bytes, encode)
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


LABELS = {"user": "User", "assistant": "Assistant"}
LARGEST_FILE_BYTES = 100_000_000


class ModelTokenizer:
    """A model's tokenizer. Threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | ChatTemplates | None = None,
        specials: Mapping[str, str] | None = None,
        remember_bytes: int = 0,
        process: TokenizerProcess | None = None,
    ) -> None:
        """`template` is the model's own, if it has one; as a text it is the only one. So many bytes of what was
        tokenised are remembered, where that changes nothing (`IncrementalTokenizer`). `process` takes long texts."""
        self._tokenizer, self._process = tokenizer, process
        self.stretches = (
            stretches_of(tokenizer, remember_bytes, partial(self._ids, special=False))
            if remember_bytes
            else None
        )
        self._templates = (
            ChatTemplates({DEFAULT: template}, specials) if isinstance(template, str) else template
        )
        self.vocab = tokenizer.get_vocab_size(with_added_tokens=True)
        self.longest_token_chars = max((len(token) for token in tokenizer.get_vocab()), default=1)
        """No token stands for more characters of text than it has itself."""
        self.special_texts = frozenset(
            added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special
        )
        """Of tokens that are left out of text unless special ones are asked for."""

    @classmethod
    def read(cls, directory: str | Path, remember_bytes: int = 0) -> ModelTokenizer | None:
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            line = (str(error).splitlines() or ["unknown"])[0][:160]
            raise FormatError(str(path), f"is not a tokenizer ({line})") from error
        settings = _settings(Path(directory) / "tokenizer_config.json")
        templates, process = read_templates(directory, settings), TokenizerProcess(path.absolute())
        return cls(tokenizer, templates, remember_bytes=remember_bytes, process=process)

    def encode(self, text: str, *, special: bool = True, apart: str = "") -> list[int]:
        """`apart`: whose text it is, where what others sent must not show, not even by the time it takes."""
        if self.stretches is not None:
            return self.stretches.encode(text, special, apart)
        return self._ids(text, special=special)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        tokens = None
        if self._process is not None and len(text) > PROCESS_CHARS:
            tokens = self._process.encode(text, special=special)
        return token_ids(self._tokenizer, text, special=special) if tokens is None else tokens

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=not special)
        return text

    def described(self) -> str:
        text: str = self._tokenizer.to_str()
        return text

    def token_text(self, token: int) -> str:
        return self.decode([token], special=True)

    def plain_tokens(self, most: int) -> list[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        asked = [token for token in range(0, self.vocab, -(-self.vocab // most)) if token not in added]
        texts = self._tokenizer.decode_batch([[token] for token in asked])
        return [
            token
            for token, text in zip(asked, texts, strict=True)
            if text.isprintable() and text.strip("\ufffd ")
        ]

    def chat(self, messages: Sequence[Message], **more: Any) -> str:
        """The prompt of a conversation; `more` is what a template may be told beside it (`ChatTemplates.render`)."""
        if self._templates is None:
            return plain_chat(messages)
        return self._templates.render(messages, **more)

    @property
    def chat_templates(self) -> ChatTemplates | None:
        return self._templates

    @property
    def chat_has_specials(self) -> bool:
        """Whether the template writes the special tokens itself, as models' own do."""
        return self._templates is not None

    def stream(self, *, special: bool = False) -> Detokenizer:
        return Detokenizer(self._tokenizer, special=special)


class Detokenizer:
    """Text that grows token by token; half a character waits for its other half."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._stream = DecodeStream(skip_special_tokens=not special)
        self._tokens: list[int] = []
        self._shown = 0

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        text: str = self._stream.step(self._tokenizer, token) or ""
        self._shown += len(text)
        return text

    def rest(self) -> str:
        whole: str = self._tokenizer.decode(self._tokens, skip_special_tokens=not self._special)
        return whole[self._shown :]


def plain_chat(messages: Sequence[Message]) -> str:
    lines = []
    for message in messages:
        label = LABELS.get(message["role"])
        lines.append(
            f"{label}: {message['content'].strip()}\n" if label else message["content"].strip() + "\n\n"
        )
    return "".join(lines) + "Assistant:"


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise FormatError(str(path), "is too large")
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(str(path), f"is not JSON ({str(error).splitlines()[0][:120]})") from error
    return document if isinstance(document, dict) else {}
