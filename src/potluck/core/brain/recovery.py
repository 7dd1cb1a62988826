"""After a failure: again from the tokens already streamed, or a refusal with its reason. Nothing is dropped
silently.

A request that lost its replica, link or transfer is sent again over prompt + streamed tokens, away from what failed
it and from what may be dying with it (losses.py), while it has retries left and somebody still waits for it. Links
that break and replicas that are lost together with others do not count against its retries; a replica that is lost by
itself does, as the request may be what kills it. That it is not where the attempt brought new tokens: it got beyond
where the one before it ended. Requests that nobody can take are held, and refused once they waited `max_wait_s` or
their deadline passed; so are those that wait for their turn on a pair.

A request that fails as if its replica were gone is news for the others as well: nobody is sent there until it
reports again, or for QUARANTINE_S; the same each time that a replica is said to be silent. One that fails again and
again, with no answer completed between, is not believed any more when it only says that it is well, and is tried ever
more seldom. When a replica comes up, it gets no more of those held than it can take at once, as others may come up
beside it; at the next tick all that are left go to whoever is there.
"""

from __future__ import annotations

from typing import Final

from potluck.core.brain.attempt_queries import AttemptQueries
from potluck.core.brain.failure_domains import RecentLosses
from potluck.core.brain.requests import Requests
from potluck.core.routing.link_states import PATIENCE_S
from potluck.core.routing.router import Router
from potluck.core.state import events as told
from potluck.core.state.actions import Action, RefusalReason
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import HELD, RUNNING, RequestState

QUARANTINE_S: Final = 1.0
FREE_STRIKES: Final = 2
MOST_STRIKES: Final = 5
"""Doubts in a row after which a report alone no longer ends one, and after which they last no longer."""
MOST_ATTEMPTS: Final = 16
"""However innocent a request is of its failures, it is not sent more often."""
LONGEST_CALM_S: Final = 2.0
"""While losses go on, those that were lost again and again are held so long at most."""
LOSSES: frozenset[told.FailureKind] = frozenset({"replica", "link"})
"""Failures that say nothing against the request, but for a replica that is lost by itself."""


class Recovery:
    """What is done about requests that failed, and about replicas that failed them."""

    def __init__(self, policy: Policy, fleet: FleetState, requests: Requests, router: Router) -> None:
        self._policy = policy
        self._fleet = fleet
        self._flights = requests
        self._router = router
        self._losses = RecentLosses()
        self._inquiries = AttemptQueries(requests.open)
        self._crowded: set[str] = set()
        """Models of which more are held than the replicas that came up lately could take."""
        self._doubts: dict[str, float] = {}
        """Replicas that may be gone, and until when to think so."""

    def failed(self, at_s: float, event: told.AttemptFailed) -> list[Action]:
        req = self._flights.open.get(event.request)
        if req is None or req.state != RUNNING or event.attempt != req.attempt:
            return []
        kind, where = event.kind, event.where
        if req.recalled and kind == "timeout" and not where:  # it was we who stopped it
            kind, where = "link", req.recalled
        req.recalled = ""
        lost = kind == "replica"
        actions = self._flights.abandon(req, where if lost else "")
        if lost:
            actions += self._doubt(at_s, where)
        actions += self._flights.release(at_s, req)
        request = req.request
        advanced = event.streamed_tokens > req.streamed_tokens
        req.streamed_tokens = max(req.streamed_tokens, event.streamed_tokens)
        if req.streamed_tokens >= request.max_output_tokens:  # the user has it all
            del self._flights.open[request.id]
            self._flights.end(request.id)
            return actions
        req.prompt_tokens = request.prompt_tokens + req.streamed_tokens
        req.attempt += 1 + req.twins
        req.twins = 0
        self._blame(at_s, req, kind, where, advanced)
        problem = verdict(req, at_s, self._policy)
        if problem is not None:
            return actions + self._flights.refuse(at_s, req, *problem)
        return actions + self._again(at_s, req, kind)

    def one_of_two(
        self, at_s: float, event: told.AttemptFailed, lost: RequestState, left: RequestState
    ) -> list[Action]:
        """One of two attempts is over, and the other goes on."""
        kind, where = event.kind, event.where
        actions = self._doubt(at_s, where) if kind == "replica" else []
        if where:
            self._blame(at_s, left, kind, where, advanced=False)
        return actions + self._flights.release(at_s, lost)

    def _blame(
        self, at_s: float, req: RequestState, kind: told.FailureKind, where: str, advanced: bool
    ) -> None:
        lost = kind == "replica"
        req.failed_by |= {where}
        req.losses += lost
        if lost:
            req.lost_on |= {where}
        killed = lost and not advanced and self._losses.alone(at_s, where, req.lost_on)
        if killed or kind not in LOSSES:
            req.failures += 1

    def _again(self, at_s: float, req: RequestState, kind: told.FailureKind) -> list[Action]:
        """Send a request that failed: away from what failed it, and from what may be dying.

        With nobody else there, one whose replica was lost for the first time goes wherever somebody is; after that,
        or when its link broke, it is held until losses cease. After any other failure the same may be tried again.
        """
        req.avoid = req.failed_by
        if kind in LOSSES:
            req.avoid |= self._losses.suspects(at_s)
        sent = self._flights.dispatch(at_s, req)
        if sent or req.state != HELD or (kind in LOSSES and req.losses != 1):
            return sent
        self._flights.held.remove(req)
        req.avoid = req.failed_by if kind in LOSSES else frozenset()
        return self._flights.dispatch(at_s, req)

    def linked(self, at_s: float, event: told.LinkReported) -> list[Action]:
        """A link has become slow: what is on it goes elsewhere, once, if it is done clearly sooner there.

        It may be over the link by now, and its answer on the way to its user. So it is abandoned and asked about:
        only when its driver has stopped it and said where the user is, it is sent again. That is no failure.
        """
        actions: list[Action] = []
        if self._policy.balance != "learned" or self._policy.retries < 1:
            return actions
        before: dict[str, int] = {}
        for name, over_s in self._router.links.waits_s(event):
            req = self._flights.open[name]
            model = req.request.model
            again_s = self._router.detours.again_s(req, before.get(model, 0))
            if req.attempt or req.twins or req.recalled or verdict(req, at_s, self._policy):
                continue
            if over_s >= again_s + PATIENCE_S:
                req.recalled = req.link
                before[model] = before.get(model, 0) + req.prompt_tokens
                actions += [*self._flights.abandon(req), self._inquiries.ask(at_s, req)]
        return actions

    def underway(self, at_s: float, event: told.AttemptRunning) -> list[Action]:
        req = self._flights.open.get(event.request)
        if req is not None and req.state == RUNNING and event.attempt == req.attempt:
            self._inquiries.underway(at_s, req)
        return []

    def gone(self, at_s: float, view: ReplicaState, notice_s: float | None) -> list[Action]:
        """A replica was lost, with so much notice, or stopped (None): what ran there is to be heard of soon."""
        if notice_s is not None:
            self._losses.note(at_s, view.member)
        self._inquiries.gone(at_s + (notice_s or 0.0), view)
        return self._flights.changed(at_s, view)

    def sizes(self) -> dict[str, int]:
        """What is remembered, in entries."""
        return {
            "doubts": len(self._doubts),
            "crowded": len(self._crowded),
            "inquiries": len(self._inquiries),
        }

    def tick(self, at_s: float) -> list[Action]:
        """Doubts and fears that are over; questions after those that went silent."""
        actions: list[Action] = []
        for name in [name for name, until_s in self._doubts.items() if until_s <= at_s]:
            view = self._fleet.views.get(name)
            actions += self.trust(at_s, view) if view is not None else []
            self._doubts.pop(name, None)
        crowded, self._crowded = sorted(self._crowded), set()
        actions += self._flights.retry_held(at_s, crowded)
        return actions + self._calm(at_s) + self._inquire(at_s)

    def _calm(self, at_s: float) -> list[Action]:
        """Once losses cease, those held for fear of them go wherever somebody is."""
        actions: list[Action] = []
        doubtful, self._flights.doubtful = self._flights.doubtful, {}
        for name in doubtful:
            req = self._flights.open.get(name)
            if req is None or req.state != HELD:
                continue
            if not self._losses.quiet(at_s) and at_s - req.held_s < LONGEST_CALM_S:
                self._flights.doubtful[name] = None
                continue
            self._flights.held.remove(req)
            req.avoid = req.failed_by = frozenset()
            actions += self._flights.dispatch(at_s, req)
        return actions

    def _inquire(self, at_s: float) -> list[Action]:
        """Ask after those that went silent; give up those of which nobody knows anything."""
        actions, hopeless = self._inquiries.tick(at_s)
        for req in hopeless:
            actions += self._flights.abandon(req) + self._flights.release(at_s, req)
            actions += self._flights.refuse(at_s, req, "lost", "nobody knows how much of it reached the user")
        return actions

    def _doubt(self, at_s: float, replica: str) -> list[Action]:
        """It failed a request as if it were gone: nobody is sent there until it says something."""
        view = self._fleet.views.get(replica)
        if view is None:
            return []
        self._losses.note(at_s, view.member)
        if view.state != "ready":
            return []
        if not view.doubted:  # Others that it fails at the same time say nothing new.
            self._fleet.doubt(view, True)
            strikes = min(view.strikes, MOST_STRIKES)
            self._doubts[replica] = at_s + QUARANTINE_S * (1 << (strikes - 1))
        return self._flights.changed(at_s, view)

    def silent(self, at_s: float, event: told.ReplicaSilent) -> list[Action]:
        """A replica does not answer: nobody is sent there for now. What it has fails by itself."""
        view = self._fleet.views.get(event.replica)
        if view is None or view.state != "ready":
            return []
        self._losses.silent(at_s, view.member)
        until_s = max(self._doubts.get(event.replica, at_s), at_s + QUARANTINE_S)
        known, self._doubts[event.replica] = view.doubted, until_s
        self._fleet.doubt(view, True, strike=False)
        return [] if known else self._flights.changed(at_s, view)

    def reported(self, at_s: float, view: ReplicaState) -> list[Action]:
        """A replica that is doubted says that it is well."""
        self._losses.reported(at_s, view.member.id)
        if view.strikes > FREE_STRIKES and at_s < self._doubts.get(view.member.id, at_s):
            return []
        return self.trust(at_s, view)

    def trust(self, at_s: float, view: ReplicaState) -> list[Action]:
        self._doubts.pop(view.member.id, None)
        self._losses.mend(view.member.id)
        self._fleet.doubt(view, False)
        return self._flights.changed(at_s, view) + self.let_in(at_s, view)

    def let_in(self, at_s: float, view: ReplicaState) -> list[Action]:
        """Somebody can be sent to again: those held, but no more than it can take at once."""
        model = view.member.model
        facts = view.facts
        actions = self._flights.retry_held(at_s, [model], facts.decode_batch if facts is not None else None)
        if self._flights.held.counts().get(model):
            self._crowded.add(model)
        return actions


def verdict(req: RequestState, at_s: float, policy: Policy) -> tuple[RefusalReason, str] | None:
    """Why a request that failed is not sent again; None when it is."""
    deadline_s = req.request.deadline_s
    if deadline_s is not None and at_s >= deadline_s:
        return "deadline", f"failed at {at_s:g} s, after the deadline at {deadline_s:g} s"
    if req.failures > policy.retries:
        return "retries", f"failed {req.failures} times; {policy.retries} retries are allowed"
    if req.attempt >= MOST_ATTEMPTS:
        return "retries", f"was sent {req.attempt} times in vain"
    return None
