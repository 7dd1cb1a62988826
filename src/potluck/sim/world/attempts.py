"""The way of requests through the world: along their routes, to an answer, a refusal or a failure.

Each segment is given to its replica when the KV it needs is there. Prefixes that the replica holds shorten its work,
those that the next one holds shorten the cargo. Whoever loses a replica, a link or a transfer is reported as failed;
the Brain then sends it again or refuses it.
"""

from __future__ import annotations

from math import inf

from potluck.core.replica.batch import DONE, FINISHED, FIRST, LATE, PREEMPTED
from potluck.core.state import events as told
from potluck.core.state.actions import Abort, QueryAttempt, Refuse, Run
from potluck.core.state.events import FailureKind, FirstToken, RequestFinished, SegmentComputed, SegmentDone
from potluck.core.values.kv import LOSSLESS
from potluck.core.values.types import Request
from potluck.sim.links.handovers import codec_of
from potluck.sim.results import records
from potluck.sim.world.common_state import CommonState, Tell
from potluck.sim.world.sim_state import SimAttempt, SimHandover, SimReplica


class SimAttempts:
    def __init__(self, common: CommonState, tell: Tell) -> None:
        self._events = common.events
        self._handovers = common.handovers
        self._replica_models = common.replica_models
        self._network = common.network
        self._reports = common.reports
        self._reporting = common.reports.on
        self._sites = common.sites
        self._tell = tell
        self.ledger = common.ledger
        self._attempts = common.ledger.attempts
        self._prefill = common.ledger.prefill_replica
        self._decode = common.ledger.decode_replica
        self._first_s = common.ledger.first_token_s
        self._finish_s = common.ledger.finish_s
        self._outcome = common.ledger.outcome
        self._streamed = common.ledger.streamed_tokens
        self._chatty = common.settings.first_tokens is not False or common.workload.blocks is not None
        self.open: dict[int, Request | SimAttempt] = {}
        """What has not ended: a request that was not sent anywhere yet, or is to be sent again, or its journey."""
        self.ended_s = 0.0
        """When the last one ended so far."""

    def run(self, at_s: float, action: Run) -> None:
        """Send a request along a route; the plain case of one segment is most of all work here."""
        name, route, attempt, prompt_tokens, before_tokens, weight, yields = action
        key = int(name)
        request = self.open.get(key)
        if request is None:
            return
        self._attempts[key] += 1
        segments = route.segments
        if isinstance(request, SimAttempt):
            self.drop(at_s, key)
            request = request.request
        if attempt or len(segments) > 1 or request.blocks:
            self._run(at_s, action, key, request)
            return
        where = segments[0].replica
        sim_replica = self._sites.get(where)
        if sim_replica is None or not sim_replica.serves:
            self._failed(at_s, key, attempt, "replica", where, 0, rejected=request.grammar)
            return
        output_tokens, sim_engine = request.max_output_tokens, sim_replica.replica
        if prompt_tokens + output_tokens > sim_replica.room_tokens:
            self._failed(at_s, key, attempt, "memory", where, 0)
            return
        self._prefill[key] = self._decode[key] = sim_replica.index
        priority = LATE if yields else request.priority
        sim_attempt = SimAttempt(
            key, request, attempt, prompt_tokens, before_tokens, segments, (sim_replica,), weight
        )
        self.open[key] = sim_replica.attempts[key] = sim_attempt
        sim_engine.add(at_s, key, prompt_tokens, 0, output_tokens, priority, request.tenant, weight)
        self._events.look(sim_replica)
        if self._reporting and not sim_replica.touched:
            self._reports.touched(at_s, sim_replica)

    def _run(self, at_s: float, action: Run, key: int, request: Request) -> None:
        _, route, attempt, prompt_tokens, streamed, weight, yields = action
        segments = route.segments
        sites = []
        for segment in segments:
            replica = self._sites.get(segment.replica)
            if replica is None or not replica.serves:
                self._failed(
                    at_s, key, attempt, "replica", segment.replica, streamed, rejected=request.grammar
                )
                return
            sites.append(replica)
        way = tuple(sites)
        sim_attempt = SimAttempt(
            key, request, attempt, prompt_tokens, streamed, segments, way, weight, yields
        )
        problem = self._network.obstacle(sim_attempt)
        if problem is not None:
            self._failed(at_s, key, attempt, *problem, streamed, rejected=request.grammar)
            return
        self.ledger.cached_tokens[key] = 0
        self._enter(sim_attempt)
        for replica in way:
            replica.attempts[key] = sim_attempt
        self._begin(at_s, sim_attempt)

    def _enter(self, attempt: SimAttempt) -> None:
        """The journey that answers a request, as far as is known."""
        key, sites, ledger = attempt.key, attempt.sites, self.ledger
        whole = attempt.segments[-1].start >= attempt.prompt_tokens
        kind = records.AGGREGATED if len(sites) == 1 else records.HANDED_OVER if whole else records.SPLIT
        ledger.route[key] = kind
        ledger.prefill_replica[key] = sites[0].index
        ledger.decode_replica[key] = sites[-1].index
        self.open[key] = attempt

    def _begin(self, at_s: float, attempt: SimAttempt) -> None:
        place = attempt.place
        replica, segment, request = attempt.sites[place], attempt.segments[place], attempt.request
        stop, start = segment.stop, segment.start
        output = 0
        if stop is None:
            stop = attempt.prompt_tokens
            output = request.max_output_tokens - attempt.before_tokens
        if request.blocks and replica.cache is not None and start < stop:
            hit = replica.hit(at_s, request, stop)
            if hit > start:
                cached = self.ledger.cached_tokens
                cached[attempt.key] = max(cached[attempt.key], hit)
                start = hit
        priority = LATE if attempt.yields and start < attempt.prompt_tokens else request.priority
        key, tenant, weight = attempt.key, request.tenant, attempt.weight
        replica.replica.add(at_s, key, stop - start, start, output, priority, tenant, weight)
        self.touch(at_s, replica)
        if replica.waiting:  # it may need fewer blocks than were set aside for it, or give up its KV
            self._handovers.room(at_s, replica)
        if output == 0:
            self._expect(at_s, attempt, stop)

    def _expect(self, at_s: float, attempt: SimAttempt, stop: int) -> None:
        """The KV of [0, stop) will go to the next segment's replica, less what that one holds."""
        source_replica, target_replica = attempt.sites[attempt.place], attempt.sites[attempt.place + 1]
        if source_replica is target_replica:
            return
        request, model, have = attempt.request, source_replica.member.model, 0
        if request.blocks and target_replica.cache is not None:
            have = target_replica.hit(at_s, request, stop + 1)
        codec = codec_of(self._replica_models.codecs, attempt, source_replica, target_replica)
        size_bytes = self._replica_models.kv[model].wire_bytes(have, stop, codec)
        self.ledger.wire_bytes[attempt.key] += size_bytes
        self._handovers.expect(at_s, attempt, size_bytes, codec)

    def replica_due(self, at_s: float, replica: SimReplica) -> None:
        if at_s != replica.due_s or not replica.serves:
            return  # an earlier look took its place, or nobody is there any more
        replica.due_s = inf
        if replica.replica.wake_s <= at_s:
            self.catch_up(at_s, replica)
        self._events.look(replica)

    def catch_up_if_due(self, at_s: float, replica: SimReplica) -> None:
        if replica.replica.wake_s <= at_s:
            self.catch_up(at_s, replica)

    def catch_up(self, at_s: float, replica: SimReplica) -> None:
        """Let a replica's happenings up to now happen. A step without any is no news."""
        happened = replica.replica.advance(at_s)
        if not happened:
            return
        if self._reporting and not replica.touched:
            self._reports.touched(at_s, replica)
        attempts, first_s = replica.attempts, self._first_s
        for when_s, kind, key in happened:
            attempt = attempts.get(key)
            if attempt is None:
                continue
            if kind == FIRST:
                if first_s[key] != first_s[key]:  # a retry's first token is not the user's first
                    first_s[key] = when_s
                if self._chatty:
                    self._first(when_s, replica, attempt)
            elif kind == FINISHED:
                self._finished(when_s, replica, attempt)
            elif kind == DONE:
                self._computed(when_s, replica, attempt)
            elif kind == PREEMPTED:
                self.ledger.preemptions[key] += 1
        if replica.waiting:
            self._handovers.room(at_s, replica)

    def touch(self, at_s: float, replica: SimReplica) -> None:
        self._events.look(replica)
        if self._reporting and not replica.touched:
            self._reports.touched(at_s, replica)

    def _first(self, at_s: float, replica: SimReplica, attempt: SimAttempt) -> None:
        request = attempt.request
        # KV that came whole from elsewhere was kept when it arrived.
        computed = attempt.segments[-1].start < attempt.prompt_tokens
        if request.blocks and computed and attempt.codec == LOSSLESS:
            replica.keep(at_s, request.blocks)
        self._tell(at_s, tuple.__new__(FirstToken, (request.id, attempt.attempt)))

    def _finished(self, at_s: float, replica: SimReplica, attempt: SimAttempt) -> None:
        request, key = attempt.request, attempt.key
        tokens = request.max_output_tokens
        del self.open[key], replica.attempts[key]
        self._finish_s[key] = self.ended_s = at_s
        self._outcome[key] = records.ANSWERED
        self._streamed[key] = tokens
        if replica.state == "draining":
            self._left(at_s, replica, key)
        self._tell(at_s, tuple.__new__(RequestFinished, (request.id, attempt.attempt, tokens)))

    def _computed(self, at_s: float, replica: SimReplica, attempt: SimAttempt) -> None:
        blocks = attempt.request.blocks
        whole = attempt.segments[attempt.place].stop == attempt.prompt_tokens
        if blocks and whole and attempt.codec == LOSSLESS:
            replica.keep(at_s, blocks)
        if attempt.hand is not None:
            self._tell(at_s, SegmentComputed(attempt.request.id, attempt.attempt, attempt.place))
            self._handovers.computed(at_s, attempt)
        else:
            replica.replica.release(at_s, attempt.key)
            self._next_segment(at_s, attempt)

    def handed(self, at_s: float, hand: SimHandover) -> None:
        if not self._handovers.handed(hand):
            return
        attempt, source_replica = hand.running, hand.source
        if source_replica.replica.wake_s <= at_s:
            self.catch_up(at_s, source_replica)
        source_replica.replica.release(at_s, attempt.key)
        self._left(at_s, source_replica, attempt.key)
        self.touch(at_s, source_replica)
        if source_replica.waiting:
            self._handovers.room(at_s, source_replica)
        attempt.codec = hand.codec
        whole = attempt.segments[attempt.place].stop == attempt.prompt_tokens
        if whole and attempt.request.blocks and hand.codec == LOSSLESS:
            hand.target.keep(at_s, attempt.request.blocks)
        self._next_segment(at_s, attempt)

    def _next_segment(self, at_s: float, attempt: SimAttempt) -> None:
        place = attempt.place
        attempt.place = place + 1
        target_replica = attempt.sites[place + 1]
        if target_replica.replica.wake_s <= at_s:
            self.catch_up(at_s, target_replica)
        if attempt is not self.open.get(attempt.key):
            return
        self._begin(at_s, attempt)
        self._tell(at_s, tuple.__new__(SegmentDone, (attempt.request.id, attempt.attempt, place)))

    def _left(self, at_s: float, replica: SimReplica, key: int) -> None:
        replica.attempts.pop(key, None)
        if replica.state == "draining" and not replica.attempts:
            self._tell(at_s, told.ReplicaDrained(replica.id))

    def drop(self, at_s: float, key: int) -> int:
        """Take a journey off all its replicas and pipes; how many tokens it had streamed to the user."""
        attempt = self.open.get(key)
        if not isinstance(attempt, SimAttempt):
            return self.ledger.streamed_tokens[key]
        self.open[key] = attempt.request
        self.ledger.streamed_tokens[key] = streamed = self._take_off(at_s, attempt)
        return streamed

    def _take_off(self, at_s: float, attempt: SimAttempt) -> int:
        key = attempt.key
        self._handovers.drop(at_s, attempt)
        streamed = attempt.before_tokens
        for place, replica in enumerate(attempt.sites):
            if place == attempt.place == len(attempt.sites) - 1 and replica.attempts.get(key) is attempt:
                streamed += replica.replica.streamed(at_s, key)
            if replica.attempts.get(key) is attempt:
                replica.replica.cancel(at_s, key)
                self._left(at_s, replica, key)
                if replica.there:
                    self.touch(at_s, replica)
                    if replica.waiting:
                        self._handovers.room(at_s, replica)
        return streamed

    def fail(self, at_s: float, attempt: SimAttempt, kind: FailureKind, where: str) -> None:
        """A request lost its replica, link or transfer; nothing when it is not on its way."""
        key = attempt.key
        if attempt is not self.open.get(key):
            return
        streamed = self.drop(at_s, key)
        self._failed(at_s, key, attempt.attempt, kind, where, streamed)

    def _failed(
        self,
        at_s: float,
        key: int,
        attempt: int,
        kind: FailureKind,
        where: str,
        streamed: int,
        rejected: bool = False,
    ) -> None:
        self._tell(at_s, told.AttemptFailed(str(key), attempt, kind, where, streamed, rejected))

    def cancel(self, at_s: float, key: int) -> None:
        """The user goes away; too late or too early is nothing."""
        if key not in self.open:
            return
        self._tell(at_s, told.RequestCancelled(str(key)))
        self.drop(at_s, key)
        self._end(at_s, key, records.CANCELLED)

    def refuse(self, at_s: float, action: Refuse) -> None:
        key = int(action.request)
        if key in self.open:
            self.drop(at_s, key)
            self.ledger.reason[key] = records.REASONS.index(action.reason)
            self._end(at_s, key, records.REFUSED)

    def inquire(self, at_s: float, query_attempt: QueryAttempt) -> None:
        """Say that an attempt goes on, or was abandoned and where its user is; what ended was told when it did."""
        key, attempt = int(query_attempt.request), query_attempt.attempt
        if isinstance(there := self.open.get(key), SimAttempt) and there.attempt == attempt:
            self._tell(at_s, told.AttemptRunning(query_attempt.request, attempt))
        elif there is not None and not isinstance(there, SimAttempt):
            self._failed(at_s, key, attempt, "timeout", "", self._streamed[key])

    def abandon(self, at_s: float, action: Abort) -> None:
        attempt = self.open.get(int(action.request))
        if isinstance(attempt, SimAttempt) and any(
            replica.id in action.replicas for replica in attempt.sites
        ):
            self.drop(at_s, attempt.key)

    def _end(self, at_s: float, key: int, outcome: int) -> None:
        if self.open.pop(key, None) is None:
            raise AssertionError(f"request {key} ended twice")
        self.ledger.finish_s[key] = at_s
        self.ledger.outcome[key] = outcome
        self.ended_s = at_s
