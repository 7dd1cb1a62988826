"""Where requests of one bucket may go, ready to be picked from.

Ways have the closed targets (they do a whole request), and flows: a region's prefill replicas and a region's
decode replicas with a planned rate between them. Between these ways turns are taken by weight; a flow's weight
is

    planned rate x min(ready prefill weight / planned prefill, ready decode weight / planned decode)

so it follows what is ready on its tighter side. One that crosses a link is never given more than was planned,
as the link was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from potluck.core.routing.balance import Chooser
from potluck.core.routing.targets import Target
from potluck.core.routing.weighted import Turns


class Way:
    """One way: its closed targets (no regions), or a flow between two regions."""

    __slots__ = ("decodes", "planned_per_s", "prefills", "source", "target")

    def __init__(
        self, prefills: Chooser, decodes: Chooser | None, source: str = "", target: str = ""
    ) -> None:
        self.prefills = prefills
        """Closed targets, or where prompts are prefilled."""
        self.decodes = decodes
        """None in the closed way."""
        self.source = source
        self.target = target
        self.planned_per_s = 0.0

    @property
    def crosses(self) -> bool:
        return self.source != self.target

    @property
    def open(self) -> bool:
        return len(self.prefills) > 0 and (self.decodes is None or len(self.decodes) > 0)


class Ways:
    """One bucket of a model, for requests up to some length in all."""

    __slots__ = ("_decode", "_new", "_prefill", "closed", "flows", "local", "remote", "simple", "turns")

    def __init__(self, new_chooser: Callable[[], Chooser], flows: list[tuple[str, str, float]]) -> None:
        self._new = new_chooser
        self._prefill: dict[str, Chooser] = {}
        self._decode: dict[str, Chooser] = {}
        self.closed = Way(new_chooser(), None)
        self.flows: list[Way] = []
        self.turns: Turns[Way] = Turns()
        self.local: Turns[Way] = Turns()
        """Those of `turns` within a region."""
        self.remote: Turns[Way] = Turns()
        """Those over a link."""
        for source, target, planned_per_s in flows:
            way = Way(self.prefill(source), self.decode(target), source, target)
            way.planned_per_s = planned_per_s
            self.flows.append(way)
        self.simple = not self.flows
        """Only closed targets: the commonest case, and the fastest."""

    def prefill(self, region: str) -> Chooser:
        return self._pool(self._prefill, region)

    def decode(self, region: str) -> Chooser:
        return self._pool(self._decode, region)

    def put(self, target: Target, weights: Weights) -> None:
        """Set a target's weights in all of the parts; `settle` must follow."""
        self.closed.prefills.set(target, weights.closed)
        if self.simple:
            return
        if weights.region in self._prefill:
            self._prefill[weights.region].set(target, weights.prefill)
        if weights.region in self._decode:
            self._decode[weights.region].set(target, weights.decode)

    def settle(self) -> None:
        """Weigh the ways anew."""
        if self.simple:
            return
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

    def _weigh(self, way: Way, weight: float) -> None:
        self.turns.set(way, weight)
        (self.remote if way.crosses else self.local).set(way, weight)

    def _pool(self, pools: dict[str, Chooser], region: str) -> Chooser:
        if region not in pools:
            pools[region] = self._new()
        return pools[region]


class Weights(NamedTuple):
    """A target's weights in one set of ways."""

    region: str
    closed: float
    prefill: float
    decode: float
