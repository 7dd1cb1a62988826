"""What a request can be sent to: one replica that does all, a combo, or a pair.

A combo (CAUCHY) has prefill and decode replicas, a pair (CRONUS) low-end and high-end ones, chosen per request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from potluck.core.state.fleet import ReplicaState, TemplateCopy
from potluck.core.values.plan import Template
from potluck.core.values.route import Route, aggregated

MEMORY: Final = 64  # Arrivals over which `busy` is averaged.
MOST_BUSY: Final = 0.99


PLAIN: Final = 0
COMBO: Final = 1
PAIR: Final = 2


LATE: Final = 8.0  # How much slower a replica counts whose answers all miss their objective.
MANY: Final = 0.2  # A smaller share of them counts for less than in proportion: bursts happen to anybody.
ROUNDING: Final = 1e-9
ALIKE: Final = 0.1  # A pace so near to the planned one counts as that: what is learned scatters as much.


class LoadIndex(Protocol):
    """Something that keeps targets in order of their load."""

    def lower_key(self, target: Target) -> None: ...


def kind_of(template: Template) -> int:
    """Replicas that were planned to work together are one target."""
    roles = {replica.role for replica in template.replicas}
    if template.kind == "pair" and "prefill" in roles and len(roles) > 1:
        return PAIR
    if template.kind == "combo" and {"prefill", "decode"} <= roles:
        return COMBO
    return PLAIN


class Target:
    """One of them. Its lists hold replicas that serve, by their present role."""

    def __init__(self, kind: int, unit: str, replica: ReplicaState | None = None) -> None:
        self.kind = kind
        self.unit = unit
        self.view = replica
        self.route: Route | None = aggregated(replica.member.id) if replica is not None else None
        """Made once: a plain target's route is the same for every request."""
        self.prefills: list[ReplicaState] = []  # A combo's prefill replicas; a pair's low-end ones.
        self.decodes: list[ReplicaState] = []
        """A combo's decode replicas; a pair's high-end ones. Mixed ones count as these."""
        self.busy = 0.0  # Share of arrivals that lately found its prefill replicas at work.
        self.usage = PrefillUtilization()
        self.turn = 0  # Counts requests, for plain round robin inside.
        self.load = 0.0  # Open work, in the unit of the balance that counts it.
        self.others_s = 0.0  # Of that, other gateways' work, as a replica said last.
        self.pace = 1.0  # What is learned of how long that takes, against its unit (`learned_speeds.py`).
        self.indexes: list[LoadIndex] = []
        self.in_low = 0  # Requests whose first part is in a pair's low-end replicas.
        self.waiting: deque[str] = deque()  # Requests that wait for a place there, in order of arrival.

    def lighten(self, load: float) -> None:
        self.load -= load
        if -ROUNDING < self.load < ROUNDING:  # else who is idle is told apart by what rounding left
            self.load = 0.0
        for index in self.indexes:
            index.lower_key(self)

    def update_paces(self) -> None:
        """Take over the pace of its replicas; of a group's two sides that of the slower one."""
        replica = self.view
        pace = _strain(replica) if replica is not None else max(_pace(self.prefills), _pace(self.decodes))
        self.pace = 1.0 if abs(pace - 1.0) < ALIKE else pace

    def refresh(self, template_copy: TemplateCopy | None) -> None:
        ready = (
            [replica for replica in template_copy.views if replica.serves]
            if template_copy is not None
            else []
        )
        self.prefills = [replica for replica in ready if replica.role == "prefill"]
        self.decodes = [replica for replica in ready if replica.role != "prefill"]
        if self.kind == COMBO and not self.prefills:  # what is left of it may do both
            self.prefills = [replica for replica in ready if replica.role == "mixed"]

    def views(self) -> list[ReplicaState]:
        return [self.view] if self.view is not None else self.prefills + self.decodes

    @property
    def usable(self) -> bool:
        return self.kind == PLAIN or bool(self.prefills and self.decodes)


def _strain(replica: ReplicaState) -> float:
    """Its pace, and more while its answers come too slowly: less of its work is worth anything then."""
    late = replica.late_share
    return replica.pace * (1.0 + LATE * late * min(1.0, late / MANY)) if late > 0 else replica.pace


def _pace(side: list[ReplicaState]) -> float:
    speed = 0.0
    for replica in side:
        speed += 1.0 / _strain(replica)
    return len(side) / speed if side else 1.0


def intact_share(target: Target, template: Template) -> float:
    """The share of a group's planned capacity that is ready: its scarcer side's; after flips replicas count alike."""
    if not target.usable:
        return 0.0
    planned = len([replica for replica in template.replicas if replica.role == "prefill"])
    others = len(template.replicas) - planned
    ready, ready_others = len(target.prefills), len(target.decodes)
    flipped = any(
        replica_state.role != replica_state.member.role for replica_state in target.prefills + target.decodes
    )
    if flipped:
        there = {replica_state.member.id for replica_state in target.prefills + target.decodes}
        return min(1.0, len(there) / len(template.replicas))
    return min(1.0, ready / planned, ready_others / others)


def prefilled_s(target: Target, tokens: float) -> float:
    views = [target.view] if target.view is not None else target.prefills
    return min((replica.open_prefill_tokens + tokens) * seconds_per_token(replica) for replica in views)


def avoided(target: Target, avoid: frozenset[str]) -> bool:
    if target.view is not None:
        return target.view.member.lies_in(avoid)
    return any(
        all(replica.member.lies_in(avoid) for replica in side) for side in (target.prefills, target.decodes)
    )


def unavoided(views: list[ReplicaState], avoid: frozenset[str]) -> list[ReplicaState]:
    if not avoid:
        return views
    return [replica for replica in views if not replica.member.lies_in(avoid)] or views


def seconds_per_token(replica: ReplicaState) -> float:
    facts = replica.facts
    return (facts.prefill_s_per_token if facts is not None else 1.0) * replica.pace


def _prompt_s(replica: ReplicaState, tokens: int) -> float:
    fixed_s = replica.facts.prefill_fixed_s * replica.pace if replica.facts is not None else 0.0
    return fixed_s + tokens * seconds_per_token(replica)


def busier(busy: float, prefills: Sequence[ReplicaState]) -> float:
    at_work = 0
    for replica in prefills:
        at_work += replica.open_prefill_tokens > 0
    now = at_work / len(prefills)
    return busy + (now - busy) / MEMORY


class PrefillUtilization:
    """How busy a combo's prefill replicas are: by arrivals that found one at work, or by work between them."""

    __slots__ = ("_count", "_found", "_gap_s", "_last_s", "_work_s")

    def __init__(self) -> None:
        self._count = 0
        self._found = self._gap_s = self._work_s = self._last_s = 0.0

    def seen(self, at_s: float, tokens: int, prefills: Sequence[ReplicaState]) -> float:
        self._found = busier(self._found, prefills)
        if self._count:
            part = 1.0 / min(self._count, MEMORY)
            work_s = sum([_prompt_s(replica, tokens) for replica in prefills]) / len(prefills) ** 2
            self._gap_s += (max(0.0, at_s - self._last_s) - self._gap_s) * part
            self._work_s += (work_s - self._work_s) * part
        self._count += 1
        self._last_s = at_s
        if self._count <= MEMORY:  # too few gaps were seen
            return self._found
        return max(self._found, min(MOST_BUSY, self._work_s / max(self._gap_s, 1e-9)))
