"""The Brain: events in, actions out. The live system and the simulator drive this one object.

    brain = Brain(facts, policy)
    actions = brain.on(at_s, event)

`on` is its only mutator. It reads no clock and draws no random number: the same events give the same actions.
What it costs does not grow with the number of replicas or of open requests (but for Planned and Tick, which
look at the fleet).

    Arrived            Run, or nothing yet: held until a replica is ready, or waiting for a place on a pair; or Refuse
    SegmentDone        makes room on a pair's low-end replica: perhaps Run for one that waits there
    FirstToken         only counted
    Finished           only counted
    Failed             Run again from what was streamed, elsewhere; or Refuse
    Cancelled          Abandon
    ReplicaReady       Run for those that were held
    ReplicaLost        counted out; its requests come as Failed
    Planned, Drained   the next steps towards the plan's fleet
    Tick               refusals of those that waited too long; scaling

Every accepted request ends once: in Finished, in a Refuse or in Cancelled. Events that name an unknown request,
replica or an attempt that is over change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from potluck.core.brain import events as told
from potluck.core.brain.actions import Abandon, Action, Drain, Flip, RefusalReason, Refuse, Start, Stop
from potluck.core.brain.caches import Caches
from potluck.core.brain.facts import Facts
from potluck.core.brain.fleet import Fleet, View
from potluck.core.brain.flight import RUNNING, WAITING, Flight
from potluck.core.brain.policy import Policy
from potluck.core.brain.recovery import QUARANTINE_S, Held, concerns, verdict
from potluck.core.routing.affinity import Affinity
from potluck.core.routing.router import SENT, Answer, Router
from potluck.core.routing.split import MOST_IN_LOW
from potluck.core.routing.table import ModelTable, Table
from potluck.core.routing.targets import Target
from potluck.core.scale.steward import Steward


class Brain:
    """All run-time decisions of one fleet."""

    def __init__(self, facts: Facts, policy: Policy) -> None:
        self._facts = facts
        self._policy = policy
        self.fleet = Fleet()
        self.table = Table(facts, policy, self.fleet)
        self.caches = Caches(facts, policy, self.fleet, self.table)
        self._affinity = Affinity(facts, policy, self.fleet, self.table, self.caches.index)
        self.router = Router(facts, policy, self.fleet, self.table, self._affinity)
        self.steward = Steward(facts, policy, self.fleet)
        self._watches = self.steward.watches
        self.flights: dict[str, Flight] = {}
        self._held = Held()
        self._crowded: set[str] = set()
        """Models of which more are held than the replicas that came up lately could take."""
        self._doubts: dict[str, float] = {}
        """Replicas that may be gone, and until when to think so."""
        self._doubtful: list[str] = []
        """Held although a replica was ready, because that one had just failed them."""
        self._handlers: dict[type, Callable[[float, Any], list[Action]]] = {
            told.Arrived: self._arrived,
            told.SegmentDone: self._segment_done,
            told.FirstToken: self._first_token,
            told.Finished: self._finished,
            told.Failed: self._failed,
            told.Cancelled: self._cancelled,
            told.Reported: self._reported,
            told.LinkReported: self._link_reported,
            told.Cached: self.caches.reported,
            told.ReplicaReady: self._ready,
            told.ReplicaLost: self._lost,
            told.Drained: self._drained,
            told.Planned: self._planned,
            told.Tick: self._tick,
        }

    def on(self, at_s: float, event: told.Event) -> list[Action]:
        """What to do about an event."""
        return self._handlers[type(event)](at_s, event)

    # Requests.

    def _arrived(self, at_s: float, event: told.Arrived) -> list[Action]:
        request = event.request
        if request.id in self.flights:
            return []
        flight = Flight(request)
        table = self.table.models.get(request.model)
        if table is None and request.model not in self._facts.models:
            return [
                self._refusal(at_s, flight, "unknown_model", f"no model {request.model!r} is served here")
            ]
        if request.blocks:
            self.caches.asked_for(at_s, request)
        if self._watches:
            cached_tokens = self._affinity.most_cached(flight) if request.blocks else 0
            self.steward.window.arrived(at_s, request, cached_tokens)
        if table is not None and flight.total_tokens > table.limit_tokens:
            return [self._refusal(at_s, flight, "too_long", table.too_long(flight))]
        if request.deadline_s is not None and at_s >= request.deadline_s:
            late = f"came after its deadline at {request.deadline_s:g} s"
            return [self._refusal(at_s, flight, "deadline", late)]
        self.flights[request.id] = flight
        return self._send(at_s, flight, table)

    def _dispatch(self, at_s: float, flight: Flight) -> list[Action]:
        """Send a request that was held or failed; a new plan may have taken those away that could hold it."""
        table = self.table.models.get(flight.request.model)
        if table is not None and flight.total_tokens > table.limit_tokens:
            return self._refuse(at_s, flight, "too_long", table.too_long(flight))
        return self._send(at_s, flight, table)

    def _send(self, at_s: float, flight: Flight, table: ModelTable | None) -> list[Action]:
        """Send a request, or hold it."""
        if table is not None:
            answer = self.router.send(flight, table)
            if answer is SENT:
                flight.held_s = -1.0
                return [flight.run()]
            if answer is Answer.WAITS:
                flight.held_s = -1.0
                return []
        self._held.add(at_s, flight, self._policy)
        if flight.avoid:
            self._doubtful.append(flight.request.id)
        return []

    def _segment_done(self, at_s: float, event: told.SegmentDone) -> list[Action]:
        flight = self.flights.get(event.request)
        if flight is None or flight.state != RUNNING or event.segment != flight.done:
            return []
        if flight.done >= len(flight.earlier):
            return []
        return self._hand_on(at_s, flight)

    def _hand_on(self, at_s: float, flight: Flight) -> list[Action]:
        """The next of the earlier segments is done."""
        view, tokens = flight.earlier[flight.done]
        self.fleet.close(view, tokens, 0)
        flight.done += 1
        if flight.done < len(flight.earlier):
            return []
        if len(flight.charges) == 2:
            (target, load), rest = flight.charges
            target.lighten(load)
            flight.charges = (rest,)
        return self._leave_pair(at_s, flight) if flight.pair is not None else []

    def _first_token(self, at_s: float, event: told.FirstToken) -> list[Action]:
        flight = self.flights.get(event.request)
        if flight is None or flight.state != RUNNING:
            return []
        actions: list[Action] = []
        while flight.done < len(flight.earlier):
            actions += self._hand_on(at_s, flight)
        if flight.first_s < 0:
            flight.first_s = at_s
        if flight.last_tokens and flight.last is not None:
            self.fleet.prefilled(flight.last, flight.last_tokens)
            flight.last_tokens = 0
        return actions

    def _finished(self, at_s: float, event: told.Finished) -> list[Action]:
        flight = self.flights.get(event.request)
        if flight is None or flight.state != RUNNING:
            return []
        del self.flights[event.request]
        if self._watches:
            self.steward.finished(at_s, flight, event.output_tokens)
        return self._release(at_s, flight)

    def _failed(self, at_s: float, event: told.Failed) -> list[Action]:
        flight = self.flights.get(event.request)
        if flight is None or not concerns(event, flight):
            return []
        gone = event.where if event.kind == "replica" else ""
        actions = self._abandon(flight, gone)
        if gone:
            actions += self._doubt(at_s, gone)
        actions += self._release(at_s, flight)
        request = flight.request
        flight.streamed_tokens = max(flight.streamed_tokens, event.streamed_tokens)
        if flight.streamed_tokens >= request.max_output_tokens:  # the user has it all
            del self.flights[request.id]
            return actions
        flight.prompt_tokens = request.prompt_tokens + flight.streamed_tokens
        problem = verdict(flight, at_s, self._policy)
        if problem is not None:
            return actions + self._refuse(at_s, flight, *problem)
        flight.attempt += 1
        flight.avoid |= {event.where}
        sent = self._dispatch(at_s, flight)
        if not sent and flight.held_s >= 0 and event.kind != "replica":
            # Nothing else is there. A lost replica is waited out; after anything else it may be tried again.
            self._held.remove(flight)
            flight.avoid = frozenset()
            sent = self._dispatch(at_s, flight)
        return actions + sent

    def _cancelled(self, at_s: float, event: told.Cancelled) -> list[Action]:
        flight = self.flights.pop(event.request, None)
        if flight is None:
            return []
        self._held.remove(flight)
        actions = self._abandon(flight) if flight.state == RUNNING else []
        return actions + self._release(at_s, flight)

    def _abandon(self, flight: Flight, lost: str = "") -> list[Action]:
        """Tell the replicas that still work on it, but for one that is gone."""
        there = tuple(name for name in flight.workers() if name != lost and name in self.fleet.views)
        return [Abandon(flight.request.id, there)] if there else []

    def _release(self, at_s: float, flight: Flight) -> list[Action]:
        """Take a request off all counts; what it made room for may be sent."""
        if flight.state == RUNNING and flight.last is not None:
            if flight.earlier:
                for view, tokens in flight.earlier[flight.done :]:
                    self.fleet.close(view, tokens, 0)
                flight.earlier, flight.done = (), 0
            self.fleet.close(flight.last, flight.last_tokens, flight.total_tokens)
            flight.last = None
        if flight.charges:
            for target, load in flight.charges:
                target.lighten(load)
            flight.charges = ()
        return self._leave_pair(at_s, flight) if flight.pair is not None else []

    def _leave_pair(self, at_s: float, flight: Flight) -> list[Action]:
        pair, flight.pair = flight.pair, None
        if pair is None or flight.state == WAITING:
            return []
        pair.in_low -= 1
        return self._admit(at_s, pair)

    def _admit(self, at_s: float, pair: Target) -> list[Action]:
        """Let those in that wait for a pair's low-end replica, or send them elsewhere when it is gone."""
        actions: list[Action] = []
        while pair.waiting and (not pair.usable or pair.in_low < MOST_IN_LOW * len(pair.prefills)):
            flight = self.flights.get(pair.waiting.popleft())
            if flight is None or flight.state != WAITING or flight.pair is not pair:
                continue
            if pair.usable:
                self.router.pair(pair, flight)
                actions.append(flight.run())
            else:
                flight.pair = None
                self._release(at_s, flight)
                actions += self._dispatch(at_s, flight)
        return actions

    def _refuse(self, at_s: float, flight: Flight, reason: RefusalReason, detail: str) -> list[Action]:
        self.flights.pop(flight.request.id, None)
        return [self._refusal(at_s, flight, reason, detail)]

    def _refusal(self, at_s: float, flight: Flight, reason: RefusalReason, detail: str) -> Refuse:
        if self._watches and reason != "unknown_model":
            self.steward.window.refused(at_s, flight.request.model)
        return Refuse(flight.request.id, reason, detail)

    # What replicas, links and caches say.

    def _reported(self, at_s: float, event: told.Reported) -> list[Action]:
        view = self.fleet.views.get(event.replica)
        if view is not None and view.status_at_s <= at_s:
            self.fleet.report(view, event.status, at_s)
            if view.doubted:
                return self._trust(at_s, view)
        return []

    def _link_reported(self, at_s: float, event: told.LinkReported) -> list[Action]:
        self.steward.window.linked(event)
        self.router.linked(event)
        self.caches.linked(event)
        return []

    # The fleet.

    def _ready(self, at_s: float, event: told.ReplicaReady) -> list[Action]:
        view = self.fleet.views.get(event.replica)
        if view is None or view.state != "starting":
            return []
        self.fleet.ready(event.replica)
        return self._changed(at_s, view) + self._let_in(at_s, view)

    def _lost(self, at_s: float, event: told.ReplicaLost) -> list[Action]:
        view = self.fleet.remove(event.replica)
        self.caches.forget(event.replica)
        return self._changed(at_s, view) if view is not None else []

    def _drained(self, at_s: float, event: told.Drained) -> list[Action]:
        view = self.fleet.views.get(event.replica)
        if view is None or view.state != "draining":
            return []
        return self._carry_out(at_s, self.steward.drained(at_s, event.replica))

    def _planned(self, at_s: float, event: told.Planned) -> list[Action]:
        self.table.adopt(event.plan)
        self.router.adopt()
        actions = self._carry_out(at_s, self.steward.adopt(at_s, event.plan))
        for pair in list(self.table.groups.values()):
            actions += self._admit(at_s, pair)
        return actions + self._retry_held(at_s, self._held.models())

    def _tick(self, at_s: float, event: told.Tick) -> list[Action]:
        actions: list[Action] = []
        for name in self._held.expired(at_s):
            flight = self.flights[name]
            deadline_s = flight.request.deadline_s
            if deadline_s is not None and at_s >= deadline_s:
                actions += self._refuse(at_s, flight, "deadline", f"no replica was ready by {deadline_s:g} s")
            else:
                waited = f"no replica was ready for {at_s - flight.held_s:g} s"
                actions += self._refuse(at_s, flight, "no_capacity", waited)
        for name in [name for name, until_s in self._doubts.items() if until_s <= at_s]:
            view = self.fleet.views.get(name)
            actions += self._trust(at_s, view) if view is not None else []
            self._doubts.pop(name, None)
        crowded, self._crowded = sorted(self._crowded), set()
        actions += self._retry_held(at_s, crowded)
        doubtful, self._doubtful = self._doubtful, []
        for name in doubtful:
            again = self.flights.get(name)
            if again is not None and again.held_s >= 0:
                self._held.remove(again)
                again.avoid = frozenset()
                actions += self._dispatch(at_s, again)
        steps, thresholds = self.steward.tick(at_s, self._held.counts())
        for decision in thresholds:
            self.router.rebase(decision.model, decision.tokens)
        return actions + self._carry_out(at_s, steps) + self.caches.tick(at_s)

    def _carry_out(self, at_s: float, actions: Iterable[Action]) -> list[Action]:
        """Do to our own picture of the fleet what is being asked of the real one."""
        done: list[Action] = []
        for action in actions:
            done.append(action)
            view: View | None = None
            match action:
                case Start(member):
                    self.fleet.add(member)
                case Drain(replica):
                    view = self.fleet.views.get(replica)
                    self.fleet.drain(replica)
                case Stop(replica):
                    view = self.fleet.remove(replica)
                    self.caches.forget(replica)
                case Flip(replica, role):
                    view = self.fleet.views.get(replica)
                    self.fleet.flip(replica, role)
            if view is not None:
                done += self._changed(at_s, view)
        self.steward.settled()
        return done

    def _changed(self, at_s: float, view: View) -> list[Action]:
        """A replica came, went or changed: routing follows, and what waited for a pair that is gone moves on."""
        unit = view.member.unit
        group = self.table.groups.get(unit)
        self.table.update(unit, view)
        return self._admit(at_s, group) if group is not None and group.waiting else []

    def _doubt(self, at_s: float, replica: str) -> list[Action]:
        """It failed a request as if it were gone: nobody is sent there until it says something."""
        view = self.fleet.views.get(replica)
        if view is None or view.state != "ready":
            return []
        self._doubts[replica] = at_s + QUARANTINE_S
        self.fleet.doubt(view, True)
        return self._changed(at_s, view)

    def _trust(self, at_s: float, view: View) -> list[Action]:
        self._doubts.pop(view.member.id, None)
        self.fleet.doubt(view, False)
        return self._changed(at_s, view) + self._let_in(at_s, view)

    def _let_in(self, at_s: float, view: View) -> list[Action]:
        """Somebody can be sent to again: those held, but no more than it can take at once."""
        model = view.member.model
        facts = self.table.replica_facts(view)
        actions = self._retry_held(at_s, [model], facts.decode_batch if facts is not None else None)
        if self._held.counts().get(model):
            self._crowded.add(model)
        return actions

    def _retry_held(self, at_s: float, models: Iterable[str], most: int | None = None) -> list[Action]:
        actions: list[Action] = []
        for model in models:
            for name in self._held.take(model, most):
                actions += self._dispatch(at_s, self.flights[name])
        return actions
