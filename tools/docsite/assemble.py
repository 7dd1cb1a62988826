"""Where every page of the site comes from: `docs/`, `lab/`, the repository's own pages, and what is generated.

Generated pages are made when the site is built and never committed: they would be out of date with every option that
somebody adds, and whoever reads the repository has `potluck COMMAND --help` for the same.
"""

from __future__ import annotations

import csv
import json
import posixpath
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from accuracy_study.report import report
from accuracy_study.scores import stored_scores

from docsite import commands, glossary, spec_fields, values
from docsite.text import anchors, links, outside_code, relinked
from potluck.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent.parent
COVER = "docs/README.md"
LAB_COVER = "lab/README.md"
COVERS = (COVER, LAB_COVER)
"""Pages whose lists are the contents of their folder."""
OWN = {
    COVER: "index.md",
    "README.md": "overview.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "files/LICENSE",
    LAB_COVER: "lab/index.md",
}
"""Pages that do not lie where the site has them."""
DECISIONS = "decisions/index.md"
PICTURES = (".svg", ".png", ".json", ".csv")
PAGE_FILES = (".md", *PICTURES)
GENERATED = {
    "Reference": {
        "reference/spec.md": "Spec reference",
        "commands/index.md": "Command reference",
        "reference/values.md": "Values in JSON",
        "reference/checkpoints.md": "Checkpoints, tried",
    },
    "Measurements": {"lab/errors.md": "Accuracy, every figure"},
    "The project": {DECISIONS: "Decisions"},
}
"""Section of a cover, to generated pages in it."""
BARE = re.compile(r"(?<![\w/`\[.])(?<!\]\()docs/([\w-]+)\.md(?![\w`\]])")
"""A page that is named in passing."""
CALLED = re.compile(r"(?<!\[)`potluck (\w+)`(?!\])")  # A command that is.


def place_of(path: str) -> str:
    if path in OWN:
        return OWN[path]
    if path.rstrip("/") == "docs/decisions":
        return DECISIONS
    if path.startswith("lab/") and Path(path).suffix in PAGE_FILES:
        return path
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"


def written() -> list[str]:
    folders = (ROOT / "docs", ROOT / "lab")
    shelves = sorted(path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.md"))
    return [*(path for path in OWN if path.endswith(".md") and path not in COVERS), *shelves]


def resolved(page: str, target: str) -> str:
    name = target.partition("#")[0]
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name else page


def is_outside(target: str) -> bool:
    return bool(re.match(r"[a-z]+:", target))


def sections(cover: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Headings of a cover, each with the pages that its list links to first, and what they are called there."""
    for part in re.split(r"^## ", (ROOT / cover).read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        firsts = re.findall(r"^- \[([^\]]+)\]\(([^)#]+)\)", body, flags=re.MULTILINE)
        pages = {place_of(resolved(cover, target)): name for name, target in firsts}
        yield title, pages | GENERATED.get(title, {})


def assemble(into: Path) -> None:
    """Write everything that the generator reads into a folder, which is emptied first."""
    shutil.rmtree(into, ignore_errors=True)
    text_of_glossary = (ROOT / "docs/glossary.md").read_text("utf-8")
    words = glossary.linked_words()
    for page in written():
        text = (ROOT / page).read_text("utf-8")
        if page == "docs/glossary.md":
            text = glossary.as_directive(text)
        elif not page.startswith("docs/decisions/") and page != "CHANGELOG.md":
            text = glossary.linked(_pointing(text, page), words)
        text = relinked(text, lambda target, page=page: _moved(page, target, into))
        if page in COVERS:
            text += _contents(page)
        _write(into / place_of(page), text)
    for picture in [*(ROOT / "docs").rglob("*.*"), *(ROOT / "lab").rglob("*.svg")]:
        if picture.suffix in PICTURES:
            place = into / place_of(picture.relative_to(ROOT).as_posix())
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, place)
    _write(into / DECISIONS, _decisions())
    for name, text in {**spec_fields.pages(), **commands.pages(), **values.pages(), **_tables()}.items():
        page = f"docs/{name}"  # as if it lay there
        text = relinked(_pointing(text, page), lambda target, page=page: _moved(page, target, into))
        _write(into / name, text)
    _write(into / "terms.json", json.dumps(glossary.meanings(text_of_glossary)))
    _write(into / "_static" / "site.css", Path(__file__).with_name("site.css").read_text("utf-8"))


def _moved(page: str, target: str, into: Path) -> str:
    """A link as the site has it; files that are no pages come along."""
    if is_outside(target) or target.startswith("#"):
        return target
    path, anchor = resolved(page, target), target.partition("#")[2]
    place = place_of(path)
    if place.startswith("files/") and (ROOT / path).is_file():
        (into / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, into / place)
    result = posixpath.relpath(place, posixpath.dirname(place_of(page)) or ".")
    return f"{result}#{anchor}" if anchor else result


def _pointing(text: str, page: str) -> str:
    """The page with links where it only names another (docs/gateway.md) or, for the first time, a command."""
    up = posixpath.relpath(".", posixpath.dirname(page) or ".")
    seen: set[str] = set()

    def command(result: re.Match[str]) -> str:
        name = result[1]
        if name in seen or name not in COMMANDS or page == f"docs/commands/{name}.md":
            return result[0]
        seen.add(name)
        return f"[{result[0]}]({up}/docs/commands/{name}.md)"

    def line(words: str) -> str:
        if words.startswith("#"):
            return words
        words = BARE.sub(lambda outcome: f"[{outcome[1]}]({up}/{outcome[0]})", words)
        return CALLED.sub(command, words)

    return outside_code(text, line)


def _contents(cover: str) -> str:
    parts, folder = [], posixpath.dirname(place_of(cover)) or "."
    for title, pages in sections(cover):
        entries = [f"{name} <{posixpath.relpath(page, folder)}>" for page, name in pages.items()]
        lines = ["```{toctree}", ":hidden:", f":caption: {title}", "", *entries, "```", ""]
        parts.append("\n".join(lines))
    return "\n" + "\n".join(parts)


def _tables() -> dict[str, str]:
    """Pages of measured data: which checkpoints run, and how far the performance model is off."""
    head, *rows = csv.reader((ROOT / "docs/checkpoints.csv").read_text("utf-8").splitlines())
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for label, *cells in rows:
        outcomes = (cell.replace("*", "\\*") for cell in cells)
        lines.append(f"| `{label.replace('|', chr(92) + '|')}` | {' | '.join(outcomes)} |")
    intro = "# Checkpoints, tried\n\nFrom `docs/checkpoints.csv`; [what the words mean](../checkpoints.md)."
    return {
        "reference/checkpoints.md": "\n".join([intro, "", *lines, ""]),
        "lab/errors.md": report(stored_scores()),
    }


def _decisions() -> str:
    paths = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    tree = "\n".join(["```{toctree}", ":titlesonly:", "", *paths, "```"])
    return f"# Decisions\n\nChoices that others may question, half a page each.\n\n{tree}\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def unlinked() -> set[str]:
    """Written pages that no section of a cover has."""
    known = {page for cover in COVERS for _, pages in sections(cover) for page in pages}
    result = {place_of(page) for page in written()}
    return {page for page in result - known if not page.startswith("decisions/") and page != "index.md"}


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
