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
from potluck.core.brain.adoption import Adoption
from potluck.core.brain.hedging import Hedging
from potluck.core.brain.operator_notes import OperatorNotes
from potluck.core.brain.prefix_caches import PrefixCaches
from potluck.core.brain.recovery import Recovery
from potluck.core.brain.requests import Requests
from potluck.core.routing.group_sharing import MeanLengths
from potluck.core.routing.learned_speeds import LearnedSpeeds
from potluck.core.routing.prefix_affinity import PrefixAffinity
from potluck.core.routing.router import Router
from potluck.core.routing.routing_table import RoutingTable
from potluck.core.scaling.autoscaler import Autoscaler
from potluck.core.scaling.rule import SetLengths
from potluck.core.state import events as told
from potluck.core.state.actions import Action, DrainReplica, FlipReplica, Reassign, StartReplica, StopReplica
from potluck.core.state.facts import FleetFacts
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RequestState


class Brain:
    """All run-time decisions of one fleet."""

    def __init__(self, facts: FleetFacts, policy: Policy) -> None:
        self.fleet = FleetState(facts.replicas)
        self.speeds = LearnedSpeeds(facts, self.fleet, policy.balance == "learned")
        self.table = RoutingTable(facts, policy, self.fleet)
        self.caches = PrefixCaches(facts, policy, self.fleet, self.table)
        affinity = PrefixAffinity(facts, policy, self.fleet, self.table, self.caches.index)
        self.admission = Admission(facts, policy, self.fleet, self.table)
        room = self.admission.room if policy.admission else None
        self.router = Router(facts, policy, self.fleet, self.table, affinity, self.speeds, room)
        self.autoscaler = Autoscaler(facts, policy, self.fleet)
        self._flights = requests = Requests(
            facts,
            policy,
            self.fleet,
            self.table,
            self.caches,
            affinity,
            self.router,
            self.autoscaler,
            self.speeds,
            self.admission,
        )
        self._remarks = OperatorNotes()
        adoption = Adoption(policy, self.fleet, requests, self.admission)
        self._recovery = Recovery(policy, self.fleet, requests, self.router)
        self._hedges: Hedging | None = None
        if policy.hedge > 0:
            self._hedges = Hedging(
                facts,
                policy.hedge,
                self.admission,
                self.table,
                requests,
                self._recovery,
                self.router,
                self.speeds,
            )
        self.requests: dict[str, RequestState] = requests.open
        """Requests that were accepted and have not ended, by id."""
        self._handlers: dict[type, Callable[[float, Any], list[Action]]] = {
            told.RequestArrived: requests.arrived,
            told.RequestAdopted: adoption.adopted,
            told.SegmentDone: requests.segment_done,
            told.SegmentComputed: requests.computed,
            told.FirstToken: requests.first_token,
            told.RequestFinished: requests.finished,
            told.AttemptFailed: self._recovery.failed,
            told.AttemptRunning: self._recovery.underway,
            told.RequestCancelled: requests.cancelled,
            told.ReplicaReported: self._reported,
            told.ReplicaSilent: self._recovery.silent,
            told.LinkReported: self._link_reported,
            told.CacheReported: self.caches.reported,
            told.ReplicaReady: self._ready,
            told.ReplicaLost: self._lost,
            told.ReplicaDrained: self._drained,
            told.PlanReceived: self._planned,
            told.OperatorOrdered: self._ordered,
            told.MarketReported: self._quoted,
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

    def _reported(self, at_s: float, event: told.ReplicaReported) -> list[Action]:
        view = self.fleet.views.get(event.replica)
        if view is not None and view.status_at_s <= at_s:
            self.fleet.report(view, event.status, at_s)
            if view.doubted:
                return self._recovery.reported(at_s, view)
        return []

    def _link_reported(self, at_s: float, event: told.LinkReported) -> list[Action]:
        self.autoscaler.window.linked(event)
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

    def _drained(self, at_s: float, event: told.ReplicaDrained) -> list[Action]:
        view = self.fleet.views.get(event.replica)
        if view is None or view.state != "draining":
            return []
        return self._carry_out(at_s, self.autoscaler.drained(at_s, event.replica))

    def _planned(self, at_s: float, event: told.PlanReceived) -> list[Action]:
        self.table.adopt(event.plan)
        self.router.adopt(event.plan)
        self._remarks.planned(self.router.thresholds.links)
        actions = self._carry_out(at_s, self.autoscaler.adopt(at_s, event.plan))
        actions += self._carry_out(at_s, self.autoscaler.step(at_s))
        return actions + self._flights.planned(at_s)

    def _quoted(self, at_s: float, event: told.MarketReported) -> list[Action]:
        actions = self._carry_out(at_s, self.autoscaler.quoted(at_s, event.regions))
        return actions + self._scale(at_s)

    def _ordered(self, at_s: float, event: told.OperatorOrdered) -> list[Action]:
        view = self.fleet.views.get(event.replica)
        if view is None or view.state != "ready":
            return []
        asked: tuple[Action, ...]
        match event.what:
            case "cordon" | "uncordon":
                return self._cordon(at_s, view, event.what == "cordon")
            case "drain":
                asked = (DrainReplica(event.replica),)
            case role:
                asked = self.autoscaler.ordered(view, role)
        # With a step in any case: what was lost since the last one would pass for seen.
        return self._carry_out(at_s, asked) + self._carry_out(at_s, self.autoscaler.step(at_s))

    def _cordon(self, at_s: float, view: ReplicaState, cordoned: bool) -> list[Action]:
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
            actions += self._remarks.thresholds(self.router.thresholds.links, self.autoscaler.why())
        return actions + self._remarks.paces(self.fleet)

    def _scale(self, at_s: float) -> list[Action]:
        waiting = self._flights.held.counts()
        for model, queue in self.admission.backlogs.items():
            waiting[model] = waiting.get(model, 0) + queue.count
        steps, thresholds = self.autoscaler.tick(at_s, waiting)
        for decision in thresholds:
            if isinstance(decision, SetLengths):
                lengths = MeanLengths(decision.prompt_tokens, decision.output_tokens)
                self.table.shifted(decision.model, lengths)
            else:
                self.router.thresholds.rebase(decision.model, decision.tokens)
        return self._carry_out(at_s, steps)

    def _carry_out(self, at_s: float, actions: Iterable[Action]) -> list[Action]:
        """Do to our own picture of the fleet what is being asked of the real one."""
        done: list[Action] = []
        for action in actions:
            done.append(action)
            view: ReplicaState | None = None
            comes = False
            match action:
                case StartReplica(member):
                    self.fleet.add(member)
                case DrainReplica(replica):
                    view = self.fleet.views.get(replica)
                    self.fleet.drain(replica)
                case StopReplica(replica):
                    stopped = self.fleet.remove(replica)
                    self.caches.forget(replica)
                    if stopped is not None:
                        done += self._recovery.gone(at_s, stopped, None)
                case FlipReplica(replica, role):
                    view = self.fleet.views.get(replica)
                    self.fleet.flip(replica, role)
                case Reassign(member):
                    view = self.fleet.views[member.id]
                    comes = view.member.standby and not member.standby
                    self.fleet.recast(member)
            if view is not None:
                done += self._flights.changed(at_s, view)
            if comes and view is not None and view.serves:
                done += self._recovery.let_in(at_s, view)
        self.autoscaler.settled()
        return done
