"""Where requests of one bucket may go, ready to be picked from.

Ways have the closed targets (they do a whole request), and flows: a region's prefill replicas and a region's
decode replicas with a planned rate between them. Between these ways turns are taken by weight; a flow's weight
is

    planned rate x min(ready prefill weight / planned prefill, ready decode weight / planned decode)

so it follows what is ready on its tighter side. One that crosses a link is never given more than was planned,
as the link was. Inside a group's copy every hand-over from one replica to another is a way of its own (`groups.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from potluck.core.routing.balance import Balancer
from potluck.core.routing.round_robin import WeightedRoundRobin
from potluck.core.routing.targets import Target


class RouteOption:
    """One way: its closed targets (no regions), or a flow between two regions."""

    __slots__ = ("decodes", "link", "planned_per_s", "prefills", "source", "target")

    def __init__(
        self, prefills: Balancer, decodes: Balancer | None, source: str = "", target: str = ""
    ) -> None:
        self.prefills = prefills
        """Closed targets, or where prompts are prefilled."""
        self.decodes = decodes
        """None in the closed way."""
        self.source = source
        self.target = target
        self.link = f"{source}->{target}"
        self.planned_per_s = 0.0

    @property
    def crosses(self) -> bool:
        return self.source != self.target

    @property
    def open(self) -> bool:
        return len(self.prefills) > 0 and (self.decodes is None or len(self.decodes) > 0)


class SingleChoice:
    """A chooser with one member."""

    __slots__ = ("_member", "total")

    def __init__(self, member: Target) -> None:
        self._member = member
        self.total = 1.0

    def __len__(self) -> int:
        return 1

    def __contains__(self, member: Target) -> bool:
        return member is self._member

    def set(self, member: Target, weight: float) -> None:
        """It stays as long as its way does."""

    def pick(self) -> Target | None:
        return self._member

    def swap(self, picked: Target, other: Target) -> None:
        """There is no other."""

    def members(self) -> tuple[Target, ...]:
        return (self._member,)


class RouteOptions:
    """One bucket of a model, for requests up to some length in all."""

    __slots__ = (
        "_decode",
        "_new",
        "_prefill",
        "closed",
        "flows",
        "local",
        "pairs",
        "remote",
        "simple",
        "turns",
    )

    def __init__(self, new_chooser: Callable[[], Balancer], flows: list[tuple[str, str, float]]) -> None:
        self._new = new_chooser
        self._prefill: dict[str, Balancer] = {}
        self._decode: dict[str, Balancer] = {}
        self.closed = RouteOption(new_chooser(), None)
        self.flows: list[RouteOption] = []
        self.turns: WeightedRoundRobin[RouteOption] = WeightedRoundRobin()
        self.local: WeightedRoundRobin[RouteOption] = WeightedRoundRobin()
        """Those of `turns` within a region."""
        self.remote: WeightedRoundRobin[RouteOption] = WeightedRoundRobin()
        """Those over a link."""
        for source, target, planned_per_s in flows:
            way = RouteOption(self.prefill(source), self.decode(target), source, target)
            way.planned_per_s = planned_per_s
            self.flows.append(way)
        self.pairs: dict[str, dict[tuple[Target, Target], RouteOption]] = {}
        """Unit to the hand-overs inside it."""
        self.simple = not self.flows
        """Only closed targets: the commonest case, and the fastest."""

    def prefill(self, region: str) -> Balancer:
        return self._pool(self._prefill, region)

    def decode(self, region: str) -> Balancer:
        return self._pool(self._decode, region)

    def put(self, target: Target, weights: TargetWeights) -> None:
        """Set a target's weights in all of the parts; `settle` must follow."""
        self.closed.prefills.set(target, weights.closed)
        if self.simple:
            return
        if weights.region in self._prefill:
            self._prefill[weights.region].set(target, weights.prefill)
        if weights.region in self._decode:
            self._decode[weights.region].set(target, weights.decode)

    def join(self, unit: str, region: str, pairs: list[tuple[Target, Target, float]]) -> None:
        """The hand-overs inside a group's copy, with their weights, instead of those before; `settle` must follow."""
        old = self.pairs.pop(unit, {})
        new: dict[tuple[Target, Target], RouteOption] = {}
        for first, second, weight in pairs:
            way = old.pop((first, second), None)
            if way is None:
                way = RouteOption(SingleChoice(first), SingleChoice(second), region, region)
            way.planned_per_s = weight
            new[first, second] = way
        for way in old.values():
            self._weigh(way, 0.0)
        if new:
            self.pairs[unit] = new
        self.simple = not (self.flows or self.pairs)

    def settle(self) -> None:
        """Weigh the ways anew."""
        if self.simple:
            return
        for pairs in self.pairs.values():
            for way in pairs.values():
                self._weigh(way, way.planned_per_s)
        out: dict[str, float] = {}
        into: dict[str, float] = {}
        for way in self.flows:
            out[way.source] = out.get(way.source, 0.0) + way.planned_per_s
            into[way.target] = into.get(way.target, 0.0) + way.planned_per_s
        self._weigh(self.closed, self.closed.prefills.total if len(self.closed.prefills) else 0.0)
        for way in self.flows:
            share = 0.0
            if way.open and way.decodes is not None:
                planned = way.planned_per_s
                share = min(way.prefills.total / out[way.source], way.decodes.total / into[way.target])
                share = planned * (min(1.0, share) if way.crosses else share)
            self._weigh(way, share)

    def _weigh(self, way: RouteOption, weight: float) -> None:
        self.turns.set(way, weight)
        (self.remote if way.crosses else self.local).set(way, weight)

    def _pool(self, pools: dict[str, Balancer], region: str) -> Balancer:
        if region not in pools:
            pools[region] = self._new()
        return pools[region]


class TargetWeights(NamedTuple):
    """A target's weights in one set of ways."""

    region: str
    closed: float
    prefill: float
    decode: float
