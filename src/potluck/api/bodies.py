"""JSON from a client, strictly: what is not JSON, has half a character or an unknown field is refused in one line."""

from __future__ import annotations

import json
import re
from typing import TypeVar

from potluck.core.codec import decode
from potluck.core.errors import FormatError

T = TypeVar("T")
HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes) -> dict[str, object]:
    """The body as a JSON object."""
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        if HALF.search(raw):
            _whole_characters(found)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            "body", f"is not JSON ({(str(error).splitlines() or ['too deep'])[0][:120]})"
        ) from error
    if not isinstance(found, dict):
        raise FormatError("body", "must be a JSON object")
    return found


def _whole_characters(value: object) -> None:
    """JSON can write half of a pair (\\ud800) alone; such text cannot be encoded."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise FormatError("body", "has half a character, such as \\ud800 alone") from error
    elif isinstance(value, dict):
        for each in (*value, *value.values()):
            _whole_characters(each)
    elif isinstance(value, list):
        for each in value:
            _whole_characters(each)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def shaped(kind: type[T], body: dict[str, object]) -> T:
    """A dataclass from a body. null counts as not given; the codec's own `type` key is no field here."""
    values = {key: value for key, value in body.items() if value is not None}
    if "type" in values:
        raise FormatError("type", "unknown key")
    return decode(kind, values)


def tokens_of(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise FormatError(where, "must be a list of token numbers")
    return tuple(value)
