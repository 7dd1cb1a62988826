"""One request of a trace, and the checks that every format's rows go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from potluck.spec.spec_problems import shown

MAX_TOKENS = 10_000_000
MOST_LABEL = 200


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. `blocks` are its prefix block ids, where the trace has them."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    tenant: str = ""
    """Who sent it and of which class it is, where the trace says so."""
    request_class: str = ""
    wait_s: float = inf
    """How long anybody waits for its answer."""


def label(column: str, value: object) -> str:
    """A tenant's or a class's name; nothing is none."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MOST_LABEL or not value.isprintable():
        raise ValueError(f"{column} must be a name of at most {MOST_LABEL} characters, is {shown(value)}")
    return value.strip()


def wait_of(column: str, value: object) -> float:
    """Milliseconds from the arrival to the deadline; nothing is none."""
    if value is None or value == "":
        return inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise ValueError(f"{column} must be a positive number of milliseconds, is {shown(value)}")
    return value / 1000.0


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
