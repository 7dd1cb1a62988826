"""From the fleet there is to the copies that are wanted, without serving less on the way.

Each call looks at the fleet and says what to do next; the caller carries it out on its `Fleet` at once (`Start`
adds the member, `Drain` marks it, `Stop` removes it) and calls again later. A call without a change in between
does nothing.

    actions = restored(fleet)                             when a plan is adopted: flips are undone
    wanted = wanted_counts(plan, wanted)                  when a plan is adopted; a Resize changes one count
    known.update(blueprints(plan))                        (core.capacity) what its copies need and serve
    step = reconcile(fleet, wanted, known, progress, at_s, available=..., grace_s=..., dip=...)
    progress = step.progress                              and step.actions are to be carried out in order
    progress = progress.drained(replica)                  at a Drained, before the next call

Call it when a plan is adopted or a count changes, at `Drained`, and at ticks when `fleet.version` differs from
the one after the last call or `step.due_s` has come. The rules, per model:

1. Start what is missing while there are nodes. A copy that lost some replicas gets those back, under new ids.
   After a start that failed, the next waits 10 s, then 20 s, 40 s, ... up to 5 min.
2. Of what is too much, copies that do not serve yet are stopped at once; then the least loaded are drained
   (CORAL 5.1), but only while the rest that is ready serves at least the smaller of what is ready now and what
   is wanted. So capacity never falls below the smaller of old and new (the two phases of CAUCHY 3.5.2; routing
   follows readiness by itself).
3. A draining replica is stopped when it says it is done, or `grace_s` after it was asked.
4. If a missing copy cannot start because copies that must go hold its nodes, and rule 2 holds them back, then
   they may go within `dip`: the share of the smaller of old and new that may be missing meanwhile. With no room
   in it nothing moves, and a note says which dip it would take.

Copies of templates and regions that `wanted` does not name are someone else's and left alone, but for their nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from potluck.core.brain.actions import Action, Drain, Flip, Start, Stop
from potluck.core.brain.fleet import Fleet, Unit
from potluck.core.scale.capacity import Blueprint, FreeNodes, Key, Measure, room_in
from potluck.core.scale.rates import NOTHING, Rates
from potluck.core.values.member import Member
from potluck.core.values.plan import Plan, Template

RETRY_S = 10.0
RETRY_MOST_S = 300.0
ROUNDING = 1e-9


class Attempt(NamedTuple):
    """Starts of one template in one region that came to nothing, one after another."""

    failures: int
    again_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """What must be remembered between two calls."""

    next_number: int = 0
    """Copies and replicas are numbered from here; no number is used twice."""
    starting: Mapping[str, Key] = field(default_factory=dict)
    """Replicas whose start was asked for and not yet seen through."""
    draining_s: Mapping[str, float] = field(default_factory=dict)
    """When each was asked to drain."""
    done: frozenset[str] = frozenset()
    """Draining replicas that said they are done."""
    attempts: Mapping[Key, Attempt] = field(default_factory=dict)
    goal: tuple[tuple[Key, int], ...] = ()
    floors_per_s: Mapping[str, float] = field(default_factory=dict)
    """Model to the smaller of what was served and what is wanted, when the goal was set."""

    def drained(self, replica: str) -> Progress:
        return replace(self, done=self.done | {replica})


class Step(NamedTuple):
    """What to do now, what to remember, and what cannot be done."""

    actions: tuple[Action, ...]
    progress: Progress
    due_s: float
    """When to look again even if nothing happens; infinite when there is no need."""
    notes: tuple[str, ...]

    @property
    def settled(self) -> bool:
        """Nothing is missing, starting or leaving."""
        return not self.notes and self.due_s == inf and not self.progress.starting


def wanted_counts(plan: Plan, before: Mapping[Key, int] | None = None) -> dict[Key, int]:
    """The plan's copies; none of what was wanted before and is not in it."""
    wanted = dict.fromkeys(before or {}, 0)
    for each in plan.deployments:
        wanted[each.template, each.region] = wanted.get((each.template, each.region), 0) + each.count
    return wanted


def restored(fleet: Fleet) -> tuple[Flip, ...]:
    """Flips that give replicas their planned roles back: a new plan counts on them."""
    return tuple(
        Flip(view.member.id, view.member.role)
        for view in fleet.views.values()
        if view.role != view.member.role and view.state != "draining"
    )


def reconcile(
    fleet: Fleet,
    wanted: Mapping[Key, int],
    known: Mapping[str, Blueprint],
    progress: Progress,
    at_s: float,
    *,
    available: Mapping[tuple[str, str], int] | None = None,
    grace_s: float = 30.0,
    dip: float = 0.0,
) -> Step:
    """The next step towards `wanted`; `available` counts all nodes that can be had, those in use included."""
    work = _Work(fleet, wanted, known, progress, at_s, grace_s)
    work.remember_starts()
    work.set_goal()
    work.stop_drained()
    work.drain_surplus()
    work.start_missing(room_in(fleet, wanted, known, available, work.stopped), dip)
    return work.step()


class _Work:
    """One call's notebook: what is there, what leaves, what is free."""

    def __init__(
        self,
        fleet: Fleet,
        wanted: Mapping[Key, int],
        known: Mapping[str, Blueprint],
        progress: Progress,
        at_s: float,
        grace_s: float,
    ) -> None:
        self.fleet, self.wanted, self.known, self.at_s, self.grace_s = fleet, wanted, known, at_s, grace_s
        self.actions: list[Action] = []
        self.notes: list[str] = []
        self.next_number = progress.next_number
        self.starting = dict(progress.starting)
        self.draining_s = {k: v for k, v in progress.draining_s.items() if k in fleet.views}
        self.done = frozenset(replica for replica in progress.done if replica in fleet.views)
        self.attempts = dict(progress.attempts)
        self.goal, self.floors_per_s = progress.goal, dict(progress.floors_per_s)
        self.due_s = inf
        self.stopped: set[str] = set()
        self.live: dict[Key, list[Unit]] = {}
        """Copies that stay or may stay, of the keys that are ours."""
        self.measure = Measure(fleet, wanted, known)
        self.serving: dict[str, Rates] = {}
        self.whole: set[str] = set()
        for unit in fleet.units.values():
            leaving = any(view.state == "draining" for view in unit.views)
            if unit.whole:
                self.whole.add(unit.id)
                self._serve(unit, 1)
            if (unit.template, unit.region) not in wanted:
                continue
            if leaving:
                self._leave(unit)
            else:
                self.live.setdefault((unit.template, unit.region), []).append(unit)

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
            self.attempts[key] = Attempt(failures, self.at_s + wait_s)

    def set_goal(self) -> None:
        goal = tuple(sorted(self.wanted.items()))
        if goal == self.goal:
            return
        self.goal = goal
        self.floors_per_s = {
            model: min(self.serving.get(model, NOTHING).served_per_s, target.served_per_s)
            for model, target in self.measure.targets.items()
        }

    def stop_drained(self) -> None:
        for replica in sorted(self.draining_s):
            over_s = self.draining_s[replica] + self.grace_s
            if replica in self.done or self.at_s >= over_s:
                self._stop(replica)
            else:
                self.due_s = min(self.due_s, over_s)

    def drain_surplus(self) -> None:
        for unit in self.candidates():
            if len(self.live[unit.template, unit.region]) <= self.wanted[unit.template, unit.region]:
                continue
            if unit.id not in self.whole:
                self._retire(unit)
                continue
            serving = self.serving[unit.model].served_per_s
            needed = min(serving, self.measure.target_per_s(unit.model))
            if self._after_per_s(unit) >= needed * (1 - ROUNDING):
                self._retire(unit)

    def candidates(self) -> list[Unit]:
        """Copies of what there is too much of: first those that do not serve, then the least loaded, the youngest."""
        found: list[Unit] = []
        for key, units in self.live.items():
            if len(units) > self.wanted[key]:
                found += units
        return sorted(found, key=lambda unit: (unit.id in self.whole, *_load(unit)))

    def start_missing(self, room: FreeNodes, dip: float) -> None:
        missing = self._missing()
        for key, count in sorted(missing.items()):
            if count and (key[0] not in self.known):
                self.notes.append(f"{key[0]}@{key[1]}: {count} wanted, but the template is not known")
        blocked = {key for key, count in missing.items() if count and key[0] in self.known}
        for key in sorted(blocked):
            attempt = self.attempts.get(key)
            if attempt is not None and self.at_s < attempt.again_s:
                blocked.discard(key)
                self.due_s = min(self.due_s, attempt.again_s)
        ready = sorted(blocked)
        while ready:  # one copy each in turn, so that scarce nodes do not all go to the first name
            for key in list(ready):
                if missing[key] and room.take(key):
                    self._start(key)
                    missing[key] -= 1
                else:
                    ready.remove(key)
        short = {key: missing[key] for key in sorted(blocked) if missing[key]}
        if short:
            self._exchange(short, room, dip)

    def step(self) -> Step:
        progress = Progress(
            self.next_number,
            self.starting,
            self.draining_s,
            self.done,
            self.attempts,
            self.goal,
            self.floors_per_s,
        )
        return Step(tuple(self.actions), progress, self.due_s, tuple(self.notes))

    def _missing(self) -> dict[Key, int]:
        """Copies to start, after giving back what copies lost of their replicas."""
        missing = {}
        for key, count in self.wanted.items():
            units = self.live.get(key, [])
            missing[key] = max(0, count - len(units))
            blueprint = self.known.get(key[0])
            for unit in units if blueprint else ():
                assert blueprint is not None
                here = {view.member.index for view in unit.views}
                lost = [i for i in range(len(blueprint.template.replicas)) if i not in here]
                attempt = self.attempts.get(key)
                if lost and attempt is not None and self.at_s < attempt.again_s:
                    self.due_s = min(self.due_s, attempt.again_s)
                    continue
                for index in lost:
                    self._start_replica(blueprint.template, key, unit.id, index, f"{index}+{self._number()}")
        return missing

    def _exchange(self, short: Mapping[Key, int], room: FreeNodes, dip: float) -> None:
        """There are no nodes for copies that are wanted: let copies go that hold them, within the dip."""
        for unit in self._leaving():
            room.give(unit)
        for key, count in short.items():
            name = f"{key[0]}@{key[1]}"
            for left in range(count, 0, -1):
                if room.take(key):
                    continue  # enough is on its way out: wait for it
                units, lost = self._in_the_way(key, room)
                if not units or lost > dip + ROUNDING:
                    how = f"; a dip of {lost:.0%} would let copies be exchanged" if units else ""
                    self.notes.append(f"{name}: {left} wanted, but there are no nodes{how}")
                    break
                for unit in units:
                    self._retire(unit)
                    room.give(unit)
                    self.notes.append(f"{name}: no spare nodes, so {unit.id} goes first")
                room.take(key)

    def _in_the_way(self, key: Key, room: FreeNodes) -> tuple[list[Unit], float]:
        """Copies that must go for one of these to start, and the share of the floor that is missing meanwhile."""
        trial, serving, units, lost = room.copy(), dict(self.serving), [], 0.0
        extra = {key: len(units) - self.wanted[key] for key, units in self.live.items()}
        for unit in self.candidates():
            own = (unit.template, unit.region)
            if not extra[own] or not trial.helps(key, unit):
                continue
            extra[own] -= 1
            serving[unit.model] = serving[unit.model].plus(self.measure.unit(unit).times(-1))
            floor = self.floors_per_s.get(unit.model, 0.0)
            if floor > 0:
                lost = max(lost, 1 - serving[unit.model].served_per_s / floor)
            trial.give(unit)
            units.append(unit)
            if trial.take(key):
                return units, lost
        return [], 1.0

    def _leaving(self) -> Iterable[Unit]:
        for unit in self.fleet.units.values():
            waits = [view.member.id for view in unit.views if view.member.id not in self.stopped]
            if waits and all(replica in self.draining_s for replica in waits):
                yield unit

    def _after_per_s(self, unit: Unit) -> float:
        """What the model's ready copies serve without this one."""
        left = self.serving[unit.model].plus(self.measure.unit(unit).times(-1))
        return left.served_per_s

    def _serve(self, unit: Unit, sign: int) -> None:
        rates = self.measure.unit(unit).times(sign)
        self.serving[unit.model] = self.serving.get(unit.model, NOTHING).plus(rates)

    def _retire(self, unit: Unit) -> None:
        if unit.id in self.whole:
            self._serve(unit, -1)
        self.live[unit.template, unit.region].remove(unit)
        self._leave(unit)

    def _leave(self, unit: Unit) -> None:
        """All of a copy's replicas go: what serves is drained, what does not is stopped."""
        for view in unit.views:
            replica = view.member.id
            if view.state == "starting":
                self._stop(replica)
            elif replica not in self.draining_s:
                if view.state == "ready":
                    self.actions.append(Drain(replica))
                self.draining_s[replica] = self.at_s
                self.due_s = min(self.due_s, self.at_s + self.grace_s)

    def _stop(self, replica: str) -> None:
        self.actions.append(Stop(replica))
        self.stopped.add(replica)
        self.starting.pop(replica, None)
        self.draining_s.pop(replica, None)
        self.done -= {replica}

    def _start(self, key: Key) -> None:
        template = self.known[key[0]].template
        unit = f"{key[0]}@{key[1]}#{self._number()}"
        for index in range(len(template.replicas)):
            self._start_replica(template, key, unit, index, str(index))

    def _start_replica(self, template: Template, key: Key, unit: str, index: int, place: str) -> None:
        role = template.replicas[index].role
        replica = f"{unit}/{place}"
        member = Member(replica, unit, template.name, index, template.kind, template.model, role, key[1])
        self.actions.append(Start(member))
        self.starting[replica] = key

    def _number(self) -> int:
        self.next_number += 1
        return self.next_number - 1


def _load(unit: Unit) -> tuple[int, int, int]:
    requests = sum(view.open_requests for view in unit.views)
    tokens = sum(view.open_prefill_tokens + view.open_context_tokens for view in unit.views)
    return (requests, tokens, -_number_of(unit.id))


def _number_of(unit: str) -> int:
    digits = unit.rpartition("#")[2]
    return int(digits) if digits.isdigit() else 0
