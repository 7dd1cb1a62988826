"""Where every page of the book comes from: `docs/`, the repository's own pages, and what is generated.

Generated pages are made when the book is built and never committed: they would be out of date with every option that
somebody adds, and whoever reads the repository has `potluck COMMAND --help` for the same.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from book import commands, spec_fields, terms, values
from book.text import anchors, links, outside_code, relinked
from potluck.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent.parent
COVER = "docs/README.md"
OWN = {
    COVER: "index.md",
    "README.md": "overview.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/search.md": "pool-search.md",  # the generator has a page of the other name
    "LICENSE": "files/LICENSE",
}
"""Pages that do not lie where the book has them."""
DECISIONS = "decisions/index.md"
GENERATED = {
    "Reference": {
        "reference/spec.md": "Spec reference",
        "commands/index.md": "Command reference",
        "reference/values.md": "Values in JSON",
    },
    "For researchers": {DECISIONS: "Decisions"},
}
"""Room of the cover, to pages in it that nobody wrote."""
BARE = re.compile(r"(?<![\w/`\[.])(?<!\]\()docs/([\w-]+)\.md(?![\w`\]])")
"""A page that is named in passing."""
CALLED = re.compile(r"(?<!\[)`potluck (\w+)`(?!\])")
"""A command that is."""


def place_of(path: str) -> str:
    """Where the book has a file of the repository."""
    if path in OWN:
        return OWN[path]
    if path.rstrip("/") == "docs/decisions":
        return DECISIONS
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"


def written() -> list[str]:
    """The repository's pages, as paths from its root."""
    docs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return [*(path for path in OWN if path.endswith(".md") and not path.startswith("docs/")), *docs]


def resolved(page: str, target: str) -> str:
    """The file in the repository that a link of a page means, without its anchor."""
    name = target.partition("#")[0]
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name else page


def is_outside(target: str) -> bool:
    return bool(re.match(r"[a-z]+:", target))


def rooms(cover: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Headings of the cover, each with the pages that its list links to first, and what they are called there."""
    for part in re.split(r"^## ", cover, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        firsts = re.findall(r"^- \[([^\]]+)\]\(([^)#]+)\)", body, flags=re.MULTILINE)
        pages = {place_of(resolved(COVER, target)): name for name, target in firsts}
        yield title, pages | GENERATED.get(title, {})


def assemble(into: Path) -> None:
    """Write everything that the generator reads into a folder, which is emptied first."""
    shutil.rmtree(into, ignore_errors=True)
    glossary = (ROOT / "docs/glossary.md").read_text("utf-8")
    words = terms.linked_words()
    for page in written():
        text = (ROOT / page).read_text("utf-8")
        if page == "docs/glossary.md":
            text = terms.as_directive(text)
        elif not page.startswith("docs/decisions/") and page != "CHANGELOG.md":
            text = terms.linked(_pointing(text, page), words)
        text = relinked(text, lambda target, page=page: _moved(page, target, into))
        if page == COVER:
            text += _contents(text_of_cover=(ROOT / page).read_text("utf-8"))
        _write(into / place_of(page), text)
    for picture in (ROOT / "docs").iterdir():
        if picture.suffix in (".svg", ".png", ".json"):
            shutil.copy(picture, into)
    _write(into / DECISIONS, _decisions())
    for name, text in {**spec_fields.pages(), **commands.pages(), **values.pages()}.items():
        page = f"docs/{name}"  # as if it lay there
        text = relinked(_pointing(text, page), lambda target, page=page: _moved(page, target, into))
        _write(into / name, text)
    _write(into / "terms.json", json.dumps(terms.meanings(glossary)))
    _write(into / "_static" / "book.css", Path(__file__).with_name("book.css").read_text("utf-8"))


def _moved(page: str, target: str, into: Path) -> str:
    """A link as the book has it; files that are no pages come along."""
    if is_outside(target) or target.startswith("#"):
        return target
    path, anchor = resolved(page, target), target.partition("#")[2]
    place = place_of(path)
    if place.startswith("files/") and (ROOT / path).is_file():
        (into / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, into / place)
    found = posixpath.relpath(place, posixpath.dirname(place_of(page)) or ".")
    return f"{found}#{anchor}" if anchor else found


def _pointing(text: str, page: str) -> str:
    """The page with links where it only names another (docs/gateway.md) or, for the first time, a command."""
    up = posixpath.relpath(".", posixpath.dirname(page) or ".")
    seen: set[str] = set()

    def command(found: re.Match[str]) -> str:
        name = found[1]
        if name in seen or name not in COMMANDS or page == f"docs/commands/{name}.md":
            return found[0]
        seen.add(name)
        return f"[{found[0]}]({up}/docs/commands/{name}.md)"

    def line(words: str) -> str:
        if words.startswith("#"):
            return words
        words = BARE.sub(lambda found: f"[{found[1]}]({up}/{found[0]})", words)
        return CALLED.sub(command, words)

    return outside_code(text, line)


def _contents(text_of_cover: str) -> str:
    parts = []
    for title, pages in rooms(text_of_cover):
        entries = [f"{name} <{page}>" for page, name in pages.items()]
        lines = ["```{toctree}", ":hidden:", f":caption: {title}", "", *entries, "```", ""]
        parts.append("\n".join(lines))
    return "\n" + "\n".join(parts)


def _decisions() -> str:
    found = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    tree = "\n".join(["```{toctree}", ":titlesonly:", "", *found, "```"])
    return f"# Decisions\n\nChoices that others may question, half a page each.\n\n{tree}\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def unlinked(cover: str) -> set[str]:
    """Written pages that no room of the cover has."""
    known = {page for _, pages in rooms(cover) for page in pages}
    found = {place_of(page) for page in written()}
    return {page for page in found - known if not page.startswith("decisions/") and page != "index.md"}


def broken_links(root: Path, pages: Iterable[str]) -> Iterator[str]:
    """What links of a folder's pages miss: a file, or a heading in one."""
    known = {page: (root / page).read_text("utf-8") for page in pages}
    headings = {page: anchors(text) for page, text in known.items()}
    for page, text in known.items():
        for link in links(text):
            if is_outside(link.target):
                continue
            path, anchor = resolved(page, link.target), link.target.partition("#")[2]
            if not (root / path).exists():
                yield f"{page}:{link.line}: {link.target}: there is no {path}"
            elif anchor and path in headings and anchor not in headings[path]:
                yield f"{page}:{link.line}: {link.target}: {path} has no such heading"
