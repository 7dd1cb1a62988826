"""What to ask, and when: prompts that do not begin alike, at the times of a trace or of chance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import Literal

from potluck.core.errors import InputError
from potluck.loadgen.load_client import Prompt, TimedRequest

Style = Literal["ids", "text", "chat"]
"""Token numbers, of exact length; text; or text as a chat."""
LOWEST, HIGHEST = 20, 400
"""Token numbers that any vocabulary has, and that mean nothing special in those we know."""
WORDS = (
    "river",
    "mill",
    "wheel",
    "rain",
    "child",
    "story",
    "stone",
    "bread",
    "light",
    "road",
    "song",
    "cloud",
)


def prompt_of(numbers: Random, tokens: int, style: Style) -> Prompt:
    """About so many tokens; exactly so many as token numbers. No two begin alike."""
    if style == "ids":
        return [numbers.randrange(LOWEST, HIGHEST) for _ in range(tokens)]
    return " ".join([f"{numbers.randrange(16**6):06x}", *numbers.choices(WORDS, k=max(0, tokens - 4))])


def poisson(numbers: Random, rate_per_s: float, count: int | None, seconds: float | None) -> list[float]:
    """Times at which requests come, independently of each other: so many, or as long as told."""
    if rate_per_s <= 0:
        raise InputError("--rate", f"must be above 0, is {rate_per_s:g}")
    found: list[float] = []
    at_s = 0.0
    while count is None or len(found) < count:
        if found:
            at_s += numbers.expovariate(rate_per_s)
        if seconds is not None and at_s > seconds:
            break
        found.append(at_s)
    return found


def shots(
    rows: Iterable[tuple[float, str, int, int]],
    *,
    seed: int = 0,
    style: Style = "ids",
    key: str = "",
    until_eos: bool = False,
) -> Iterator[TimedRequest]:
    """Requests from (when, which model, tokens of the prompt, tokens of the answer)."""
    numbers = Random(seed)
    extra: dict[str, object] = {"stream_options": {"include_usage": True}}
    if until_eos:
        extra["ignore_eos"] = None
    for at_s, model, prompt, output in rows:
        yield TimedRequest(
            at_s, model, prompt_of(numbers, prompt, style), output, key, extra, chat=style == "chat"
        )


def same(
    times: Iterable[float], model: str, prompt: int, output: int
) -> Iterator[tuple[float, str, int, int]]:
    """Rows of one length at these times."""
    return ((at_s, model, prompt, output) for at_s in times)
