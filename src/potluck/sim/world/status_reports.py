"""What replicas and links say about themselves: once a period, and late, as in the live system.

Only those with news report: a replica that nothing has happened to since its last report would say the same again
(but for the growing contexts of requests that decode undisturbed). One look per period takes all of them, and one
entry on the agenda delivers them, so idle replicas cost nothing.
"""

from __future__ import annotations

from math import floor

from potluck.core.state.events import CacheReported, Event, LinkReported, ReplicaReported
from potluck.sim.links.sim_network import SimNetwork
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world.event_queue import COLLECT, DELIVER, EventQueue
from potluck.sim.world.sim_state import SimReplica


class StatusReports:
    """Who has news, and the looks at them."""

    __slots__ = ("_agenda", "_links", "_network", "_news", "_period_s", "_planned", "delay_s", "lost", "on")

    def __init__(self, events: EventQueue, network: SimNetwork, settings: SimSettings) -> None:
        self._agenda = events
        self._network = network
        self.on = settings.reports is not False
        self._period_s = settings.report_period_s
        self.delay_s = settings.report_delay_s
        self._news: list[SimReplica] = []
        self._planned = False
        self._links: dict[tuple[str, str], tuple[float, float, float, bool]] = {}
        """Link to (served bytes, rate, time, whether busy) at its last report."""
        self.lost = 0
        """Reports that did not arrive."""

    def touched(self, at_s: float, site: SimReplica) -> None:
        """A replica has news."""
        if not self.on:
            return
        site.touched = True
        self._news.append(site)
        if not self._planned:
            self._plan(at_s)

    def link_touched(self, at_s: float) -> None:
        """A link's bandwidth changed."""
        if self.on and not self._planned:
            self._plan(at_s)

    def collect(self, at_s: float, _: object) -> None:
        """Take the reports of this period; they arrive after the delay."""
        self._planned = False
        events: list[Event] = []
        for site in self._news:
            site.touched = False
            if not site.there or site.state == "starting":
                continue
            status = site.replica.status(at_s)
            site.peak_blocks = max(site.peak_blocks, status.total_blocks - status.free_blocks)
            said = self._cached(site)
            if at_s < site.muted_until_s:
                self.lost += 1 + len(said)
                continue
            events.append(ReplicaReported(site.id, status))
            events += said
        self._news.clear()
        events += self._link_reports(at_s)
        if events:
            self._agenda.push(at_s + self.delay_s, DELIVER, events)

    def _cached(self, site: SimReplica) -> list[CacheReported]:
        """What changed in a cache; all of it as well when that was asked for."""
        cache = site.cache
        if cache is None or not (cache.changed or site.recount):
            return []
        said = [site.announcer.report(cache.changes())]
        if site.recount:
            site.recount = False
            said.append(site.announcer.snapshot(cache.everything()))
        return said

    def _link_reports(self, at_s: float) -> list[Event]:
        """Links that carried something or changed since they last reported, and once more when they fall quiet."""
        found: list[Event] = []
        for ends, pipe in self._network.links.items():
            rate = pipe.rate_bytes_per_s
            before_bytes, before_rate, before_s, was_busy = self._links.get(ends, (0.0, rate, 0.0, False))
            queued_bytes = pipe.queued_bytes(at_s)
            passed_bytes = pipe.served_bytes - before_bytes
            busy = passed_bytes > 0 or queued_bytes > 0
            if not (busy or was_busy or rate != before_rate):
                continue
            span_s = at_s - before_s if was_busy else self._period_s
            room_bytes = rate * span_s
            share = min(1.0, passed_bytes / room_bytes) if room_bytes > 0 else float(busy)
            self._links[ends] = (pipe.served_bytes, rate, at_s, busy)
            found.append(LinkReported(*ends, share, queued_bytes, self._network.gbps_of(ends)))
            if busy and not self._planned:
                self._plan(at_s)
        return found

    def _plan(self, at_s: float) -> None:
        """Look at the end of this period."""
        self._planned = True
        self._agenda.push((floor(at_s / self._period_s) + 1) * self._period_s, COLLECT, None)
