"""The way of requests through the world: along their routes, to an answer, a refusal or a failure.

Each segment is given to its replica when the KV it needs is there. Prefixes that the replica holds shorten its work,
those that the next one holds shorten the cargo. Whoever loses a replica, a link or a transfer is reported as failed;
the Brain then sends it again or refuses it.
"""

from __future__ import annotations

from math import inf

from potluck.core.replica.batch import DONE, FINISHED, FIRST, LATE, PREEMPTED
from potluck.core.state import events as told
from potluck.core.state.actions import Abort, Hedge, QueryAttempt, Refuse, Run
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
        self.hedges: dict[int, SimAttempt] = {}
        """Second attempts, beside those that are open."""
        self.hedged = 0
        """How many there were."""
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
        site = self._sites.get(where)
        if site is None or not site.serves:
            self._failed(at_s, key, attempt, "replica", where, 0, rejected=request.grammar)
            return
        output_tokens, replica = request.max_output_tokens, site.replica
        if prompt_tokens + output_tokens > site.room_tokens:
            self._failed(at_s, key, attempt, "memory", where, 0)
            return
        self._prefill[key] = self._decode[key] = site.index
        priority = LATE if yields else request.priority
        running = SimAttempt(key, request, attempt, prompt_tokens, before_tokens, segments, (site,), weight)
        self.open[key] = site.attempts[key] = running
        replica.add(at_s, key, prompt_tokens, 0, output_tokens, priority, request.tenant, weight)
        self._events.look(site)
        if self._reporting and not site.touched:
            self._reports.touched(at_s, site)

    def hedge(self, at_s: float, action: Hedge) -> None:
        """Send a request along a second route, unless its first attempt has a token; if that is over, alone."""
        key = int(action.request)
        there = self.open.get(key)
        if isinstance(there, SimAttempt):
            if self._first_s[key] != self._first_s[key]:
                self.hedged += 1
                self._run(at_s, Run(*action), key, there.request, hedge=True)
        else:
            self.run(at_s, Run(*action))

    def _run(self, at_s: float, action: Run, key: int, request: Request, hedge: bool = False) -> None:
        _, route, attempt, prompt_tokens, streamed, weight, yields = action
        segments = route.segments
        sites = []
        for segment in segments:
            site = self._sites.get(segment.replica)
            if site is None or not site.serves:
                self._failed(
                    at_s, key, attempt, "replica", segment.replica, streamed, rejected=request.grammar
                )
                return
            sites.append(site)
        way = tuple(sites)
        running = SimAttempt(key, request, attempt, prompt_tokens, streamed, segments, way, weight, yields)
        problem = self._network.obstacle(running)
        if problem is not None:
            self._failed(at_s, key, attempt, *problem, streamed, rejected=request.grammar)
            return
        if hedge:
            self.hedges[key] = running
        else:
            self.ledger.cached_tokens[key] = 0
            self._enter(running)
        for site in way:
            site.attempts[key] = running
        self._begin(at_s, running)

    def _enter(self, running: SimAttempt) -> None:
        """The journey that answers a request, as far as is known."""
        key, sites, ledger = running.key, running.sites, self.ledger
        whole = running.segments[-1].start >= running.prompt_tokens
        kind = records.AGGREGATED if len(sites) == 1 else records.HANDED_OVER if whole else records.SPLIT
        ledger.route[key] = kind
        ledger.prefill_replica[key] = sites[0].index
        ledger.decode_replica[key] = sites[-1].index
        self.open[key] = running

    def _alone(self, at_s: float, running: SimAttempt) -> None:
        """Of two journeys of a request this one goes on; the other is taken off everywhere."""
        other: Request | SimAttempt = self.hedges.pop(running.key)
        if other is running:
            other = self.open[running.key]
            self._enter(running)
        assert isinstance(other, SimAttempt)
        self._take_off(at_s, other)

    def _begin(self, at_s: float, running: SimAttempt) -> None:
        place = running.place
        site, segment, request = running.sites[place], running.segments[place], running.request
        stop, start = segment.stop, segment.start
        output = 0
        if stop is None:
            stop = running.prompt_tokens
            output = request.max_output_tokens - running.before_tokens
        if request.blocks and site.cache is not None and start < stop:
            hit = site.hit(at_s, request, stop)
            if hit > start:
                cached = self.ledger.cached_tokens
                cached[running.key] = max(cached[running.key], hit)
                start = hit
        priority = LATE if running.yields and start < running.prompt_tokens else request.priority
        key, tenant, weight = running.key, request.tenant, running.weight
        site.replica.add(at_s, key, stop - start, start, output, priority, tenant, weight)
        self.touch(at_s, site)
        if site.waiting:  # it may need fewer blocks than were set aside for it, or give up its KV
            self._handovers.room(at_s, site)
        if output == 0:
            self._expect(at_s, running, stop)

    def _expect(self, at_s: float, running: SimAttempt, stop: int) -> None:
        """The KV of [0, stop) will go to the next segment's replica, less what that one holds."""
        source, target = running.sites[running.place], running.sites[running.place + 1]
        if source is target:
            return
        request, model, have = running.request, source.member.model, 0
        if request.blocks and target.cache is not None:
            have = target.hit(at_s, request, stop + 1)
        codec = codec_of(self._replica_models.codecs, running, source, target)
        size_bytes = self._replica_models.kv[model].wire_bytes(have, stop, codec)
        self.ledger.wire_bytes[running.key] += size_bytes
        self._handovers.expect(at_s, running, size_bytes, codec)

    def replica_due(self, at_s: float, site: SimReplica) -> None:
        if at_s != site.due_s or not site.serves:
            return  # an earlier look took its place, or nobody is there any more
        site.due_s = inf
        if site.replica.wake_s <= at_s:
            self.catch_up(at_s, site)
        self._events.look(site)

    def catch_up_if_due(self, at_s: float, site: SimReplica) -> None:
        if site.replica.wake_s <= at_s:
            self.catch_up(at_s, site)

    def catch_up(self, at_s: float, site: SimReplica) -> None:
        """Let a replica's happenings up to now happen. A step without any is no news."""
        happened = site.replica.advance(at_s)
        if not happened:
            return
        if self._reporting and not site.touched:
            self._reports.touched(at_s, site)
        attempts, first_s = site.attempts, self._first_s
        for when_s, kind, key in happened:
            running = attempts.get(key)
            if running is None:
                continue
            if self.hedges and key in self.hedges and kind in (FIRST, FINISHED):
                self._alone(when_s, running)
            if kind == FIRST:
                if first_s[key] != first_s[key]:  # a retry's first token is not the user's first
                    first_s[key] = when_s
                if self._chatty:
                    self._first(when_s, site, running)
            elif kind == FINISHED:
                self._finished(when_s, site, running)
            elif kind == DONE:
                self._computed(when_s, site, running)
            elif kind == PREEMPTED:
                self.ledger.preemptions[key] += 1
        if site.waiting:
            self._handovers.room(at_s, site)

    def touch(self, at_s: float, site: SimReplica) -> None:
        self._events.look(site)
        if self._reporting and not site.touched:
            self._reports.touched(at_s, site)

    def _first(self, at_s: float, site: SimReplica, running: SimAttempt) -> None:
        request = running.request
        # KV that came whole from elsewhere was kept when it arrived.
        computed = running.segments[-1].start < running.prompt_tokens
        if request.blocks and computed and running.codec == LOSSLESS:
            site.keep(at_s, request.blocks)
        self._tell(at_s, tuple.__new__(FirstToken, (request.id, running.attempt)))

    def _finished(self, at_s: float, site: SimReplica, running: SimAttempt) -> None:
        request, key = running.request, running.key
        tokens = request.max_output_tokens
        del self.open[key], site.attempts[key]
        self._finish_s[key] = self.ended_s = at_s
        self._outcome[key] = records.ANSWERED
        self._streamed[key] = tokens
        if site.state == "draining":
            self._left(at_s, site, key)
        self._tell(at_s, tuple.__new__(RequestFinished, (request.id, running.attempt, tokens)))

    def _computed(self, at_s: float, site: SimReplica, running: SimAttempt) -> None:
        blocks = running.request.blocks
        whole = running.segments[running.place].stop == running.prompt_tokens
        if blocks and whole and running.codec == LOSSLESS:
            site.keep(at_s, blocks)
        if running.hand is not None:
            self._tell(at_s, SegmentComputed(running.request.id, running.attempt, running.place))
            self._handovers.computed(at_s, running)
        else:
            site.replica.release(at_s, running.key)
            self._next_segment(at_s, running)

    def handed(self, at_s: float, hand: SimHandover) -> None:
        if not self._handovers.handed(hand):
            return
        running, source = hand.running, hand.source
        if source.replica.wake_s <= at_s:
            self.catch_up(at_s, source)
        source.replica.release(at_s, running.key)
        self._left(at_s, source, running.key)
        self.touch(at_s, source)
        if source.waiting:
            self._handovers.room(at_s, source)
        running.codec = hand.codec
        whole = running.segments[running.place].stop == running.prompt_tokens
        if whole and running.request.blocks and hand.codec == LOSSLESS:
            hand.target.keep(at_s, running.request.blocks)
        self._next_segment(at_s, running)

    def _next_segment(self, at_s: float, running: SimAttempt) -> None:
        place = running.place
        running.place = place + 1
        target = running.sites[place + 1]
        if target.replica.wake_s <= at_s:
            self.catch_up(at_s, target)
        if running is not self.open.get(running.key) and running is not self.hedges.get(running.key):
            return
        self._begin(at_s, running)
        self._tell(at_s, tuple.__new__(SegmentDone, (running.request.id, running.attempt, place)))

    def _left(self, at_s: float, site: SimReplica, key: int) -> None:
        site.attempts.pop(key, None)
        if site.state == "draining" and not site.attempts:
            self._tell(at_s, told.ReplicaDrained(site.id))

    def drop(self, at_s: float, key: int) -> int:
        """Take a journey off all its replicas and pipes; how many tokens it had streamed to the user."""
        running = self.open.get(key)
        if not isinstance(running, SimAttempt):
            return self.ledger.streamed_tokens[key]
        hedge = self.hedges.pop(key, None)
        if hedge is not None:
            self._take_off(at_s, hedge)
        self.open[key] = running.request
        self.ledger.streamed_tokens[key] = streamed = self._take_off(at_s, running)
        return streamed

    def _take_off(self, at_s: float, running: SimAttempt) -> int:
        key = running.key
        self._handovers.drop(at_s, running)
        streamed = running.before_tokens
        for place, site in enumerate(running.sites):
            if place == running.place == len(running.sites) - 1 and site.attempts.get(key) is running:
                streamed += site.replica.streamed(at_s, key)
            if site.attempts.get(key) is running:
                site.replica.cancel(at_s, key)
                self._left(at_s, site, key)
                if site.there:
                    self.touch(at_s, site)
                    if site.waiting:
                        self._handovers.room(at_s, site)
        return streamed

    def fail(self, at_s: float, running: SimAttempt, kind: FailureKind, where: str) -> None:
        """A request lost its replica, link or transfer; nothing when it is not on its way."""
        key, streamed = running.key, running.before_tokens
        first, hedge = self.open.get(key), self.hedges.get(key)
        if hedge is not None and isinstance(first, SimAttempt) and (running is hedge or running is first):
            self._alone(at_s, first if running is hedge else hedge)
        elif running is first:
            streamed = self.drop(at_s, key)
        else:
            return
        self._failed(at_s, key, running.attempt, kind, where, streamed)

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

    def inquire(self, at_s: float, action: QueryAttempt) -> None:
        """Say that an attempt goes on, or was abandoned and where its user is; what ended was told when it did."""
        key, attempt = int(action.request), action.attempt
        if isinstance(there := self.open.get(key), SimAttempt) and there.attempt == attempt:
            self._tell(at_s, told.AttemptRunning(action.request, attempt))
        elif there is not None and not isinstance(there, SimAttempt):
            self._failed(at_s, key, attempt, "timeout", "", self._streamed[key])

    def abandon(self, at_s: float, action: Abort) -> None:
        running = self.open.get(int(action.request))
        if isinstance(running, SimAttempt) and any(site.id in action.replicas for site in running.sites):
            self.drop(at_s, running.key)

    def _end(self, at_s: float, key: int, outcome: int) -> None:
        if self.open.pop(key, None) is None:
            raise AssertionError(f"request {key} ended twice")
        self.ledger.finish_s[key] = at_s
        self.ledger.outcome[key] = outcome
        self.ended_s = at_s
