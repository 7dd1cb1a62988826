"""A route: which replica runs which tokens of a request. KV moves between segments; the last one also decodes."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, stop) of a request on one replica; `stop` is None in the last segment."""

    replica: str
    start: int
    stop: int | None

    def __post_init__(self) -> None:
        if self.start < 0:
            raise InputError("segment: start", f"must not be negative, is {self.start}")
        if self.stop is not None and self.stop <= self.start:
            raise InputError("segment: stop", f"must be beyond its start {self.start}, is {self.stop}")


@dataclass(frozen=True, slots=True)
class Route:
    """Segments that cover a prompt from token 0 without a gap, the last one open."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise InputError("route: segments", "a route needs at least one")
        expected: int | None = 0
        for segment in self.segments:
            if expected is None:
                raise InputError("route: segments", "only the last one may be open")
            if segment.start != expected:
                raise InputError("route: segments", f"one starts at {segment.start}, not at {expected}")
            expected = segment.stop
        if expected is not None:
            raise InputError("route: segments", "the last one must be open: it decodes")

    @property
    def decoder(self) -> str:
        return self.segments[-1].replica


def aggregated(replica: str) -> Route:
    """One replica does all (also CAUCHY's opportunistic in-place run)."""
    return Route((Segment(replica, 0, None),))


def handed_over(first: str, second: str, at_token: int) -> Route:
    """`first` prefills up to `at_token`, `second` does the rest and decodes (CRONUS: below the prompt's length)."""
    return Route((Segment(first, 0, at_token), Segment(second, at_token, None)))
