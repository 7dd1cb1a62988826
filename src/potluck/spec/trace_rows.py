"""One request of a trace, and the checks that every format's rows go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from potluck.spec.problems import shown

MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. `blocks` are its prefix block ids, where the trace has them."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def time_of(column: str, value: Any, read: Callable[[Any], float], last_s: float) -> float:
    """A time in seconds that does not lie before the one of the line above."""
    try:
        seconds = read(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{column} must be a time, is {shown(value)}") from error
    if not abs(seconds) < 1e15:
        raise ValueError(f"{column} must be a time, is {shown(value)}")
    if seconds < last_s:
        raise ValueError(f"{column} goes back by {last_s - seconds:g} s; sort the file by time")
    return seconds


def whole(text: str) -> object:
    """A number as CSV writers spell whole ones, `12` or `12.0`; anything else as it stands."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def tokens(column: str, value: object, least: int) -> int:
    if type(value) is not int:
        raise ValueError(f"{column} must be a whole number, is {shown(value)}")
    if not least <= value <= MAX_TOKENS:
        raise ValueError(f"{column} must be between {least} and {MAX_TOKENS:,}, is {shown(value)}")
    return value
