"""What a replica is, as it was planned; what is known of it at run time is a `View` (fleet.py)."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.values.plan import TemplateKind
from potluck.core.values.types import Role


@dataclass(frozen=True, slots=True)
class Member:
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
