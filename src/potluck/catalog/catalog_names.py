"""Looking entries up by any of their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from potluck.catalog.figure_sources import plain
from potluck.core.errors import UnknownNameError

Entries = Mapping[str, Mapping[str, Any]]


class CatalogNames:
    """The names and aliases of a catalog file's entries; the file is read on first use."""

    def __init__(self, field: str, entries: Callable[[], Entries]) -> None:
        self._field, self._entries = field, entries
        self._index: dict[str, str] = {}

    def all(self) -> tuple[str, ...]:
        """Canonical names, in the order of the file."""
        return tuple(self._entries())

    def spellings(self) -> list[str]:
        """Everything that `canonical` accepts."""
        return [name for key, entry in self._entries().items() for name in (key, *entry["aliases"])]

    def canonical(self, name: str) -> str:
        """The catalog's own name, whatever case, punctuation or alias is given."""
        if not self._index:
            for key, entry in self._entries().items():
                self._index.update({plain(spelling): key for spelling in (key, *entry["aliases"])})
        found = self._index.get(plain(name))
        if found is None:
            raise UnknownNameError(self._field, name, self.spellings())
        return found
