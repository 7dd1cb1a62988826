"""A step's budget among tenants: by weight, and nobody's part is left idle while another has prompts.

Parts are found by filling up: with W the weights of those who want more, each may have budget x weight / W; whoever
wants less gets what it wants, and the rest is divided again among the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from potluck.core.errors import InputError
from potluck.core.replica.batch_values import Queue

MOST_WEIGHT: Final = 1e9


def require_weight(weight: float) -> None:
    """A weight that somebody else sent."""
    if not 0 < weight < MOST_WEIGHT:
        raise InputError("weight", f"must be above 0 and below {MOST_WEIGHT:g}, is {weight}")


class TenantShares:
    """The tenants of one replica, each with its line of waiting sequences. `Batcher` alone changes it."""

    __slots__ = ("_had", "_weights", "lines")

    def __init__(self, tenant: str, queue: Queue) -> None:
        self.lines: dict[str, Queue] = {tenant: queue}
        self._weights: dict[str, float] = {tenant: 1.0}
        self._had: dict[str, float] = {tenant: 0.0}
        """Tokens computed for it, over its weight."""

    def come(self, tenant: str, weight: float) -> None:
        """A sequence of a tenant came. A newcomer has had as much as whoever has had least."""
        if tenant not in self.lines:
            self._had[tenant] = min(self._had.values())
            self.lines[tenant] = []
        self._weights[tenant] = weight

    def had(self, tenant: str, tokens: int) -> None:
        self._had[tenant] += tokens / self._weights[tenant]

    def parts(self, budget: int, wants: Mapping[str, int]) -> list[tuple[str, int]]:
        """Who may have how much, whoever has had least first; they add up to the budget, or to all that is wanted."""
        order = sorted((tenant for tenant, tokens in wants.items() if tokens), key=self._had.__getitem__)
        given = divided(budget, [(self._weights[tenant], wants[tenant]) for tenant in order])
        return list(zip(order, given, strict=True))


def divided(budget: int, wants: list[tuple[float, int]]) -> list[int]:
    """(weight, tokens wanted) to tokens given; fractions go to those that come first."""
    given = [0] * len(wants)
    open_ = [place for place, (_, tokens) in enumerate(wants) if tokens > 0]
    while open_ and budget > 0:
        weight = _weight(wants, open_)
        small = [place for place in open_ if wants[place][1] * weight <= budget * wants[place][0]]
        if not small:
            break
        for place in small:
            given[place] = wants[place][1]
        budget -= sum(given[place] for place in small)
        open_ = [place for place in open_ if place not in small]
    weight = _weight(wants, open_)
    for place in open_:
        given[place] = int(budget * wants[place][0] / weight)
    left = budget - sum(given[place] for place in open_)
    for place in open_[:left]:
        given[place] += 1
    return given


def _weight(wants: list[tuple[float, int]], places: list[int]) -> float:
    """A loop, as compiled code takes a sum that begins with 0 for one of whole numbers."""
    weight = 0.0
    for place in places:
        weight += wants[place][0]
    return weight
