"""The Brain: events in, actions out. The live system and the simulator drive this one object.

    brain = Brain(facts, policy)
    actions = brain.on(at_s, event)

`on` is its only mutator. It reads no clock and draws no random number: the same events give the same actions.
What it costs does not grow with the number of replicas or of open requests (but for Planned and Tick, which
look at the fleet).

    Arrived            Run, or nothing yet: held until a replica is ready, or waiting for a place on a pair; or Refuse
    Adopted            only counted where it is under way; else as an arrival
    Computed           makes room where a prompt was computed: perhaps Run for one that waits there
    SegmentDone        the next one's turn; makes room as well, should the former not have come
    FirstToken         only counted
    Finished           only counted
    Failed             Run again from what was streamed, elsewhere; or Refuse
    Underway           only noted: the answer to Inquire
    Cancelled          Abandon
    ReplicaReady       Run for those that were held
    ReplicaLost        counted out; its requests come as Failed, or are asked about
    Planned, Drained   the next steps towards the plan's fleet
    Ordered            Drain or Flip, as a person asked, and what follows; or nothing new for a replica
    Quoted             the next steps, as other nodes can be had; scaling may ask for another plan
    Tick               refusals of those that waited too long; Inquire after those that went silent; scaling

Whatever happens, a request that is late with its first token may be sent elsewhere as well (Twin), if that is wanted.

Every accepted request ends once: in Finished, in a Refuse or in Cancelled. Events that name an unknown request,
replica or an attempt that is over change nothing.

Here is who is told what, and what happens to replicas and links; the way of requests is in `flights.py`, and of
those that fail in `recovery.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from potluck.core.admission.admission import Admission
from potluck.core.brain import events as told
from potluck.core.brain.actions import Action, Drain, Flip, Recast, Start, Stop
from potluck.core.brain.adoption import Adoption
from potluck.core.brain.caches import Caches
from potluck.core.brain.facts import Facts
from potluck.core.brain.fleet import Fleet, View
from potluck.core.brain.flight import Flight
from potluck.core.brain.flights import Flights
from potluck.core.brain.hedges import Hedges
from potluck.core.brain.policy import Policy
from potluck.core.brain.recovery import Recovery
from potluck.core.brain.remarks import Remarks
from potluck.core.routing.affinity import Affinity
from potluck.core.routing.groups import Lengths
from potluck.core.routing.router import Router
from potluck.core.routing.speeds import Speeds
from potluck.core.routing.table import Table
from potluck.core.scale.base import SetLengths
from potluck.core.scale.steward import Steward


class Brain:
    """All run-time decisions of one fleet."""

    def __init__(self, facts: Facts, policy: Policy) -> None:
        self.fleet = Fleet(facts.replicas)
        self.speeds = Speeds(facts, self.fleet, policy.balance == "learned")
        self.table = Table(facts, policy, self.fleet)
        self.caches = Caches(facts, policy, self.fleet, self.table)
        affinity = Affinity(facts, policy, self.fleet, self.table, self.caches.index)
        self.admission = Admission(facts, policy, self.fleet, self.table)
        room = self.admission.room if policy.admission else None
        self.router = Router(facts, policy, self.fleet, self.table, affinity, self.speeds, room)
        self.steward = Steward(facts, policy, self.fleet)
        self._flights = flights = Flights(
            facts,
            policy,
            self.fleet,
            self.table,
            self.caches,
            affinity,
            self.router,
            self.steward,
            self.speeds,
            self.admission,
        )
        self._remarks = Remarks()
        adoption = Adoption(policy, self.fleet, flights, self.admission)
        self._recovery = Recovery(policy, self.fleet, flights, self.router)
        self._hedges: Hedges | None = None
        if policy.hedge > 0:
            self._hedges = Hedges(
                facts,
                policy.hedge,
                self.admission,
                self.table,
                flights,
                self._recovery,
                self.router,
                self.speeds,
            )
        self.flights: dict[str, Flight] = flights.open
        """Requests that were accepted and have not ended, by id."""
        self._handlers: dict[type, Callable[[float, Any], list[Action]]] = {
            told.Arrived: flights.arrived,
            told.Adopted: adoption.adopted,
            told.SegmentDone: flights.segment_done,
            told.Computed: flights.computed,
            told.FirstToken: flights.first_token,
            told.Finished: flights.finished,
            told.Failed: self._recovery.failed,
            told.Underway: self._recovery.underway,
            told.Cancelled: flights.cancelled,
            told.Reported: self._reported,
            told.Silent: self._recovery.silent,
            told.LinkReported: self._link_reported,
            told.Cached: self.caches.reported,
            told.ReplicaReady: self._ready,
            told.ReplicaLost: self._lost,
            told.Drained: self._drained,
            told.Planned: self._planned,
            told.Ordered: self._ordered,
            told.Quoted: self._quoted,
            told.Tick: self._tick,
        }

    def on(self, at_s: float, event: told.Event) -> list[Action]:
        """What to do about an event."""
        handler = self._handlers[type(event)]
        return handler(at_s, event) if self._hedges is None else self._hedges.on(at_s, event, handler)

    def sizes(self) -> dict[str, int]:
        """How much is remembered of requests; but for those that ended lately it is nothing when none is open."""
        twins = len(self._hedges.twins) if self._hedges is not None else 0
        return {**self._flights.sizes(), **self._recovery.sizes(), "twins": twins}

    # What replicas, links and caches say.

    def _reported(self, at_s: float, event: told.Reported) -> list[Action]:
        view = self.fleet.views.get(event.replica)
        if view is not None and view.status_at_s <= at_s:
            self.fleet.report(view, event.status, at_s)
            if view.doubted:
                return self._recovery.reported(at_s, view)
        return []

    def _link_reported(self, at_s: float, event: told.LinkReported) -> list[Action]:
        self.steward.window.linked(event)
        self.router.linked(event)
        self.caches.linked(event)
        return self._recovery.linked(at_s, event)

    # The fleet.

    def _ready(self, at_s: float, event: told.ReplicaReady) -> list[Action]:
        view = self.fleet.views.get(event.replica)
        if view is None or view.state != "starting":
            return []
        self.fleet.ready(event.replica, event.kv_version)
        actions = self._flights.changed(at_s, view)
        return actions if view.member.standby else actions + self._recovery.let_in(at_s, view)

    def _lost(self, at_s: float, event: told.ReplicaLost) -> list[Action]:
        view = self.fleet.remove(event.replica)
        self.caches.forget(event.replica)
        return self._recovery.gone(at_s, view, event.notice_s) if view is not None else []

    def _drained(self, at_s: float, event: told.Drained) -> list[Action]:
        view = self.fleet.views.get(event.replica)
        if view is None or view.state != "draining":
            return []
        return self._carry_out(at_s, self.steward.drained(at_s, event.replica))

    def _planned(self, at_s: float, event: told.Planned) -> list[Action]:
        self.table.adopt(event.plan)
        self.router.adopt(event.plan)
        self._remarks.planned(self.router.thresholds.links)
        actions = self._carry_out(at_s, self.steward.adopt(at_s, event.plan))
        actions += self._carry_out(at_s, self.steward.step(at_s))
        return actions + self._flights.planned(at_s)

    def _quoted(self, at_s: float, event: told.Quoted) -> list[Action]:
        actions = self._carry_out(at_s, self.steward.quoted(at_s, event.regions))
        return actions + self._scale(at_s)

    def _ordered(self, at_s: float, event: told.Ordered) -> list[Action]:
        view = self.fleet.views.get(event.replica)
        if view is None or view.state != "ready":
            return []
        asked: tuple[Action, ...]
        match event.what:
            case "cordon" | "uncordon":
                return self._cordon(at_s, view, event.what == "cordon")
            case "drain":
                asked = (Drain(event.replica),)
            case role:
                asked = self.steward.ordered(view, role)
        # With a step in any case: what was lost since the last one would pass for seen.
        return self._carry_out(at_s, asked) + self._carry_out(at_s, self.steward.step(at_s))

    def _cordon(self, at_s: float, view: View, cordoned: bool) -> list[Action]:
        if view.cordoned == cordoned:
            return []
        self.fleet.cordon(view, cordoned)
        actions = self._flights.changed(at_s, view)
        return actions + self._recovery.let_in(at_s, view) if view.serves else actions

    def _tick(self, at_s: float, event: told.Tick) -> list[Action]:
        actions = self._flights.tick(at_s) + self._recovery.tick(at_s)
        self.table.timed(self.speeds.faded(at_s))
        actions += self._scale(at_s) + self.caches.tick(at_s)
        if self.router.thresholds.links:
            actions += self._remarks.thresholds(self.router.thresholds.links, self.steward.why())
        return actions + self._remarks.paces(self.fleet)

    def _scale(self, at_s: float) -> list[Action]:
        waiting = self._flights.held.counts()
        for model, backlog in self.admission.backlogs.items():
            waiting[model] = waiting.get(model, 0) + backlog.count
        steps, thresholds = self.steward.tick(at_s, waiting)
        for decision in thresholds:
            if isinstance(decision, SetLengths):
                lengths = Lengths(decision.prompt_tokens, decision.output_tokens)
                self.table.shifted(decision.model, lengths)
            else:
                self.router.thresholds.rebase(decision.model, decision.tokens)
        return self._carry_out(at_s, steps)

    def _carry_out(self, at_s: float, actions: Iterable[Action]) -> list[Action]:
        """Do to our own picture of the fleet what is being asked of the real one."""
        done: list[Action] = []
        for action in actions:
            done.append(action)
            view: View | None = None
            comes = False
            match action:
                case Start(member):
                    self.fleet.add(member)
                case Drain(replica):
                    view = self.fleet.views.get(replica)
                    self.fleet.drain(replica)
                case Stop(replica):
                    stopped = self.fleet.remove(replica)
                    self.caches.forget(replica)
                    if stopped is not None:
                        done += self._recovery.gone(at_s, stopped, None)
                case Flip(replica, role):
                    view = self.fleet.views.get(replica)
                    self.fleet.flip(replica, role)
                case Recast(member):
                    view = self.fleet.views[member.id]
                    comes = view.member.standby and not member.standby
                    self.fleet.recast(member)
            if view is not None:
                done += self._flights.changed(at_s, view)
            if comes and view is not None and view.serves:
                done += self._recovery.let_in(at_s, view)
        self.steward.settled()
        return done
