"""How busy hardware and links were in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.sim.results.records import ReplicaRecord, SimResult


@dataclass(frozen=True, slots=True)
class HardwareUse:
    """All replicas that stand on the same node types."""

    nodes: str
    replicas: int
    gpus: int
    busy_share: float
    """Of the time from ready to stopped, weighted by GPUs."""
    gpu_h: float
    """GPU-hours from ready to stopped."""
    lost: int


@dataclass(frozen=True, slots=True)
class LinkUse:
    source: str
    target: str
    kind: str
    gbps: float
    sent_bytes: float
    mean_share: float
    """Of what it could have carried in the whole run."""
    busy_share: float
    """Of the run, with at least one transfer."""


def hardware_use(replicas: Sequence[ReplicaRecord], end_s: float) -> tuple[HardwareUse, ...]:
    """How busy each kind of hardware was."""
    groups: dict[str, list[ReplicaRecord]] = {}
    for replica in replicas:
        groups.setdefault("+".join(sorted(set(replica.nodes))) or "unknown", []).append(replica)
    found = []
    for nodes, members in sorted(groups.items()):
        busy_s = sum(member.busy_s * member.gpus for member in members)
        there_s = sum(serving_s(member, end_s) * member.gpus for member in members)
        lost = sum(member.changes[-1][1] == "lost" for member in members)
        share = min(busy_s / there_s, 1.0) if there_s > 0 else 0.0
        gpus = sum(member.gpus for member in members)
        found.append(HardwareUse(nodes, len(members), gpus, share, there_s / 3600.0, lost))
    return tuple(found)


def serving_s(replica: ReplicaRecord, end_s: float) -> float:
    """From ready to stopped."""
    ready_s = replica.ready_s
    return 0.0 if ready_s is None else max(0.0, min(replica.ended_s(end_s), end_s) - ready_s)


def link_use(result: SimResult) -> tuple[LinkUse, ...]:
    span_s = result.end_s
    found = []
    for link in result.links:
        if link.kind == "card" and link.sent_bytes == 0:
            continue
        most_bytes = link.gbps * 1e9 / 8 * span_s
        share = min(link.sent_bytes / most_bytes, 1.0) if most_bytes > 0 else 0.0
        busy = min(link.busy_s / span_s, 1.0) if span_s > 0 else 0.0
        found.append(LinkUse(link.source, link.target, link.kind, link.gbps, link.sent_bytes, share, busy))
    return tuple(found)
