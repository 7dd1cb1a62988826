"""After a failure: again from the tokens already streamed, or a refusal with its reason. Nothing is dropped silently.

A request is sent again over prompt + streamed tokens, away from what failed it and from what may be dying with it.
Only a replica lost by itself counts against its retries, unless the attempt had brought new tokens: the request may
be what kills it. A replica that fails a request as if it were gone, or is silent, gets nobody until it reports again,
or for QUARANTINE_S, ever longer. One that comes up gets no more of those held than it can take at once.

A request with a client's grammar that lost the replica that decodes it before any token is refused at once: compiling
the grammar may have exhausted the memory of that replica's host, and would do so on the next one."""

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
MOST_STRIKES: Final = 5
"""Doubts in a row after which a report alone no longer ends one, and after which they last no longer."""
MOST_ATTEMPTS: Final = 16  # However innocent a request is of its failures, it is not sent more often.
LONGEST_CALM_S: Final = 2.0
"""While losses go on, those that were lost again and again are held so long at most."""
LOSSES: frozenset[told.FailureKind] = frozenset({"replica", "link"})
"""Failures that say nothing against the request, but for a replica that is lost by itself."""


GRAMMAR_FAILURES: frozenset[told.FailureKind] = frozenset({"replica", "timeout"})
GRAMMAR_SUSPECTED: Final = (
    "its engine was lost before the first token, perhaps by compiling the request's grammar (response_format, tools "
    "or another structured output); it is not sent to another engine: send it again only with a simpler schema"
)
FAILED_S: Final = 5.0  # From the loss of a replica to the word that its requests failed.
SILENCE_S: Final = 900.0
ANSWER_S: Final = 5.0  # From a question to its answer; then it is asked again.
QUESTIONS: Final = 3  # That many stay without an answer before a request is given up.
LOOKS: Final = 256
"""Open requests looked at for silence in one tick: what a tick costs does not grow with them."""
TOGETHER_S: Final = 5.0  # Losses so close together may have one cause.
SILENT_TOGETHER_S: Final = 60.0
QUIET_S: Final = 1.0  # When nothing was lost for so long, whatever is still there is thought to stay.


class Recovery:
    def __init__(self, state: BrainState, requests: Requests) -> None:
        self._policy = state.policy
        self._fleet = state.fleet
        self._router = state.router
        self._requests = requests
        self._losses = RecentLosses()
        self._inquiries = AttemptQueries(requests.open)
        self._crowded: set[str] = set()
        """Models of which more are held than the replicas that came up lately could take."""
        self._doubts: dict[str, float] = {}  # Replicas that may be gone, and until when to think so.

    def failed(self, at_s: float, event: told.AttemptFailed) -> list[Action]:
        request_state = self._requests.running(event.request, event.attempt)
        if request_state is None:
            return []
        kind, where = event.kind, event.where
        if request_state.recalled_from and kind == "timeout" and not where:  # it was we who stopped it
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
        if request_state.streamed_tokens >= request.max_output_tokens:  # the user has it all
            del self._requests.open[request.id]
            self._requests.end(request.id)
            return actions
        request_state.prompt_tokens = request.prompt_tokens + request_state.streamed_tokens
        request_state.attempt += 1
        self._blame(at_s, request_state, kind, where, advanced)
        problem = verdict(request_state, at_s, self._policy)
        if suspected:
            problem = "grammar", GRAMMAR_SUSPECTED
        if problem is not None:
            return actions + self._requests.refuse(at_s, request_state, *problem)
        return actions + self._again(at_s, request_state, kind)

    def _blame(
        self, at_s: float, request: RequestState, kind: told.FailureKind, where: str, advanced: bool
    ) -> None:
        lost = kind == "replica"
        request.failed_by |= {where}
        request.losses += lost
        if lost:
            request.lost_on |= {where}
        killed = lost and not advanced and self._losses.alone(at_s, where, request.lost_on)
        if killed or kind not in LOSSES:
            request.failures += 1

    def _again(self, at_s: float, request: RequestState, kind: told.FailureKind) -> list[Action]:
        """Send it away from what failed it or may be dying; else anywhere, or hold it after a second loss."""
        request.avoid = request.failed_by
        if kind in LOSSES:
            request.avoid |= self._losses.suspects(at_s)
        sent = self._requests.dispatch(at_s, request)
        if sent or request.state != HELD or (kind in LOSSES and request.losses != 1):
            return sent
        self._requests.held.remove(request)
        request.avoid = request.failed_by if kind in LOSSES else frozenset()
        return self._requests.dispatch(at_s, request)

    def linked(self, at_s: float, event: told.LinkReported) -> list[Action]:
        """A link has become slow: what is on it goes elsewhere, once, if clearly sooner there. No failure."""
        actions: list[Action] = []
        if not self._router.learns or self._policy.retries < 1:
            return actions
        before: dict[str, int] = {}
        for name, over_s in self._router.links.recall_candidates(event):
            request = self._requests.open[name]
            model = request.request.model
            again_s = self._router.link_avoidance.recompute_s(request, before.get(model, 0))
            if request.attempt or request.recalled_from or verdict(request, at_s, self._policy):
                continue
            if over_s >= again_s + MIN_RECALL_SAVING_S:
                request.recalled_from = request.link
                before[model] = before.get(model, 0) + request.prompt_tokens
                actions += [*self._requests.abandon(request), self._inquiries.ask(at_s, request)]
        return actions

    def underway(self, at_s: float, event: told.AttemptRunning) -> list[Action]:
        request = self._requests.running(event.request, event.attempt)
        if request is not None:
            self._inquiries.underway(at_s, request)
        return []

    def gone(self, at_s: float, replica: ReplicaState, notice_s: float | None) -> list[Action]:
        """A replica was lost, with so much notice, or stopped (None): what ran there is to be heard of soon."""
        if notice_s is not None:
            self._losses.note(at_s, replica.member)
        self._inquiries.gone(at_s + (notice_s or 0.0), replica)
        return self._requests.changed(at_s, replica)

    def sizes(self) -> dict[str, int]:
        return {"doubts": len(self._doubts), "crowded": len(self._crowded), "inquiries": len(self._inquiries)}

    def tick(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        for name in [name for name, until_s in self._doubts.items() if until_s <= at_s]:
            replica = self._fleet.views.get(name)
            actions += self.trust(at_s, replica) if replica is not None else []
            self._doubts.pop(name, None)
        crowded, self._crowded = sorted(self._crowded), set()
        actions += self._requests.retry_held(at_s, crowded)
        actions += self._calm(at_s)
        inquiries, hopeless = self._inquiries.tick(at_s)
        actions += inquiries
        for request in hopeless:
            actions += self._requests.abandon(request) + self._requests.release(at_s, request)
            why = "nobody knows how much of it reached the user"
            actions += self._requests.refuse(at_s, request, "lost", why)
        return actions

    def _calm(self, at_s: float) -> list[Action]:
        """Once losses cease, those held for fear of them go wherever somebody is."""
        actions: list[Action] = []
        doubtful, self._requests.doubtful = self._requests.doubtful, {}
        for name in doubtful:
            request = self._requests.open.get(name)
            if request is None or request.state != HELD:
                continue
            if not self._losses.quiet(at_s) and at_s - request.held_s < LONGEST_CALM_S:
                self._requests.doubtful[name] = None
                continue
            self._requests.held.remove(request)
            request.avoid = request.failed_by = frozenset()
            actions += self._requests.dispatch(at_s, request)
        return actions

    def _doubt(self, at_s: float, replica: str) -> list[Action]:
        """It failed a request as if it were gone: nobody is sent there until it says something."""
        replica_state = self._fleet.views.get(replica)
        if replica_state is None:
            return []
        self._losses.note(at_s, replica_state.member)
        if replica_state.state != "ready":
            return []
        if not replica_state.doubted:  # Others that it fails at the same time say nothing new.
            self._fleet.doubt(replica_state, True)
            strikes = min(replica_state.strikes, MOST_STRIKES)
            self._doubts[replica] = at_s + QUARANTINE_S * (1 << (strikes - 1))
        return self._requests.changed(at_s, replica_state)

    def silent(self, at_s: float, event: told.ReplicaSilent) -> list[Action]:
        """A replica does not answer, or its line crawls: nobody is sent there. What it has fails by itself."""
        replica = self._fleet.views.get(event.replica)
        if replica is None or replica.state != "ready":
            return []
        self._losses.silent(at_s, replica.member)
        until_s = max(self._doubts.get(event.replica, at_s), at_s + max(QUARANTINE_S, event.lasts_s))
        known, self._doubts[event.replica] = replica.doubted, until_s
        self._fleet.doubt(replica, True, strike=False)
        return [] if known else self._requests.changed(at_s, replica)

    def reported(self, at_s: float, replica: ReplicaState) -> list[Action]:
        self._losses.reported(at_s, replica.member.id)
        if replica.strikes > FREE_STRIKES and at_s < self._doubts.get(replica.member.id, at_s):
            return []
        return self.trust(at_s, replica)

    def trust(self, at_s: float, replica: ReplicaState) -> list[Action]:
        self._doubts.pop(replica.member.id, None)
        self._losses.mend(replica.member.id)
        self._fleet.doubt(replica, False)
        return self._requests.changed(at_s, replica) + self.let_in(at_s, replica)

    def let_in(self, at_s: float, replica: ReplicaState) -> list[Action]:
        """Somebody can be sent to again: those held, but no more than it can take at once."""
        model = replica.member.model
        facts = replica.facts
        actions = self._requests.retry_held(at_s, [model], facts.decode_batch if facts is not None else None)
        if self._requests.held.counts().get(model):
            self._crowded.add(model)
        return actions


def grammar_suspected(event: told.AttemptFailed, decoder: str) -> bool:
    """Whether an attempt of a request with a grammar may have failed since `decoder` was compiling it; a hang counts.
    Asked only before the first token."""
    lost = event.kind in GRAMMAR_FAILURES and event.where == decoder
    return lost and not event.rejected and not event.streamed_tokens


def verdict(request: RequestState, at_s: float, policy: Policy) -> tuple[RefusalReason, str] | None:
    """Why a request that failed is not sent again; None when it is."""
    deadline_s = request.request.deadline_s
    if deadline_s is not None and at_s >= deadline_s:
        return "deadline", f"failed at {at_s:g} s, after the deadline at {deadline_s:g} s"
    if request.failures > policy.retries:
        return "retries", f"failed {request.failures} times; {policy.retries} retries are allowed"
    if request.attempt >= MOST_ATTEMPTS:
        return "retries", f"was sent {request.attempt} times in vain"
    return None


class AttemptQueries:
    """Attempts that went silent are asked after (`QueryAttempt`): FAILED_S after their replica went, or SILENCE_S
    after the last news. One of which nobody knows anything is refused: sent again it might repeat tokens."""

    __slots__ = ("_asked", "_gone", "_open", "_round")

    def __init__(self, requests: dict[str, RequestState]) -> None:
        self._open = requests
        self._gone: list[tuple[float, ReplicaState]] = []
        """Replicas that are gone, and by when their requests should be known to have failed."""
        self._asked: dict[str, tuple[int, int, float]] = {}
        """Request to (attempt, questions so far, when the answer is overdue)."""
        self._round: list[str] = []

    def __len__(self) -> int:
        return len(self._asked) + len(self._gone)

    def gone(self, until_s: float, replica: ReplicaState) -> None:
        """A replica went, or goes at a time that was told; then its requests fail, and that is to be heard soon."""
        if replica.open_requests:
            self._gone.append((until_s + FAILED_S, replica))

    def underway(self, at_s: float, request: RequestState) -> None:
        """It goes on. If its replica was said to be gone, that may be wrong, and is asked about again later."""
        request.last_seen_s = at_s
        if self._asked.pop(request.request.id, None) is not None:
            self._asked[request.request.id] = (request.attempt, 0, at_s + FAILED_S)

    def tick(self, at_s: float) -> tuple[list[Action], list[RequestState]]:
        actions: list[Action] = []
        hopeless: list[RequestState] = []
        for name, (attempt, questions, due_s) in list(self._asked.items()):
            request = self._open.get(name)
            if request is None or request.attempt != attempt or request.state != RUNNING:
                del self._asked[name]
            elif due_s <= at_s:
                if questions == 0 and not any(replica.gone for replica in request.views()):
                    del self._asked[name]
                elif questions >= QUESTIONS:
                    del self._asked[name]
                    hopeless.append(request)
                else:
                    actions.append(self.ask(at_s, request, questions))
        silent = [
            request for request in self._silent(at_s) if request.state == RUNNING and request not in hopeless
        ]
        actions += [self.ask(at_s, request) for request in silent if request.request.id not in self._asked]
        return actions, hopeless

    def _silent(self, at_s: float) -> list[RequestState]:
        due = {replica for due_s, replica in self._gone if due_s <= at_s}
        if due:
            self._gone = [item for item in self._gone if item[1] not in due]
            return [request for request in self._open.values() if not due.isdisjoint(request.views())]
        if not self._round:
            self._round = list(self._open)
        names, self._round = self._round[-LOOKS:], self._round[:-LOOKS]
        looked = [self._open.get(name) for name in names]
        return [
            request for request in looked if request is not None and at_s - request.last_seen_s >= SILENCE_S
        ]

    def ask(self, at_s: float, request: RequestState, questions: int = 0) -> Action:
        """What became of an attempt; one that is abandoned its driver stops, and then says where its user is."""
        self._asked[request.request.id] = (request.attempt, questions + 1, at_s + ANSWER_S)
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

    __slots__ = ("_latest_s", "_recent", "_silent", "_suspects", "_woke_s")

    def __init__(self) -> None:
        self._recent: dict[str, tuple[float, ReplicaSpec]] = {}  # Replica to when it was lost, oldest first.
        self._suspects: frozenset[str] | None = frozenset()
        self._latest_s = self._woke_s = float("-inf")
        """When one was last lost, and when one that was silent answered again."""
        self._silent: dict[str, float] = {}  # Replica to when it was last said to be silent, oldest first.

    def note(self, at_s: float, replica_spec: ReplicaSpec) -> None:
        """It is lost, or a request failed there as if it were; the first word counts."""
        if replica_spec.id not in self._recent:
            self._recent[replica_spec.id] = (at_s, replica_spec)
            self._suspects = None
            self._latest_s = max(self._latest_s, at_s)

    def silent(self, at_s: float, replica_spec: ReplicaSpec) -> None:
        self.note(at_s, replica_spec)
        self._silent.pop(replica_spec.id, None)
        self._silent[replica_spec.id] = at_s

    def reported(self, at_s: float, replica: str) -> None:
        if replica in self._silent:
            self._woke_s = at_s

    def mend(self, replica: str) -> None:
        if self._recent.pop(replica, None) is not None:
            self._suspects = None

    def suspects(self, at_s: float) -> frozenset[str]:
        """Domains that may be dying, as `ReplicaSpec.domains` names them."""
        self._forget(at_s)
        if self._suspects is None:
            regions: dict[str, list[ReplicaSpec]] = {}
            for _, replica_spec in self._recent.values():
                regions.setdefault(replica_spec.region, []).append(replica_spec)
            self._suspects = frozenset(name for lost in regions.values() for name in smallest(lost))
        return self._suspects

    def alone(self, at_s: float, replica: str, visited: frozenset[str]) -> bool:
        """Whether a replica was lost lately, and none that the request was not on: it may be what kills them."""
        self._forget(at_s)
        if replica not in self._recent or not visited.issuperset(self._recent):
            return False
        return replica not in self._silent or (
            at_s - self._woke_s > SILENT_TOGETHER_S and visited.issuperset(self._silent)
        )

    def quiet(self, at_s: float) -> bool:
        return at_s - self._latest_s >= QUIET_S

    def _forget(self, at_s: float) -> None:
        while self._silent:
            oldest = next(iter(self._silent))
            if at_s - self._silent[oldest] <= SILENT_TOGETHER_S:
                break
            del self._silent[oldest]
        while self._recent:
            oldest = next(iter(self._recent))
            if at_s - self._recent[oldest][0] <= TOGETHER_S:
                return
            del self._recent[oldest]
            self._suspects = None


def smallest(lost: list[ReplicaSpec]) -> tuple[str, ...]:
    """The smallest domain of one region that all of these lie in; several names when they share several nodes."""
    nodes = set(lost[0].node_domains).intersection(*(replica_spec.node_domains for replica_spec in lost[1:]))
    if nodes:
        return tuple(sorted(nodes))
    zones = {replica_spec.zone for replica_spec in lost}
    if len(zones) == 1 and "" not in zones:
        return (lost[0].domains[-2],)
    return (lost[0].domains[-1],)
