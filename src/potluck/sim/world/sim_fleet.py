"""Replicas and machines: they start, become ready, drain, flip, stop and are lost; machines are paid meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from potluck.core.errors import InputError
from potluck.core.replica.spare_cache import SpareCache
from potluck.core.state.actions import (
    DrainReplica,
    FlipReplica,
    Reassign,
    SeenLengths,
    StartReplica,
    StopReplica,
)
from potluck.core.state.events import ReplicaDrained, ReplicaLost, ReplicaReady
from potluck.core.values.plan import Plan, ReplicaSpec
from potluck.core.values.types import Region, Role
from potluck.sim.results.records import StateSamples
from potluck.sim.world.attempts import SimAttempts
from potluck.sim.world.common_state import CommonState, Tell
from potluck.sim.world.event_queue import CALL, READY, SAMPLE
from potluck.sim.world.sim_state import SimMachine, SimReplica

if TYPE_CHECKING:
    from potluck.runtime.replica_models import ReplicaModel
    from potluck.sim.sim_engine import SimEngine

Make = Callable[["ReplicaModel", Role], "SimEngine"]
STOPPED = 1e12  # Times as long that steps take where nothing is computed any more.


class SimFleet:
    def __init__(self, common: CommonState, attempts: SimAttempts, tell: Tell, make: Make) -> None:
        self._common = common
        self._attempts = attempts
        self._tell = tell
        self._make = make
        self.warm = False
        """Whether what is started now is ready at once."""
        self.all_sites: list[SimReplica] = []
        self.machines: dict[str, SimMachine] = {}
        """Those that are rented."""
        self.gone: set[str] = set()
        """Machines with names of their own that were lost: there is no other in their place."""

    def start(self, at_s: float, action: StartReplica) -> SimReplica:
        member, common = action.member, self._common
        if member.id in common.sites:
            raise InputError(f"replica {member.id}", "was started twice")
        model = common.replica_models.replica_models[member.template, member.index]
        machines = tuple([self._machine(at_s, member, model, number) for number in range(len(model.places))])
        card = machines[0].card if len(machines) == 1 else common.network.card(member.id, model.card_gbps)
        site = SimReplica(len(self.all_sites), member, model, self._make(model, member.role), machines, card)
        if common.settings.caches and common.workload.blocks is not None:
            site.cache = self._cache(member.model, common.workload.blocks.tokens)
        for machine in machines:
            machine.sites.append(site)
        common.sites[member.id] = site
        common.costs.store(at_s, member.region, member.model, 1)
        self.all_sites.append(site)
        site.become(at_s, "starting")
        if any(machine.name in self.gone for machine in machines):
            common.events.push(at_s, CALL, lambda when_s: self.lose(when_s, site, "its machine is gone"))
        elif self.warm:
            self.ready(at_s, site)
        else:
            common.events.push(at_s + model.startup_s, READY, site)
        return site

    def ready(self, at_s: float, site: SimReplica) -> None:
        if site.state == "starting":
            site.become(at_s, "ready")
            for machine in site.machines:
                if not machine.served:
                    machine.served = True
                    self._common.costs.up(at_s, machine.region, machine.node)
            self._tell(at_s, ReplicaReady(site.id))

    def drain(self, at_s: float, action: DrainReplica) -> None:
        site = self._common.sites.get(action.replica)
        if site is None or site.state in ("leaving", "draining"):
            return
        site.become(at_s, "draining")
        if not site.attempts:
            self._tell(at_s, ReplicaDrained(site.id))

    def stop(self, at_s: float, action: StopReplica) -> None:
        site = self._common.sites.get(action.replica)
        if site is not None:
            self._end(at_s, site, "stopped")

    def flip(self, at_s: float, action: FlipReplica) -> None:
        site = self._common.sites.get(action.replica)
        if site is not None:
            site.role = action.role
            site.become(at_s, site.state)

    def reassign(self, at_s: float, action: Reassign) -> None:
        site = self._common.sites.get(action.member.id)
        if site is not None:
            site.member, site.role = action.member, action.member.role
            site.become(at_s, site.state)

    def lose(self, at_s: float, site: SimReplica, reason: str, notice_s: float = 0.0) -> None:
        """A replica goes without being asked. With notice the Brain knows at once, and the machine goes later."""
        if not site.there:
            return
        if notice_s > 0:
            if site.state != "leaving":
                site.become(at_s, "leaving")
                again = partial(self.lose, site=site, reason=reason)
                self._common.events.push(at_s + notice_s, CALL, again)
                self._tell(at_s, ReplicaLost(site.id, reason, notice_s))
            return
        heartbeat_s = self._common.settings.heartbeat_s
        if heartbeat_s > 0 and site.state == "ready" and not site.silent:
            self._fall_silent(at_s, site, reason, heartbeat_s)
            return
        known = site.state == "leaving"
        self._attempts.catch_up_if_due(at_s, site)
        site.become(at_s, "lost")
        if not known:
            self._tell(at_s, ReplicaLost(site.id, reason))
        self._end(at_s, site, "lost")

    def _fall_silent(self, at_s: float, site: SimReplica, reason: str, heartbeat_s: float) -> None:
        """It computes and says nothing any more; nobody knows until its heartbeat has been missing for so long."""
        site.silent = True
        site.muted_until_s = inf
        self._attempts.catch_up_if_due(at_s, site)
        site.replica.set_speed(at_s, STOPPED)
        self._attempts.touch(at_s, site)
        self._common.events.push(at_s + heartbeat_s, CALL, lambda when_s: self.lose(when_s, site, reason))

    def _end(self, at_s: float, site: SimReplica, state: str) -> None:
        common = self._common
        if state == "stopped":
            self._attempts.catch_up_if_due(at_s, site)
            site.become(at_s, "stopped")
        del common.sites[site.id]
        common.costs.store(at_s, site.member.region, site.member.model, -1)
        site.waiting.clear()
        for running in list(site.attempts.values()):
            self._attempts.fail(at_s, running, "replica", site.id)
        for machine in site.machines:
            machine.sites.remove(site)
            if not machine.sites:
                del self.machines[machine.name]
                common.costs.give_back(at_s, machine.region, machine.node, machine.served)

    def _machine(self, at_s: float, member: ReplicaSpec, model: ReplicaModel, number: int) -> SimMachine:
        # Machines that a plan names are those of a pool; of others as many can be had as there are.
        node, place = model.places[number]
        name = model.names[number] if model.names else f"{member.unit}/{node}/{place}"
        machine = self.machines.get(name)
        if machine is None:
            common, resolved = self._common, self._common.replica_models.resolved
            card = common.network.card(name, resolved.node(node).network_gbps)
            machine = self.machines[name] = SimMachine(name, node, member.region, card)
            common.costs.rent(at_s, member.region, node)
        return machine

    def _cache(self, model: str, block_tokens: int) -> SpareCache:
        facts = self._common.replica_models.facts().models[model]
        state_tokens = 0.0
        if facts.exact_prefix and facts.kv_bytes_per_token > 0:
            state_tokens = facts.fixed_bytes / facts.kv_bytes_per_token
        return SpareCache(block_tokens, facts.exact_prefix, state_tokens)


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    at_s: float
    rates_per_s: tuple[tuple[str, float], ...]  # Model to requests a second that a plan is wanted for.
    regions: tuple[Region, ...]
    running: Plan  # The newest plan with the copies of it that are there and stay.
    lengths: tuple[SeenLengths, ...] = ()


Planner = Callable[[PlanQuestion], Plan | None]  # None when there is no plan, or none better.


def running_of(plan: Plan, sites: Iterable[SimReplica]) -> Plan:
    """A plan with the copies that are up or coming up whole; those on their way out or on standby are none."""
    replicas = {template.name: len(template.replicas) for template in plan.repertoire}
    there = Counter(
        (site.member.unit, site.member.template, site.member.region)
        for site in sites
        if site.state in ("starting", "ready") and not site.member.standby
    )
    whole = [key for key, count in there.items() if count >= replicas.get(key[1], inf)]
    return plan.holding(Counter((template, region) for _, template, region in whole))


MOST_LOOKS = 40_000  # Looks at single replicas, so that plots of a large fleet do not cost more than its run.
FEWEST = 20


class StateSampler:
    """Rows of what was seen; replicas that came later have zeros before."""

    def __init__(self, common: CommonState, fleet: SimFleet) -> None:
        self._common = common
        self._fleet = fleet
        self._every_s = 0.0
        self._rows: list[tuple[float, list[tuple[int, int, float, float]], list[float]]] = []

    def plan(self) -> None:
        common = self._common
        count = common.settings.samples
        if count <= 0 or not len(common.workload):
            return
        replicas = max(1, len(common.sites))
        count = max(min(count, MOST_LOOKS // replicas), min(count, FEWEST))
        self._every_s = common.workload.last_s / count or 1.0
        common.events.push(self._every_s, SAMPLE, None)

    def take(self, at_s: float, _: object) -> None:
        common = self._common
        rows = []
        for site in self._fleet.all_sites:
            replica = site.replica
            if not site.there:
                rows.append((0, 0, 0.0, replica.busy_s(at_s)))
                continue
            status = replica.status(at_s)
            used = 1.0 - status.free_blocks / status.total_blocks
            rows.append((status.queued, status.running, used, replica.busy_s(at_s)))
        sent = [pipe.sent_bytes + pipe.open_bytes(at_s) for pipe in common.network.links.values()]
        self._rows.append((at_s, rows, sent))
        common.events.push(at_s + self._every_s, SAMPLE, None)

    def samples(self) -> StateSamples | None:
        if not self._rows:
            return None
        states = np.zeros((4, len(self._rows), len(self._fleet.all_sites)))
        for place, (_, rows, _) in enumerate(self._rows):
            if rows:
                states[:, place, : len(rows)] = np.array(rows).T
        at_s, sent = np.array([row[0] for row in self._rows]), np.array([row[2] for row in self._rows])
        queued, running = states[:2].astype(np.int32)
        return StateSamples(at_s, queued, running, states[2], states[3], sent)
