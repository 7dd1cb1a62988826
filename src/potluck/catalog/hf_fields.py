"""Reading a `config.json` that anyone may have written: every value is checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from potluck.core.errors import InputError

MOST = 1_000_000_000
"""No dimension of a model comes near this; a larger number is a mistake."""
MOST_LAYERS = 10_000
LARGEST_FILE_BYTES = 16_000_000


class ConfigFields:
    """A JSON object whose members are asked for by name and kind. Several names are alternatives."""

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self._values = values
        self.where = where

    @property
    def values(self) -> Mapping[str, object]:
        return self._values

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def says(self, name: str) -> bool:
        """Whether the file has it, if only as null."""
        return name in self._values

    def problem(self, text: str) -> InputError:
        return InputError(self.where, text)

    def count(self, *names: str, default: int | None = None, most: int = MOST) -> int:
        """A positive integer; missing or null is an error unless there is a default."""
        name, value = self._find(names)
        if value is None:
            if default is not None:
                return default
            raise self.problem(f"{names[0]} is missing")
        return self._integer(name, value, least=1, most=most)

    def maybe(self, *names: str, least: int = 1) -> int | None:
        """A positive integer, or None where it is missing, null or 0 for `least` 1."""
        name, value = self._find(names)
        if value is None or (value == 0 and not isinstance(value, bool) and least == 1):
            return None
        return self._integer(name, value, least=least, most=MOST)

    def number(self, name: str, default: int, least: int = 0) -> int:
        value = self._values.get(name)
        return default if value is None else self._integer(name, value, least=least, most=MOST)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.problem(f"{name} must be true or false, not {_short(value)}")
        return value

    def text(self, *names: str) -> str | None:
        name, value = self._find(names)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.problem(f"{name} must be a string, not {_short(value)}")
        return value

    def part(self, name: str) -> ConfigFields | None:
        """A nested object."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.problem(f"{name} must be an object, not {_short(value)}")
        return ConfigFields(value, f"{self.where}: {name}")

    def words(self, name: str, length: int, choices: tuple[str, ...]) -> list[str] | None:
        """A list with one of `choices` per layer."""
        items = self._list(name)
        if items is None:
            return None
        words: list[str] = []
        for item in items:
            if not isinstance(item, str) or item not in choices:
                raise self.problem(f"{name} has {_short(item)}; known are {', '.join(choices)}")
            words.append(item)
        if len(words) != length:
            raise self.problem(f"{name} has {len(words)} entries for {length} layers")
        return words

    def integers(self, name: str) -> list[int] | None:
        """A list of integers that are not negative, such as layer numbers."""
        items = self._list(name)
        return None if items is None else [self._integer(name, item, 0, MOST) for item in items]

    def _list(self, name: str) -> list[object] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.problem(f"{name} must be a list, not {_short(value)}")
        return value

    def _find(self, names: tuple[str, ...]) -> tuple[str, object]:
        for name in names:
            if self._values.get(name) is not None:
                return name, self._values[name]
        return names[0], None

    def _integer(self, name: str, value: object, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.problem(f"{name} must be an integer, not {_short(value)}")
        if not least <= value <= most:
            raise self.problem(f"{name} must be {least} to {most}, not {_short(value)}")
        return value


def read_json(path: Path) -> ConfigFields:
    """The top object of a JSON file."""
    where = path.name
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise InputError(where, "is too large for a model's configuration")
        document: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror or error})") from error
    except RecursionError as error:
        raise InputError(where, "is nested too deeply") from error
    except ValueError as error:  # broken JSON, broken UTF-8, a number of thousands of digits
        reason = str(error).splitlines()[0][:120]
        raise InputError(where, f"is not JSON ({reason})") from error
    if not isinstance(document, dict):
        raise InputError(where, f"must be a JSON object, not {_short(document)}")
    return ConfigFields(document, where)


def _short(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return "a number of that size"  # a huge integer may have no decimal text at all
    text = json.dumps(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
