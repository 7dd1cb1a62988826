"""What the parts of the simulated world share: event queue, replicas, links, ledger, reports.

Replicas and links whose state changed report at the end of a period of `report_period_s`; reports arrive
`report_delay_s` later, unless a fault drops them. Parts depend on each other in one direction only:

    common state <- attempts <- fleet <- external events, sampler <- world
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor

from potluck.core.state.events import CacheReported, Event, LinkReported, ReplicaReported
from potluck.perf.memory import weight_bytes
from potluck.runtime.replica_models import ReplicaModels
from potluck.sim.links.handovers import SimHandovers
from potluck.sim.links.sim_network import SimNetwork
from potluck.sim.load.workload import Workload
from potluck.sim.results.ledger import CostMeter, RequestLedger
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world.event_queue import COLLECT, DELIVER, EventQueue, slices_per_s
from potluck.sim.world.sim_state import SimReplica


class StatusReports:
    """Collects status reports of replicas, caches and links and delivers them to the Brain."""

    def __init__(self, events: EventQueue, network: SimNetwork, settings: SimSettings) -> None:
        self._events = events
        self._network = network
        self.on = settings.reports is not False
        self._period_s = settings.report_period_s
        self.delay_s = settings.report_delay_s
        self._news: list[SimReplica] = []
        self._planned = False
        self._links: dict[tuple[str, str], tuple[float, float, float, bool]] = {}
        """Link to (served bytes, rate in bytes/s, time, whether busy) at its last report."""
        self.lost = 0
        """Reports that did not arrive."""

    def touched(self, at_s: float, replica: SimReplica) -> None:
        if not self.on:
            return
        replica.touched = True
        self._news.append(replica)
        if not self._planned:
            self._plan(at_s)

    def link_touched(self, at_s: float) -> None:
        if self.on and not self._planned:
            self._plan(at_s)

    def collect(self, at_s: float, _: object) -> None:
        self._planned = False
        events: list[Event] = []
        for replica in self._news:
            replica.touched = False
            if not replica.exists or replica.state == "starting":
                continue
            status = replica.replica.status(at_s)
            cached = self._cached(replica)
            if at_s < replica.muted_until_s:
                self.lost += 1 + len(cached)
                continue
            events.append(ReplicaReported(replica.id, status))
            events += cached
        self._news.clear()
        events += self._link_reports(at_s)
        if events:
            self._events.push(at_s + self.delay_s, DELIVER, events)

    def _cached(self, replica: SimReplica) -> list[CacheReported]:
        """Changes of a cache since its last report, and its whole content if the Brain requested that."""
        cache = replica.cache
        if cache is None or not (cache.changed or replica.recount):
            return []
        cache_reporteds = [replica.announcer.report(cache.changes())]
        if replica.recount:
            replica.recount = False
            cache_reporteds.append(replica.announcer.snapshot(cache.everything()))
        return cache_reporteds

    def _link_reports(self, at_s: float) -> list[Event]:
        """Reports of links that carry or ever carried KV: reports of an idle link lower a raised length threshold."""
        events: list[Event] = []
        for ends, pipe in self._network.links.items():
            rate = pipe.rate_bytes_per_s
            before_bytes, before_rate, before_s, was_busy = self._links.get(ends, (0.0, rate, 0.0, False))
            queued_bytes = pipe.queued_bytes(at_s)
            passed_bytes = pipe.served_bytes - before_bytes
            busy = passed_bytes > 0 or queued_bytes > 0
            if not (busy or rate != before_rate or ends in self._links):
                continue
            span_s = at_s - before_s if was_busy else self._period_s
            room_bytes = rate * span_s
            share = min(1.0, passed_bytes / room_bytes) if room_bytes > 0 else float(busy)
            self._links[ends] = (pipe.served_bytes, rate, at_s, busy)
            events.append(LinkReported(*ends, share, queued_bytes, self._network.gbps_of(ends)))
            if busy and not self._planned:
                self._plan(at_s)
        return events

    def _plan(self, at_s: float) -> None:
        self._planned = True
        self._events.push((floor(at_s / self._period_s) + 1) * self._period_s, COLLECT, None)


Tell = Callable[[float, Event], None]  # Passes an event to the Brain and carries out the actions it returns.


class CommonState:
    """State that all parts of the simulated world read."""

    def __init__(self, replica_models: ReplicaModels, workload: Workload, settings: SimSettings) -> None:
        self.replica_models = replica_models
        self.workload = workload
        self.settings = settings
        plan = replica_models.resolved.plan
        replicas = sum(each.count * len(plan.template(each.template).replicas) for each in plan.deployments)
        self.events = EventQueue(slices_per_s(replicas, workload.rate_per_s or 0.0))
        self.replicas: dict[str, SimReplica] = {}
        """Replicas that have not ended, by id."""
        self.network = SimNetwork(replica_models.resolved)
        self.handovers = SimHandovers(self.events, self.network, settings.overlap)
        self.reports = StatusReports(self.events, self.network, settings)
        self.ledger = RequestLedger(len(workload))
        resolved = replica_models.resolved
        weights = {model: float(weight_bytes(resolved.model(model))) for model in resolved.models}
        self.costs = CostMeter(resolved.regions, weights)
