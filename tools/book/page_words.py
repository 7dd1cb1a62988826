"""The glossary's words for the page, which explains them where they stand.

PYTHONPATH=src:tools python -m book.page_words writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path

from book import terms

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "src" / "potluck" / "gateway" / "page" / "data" / "words.js"
SHOWN = (
    "replica",
    "template",
    "role",
    "prefill",
    "decode",
    "KV",
    "TTFT",
    "TPOT",
    "objective",
    "goodput",
    "tenant",
    "pace",
    "draining",
    "cordoned",
    "standby",
    "doubted",
    "flip",
    "recast",
    "replan",
    "market",
    "remark",
)
"""The first word of each row that is on the page."""


def text() -> str:
    """The file as it should be."""
    rows = {
        entry.words[0]: entry for entry in terms.entries((ROOT / "docs" / "glossary.md").read_text("utf-8"))
    }
    said = [[list(rows[word].words), rows[word].meaning.replace("`", "")] for word in SHOWN]
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in said)
    return f"// From docs/glossary.md, by tools/book/page_words.py.\nexport const WORDS = [\n{lines},\n];\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
