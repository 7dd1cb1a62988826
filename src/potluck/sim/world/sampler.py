"""Looks at every replica and link at equidistant times, for plots."""

from __future__ import annotations

import numpy as np

from potluck.sim.results.records import StateSamples
from potluck.sim.world.common_state import CommonState
from potluck.sim.world.event_queue import SAMPLE
from potluck.sim.world.sim_fleet import SimFleet

MOST_LOOKS = 40_000
"""Looks at single replicas, so that plots of a large fleet do not cost more than its run."""
FEWEST = 20


class StateSampler:
    """Rows of what was seen; replicas that came later have zeros before."""

    __slots__ = ("_every_s", "_ground", "_rows", "_yard")

    def __init__(self, common: CommonState, fleet: SimFleet) -> None:
        self._ground = common
        self._yard = fleet
        self._every_s = 0.0
        self._rows: list[tuple[float, list[tuple[int, int, float, float]], list[float]]] = []

    def plan(self) -> None:
        """Spread the looks evenly over the time in which requests arrive."""
        common = self._ground
        count = common.settings.samples
        if count <= 0 or not len(common.workload):
            return
        replicas = max(1, len(common.sites))
        count = max(min(count, MOST_LOOKS // replicas), min(count, FEWEST))
        span_s = float(common.workload.arrival_s[-1])
        self._every_s = span_s / count if span_s > 0 else 1.0
        common.events.push(self._every_s, SAMPLE, None)

    def take(self, at_s: float, _: object) -> None:
        common = self._ground
        rows = []
        for site in self._yard.all_sites:
            replica = site.replica
            if not site.there:
                rows.append((0, 0, 0.0, replica.busy_s(at_s)))
                continue
            status = replica.status(at_s)
            used = 1.0 - status.free_blocks / status.total_blocks
            rows.append((status.queued, status.running, used, replica.busy_s(at_s)))
            site.peak_blocks = max(site.peak_blocks, status.total_blocks - status.free_blocks)
        sent = [pipe.sent_bytes + pipe.open_bytes(at_s) for pipe in common.network.links.values()]
        self._rows.append((at_s, rows, sent))
        common.events.push(at_s + self._every_s, SAMPLE, None)

    def samples(self) -> StateSamples | None:
        if not self._rows:
            return None
        replicas, links = len(self._yard.all_sites), len(self._ground.network.links)
        shape = (len(self._rows), replicas)
        queued, running = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        used, busy = np.zeros(shape), np.zeros(shape)
        sent = np.zeros((len(self._rows), links))
        for place, (_, rows, link_bytes) in enumerate(self._rows):
            for column, (waiting, going, share, busy_s) in enumerate(rows):
                queued[place, column], running[place, column] = waiting, going
                used[place, column], busy[place, column] = share, busy_s
            sent[place] = link_bytes
        at_s = np.array([row[0] for row in self._rows])
        return StateSamples(at_s, queued, running, used, busy, sent)
