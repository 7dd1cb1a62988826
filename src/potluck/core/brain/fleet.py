"""The fleet as the Brain knows it: which replicas there are, in which state, with how much work.

`Member` is what a replica is; `View` is what is known of it now. Views change, and only `Fleet` changes them,
called by the Brain. Policies read views and return values. Counts of open work are the Brain's own and exact;
a `Status` is the replica's word, which is late.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from potluck.core.brain.events import Status
from potluck.core.errors import InputError
from potluck.core.values.member import Member
from potluck.core.values.plan import TemplateKind
from potluck.core.values.types import Role

State = Literal["starting", "ready", "draining"]


@dataclass(slots=True, eq=False)
class View:
    """What is known of a replica. Read by policies, written by `Fleet` alone."""

    member: Member
    state: State = "starting"
    role: Role = "mixed"
    """Its present role; a flip makes it differ from the planned one."""
    status: Status | None = None
    status_at_s: float = 0.0
    open_requests: int = 0
    """Requests with a segment here that is not done."""
    open_prefill_tokens: int = 0
    """Prompt tokens sent here whose segment is not done, less what its cache was known to hold."""
    open_context_tokens: int = 0
    """Prompt and output tokens that requests decoding (or to decode) here hold at most."""
    doubted: bool = False
    """A request failed there as if it were gone, and nothing was heard of it since."""

    @property
    def serves(self) -> bool:
        """Whether it may be sent requests."""
        return self.state == "ready" and not self.doubted

    @property
    def idle(self) -> bool:
        """Nothing of ours is there, and it did not report others' work."""
        return self.open_requests == 0 and (
            self.status is None or self.status.running + self.status.queued == 0
        )


@dataclass(slots=True, eq=False)
class Unit:
    """A copy of a template: replicas that are routed to together."""

    id: str
    template: str
    kind: TemplateKind
    model: str
    region: str
    views: list[View] = field(default_factory=list)
    places: set[int] = field(default_factory=set)
    """Which of the template's replicas were started for it, those since lost included."""
    whole: bool = False
    """All of its replicas are there and ready. Written by `Fleet`."""


@dataclass(slots=True)
class Fleet:
    """All replicas, indexed the ways that routing asks for. `version` grows whenever who may serve changes."""

    views: dict[str, View] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    version: int = 0

    def add(self, member: Member) -> View:
        if member.id in self.views:
            raise InputError(f"replica {member.id}", "is already in the fleet")
        view = View(member, role=member.role)
        self.views[member.id] = view
        unit = self.units.get(member.unit)
        if unit is None:
            unit = Unit(member.unit, member.template, member.kind, member.model, member.region)
            self.units[member.unit] = unit
        unit.views.append(view)
        unit.places.add(member.index)
        self._changed(unit)
        return view

    def ready(self, replica: str) -> None:
        self._state(replica, "ready")

    def drain(self, replica: str) -> None:
        self._state(replica, "draining")

    def flip(self, replica: str, role: Role) -> None:
        self.views[replica].role = role
        self.version += 1

    def remove(self, replica: str) -> View | None:
        """Forget a replica that stopped or was lost."""
        view = self.views.pop(replica, None)
        if view is None:
            return None
        unit = self.units[view.member.unit]
        unit.views.remove(view)
        if not unit.views:
            del self.units[unit.id]
        self._changed(unit)
        return view

    def doubt(self, view: View, doubted: bool) -> None:
        """Whether it may be gone. That is no change of the fleet: nothing is to be started for it."""
        view.doubted = doubted

    def report(self, view: View, status: Status, at_s: float) -> None:
        view.status = status
        view.status_at_s = at_s

    def open(self, view: View, prefill_tokens: int, context_tokens: int) -> None:
        """A segment was sent there."""
        view.open_requests += 1
        view.open_prefill_tokens += prefill_tokens
        view.open_context_tokens += context_tokens

    def prefilled(self, view: View, prefill_tokens: int) -> None:
        """Of a segment that goes on decoding, the prompt is computed."""
        view.open_prefill_tokens -= prefill_tokens

    def close(self, view: View, prefill_tokens: int, context_tokens: int) -> None:
        """A segment is done, or given up with so much of it still open."""
        view.open_requests -= 1
        view.open_prefill_tokens -= prefill_tokens
        view.open_context_tokens -= context_tokens

    def _state(self, replica: str, state: State) -> None:
        view = self.views.get(replica)
        if view is not None:
            view.state = state
            self._changed(self.units[view.member.unit])

    def _changed(self, unit: Unit) -> None:
        unit.whole = len(unit.views) == len(unit.places) and all(view.state == "ready" for view in unit.views)
        self.version += 1
