"""The way of requests through the world: along their routes, to an answer, a refusal or a failure.

Each segment is given to its replica when the KV it needs is there. Prefixes that the replica holds shorten its work,
those that the next one holds shorten the cargo. Whoever loses a replica, a link or a transfer is reported as failed;
the Brain then sends it again or refuses it.
"""

from __future__ import annotations

from math import inf

from potluck.core.brain import events as told
from potluck.core.brain.actions import Abandon, Inquire, Refuse, Run, Twin
from potluck.core.brain.events import Computed, FailureKind, Finished, FirstToken, SegmentDone
from potluck.core.replica.batch import DONE, FINISHED, FIRST, PREEMPTED
from potluck.core.replica.batch_values import LATE
from potluck.core.values.crossings import LOSSLESS
from potluck.core.values.types import Request
from potluck.sim.links.handover import codec_of
from potluck.sim.results import records
from potluck.sim.world.ground import Ground, Tell
from potluck.sim.world.state import Handover, Journey, Site


class Journeys:
    """All requests that have come and not ended."""

    __slots__ = (
        "_agenda",
        "_attempts",
        "_chatty",
        "_decode",
        "_finish_s",
        "_first_s",
        "_handovers",
        "_kits",
        "_network",
        "_outcome",
        "_prefill",
        "_reporting",
        "_reports",
        "_sites",
        "_streamed",
        "_tell",
        "ended_s",
        "ledger",
        "open",
        "twinned",
        "twins",
    )

    def __init__(self, ground: Ground, tell: Tell) -> None:
        self._agenda = ground.agenda
        self._handovers = ground.handovers
        self._kits = ground.kits
        self._network = ground.network
        self._reports = ground.reports
        self._reporting = ground.reports.on
        self._sites = ground.sites
        self._tell = tell
        self.ledger = ground.ledger
        self._attempts = ground.ledger.attempts
        self._prefill = ground.ledger.prefill_replica
        self._decode = ground.ledger.decode_replica
        self._first_s = ground.ledger.first_token_s
        self._finish_s = ground.ledger.finish_s
        self._outcome = ground.ledger.outcome
        self._streamed = ground.ledger.streamed_tokens
        self._chatty = ground.settings.first_tokens is not False or ground.workload.blocks is not None
        self.open: dict[int, Request | Journey] = {}
        """What has not ended: a request that was not sent anywhere yet, or is to be sent again, or its journey."""
        self.twins: dict[int, Journey] = {}
        """Second attempts, beside those that are open."""
        self.twinned = 0
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
        if isinstance(request, Journey):
            self.drop(at_s, key)
            request = request.request
        if attempt or len(segments) > 1 or request.blocks:
            self._run(at_s, action, key, request)
            return
        where = segments[0].replica
        site = self._sites.get(where)
        if site is None or not site.serves:
            self._failed(at_s, key, attempt, "replica", where, 0)
            return
        output_tokens, replica = request.max_output_tokens, site.replica
        if prompt_tokens + output_tokens > site.room_tokens:
            self._failed(at_s, key, attempt, "memory", where, 0)
            return
        self._prefill[key] = self._decode[key] = site.index
        priority = LATE if yields else request.priority
        journey = Journey(key, request, attempt, prompt_tokens, before_tokens, segments, (site,), weight)
        self.open[key] = site.journeys[key] = journey
        replica.add(at_s, key, prompt_tokens, 0, output_tokens, priority, request.tenant, weight)
        self._agenda.look(site)
        if self._reporting and not site.touched:
            self._reports.touched(at_s, site)

    def twin(self, at_s: float, action: Twin) -> None:
        """Send a request along a second route, unless its first attempt has a token; if that is over, alone."""
        key = int(action.request)
        there = self.open.get(key)
        if isinstance(there, Journey):
            if self._first_s[key] != self._first_s[key]:
                self.twinned += 1
                self._run(at_s, Run(*action), key, there.request, twin=True)
        else:
            self.run(at_s, Run(*action))

    def _run(self, at_s: float, action: Run, key: int, request: Request, twin: bool = False) -> None:
        """The same for any route, attempt and prompt."""
        _, route, attempt, prompt_tokens, streamed, weight, yields = action
        segments = route.segments
        sites = []
        for segment in segments:
            site = self._sites.get(segment.replica)
            if site is None or not site.serves:
                self._failed(at_s, key, attempt, "replica", segment.replica, streamed)
                return
            sites.append(site)
        way = tuple(sites)
        journey = Journey(key, request, attempt, prompt_tokens, streamed, segments, way, weight, yields)
        problem = self._network.obstacle(journey)
        if problem is not None:
            self._failed(at_s, key, attempt, *problem, streamed)
            return
        if twin:
            self.twins[key] = journey
        else:
            self.ledger.cached_tokens[key] = 0
            self._enter(journey)
        for site in way:
            site.journeys[key] = journey
        self._begin(at_s, journey)

    def _enter(self, journey: Journey) -> None:
        """The journey that answers a request, as far as is known."""
        key, sites, ledger = journey.key, journey.sites, self.ledger
        whole = journey.segments[-1].start >= journey.prompt_tokens
        kind = records.AGGREGATED if len(sites) == 1 else records.HANDED_OVER if whole else records.SPLIT
        ledger.route[key] = kind
        ledger.prefill_replica[key] = sites[0].index
        ledger.decode_replica[key] = sites[-1].index
        self.open[key] = journey

    def _alone(self, at_s: float, journey: Journey) -> None:
        """Of two journeys of a request this one goes on; the other is taken off everywhere."""
        other: Request | Journey = self.twins.pop(journey.key)
        if other is journey:
            other = self.open[journey.key]
            self._enter(journey)
        assert isinstance(other, Journey)
        self._take_off(at_s, other)

    def _begin(self, at_s: float, journey: Journey) -> None:
        """Give the segment under way to its replica."""
        place = journey.place
        site, segment, request = journey.sites[place], journey.segments[place], journey.request
        stop, start = segment.stop, segment.start
        output = 0
        if stop is None:
            stop = journey.prompt_tokens
            output = request.max_output_tokens - journey.before_tokens
        if request.blocks and site.cache is not None and start < stop:
            hit = site.hit(at_s, request, stop)
            if hit > start:
                cached = self.ledger.cached_tokens
                cached[journey.key] = max(cached[journey.key], hit)
                start = hit
        priority = LATE if journey.yields and start < journey.prompt_tokens else request.priority
        site.replica.add(
            at_s, journey.key, stop - start, start, output, priority, request.tenant, journey.weight
        )
        self.touch(at_s, site)
        if site.waiting:  # it may need fewer blocks than were set aside for it, or give up its KV
            self._handovers.room(at_s, site)
        if output == 0:
            self._expect(at_s, journey, stop)

    def _expect(self, at_s: float, journey: Journey, stop: int) -> None:
        """The KV of [0, stop) will go to the next segment's replica, less what that one holds."""
        source, target = journey.sites[journey.place], journey.sites[journey.place + 1]
        if source is target:
            return
        request, model, have = journey.request, source.member.model, 0
        if request.blocks and target.cache is not None:
            have = target.hit(at_s, request, stop + 1)
        codec = codec_of(self._kits.codecs, journey, source, target)
        size_bytes = self._kits.kv[model].wire_bytes(have, stop, codec)
        self.ledger.wire_bytes[journey.key] += size_bytes
        self._handovers.expect(at_s, journey, size_bytes, codec)

    def replica_due(self, at_s: float, site: Site) -> None:
        if at_s != site.due_s or not site.serves:
            return  # an earlier look took its place, or nobody is there any more
        site.due_s = inf
        if site.replica.wake_s <= at_s:
            self.catch_up(at_s, site)
        self._agenda.look(site)

    def catch_up_if_due(self, at_s: float, site: Site) -> None:
        """Let what is due at a replica happen before something is done to it."""
        if site.replica.wake_s <= at_s:
            self.catch_up(at_s, site)

    def catch_up(self, at_s: float, site: Site) -> None:
        """Let a replica's happenings up to now happen. A step without any is no news."""
        happened = site.replica.advance(at_s)
        if not happened:
            return
        if self._reporting and not site.touched:
            self._reports.touched(at_s, site)
        journeys, first_s = site.journeys, self._first_s
        for when_s, kind, key in happened:
            journey = journeys.get(key)
            if journey is None:
                continue
            if self.twins and key in self.twins and kind in (FIRST, FINISHED):
                self._alone(when_s, journey)
            if kind == FIRST:
                if first_s[key] != first_s[key]:  # a retry's first token is not the user's first
                    first_s[key] = when_s
                if self._chatty:
                    self._first(when_s, site, journey)
            elif kind == FINISHED:
                self._finished(when_s, site, journey)
            elif kind == DONE:
                self._computed(when_s, site, journey)
            elif kind == PREEMPTED:
                self.ledger.preemptions[key] += 1
        if site.waiting:
            self._handovers.room(at_s, site)

    def touch(self, at_s: float, site: Site) -> None:
        """Something happened at a replica: note when its next happening is due, and that it has news."""
        self._agenda.look(site)
        if self._reporting and not site.touched:
            self._reports.touched(at_s, site)

    def _first(self, at_s: float, site: Site, journey: Journey) -> None:
        request = journey.request
        # KV that came whole from elsewhere was kept when it arrived.
        computed = journey.segments[-1].start < journey.prompt_tokens
        if request.blocks and computed and journey.codec == LOSSLESS:
            site.keep(at_s, request.blocks)
        self._tell(at_s, tuple.__new__(FirstToken, (request.id, journey.attempt)))

    def _finished(self, at_s: float, site: Site, journey: Journey) -> None:
        request, key = journey.request, journey.key
        tokens = request.max_output_tokens
        del self.open[key], site.journeys[key]
        self._finish_s[key] = self.ended_s = at_s
        self._outcome[key] = records.ANSWERED
        self._streamed[key] = tokens
        if site.state == "draining":
            self._left(at_s, site, key)
        self._tell(at_s, tuple.__new__(Finished, (request.id, journey.attempt, tokens)))

    def _computed(self, at_s: float, site: Site, journey: Journey) -> None:
        """A segment that hands over is computed."""
        blocks = journey.request.blocks
        whole = journey.segments[journey.place].stop == journey.prompt_tokens
        if blocks and whole and journey.codec == LOSSLESS:
            site.keep(at_s, blocks)
        if journey.hand is not None:
            self._tell(at_s, Computed(journey.request.id, journey.attempt, journey.place))
            self._handovers.computed(at_s, journey)
        else:
            site.replica.release(at_s, journey.key)
            self._next_segment(at_s, journey)

    def handed(self, at_s: float, hand: Handover) -> None:
        if not self._handovers.handed(hand):
            return
        journey, source = hand.journey, hand.source
        if source.replica.wake_s <= at_s:
            self.catch_up(at_s, source)
        source.replica.release(at_s, journey.key)
        self._left(at_s, source, journey.key)
        self.touch(at_s, source)
        if source.waiting:
            self._handovers.room(at_s, source)
        journey.codec = hand.codec
        whole = journey.segments[journey.place].stop == journey.prompt_tokens
        if whole and journey.request.blocks and hand.codec == LOSSLESS:
            hand.target.keep(at_s, journey.request.blocks)
        self._next_segment(at_s, journey)

    def _next_segment(self, at_s: float, journey: Journey) -> None:
        place = journey.place
        journey.place = place + 1
        target = journey.sites[place + 1]
        if target.replica.wake_s <= at_s:
            self.catch_up(at_s, target)
        if journey is not self.open.get(journey.key) and journey is not self.twins.get(journey.key):
            return
        self._begin(at_s, journey)
        self._tell(at_s, tuple.__new__(SegmentDone, (journey.request.id, journey.attempt, place)))

    def _left(self, at_s: float, site: Site, key: int) -> None:
        """A request has nothing more to do at a replica."""
        site.journeys.pop(key, None)
        if site.state == "draining" and not site.journeys:
            self._tell(at_s, told.Drained(site.id))

    def drop(self, at_s: float, key: int) -> int:
        """Take a journey off all its replicas and pipes; how many tokens it had streamed to the user."""
        journey = self.open.get(key)
        if not isinstance(journey, Journey):
            return self.ledger.streamed_tokens[key]
        twin = self.twins.pop(key, None)
        if twin is not None:
            self._take_off(at_s, twin)
        self.open[key] = journey.request
        self.ledger.streamed_tokens[key] = streamed = self._take_off(at_s, journey)
        return streamed

    def _take_off(self, at_s: float, journey: Journey) -> int:
        """The same for one journey alone."""
        key = journey.key
        self._handovers.drop(at_s, journey)
        streamed = journey.before_tokens
        for place, site in enumerate(journey.sites):
            if place == journey.place == len(journey.sites) - 1 and site.journeys.get(key) is journey:
                streamed += site.replica.streamed(at_s, key)
            if site.journeys.get(key) is journey:
                site.replica.cancel(at_s, key)
                self._left(at_s, site, key)
                if site.there:
                    self.touch(at_s, site)
                    if site.waiting:
                        self._handovers.room(at_s, site)
        return streamed

    def fail(self, at_s: float, journey: Journey, kind: FailureKind, where: str) -> None:
        """A request lost its replica, link or transfer; nothing when it is not on its way."""
        key, streamed = journey.key, journey.before_tokens
        first, twin = self.open.get(key), self.twins.get(key)
        if twin is not None and isinstance(first, Journey) and (journey is twin or journey is first):
            self._alone(at_s, first if journey is twin else twin)
        elif journey is first:
            streamed = self.drop(at_s, key)
        else:
            return
        self._failed(at_s, key, journey.attempt, kind, where, streamed)

    def _failed(
        self, at_s: float, key: int, attempt: int, kind: FailureKind, where: str, streamed: int
    ) -> None:
        self._tell(at_s, told.Failed(str(key), attempt, kind, where, streamed))

    def cancel(self, at_s: float, key: int) -> None:
        """The user goes away; too late or too early is nothing."""
        if key not in self.open:
            return
        self._tell(at_s, told.Cancelled(str(key)))
        self.drop(at_s, key)
        self._end(at_s, key, records.CANCELLED)

    def refuse(self, at_s: float, action: Refuse) -> None:
        key = int(action.request)
        if key in self.open:
            self.drop(at_s, key)
            self.ledger.reason[key] = records.REASONS.index(action.reason)
            self._end(at_s, key, records.REFUSED)

    def inquire(self, at_s: float, action: Inquire) -> None:
        """Say that an attempt goes on, or was abandoned and where its user is; what ended was told when it did."""
        key, attempt = int(action.request), action.attempt
        if isinstance(there := self.open.get(key), Journey) and there.attempt == attempt:
            self._tell(at_s, told.Underway(action.request, attempt))
        elif there is not None and not isinstance(there, Journey):
            self._failed(at_s, key, attempt, "timeout", "", self._streamed[key])

    def abandon(self, at_s: float, action: Abandon) -> None:
        journey = self.open.get(int(action.request))
        if isinstance(journey, Journey) and any(site.id in action.replicas for site in journey.sites):
            self.drop(at_s, journey.key)

    def _end(self, at_s: float, key: int, outcome: int) -> None:
        if self.open.pop(key, None) is None:
            raise AssertionError(f"request {key} ended twice")
        self.ledger.finish_s[key] = at_s
        self.ledger.outcome[key] = outcome
        self.ended_s = at_s
