"""The way of requests through the world: along their routes, to an answer, a refusal or a failure.

Each segment is given to its replica when the KV it needs is there. Prefixes that the replica holds shorten its work,
those that the next one holds shorten the cargo. Whoever loses a replica, a link or a transfer is reported as failed;
the Brain then sends it again or refuses it.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from potluck.core.brain import events as told
from potluck.core.brain.actions import Abandon, Inquire, Refuse, Run
from potluck.core.brain.events import Computed, FailureKind, Finished, FirstToken, SegmentDone
from potluck.core.brain.facts import BLOCK_TOKENS
from potluck.core.replica.batch import DONE, FINISHED, FIRST, PREEMPTED
from potluck.core.replica.batch_values import LATE
from potluck.core.values.types import Request
from potluck.sim.results import records
from potluck.sim.world.ground import Ground, Tell
from potluck.sim.world.state import Handover, Journey, Site

if TYPE_CHECKING:
    from potluck.core.replica.spare import SpareCache


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

    def _run(self, at_s: float, action: Run, key: int, request: Request) -> None:
        """The same for any route, attempt and prompt."""
        segments, ledger, streamed = action.route.segments, self.ledger, action.streamed_tokens
        sites = []
        for segment in segments:
            site = self._sites.get(segment.replica)
            if site is None or not site.serves:
                self._failed(at_s, key, action.attempt, "replica", segment.replica, streamed)
                return
            sites.append(site)
        journey = Journey(
            key,
            request,
            action.attempt,
            action.prompt_tokens,
            streamed,
            segments,
            tuple(sites),
            action.weight,
            action.yields,
        )
        problem = self._obstacle(journey)
        if problem is not None:
            self._failed(at_s, key, action.attempt, *problem, streamed)
            return
        whole = segments[-1].start >= action.prompt_tokens
        kind = records.AGGREGATED if len(sites) == 1 else records.HANDED_OVER if whole else records.SPLIT
        ledger.route[key] = kind
        ledger.prefill_replica[key] = sites[0].index
        ledger.decode_replica[key] = sites[-1].index
        ledger.cached_tokens[key] = 0
        self.open[key] = journey
        for site in sites:
            site.journeys[key] = journey
        self._begin(at_s, journey)

    def _obstacle(self, journey: Journey) -> tuple[FailureKind, str] | None:
        """Why a route cannot be gone: a replica too small, or no link for its KV."""
        output_tokens = journey.request.max_output_tokens - journey.before_tokens
        sites, last = journey.sites, len(journey.sites) - 1
        if journey.prompt_tokens + output_tokens > sites[last].room_tokens:
            return "memory", sites[last].id
        for place in range(last):
            source, target = sites[place].member.region, sites[place + 1].member.region
            if source != target and not self._network.carries(source, target):
                return "link", f"{source}->{target}"
        for place in range(last):
            stop = journey.segments[place].stop
            if stop is not None and stop > sites[place].room_tokens:
                return "memory", sites[place].id
        return None

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
            hit = self._hit(at_s, site, request, stop)
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

    def _hit(self, at_s: float, site: Site, request: Request, stop: int) -> int:
        """Tokens of a prefix that a replica holds; the last token is always computed."""
        cache = site.cache
        if not cache:
            return 0
        self._fit(at_s, site, cache)
        return min(cache.match(request.blocks) * cache.block_tokens, stop - 1)

    def keep(self, at_s: float, site: Site, blocks: tuple[int, ...]) -> None:
        """The KV of a prompt's blocks is at a replica: hold what fits beside running requests."""
        cache = site.cache
        if cache is not None:
            cache.keep(blocks)
            self._fit(at_s, site, cache)

    def _fit(self, at_s: float, site: Site, cache: SpareCache) -> None:
        """Give up cached blocks whose room running requests need."""
        cache.shrink(site.replica.free_blocks(at_s) * BLOCK_TOKENS)

    def _expect(self, at_s: float, journey: Journey, stop: int) -> None:
        """The KV of [0, stop) will go to the next segment's replica, less what that one holds."""
        source, target = journey.sites[journey.place], journey.sites[journey.place + 1]
        if source is target:
            return
        request, model, have = journey.request, source.member.model, 0
        if request.blocks and target.cache is not None:
            have = self._hit(at_s, target, request, stop + 1)
        codec = source.kit.codec
        if source.member.unit != target.member.unit:
            codec = self._kits.codecs.get((model, source.member.region, target.member.region), "fp16")
        size_bytes = self._kits.kv[model].wire_bytes(have, stop, codec)
        self.ledger.wire_bytes[journey.key] += size_bytes
        self._handovers.expect(at_s, journey, size_bytes)

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
        if request.blocks and journey.segments[-1].start < journey.prompt_tokens:
            self.keep(at_s, site, request.blocks)
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
        if blocks and journey.segments[journey.place].stop == journey.prompt_tokens:
            self.keep(at_s, site, blocks)
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
        target = hand.target
        whole = journey.segments[journey.place].stop == journey.prompt_tokens
        if whole and journey.request.blocks:
            self.keep(at_s, target, journey.request.blocks)
        self._next_segment(at_s, journey)

    def _next_segment(self, at_s: float, journey: Journey) -> None:
        place = journey.place
        journey.place = place + 1
        target = journey.sites[place + 1]
        if target.replica.wake_s <= at_s:
            self.catch_up(at_s, target)
        if self.open.get(journey.key) is not journey:
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
        self.open[key] = journey.request
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
        self.ledger.streamed_tokens[key] = streamed
        return streamed

    def fail(self, at_s: float, key: int, kind: FailureKind, where: str) -> None:
        """A request lost its replica, link or transfer; nothing when it is not on its way."""
        if isinstance(journey := self.open.get(key), Journey):
            self._failed(at_s, key, journey.attempt, kind, where, self.drop(at_s, key))

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
