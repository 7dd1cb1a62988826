"""Replicas and machines: they start, become ready, drain, flip, stop and are lost; machines are paid meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from potluck.core.errors import InputError
from potluck.core.replica.spare_cache import SpareCache
from potluck.core.state.actions import DrainReplica, FlipReplica, Reassign, StartReplica, StopReplica
from potluck.core.state.events import ReplicaDrained, ReplicaLost, ReplicaReady
from potluck.core.values.types import Role
from potluck.sim.links.sim_network import machine_name
from potluck.sim.world.attempts import SimAttempts
from potluck.sim.world.common_state import CommonState, Tell
from potluck.sim.world.event_queue import CALL, READY
from potluck.sim.world.sim_state import SimMachine, SimReplica

if TYPE_CHECKING:
    from potluck.runtime.replica_models import ReplicaModel
    from potluck.sim.links.link import SharedPipe
    from potluck.sim.sim_engine import SimEngine
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from potluck.core.state.actions import SeenLengths
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region
from potluck.sim.results.records import StateSamples
from potluck.sim.world.event_queue import SAMPLE

Make = Callable[["ReplicaModel", Role], "SimEngine"]
STOPPED = 1e12
"""Times as long that steps take where nothing is computed any more."""


class SimFleet:
    """All replicas that ever were, and the machines under them."""

    __slots__ = ("_attempts", "_common", "_make", "_tell", "all_sites", "gone", "machines", "warm")

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
        replica_model = common.replica_models.replica_models[member.template, member.index]
        machines = tuple(
            self._machine(
                at_s,
                member.unit,
                node,
                place,
                member.region,
                replica_model.names[number] if replica_model.names else "",
            )
            for number, (node, place) in enumerate(replica_model.places)
        )
        card: SharedPipe = (
            machines[0].card
            if len(machines) == 1
            else common.network.card(member.id, replica_model.card_gbps)
        )
        site = SimReplica(
            len(self.all_sites), member, replica_model, self._make(replica_model, member.role), machines, card
        )
        if common.settings.caches and common.workload.blocks is not None:
            site.cache = self._cache(member.model)
        for machine in machines:
            machine.sites.append(site)
        common.sites[member.id] = site
        self.all_sites.append(site)
        site.become(at_s, "starting")
        if any(machine.name in self.gone for machine in machines):
            common.events.push(at_s, CALL, lambda when_s: self.lose(when_s, site, "its machine is gone"))
        elif self.warm:
            self.ready(at_s, site)
        else:
            common.events.push(at_s + replica_model.startup_s, READY, site)
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
        """End a replica; whoever is still there fails."""
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
                self._common.events.push(
                    at_s + notice_s, CALL, lambda when_s: self.lose(when_s, site, reason)
                )
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
        site.waiting.clear()
        for running in list(site.attempts.values()):
            self._attempts.fail(at_s, running, "replica", site.id)
        for machine in site.machines:
            machine.sites.remove(site)
            if not machine.sites:
                del self.machines[machine.name]
                common.costs.give_back(at_s, machine.region, machine.node, machine.served)

    def _machine(
        self, at_s: float, unit: str, node: str, place: int, region: str, given: str = ""
    ) -> SimMachine:
        # Machines that a plan names are those of a pool; of others as many can be had as there are.
        name = given or machine_name(unit, node, place)
        machine = self.machines.get(name)
        if machine is None:
            common = self._common
            card = common.network.card(name, common.replica_models.resolved.node(node).network_gbps)
            machine = SimMachine(name, unit, node, region, at_s, card)
            self.machines[name] = machine
            common.costs.rent(
                at_s, region, node, common.replica_models.resolved.price_usd_per_h(region, node)
            )
        return machine

    def _cache(self, model: str) -> SpareCache:
        facts = self._common.replica_models.facts().models[model]
        blocks = self._common.workload.blocks
        assert blocks is not None
        state_tokens = facts.fixed_bytes / facts.kv_bytes_per_token if facts.kv_bytes_per_token > 0 else 0.0
        return SpareCache(blocks.tokens, facts.exact_prefix, state_tokens if facts.exact_prefix else 0.0)


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """One question to the planner."""

    at_s: float
    rates_per_s: tuple[tuple[str, float], ...]
    """Model to requests a second that a plan is wanted for."""
    regions: tuple[Region, ...]
    """Prices and nodes as they are now."""
    running: Plan
    """The newest plan with the copies of it that are there and stay."""
    lengths: tuple[SeenLengths, ...] = ()


Planner = Callable[[PlanQuestion], Plan | None]
"""None when there is no plan, or none better."""


def running_of(plan: Plan, sites: Iterable[SimReplica]) -> Plan:
    """A plan with the copies that are up or coming up whole; those on their way out or on standby are none."""
    replicas = {template.name: len(template.replicas) for template in plan.repertoire}
    result: dict[str, tuple[str, str, int]] = {}
    """Copy to its template, region and how many of its replicas are there."""
    for site in sites:
        member = site.member
        if site.state in ("starting", "ready") and member.template in replicas and not member.standby:
            count = result[member.unit][2] if member.unit in result else 0
            result[member.unit] = (member.template, member.region, count + 1)
    copies: dict[tuple[str, str], int] = {}
    for template, region, count in result.values():
        if count >= replicas[template]:
            copies[template, region] = copies.get((template, region), 0) + 1
    return plan.holding(copies)


MOST_LOOKS = 40_000
"""Looks at single replicas, so that plots of a large fleet do not cost more than its run."""
FEWEST = 20


class StateSampler:
    """Rows of what was seen; replicas that came later have zeros before."""

    __slots__ = ("_common", "_every_s", "_fleet", "_rows")

    def __init__(self, common: CommonState, fleet: SimFleet) -> None:
        self._common = common
        self._fleet = fleet
        self._every_s = 0.0
        self._rows: list[tuple[float, list[tuple[int, int, float, float]], list[float]]] = []

    def plan(self) -> None:
        """Spread the looks evenly over the time in which requests arrive."""
        common = self._common
        count = common.settings.samples
        if count <= 0 or not len(common.workload):
            return
        replicas = max(1, len(common.sites))
        count = max(min(count, MOST_LOOKS // replicas), min(count, FEWEST))
        span_s = float(common.workload.arrival_s[-1])
        self._every_s = span_s / count if span_s > 0 else 1.0
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
            site.peak_blocks = max(site.peak_blocks, status.total_blocks - status.free_blocks)
        sent = [pipe.sent_bytes + pipe.open_bytes(at_s) for pipe in common.network.links.values()]
        self._rows.append((at_s, rows, sent))
        common.events.push(at_s + self._every_s, SAMPLE, None)

    def samples(self) -> StateSamples | None:
        if not self._rows:
            return None
        replicas, links = len(self._fleet.all_sites), len(self._common.network.links)
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
