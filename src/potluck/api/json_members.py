"""Members of the JSON files that come with a model, by name and kind; whoever wrote them may have erred."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf
from pathlib import Path

from potluck.core.errors import FormatError, InputError

LARGEST_FILE_BYTES = 16_000_000


def read_json(path: Path) -> Mapping[str, object]:
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise FormatError(str(path), "is too large for a model's configuration")
        document: object = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(str(path), f"is not JSON ({str(error).splitlines()[0][:120]})") from error
    if not isinstance(document, dict):
        raise FormatError(str(path), "must be a JSON object")
    return document


class JsonMembers:
    """Members of a JSON object by name and kind; null counts as missing."""

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self._values = values
        self._where = where

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(f"{self._where}: {name}", "must be a number")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._values.get(name)
        if not isinstance(value, list) or any(type(each) not in (int, float) for each in value):
            raise FormatError(f"{self._where}: {name}", "must be a list of numbers")
        return tuple(float(each) for each in value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FormatError(f"{self._where}: {name}", "must be true or false")
        return value

    def text(self, *names: str, default: str) -> str:
        value = next((self._values[name] for name in names if self._values.get(name) is not None), default)
        if not isinstance(value, str):
            raise FormatError(f"{self._where}: {names[0]}", "must be a string")
        return value

    def above_zero(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if not 0 < value < inf:
            raise InputError(f"{self._where}: {name}", f"must be above 0, not {value:g}")
        return value

    def part(self, *names: str) -> JsonMembers:
        """The first of these nested objects that has anything in it."""
        for name in names:
            value = self._values.get(name)
            if value is not None and not isinstance(value, dict):
                raise FormatError(f"{self._where}: {name}", "must be an object")
            if value:
                return JsonMembers(value, f"{self._where}: {name}")
        return JsonMembers({}, self._where)

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in found):
            raise FormatError(f"{self._where}: {name}", "must be a token or a list of tokens")
        return tuple(found)
