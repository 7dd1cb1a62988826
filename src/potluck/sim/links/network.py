"""Which pipe KV takes from one replica to another.

    same machine         the GPUs' interconnect: fast and not shared here
    two named machines   a pipe of their own, where the pool gives its bandwidth
    same region          the network cards: the one of the two that has less to give each transfer now
    other region         the link; no faster than either card

A transfer is shared at one place only, its narrowest; the other places bound its speed but are not slowed by it.
That is exact while at most one end is contended, and never gives a link more than it carries.
"""

from __future__ import annotations

from potluck.core.values.types import Link
from potluck.perf.transfer import alpha_beta, link_alpha_beta
from potluck.sim.links.link import Pipe
from potluck.sim.world.state import Journey, Machine, Site
from potluck.worlds.scene import Scene

ROUND_TRIP_S = 1e-4
"""Between two machines of one region."""


def card_pipe(name: str, gbps: float) -> Pipe:
    path = alpha_beta(gbps, ROUND_TRIP_S, window_bytes=None)
    return Pipe("card", name, "", path.beta_bytes_per_s, path.alpha_s)


class Network:
    """All pipes of a run."""

    __slots__ = ("_links", "_machines", "links", "pipes", "scene")

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.pipes: list[Pipe] = []
        self._links: dict[tuple[str, str], Link] = {}
        self.links: dict[tuple[str, str], Pipe] = {}
        self._machines: dict[tuple[str, str], Pipe] = {}
        for link in scene.links:
            path = link_alpha_beta(link)
            ends = (link.source, link.target)
            self._links[ends] = link
            self.links[ends] = self._add(Pipe("link", *ends, path.beta_bytes_per_s, path.alpha_s))

    def card(self, name: str, gbps: float) -> Pipe:
        return self._add(card_pipe(name, gbps))

    def full_rate(self, ends: tuple[str, str]) -> float:
        """Bytes a second that a link was built for."""
        return link_alpha_beta(self._links[ends]).beta_bytes_per_s

    def rate_of(self, ends: tuple[str, str], gbps: float) -> float:
        """Bytes a second of payload at another bandwidth of the same link."""
        return 0.0 if gbps <= 0 else alpha_beta(gbps, self._links[ends].rtt_s).beta_bytes_per_s

    def gbps_of(self, ends: tuple[str, str]) -> float:
        """What a link carries at present, as its bandwidth is written."""
        full = self.full_rate(ends)
        return self._links[ends].gbps * self.links[ends].rate_bytes_per_s / full

    def pipe(self, source: Site, target: Site, journey: Journey | None = None) -> Pipe | None:
        """The pipe between two replicas; None when they share a machine, or no link joins their regions."""
        if source.member.region != target.member.region:
            return self.links.get((source.member.region, target.member.region))
        if near(source, target):
            return None
        own = self._between(source, target)
        if own is not None:
            return own
        first, second = source.card, target.card
        tenant, weight = (journey.request.tenant, journey.weight) if journey is not None else ("", 1.0)
        left = first.share_bytes_per_s(1, tenant, weight)
        return first if left <= second.share_bytes_per_s(1, tenant, weight) else second

    def floor_s(self, source: Site, target: Site, pipe: Pipe | None, size_bytes: float) -> float:
        """Seconds that a transfer takes at least, whatever its share of the pipe."""
        if pipe is None:
            return size_bytes / min(source.kit.inside_bytes_per_s, target.kit.inside_bytes_per_s)
        if pipe.kind == "link":
            return size_bytes / min(source.card.rate_bytes_per_s, target.card.rate_bytes_per_s)
        return 0.0

    def _between(self, source: Site, target: Site) -> Pipe | None:
        if not self.scene.machine_gbps or not source.kit.machines or not target.kit.machines:
            return None
        ends = (source.kit.machines[0], target.kit.machines[0])
        if ends not in self._machines:
            found = self.scene.machine_gbps.get(ends)
            if found is None:
                return None
            path = alpha_beta(found[0], found[1])
            self._machines[ends] = self._add(Pipe("card", *ends, path.beta_bytes_per_s, path.alpha_s))
        return self._machines[ends]

    def _add(self, pipe: Pipe) -> Pipe:
        self.pipes.append(pipe)
        return pipe


def near(source: Site, target: Site) -> bool:
    """Whether two replicas stand on one machine."""
    return any(machine in target.machines for machine in source.machines)


def reachable(network: Network, source: Site, target: Site) -> bool:
    ends = (source.member.region, target.member.region)
    if ends[0] == ends[1]:
        return True
    pipe = network.links.get(ends)
    return pipe is not None and pipe.rate_bytes_per_s > 0


def machine_name(unit: str, node: str, place: int) -> str:
    return f"{unit}/{node}/{place}"


__all__ = ["ROUND_TRIP_S", "Machine", "Network", "card_pipe", "machine_name", "near", "reachable"]
