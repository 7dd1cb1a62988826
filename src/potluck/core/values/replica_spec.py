"""What a replica is, as it was planned; what is known of it at run time is a `View` (fleet.py)."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.values.plan import TemplateKind
from potluck.core.values.types import Role


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica of one copy of a template."""

    id: str
    unit: str
    """The copy it belongs to: its replicas were planned to work together."""
    template: str
    index: int
    """Which of the template's replicas it is."""
    kind: TemplateKind
    model: str
    role: Role
    region: str
    nodes: tuple[str, ...] = ()
    """The machines it stands on, by names that are theirs alone in the region; empty where nobody knows."""
    zone: str = ""
    """The part of the region that can go down by itself: a zone or a rack. Empty where nobody knows."""
    standby: bool = False
    """Its copy is loaded and gets no requests, until more is needed (`core.scale.standby`)."""

    @property
    def node_domains(self) -> tuple[str, ...]:
        """The smallest failure domains it is in: its machines, or itself where these are not known."""
        return tuple(f"node {self.region}/{node}" for node in self.nodes) or (self.id,)

    @property
    def domains(self) -> tuple[str, ...]:
        """All failure domains it is in, smallest first; with any of them it goes down."""
        zone = (f"zone {self.region}/{self.zone}",) if self.zone else ()
        return (*self.node_domains, *zone, f"region {self.region}")

    def lies_in(self, names: frozenset[str]) -> bool:
        """Whether it, or a domain it is in, is among these."""
        return self.id in names or any(domain in names for domain in self.domains)
