"""What pages show of commands: each command of a block with its output, and whether a real output is like that.

In a block a line that begins with `$ ` is a command, the lines up to the next are what it prints; `...` stands for
any lines, or the rest of one. What is live (ports, times, measurements, names of engines) is compared as a pattern:
figures may be others. Prices an hour and counts (10 of 10) stay what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from book.text import blocks

HOME = "~"
SEARCHED = re.compile(r"best after [\d.]+ \S+,(?: [\d,]+ states)?")
"""How long a search took is never the same, nor need be how many states it saw."""
SOMETIMES = (
    re.compile(r"^notice: this machine computes .*?not the plan's\n", re.MULTILINE | re.DOTALL),
    re.compile(r"^ *this machine would have to compute .*?their\s+pace\)\n", re.MULTILINE | re.DOTALL),
)
"""What is said on slow machines alone."""
_PIECE = re.compile(
    r"(?P<rest>\s*\.\.\.\s*)|(?P<usd>\$\d+\.\d\d/h)|(?P<count>\b\d+ of \d+\b)|(?P<line>─+)|(?P<name>chat-[0-9a-f]{8})"
    r"|(?P<id>chatcmpl-[0-9a-f]+)|(?P<time>\b\d[\d.,]* (?:µs|ms|s|min)\b)|(?P<figure>\d[\d.,:]*\d|\d)|(?P<space>\s+)"
)
_LIKE = {
    "rest": r"(?:.|\n)*?",
    "line": "─+",
    "name": r"chat-[0-9a-f]{8}",
    "id": r"chatcmpl-[0-9a-f]+",
    "time": r"\d[\d.,]* (?:µs|ms|s|min)",
    "figure": r"\d(?:[\d.,:]*\d)?",
    "space": r"\s+",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """A command of a page, and what the page says that it prints."""

    command: str
    output: str


def shown(text: str) -> Iterator[Shown]:
    """The commands of a page in order."""
    for block in blocks(text):
        if block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                yield Shown(command, output)


def same(said: str, printed: str) -> bool:
    """Whether an output is exactly what is shown; `...` on a line of its own stands for any lines."""
    parts = [_plain(part).strip("\n") for part in re.split(r"^\.\.\.$", said, flags=re.MULTILINE)]
    pattern = r"\n(?:.*\n)*?".join(re.escape(part) for part in parts)
    return re.fullmatch(rf"\s*{pattern}\s*", f"{_plain(printed)}\n") is not None


def alike(said: str, printed: str, home: str) -> bool:
    """Whether an output is what is shown but for figures that nobody can foresee, and where lines are folded."""
    for each in SOMETIMES:
        printed = each.sub("", printed)
    wanted, at = "", 0
    text = said.strip().replace(HOME, home)
    for piece in _PIECE.finditer(text):
        kind = str(piece.lastgroup)
        wanted += re.escape(text[at : piece.start()]) + _LIKE.get(kind, re.escape(piece.group()))
        at = piece.end()
    return re.fullmatch(wanted + re.escape(text[at:]), printed.strip()) is not None


def _plain(text: str) -> str:
    return SEARCHED.sub("best after a moment,", "\n".join(line.rstrip() for line in text.splitlines()))
