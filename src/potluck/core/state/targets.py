"""Targets of requests: a single replica, a combo, or a pair.

A combo (CAUCHY) has prefill and decode replicas, a pair (CRONUS) low-end and high-end ones, chosen per request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from potluck.core.state.fleet import ReplicaState, TemplateCopy
from potluck.core.values.plan import Template
from potluck.core.values.route import Route, aggregated

UTILIZATION_ARRIVALS: Final = 64  # Arrivals over which the utilization is averaged.
MAX_UTILIZATION: Final = 0.99


PLAIN: Final = 0
COMBO: Final = 1
PAIR: Final = 2


# Factor by which a replica counts slower when all its answers miss the TPOT objective.
LATE_ANSWER_PENALTY: Final = 8.0
# Smaller shares of late answers count less than in proportion, as bursts are common.
FULL_PENALTY_LATE_SHARE: Final = 0.2
ROUNDING: Final = 1e-9
PACE_TOLERANCE: Final = 0.1  # Paces this close to 1 count as 1: the noise of learned paces is as large.


class LoadIndex(Protocol):
    """An index of targets by load."""

    def lower_key(self, target: Target) -> None: ...


def kind_of(template: Template) -> int:
    """The target kind of a template: replicas that were planned to work together are one target."""
    roles = {replica.role for replica in template.replicas}
    if template.kind == "pair" and "prefill" in roles and len(roles) > 1:
        return PAIR
    if template.kind == "combo" and {"prefill", "decode"} <= roles:
        return COMBO
    return PLAIN


class Target:
    """One target. Its lists hold the replicas that serve, by their present role."""

    def __init__(self, kind: int, unit: str, replica: ReplicaState | None = None) -> None:
        self.kind = kind
        self.unit = unit
        self.view = replica
        self.route: Route | None = aggregated(replica.member.id) if replica is not None else None
        """Made once: a plain target's route is the same for every request."""
        self.prefills: list[ReplicaState] = []  # A combo's prefill replicas; a pair's low-end ones.
        self.decodes: list[ReplicaState] = []
        """A combo's decode replicas, mixed ones included; a pair's high-end ones."""
        self.busy = 0.0  # Recent share of arrivals that found its prefill replicas busy.
        self.usage = PrefillUtilization()
        self.turn = 0  # Number of requests, for round robin inside.
        self.load = 0.0  # Open work, in the unit of the balance rule.
        self.others_s = 0.0  # Part of `load`: other gateways' work, by the replica's last report.
        self.pace = 1.0  # Learned pace of that work (`learned_speeds.py`).
        self.indexes: list[LoadIndex] = []
        self.in_low = 0  # Requests whose first part runs on a pair's low-end replicas.
        self.waiting: deque[str] = deque()  # Requests that wait for a place there, in order of arrival.

    def remove_load(self, load: float) -> None:
        self.load -= load
        if -ROUNDING < self.load < ROUNDING:  # Otherwise rounding errors would order idle targets.
            self.load = 0.0
        for index in self.indexes:
            index.lower_key(self)

    def update_paces(self) -> None:
        """Update the pace from its replicas; of a group's two sides the slower one counts."""
        replica = self.view
        pace = (
            _penalized_pace(replica)
            if replica is not None
            else max(_side_pace(self.prefills), _side_pace(self.decodes))
        )
        self.pace = 1.0 if abs(pace - 1.0) < PACE_TOLERANCE else pace

    def refresh(self, template_copy: TemplateCopy | None) -> None:
        ready = (
            [replica for replica in template_copy.views if replica.serves]
            if template_copy is not None
            else []
        )
        self.prefills = [replica for replica in ready if replica.role == "prefill"]
        self.decodes = [replica for replica in ready if replica.role != "prefill"]
        if self.kind == COMBO and not self.prefills:  # The remaining replicas may do both.
            self.prefills = [replica for replica in ready if replica.role == "mixed"]

    def views(self) -> list[ReplicaState]:
        return [self.view] if self.view is not None else self.prefills + self.decodes

    @property
    def usable(self) -> bool:
        return self.kind == PLAIN or bool(self.prefills and self.decodes)


def _penalized_pace(replica: ReplicaState) -> float:
    """The replica's pace, increased while its answers miss the TPOT objective."""
    late = replica.late_share
    return (
        replica.pace * (1.0 + LATE_ANSWER_PENALTY * late * min(1.0, late / FULL_PENALTY_LATE_SHARE))
        if late > 0
        else replica.pace
    )


def _side_pace(replicas: list[ReplicaState]) -> float:
    speed = 0.0
    for replica in replicas:
        speed += 1.0 / _penalized_pace(replica)
    return len(replicas) / speed if replicas else 1.0


def intact_share(target: Target, template: Template) -> float:
    """The share of a group's planned capacity that is ready, by its scarcer side; after flips by the number of
    replicas."""
    if not target.usable:
        return 0.0
    planned_prefills = len([replica for replica in template.replicas if replica.role == "prefill"])
    planned_decodes = len(template.replicas) - planned_prefills
    ready_prefills, ready_decodes = len(target.prefills), len(target.decodes)
    flipped = any(
        replica_state.role != replica_state.member.role for replica_state in target.prefills + target.decodes
    )
    if flipped:
        ready_ids = {replica_state.member.id for replica_state in target.prefills + target.decodes}
        return min(1.0, len(ready_ids) / len(template.replicas))
    return min(1.0, ready_prefills / planned_prefills, ready_decodes / planned_decodes)


def prefill_done_s(target: Target, tokens: float) -> float:
    views = [target.view] if target.view is not None else target.prefills
    return min((replica.open_prefill_tokens + tokens) * seconds_per_token(replica) for replica in views)


def is_avoided(target: Target, avoid: frozenset[str]) -> bool:
    if target.view is not None:
        return target.view.member.lies_in(avoid)
    return any(
        all(replica.member.lies_in(avoid) for replica in side) for side in (target.prefills, target.decodes)
    )


def without_avoided(views: list[ReplicaState], avoid: frozenset[str]) -> list[ReplicaState]:
    if not avoid:
        return views
    return [replica for replica in views if not replica.member.lies_in(avoid)] or views


def seconds_per_token(replica: ReplicaState) -> float:
    facts = replica.facts
    return (facts.prefill_s_per_token if facts is not None else 1.0) * replica.pace


def _prompt_s(replica: ReplicaState, tokens: int) -> float:
    fixed_s = replica.facts.prefill_fixed_s * replica.pace if replica.facts is not None else 0.0
    return fixed_s + tokens * seconds_per_token(replica)


def update_utilization(utilization: float, prefills: Sequence[ReplicaState]) -> float:
    busy_replicas = 0
    for replica in prefills:
        busy_replicas += replica.open_prefill_tokens > 0
    busy_share = busy_replicas / len(prefills)
    return utilization + (busy_share - utilization) / UTILIZATION_ARRIVALS


class PrefillUtilization:
    """Utilization of a combo's prefill replicas: the share of arrivals that found one busy, or the work per time
    between arrivals if higher."""

    __slots__ = ("_count", "_found_busy", "_gap_s", "_last_s", "_work_s")

    def __init__(self) -> None:
        self._count = 0
        self._found_busy = self._gap_s = self._work_s = self._last_s = 0.0

    def seen(self, at_s: float, tokens: int, prefills: Sequence[ReplicaState]) -> float:
        self._found_busy = update_utilization(self._found_busy, prefills)
        if self._count:
            weight = 1.0 / min(self._count, UTILIZATION_ARRIVALS)
            work_s = sum([_prompt_s(replica, tokens) for replica in prefills]) / len(prefills) ** 2
            self._gap_s += (max(0.0, at_s - self._last_s) - self._gap_s) * weight
            self._work_s += (work_s - self._work_s) * weight
        self._count += 1
        self._last_s = at_s
        if self._count <= UTILIZATION_ARRIVALS:  # Too few gaps were observed.
            return self._found_busy
        return max(self._found_busy, min(MAX_UTILIZATION, self._work_s / max(self._gap_s, 1e-9)))
