"""From the fleet there is to the copies that are wanted, without serving less on the way.

Each call of `reconcile` says what to do next; the caller carries it out and calls again when a count changes, at
`ReplicaDrained`, and at ticks when the fleet changed or `step.due_s` has come. The rules, per model:

1. Start what is missing while there are nodes. After a start that failed, the next waits 10 s, 20 s, ... up to 5 min.
2. Of what is too much, copies that do not serve yet are stopped; then the least loaded are drained (CORAL 5.1), while
   the rest serves at least the smaller of what is ready now and what is wanted (the two phases of CAUCHY 3.5.2).
3. A draining replica is stopped when it says it is done, or `grace_s` after it was asked.
4. If copies that must go hold a missing one's nodes, they may go within `dip`: the share of the lesser of old and new
   that may be missing meanwhile. A note says which dip it would take.

Where only roles differ, copies change in place (`reassignments`), but for combos, pairs and roles given by hand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from potluck.core.scaling import copy_capacity
from potluck.core.scaling.copy_capacity import (
    ZERO_RATES,
    CopyKey,
    CopyMeasure,
    CopyRates,
    Counts,
    NodeBudget,
    TemplateCapacities,
)
from potluck.core.scaling.roles import FLIPPABLE
from potluck.core.state.actions import Action, DrainReplica, FlipReplica, Reassign, StartReplica, StopReplica
from potluck.core.state.fleet import FleetState, ReplicaState, TemplateCopy
from potluck.core.values.plan import Plan, PlannedReplica, ReplicaSpec, Template

ROUNDING = 1e-9


def wanted_counts(plan: Plan, before: Mapping[CopyKey, int] | None = None) -> dict[CopyKey, int]:
    """The plan's copies; none of what was wanted before and is not in it."""
    wanted = dict.fromkeys(before or {}, 0)
    for deployment in plan.deployments:
        key = (deployment.template, deployment.region)
        wanted[key] = wanted.get(key, 0) + deployment.count
    return wanted


def restored(fleet: FleetState) -> tuple[FlipReplica, ...]:
    """Flips that give replicas their planned roles back: a new plan counts on them."""
    return tuple(
        FlipReplica(replica.member.id, replica.member.role)
        for replica in fleet.views.values()
        if replica.role != replica.member.role and replica.state != "draining"
    )


class ReconcileInputs(NamedTuple):
    known: TemplateCapacities
    available: Mapping[tuple[str, str], int] | None  # All nodes that can be had, those in use included.
    grace_s: float
    dip: float


def reconcile(
    fleet: FleetState, wanted: Counts, state: ReconcileState, at_s: float, inputs: ReconcileInputs
) -> ReconcileStep:
    work = _ReconcileWork(fleet, wanted, state, at_s, inputs)
    work.remember_starts()
    work.set_goal()
    work.stop_drained()
    work.drain_surplus()
    free_nodes = copy_capacity.free_node_budget(fleet, wanted, inputs.known, inputs.available, work.stopped)
    work.start_missing(free_nodes, inputs.dip)
    return work.step()


RETRY_S = 10.0


RETRY_MOST_S = 300.0


class FailedStarts(NamedTuple):
    """Starts of one template in one region that came to nothing, one after another."""

    failures: int
    again_s: float


@dataclass(frozen=True, slots=True)
class ReconcileState:
    next_number: int = 0  # Copies and replicas are numbered from here; no number is used twice.
    starting: Mapping[str, CopyKey] = field(default_factory=dict)
    """Replicas whose start was asked for and not yet seen through."""
    draining_s: Mapping[str, float] = field(default_factory=dict)
    done: frozenset[str] = frozenset()
    attempts: Mapping[CopyKey, FailedStarts] = field(default_factory=dict)
    goal: tuple[tuple[CopyKey, int], ...] = ()
    floors_per_s: Mapping[str, float] = field(default_factory=dict)
    """Model to the smaller of what was served and what is wanted, when the goal was set."""

    def drained(self, replica: str) -> ReconcileState:
        return replace(self, done=self.done | {replica})


class ReconcileStep(NamedTuple):
    """What to do now, what to remember, and what cannot be done."""

    actions: tuple[Action, ...]
    progress: ReconcileState
    due_s: float  # When to look again even if nothing happens; infinite when there is no need.
    notes: tuple[str, ...]

    @property
    def settled(self) -> bool:
        return not self.notes and self.due_s == inf and not self.progress.starting


class _ReconcileWork:
    """One call's: what is there, what is too much, what is missing; and what it starts, drains and stops."""

    def __init__(
        self,
        fleet: FleetState,
        wanted: Counts,
        state: ReconcileState,
        at_s: float,
        inputs: ReconcileInputs,
    ) -> None:
        self.fleet, self.known, self.at_s, self.grace_s = fleet, inputs.known, at_s, inputs.grace_s
        self.wanted = wanted
        self.actions: list[Action] = []
        self.notes: list[str] = []
        self.next_number = state.next_number
        self.starting = dict(state.starting)
        self.draining_s = {k: v for k, v in state.draining_s.items() if k in fleet.views}
        self.done = frozenset(replica for replica in state.done if replica in fleet.views)
        self.attempts = dict(state.attempts)
        self.due_s = inf
        self.stopped: set[str] = set()
        self.goal, self.floors_per_s = state.goal, dict(state.floors_per_s)
        self.live: dict[CopyKey, list[TemplateCopy]] = {}
        """Copies that stay or may stay, of the keys that are ours."""
        self.measure = CopyMeasure(fleet, wanted, inputs.known)
        self.serving: dict[str, CopyRates] = {}
        self.whole: set[str] = set()
        for template_copy in fleet.units.values():
            key = (template_copy.template, template_copy.region)
            if template_copy.whole:
                self.whole.add(template_copy.id)
                self._serve(template_copy, 1)
            if key not in wanted:
                continue
            if any(replica_state.state == "draining" for replica_state in template_copy.views):
                self.leave(template_copy)
            else:
                self.live.setdefault(key, []).append(template_copy)

    def remember_starts(self) -> None:
        failed: set[CopyKey] = set()
        fine: set[CopyKey] = set()
        for replica, key in list(self.starting.items()):
            replica_state = self.fleet.views.get(replica)
            if replica_state is None or replica_state.state != "starting":
                del self.starting[replica]
                (failed if replica_state is None else fine).add(key)
        for key in fine - failed:
            self.attempts.pop(key, None)
        for key in failed:
            failures = self.attempts[key].failures + 1 if key in self.attempts else 1
            wait_s = min(RETRY_S * 2 ** min(failures - 1, 30), RETRY_MOST_S)
            self.attempts[key] = FailedStarts(failures, self.at_s + wait_s)

    def leave(self, template_copy: TemplateCopy) -> None:
        """All of a copy's replicas go: what serves is drained, what does not is stopped."""
        for replica_state in template_copy.views:
            replica = replica_state.member.id
            if replica_state.state == "starting":
                self.stop(replica)
            elif replica not in self.draining_s:
                if replica_state.state == "ready":
                    self.actions.append(DrainReplica(replica))
                self.draining_s[replica] = self.at_s
                self.due_s = min(self.due_s, self.at_s + self.grace_s)

    def stop(self, replica: str) -> None:
        self.actions.append(StopReplica(replica))
        self.stopped.add(replica)
        self.starting.pop(replica, None)
        self.draining_s.pop(replica, None)
        self.done -= {replica}

    def start(self, key: CopyKey) -> None:
        template = self.known[key[0]].template
        unit = f"{key[0]}@{key[1]}#{self.number()}"
        for index in range(len(template.replicas)):
            self.start_replica(key, unit, index, str(index))

    def start_replica(self, key: CopyKey, unit: str, index: int, place: str) -> None:
        template = self.known[key[0]].template
        role, kind = template.replicas[index].role, template.kind
        replica = f"{unit}/{place}"
        replica_spec = ReplicaSpec(replica, unit, template.name, index, kind, template.model, role, key[1])
        self.actions.append(StartReplica(replica_spec))
        self.starting[replica] = key

    def number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def set_goal(self) -> None:
        goal = tuple(sorted(self.wanted.items()))
        if goal == self.goal:
            return
        self.goal = goal
        self.floors_per_s = {
            model: min(self.serving.get(model, ZERO_RATES).served_per_s, target.served_per_s)
            for model, target in self.measure.targets.items()
        }

    def stop_drained(self) -> None:
        for replica in sorted(self.draining_s):
            over_s = self.draining_s[replica] + self.grace_s
            if replica in self.done or self.at_s >= over_s:
                self.stop(replica)
            else:
                self.due_s = min(self.due_s, over_s)

    def _waits(self, key: CopyKey) -> bool:
        """Whether it is too soon to start another after starts that failed."""
        again_s = self.attempts[key].again_s if key in self.attempts else -inf
        if self.at_s < again_s:
            self.due_s = min(self.due_s, again_s)
        return self.at_s < again_s

    def _idlest(self, units: Iterable[TemplateCopy]) -> list[TemplateCopy]:
        """First those that are not ready, then the least loaded, the youngest."""
        return sorted(
            units, key=lambda template_copy: (template_copy.id in self.whole, *_load(template_copy))
        )

    def drain_surplus(self) -> None:
        for template_copy in self.candidates():
            if (
                len(self.live[template_copy.template, template_copy.region])
                <= self.wanted[template_copy.template, template_copy.region]
            ):
                continue
            if template_copy.id not in self.whole:
                self._retire(template_copy)
                continue
            serving = self.serving[template_copy.model]
            needed = min(serving.served_per_s, self.measure.target_per_s(template_copy.model))
            left = serving.plus(self.measure.copy_rates(template_copy).times(-1)).served_per_s
            if left >= needed * (1 - ROUNDING):
                self._retire(template_copy)

    def candidates(self) -> list[TemplateCopy]:
        """Copies of what there is too much of: first those that do not serve, then the least loaded, the youngest."""
        surplus = [units for key, units in self.live.items() if len(units) > self.wanted[key]]
        return self._idlest(template_copy for units in surplus for template_copy in units)

    def start_missing(self, free_nodes: NodeBudget, dip: float) -> None:
        missing = self._missing()
        for key, count in sorted(missing.items()):
            if count and (key[0] not in self.known):
                self.notes.append(f"{key[0]}@{key[1]}: {count} wanted, but the template is not known")
        keys = sorted(key for key, count in missing.items() if count and key[0] in self.known)
        startable = [key for key in keys if not self._waits(key)]
        ready = list(startable)
        while ready:  # one copy each in turn, so that scarce nodes do not all go to the first name
            for key in list(ready):
                if missing[key] and free_nodes.take_nodes(key):
                    self.start(key)
                    missing[key] -= 1
                else:
                    ready.remove(key)
        short = {key: missing[key] for key in startable if missing[key]}
        if short:
            self._exchange(short, free_nodes, dip)

    def step(self) -> ReconcileStep:
        seen = (self.next_number, self.starting, self.draining_s, self.done, self.attempts)
        state = ReconcileState(*seen, self.goal, self.floors_per_s)
        return ReconcileStep(tuple(self.actions), state, self.due_s, tuple(self.notes))

    def _missing(self) -> dict[CopyKey, int]:
        """Copies to start, after giving back what copies lost of their replicas."""
        missing = {}
        for key, count in self.wanted.items():
            missing[key] = max(0, count - len(self.live.get(key, ())))
            self._restore(key, self.live.get(key, ()))
        return missing

    def _restore(self, key: CopyKey, units: Iterable[TemplateCopy]) -> None:
        blueprint = self.known.get(key[0])
        for template_copy in units if blueprint else ():
            assert blueprint is not None
            here = {replica.member.index for replica in template_copy.views}
            lost = [i for i in range(len(blueprint.template.replicas)) if i not in here]
            for index in lost if lost and not self._waits(key) else ():
                self.start_replica(key, template_copy.id, index, f"{index}+{self.number()}")

    def _exchange(self, short: Mapping[CopyKey, int], free_nodes: NodeBudget, dip: float) -> None:
        """There are no nodes for copies that are wanted: let copies go that hold them, within the dip."""
        for template_copy in self._leaving():
            free_nodes.return_nodes(template_copy)
        for key, count in short.items():
            name = f"{key[0]}@{key[1]}"
            for left in range(count, 0, -1):
                if free_nodes.take_nodes(key):
                    continue  # enough is on its way out: wait for it
                units, lost = self._in_the_way(key, free_nodes)
                if not units or lost > dip + ROUNDING:
                    how = f"; a dip of {lost:.0%} would let copies be exchanged" if units else ""
                    self.notes.append(f"{name}: {left} wanted, but there are no nodes{how}")
                    break
                for template_copy in units:
                    self._retire(template_copy)
                    free_nodes.return_nodes(template_copy)
                    self.notes.append(f"{name}: no spare nodes, so {template_copy.id} goes first")
                free_nodes.take_nodes(key)

    def _in_the_way(self, key: CopyKey, free_nodes: NodeBudget) -> tuple[list[TemplateCopy], float]:
        """Copies that must go for one of these to start, and the share of the floor that is missing meanwhile."""
        trial, serving, units, lost = free_nodes.copy(), dict(self.serving), [], 0.0
        extra = {key: len(units) - self.wanted[key] for key, units in self.live.items()}
        for template_copy in self.candidates():
            own = (template_copy.template, template_copy.region)
            if not extra[own] or not trial.would_help(key, template_copy):
                continue
            extra[own] -= 1
            serving[template_copy.model] = serving[template_copy.model].plus(
                self.measure.copy_rates(template_copy).times(-1)
            )
            floor = self.floors_per_s.get(template_copy.model, 0.0)
            if floor > 0:
                lost = max(lost, 1 - serving[template_copy.model].served_per_s / floor)
            trial.return_nodes(template_copy)
            units.append(template_copy)
            if trial.take_nodes(key):
                return units, lost
        return [], 1.0

    def _leaving(self) -> Iterable[TemplateCopy]:
        for template_copy in self.fleet.units.values():
            waits = [
                replica_state.member.id
                for replica_state in template_copy.views
                if replica_state.member.id not in self.stopped
            ]
            if waits and all(replica in self.draining_s for replica in waits):
                yield template_copy

    def _serve(self, template_copy: TemplateCopy, sign: int) -> None:
        rates = self.measure.copy_rates(template_copy).times(sign)
        self.serving[template_copy.model] = self.serving.get(template_copy.model, ZERO_RATES).plus(rates)

    def _retire(self, template_copy: TemplateCopy) -> None:
        if template_copy.id in self.whole:
            self._serve(template_copy, -1)
        self.live[template_copy.template, template_copy.region].remove(template_copy)
        self.leave(template_copy)


def _load(template_copy: TemplateCopy) -> tuple[int, int, int]:
    requests = sum(replica.open_requests for replica in template_copy.views)
    tokens = sum(replica.open_prefill_tokens + replica.open_context_tokens for replica in template_copy.views)
    return (requests, tokens, -_number_of(template_copy.id))


def _number_of(unit: str) -> int:
    digits = unit.rpartition("#")[2]
    return int(digits) if digits.isdigit() else 0


def reassignments(
    fleet: FleetState, wanted: Counts, known: TemplateCapacities, fixed: Collection[str] = ()
) -> tuple[Reassign, ...]:
    """Which replicas become whose, so that as little as possible is missing; `fixed` ones stay."""
    live: dict[CopyKey, list[TemplateCopy]] = {}
    for template_copy in fleet.units.values():
        if not any(replica.state == "draining" for replica in template_copy.views):
            live.setdefault((template_copy.template, template_copy.region), []).append(template_copy)
    spare = {
        key: [u for u in units if u.whole and not any(replica.member.id in fixed for replica in u.views)]
        for key, units in live.items()
        if key in wanted and len(units) > wanted[key] and _plain(known, key)
    }
    left = {key: len(live[key]) - wanted[key] for key in spare}
    reassigns: list[Reassign] = []
    for key in sorted(key for key in wanted if _plain(known, key)):
        template = known[key[0]].template
        for _ in range(wanted[key] - len(live.get(key, ()))):
            best = _best(template, key, spare, left, known)
            if best is None:
                break
            source, template_copy, places = best
            spare[source].remove(template_copy)
            left[source] -= 1
            reassigns += [_reassigned(replica, template, index) for index, replica in enumerate(places)]
    return tuple(reassigns)


def _plain(known: TemplateCapacities, key: CopyKey) -> bool:
    return key[0] in known and known[key[0]].template.kind in FLIPPABLE


def _best(
    template: Template,
    key: CopyKey,
    spare: Mapping[CopyKey, list[TemplateCopy]],
    left: Counts,
    known: TemplateCapacities,
) -> tuple[CopyKey, TemplateCopy, list[ReplicaState]] | None:
    ranked = []
    for source, units in spare.items():
        if left[source] <= 0 or source[1] != key[1] or known[source[0]].template.model != template.model:
            continue
        for template_copy in units:
            places = _placed(template_copy, known[source[0]].template.replicas, template.replicas)
            if places is not None:
                pairs = zip(places, template.replicas, strict=True)
                flips = sum(replica_state.role != replica.role for replica_state, replica in pairs)
                load = sum(replica_state.open_requests for replica_state in template_copy.views)
                ranked.append(((flips, load, template_copy.id), source, template_copy, places))
    return min(ranked, key=lambda entry: entry[0])[1:] if ranked else None


def _placed(
    template_copy: TemplateCopy, old: Sequence[PlannedReplica], new: Sequence[PlannedReplica]
) -> list[ReplicaState] | None:
    """For each new replica one of the copy's on its layout, in its role if there is one; None where there is none."""
    views = list(template_copy.views)
    if len(views) != len(new):
        return None
    placed = []
    for replica in new:
        alike = [
            replica_state
            for replica_state in views
            if old[replica_state.member.index].layout == replica.layout
        ]
        if not alike:
            return None
        chosen = next(
            (replica_state for replica_state in alike if replica_state.role == replica.role), alike[0]
        )
        views.remove(chosen)
        placed.append(chosen)
    return placed


def _reassigned(replica: ReplicaState, template: Template, index: int) -> Reassign:
    role = template.replicas[index].role
    return Reassign(
        replace(replica.member, template=template.name, index=index, kind=template.kind, role=role)
    )
