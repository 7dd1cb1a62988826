"""Recovery after failures: requests are retried from the tokens already streamed, or refused with a reason.

A retry computes the prompt plus the streamed tokens, away from what failed it and from what may be failing with it.
Only a replica lost by itself counts against its retries, unless the attempt had produced new tokens: the request may
be what crashes it. A replica that fails a request as if it were gone, or is silent, gets no requests until it reports
again, or for QUARANTINE_S, growing with each repetition. A new replica gets no more held requests than it can take.

A request with a client's grammar that lost its decode replica before any token is refused at once: compiling the
grammar may have exhausted the memory of that replica's host, and would do so on the next one."""

from __future__ import annotations

from typing import Final

from potluck.core.brain.requests import BrainState, Requests
from potluck.core.routing.link_states import MIN_RECALL_SAVING_S
from potluck.core.state import events as told
from potluck.core.state.actions import Action, QueryAttempt, RefusalReason
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import HELD, RUNNING, RequestState
from potluck.core.values.plan import ReplicaSpec

QUARANTINE_S: Final = 1.0
FREE_STRIKES: Final = 2
MAX_STRIKES: Final = 5
"""Consecutive suspicions after which a report alone no longer ends one, and after which they last no longer."""
MAX_ATTEMPTS: Final = 16  # Limit of attempts, whatever caused the failures.
MAX_HOLD_DURING_LOSSES_S: Final = 2.0
"""The longest hold of a request that was lost repeatedly, while losses go on."""
LOSS_KINDS: frozenset[told.FailureKind] = frozenset({"replica", "link"})
"""Failures that do not count against the request, unless a replica is lost by itself."""


GRAMMAR_FAILURES: frozenset[told.FailureKind] = frozenset({"replica", "timeout"})
GRAMMAR_SUSPECTED: Final = (
    "its engine was lost before the first token, perhaps by compiling the request's grammar (response_format, tools "
    "or another structured output); it is not sent to another engine: send it again only with a simpler schema"
)
FAILURE_REPORT_S: Final = 5.0  # Time from the loss of a replica until its attempts should have failed.
SILENCE_S: Final = 900.0
QUERY_TIMEOUT_S: Final = 5.0  # Timeout of a query; then it is repeated.
MAX_QUERIES: Final = 3  # Unanswered queries before a request is given up.
CHECKED_PER_TICK: Final = 256
"""Open requests checked for silence per tick, so that a tick's cost does not grow with them."""
COMMON_CAUSE_S: Final = 5.0  # Losses within this time may have a common cause.
SILENT_COMMON_CAUSE_S: Final = 60.0
CALM_AFTER_S: Final = 1.0  # After this time without a loss the remaining replicas count as stable.


class Recovery:
    def __init__(self, state: BrainState, requests: Requests) -> None:
        self._policy = state.policy
        self._fleet = state.fleet
        self._router = state.router
        self._requests = requests
        self._recent_losses = RecentLosses()
        self._inquiries = AttemptQueries(requests.open)
        self._models_still_held: set[str] = set()
        """Models with more held requests than their new replicas could take."""
        # Replicas that are suspected lost, and the end of each suspicion.
        self._doubts: dict[str, float] = {}

    def failed(self, at_s: float, event: told.AttemptFailed) -> list[Action]:
        request_state = self._requests.running(event.request, event.attempt)
        if request_state is None:
            return []
        kind, where = event.kind, event.where
        if request_state.recalled_from and kind == "timeout" and not where:  # The Brain recalled it.
            kind, where = "link", request_state.recalled_from
        request_state.recalled_from = ""
        lost = kind == "replica"
        suspected = False
        if (
            request_state.request.grammar
            and request_state.last is not None
            and request_state.first_s < 0
            and not request_state.streamed_tokens
        ):
            suspected = kind == event.kind and grammar_suspected(event, request_state.last.member.id)
        actions = self._requests.abandon(request_state, where if lost else "")
        if lost:
            actions += self._doubt(at_s, where)
        actions += self._requests.release(at_s, request_state)
        request = request_state.request
        advanced = event.streamed_tokens > request_state.streamed_tokens
        request_state.streamed_tokens = max(request_state.streamed_tokens, event.streamed_tokens)
        if request_state.streamed_tokens >= request.max_output_tokens:  # The user has the complete answer.
            del self._requests.open[request.id]
            self._requests.end(request.id)
            return actions
        request_state.prompt_tokens = request.prompt_tokens + request_state.streamed_tokens
        request_state.attempt += 1
        self._count_failure(at_s, request_state, kind, where, advanced)
        problem = refusal_of(request_state, at_s, self._policy)
        if suspected:
            problem = "grammar", GRAMMAR_SUSPECTED
        if problem is not None:
            return actions + self._requests.refuse(at_s, request_state, *problem)
        return actions + self._retry(at_s, request_state, kind)

    def _count_failure(
        self, at_s: float, request: RequestState, kind: told.FailureKind, where: str, advanced: bool
    ) -> None:
        lost = kind == "replica"
        request.failed_by |= {where}
        request.losses += lost
        if lost:
            request.lost_on |= {where}
        killed = lost and not advanced and self._recent_losses.lost_alone(at_s, where, request.lost_on)
        if killed or kind not in LOSS_KINDS:
            request.failures += 1

    def _retry(self, at_s: float, request: RequestState, kind: told.FailureKind) -> list[Action]:
        """Send a failed request away from what failed it or may be failing; else to any replica, or hold it after a
        second loss."""
        request.avoid = request.failed_by
        if kind in LOSS_KINDS:
            request.avoid |= self._recent_losses.suspect_domains(at_s)
        sent = self._requests.dispatch(at_s, request)
        if sent or request.state != HELD or (kind in LOSS_KINDS and request.losses != 1):
            return sent
        self._requests.held.remove(request)
        request.avoid = request.failed_by if kind in LOSS_KINDS else frozenset()
        return self._requests.dispatch(at_s, request)

    def recall_from_slow_link(self, at_s: float, event: told.LinkReported) -> list[Action]:
        """Recall requests from a link that became slow, once each, if recomputing is clearly faster. This is no
        failure."""
        actions: list[Action] = []
        if not self._router.learns or self._policy.retries < 1:
            return actions
        tokens_by_model: dict[str, int] = {}
        for name, arrival_s in self._router.links.recall_candidates(event):
            request = self._requests.open[name]
            model = request.request.model
            recompute_s = self._router.link_avoidance.recompute_s(request, tokens_by_model.get(model, 0))
            if request.attempt or request.recalled_from or refusal_of(request, at_s, self._policy):
                continue
            if arrival_s >= recompute_s + MIN_RECALL_SAVING_S:
                request.recalled_from = request.link
                tokens_by_model[model] = tokens_by_model.get(model, 0) + request.prompt_tokens
                actions += [*self._requests.abandon(request), self._inquiries.query(at_s, request)]
        return actions

    def attempt_running(self, at_s: float, event: told.AttemptRunning) -> list[Action]:
        request = self._requests.running(event.request, event.attempt)
        if request is not None:
            self._inquiries.attempt_running(at_s, request)
        return []

    def replica_gone(self, at_s: float, replica: ReplicaState, notice_s: float | None) -> list[Action]:
        """A replica was lost (with `notice_s`) or stopped (None): its attempts should fail or be queried soon."""
        if notice_s is not None:
            self._recent_losses.note_loss(at_s, replica.member)
        self._inquiries.replica_gone(at_s + (notice_s or 0.0), replica)
        return self._requests.changed(at_s, replica)

    def sizes(self) -> dict[str, int]:
        return {
            "doubts": len(self._doubts),
            "crowded": len(self._models_still_held),
            "inquiries": len(self._inquiries),
        }

    def tick(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        for name in [name for name, until_s in self._doubts.items() if until_s <= at_s]:
            replica = self._fleet.views.get(name)
            actions += self.end_doubt(at_s, replica) if replica is not None else []
            self._doubts.pop(name, None)
        crowded, self._models_still_held = sorted(self._models_still_held), set()
        actions += self._requests.retry_held(at_s, crowded)
        actions += self._release_doubtful(at_s)
        inquiries, hopeless = self._inquiries.tick(at_s)
        actions += inquiries
        for request in hopeless:
            actions += self._requests.abandon(request) + self._requests.release(at_s, request)
            why = "nobody knows how much of it reached the user"
            actions += self._requests.refuse(at_s, request, "lost", why)
        return actions

    def _release_doubtful(self, at_s: float) -> list[Action]:
        """Release requests that were held because of losses, once losses cease."""
        actions: list[Action] = []
        doubtful, self._requests.doubtful = self._requests.doubtful, {}
        for name in doubtful:
            request = self._requests.open.get(name)
            if request is None or request.state != HELD:
                continue
            if not self._recent_losses.is_calm(at_s) and at_s - request.held_s < MAX_HOLD_DURING_LOSSES_S:
                self._requests.doubtful[name] = None
                continue
            self._requests.held.remove(request)
            request.avoid = request.failed_by = frozenset()
            actions += self._requests.dispatch(at_s, request)
        return actions

    def _doubt(self, at_s: float, replica: str) -> list[Action]:
        """Suspect a replica that failed a request like a lost one; it gets no requests until it reports."""
        replica_state = self._fleet.views.get(replica)
        if replica_state is None:
            return []
        self._recent_losses.note_loss(at_s, replica_state.member)
        if replica_state.state != "ready":
            return []
        if not replica_state.doubted:  # Further failures at the same time add nothing.
            self._fleet.doubt(replica_state, True)
            strikes = min(replica_state.strikes, MAX_STRIKES)
            self._doubts[replica] = at_s + QUARANTINE_S * (1 << (strikes - 1))
        return self._requests.changed(at_s, replica_state)

    def silent(self, at_s: float, event: told.ReplicaSilent) -> list[Action]:
        """A replica is silent or its connection is too slow: it gets no new requests. Its present attempts fail by
        themselves."""
        replica = self._fleet.views.get(event.replica)
        if replica is None or replica.state != "ready":
            return []
        self._recent_losses.silent(at_s, replica.member)
        until_s = max(self._doubts.get(event.replica, at_s), at_s + max(QUARANTINE_S, event.lasts_s))
        was_doubted, self._doubts[event.replica] = replica.doubted, until_s
        self._fleet.doubt(replica, True, strike=False)
        return [] if was_doubted else self._requests.changed(at_s, replica)

    def reported(self, at_s: float, replica: ReplicaState) -> list[Action]:
        self._recent_losses.reported(at_s, replica.member.id)
        if replica.strikes > FREE_STRIKES and at_s < self._doubts.get(replica.member.id, at_s):
            return []
        return self.end_doubt(at_s, replica)

    def end_doubt(self, at_s: float, replica: ReplicaState) -> list[Action]:
        self._doubts.pop(replica.member.id, None)
        self._recent_losses.forget_loss(replica.member.id)
        self._fleet.doubt(replica, False)
        return self._requests.changed(at_s, replica) + self.send_held(at_s, replica)

    def send_held(self, at_s: float, replica: ReplicaState) -> list[Action]:
        """A replica can take requests again: send held ones, as many as it can take at once."""
        model = replica.member.model
        facts = replica.facts
        actions = self._requests.retry_held(at_s, [model], facts.decode_batch if facts is not None else None)
        if self._requests.held.counts().get(model):
            self._models_still_held.add(model)
        return actions


def grammar_suspected(event: told.AttemptFailed, decoder: str) -> bool:
    """Whether an attempt with a grammar may have failed because `decoder` was compiling it; hangs count. Only asked
    before the first token."""
    lost = event.kind in GRAMMAR_FAILURES and event.where == decoder
    return lost and not event.rejected and not event.streamed_tokens


def refusal_of(request: RequestState, at_s: float, policy: Policy) -> tuple[RefusalReason, str] | None:
    """(reason, detail) of the refusal of a failed request; None if it is retried."""
    deadline_s = request.request.deadline_s
    if deadline_s is not None and at_s >= deadline_s:
        return "deadline", f"failed at {at_s:g} s, after the deadline at {deadline_s:g} s"
    if request.failures > policy.retries:
        return "retries", f"failed {request.failures} times; {policy.retries} retries are allowed"
    if request.attempt >= MAX_ATTEMPTS:
        return "retries", f"was sent {request.attempt} times in vain"
    return None


class AttemptQueries:
    """Queries for silent attempts (`QueryAttempt`): FAILURE_REPORT_S after their replica went, or SILENCE_S after
    the last report. An attempt without an answer is refused, since a retry might repeat tokens."""

    __slots__ = ("_gone", "_open", "_queried", "_to_check")

    def __init__(self, requests: dict[str, RequestState]) -> None:
        self._open = requests
        self._gone: list[tuple[float, ReplicaState]] = []
        """Gone replicas, and the time by which their attempts should have failed."""
        self._queried: dict[str, tuple[int, int, float]] = {}
        """Request -> (attempt, queries so far, timeout of the last one)."""
        self._to_check: list[str] = []

    def __len__(self) -> int:
        return len(self._queried) + len(self._gone)

    def replica_gone(self, until_s: float, replica: ReplicaState) -> None:
        """A replica is gone, or will be at a given time; its attempts should fail soon after."""
        if replica.open_requests:
            self._gone.append((until_s + FAILURE_REPORT_S, replica))

    def attempt_running(self, at_s: float, request: RequestState) -> None:
        """The attempt is running. If its replica was reported gone, that may be wrong, so it is queried again
        later."""
        request.last_seen_s = at_s
        if self._queried.pop(request.request.id, None) is not None:
            self._queried[request.request.id] = (request.attempt, 0, at_s + FAILURE_REPORT_S)

    def tick(self, at_s: float) -> tuple[list[Action], list[RequestState]]:
        actions: list[Action] = []
        unanswered: list[RequestState] = []
        for name, (attempt, queries, timeout_s) in list(self._queried.items()):
            request = self._open.get(name)
            if request is None or request.attempt != attempt or request.state != RUNNING:
                del self._queried[name]
            elif timeout_s <= at_s:
                if queries == 0 and not any(replica.gone for replica in request.views()):
                    del self._queried[name]
                elif queries >= MAX_QUERIES:
                    del self._queried[name]
                    unanswered.append(request)
                else:
                    actions.append(self.query(at_s, request, queries))
        silent = [
            request
            for request in self._silent(at_s)
            if request.state == RUNNING and request not in unanswered
        ]
        actions += [
            self.query(at_s, request) for request in silent if request.request.id not in self._queried
        ]
        return actions, unanswered

    def _silent(self, at_s: float) -> list[RequestState]:
        due_replicas = {replica for due_s, replica in self._gone if due_s <= at_s}
        if due_replicas:
            self._gone = [entry for entry in self._gone if entry[1] not in due_replicas]
            return [
                request for request in self._open.values() if not due_replicas.isdisjoint(request.views())
            ]
        if not self._to_check:
            self._to_check = list(self._open)
        names, self._to_check = self._to_check[-CHECKED_PER_TICK:], self._to_check[:-CHECKED_PER_TICK]
        requests = [self._open.get(name) for name in names]
        return [
            request for request in requests if request is not None and at_s - request.last_seen_s >= SILENCE_S
        ]

    def query(self, at_s: float, request: RequestState, queries: int = 0) -> Action:
        """Query an attempt; the driver stops a recalled one and reports how far its answer got."""
        self._queried[request.request.id] = (request.attempt, queries + 1, at_s + QUERY_TIMEOUT_S)
        return QueryAttempt(request.request.id, request.attempt)


class RecentLosses:
    """Replicas that were lost within TOGETHER_S, and what may be dying with them: the smallest domain that explains
    all recent losses of a region.

        one replica, or several of one node     the node
        several nodes of one zone               the zone
        several zones, or no zone known         the region

    A request may be what kills replicas. One that was merely on a replica that went silent is not, where within
    SILENT_TOGETHER_S another went silent that it was not on, or one answered again.
    """

    __slots__ = ("_answered_again_s", "_latest_s", "_recent", "_silent", "_suspects")

    def __init__(self) -> None:
        self._recent: dict[str, tuple[float, ReplicaSpec]] = {}  # Replica -> time of its loss, oldest first.
        self._suspects: frozenset[str] | None = frozenset()
        self._latest_s = self._answered_again_s = float("-inf")
        """Times of the last loss, and of the last silent replica that answered again."""
        self._silent: dict[str, float] = {}  # Replica -> time of its last silence report, oldest first.

    def note_loss(self, at_s: float, replica_spec: ReplicaSpec) -> None:
        """Record a loss, or a failure like one; the first one counts."""
        if replica_spec.id not in self._recent:
            self._recent[replica_spec.id] = (at_s, replica_spec)
            self._suspects = None
            self._latest_s = max(self._latest_s, at_s)

    def silent(self, at_s: float, replica_spec: ReplicaSpec) -> None:
        self.note_loss(at_s, replica_spec)
        self._silent.pop(replica_spec.id, None)
        self._silent[replica_spec.id] = at_s

    def reported(self, at_s: float, replica: str) -> None:
        if replica in self._silent:
            self._answered_again_s = at_s

    def forget_loss(self, replica: str) -> None:
        if self._recent.pop(replica, None) is not None:
            self._suspects = None

    def suspect_domains(self, at_s: float) -> frozenset[str]:
        """Failure domains that may be failing, as `ReplicaSpec.domains` names them."""
        self._forget(at_s)
        if self._suspects is None:
            regions: dict[str, list[ReplicaSpec]] = {}
            for _, replica_spec in self._recent.values():
                regions.setdefault(replica_spec.region, []).append(replica_spec)
            self._suspects = frozenset(
                name for lost in regions.values() for name in smallest_common_domain(lost)
            )
        return self._suspects

    def lost_alone(self, at_s: float, replica: str, visited: frozenset[str]) -> bool:
        """Whether a replica was lost recently, and no other that the request was not on: the request may have
        crashed them."""
        self._forget(at_s)
        if replica not in self._recent or not visited.issuperset(self._recent):
            return False
        return replica not in self._silent or (
            at_s - self._answered_again_s > SILENT_COMMON_CAUSE_S and visited.issuperset(self._silent)
        )

    def is_calm(self, at_s: float) -> bool:
        return at_s - self._latest_s >= CALM_AFTER_S

    def _forget(self, at_s: float) -> None:
        while self._silent:
            oldest = next(iter(self._silent))
            if at_s - self._silent[oldest] <= SILENT_COMMON_CAUSE_S:
                break
            del self._silent[oldest]
        while self._recent:
            oldest = next(iter(self._recent))
            if at_s - self._recent[oldest][0] <= COMMON_CAUSE_S:
                return
            del self._recent[oldest]
            self._suspects = None


def smallest_common_domain(lost: list[ReplicaSpec]) -> tuple[str, ...]:
    """The smallest failure domain of one region that contains all these; several names when they share several
    nodes."""
    nodes = set(lost[0].node_domains).intersection(*(replica_spec.node_domains for replica_spec in lost[1:]))
    if nodes:
        return tuple(sorted(nodes))
    zones = {replica_spec.zone for replica_spec in lost}
    if len(zones) == 1 and "" not in zones:
        return (lost[0].domains[-2],)
    return (lost[0].domains[-1],)
