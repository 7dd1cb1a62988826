"""The Brain: events in, actions out. The live system and the simulator drive this one object.

`on` is its only mutator: the same events give the same actions, at a cost that does not grow with the fleet or the
open requests (except for PlanReceived and Tick). Every accepted request ends once: RequestFinished, Refuse or
RequestCancelled. Events of an unknown request or replica, or of an attempt that is over, change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from potluck.core.brain.recovery import Recovery
from potluck.core.brain.requests import BrainState, Requests
from potluck.core.routing.group_sharing import MeanLengths
from potluck.core.routing.template_weights import LengthThreshold
from potluck.core.routing.thresholds import LEAST_TOKENS
from potluck.core.scaling.rule import SetLengths
from potluck.core.state import events
from potluck.core.state.actions import (
    Action,
    DrainReplica,
    FlipReplica,
    OperatorNote,
    Reassign,
    StartReplica,
    StopReplica,
)
from potluck.core.state.facts import FleetFacts
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RequestState


class Brain:
    def __init__(self, facts: FleetFacts, policy: Policy) -> None:
        state = BrainState(facts, policy)
        self.fleet, self.table = state.fleet, state.table
        self.speeds, self.caches = state.speeds, state.caches
        self.router, self.admission, self.autoscaler = state.router, state.admission, state.autoscaler
        self._requests = requests = Requests(state)
        self._recovery = Recovery(state, requests)
        self._notes = OperatorNotes()
        self.requests: dict[str, RequestState] = requests.open
        """Requests that were accepted and have not ended, by id."""
        self._handlers: dict[type, Callable[[float, Any], list[Action]]] = {
            events.RequestArrived: requests.arrived,
            events.RequestAdopted: requests.adopted,
            events.SegmentDone: requests.segment_done,
            events.SegmentComputed: requests.computed,
            events.FirstToken: requests.first_token,
            events.RequestFinished: requests.finished,
            events.AttemptFailed: self._recovery.failed,
            events.AttemptRunning: self._recovery.attempt_running,
            events.RequestCancelled: requests.cancelled,
            events.ReplicaReported: self._reported,
            events.ReplicaSilent: self._recovery.silent,
            events.LinkReported: self._link_reported,
            events.CacheReported: self.caches.reported,
            events.ReplicaReady: self._ready,
            events.ReplicaLost: self._lost,
            events.ReplicaDrained: self._drained,
            events.PlanReceived: self._planned,
            events.OperatorOrdered: self._ordered,
            events.MarketReported: self._market_reported,
            events.Tick: self._tick,
        }

    def on(self, at_s: float, event: events.Event) -> list[Action]:
        return self._handlers[type(event)](at_s, event)

    def sizes(self) -> dict[str, int]:
        """Sizes of the tables about requests; all empty without open requests, except for those that ended
        recently."""
        return {**self._requests.sizes(), **self._recovery.sizes()}

    # What replicas, links and caches say.

    def _reported(self, at_s: float, event: events.ReplicaReported) -> list[Action]:
        replica = self.fleet.views.get(event.replica)
        if replica is not None and replica.status_at_s <= at_s:
            self.fleet.report(replica, event.status, at_s)
            self.table.count_other_gateways(replica)
            if replica.doubted:
                return self._recovery.reported(at_s, replica)
        return []

    def _link_reported(self, at_s: float, event: events.LinkReported) -> list[Action]:
        self.autoscaler.window.linked(event)
        self.router.linked(event)
        return self._recovery.recall_from_slow_link(at_s, event)

    # The fleet.

    def _ready(self, at_s: float, event: events.ReplicaReady) -> list[Action]:
        replica = self.fleet.views.get(event.replica)
        if replica is None or replica.state != "starting":
            return []
        self.fleet.ready(event.replica, event.kv_version, event.max_running)
        actions = self._requests.changed(at_s, replica)
        return actions + self._recovery.send_held(at_s, replica)

    def _lost(self, at_s: float, event: events.ReplicaLost) -> list[Action]:
        replica = self.fleet.remove(event.replica)
        self.caches.forget(event.replica)
        return self._recovery.replica_gone(at_s, replica, event.notice_s) if replica is not None else []

    def _drained(self, at_s: float, event: events.ReplicaDrained) -> list[Action]:
        replica = self.fleet.views.get(event.replica)
        if replica is None or replica.state != "draining":
            return []
        return self._carry_out(at_s, self.autoscaler.drained(at_s, event.replica))

    def _planned(self, at_s: float, event: events.PlanReceived) -> list[Action]:
        self.table.adopt(event.plan)
        self.router.adopt(event.plan)
        self._notes.planned(self.router.thresholds.links)
        actions = self._carry_out(at_s, self.autoscaler.adopt(at_s, event.plan))
        actions += self._carry_out(at_s, self.autoscaler.step(at_s))
        return actions + self._requests.planned(at_s)

    def _market_reported(self, at_s: float, event: events.MarketReported) -> list[Action]:
        actions = self._carry_out(at_s, self.autoscaler.market_changed(at_s, event.regions))
        return actions + self._scale(at_s)

    def _ordered(self, at_s: float, event: events.OperatorOrdered) -> list[Action]:
        replica = self.fleet.views.get(event.replica)
        if replica is None or replica.state != "ready":
            return []
        orders: tuple[Action, ...]
        match event.what:
            case "cordon" | "uncordon":
                return self._cordon(at_s, replica, event.what == "cordon")
            case "drain":
                orders = (DrainReplica(event.replica),)
            case role:
                orders = self.autoscaler.ordered(replica, role)
        # Always with a step; otherwise losses since the last one would count as seen.
        return self._carry_out(at_s, orders) + self._carry_out(at_s, self.autoscaler.step(at_s))

    def _cordon(self, at_s: float, replica: ReplicaState, cordoned: bool) -> list[Action]:
        if replica.cordoned == cordoned:
            return []
        self.fleet.cordon(replica, cordoned)
        actions = self._requests.changed(at_s, replica)
        return actions + self._recovery.send_held(at_s, replica) if replica.serves else actions

    def _tick(self, at_s: float, event: events.Tick) -> list[Action]:
        actions = self._requests.tick(at_s) + self._recovery.tick(at_s)
        self.table.update_paces(self.speeds.decay_stale(at_s))
        actions += self._scale(at_s)
        if self.router.thresholds.links:
            actions += self._notes.thresholds(self.router.thresholds.links, self.autoscaler.why())
        return actions + self._notes.paces(self.fleet)

    def _scale(self, at_s: float) -> list[Action]:
        waiting = self._requests.held.counts()
        for model, queue in self.admission.queues.items():
            waiting[model] = waiting.get(model, 0) + queue.count
        steps, thresholds = self.autoscaler.tick(at_s, waiting)
        for decision in thresholds:
            if isinstance(decision, SetLengths):
                lengths = MeanLengths(decision.prompt_tokens, decision.output_tokens)
                self.table.set_mean_lengths(decision.model, lengths)
            else:
                self.router.thresholds.rebase(decision.model, decision.tokens)
        return self._carry_out(at_s, steps)

    def _carry_out(self, at_s: float, actions: Iterable[Action]) -> list[Action]:
        """Apply fleet actions to the Brain's own state of the fleet; returns them with the request actions that
        follow."""
        carried_out: list[Action] = []
        for action in actions:
            carried_out.append(action)
            replica_state: ReplicaState | None = None
            match action:
                case StartReplica(replica_spec):
                    self.fleet.add(replica_spec)
                case DrainReplica(replica):
                    replica_state = self.fleet.views.get(replica)
                    self.fleet.drain(replica)
                case StopReplica(replica):
                    stopped = self.fleet.remove(replica)
                    self.caches.forget(replica)
                    if stopped is not None:
                        carried_out += self._recovery.replica_gone(at_s, stopped, None)
                case FlipReplica(replica, role):
                    replica_state = self.fleet.views.get(replica)
                    self.fleet.flip(replica, role)
                case Reassign(replica_spec):
                    replica_state = self.fleet.views[replica_spec.id]
                    self.fleet.reassign(replica_spec)
            if replica_state is not None:
                carried_out += self._requests.changed(at_s, replica_state)
        self.autoscaler.settled()
        return carried_out


SLOW_PACE, RECOVERED_PACE = (
    1.5,
    1.2,
)  # Paces from which a replica counts as slow, and below which it no longer does.
NOTE_RATIO: Final = 1.2  # Ratio by which a threshold must have moved since its last note.


class OperatorNotes:
    """State: replicas reported as slow, and the last reported thresholds."""

    __slots__ = ("_slow", "_thresholds")

    def __init__(self) -> None:
        self._slow: set[str] = set()
        self._thresholds: dict[tuple[str, str], LengthThreshold] = {}

    def paces(self, fleet: FleetState) -> list[Action]:
        actions: list[Action] = []
        for name, replica in fleet.views.items():
            if replica.facts is not None and replica.facts.assumed:
                continue  # no speed was planned
            if name not in self._slow and replica.pace >= SLOW_PACE:
                self._slow.add(name)
                text = f"takes {replica.pace:.1f} times as long as planned"
                actions.append(OperatorNote(f"{name} {text}", "it is sent less: requests there took so long"))
            elif name in self._slow and replica.pace < RECOVERED_PACE:
                self._slow.discard(name)
                text = f"{name} is about as fast as planned again"
                actions.append(OperatorNote(text, f"pace {replica.pace:.2f}"))
        if self._slow:
            self._slow &= fleet.views.keys()
        return actions

    def planned(self, links: dict[str, dict[str, LengthThreshold]]) -> None:
        self._thresholds = {
            (model, link): new_threshold
            for model, thresholds_by_link in links.items()
            for link, new_threshold in thresholds_by_link.items()
        }

    def thresholds(self, links: dict[str, dict[str, LengthThreshold]], scaling_reason: str) -> list[Action]:
        """Notes for thresholds that moved since their last note; `scaling_reason` is the scaling rule's last
        explanation."""
        actions: list[Action] = []
        for model, thresholds_by_link in links.items():
            for link, new_threshold in thresholds_by_link.items():
                old_threshold = self._thresholds.get((model, link))
                if old_threshold is not None and not _has_moved(old_threshold, new_threshold):
                    continue
                self._thresholds[model, link] = new_threshold
                note = f"only prompts of {model} beyond {new_threshold.tokens:.0f} tokens go over {link} now"
                actions.append(
                    OperatorNote(note, _threshold_reason(old_threshold, new_threshold, scaling_reason))
                )
        return actions


def _has_moved(old_threshold: LengthThreshold, new_threshold: LengthThreshold) -> bool:
    low, high = sorted((max(old_threshold.tokens, LEAST_TOKENS), max(new_threshold.tokens, LEAST_TOKENS)))
    return high >= NOTE_RATIO * low or old_threshold.base_tokens != new_threshold.base_tokens


def _threshold_reason(
    old_threshold: LengthThreshold | None, new_threshold: LengthThreshold, scaling_reason: str
) -> str:
    if old_threshold is None or old_threshold.base_tokens != new_threshold.base_tokens:
        return scaling_reason
    values = f"before it was {old_threshold.tokens:.0f}, planned are {new_threshold.base_tokens:.0f}"
    if new_threshold.tokens > old_threshold.tokens:
        return f"the link, or prefill at its far end, has too much to do; {values}"
    return f"the link and its far end are clear again; {values}"
