"""The fleet as the Brain knows it: which replicas there are, in which state, with how much work.

`ReplicaSpec` is what a replica is, `ReplicaState` what is known of it now; only `FleetState` changes that. Counts of
open work are the Brain's own and exact; a `ReplicaStatus` is the replica's word, which is late."""

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

PRIOR_S: Final = 4.0  # Seconds of work by which the plan is believed against what is observed.
KEEP: Final = 1.0 - 1.0 / 16  # How much of what was observed before still counts after one more observation.
ODD: Final = 1.8
ODDS: Final = 3
ODD_S: Final = 0.5
"""So many times more often than not so far off its pace, with so much work, a replica has changed."""
LEAST: Final = 1.0 / 8.0
MOST: Final = 8.0  # Paces that are believed.


@dataclass(slots=True, eq=False)
class ReplicaState:
    """What is known of a replica. Read by policies, written by `FleetState` alone."""

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
    """Those of them that nobody waits for: their prompts are late anyway, and let others go before them."""
    open_context_tokens: int = 0
    """Prompt and output tokens that requests decoding (or to decode) here hold at most."""
    easy: tuple[int, int, int] = (1 << 60, 1 << 60, 1 << 60)
    """Requests, prompt tokens and KV tokens below which it has room without further questions."""
    gap_pace: float = 1.0
    """How long tokens of answers take there for each second reckoned, as seen when it had much to do."""
    doubted: bool = False
    """A request failed there as if it were gone, and nothing was heard of it since."""
    cordoned: bool = False
    """Nothing new is sent there, since a person said so; it keeps what it has and is not replaced."""
    strikes: int = 0
    """How often in a row it was doubted, with no answer completed between."""
    facts: ReplicaFacts | None = None
    pace: float = 1.0
    """Seconds that things take there for each second of its facts, as learned (`core.routing.learned_speeds`)."""
    late_share: float = 0.0
    """Of its answers lately, how many came slower than their model's objective allows per token."""
    observed_s: float = 0.0
    planned_s: float = 0.0
    """What was observed lately, and how long it should have taken."""
    learned_s: float = 0.0
    """When that was last heard of."""
    odds: int = 0
    """Observations lately that were much slower than its pace, less those that were not; faster, if negative."""
    odd_observed_s: float = 0.0
    odd_planned_s: float = 0.0
    """What those come to."""
    done_s: float = 0.0
    """Prompts computed there, in seconds of its facts."""
    done_prompts: int = 0
    gone: bool = False
    kv_version: int = 0
    """Replicas of unlike versions hand nothing over to each other."""
    max_running: int = 0
    eased: int = 0
    """Which of all changes in the fleet (`FleetState.changes`) may have given it room last."""

    @property
    def serves(self) -> bool:
        return self.state == "ready" and not self.doubted and not self.cordoned

    @property
    def shown_pace(self) -> float | None:
        """Observed over planned time; None where no speed was planned."""
        return None if self.facts is not None and self.facts.assumed else self.pace

    @property
    def idle(self) -> bool:
        """Nothing of ours is there, and it did not report others' work."""
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
    """Which of the template's replicas were started for it, those since lost included."""
    whole: bool = False
    """All of its replicas are there and ready. Written by `FleetState`."""


@dataclass(slots=True)
class FleetState:
    """All replicas, indexed the ways that routing asks for. `version` grows whenever who may serve changes."""

    facts: Mapping[tuple[str, int], ReplicaFacts] = field(default_factory=dict)
    """(template, index of the replica in it) to what is known of it."""
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
        self._changed(template_copy)
        return replica

    def ready(self, replica: str, kv_version: int = 0, max_running: int = 0) -> None:
        replica_state = self.views.get(replica)
        if replica_state is not None:
            replica_state.kv_version, replica_state.max_running = kv_version, max_running
            replica_state.facts = replica_state.facts and replica_state.facts.with_slots(max_running)
        self._state(replica, "ready")

    def drain(self, replica: str) -> None:
        self._state(replica, "draining")

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
        self._changed(template_copy)

    def remove(self, replica: str) -> ReplicaState | None:
        replica_state = self.views.pop(replica, None)
        if replica_state is None:
            return None
        replica_state.gone = True
        template_copy = self.units[replica_state.member.unit]
        template_copy.views.remove(replica_state)
        if not template_copy.views:
            del self.units[template_copy.id]
        self._changed(template_copy)
        return replica_state

    def doubt(self, replica: ReplicaState, doubted: bool, strike: bool = True) -> None:
        """Whether it may be gone. That is no change of the fleet: nothing is to be started for it."""
        replica.strikes += doubted and strike and not replica.doubted
        replica.doubted = doubted

    def cordon(self, replica: ReplicaState, cordoned: bool) -> None:
        replica.cordoned = cordoned

    def answered_again(self, replica: ReplicaState) -> None:
        replica.strikes = 0

    def gap(self, replica: ReplicaState, ratio: float) -> None:
        replica.gap_pace += (min(MOST, max(LEAST, ratio)) - replica.gap_pace) * (1.0 - KEEP)
        self._eased(replica)

    def bound(self, replica: ReplicaState, easy: tuple[int, int, int]) -> None:
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
        self._eased(replica)

    def prefilled(self, replica: ReplicaState, prefill_tokens: int) -> None:
        """Of a segment that goes on decoding, the prompt is computed."""
        replica.open_prefill_tokens -= prefill_tokens
        self._eased(replica)
        facts = replica.facts
        if facts is not None:
            replica.done_s += facts.prefill_fixed_s + prefill_tokens * facts.prefill_s_per_token
            replica.done_prompts += 1

    def handed(self, replica: ReplicaState, prefill_tokens: int) -> None:
        self.prefilled(replica, prefill_tokens)
        replica.open_requests -= 1

    def close(self, replica: ReplicaState, prefill_tokens: int, context_tokens: int) -> None:
        """A segment is done, or given up with so much of it still open."""
        replica.open_requests -= 1
        replica.open_prefill_tokens -= prefill_tokens
        replica.open_context_tokens -= context_tokens
        self._eased(replica)

    def learn(
        self, at_s: float, replica: ReplicaState, observed_s: float, planned_s: float, counts: bool = True
    ) -> None:
        """Something took so long that should have taken so long; what does not count only tells of a change."""
        if planned_s <= 0:
            return
        observed_s = min(observed_s, MOST * planned_s)
        if counts:
            replica.observed_s = replica.observed_s * KEEP + observed_s
            replica.planned_s = replica.planned_s * KEEP + planned_s
            replica.learned_s = at_s
        if self._odd(replica, observed_s, planned_s) or counts:
            self._pace(replica)

    def _odd(self, replica: ReplicaState, observed_s: float, planned_s: float) -> bool:
        """A replica that has changed is believed soon: some observations in a row tell."""
        ratio = observed_s / planned_s
        way = 1 if ratio > ODD * replica.pace else -1 if ratio * ODD < replica.pace else 0
        if way == 0 and abs(replica.odds) > 1:  # perhaps begun before it changed: it counts against, no more
            replica.odds -= 1 if replica.odds > 0 else -1
        elif way == 0 or way * replica.odds <= 0:
            replica.odds, replica.odd_observed_s, replica.odd_planned_s = 0, 0.0, 0.0
        if way:
            replica.odds += way
            replica.odd_observed_s += observed_s
            replica.odd_planned_s += planned_s
            if abs(replica.odds) >= ODDS and replica.odd_planned_s >= ODD_S:
                replica.observed_s, replica.planned_s = replica.odd_observed_s, replica.odd_planned_s
                return True
        return False

    def answered(self, replica: ReplicaState, late: bool) -> None:
        replica.late_share += ((1.0 if late else 0.0) - replica.late_share) * (1.0 - KEEP)

    def fade(self, at_s: float, replica: ReplicaState) -> bool:
        """Believe half of what was learned; whether it counts as faster now."""
        before = replica.pace
        replica.late_share /= 2
        replica.observed_s, replica.planned_s, replica.learned_s = (
            replica.observed_s / 2,
            replica.planned_s / 2,
            at_s,
        )
        if replica.planned_s < 0.01 * PRIOR_S:
            replica.observed_s = replica.planned_s = 0.0
        self._pace(replica)
        return replica.pace < before or replica.late_share > 0

    def _pace(self, replica: ReplicaState) -> None:
        pace = (PRIOR_S + replica.observed_s) / (PRIOR_S + replica.planned_s)
        replica.pace = min(MOST, max(LEAST, pace))
        self._eased(replica)

    def _eased(self, replica: ReplicaState) -> None:
        self.changes += 1
        replica.eased = self.changes

    def _state(self, replica: str, state: State) -> None:
        replica_state = self.views.get(replica)
        if replica_state is not None:
            replica_state.state = state
            self._changed(self.units[replica_state.member.unit])

    def _changed(self, template_copy: TemplateCopy) -> None:
        template_copy.whole = len(template_copy.views) == len(template_copy.places) and all(
            replica.state == "ready" for replica in template_copy.views
        )
        self.version += 1
