"""Markdown as far as the site needs it: links, headings with GitHub's anchors, blocks of code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token

LINK = re.compile(r"(\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")
FENCE = re.compile(r"^\s*(```+|~~~+)")
_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, slots=True)
class Link:
    """Where a page points to; `line` is the first of the paragraph that it stands in."""

    line: int
    target: str


@dataclass(frozen=True, slots=True)
class Block:
    """Code that stands apart: its language (or nothing), its text, the line where it begins."""

    line: int
    language: str
    text: str


def _tokens(text: str) -> Iterator[tuple[int, Token]]:
    line = 0
    for token in _PARSER.parse(text):
        line = token.map[0] + 1 if token.map else line
        yield line, token
        for child in token.children or ():
            yield line, child


def links(text: str) -> Iterator[Link]:
    """Links and pictures of a page, those in tables too, none of code."""
    for line, token in _tokens(text):
        target = token.attrGet("href") if token.type == "link_open" else None
        target = token.attrGet("src") if token.type == "image" else target
        if target:
            yield Link(line, str(target))


def blocks(text: str) -> Iterator[Block]:
    for line, token in _tokens(text):
        if token.type in ("fence", "code_block"):
            yield Block(line, token.info.strip(), token.content)


def phrases(text: str) -> Iterator[tuple[int, str]]:
    for line, token in _tokens(text):
        if token.type == "code_inline":
            yield line, token.content


def headings(text: str) -> list[tuple[int, str]]:
    result: list[tuple[int, str]] = []
    level = 0
    for token in _PARSER.parse(text):
        if token.type == "heading_open":
            level = int(token.tag[1:])
        elif token.type == "inline" and level:
            words = (child.content for child in token.children or () if child.type in ("text", "code_inline"))
            result.append((level, "".join(words)))
            level = 0
    return result


def slug(words: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", words.strip().lower())
    return kept.replace(" ", "-")


def anchors(text: str) -> set[str]:
    """All anchors of a page: those that are written, and headings; the second one of a name gets a number."""
    matches = set(re.findall(r"^\(([\w-]+)\)=$", text, flags=re.MULTILINE))
    for _, words in headings(text):
        name, number = slug(words), 0
        while (unique := f"{name}-{number}" if number else name) in matches:
            number += 1
        matches.add(unique)
    return matches


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The page with every line changed that is not code between fences or indented after an empty line."""
    lines: list[str] = []
    fence, before, indented = "", "", False
    for line in text.split("\n"):
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
            lines.append(line)
        elif fence:
            fence = "" if mark and mark[1].startswith(fence) else fence
            lines.append(line)
        else:
            deep = line.startswith("    ")
            indented = (deep and (indented or not before.strip())) or (indented and not line.strip())
            lines.append(line if indented and deep else change(line))
        before = line
    return "\n".join(lines)


def relinked(text: str, change: Callable[[str], str]) -> str:
    def line(words: str) -> str:
        return LINK.sub(lambda result: result[1] + change(result[2]) + result[3], words)

    return outside_code(text, line)
