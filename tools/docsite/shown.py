"""Command lines that pages show: whether each could be run, and whether a real output is like the one shown.

In a console block a line that begins with `$ ` is a command; the lines up to the next are its output; `...` stands
for any lines, or the rest of one. Ports, times, measurements and engine names may differ; prices and counts may not.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import click

from docsite.text import blocks, phrases
from potluck.cli.main import cli

CALL = re.compile(r"^\s*(?:\$ |> )?(?:\.venv/bin/)?potluck (?P<words>\S.*)$")
TOP = ("examples", "docs", "lab", "benchmarks", "tests", "tools", "src")
"""Folders whose files must be there; any other file is the reader's own."""


@dataclass(frozen=True, slots=True)
class Call:
    """A command line without its first word. Those within a sentence may leave out what is needed."""

    line: int
    words: tuple[str, ...]
    whole: bool


def calls(page: str) -> Iterator[Call]:
    for block in blocks(page):
        if block.language in ("", "console", "sh"):
            text = block.text.replace("\\\n", " ")
            for offset, line in enumerate(text.splitlines()):
                if result := CALL.match(line):
                    yield from _call(block.line + offset, result["words"], True)
    for line, phrase in phrases(page):
        if result := CALL.match(phrase):
            yield from _call(line, result["words"], False)


def _call(line: int, text: str, whole: bool) -> Iterator[Call]:
    text = re.split(r"\s{2,}", text)[0] if whole else text
    text = re.sub(r"[][]|\.\.\.", " ", text) if not whole else text
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word in ("|", "||", "&", "&&", ";", ">", ">>", "<"):
            break  # also `plan|compare`: the first of several
        words.append(word)
    if words:
        yield Call(line, tuple(words), whole)


def trouble(call: Call, root: Path) -> str | None:
    """Why the command could not be run; None where it could."""
    context = click.Context(cli, info_name="potluck", **cli.context_settings)
    words = list(call.words)
    if words[0] in ("COMMAND", "--help", "--version"):
        return None
    if missing := _missing(words, root):
        return missing
    command: click.Command = cli
    try:
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name = words.pop(0)
            result = command.get_command(context, name)
            if result is None:
                return f"there is no {context.command_path} {name}"
            command = result
            context = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            return None
        with redirect_stdout(io.StringIO()):  # some print their help
            command.make_context(context.info_name, words, parent=context.parent)
    except click.MissingParameter as error:
        return error.format_message() if call.whole else None
    except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
        return None
    except click.ClickException as error:
        text = error.format_message()
        if "does not exist" in text:
            return None  # a file of the reader's own
        named = any(word.isupper() and f"'{word}' is not " in text for word in call.words)
        cut = "requires an argument" in text
        return None if not call.whole and (named or cut) else text
    return None


def _missing(words: list[str], root: Path) -> str | None:
    """A file that would lie in this repository and does not."""
    named = [word for word in words if word.partition("/")[0] in TOP and "/" in word]
    return next((f"there is no {word}" for word in named if not (root / word).exists()), None)


HOME = "~"
SEARCHED = re.compile(r"best state after [\d.]+ \S+,(?: [\d,]+ states)?")
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
    command: str
    output: str


def shown(text: str) -> Iterator[Shown]:
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
    for sometime in SOMETIMES:
        printed = sometime.sub("", printed)
    wanted, at = "", 0
    text = said.strip().replace(HOME, home)
    for piece in _PIECE.finditer(text):
        kind = str(piece.lastgroup)
        wanted += re.escape(text[at : piece.start()]) + _LIKE.get(kind, re.escape(piece.group()))
        at = piece.end()
    return re.fullmatch(wanted + re.escape(text[at:]), printed.strip()) is not None


def _plain(text: str) -> str:
    return SEARCHED.sub("best state after a moment,", "\n".join(line.rstrip() for line in text.splitlines()))
