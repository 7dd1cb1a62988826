"""What was lost lately, and what may be dying with it.

Replicas stand on nodes, nodes in zones, zones in regions: what takes one of them down often takes its neighbours too,
and the news come one by one. So a request whose replica was lost is sent away from the smallest domain that explains
all recent losses of a region:

    one replica, or several of one node     the node
    several nodes of one zone               the zone
    several zones, or no zone known         the region

Losses count for `TOGETHER_S`. A replica that is heard of again was not lost. This is about requests that failed; new
ones go wherever replicas are ready, which losses change anyway.

A request may be what kills replicas. One that was merely on a replica that went silent is not, where within
`SILENT_TOGETHER_S` another went silent that it was not on, or one answered again: then it is something about them.
"""

from __future__ import annotations

from typing import Final

from potluck.core.values.replica_spec import ReplicaSpec

TOGETHER_S: Final = 5.0
"""Losses so close together may have one cause."""
SILENT_TOGETHER_S: Final = 60.0
QUIET_S: Final = 1.0
"""When nothing was lost for so long, whatever is still there is thought to stay."""


class RecentLosses:
    """Replicas that were lost lately. Changed by the Brain alone."""

    __slots__ = ("_latest_s", "_recent", "_silent", "_suspects", "_woke_s")

    def __init__(self) -> None:
        self._recent: dict[str, tuple[float, ReplicaSpec]] = {}
        """Replica to when it was lost, oldest first."""
        self._suspects: frozenset[str] | None = frozenset()
        """None when it must be worked out anew."""
        self._latest_s = self._woke_s = float("-inf")
        """When one was last lost, and when one that was silent answered again."""
        self._silent: dict[str, float] = {}
        """Replica to when it was last said to be silent, oldest first."""

    def note(self, at_s: float, member: ReplicaSpec) -> None:
        """It is lost, or a request failed there as if it were; the first word counts."""
        if member.id not in self._recent:
            self._recent[member.id] = (at_s, member)
            self._suspects = None
            self._latest_s = max(self._latest_s, at_s)

    def silent(self, at_s: float, member: ReplicaSpec) -> None:
        """It does not answer."""
        self.note(at_s, member)
        self._silent.pop(member.id, None)
        self._silent[member.id] = at_s

    def reported(self, at_s: float, replica: str) -> None:
        """It answers."""
        if replica in self._silent:
            self._woke_s = at_s

    def mend(self, replica: str) -> None:
        """It was heard of again, or is taken to be well."""
        if self._recent.pop(replica, None) is not None:
            self._suspects = None

    def suspects(self, at_s: float) -> frozenset[str]:
        """Domains that may be dying, as `ReplicaSpec.domains` names them."""
        self._forget(at_s)
        if self._suspects is None:
            regions: dict[str, list[ReplicaSpec]] = {}
            for _, member in self._recent.values():
                regions.setdefault(member.region, []).append(member)
            self._suspects = frozenset(name for each in regions.values() for name in smallest(each))
        return self._suspects

    def alone(self, at_s: float, replica: str, visited: frozenset[str]) -> bool:
        """Whether a replica was lost lately, and none that the request was not on: it may be what kills them."""
        self._forget(at_s)
        if replica not in self._recent or not visited.issuperset(self._recent):
            return False
        return replica not in self._silent or (
            at_s - self._woke_s > SILENT_TOGETHER_S and visited.issuperset(self._silent)
        )

    def quiet(self, at_s: float) -> bool:
        """Whether nothing was lost for a while."""
        return at_s - self._latest_s >= QUIET_S

    def _forget(self, at_s: float) -> None:
        while self._silent:
            oldest = next(iter(self._silent))
            if at_s - self._silent[oldest] <= SILENT_TOGETHER_S:
                break
            del self._silent[oldest]
        while self._recent:
            oldest = next(iter(self._recent))
            if at_s - self._recent[oldest][0] <= TOGETHER_S:
                return
            del self._recent[oldest]
            self._suspects = None


def smallest(lost: list[ReplicaSpec]) -> tuple[str, ...]:
    """The smallest domain of one region that all of these lie in; several names when they share several nodes."""
    nodes = set(lost[0].node_domains).intersection(*(member.node_domains for member in lost[1:]))
    if nodes:
        return tuple(sorted(nodes))
    zones = {member.zone for member in lost}
    if len(zones) == 1 and "" not in zones:
        return (lost[0].domains[-2],)
    return (lost[0].domains[-1],)
