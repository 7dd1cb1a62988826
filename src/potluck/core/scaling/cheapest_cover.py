"""The cheapest copies that cover a deficit: CAUCHY's `best_combo` (its 3.3.2 solved small, its 3.5 asks for it).

    minimise  sum_i c_i n_i     such that     sum_i q_i n_i >= D,   n_i whole,   nodes of each type <= what is free

By branch and bound over the options in order of cost per capacity: what is left costs at least that of the next
option for each unit of capacity. The first branch is the greedy cover, so a search that is cut short is never worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

from potluck.core.scaling.copy_capacity import Key, Resource

SEARCH_STEPS = 20_000
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class CopyOption:
    """One more copy of a template in a region."""

    key: Key
    serves_per_s: float
    weight: float
    """What is to be small: its rent, or what else a strategy's program weighs (`repertoire`)."""
    needs: Mapping[Resource, int]


def cheapest_cover(
    options: Sequence[CopyOption], deficit_per_s: float, free: Mapping[Resource, int] | None
) -> dict[Key, int] | None:
    """How many of each; None when no cover within the free nodes was found. Without `free` they are plenty."""
    useful = undominated(
        sorted(
            (each for each in options if each.serves_per_s > 0),
            key=lambda o: (o.weight / o.serves_per_s, -o.serves_per_s, o.key),
        )
    )
    search = _Search(useful, dict(free) if free is not None else None)
    search.branch(0, deficit_per_s, 0.0)
    if search.best is None:
        return None
    return {option.key: n for option, n in zip(useful, search.best, strict=True) if n}


def undominated(options: Sequence[CopyOption]) -> list[CopyOption]:
    """Without those beside which another one serves as much, weighs no more and needs no more nodes."""
    kept: list[CopyOption] = []
    for option in options:
        if not any(_dominates(other, option) for other in kept):
            kept.append(option)
    return kept


def _dominates(one: CopyOption, other: CopyOption) -> bool:
    return (
        one.serves_per_s >= other.serves_per_s
        and one.weight <= other.weight
        and all(count <= other.needs.get(node, 0) for node, count in one.needs.items())
    )


def largest_within(options: Sequence[CopyOption], free: Mapping[Resource, int]) -> dict[Key, int]:
    """As much capacity as the free nodes hold, taken greedily in order of cost per capacity."""
    left, found = dict(free), {}
    for option in sorted(
        options, key=lambda o: (o.weight / max(o.serves_per_s, 1e-30), -o.serves_per_s, o.key)
    ):
        count = _most(option, left)
        if count and option.serves_per_s > 0:
            found[option.key] = count
            for node, need in option.needs.items():
                left[node] = left.get(node, 0) - need * count
    return found


def _most(option: CopyOption, free: Mapping[Resource, int] | None) -> int:
    if free is None:
        return 10**6
    return max(0, min((free.get(node, 0) // need for node, need in option.needs.items()), default=10**6))


class _Search:
    """Depth first, most copies of the best option first."""

    def __init__(self, options: Sequence[CopyOption], free: dict[Resource, int] | None) -> None:
        self.options, self.free = options, free
        self.best: list[int] | None = None
        self.cost = inf
        self.counts = [0] * len(options)
        self.steps = 0

    def branch(self, place: int, left_per_s: float, cost: float) -> None:
        self.steps += 1
        if left_per_s <= ROUNDING:
            if cost < self.cost - ROUNDING:
                self.best, self.cost = list(self.counts), cost
            return
        if place == len(self.options):
            return
        option = self.options[place]
        least = cost + left_per_s * option.weight / option.serves_per_s
        if least >= self.cost - ROUNDING or self.steps > SEARCH_STEPS:
            return
        enough = ceil(left_per_s / option.serves_per_s - ROUNDING)
        for count in range(min(enough, _most(option, self.free)), -1, -1):
            self._take(option, count)
            self.counts[place] = count
            spent = cost + count * option.weight
            self.branch(place + 1, left_per_s - count * option.serves_per_s, spent)
            self._take(option, -count)
            if self.steps > SEARCH_STEPS:
                break
        self.counts[place] = 0

    def _take(self, option: CopyOption, count: int) -> None:
        if self.free is not None:
            for node, need in option.needs.items():
                self.free[node] = self.free.get(node, 0) - need * count
