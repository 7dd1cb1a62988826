"""What reconciling remembers from one call to the next, and answers (`core.scale.reconcile`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from potluck.core.scaling.copy_capacity import Key, TemplateCapacity
from potluck.core.state.actions import Action, DrainReplica, StartReplica, StopReplica
from potluck.core.state.fleet import FleetState, TemplateCopy
from potluck.core.values.replica_spec import ReplicaSpec

RETRY_S = 10.0
RETRY_MOST_S = 300.0


class FailedStarts(NamedTuple):
    """Starts of one template in one region that came to nothing, one after another."""

    failures: int
    again_s: float


@dataclass(frozen=True, slots=True)
class ReconcileState:
    """What must be remembered between two calls."""

    next_number: int = 0
    """Copies and replicas are numbered from here; no number is used twice."""
    starting: Mapping[str, Key] = field(default_factory=dict)
    """Replicas whose start was asked for and not yet seen through."""
    draining_s: Mapping[str, float] = field(default_factory=dict)
    """When each was asked to drain."""
    done: frozenset[str] = frozenset()
    """Draining replicas that said they are done."""
    attempts: Mapping[Key, FailedStarts] = field(default_factory=dict)
    goal: tuple[tuple[Key, int], ...] = ()
    floors_per_s: Mapping[str, float] = field(default_factory=dict)
    """Model to the smaller of what was served and what is wanted, when the goal was set."""

    def drained(self, replica: str) -> ReconcileState:
        return replace(self, done=self.done | {replica})


class ReconcileStep(NamedTuple):
    """What to do now, what to remember, and what cannot be done."""

    actions: tuple[Action, ...]
    progress: ReconcileState
    due_s: float
    """When to look again even if nothing happens; infinite when there is no need."""
    notes: tuple[str, ...]

    @property
    def settled(self) -> bool:
        """Nothing is missing, starting or leaving."""
        return not self.notes and self.due_s == inf and not self.progress.starting


class ReconcileDraft:
    """One call's: what it starts, drains and stops."""

    def __init__(
        self,
        fleet: FleetState,
        known: Mapping[str, TemplateCapacity],
        progress: ReconcileState,
        at_s: float,
        grace_s: float,
    ) -> None:
        self.fleet, self.known, self.at_s, self.grace_s = fleet, known, at_s, grace_s
        self.actions: list[Action] = []
        self.notes: list[str] = []
        self.next_number = progress.next_number
        self.starting = dict(progress.starting)
        self.draining_s = {k: v for k, v in progress.draining_s.items() if k in fleet.views}
        self.done = frozenset(replica for replica in progress.done if replica in fleet.views)
        self.attempts = dict(progress.attempts)
        self.due_s = inf
        self.stopped: set[str] = set()

    def remember_starts(self) -> None:
        """Which of the starts came to something."""
        failed: set[Key] = set()
        fine: set[Key] = set()
        for replica, key in list(self.starting.items()):
            view = self.fleet.views.get(replica)
            if view is None or view.state != "starting":
                del self.starting[replica]
                (failed if view is None else fine).add(key)
        for key in fine - failed:
            self.attempts.pop(key, None)
        for key in failed:
            failures = self.attempts[key].failures + 1 if key in self.attempts else 1
            wait_s = min(RETRY_S * 2 ** min(failures - 1, 30), RETRY_MOST_S)
            self.attempts[key] = FailedStarts(failures, self.at_s + wait_s)

    def leave(self, unit: TemplateCopy) -> None:
        """All of a copy's replicas go: what serves is drained, what does not is stopped."""
        for view in unit.views:
            replica = view.member.id
            if view.state == "starting":
                self.stop(replica)
            elif replica not in self.draining_s:
                if view.state == "ready":
                    self.actions.append(DrainReplica(replica))
                self.draining_s[replica] = self.at_s
                self.due_s = min(self.due_s, self.at_s + self.grace_s)

    def stop(self, replica: str) -> None:
        self.actions.append(StopReplica(replica))
        self.stopped.add(replica)
        self.starting.pop(replica, None)
        self.draining_s.pop(replica, None)
        self.done -= {replica}

    def start(self, key: Key, standby: bool = False) -> None:
        template = self.known[key[0]].template
        unit = f"{key[0]}@{key[1]}#{self.number()}"
        for index in range(len(template.replicas)):
            self.start_replica(key, unit, index, str(index), standby)

    def start_replica(self, key: Key, unit: str, index: int, place: str, standby: bool) -> None:
        template = self.known[key[0]].template
        role, kind = template.replicas[index].role, template.kind
        replica = f"{unit}/{place}"
        member = ReplicaSpec(replica, unit, template.name, index, kind, template.model, role, key[1])
        self.actions.append(StartReplica(replace(member, standby=True) if standby else member))
        self.starting[replica] = key

    def number(self) -> int:
        self.next_number += 1
        return self.next_number - 1
