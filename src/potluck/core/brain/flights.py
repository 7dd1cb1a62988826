"""Requests under way: accepted, held, sent, handed on, failed and sent again, until each ends once.

`Flights` is the Brain's half that deals with requests; it shares fleet, table and router with the other (brain.py),
which deals with what happens to replicas and links. Nobody else changes a `Flight`.
"""

from __future__ import annotations

from collections.abc import Iterable

from potluck.core.brain import events as told
from potluck.core.brain.actions import Abandon, Action, RefusalReason, Refuse
from potluck.core.brain.caches import Caches
from potluck.core.brain.facts import Facts
from potluck.core.brain.fleet import Fleet, View
from potluck.core.brain.flight import RUNNING, WAITING, Flight
from potluck.core.brain.policy import Policy
from potluck.core.brain.recovery import QUARANTINE_S, Held, concerns, verdict
from potluck.core.routing.affinity import Affinity
from potluck.core.routing.router import SENT, Answer, Router
from potluck.core.routing.speeds import Speeds
from potluck.core.routing.split import MOST_IN_LOW
from potluck.core.routing.table import ModelTable, Table
from potluck.core.routing.targets import Target
from potluck.core.scale.steward import Steward


class Flights:
    """All requests that were accepted and have not ended."""

    def __init__(
        self,
        facts: Facts,
        policy: Policy,
        fleet: Fleet,
        table: Table,
        caches: Caches,
        affinity: Affinity,
        router: Router,
        steward: Steward,
        speeds: Speeds,
    ) -> None:
        self._facts = facts
        self._policy = policy
        self._fleet = fleet
        self._table = table
        self._caches = caches
        self._affinity = affinity
        self._router = router
        self._steward = steward
        self._speeds = speeds
        self._learns = policy.balance == "learned"
        self._watches = steward.watches
        self.open: dict[str, Flight] = {}
        """By the request's id."""
        self.held = Held()
        self._crowded: set[str] = set()
        """Models of which more are held than the replicas that came up lately could take."""
        self._doubts: dict[str, float] = {}
        """Replicas that may be gone, and until when to think so."""
        self._doubtful: list[str] = []
        """Held although a replica was ready, because that one had just failed them."""

    def arrived(self, at_s: float, event: told.Arrived) -> list[Action]:
        request = event.request
        if request.id in self.open:
            return []
        flight = Flight(request)
        table = self._table.models.get(request.model)
        if table is None and request.model not in self._facts.models:
            return [
                self._refusal(at_s, flight, "unknown_model", f"no model {request.model!r} is served here")
            ]
        if request.blocks:
            self._caches.asked_for(at_s, request)
        if self._watches:
            cached_tokens = self._affinity.most_cached(flight) if request.blocks else 0
            self._steward.window.arrived(at_s, request, cached_tokens)
        if table is not None and flight.total_tokens > table.limit_tokens:
            return [self._refusal(at_s, flight, "too_long", table.too_long(flight))]
        if request.deadline_s is not None and at_s >= request.deadline_s:
            late = f"came after its deadline at {request.deadline_s:g} s"
            return [self._refusal(at_s, flight, "deadline", late)]
        self.open[request.id] = flight
        return self._send(at_s, flight, table)

    def _dispatch(self, at_s: float, flight: Flight) -> list[Action]:
        """Send a request that was held or failed; a new plan may have taken those away that could hold it."""
        table = self._table.models.get(flight.request.model)
        if table is not None and flight.total_tokens > table.limit_tokens:
            return self._refuse(at_s, flight, "too_long", table.too_long(flight))
        return self._send(at_s, flight, table)

    def _send(self, at_s: float, flight: Flight, table: ModelTable | None) -> list[Action]:
        """Send a request, or hold it."""
        if table is not None:
            answer = self._router.send(flight, table)
            if answer is SENT:
                flight.held_s = -1.0
                if flight.earlier:
                    self._speeds.began(at_s, flight, flight.earlier[0][0])
                return [flight.run()]
            if answer is Answer.WAITS:
                flight.held_s = -1.0
                return []
        self.held.add(at_s, flight, self._policy)
        if flight.avoid:
            self._doubtful.append(flight.request.id)
        return []

    def segment_done(self, at_s: float, event: told.SegmentDone) -> list[Action]:
        flight = self.open.get(event.request)
        if flight is None or flight.state != RUNNING or event.segment != flight.done:
            return []
        if flight.done >= len(flight.earlier):
            return []
        return self._hand_on(at_s, flight)

    def _hand_on(self, at_s: float, flight: Flight) -> list[Action]:
        """The next of the earlier segments is done."""
        view, tokens = flight.earlier[flight.done]
        self._fleet.close(view, tokens, 0)
        flight.done += 1
        going_on = flight.done < len(flight.earlier)
        onto = flight.earlier[flight.done][0] if going_on else flight.last
        if tokens and onto is not None:
            self._speeds.computed(at_s, flight, view, tokens)
            self._speeds.handed(at_s, flight, view, onto)
        if going_on:
            self._speeds.began(at_s, flight, flight.earlier[flight.done][0])
            return []
        self._prompt_done(flight)
        return self._leave_pair(at_s, flight) if flight.pair is not None else []

    def _prompt_done(self, flight: Flight) -> None:
        """What balances by load count for the prompt is done."""
        if len(flight.charges) == 2:
            (target, load), rest = flight.charges
            if self._learns:
                target.timed()
            target.lighten(load)
            flight.charges = (rest,)

    def first_token(self, at_s: float, event: told.FirstToken) -> list[Action]:
        flight = self.open.get(event.request)
        if flight is None or flight.state != RUNNING:
            return []
        actions: list[Action] = []
        while flight.done < len(flight.earlier):
            actions += self._hand_on(at_s, flight)
        if flight.first_s < 0:
            flight.first_s = at_s
        if flight.last is not None:
            if flight.last_tokens:
                self._fleet.prefilled(flight.last, flight.last_tokens)
                self._speeds.computed(at_s, flight, flight.last, flight.last_tokens)
                flight.last_tokens = 0
                self._prompt_done(flight)
            self._speeds.began(at_s, flight, flight.last)
        return actions

    def finished(self, at_s: float, event: told.Finished) -> list[Action]:
        flight = self.open.get(event.request)
        if flight is None or flight.state != RUNNING:
            return []
        del self.open[event.request]
        if self._watches:
            self._steward.finished(at_s, flight, event.output_tokens)
        self._speeds.ended(at_s, flight, event.output_tokens)
        return self._release(at_s, flight)

    def failed(self, at_s: float, event: told.Failed) -> list[Action]:
        flight = self.open.get(event.request)
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
            del self.open[request.id]
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
            self.held.remove(flight)
            flight.avoid = frozenset()
            sent = self._dispatch(at_s, flight)
        return actions + sent

    def cancelled(self, at_s: float, event: told.Cancelled) -> list[Action]:
        flight = self.open.pop(event.request, None)
        if flight is None:
            return []
        self.held.remove(flight)
        actions = self._abandon(flight) if flight.state == RUNNING else []
        return actions + self._release(at_s, flight)

    def _abandon(self, flight: Flight, lost: str = "") -> list[Action]:
        """Tell the replicas that still work on it, but for one that is gone."""
        there = tuple(name for name in flight.workers() if name != lost and name in self._fleet.views)
        return [Abandon(flight.request.id, there)] if there else []

    def _release(self, at_s: float, flight: Flight) -> list[Action]:
        """Take a request off all counts; what it made room for may be sent."""
        if flight.state == RUNNING and flight.last is not None:
            if flight.earlier:
                for view, tokens in flight.earlier[flight.done :]:
                    self._fleet.close(view, tokens, 0)
                flight.earlier, flight.done = (), 0
            self._fleet.close(flight.last, flight.last_tokens, flight.total_tokens)
            flight.last = None
        flight.watched_s = -1.0
        if flight.charges:
            for target, load in flight.charges:
                if self._learns:
                    target.timed()
                target.lighten(load)
            flight.charges = ()
        return self._leave_pair(at_s, flight) if flight.pair is not None else []

    def _leave_pair(self, at_s: float, flight: Flight) -> list[Action]:
        pair, flight.pair = flight.pair, None
        if pair is None or flight.state == WAITING:
            return []
        pair.in_low -= 1
        return self.admit(at_s, pair)

    def admit(self, at_s: float, pair: Target) -> list[Action]:
        """Let those in that wait for a pair's low-end replica, or send them elsewhere when it is gone."""
        actions: list[Action] = []
        while pair.waiting and (not pair.usable or pair.in_low < MOST_IN_LOW * len(pair.prefills)):
            flight = self.open.get(pair.waiting.popleft())
            if flight is None or flight.state != WAITING or flight.pair is not pair:
                continue
            if pair.usable:
                self._router.pair(pair, flight)
                if flight.earlier:
                    self._speeds.began(at_s, flight, flight.earlier[0][0])
                actions.append(flight.run())
            else:
                flight.pair = None
                self._release(at_s, flight)
                actions += self._dispatch(at_s, flight)
        return actions

    def _refuse(self, at_s: float, flight: Flight, reason: RefusalReason, detail: str) -> list[Action]:
        self.open.pop(flight.request.id, None)
        return [self._refusal(at_s, flight, reason, detail)]

    def _refusal(self, at_s: float, flight: Flight, reason: RefusalReason, detail: str) -> Refuse:
        if self._watches and reason != "unknown_model":
            self._steward.window.refused(at_s, flight.request.model)
        return Refuse(flight.request.id, reason, detail)

    # When the fleet changes.

    def changed(self, at_s: float, view: View) -> list[Action]:
        """A replica came, went or changed: routing follows, and what waited for a pair that is gone moves on."""
        unit = view.member.unit
        group = self._table.groups.get(unit)
        self._table.update(unit, view)
        return self.admit(at_s, group) if group is not None and group.waiting else []

    def planned(self, at_s: float) -> list[Action]:
        """A plan was adopted: whoever waits is tried again."""
        actions: list[Action] = []
        for pair in list(self._table.groups.values()):
            actions += self.admit(at_s, pair)
        return actions + self.retry_held(at_s, self.held.models())

    def tick(self, at_s: float) -> list[Action]:
        """Refusals of those that waited too long; others may have got a chance meanwhile."""
        actions: list[Action] = []
        for name in self.held.expired(at_s):
            flight = self.open[name]
            deadline_s = flight.request.deadline_s
            if deadline_s is not None and at_s >= deadline_s:
                actions += self._refuse(at_s, flight, "deadline", f"no replica was ready by {deadline_s:g} s")
            else:
                waited = f"no replica was ready for {at_s - flight.held_s:g} s"
                actions += self._refuse(at_s, flight, "no_capacity", waited)
        for name in [name for name, until_s in self._doubts.items() if until_s <= at_s]:
            view = self._fleet.views.get(name)
            actions += self.trust(at_s, view) if view is not None else []
            self._doubts.pop(name, None)
        crowded, self._crowded = sorted(self._crowded), set()
        actions += self.retry_held(at_s, crowded)
        doubtful, self._doubtful = self._doubtful, []
        for name in doubtful:
            again = self.open.get(name)
            if again is not None and again.held_s >= 0:
                self.held.remove(again)
                again.avoid = frozenset()
                actions += self._dispatch(at_s, again)
        return actions

    def _doubt(self, at_s: float, replica: str) -> list[Action]:
        """It failed a request as if it were gone: nobody is sent there until it says something."""
        view = self._fleet.views.get(replica)
        if view is None or view.state != "ready":
            return []
        self._doubts[replica] = at_s + QUARANTINE_S
        self._fleet.doubt(view, True)
        return self.changed(at_s, view)

    def trust(self, at_s: float, view: View) -> list[Action]:
        self._doubts.pop(view.member.id, None)
        self._fleet.doubt(view, False)
        return self.changed(at_s, view) + self.let_in(at_s, view)

    def let_in(self, at_s: float, view: View) -> list[Action]:
        """Somebody can be sent to again: those held, but no more than it can take at once."""
        model = view.member.model
        facts = view.facts
        actions = self.retry_held(at_s, [model], facts.decode_batch if facts is not None else None)
        if self.held.counts().get(model):
            self._crowded.add(model)
        return actions

    def retry_held(self, at_s: float, models: Iterable[str], most: int | None = None) -> list[Action]:
        actions: list[Action] = []
        for model in models:
            for name in self.held.take(model, most):
                actions += self._dispatch(at_s, self.open[name])
        return actions
