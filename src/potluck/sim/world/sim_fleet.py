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
    from potluck.sim.replicas.sim_engine import SimEngine

Make = Callable[["ReplicaModel", Role], "SimEngine"]
STOPPED = 1e12
"""Times as long that steps take where nothing is computed any more."""


class SimFleet:
    """All replicas that ever were, and the machines under them."""

    __slots__ = ("_ground", "_journeys", "_make", "_tell", "all_sites", "gone", "machines", "warm")

    def __init__(self, common: CommonState, attempts: SimAttempts, tell: Tell, make: Make) -> None:
        self._ground = common
        self._journeys = attempts
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
        member, common = action.member, self._ground
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
                    self._ground.purse.up(at_s, machine.region, machine.node)
            self._tell(at_s, ReplicaReady(site.id))

    def drain(self, at_s: float, action: DrainReplica) -> None:
        site = self._ground.sites.get(action.replica)
        if site is None or site.state in ("leaving", "draining"):
            return
        site.become(at_s, "draining")
        if not site.attempts:
            self._tell(at_s, ReplicaDrained(site.id))

    def stop(self, at_s: float, action: StopReplica) -> None:
        """End a replica; whoever is still there fails."""
        site = self._ground.sites.get(action.replica)
        if site is not None:
            self._end(at_s, site, "stopped")

    def flip(self, at_s: float, action: FlipReplica) -> None:
        site = self._ground.sites.get(action.replica)
        if site is not None:
            site.role = action.role
            site.become(at_s, site.state)

    def recast(self, at_s: float, action: Reassign) -> None:
        site = self._ground.sites.get(action.member.id)
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
                self._ground.events.push(
                    at_s + notice_s, CALL, lambda when_s: self.lose(when_s, site, reason)
                )
                self._tell(at_s, ReplicaLost(site.id, reason, notice_s))
            return
        heartbeat_s = self._ground.settings.heartbeat_s
        if heartbeat_s > 0 and site.state == "ready" and not site.silent:
            self._fall_silent(at_s, site, reason, heartbeat_s)
            return
        known = site.state == "leaving"
        self._journeys.catch_up_if_due(at_s, site)
        site.become(at_s, "lost")
        if not known:
            self._tell(at_s, ReplicaLost(site.id, reason))
        self._end(at_s, site, "lost")

    def _fall_silent(self, at_s: float, site: SimReplica, reason: str, heartbeat_s: float) -> None:
        """It computes and says nothing any more; nobody knows until its heartbeat has been missing for so long."""
        site.silent = True
        site.muted_until_s = inf
        self._journeys.catch_up_if_due(at_s, site)
        site.replica.set_speed(at_s, STOPPED)
        self._journeys.touch(at_s, site)
        self._ground.events.push(at_s + heartbeat_s, CALL, lambda when_s: self.lose(when_s, site, reason))

    def _end(self, at_s: float, site: SimReplica, state: str) -> None:
        common = self._ground
        if state == "stopped":
            self._journeys.catch_up_if_due(at_s, site)
            site.become(at_s, "stopped")
        del common.sites[site.id]
        site.waiting.clear()
        for running in list(site.attempts.values()):
            self._journeys.fail(at_s, running, "replica", site.id)
        for machine in site.machines:
            machine.sites.remove(site)
            if not machine.sites:
                del self.machines[machine.name]
                common.purse.give_back(at_s, machine.region, machine.node, machine.served)

    def _machine(
        self, at_s: float, unit: str, node: str, place: int, region: str, given: str = ""
    ) -> SimMachine:
        # Machines that a plan names are those of a pool; of others as many can be had as there are.
        name = given or machine_name(unit, node, place)
        found = self.machines.get(name)
        if found is None:
            common = self._ground
            card = common.network.card(name, common.replica_models.resolved.node(node).network_gbps)
            found = SimMachine(name, unit, node, region, at_s, card)
            self.machines[name] = found
            common.purse.rent(
                at_s, region, node, common.replica_models.resolved.price_usd_per_h(region, node)
            )
        return found

    def _cache(self, model: str) -> SpareCache:
        facts = self._ground.replica_models.facts().models[model]
        blocks = self._ground.workload.blocks
        assert blocks is not None
        state_tokens = facts.fixed_bytes / facts.kv_bytes_per_token if facts.kv_bytes_per_token > 0 else 0.0
        return SpareCache(blocks.tokens, facts.exact_prefix, state_tokens if facts.exact_prefix else 0.0)
