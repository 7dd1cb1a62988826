"""Where a figure comes from, and the shape in which the catalog shows figures with their sources."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from potluck.core.errors import UnknownNameError

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class FigureSource:
    """One source: how far to trust it and when it stood as it was read."""

    id: str
    title: str
    date: str
    kind: str
    licence: str | None = None


@dataclass(frozen=True, slots=True)
class SourcedFigure:
    field: str
    value: object
    source: FigureSource
    assumed: bool = False  # True when nobody published it and it was chosen to fit what is.


@dataclass(frozen=True, slots=True)
class EntryFacts:
    name: str
    aliases: tuple[str, ...]
    figures: tuple[SourcedFigure, ...]
    doubt: str | None = None  # Where sources disagree: what was taken, and why.
    assumed: tuple[str, ...] = ()


@cache
def load_toml(name: str) -> dict[str, Any]:
    """A data file, read once per process. Callers must not change what they get."""
    with (DATA / name).open("rb") as file:
        return tomllib.load(file)


@cache
def sources() -> dict[str, FigureSource]:
    return {
        key: FigureSource(key, entry["title"], entry["date"], entry["kind"], entry.get("licence"))
        for key, entry in load_toml("sources.toml").items()
    }


def source(key: str) -> FigureSource:
    figure_source = sources().get(key)
    if figure_source is None:
        raise UnknownNameError("source", key, sources())
    return figure_source


def plain(name: str) -> str:
    """A name without case and punctuation: `RTX-4090`, `rtx 4090` and `RTX4090` are the same."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def entry_source(entry: dict[str, Any], field: str) -> FigureSource:
    """The source of one field: its own where the entry names one, else the entry's."""
    own: dict[str, str] = entry.get("sources", {})
    return source(own.get(field, entry.get("source", "")))


class CatalogNames:
    """The names and aliases of a catalog file's entries; the file is read on first use."""

    def __init__(self, field: str, file: str) -> None:
        self._field, self._file = field, file
        self._index: dict[str, str] = {}

    def entries(self) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = load_toml(self._file)[self._field]
        return entries

    def all(self) -> tuple[str, ...]:
        """Canonical names, in the order of the file."""
        return tuple(self.entries())

    def spellings(self) -> list[str]:
        """Everything that `canonical` accepts."""
        return [name for key, entry in self.entries().items() for name in (key, *entry.get("aliases", ()))]

    def canonical(self, name: str) -> str:
        """The catalog's own name, whatever case, punctuation or alias is given."""
        if not self._index:
            for key, entry in self.entries().items():
                self._index.update({plain(spelling): key for spelling in (key, *entry.get("aliases", ()))})
        text = self._index.get(plain(name))
        if text is None:
            raise UnknownNameError(self._field, name, self.spellings())
        return text
