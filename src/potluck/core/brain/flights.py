"""Requests under way: accepted, held, sent, handed on, until each ends once.

What becomes of those that fail is in `recovery.py`, what happens to replicas and links in `brain.py`. Nobody else
changes a `Flight`, but for the router that sends it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from potluck.core.admission.admission import Admission, Refusal
from potluck.core.admission.lobby import Lobby
from potluck.core.admission.room import crowded
from potluck.core.brain import events as told
from potluck.core.brain.actions import Abandon, Action, RefusalReason, Refuse
from potluck.core.brain.caches import Caches
from potluck.core.brain.facts import Facts
from potluck.core.brain.fleet import Fleet, View
from potluck.core.brain.flight import RUNNING, WAITING, Flight
from potluck.core.brain.held import Held
from potluck.core.brain.policy import Policy
from potluck.core.routing.affinity import Affinity
from potluck.core.routing.answers import SENT, Answer
from potluck.core.routing.router import Router
from potluck.core.routing.speeds import Speeds
from potluck.core.routing.split import MOST_IN_LOW
from potluck.core.routing.table import ModelTable, Table
from potluck.core.routing.targets import Target
from potluck.core.scale.steward import Steward

ENDED: Final = 1 << 12
"""Whoever tells of a request again does so within seconds."""


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
        admission: Admission,
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
        self._admission = admission
        self._room = admission.room
        self._between = admission.room.between
        self._lobby = Lobby(admission, router, table, self.run, self._turned_away, self._hold)
        self._backlogs = admission.backlogs
        self._weights = admission.weights
        self._bounded = policy.admission
        self._watches = steward.watches
        self.open: dict[str, Flight] = {}
        """By the request's id."""
        self.held = Held(self.open)
        self._ended: set[str] = set()
        self._ended_before: set[str] = set()
        """Of those that ended lately, so that none begins again: at least the last ENDED, at most twice as many."""
        self.doubtful: dict[str, None] = {}
        """Held although replicas were ready, because these failed them or may be dying."""

    def arrived(self, at_s: float, event: told.Arrived) -> list[Action]:
        request = event.request
        name = request.id
        if self.knows(name):
            return []
        flight = Flight(request)
        table = self._table.models.get(request.model)
        if table is None and request.model not in self._facts.models:
            what = f"no model {request.model!r} is served here"
            return [self._refusal(at_s, flight, "unknown_model", what)]
        if request.request_class not in self._admission.classes:
            known = ", ".join(self._admission.classes)
            what = f"no class {request.request_class!r} is known here; classes are {known}"
            return [self._refusal(at_s, flight, "unknown_class", what)]
        if request.blocks:
            self._caches.asked_for(at_s, request)
        if self._steward.naps:
            self._steward.asked(at_s, request.model)
        if self._watches:
            cached_tokens = self._affinity.most_cached(flight) if request.blocks else 0
            self._steward.window.arrived(at_s, request, cached_tokens)
        if table is not None and flight.total_tokens > table.limit_tokens:
            return [self._refusal(at_s, flight, "too_long", table.too_long(flight))]
        if request.deadline_s is not None and at_s >= request.deadline_s:
            late = f"came after its deadline at {request.deadline_s:g} s"
            return [self._refusal(at_s, flight, "deadline", late)]
        self.open[name] = flight
        if request.deadline_s is not None:
            self._admission.watch(flight)
        if self._weights:
            flight.weight = self._weights.get(request.tenant, 1.0)
        if self._bounded and (self._room.several or request.tenant is not self._room.tenant):
            self._between.asks(at_s, flight)
        return self._send(at_s, flight, table)

    def knows(self, request: str) -> bool:
        """Whether it is open, or ended lately."""
        return request in self.open or request in self._ended or request in self._ended_before

    def dispatch(self, at_s: float, flight: Flight) -> list[Action]:
        """Send a request that was held or failed; a new plan may have taken those away that could hold it."""
        table = self._table.models.get(flight.request.model)
        if table is not None and flight.total_tokens > table.limit_tokens:
            return self.refuse(at_s, flight, "too_long", table.too_long(flight))
        return self._send(at_s, flight, table)

    def _send(self, at_s: float, flight: Flight, table: ModelTable | None) -> list[Action]:
        """Send a request, or hold it."""
        if table is not None:
            if self._backlogs and self._lobby.behind(flight, table):
                return self._lobby.line_up(at_s, flight, table)
            if self._room.several:
                self._between.now_s = at_s
            answer = self._router.send(flight, table)
            if answer is SENT:
                return [self.run(at_s, flight)]
            if answer is Answer.FULL:
                return self._lobby.line_up(at_s, flight, table)
            if answer is Answer.WAITS:
                self.held.wait(at_s, flight, self._policy)
                return []
        self.held.add(at_s, flight, self._policy)
        if flight.avoid:
            self.doubtful[flight.request.id] = None
        return []

    def run(self, at_s: float, flight: Flight) -> Action:
        flight.held_s = -1.0
        flight.heard_s = at_s
        if flight.earlier:
            self._speeds.began(at_s, flight, flight.earlier[0][0])
        elif flight.last is not None:
            flight.sent = (at_s, flight.last.done_s, flight.last.done_prompts)
        if self._room.several:
            self._between.sent(flight)
        return flight.run()

    def _turned_away(self, at_s: float, each: Refusal) -> list[Action]:
        self.open.pop(each.flight.request.id, None)
        refusal = self._refusal(at_s, each.flight, each.reason, each.detail)
        return [refusal._replace(retry_after_s=each.retry_after_s)]

    def _hold(self, at_s: float, flight: Flight) -> None:
        hold = self.held.wait if flight.state == WAITING else self.held.add
        hold(at_s, flight, self._policy)

    def segment_done(self, at_s: float, event: told.SegmentDone) -> list[Action]:
        flight = self.open.get(event.request)
        if flight is None or flight.state != RUNNING or event.attempt != flight.attempt:
            return []
        actions: list[Action] = []
        while flight.done <= event.segment and flight.done < len(flight.earlier):
            actions += self._hand_on(at_s, flight)
        return actions

    def computed(self, at_s: float, event: told.Computed) -> list[Action]:
        """A replica is done with its part of a prompt, and has room for the next while KV is on its way."""
        flight = self.open.get(event.request)
        if flight is None or flight.state != RUNNING or event.attempt != flight.attempt:
            return []
        if event.segment != flight.done or event.segment >= len(flight.earlier) or flight.leaves_region():
            return []
        view, tokens = flight.computed()
        if tokens:
            self._fleet.prefilled(view, tokens)
            if flight.watched_s >= 0:
                self._speeds.handed(at_s, flight, view)
        leaves = flight.pair is not None and flight.done == len(flight.earlier) - 1
        actions = self._leave_pair(at_s, flight) if leaves else []
        return actions + self._lobby.freed(at_s, view) if self._backlogs else actions

    def _hand_on(self, at_s: float, flight: Flight) -> list[Action]:
        """The next of the earlier segments is done."""
        view, tokens = flight.earlier[flight.done]
        if tokens:
            self._fleet.handed(view, tokens)
        else:
            self._fleet.close(view, 0, 0)
        flight.done += 1
        if flight.long or flight.light_tokens:
            self._between.computed(flight)
        going_on = flight.done < len(flight.earlier)
        onto = flight.earlier[flight.done][0] if going_on else flight.last
        if flight.link or flight.cargo:
            self._router.links.handed(flight, going_on)
        if flight.watched_s >= 0 and onto is not None:
            self._speeds.handed(at_s, flight, view, view.member.region == onto.member.region)
        actions: list[Action] = []
        if going_on:
            self._speeds.began(at_s, flight, flight.earlier[flight.done][0])
        else:
            self._prompt_done(flight)
            actions = self._leave_pair(at_s, flight) if flight.pair is not None else []
        return actions + self._lobby.freed(at_s, view) if self._backlogs else actions

    def _prompt_done(self, flight: Flight) -> None:
        """What balances by load count for the prompt is done."""
        if flight.yielding is not None:
            self._router.timely.caught_up(flight)
        if len(flight.charges) == 2:
            (target, load), rest = flight.charges
            target.lighten(load)
            flight.charges = (rest,)

    def first_token(self, at_s: float, event: told.FirstToken) -> list[Action]:
        flight = self.open.get(event.request)
        if flight is None or flight.state != RUNNING or event.attempt != flight.attempt:
            return []
        actions: list[Action] = []
        while flight.done < len(flight.earlier):
            actions += self._hand_on(at_s, flight)
        if flight.first_s < 0:
            flight.first_s = at_s
        if flight.last is not None:
            if flight.last_tokens:
                self._fleet.prefilled(flight.last, flight.last_tokens)
                flight.last_tokens = 0
                self._prompt_done(flight)
                if flight.sent[0] >= 0:
                    self._speeds.computed(at_s, flight, flight.last)
            self._speeds.began(at_s, flight, flight.last)
            if flight.long or flight.light_tokens:
                self._between.computed(flight)
            if self._backlogs:
                actions += self._lobby.freed(at_s, flight.last)
        return actions

    def finished(self, at_s: float, event: told.Finished) -> list[Action]:
        flight = self.open.get(event.request)
        if flight is None or flight.state != RUNNING or event.attempt != flight.attempt:
            return []
        del self.open[event.request]
        self._ended.add(event.request)  # `end`, written out
        if len(self._ended) >= ENDED:
            self._ended_before, self._ended = self._ended, set()
        last = flight.last
        if last is not None and last.strikes:
            self._fleet.answered_again(last)
        if flight.mixed:
            self._between.apart.answered(flight, event.output_tokens)
        if last is not None and flight.first_s >= 0 and (crowded(last) or flight.heavy):
            self._room.ended(at_s, flight, last, event.output_tokens)
        if self._watches:
            self._steward.finished(at_s, flight, event.output_tokens)
        if flight.watched_s >= 0:
            self._speeds.ended(at_s, flight, event.output_tokens)
        elif flight.first_s < 0:
            self._speeds.came_whole(flight, event.output_tokens)
        return self.release(at_s, flight)

    def cancelled(self, at_s: float, event: told.Cancelled) -> list[Action]:
        """The user went away, perhaps before word of the request came; then it is not begun at all."""
        self.end(event.request)
        flight = self.open.pop(event.request, None)
        if flight is None:
            return []
        self.held.remove(flight)
        self._admission.remove(flight)
        return self.abandon(flight) + self.release(at_s, flight)

    def end(self, request: str) -> None:
        """It is over, and does not begin again."""
        self._ended.add(request)
        if len(self._ended) >= ENDED:
            self._ended_before, self._ended = self._ended, set()

    def abandon(self, flight: Flight, lost: str = "") -> list[Action]:
        """Tell the replicas that still work on it, but for one that is gone."""
        there = tuple(name for name in flight.workers() if name != lost and name in self._fleet.views)
        return [Abandon(flight.request.id, there)] if there else []

    def release(self, at_s: float, flight: Flight) -> list[Action]:
        """Take a request off all counts; what it made room for may be sent."""
        last: View | None = None
        if flight.state == RUNNING and flight.last is not None:
            if flight.earlier:
                for view, tokens in flight.earlier[flight.done :]:
                    self._fleet.close(view, tokens, 0)
                flight.earlier, flight.done = (), 0
            self._fleet.close(flight.last, flight.last_tokens, flight.total_tokens)
            last, flight.last = flight.last, None
            if flight.mixed:
                self._between.left(flight)
        flight.watched_s = -1.0
        if flight.yielding is not None:
            self._router.timely.caught_up(flight)
        if flight.link or flight.cargo:
            self._router.links.over(flight)
        if flight.charges:
            for target, load in flight.charges:
                target.lighten(load)
            flight.charges = ()
        actions = self._leave_pair(at_s, flight) if flight.pair is not None else []
        if self._backlogs and last is not None:
            actions += self._lobby.freed(at_s, last)
        return actions

    def _leave_pair(self, at_s: float, flight: Flight) -> list[Action]:
        pair, flight.pair = flight.pair, None
        if pair is None:
            return []
        if flight.state == WAITING:
            pair.waiting.remove(flight.request.id)
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
                actions.append(self.run(at_s, flight))
            else:
                flight.pair = None
                self.release(at_s, flight)
                actions += self.dispatch(at_s, flight)
        return actions

    def refuse(self, at_s: float, flight: Flight, reason: RefusalReason, detail: str) -> list[Action]:
        self.open.pop(flight.request.id, None)
        return [self._refusal(at_s, flight, reason, detail)]

    def _refusal(self, at_s: float, flight: Flight, reason: RefusalReason, detail: str) -> Refuse:
        self.end(flight.request.id)
        if self._watches and reason != "unknown_model":
            self._steward.window.refused(at_s, flight.request.model)
        return Refuse(flight.request.id, reason, detail)

    def sizes(self) -> dict[str, int]:
        """What is remembered, in entries."""
        open_, held, doubtful = len(self.open), len(self.held), len(self.doubtful)
        ended = len(self._ended) + len(self._ended_before)
        return {"open": open_, "held": held, "doubtful": doubtful, "ended": ended}

    # When the fleet changes.

    def changed(self, at_s: float, view: View) -> list[Action]:
        """A replica came, went or changed: routing follows, and what waited for a pair that is gone moves on."""
        unit = view.member.unit
        group = self._table.groups.get(unit)
        self._table.update(unit, view)
        if self._bounded:
            self._fleet.bound(view, self._room.easiness(view))
        actions = self.admit(at_s, group) if group is not None and group.waiting else []
        return actions + self._lobby.freed(at_s, view) if self._backlogs else actions

    def planned(self, at_s: float) -> list[Action]:
        """A plan was adopted: whoever waits is tried again."""
        actions: list[Action] = []
        for pair in list(self._table.groups.values()):
            actions += self.admit(at_s, pair)
        actions += self.retry_held(at_s, self.held.models())
        return actions + self._lobby.retry(at_s)

    def tick(self, at_s: float) -> list[Action]:
        """Refusals of those that waited too long."""
        actions: list[Action] = []
        for flight in self.held.expired(at_s):
            deadline_s, waited_s = flight.request.deadline_s, at_s - flight.held_s
            self._admission.remove(flight)
            actions += self.release(at_s, flight)
            if deadline_s is not None and at_s >= deadline_s:
                actions += self.refuse(at_s, flight, "deadline", f"no replica was ready by {deadline_s:g} s")
            else:
                waited = f"no replica was ready for {waited_s:g} s"
                actions += self.refuse(at_s, flight, "no_capacity", waited)
        for flight in self._admission.overdue(at_s, self.open):
            actions += self.abandon(flight) + self.release(at_s, flight)
            late = f"still ran at its deadline at {flight.request.deadline_s:g} s"
            actions += self.refuse(at_s, flight, "deadline", late)
        return actions + self._lobby.tick(at_s)

    def retry_held(self, at_s: float, models: Iterable[str], most: int | None = None) -> list[Action]:
        actions: list[Action] = []
        for model in models:
            for name in self.held.take(model, most):
                actions += self.dispatch(at_s, self.open[name])
        return actions
