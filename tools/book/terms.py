"""The glossary: `docs/glossary.md` as values, as Sphinx wants it, and its words linked where pages first use them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from book.text import outside_code

_KEPT = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|<[^>]+>|\*\*[^*]+\*\*")
"""What no link goes into: code, links, HTML, words that stand out already."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: words that share a meaning."""

    room: str
    words: tuple[str, ...]
    meaning: str


def entries(page: str) -> list[Entry]:
    """All rows of the glossary's tables."""
    found: list[Entry] = []
    room = ""
    for line in page.splitlines():
        if line.startswith("## "):
            room = line[3:]
        elif line.startswith("| ") and not line.startswith("| word |"):
            words, meaning = (cell.strip() for cell in line.strip().strip("|").split("|"))
            found.append(Entry(room, tuple(word.strip() for word in words.split(", ")), meaning))
    return found


def as_directive(page: str) -> str:
    """The page with definitions that can be pointed at in place of its tables."""
    intro, *rooms = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    parts = [intro]
    for room in rooms:
        lines = [room.splitlines()[0], "", "```{glossary}"]
        for entry in entries(room):
            lines += [*entry.words, f"  {entry.meaning}", ""]
        parts.append("\n".join([*lines, "```", ""]))
    return "\n".join(parts)


def meanings(page: str) -> dict[str, str]:
    """Every word in small letters, to what it means."""
    return {word.lower(): entry.meaning for entry in entries(page) for word in entry.words}


def linked(page: str, words: dict[str, str]) -> str:
    """The page with the first use of each word, once it is not code or a heading, leading to the glossary.

    `words` has them as they are written, with the glossary's entry for each.
    """
    left = dict(words)

    def line(text: str) -> str:
        if not left or text.startswith("#") or re.match(r"\s*\|[\s:|-]+\|\s*$", text):
            return text
        kept: list[str] = []

        def keep(found: re.Match[str]) -> str:
            kept.append(found[0])
            return f"\0{len(kept) - 1}\0"

        text = _KEPT.sub(keep, text)
        for word in [word for word in left if word in text]:
            found = re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)
            if found and word in left:
                entry = left.pop(word)
                for other in [other for other, same in left.items() if same == entry]:
                    del left[other]
                kept.append(f"{{term}}`{word} <{entry}>`")
                text = f"{text[: found.start()]}\0{len(kept) - 1}\0{text[found.end() :]}"
        while "\0" in text:
            text = re.sub("\0(\\d+)\0", lambda found: kept[int(found[1])], text)
        return text

    return outside_code(page, line)


PLURALS = ("replica", "template", "segment", "combo", "bucket", "tenant", "stage", "pipeline")
ALONE = (
    *("prefill", "decode", "TTFT", "TPOT", "E2E", "KV", "goodput", "attainment", "headroom", "rehearsal"),
    *(
        "gateway",
        "controller",
        "Brain",
        "route",
        "recast",
        "roster",
        "standby",
        "likeness",
        "nursery",
    ),
)
"""Words that mean nothing else in a sentence; "copy" or "way" would be linked where they are not meant."""


def linked_words() -> dict[str, str]:
    """What is written, to the glossary's word for it."""
    return {word: word for word in ALONE} | {w: w for w in PLURALS} | {f"{w}s": w for w in PLURALS}
