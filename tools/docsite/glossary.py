"""`docs/glossary.md` as values, as Sphinx wants it, linked where pages first use its words, and for the page.

PYTHONPATH=src:tools python -m docsite.glossary writes the words that the page explains.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from docsite.text import outside_code

ROOT = Path(__file__).resolve().parents[2]
PAGE_FILE = ROOT / "src" / "potluck" / "gateway" / "page" / "data" / "words.js"

_KEPT = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|<[^>]+>|\*\*[^*]+\*\*")
"""What no link goes into: code, links, HTML, words that stand out already."""


@dataclass(frozen=True, slots=True)
class Entry:
    section: str
    words: tuple[str, ...]
    meaning: str


def entries(page: str) -> list[Entry]:
    result: list[Entry] = []
    section = ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith("| word |"):
            words, meaning = (cell.strip() for cell in line.strip().strip("|").split("|"))
            result.append(Entry(section, tuple(word.strip() for word in words.split(", ")), meaning))
    return result


def as_directive(page: str) -> str:
    """The page with definitions that can be pointed at in place of its tables."""
    intro, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    parts = [intro]
    for section in sections:
        lines = [section.splitlines()[0], "", "```{glossary}"]
        for entry in entries(section):
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

        def keep(answer: re.Match[str]) -> str:
            kept.append(answer[0])
            return f"\0{len(kept) - 1}\0"

        text = _KEPT.sub(keep, text)
        for word in [word for word in left if word in text]:
            outcome = re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)
            if outcome and word in left:
                entry = left.pop(word)
                for other in [other for other, same in left.items() if same == entry]:
                    del left[other]
                kept.append(f"{{term}}`{word} <{entry}>`")
                text = f"{text[: outcome.start()]}\0{len(kept) - 1}\0{text[outcome.end() :]}"
        while "\0" in text:
            text = re.sub("\0(\\d+)\0", lambda result: kept[int(result[1])], text)
        return text

    return outside_code(page, line)


PLURALS = ("replica", "template", "segment", "combo", "bucket", "tenant", "stage", "pipeline")
ALONE = (
    """prefill decode TTFT TPOT E2E KV goodput attainment headroom rehearsal gateway controller Brain route"""
)
"""Words that mean nothing else in a sentence; "copy" would be linked where it is not meant."""
ON_THE_PAGE = """replica template role prefill decode KV TTFT TPOT objective goodput tenant pace draining cordoned
doubted flip reassign replan market remark"""
"""The first word of each row that the page explains."""


def linked_words() -> dict[str, str]:
    """What is written, to the glossary's word for it."""
    return {word: word for word in ALONE.split()} | {w: w for w in PLURALS} | {f"{w}s": w for w in PLURALS}


def page_words() -> str:
    rows = {entry.words[0]: entry for entry in entries((ROOT / "docs" / "glossary.md").read_text("utf-8"))}
    shown = [[list(rows[word].words), rows[word].meaning.replace("`", "")] for word in ON_THE_PAGE.split()]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in shown)
    return f"// From docs/glossary.md, by tools/docsite/glossary.py.\nexport const WORDS = [\n{lines},\n];\n"


if __name__ == "__main__":
    PAGE_FILE.write_text(page_words(), "utf-8")
