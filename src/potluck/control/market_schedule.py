"""A market over time, for simulations: the lines of a market file, each with the second from which it holds.

    offers:
      - {region: east, node: 1xL4, price_usd_per_h: 0.30, available: 4}                 from the beginning
      - {at_s: 3600, region: east, node: 1xL4, price_usd_per_h: 0.45}
      - {at_s: 7200, region: east, node: 1xL4, available: 1, notice_s: 120}             what is beyond goes at 7320 s
    notices:
      - {at_s: 9000, region: east, node: 1xL4, count: 2, notice_s: 30}                  two go, told 30 s before

What a line does not name stays as it was, and at first as the spec has it. So a market file without notices is a
schedule in which nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from potluck.control.market import (
    NOTICE_KEYS,
    OFFER_KEYS,
    Market,
    Quote,
    count_of,
    market_lines,
    place_of,
    quote_of,
)
from potluck.core.errors import InputError
from potluck.core.values.types import Region

NOTICE_S = 30.0
"""Before machines go, where nothing is said: Azure and Google give 30 s, Amazon 120 s."""


@dataclass(frozen=True, slots=True)
class MarketChange:
    """From a moment on a node type has another price, or there are more or fewer of it."""

    at_s: float
    quote: Quote
    notice_s: float = NOTICE_S


@dataclass(frozen=True, slots=True)
class NodesLeave:
    """So many machines of a type go, though others like them may be had."""

    at_s: float
    region: str
    node: str
    count: int
    notice_s: float = NOTICE_S


@dataclass(frozen=True, slots=True)
class MarketSchedule:
    changes: tuple[MarketChange, ...] = ()
    """In order of time."""
    leaves: tuple[NodesLeave, ...] = ()

    def regions(self, spec: Sequence[Region], at_s: float = 0.0) -> tuple[Region, ...]:
        """The spec's regions at the prices and with the nodes of a moment."""
        found = tuple(spec)
        for change in self.changes:
            if change.at_s <= at_s:
                found = Market((change.quote,)).regions(found)
        return found


def read_schedule(text: str, where: str, spec: Sequence[Region]) -> MarketSchedule:
    """A file's text, checked against the regions and nodes that the spec has."""
    timed = {"at_s", "notice_s"}
    offers, notices = market_lines(text, where, OFFER_KEYS | timed, (NOTICE_KEYS | timed) - {"engine", "at"})
    changes = [
        MarketChange(
            _seconds(each, "at_s", 0.0, at),
            quote_of(each, at, spec),
            _seconds(each, "notice_s", NOTICE_S, at),
        )
        for each, at in offers
    ]
    leaves = [
        NodesLeave(
            _seconds(each, "at_s", None, at),
            *place_of(each, at, spec),
            count_of(each, at),
            _seconds(each, "notice_s", NOTICE_S, at),
        )
        for each, at in notices
    ]
    return MarketSchedule(tuple(sorted(changes, key=lambda each: each.at_s)), tuple(leaves))


def _seconds(each: dict[str, Any], name: str, default: float | None, at: str) -> float:
    value = each.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise InputError(f"{at}.{name}", f"must be seconds of the simulation, from 0, is {value!r}")
    return float(value)
