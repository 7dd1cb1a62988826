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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

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


class TokenBoundaries:
    """The places of one tokenizer."""

    def __init__(self, tokens: frozenset[str], lines: bool) -> None:
        self._tokens = tokens
        ways = [re.escape(token) for token in sorted(tokens)] + ([LINE] if lines else [])
        self._pattern = re.compile("|".join(ways))

    def cuts(self, text: str, apart_chars: int) -> Iterator[tuple[int, int]]:
        """(place, characters before it that the next part must be tokenised behind), at least so far apart. They
        depend on what stands before them alone."""
        found = self._pattern.search(text, apart_chars)
        while found is not None and found.end() < len(text):
            yield found.end(), len(found[0]) if found[0] in self._tokens else 0
            found = self._pattern.search(text, found.end() + apart_chars)


def seams_of(tokenizer: Tokenizer) -> TokenBoundaries | None:
    """None where there are none, or none that are known to be."""
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
    if not known or any(each.single_word or each.content != each.content.strip() for each in added):
        return None
    tokens, lines = _clean(added), normalizer is None and _by_line(splitter or {}, added)
    return TokenBoundaries(tokens, lines) if tokens or lines else None


def _about(part: Any) -> dict[str, Any] | None:
    """What a part of a tokenizer says of itself."""
    return None if part is None else json.loads(part.__getstate__())


def _kinds(part: Any, inner: str) -> set[str]:
    if part is None:
        return set()
    if part.get("type") == "Sequence":
        return {kind for each in part.get(inner, [{}]) for kind in _kinds(each, inner)}
    return {str(part.get("type"))}


def _clean(added: Sequence[AddedToken]) -> frozenset[str]:
    """Added tokens that are found wherever they stand."""
    first = [each for each in added if not each.normalized and each.content]
    contents = {each.content for each in first}
    ends = {content[place:] for content in contents for place in range(1, len(content))}
    return frozenset(
        each.content
        for each in first
        if not each.rstrip
        and not any(each.content in other for other in contents - {each.content})
        and not any(each.content[:place] in ends for place in range(1, len(each.content)))
    )


def _by_line(part: Mapping[str, Any], added: Sequence[AddedToken]) -> bool:
    if any("\n" in each.content or each.lstrip or each.rstrip for each in added):
        return False
    if part.get("type") == "Sequence":
        steps = part.get("pretokenizers", [])
        if len(steps) != 2 or steps[0].get("type") != "Split":
            return False
        split, part = steps
        pattern = (split.get("pattern") or {}).get("Regex")
        plain = split.get("behavior") == "Isolated" and not split.get("invert") and pattern in BY_LINE
        return plain and _bytes(part, by_regex=False)
    return _bytes(part, by_regex=True)


def _bytes(part: Mapping[str, Any], *, by_regex: bool) -> bool:
    """Whether it only writes bytes as letters, with GPT-2's pattern or without."""
    return (
        part.get("type") == "ByteLevel"
        and part.get("add_prefix_space") is False
        and part.get("use_regex", True) is by_regex
    )
