"""Looking after engines: each is asked how it fares, and what changed in its prefix cache.

How often: `next_question_s`. One that takes longer to answer than it ever does (`ResponseTimes`) is silent: its
requests go elsewhere, and it gets none until it answers. One that has not answered for SILENT_S, or at whose address
nobody listens, is lost. Waiting is counted in steps of WAIT_S that passed here, few where this process is held up as
well. One whose line crawls (`crawls`) answers, but is treated as silent; what it has goes on. Servers of
OpenAI's API are probed (`server_probe`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeVar

from potluck.core.errors import PotluckError
from potluck.core.state.events import LinkReported, ReplicaReported, ReplicaSilent
from potluck.core.state.fleet import ReplicaState
from potluck.gateway.registry.engine_client import EngineRecord
from potluck.gateway.registry.registry import ReplicaRegistry, Tell
from potluck.gateway.registry.server_probe import ServerUnusable, served_name, with_model

LEAST_BUSY = 0.1
"""Share of a period in which something must have been on its way for its rate to say anything."""
LEAST_QUEUE_S = 0.1
"""Bytes must wait so long for the rate seen to say anything: some layers are always about to leave."""
LEAST_SENT = 0.01
"""Share of what a link could carry that must have been sent for segments sent again to say anything: receivers count
bytes when a chunk is there, so some were always sent before and are counted later."""
SEGMENT_BYTES = 1448  # Payload of a segment of TCP in a frame of 1,500 bytes.


@dataclass(slots=True)
class LinkTraffic:
    moved_bytes: float = 0.0
    busy_s: float = 0.0
    queued_bytes: float = 0.0
    resent_segments: float = 0.0


def link_reports(
    passed: Mapping[tuple[str, str], LinkTraffic],
    planned_gbps: Mapping[tuple[str, str], float],
    period_s: float,
) -> list[LinkReported]:
    """One for each planned link. Layers cross as they are computed: the rate seen counts only where bytes wait."""
    reports = []
    for ends, gbps in planned_gbps.items():
        traffic = passed.get(ends, LinkTraffic())
        room_bytes = gbps * 1e9 / 8 * period_s
        share = min(1.0, traffic.moved_bytes / room_bytes) if room_bytes > 0 else 1.0
        busy_s = min(period_s, traffic.busy_s)
        if traffic.queued_bytes > LEAST_QUEUE_S * gbps * 1e9 / 8 and busy_s >= LEAST_BUSY * period_s:
            gbps = min(gbps, traffic.moved_bytes * 8e-9 / busy_s)
        resent_bytes = traffic.resent_segments * SEGMENT_BYTES
        sent_bytes = traffic.moved_bytes + resent_bytes
        lost = resent_bytes / sent_bytes if sent_bytes > LEAST_SENT * room_bytes > 0 else 0.0
        reports.append(LinkReported(*ends, share, traffic.queued_bytes, gbps, lost))
    return reports


POLL_S, FLOWS_S, IDLE_S = 0.5, 1.0, 1.5
SILENT_S, WAIT_S, AGAIN_S, SAME_S, DRIFT_S = 2.5, 0.1, 0.5, 2.0, 2.0
Condition = Literal["suspected", "busy", "idle"]


def next_question_s(condition: Condition, answered_s: float, streamed_s: float) -> float:
    """POLL_S after its last sign of life: its status, or a token. Tokens say nothing of load, which is never older
    than FLOWS_S. Nobody waits for an idle one; as soon as somebody does, or it hangs up, it is idle no more."""
    if condition == "idle":
        return answered_s + IDLE_S
    flows_s = streamed_s if condition == "busy" else -inf
    return min(max(answered_s, flows_s) + POLL_S, answered_s + FLOWS_S)


def caches_differ(engine: EngineRecord, now_s: float) -> bool:
    """Whether its prefix cache has another prompt than when last asked for. What answers add may wait."""
    (asked_s, tokens), status_report = engine.cached, engine.said
    same = (
        status_report is not None
        and engine.cache_epoch is not None
        and 0 <= status_report.prompt_tokens == tokens
    )
    return not same or now_s - asked_s >= SAME_S


def restarted(older_s: float, since_s: float) -> bool:
    """Whether an engine is not older by what has passed. After a gap, a new one may be older than the one before."""
    return older_s < max(0.0, since_s - DRIFT_S)


LONG_RTT_S, LONGER, CRAWLS_S = 0.15, 4.0, 20.0


def crawls(rtt_s: float, least_rtt_s: float, others_s: Iterable[float]) -> bool:
    """Whether packets wait on an engine's own line: round trips take long, many times as long as before, and as those
    to another that could take its place. However busy a process is, its kernel acknowledges within 40 ms."""
    return rtt_s > max(LONG_RTT_S, LONGER * least_rtt_s, LONGER * min(others_s, default=inf))


def stands_in(replica: ReplicaState | None, other_replica: ReplicaState) -> bool:
    """Whether one replica can take what another is sent."""
    if replica is None or not replica.serves or replica.role != other_replica.role:
        return False
    return (replica.member.model, replica.member.region) == (
        other_replica.member.model,
        other_replica.member.region,
    )


Answer = TypeVar("Answer")


REASON_MAX_CHARS = 400


class HealthChecker:
    def __init__(
        self,
        registry: ReplicaRegistry,
        tell: Tell,
        *,
        caches: bool,
        planned_gbps: Mapping[tuple[str, str], float],
        views: Mapping[str, ReplicaState],
    ) -> None:
        self._registry, self._tell, self._views = registry, tell, views
        self._caches, self._planned_gbps = caches, planned_gbps
        self._looked_s = time.monotonic()
        self.links: tuple[LinkReported, ...] = ()
        self.lateness = EmulationLag()
        self.moved: Callable[[str, str, str, int, float], None] = lambda *_: None
        """Hears what crossed from one replica to another since the last look."""
        self.streamed_s: Callable[[str], float] = lambda replica: -inf  # Where tokens pass through here.

    def meet(self) -> None:
        loop = asyncio.get_running_loop()
        for engine in self._registry.engines:
            if engine.watching is None or engine.watching.done():
                engine.watching = loop.create_task(self._watch(engine))

    def look(self) -> None:
        """At every tick, and not between: what crosses in a moment says little of how full a link is."""
        self.meet()
        now_s = time.monotonic()
        period_s, self._looked_s = now_s - self._looked_s, now_s
        passed = self._passed()
        if self._planned_gbps and period_s > 0:
            self.links = tuple(link_reports(passed, self._planned_gbps, period_s))
            for report in self.links:
                self._tell(report)

    async def _watch(self, engine: EngineRecord) -> None:
        due_s = -inf
        while True:
            if due_s > (now_s := time.monotonic()):
                await asyncio.sleep(min(POLL_S, due_s - now_s))
            else:
                try:
                    await self._ask(engine)
                except (PotluckError, ValueError) as error:
                    definite = isinstance(error, ServerUnusable) and error.definite
                    self._silent(engine, " ".join(str(error).split())[:REASON_MAX_CHARS], definite)
                engine.asked_s = time.monotonic()
            due_s = next_question_s(self._condition(engine), engine.asked_s, self.streamed_s(engine.replica))

    def _condition(self, engine: EngineRecord) -> Condition:
        replica, status = self._views.get(engine.replica), engine.said
        linked = status is not None and status.links and self._planned_gbps  # looked at in every tick
        unheard = not engine.up or engine.heard_s < engine.asked_s - WAIT_S
        if replica is None or replica.doubted or unheard or linked:
            return "suspected"
        works = replica.open_requests or (status is not None and any(status.status[:2]))
        return "busy" if works or not self._registry.caller.connected(engine) else "idle"

    async def _ask(self, engine: EngineRecord) -> None:
        caller, registry = self._registry.caller, self._registry
        if engine.entry.kind == "openai":
            fresh = self._condition(engine) == "suspected"
            engine.models = await self._prompt(engine, caller.listed_models(engine, fresh=fresh))
            self._check_served_model(engine)
            registry.heard(engine)
            return
        since_s = time.monotonic() - engine.heard_s
        status, before = await self._prompt(engine, caller.status(engine)), engine.said
        engine.said = status
        self.lateness.told(engine.entry.url, status.predicted_s, status.took_s)
        if before is not None and engine.replica:
            if restarted(status.uptime_s - before.uptime_s, since_s):
                registry.lost(engine, "was restarted")
            elif status.fingerprint != before.fingerprint or status.model != before.model:
                registry.lost(engine, "serves something else than before")
            elif status.state == "failed":
                registry.lost(engine, status.problem or "has failed")
        registry.heard(engine)
        replica = engine.replica
        if not replica or registry.find(replica) is None:
            return
        if self._crawls(engine):
            self._report(engine, ReplicaSilent(replica, CRAWLS_S))
        elif time.monotonic() >= engine.crawls_until_s:
            self._report(engine, ReplicaReported(replica, status.status))
        if self._caches and caches_differ(engine, time.monotonic()):
            engine.cached = time.monotonic(), status.prompt_tokens
            for report in await caller.cache(engine):
                if engine.replica == replica:
                    self._tell(report)

    def _crawls(self, engine: EngineRecord) -> bool:
        """Then it is sent nothing for a while, as packets wait no longer then; unless nobody else is left."""
        rtt_s, mine = self._registry.caller.rtt_s(engine), self._views.get(engine.replica)
        if rtt_s <= 0 or mine is None:
            return False
        engine.rtt_s, engine.least_rtt_s = rtt_s, min(engine.least_rtt_s, rtt_s)
        if rtt_s <= LONG_RTT_S and time.monotonic() >= engine.crawls_until_s:
            return False
        others = [other for other in self._registry.engines if other.rtt_s > 0]
        near_s = [other.rtt_s for other in others if stands_in(self._views.get(other.replica), mine)]
        slow = crawls(rtt_s, engine.least_rtt_s, near_s)
        if slow or not near_s:
            engine.crawls_until_s = time.monotonic() + CRAWLS_S if slow else -inf
        return slow

    def _report(self, engine: EngineRecord, report: ReplicaReported | ReplicaSilent) -> None:
        """What says nothing new is told now and then: it is written down each time."""
        now_s = time.monotonic()
        told_s, replica_reported = engine.told
        if report != replica_reported or now_s - told_s >= SAME_S:
            engine.told = now_s, report
            self._tell(report)

    async def _prompt(self, engine: EngineRecord, question: Awaitable[Answer]) -> Answer:
        """Its answer; while that takes longer than it ever does, the registry hears so."""
        engine.waiting = asyncio.get_running_loop().call_later(WAIT_S, self._waits, engine, -AGAIN_S)
        try:
            answer = await question
        finally:
            engine.waiting.cancel()
        engine.answers, engine.waited_s = engine.answers.heard(engine.waited_s), 0.0
        return answer

    def _waits(self, engine: EngineRecord, said_s: float) -> None:
        engine.waited_s += WAIT_S
        if engine.waited_s >= max(engine.answers.limit_s, said_s + AGAIN_S):
            said_s, engine.told = engine.waited_s, (0.0, None)  # that it answers again is news
            self._registry.silent(engine)
        engine.waiting = asyncio.get_running_loop().call_later(WAIT_S, self._waits, engine, said_s)

    def _check_served_model(self, engine: EngineRecord) -> None:
        """Release a server from its replica when it serves another model than before under that name."""
        endpoint = self._registry.find(engine.replica) if engine.replica else None
        if endpoint is None:
            if engine.entry.model or engine.entry.served_model:
                served_name(engine.entry, engine.models)
            return
        served = served_name(with_model(engine.entry, endpoint.model), engine.models)
        if served != endpoint.served_model:
            self._registry.lost(
                engine, f"{engine.entry.base_url} serves {served} instead of {endpoint.served_model} now"
            )

    def _silent(self, engine: EngineRecord, why: str, definite: bool) -> None:
        """Lost at once where that is `definite` or nothing listens there; else after SILENT_S without an answer."""
        refused = definite or "refused" in why or "reset" in why or "no connection" in why
        if not engine.replica or refused or time.monotonic() - engine.heard_s > SILENT_S:
            self._registry.lost(engine, why)

    def _passed(self) -> dict[tuple[str, str], LinkTraffic]:
        registry = self._registry
        senders = {item.kv: item for item in registry.endpoints if item.kv}
        all_traffic: dict[tuple[str, str], LinkTraffic] = {}
        for engine in registry.engines:
            endpoint = registry.find(engine.replica) if engine.replica else None
            if endpoint is None or engine.said is None:
                continue
            for link in engine.said.links:
                sender = senders.get(link.peer)
                if sender is None:  # said by the sender, whose peers have no names
                    again = max(0.0, link.retransmits - engine.resent.get(link.peer, 0.0))
                    engine.resent[link.peer] = link.retransmits
                    for ends in self._planned_gbps:
                        if ends[0] == endpoint.region:
                            passed = all_traffic.setdefault(ends, LinkTraffic())
                            passed.queued_bytes += link.queue_bytes
                            passed.resent_segments += again
                    continue
                rate = link.goodput_bytes_per_s
                busy_s = link.moved_bytes / rate if rate > 0 else 0.0
                moved_before, busy_before = engine.links.get(link.peer, (0.0, 0.0))
                engine.links[link.peer] = (link.moved_bytes, busy_s)
                moved_bytes, took_s = link.moved_bytes - moved_before, max(0.0, busy_s - busy_before)
                if moved_bytes <= 0:  # nothing, or it was restarted
                    continue
                passed = all_traffic.setdefault((sender.region, endpoint.region), LinkTraffic())
                passed.moved_bytes += moved_bytes
                passed.busy_s += took_s
                codec = registry.codec(sender, endpoint)
                self.moved(sender.replica, endpoint.replica, codec, round(moved_bytes), took_s)
        return all_traffic


WINDOW_S = 30.0
LEAST_S = 1.0
SLOW = 1.25  # Times as long as they should that steps may take before it is said.


class EmulationLag:
    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}
        self._predicted_s = self._took_s = 0.0

    def told(self, engine: str, predicted_s: float, took_s: float) -> None:
        """Both since the engine started. What it did before it was first asked, its very first steps, is left out."""
        before = self._last.get(engine)
        self._last[engine] = (predicted_s, took_s)
        if before is None or predicted_s <= before[0]:  # it is new, or has done nothing since
            return
        self._predicted_s += predicted_s - before[0]
        self._took_s += took_s - before[1]
        keep = min(1.0, WINDOW_S / self._predicted_s)
        self._predicted_s, self._took_s = keep * self._predicted_s, keep * self._took_s

    @property
    def slowdown(self) -> float | None:
        """Times as long as they should that steps took lately; None where hardly any were seen."""
        return None if self._predicted_s < LEAST_S else max(1.0, self._took_s / self._predicted_s)


def slow_lines(slowdown: float | None) -> list[str]:
    if slowdown is None or slowdown < SLOW:
        return []
    return [
        f"this machine computes {slowdown:.1f} times slower than the GPUs it stands for: "
        "latencies are the CPU's, not the plan's"
    ]
