"""All pipes of a simulated run, and which of them a transfer takes."""

from __future__ import annotations

from typing import Final

from potluck.core.state.events import FailureKind
from potluck.core.values.kv import wire_of
from potluck.core.values.types import Link
from potluck.perf.transfer import alpha_beta
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.links.link import SharedPipe
from potluck.sim.world.sim_state import SimAttempt, SimReplica

ROUND_TRIP_S: Final = 1e-4  # Between two machines of one region.


Ways = tuple[tuple[SharedPipe, float], ...]
"""Pipes that carry a request's KV side by side, and the share of each."""


class SimNetwork:
    """All pipes of a run.

        same machine         the GPUs' interconnect: fast and not shared here
        named machines       a pipe between each two, where the pool gives their bandwidth: each layer goes from the
                             machine that has it to the one that needs it, over all pipes at once
        same region          the network cards: the one of the two that has less to give each transfer now
        other region         the link; no faster than either card

    A transfer is shared at one place only, its narrowest; the other places bound its speed but are not slowed by it.
    That is exact while at most one end is contended, and never gives a link more than it carries.
    """

    def __init__(self, resolved: ResolvedPlan) -> None:
        self.resolved = resolved
        self.pipes: list[SharedPipe] = []
        self.specs: dict[tuple[str, str], Link] = {}
        self.links: dict[tuple[str, str], SharedPipe] = {}
        self._machines: dict[tuple[str, str], SharedPipe] = {}
        self._ways: dict[tuple[str, str], Ways] = {}
        """By the ids of two replicas."""
        self._wires = {(wire.source, wire.target): wire for wire in map(wire_of, resolved.links)}
        self._wires |= {(wire.source, wire.target): wire for wire in resolved.plan.wires}
        for link in resolved.links:
            ends = (link.source, link.target)
            self.specs[ends] = link
            self.links[ends] = self._add(SharedPipe("link", *ends, self.full_rate(ends), link.rtt_s))

    def card(self, name: str, gbps: float) -> SharedPipe:
        path = alpha_beta(gbps, ROUND_TRIP_S, window_bytes=None)
        return self._add(SharedPipe("card", name, "", path.beta_bytes_per_s, path.alpha_s))

    def full_rate(self, ends: tuple[str, str]) -> float:
        return self.rate_of(ends, self.specs[ends].gbps)

    def rate_of(self, ends: tuple[str, str], gbps: float) -> float:
        """Bytes a second of payload at another bandwidth of the same link."""
        if gbps <= 0:
            return 0.0
        wire = self._wires[ends]
        path = alpha_beta(gbps, self.specs[ends].rtt_s, wire.connections, window_bytes=wire.window_bytes)
        return path.beta_bytes_per_s

    def gbps_of(self, ends: tuple[str, str]) -> float:
        """What a link carries at present, as its bandwidth is written."""
        full = self.full_rate(ends)
        return self.specs[ends].gbps * self.links[ends].rate_bytes_per_s / full

    def carries(self, source: str, target: str) -> bool:
        pipe = self.links.get((source, target))
        return pipe is not None and pipe.rate_bytes_per_s > 0

    def obstacle(self, attempt: SimAttempt) -> tuple[FailureKind, str] | None:
        """Why a route is impossible: a replica with too little memory, or no link for its KV."""
        output_tokens = attempt.request.max_output_tokens - attempt.before_tokens
        replicas, last = attempt.replicas, len(attempt.replicas) - 1
        if attempt.prompt_tokens + output_tokens > replicas[last].room_tokens:
            return "memory", replicas[last].id
        for place in range(last):
            source, target = replicas[place].member.region, replicas[place + 1].member.region
            if source != target and not self.carries(source, target):
                return "link", f"{source}->{target}"
        for place in range(last):
            stop = attempt.segments[place].stop
            if stop is not None and stop > replicas[place].room_tokens:
                return "memory", replicas[place].id
        return None

    def pipe(
        self, source_replica: SimReplica, target_replica: SimReplica, attempt: SimAttempt | None = None
    ) -> SharedPipe | None:
        """The pipe between two replicas; None when they share a machine, or no link joins their regions."""
        if source_replica.member.region != target_replica.member.region:
            return self.links.get((source_replica.member.region, target_replica.member.region))
        if near(source_replica, target_replica):
            return None
        ways = self.ways(source_replica, target_replica)
        if ways:
            return ways[0][0]
        first, second = source_replica.card, target_replica.card
        tenant, weight = (attempt.request.tenant, attempt.weight) if attempt is not None else ("", 1.0)
        left = first.share_bytes_per_s(1, tenant, weight)
        return first if left <= second.share_bytes_per_s(1, tenant, weight) else second

    def floor_s(
        self,
        source_replica: SimReplica,
        target_replica: SimReplica,
        pipe: SharedPipe | None,
        size_bytes: float,
    ) -> float:
        """Least duration of a transfer, whatever its share of the pipe."""
        if pipe is None:
            first, second = source_replica.replica_model, target_replica.replica_model
            return size_bytes / min(first.inside_bytes_per_s, second.inside_bytes_per_s)
        if pipe.kind == "link":
            return size_bytes / min(
                source_replica.card.rate_bytes_per_s, target_replica.card.rate_bytes_per_s
            )
        return 0.0

    def ways(self, source_replica: SimReplica, target_replica: SimReplica) -> Ways:
        """(pipe, share of a request's KV) between the named machines of two replicas, the slowest first.

        Empty where the plan has no bandwidths of machines, and where all layers stay on their machines.
        """
        if not self.resolved.machine_gbps or source_replica.member.region != target_replica.member.region:
            return ()
        key = (source_replica.member.id, target_replica.member.id)
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = self._side_by_side(source_replica, target_replica)
        return way

    def _side_by_side(self, source_replica: SimReplica, target_replica: SimReplica) -> Ways:
        first, second = source_replica.replica_model.owners, target_replica.replica_model.owners
        if not first or len(first) != len(second):
            return ()
        layers: dict[tuple[str, str], int] = {}
        for ends in zip(first, second, strict=True):
            layers[ends] = layers.get(ends, 0) + 1
        result = []
        for ends, count in layers.items():
            if ends[0] == ends[1]:
                continue
            pipe = self._between(ends)
            if pipe is None:
                return ()
            result.append((count / len(first) / max(pipe.rate_bytes_per_s, 1.0), pipe, count / len(first)))
        result.sort(key=lambda each: (-each[0], each[1].name))
        return tuple([(pipe, share) for _, pipe, share in result])

    def _between(self, ends: tuple[str, str]) -> SharedPipe | None:
        if ends not in self._machines:
            gbp = self.resolved.machine_gbps.get(ends)
            if gbp is None:
                return None
            path = alpha_beta(gbp[0], gbp[1])
            self._machines[ends] = self._add(SharedPipe("card", *ends, path.beta_bytes_per_s, path.alpha_s))
        return self._machines[ends]

    def _add(self, pipe: SharedPipe) -> SharedPipe:
        self.pipes.append(pipe)
        return pipe


def near(source_replica: SimReplica, target_replica: SimReplica) -> bool:
    machines = target_replica.machines
    for machine in source_replica.machines:  # noqa: SIM110 - asked for every hand-over, and `any` makes a generator each time
        if machine in machines:
            return True
    return False
