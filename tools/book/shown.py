"""Command lines that pages show, and whether such a command could be run: its words, options and values."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import click

from book.text import blocks, phrases
from potluck.cli.main import cli

CALL = re.compile(r"^\s*(?:\$ |> )?(?:\.venv/bin/)?potluck (?P<words>\S.*)$")
TOP = ("examples", "docs", "benchmarks", "tests", "tools", "src")
"""Folders whose files must be there; any other file is the reader's own."""


@dataclass(frozen=True, slots=True)
class Call:
    """A command line without its first word. Those within a sentence may leave out what is needed."""

    line: int
    words: tuple[str, ...]
    whole: bool


def calls(page: str) -> Iterator[Call]:
    """Every command line of a page."""
    for block in blocks(page):
        if block.language in ("", "console", "sh"):
            text = block.text.replace("\\\n", " ")
            for offset, line in enumerate(text.splitlines()):
                found = CALL.match(line)
                if found:
                    yield from _call(block.line + offset, found["words"], True)
    for line, phrase in phrases(page):
        found = CALL.match(phrase)
        if found:
            yield from _call(line, found["words"], False)


def _call(line: int, text: str, whole: bool) -> Iterator[Call]:
    text = re.split(r"\s{2,}", text)[0] if whole else text
    text = re.sub(r"[][]|\.\.\.", " ", text) if not whole else text
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word == "|" and not whole:
            break  # `plan|compare`: the first of several
        if word in ("|", "||", "&", "&&", ";", ">", ">>", "<"):
            break
        words.append(word)
    if words:
        yield Call(line, tuple(words), whole)


def trouble(call: Call, root: Path) -> str | None:
    """Why the command could not be run; None where it could."""
    context = click.Context(cli, info_name="potluck")
    words = list(call.words)
    if words[0] in ("COMMAND", "--help", "--version"):
        return None
    if missing := _missing(words, root):
        return missing
    command: click.Command = cli
    try:
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name = words.pop(0)
            found = command.get_command(context, name)
            if found is None:
                return f"there is no {context.command_path} {name}"
            command = found
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
        said = error.format_message()
        if "does not exist" in said:
            return None  # a file of the reader's own
        named = any(word.isupper() and f"'{word}' is not " in said for word in call.words)
        cut = "requires an argument" in said
        return None if not call.whole and (named or cut) else said
    return None


def _missing(words: list[str], root: Path) -> str | None:
    """A file that would lie in this repository and does not."""
    named = [word for word in words if word.partition("/")[0] in TOP and "/" in word]
    return next((f"there is no {word}" for word in named if not (root / word).exists()), None)
