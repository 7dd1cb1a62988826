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
        return self.state == "ready" and not self.doubted and not self.cordoned and not self.member.standby

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

    @property
    def standby(self) -> bool:
        """It is kept ready for when more is needed, and serves nothing."""
        return any(view.member.standby for view in self.views)


@dataclass(slots=True)
class FleetState:
    """All replicas, indexed the ways that routing asks for. `version` grows whenever who may serve changes."""

    facts: Mapping[tuple[str, int], ReplicaFacts] = field(default_factory=dict)
    """(template, index of the replica in it) to what is known of it."""
    views: dict[str, ReplicaState] = field(default_factory=dict)
    units: dict[str, TemplateCopy] = field(default_factory=dict)
    version: int = 0
    changes: int = 0

    def add(self, member: ReplicaSpec) -> ReplicaState:
        if member.id in self.views:
            raise InputError(f"replica {member.id}", "is already in the fleet")
        view = ReplicaState(member, role=member.role, facts=self.facts.get((member.template, member.index)))
        self.views[member.id] = view
        unit = self.units.get(member.unit)
        if unit is None:
            unit = TemplateCopy(member.unit, member.template, member.kind, member.model, member.region)
            self.units[member.unit] = unit
        unit.views.append(view)
        unit.places.add(member.index)
        self._changed(unit)
        return view

    def ready(self, replica: str, kv_version: int = 0, max_running: int = 0) -> None:
        view = self.views.get(replica)
        if view is not None:
            view.kv_version, view.max_running = kv_version, max_running
            view.facts = view.facts and view.facts.with_slots(max_running)
        self._state(replica, "ready")

    def drain(self, replica: str) -> None:
        self._state(replica, "draining")

    def flip(self, replica: str, role: Role) -> None:
        self.views[replica].role = role
        self.version += 1

    def reassign(self, member: ReplicaSpec) -> None:
        """A replica is another template's from now on, or on standby, or no longer."""
        view = self.views[member.id]
        view.member, view.role = member, member.role
        facts = self.facts.get((member.template, member.index))
        view.facts = facts and facts.with_slots(view.max_running)
        unit = self.units[member.unit]
        unit.template, unit.kind = member.template, member.kind
        self._changed(unit)

    def remove(self, replica: str) -> ReplicaState | None:
        view = self.views.pop(replica, None)
        if view is None:
            return None
        view.gone = True
        unit = self.units[view.member.unit]
        unit.views.remove(view)
        if not unit.views:
            del self.units[unit.id]
        self._changed(unit)
        return view

    def doubt(self, view: ReplicaState, doubted: bool, strike: bool = True) -> None:
        """Whether it may be gone. That is no change of the fleet: nothing is to be started for it."""
        view.strikes += doubted and strike and not view.doubted
        view.doubted = doubted

    def cordon(self, view: ReplicaState, cordoned: bool) -> None:
        view.cordoned = cordoned

    def answered_again(self, view: ReplicaState) -> None:
        view.strikes = 0

    def gap(self, view: ReplicaState, ratio: float) -> None:
        view.gap_pace += (min(MOST, max(LEAST, ratio)) - view.gap_pace) * (1.0 - KEEP)
        self._eased(view)

    def bound(self, view: ReplicaState, easy: tuple[int, int, int]) -> None:
        view.easy = easy

    def report(self, view: ReplicaState, status: ReplicaStatus, at_s: float) -> None:
        view.status = status
        view.status_at_s = at_s

    def open(self, view: ReplicaState, prefill_tokens: int, context_tokens: int) -> None:
        view.open_requests += 1
        view.open_prefill_tokens += prefill_tokens
        view.open_context_tokens += context_tokens

    def yielding(self, view: ReplicaState, prefill_tokens: int) -> None:
        view.yielding_tokens += prefill_tokens
        self._eased(view)

    def prefilled(self, view: ReplicaState, prefill_tokens: int) -> None:
        """Of a segment that goes on decoding, the prompt is computed."""
        view.open_prefill_tokens -= prefill_tokens
        self._eased(view)
        facts = view.facts
        if facts is not None:
            view.done_s += facts.prefill_fixed_s + prefill_tokens * facts.prefill_s_per_token
            view.done_prompts += 1

    def handed(self, view: ReplicaState, prefill_tokens: int) -> None:
        self.prefilled(view, prefill_tokens)
        view.open_requests -= 1

    def close(self, view: ReplicaState, prefill_tokens: int, context_tokens: int) -> None:
        """A segment is done, or given up with so much of it still open."""
        view.open_requests -= 1
        view.open_prefill_tokens -= prefill_tokens
        view.open_context_tokens -= context_tokens
        self._eased(view)

    def learn(
        self, at_s: float, view: ReplicaState, observed_s: float, planned_s: float, counts: bool = True
    ) -> None:
        """Something took so long that should have taken so long; what does not count only tells of a change."""
        if planned_s <= 0:
            return
        observed_s = min(observed_s, MOST * planned_s)
        if counts:
            view.observed_s = view.observed_s * KEEP + observed_s
            view.planned_s = view.planned_s * KEEP + planned_s
            view.learned_s = at_s
        if self._odd(view, observed_s, planned_s) or counts:
            self._pace(view)

    def _odd(self, view: ReplicaState, observed_s: float, planned_s: float) -> bool:
        """A replica that has changed is believed soon: some observations in a row tell."""
        ratio = observed_s / planned_s
        way = 1 if ratio > ODD * view.pace else -1 if ratio * ODD < view.pace else 0
        if way == 0 and abs(view.odds) > 1:  # perhaps begun before it changed: it counts against, no more
            view.odds -= 1 if view.odds > 0 else -1
        elif way == 0 or way * view.odds <= 0:
            view.odds, view.odd_observed_s, view.odd_planned_s = 0, 0.0, 0.0
        if way:
            view.odds += way
            view.odd_observed_s += observed_s
            view.odd_planned_s += planned_s
            if abs(view.odds) >= ODDS and view.odd_planned_s >= ODD_S:
                view.observed_s, view.planned_s = view.odd_observed_s, view.odd_planned_s
                return True
        return False

    def answered(self, view: ReplicaState, late: bool) -> None:
        view.late_share += ((1.0 if late else 0.0) - view.late_share) * (1.0 - KEEP)

    def fade(self, at_s: float, view: ReplicaState) -> bool:
        """Believe half of what was learned; whether it counts as faster now."""
        before = view.pace
        view.late_share /= 2
        view.observed_s, view.planned_s, view.learned_s = view.observed_s / 2, view.planned_s / 2, at_s
        if view.planned_s < 0.01 * PRIOR_S:
            view.observed_s = view.planned_s = 0.0
        self._pace(view)
        return view.pace < before or view.late_share > 0

    def _pace(self, view: ReplicaState) -> None:
        pace = (PRIOR_S + view.observed_s) / (PRIOR_S + view.planned_s)
        view.pace = min(MOST, max(LEAST, pace))
        self._eased(view)

    def _eased(self, view: ReplicaState) -> None:
        self.changes += 1
        view.eased = self.changes

    def _state(self, replica: str, state: State) -> None:
        view = self.views.get(replica)
        if view is not None:
            view.state = state
            self._changed(self.units[view.member.unit])

    def _changed(self, unit: TemplateCopy) -> None:
        unit.whole = len(unit.views) == len(unit.places) and all(view.state == "ready" for view in unit.views)
        self.version += 1
