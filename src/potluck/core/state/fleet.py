"""The fleet's state in the Brain: its replicas, their states and open work.

`ReplicaSpec` is what a replica is, `ReplicaState` its present state; only `FleetState` changes that. Counts of open
work are the Brain's own and exact; a `ReplicaStatus` is reported by the replica, and is delayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from potluck.core.errors import InputError
from potluck.core.state.events import ReplicaStatus
from potluck.core.state.facts import ReplicaFacts
from potluck.core.values.plan import ReplicaSpec, TemplateKind
from potluck.core.values.types import Role

State = Literal["starting", "ready", "draining"]

PRIOR_WORK_S: Final = 4.0  # Weight of the plan against observations, in seconds of work.
OBSERVATION_DECAY: Final = 1.0 - 1.0 / 16  # Weight of earlier observations after one more.
OUTLIER_RATIO: Final = 1.8
OUTLIERS_TO_RESET: Final = 3
OUTLIER_WORK_TO_RESET_S: Final = 0.5
"""A replica has changed after this many more outliers than normal observations, with this much work, each this many
times off its pace."""
MIN_PACE: Final = 1.0 / 8.0
MAX_PACE: Final = 8.0  # Bounds of learned paces.


@dataclass(slots=True, eq=False)
class ReplicaState:
    """The present state of a replica; policies read it, `FleetState` alone writes it."""

    member: ReplicaSpec
    state: State = "starting"
    role: Role = "mixed"
    """Its present role; a flip makes it differ from the planned one."""
    status: ReplicaStatus | None = None
    status_at_s: float = 0.0
    open_requests: int = 0
    """Requests with a segment here that is not done."""
    open_prefill_tokens: int = 0
    """Prompt tokens sent here whose segment is not done, less what its cache was known to hold."""
    yielding_tokens: int = 0
    """Those of prompts that miss their TTFT anyway and yield to others."""
    open_context_tokens: int = 0
    """The most prompt and output tokens that requests decoding here, or about to, can hold."""
    easy: tuple[int, int, int] = (1 << 60, 1 << 60, 1 << 60)
    """(requests, prompt tokens, KV tokens) below which the replica has room without further checks."""
    gap_pace: float = 1.0
    """Observed over estimated time between output tokens under load."""
    doubted: bool = False
    """Suspected lost: a request failed there as on a lost replica, and no report came since."""
    cordoned: bool = False
    """Cordoned by an operator: it gets no new requests, keeps what it has and is not replaced."""
    strikes: int = 0
    """Consecutive suspicions without a completed answer between."""
    facts: ReplicaFacts | None = None
    pace: float = 1.0
    """Learned seconds per second of its facts (`core.routing.learned_speeds`)."""
    late_share: float = 0.0
    """Share of recent answers that missed the TPOT objective."""
    observed_s: float = 0.0
    planned_s: float = 0.0
    """Recent observed seconds, and the planned seconds of the same work; older ones decayed."""
    learned_s: float = 0.0
    """Time of the last observation."""
    outliers: int = 0
    """Recent outliers slower than its pace, less normal observations; negative: faster."""
    outlier_observed_s: float = 0.0
    outlier_planned_s: float = 0.0
    """Observed and planned seconds of those."""
    done_s: float = 0.0
    """Prompts computed there, in seconds of its facts."""
    done_prompts: int = 0
    gone: bool = False
    kv_version: int = 0
    """Replicas of different versions hand no KV over to each other."""
    max_running: int = 0
    eased: int = 0
    """Number of the last change (`FleetState.changes`) that may have given it room."""

    @property
    def serves(self) -> bool:
        return self.state == "ready" and not self.doubted and not self.cordoned

    @property
    def shown_pace(self) -> float | None:
        """Observed over planned time; None where no speed was planned."""
        return None if self.facts is not None and self.facts.assumed else self.pace

    @property
    def idle(self) -> bool:
        """Whether it has no requests of this Brain and reports none of others."""
        return self.open_requests == 0 and (
            self.status is None or self.status.running + self.status.queued == 0
        )


@dataclass(slots=True, eq=False)
class TemplateCopy:
    id: str
    template: str
    kind: TemplateKind
    model: str
    region: str
    views: list[ReplicaState] = field(default_factory=list)
    places: set[int] = field(default_factory=set)
    """Indices of the template's replicas that were started for it, lost ones included."""
    whole: bool = False
    """Whether all of its replicas exist and are ready. Written by `FleetState`."""


@dataclass(slots=True)
class FleetState:
    """All replicas, by id and by template copy. `version` grows whenever the set of serving replicas changes."""

    facts: Mapping[tuple[str, int], ReplicaFacts] = field(default_factory=dict)
    """(template, index of the replica in it) -> facts."""
    views: dict[str, ReplicaState] = field(default_factory=dict)
    units: dict[str, TemplateCopy] = field(default_factory=dict)
    version: int = 0
    changes: int = 0

    def add(self, replica_spec: ReplicaSpec) -> ReplicaState:
        if replica_spec.id in self.views:
            raise InputError(f"replica {replica_spec.id}", "is already in the fleet")
        replica = ReplicaState(
            replica_spec,
            role=replica_spec.role,
            facts=self.facts.get((replica_spec.template, replica_spec.index)),
        )
        self.views[replica_spec.id] = replica
        template_copy = self.units.get(replica_spec.unit)
        if template_copy is None:
            template_copy = TemplateCopy(
                replica_spec.unit,
                replica_spec.template,
                replica_spec.kind,
                replica_spec.model,
                replica_spec.region,
            )
            self.units[replica_spec.unit] = template_copy
        template_copy.views.append(replica)
        template_copy.places.add(replica_spec.index)
        self._copy_changed(template_copy)
        return replica

    def ready(self, replica: str, kv_version: int = 0, max_running: int = 0) -> None:
        replica_state = self.views.get(replica)
        if replica_state is not None:
            replica_state.kv_version, replica_state.max_running = kv_version, max_running
            replica_state.facts = replica_state.facts and replica_state.facts.with_slots(max_running)
        self._set_state(replica, "ready")

    def drain(self, replica: str) -> None:
        self._set_state(replica, "draining")

    def flip(self, replica: str, role: Role) -> None:
        self.views[replica].role = role
        self.version += 1

    def reassign(self, replica_spec: ReplicaSpec) -> None:
        """A replica is another template's from now on."""
        replica = self.views[replica_spec.id]
        replica.member, replica.role = replica_spec, replica_spec.role
        facts = self.facts.get((replica_spec.template, replica_spec.index))
        replica.facts = facts and facts.with_slots(replica.max_running)
        template_copy = self.units[replica_spec.unit]
        template_copy.template, template_copy.kind = replica_spec.template, replica_spec.kind
        self._copy_changed(template_copy)

    def remove(self, replica: str) -> ReplicaState | None:
        replica_state = self.views.pop(replica, None)
        if replica_state is None:
            return None
        replica_state.gone = True
        template_copy = self.units[replica_state.member.unit]
        template_copy.views.remove(replica_state)
        if not template_copy.views:
            del self.units[template_copy.id]
        self._copy_changed(template_copy)
        return replica_state

    def doubt(self, replica: ReplicaState, doubted: bool, strike: bool = True) -> None:
        """Set whether a replica is suspected lost. That does not change the fleet: no replacement is started."""
        replica.strikes += doubted and strike and not replica.doubted
        replica.doubted = doubted

    def cordon(self, replica: ReplicaState, cordoned: bool) -> None:
        replica.cordoned = cordoned

    def clear_strikes(self, replica: ReplicaState) -> None:
        replica.strikes = 0

    def observe_gap(self, replica: ReplicaState, ratio: float) -> None:
        replica.gap_pace += (min(MAX_PACE, max(MIN_PACE, ratio)) - replica.gap_pace) * (
            1.0 - OBSERVATION_DECAY
        )
        self._count_change(replica)

    def set_easy_limits(self, replica: ReplicaState, easy: tuple[int, int, int]) -> None:
        replica.easy = easy

    def report(self, replica: ReplicaState, status: ReplicaStatus, at_s: float) -> None:
        replica.status = status
        replica.status_at_s = at_s

    def open(self, replica: ReplicaState, prefill_tokens: int, context_tokens: int) -> None:
        replica.open_requests += 1
        replica.open_prefill_tokens += prefill_tokens
        replica.open_context_tokens += context_tokens

    def yielding(self, replica: ReplicaState, prefill_tokens: int) -> None:
        replica.yielding_tokens += prefill_tokens
        self._count_change(replica)

    def prefilled(self, replica: ReplicaState, prefill_tokens: int) -> None:
        """The prompt of a segment is computed; its decode goes on."""
        replica.open_prefill_tokens -= prefill_tokens
        self._count_change(replica)
        facts = replica.facts
        if facts is not None:
            replica.done_s += facts.prefill_fixed_s + prefill_tokens * facts.prefill_s_per_token
            replica.done_prompts += 1

    def handed_over(self, replica: ReplicaState, prefill_tokens: int) -> None:
        self.prefilled(replica, prefill_tokens)
        replica.open_requests -= 1

    def close(self, replica: ReplicaState, prefill_tokens: int, context_tokens: int) -> None:
        """A segment ended, with these tokens still open."""
        replica.open_requests -= 1
        replica.open_prefill_tokens -= prefill_tokens
        replica.open_context_tokens -= context_tokens
        self._count_change(replica)

    def learn(
        self, at_s: float, replica: ReplicaState, observed_s: float, planned_s: float, counts: bool = True
    ) -> None:
        """Learn from one observation; with `counts` False it only serves to detect a change."""
        if planned_s <= 0:
            return
        observed_s = min(observed_s, MAX_PACE * planned_s)
        if counts:
            replica.observed_s = replica.observed_s * OBSERVATION_DECAY + observed_s
            replica.planned_s = replica.planned_s * OBSERVATION_DECAY + planned_s
            replica.learned_s = at_s
        if self._reset_on_outliers(replica, observed_s, planned_s) or counts:
            self._update_pace(replica)

    def _reset_on_outliers(self, replica: ReplicaState, observed_s: float, planned_s: float) -> bool:
        """Reset the pace after several outliers in a row; returns whether it did."""
        ratio = observed_s / planned_s
        direction = (
            1 if ratio > OUTLIER_RATIO * replica.pace else -1 if ratio * OUTLIER_RATIO < replica.pace else 0
        )
        # It may have begun before the change, so it only counts one down.
        if direction == 0 and abs(replica.outliers) > 1:
            replica.outliers -= 1 if replica.outliers > 0 else -1
        elif direction == 0 or direction * replica.outliers <= 0:
            replica.outliers, replica.outlier_observed_s, replica.outlier_planned_s = 0, 0.0, 0.0
        if direction:
            replica.outliers += direction
            replica.outlier_observed_s += observed_s
            replica.outlier_planned_s += planned_s
            if (
                abs(replica.outliers) >= OUTLIERS_TO_RESET
                and replica.outlier_planned_s >= OUTLIER_WORK_TO_RESET_S
            ):
                replica.observed_s, replica.planned_s = replica.outlier_observed_s, replica.outlier_planned_s
                return True
        return False

    def observe_answer(self, replica: ReplicaState, late: bool) -> None:
        replica.late_share += ((1.0 if late else 0.0) - replica.late_share) * (1.0 - OBSERVATION_DECAY)

    def decay(self, at_s: float, replica: ReplicaState) -> bool:
        """Halve the weight of what was learned; returns whether the replica counts as faster now."""
        old_pace = replica.pace
        replica.late_share /= 2
        replica.observed_s, replica.planned_s, replica.learned_s = (
            replica.observed_s / 2,
            replica.planned_s / 2,
            at_s,
        )
        if replica.planned_s < 0.01 * PRIOR_WORK_S:
            replica.observed_s = replica.planned_s = 0.0
        self._update_pace(replica)
        return replica.pace < old_pace or replica.late_share > 0

    def _update_pace(self, replica: ReplicaState) -> None:
        pace = (PRIOR_WORK_S + replica.observed_s) / (PRIOR_WORK_S + replica.planned_s)
        replica.pace = min(MAX_PACE, max(MIN_PACE, pace))
        self._count_change(replica)

    def _count_change(self, replica: ReplicaState) -> None:
        self.changes += 1
        replica.eased = self.changes

    def _set_state(self, replica: str, state: State) -> None:
        replica_state = self.views.get(replica)
        if replica_state is not None:
            replica_state.state = state
            self._copy_changed(self.units[replica_state.member.unit])

    def _copy_changed(self, template_copy: TemplateCopy) -> None:
        template_copy.whole = len(template_copy.views) == len(template_copy.places) and all(
            replica.state == "ready" for replica in template_copy.views
        )
        self.version += 1
