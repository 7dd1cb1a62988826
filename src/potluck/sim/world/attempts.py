"""Simulated attempts: requests on their routes, until they are answered, refused, cancelled or failed.

A segment is submitted to its replica once the KV that it needs has arrived. Prefixes cached at the replica shorten
the segment's prefill, prefixes cached at the next replica shorten the transfer. An attempt that loses a replica, a
link or a transfer is reported as failed; the Brain then retries or refuses the request.
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
    """All attempts under way: carries out the Brain's actions on requests and reports events to it."""

    def __init__(self, common: CommonState, tell: Tell) -> None:
        self._events = common.events
        self._handovers = common.handovers
        self._replica_models = common.replica_models
        self._network = common.network
        self._reports = common.reports
        self._reporting = common.reports.on
        self._replicas = common.replicas
        self._tell = tell
        self.ledger = common.ledger
        self._attempts = common.ledger.attempts
        self._prefill = common.ledger.prefill_replica
        self._decode = common.ledger.decode_replica
        self._first_s = common.ledger.first_token_s
        self._finish_s = common.ledger.finish_s
        self._outcome = common.ledger.outcome
        self._streamed = common.ledger.streamed_tokens
        self._reports_first_tokens = (
            common.settings.first_tokens is not False or common.workload.blocks is not None
        )
        self.open: dict[int, Request | SimAttempt] = {}
        """Requests that have not ended: the attempt under way, or the request itself while no attempt runs."""
        self.ended_s = 0.0
        """When the latest request ended."""

    def run(self, at_s: float, action: Run) -> None:
        """Start an attempt on a route. The first attempt on one segment has a path of its own, as most are such."""
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
        sim_replica = self._replicas.get(where)
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
        replicas = []
        for segment in segments:
            replica = self._replicas.get(segment.replica)
            if replica is None or not replica.serves:
                self._failed(
                    at_s, key, attempt, "replica", segment.replica, streamed, rejected=request.grammar
                )
                return
            replicas.append(replica)
        route_replicas = tuple(replicas)
        sim_attempt = SimAttempt(
            key, request, attempt, prompt_tokens, streamed, segments, route_replicas, weight, yields
        )
        problem = self._network.obstacle(sim_attempt)
        if problem is not None:
            self._failed(at_s, key, attempt, *problem, streamed, rejected=request.grammar)
            return
        self.ledger.cached_tokens[key] = 0
        self._record_route(sim_attempt)
        for replica in route_replicas:
            replica.attempts[key] = sim_attempt
        self._begin(at_s, sim_attempt)

    def _record_route(self, attempt: SimAttempt) -> None:
        """Record the attempt's route in the ledger."""
        key, replicas, ledger = attempt.key, attempt.replicas, self.ledger
        whole = attempt.segments[-1].start >= attempt.prompt_tokens
        kind = records.AGGREGATED if len(replicas) == 1 else records.HANDED_OVER if whole else records.SPLIT
        ledger.route[key] = kind
        ledger.prefill_replica[key] = replicas[0].index
        ledger.decode_replica[key] = replicas[-1].index
        self.open[key] = attempt

    def _begin(self, at_s: float, attempt: SimAttempt) -> None:
        place = attempt.place
        replica, segment, request = attempt.replicas[place], attempt.segments[place], attempt.request
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
            self._handovers.admit_waiting(at_s, replica)
        if output == 0:
            self._start_handover(at_s, attempt, stop)

    def _start_handover(self, at_s: float, attempt: SimAttempt, stop: int) -> None:
        """Begin the transfer of the KV of [0, stop) to the next replica, less the prefix that it has cached."""
        source_replica, target_replica = attempt.replicas[attempt.place], attempt.replicas[attempt.place + 1]
        if source_replica is target_replica:
            return
        request, model, have = attempt.request, source_replica.member.model, 0
        if request.blocks and target_replica.cache is not None:
            have = target_replica.hit(at_s, request, stop + 1)
        codec = codec_of(self._replica_models.codecs, attempt, source_replica, target_replica)
        size_bytes = self._replica_models.kv[model].wire_bytes(have, stop, codec)
        self.ledger.wire_bytes[attempt.key] += size_bytes
        self._handovers.begin(at_s, attempt, size_bytes, codec)

    def replica_due(self, at_s: float, replica: SimReplica) -> None:
        if at_s != replica.due_s or not replica.serves:
            return  # an earlier wake-up has replaced this one, or the replica has ended
        replica.due_s = inf
        if replica.replica.wake_s <= at_s:
            self.catch_up(at_s, replica)
        self._events.look(replica)

    def catch_up_if_due(self, at_s: float, replica: SimReplica) -> None:
        if replica.replica.wake_s <= at_s:
            self.catch_up(at_s, replica)

    def catch_up(self, at_s: float, replica: SimReplica) -> None:
        """Advance a replica to now and report what happened to its requests."""
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
                if self._reports_first_tokens:
                    self._report_first_token(when_s, replica, attempt)
            elif kind == FINISHED:
                self._finish(when_s, replica, attempt)
            elif kind == DONE:
                self._finish_segment(when_s, replica, attempt)
            elif kind == PREEMPTED:
                self.ledger.preemptions[key] += 1
        if replica.waiting:
            self._handovers.admit_waiting(at_s, replica)

    def touch(self, at_s: float, replica: SimReplica) -> None:
        self._events.look(replica)
        if self._reporting and not replica.touched:
            self._reports.touched(at_s, replica)

    def _report_first_token(self, at_s: float, replica: SimReplica, attempt: SimAttempt) -> None:
        request = attempt.request
        # KV that came whole from elsewhere was kept when it arrived.
        computed = attempt.segments[-1].start < attempt.prompt_tokens
        if request.blocks and computed and attempt.codec == LOSSLESS:
            replica.keep(at_s, request.blocks)
        self._tell(at_s, tuple.__new__(FirstToken, (request.id, attempt.attempt)))

    def _finish(self, at_s: float, replica: SimReplica, attempt: SimAttempt) -> None:
        request, key = attempt.request, attempt.key
        tokens = request.max_output_tokens
        del self.open[key], replica.attempts[key]
        self._finish_s[key] = self.ended_s = at_s
        self._outcome[key] = records.ANSWERED
        self._streamed[key] = tokens
        if replica.state == "draining":
            self._remove_attempt(at_s, replica, key)
        self._tell(at_s, tuple.__new__(RequestFinished, (request.id, attempt.attempt, tokens)))

    def _finish_segment(self, at_s: float, replica: SimReplica, attempt: SimAttempt) -> None:
        blocks = attempt.request.blocks
        whole = attempt.segments[attempt.place].stop == attempt.prompt_tokens
        if blocks and whole and attempt.codec == LOSSLESS:
            replica.keep(at_s, blocks)
        if attempt.handover is not None:
            self._tell(at_s, SegmentComputed(attempt.request.id, attempt.attempt, attempt.place))
            self._handovers.computed(at_s, attempt)
        else:
            replica.replica.release(at_s, attempt.key)
            self._next_segment(at_s, attempt)

    def handover_done(self, at_s: float, handover: SimHandover) -> None:
        if not self._handovers.finish(handover):
            return
        attempt, source_replica = handover.attempt, handover.source
        if source_replica.replica.wake_s <= at_s:
            self.catch_up(at_s, source_replica)
        source_replica.replica.release(at_s, attempt.key)
        self._remove_attempt(at_s, source_replica, attempt.key)
        self.touch(at_s, source_replica)
        if source_replica.waiting:
            self._handovers.admit_waiting(at_s, source_replica)
        attempt.codec = handover.codec
        whole = attempt.segments[attempt.place].stop == attempt.prompt_tokens
        if whole and attempt.request.blocks and handover.codec == LOSSLESS:
            handover.target.keep(at_s, attempt.request.blocks)
        self._next_segment(at_s, attempt)

    def _next_segment(self, at_s: float, attempt: SimAttempt) -> None:
        place = attempt.place
        attempt.place = place + 1
        target_replica = attempt.replicas[place + 1]
        if target_replica.replica.wake_s <= at_s:
            self.catch_up(at_s, target_replica)
        if attempt is not self.open.get(attempt.key):
            return
        self._begin(at_s, attempt)
        self._tell(at_s, tuple.__new__(SegmentDone, (attempt.request.id, attempt.attempt, place)))

    def _remove_attempt(self, at_s: float, replica: SimReplica, key: int) -> None:
        replica.attempts.pop(key, None)
        if replica.state == "draining" and not replica.attempts:
            self._tell(at_s, told.ReplicaDrained(replica.id))

    def drop(self, at_s: float, key: int) -> int:
        """Remove a request's attempt from all replicas and pipes; returns the tokens streamed to the user so far."""
        attempt = self.open.get(key)
        if not isinstance(attempt, SimAttempt):
            return self.ledger.streamed_tokens[key]
        self.open[key] = attempt.request
        self.ledger.streamed_tokens[key] = streamed = self._remove_from_replicas(at_s, attempt)
        return streamed

    def _remove_from_replicas(self, at_s: float, attempt: SimAttempt) -> int:
        key = attempt.key
        self._handovers.cancel(at_s, attempt)
        streamed = attempt.before_tokens
        for place, replica in enumerate(attempt.replicas):
            if place == attempt.place == len(attempt.replicas) - 1 and replica.attempts.get(key) is attempt:
                streamed += replica.replica.streamed(at_s, key)
            if replica.attempts.get(key) is attempt:
                replica.replica.cancel(at_s, key)
                self._remove_attempt(at_s, replica, key)
                if replica.exists:
                    self.touch(at_s, replica)
                    if replica.waiting:
                        self._handovers.admit_waiting(at_s, replica)
        return streamed

    def fail(self, at_s: float, attempt: SimAttempt, kind: FailureKind, where: str) -> None:
        """Fail an attempt after the loss of its replica, link or transfer; does nothing if it is over."""
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
        """The client disconnects; ignored before the request's arrival and after its end."""
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

    def answer_query(self, at_s: float, query_attempt: QueryAttempt) -> None:
        """Tell the Brain whether an attempt runs or was aborted; the end of a request was reported when it ended."""
        key, attempt = int(query_attempt.request), query_attempt.attempt
        if isinstance(there := self.open.get(key), SimAttempt) and there.attempt == attempt:
            self._tell(at_s, told.AttemptRunning(query_attempt.request, attempt))
        elif there is not None and not isinstance(there, SimAttempt):
            self._failed(at_s, key, attempt, "timeout", "", self._streamed[key])

    def abort(self, at_s: float, action: Abort) -> None:
        attempt = self.open.get(int(action.request))
        if isinstance(attempt, SimAttempt) and any(
            replica.id in action.replicas for replica in attempt.replicas
        ):
            self.drop(at_s, attempt.key)

    def _end(self, at_s: float, key: int, outcome: int) -> None:
        if self.open.pop(key, None) is None:
            raise AssertionError(f"request {key} ended twice")
        self.ledger.finish_s[key] = at_s
        self.ledger.outcome[key] = outcome
        self.ended_s = at_s
