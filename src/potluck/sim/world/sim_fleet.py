"""The simulated fleet: starts, drains, flips, stops and loses replicas, and meters the rent of their machines."""

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
STOPPED_SLOWDOWN = 1e12  # Factor on step times of a replica that has silently failed.


class SimFleet:
    """Carries out the Brain's actions on replicas."""

    def __init__(self, common: CommonState, attempts: SimAttempts, tell: Tell, make: Make) -> None:
        self._common = common
        self._attempts = attempts
        self._tell = tell
        self._make = make
        self.warm = False
        """Whether replicas that start now are ready at once."""
        self.all_replicas: list[SimReplica] = []
        self.machines: dict[str, SimMachine] = {}
        """Rented machines, by name."""
        self.gone: set[str] = set()
        """Lost machines of a pool: they have no replacement."""

    def start(self, at_s: float, action: StartReplica) -> SimReplica:
        replica_spec, common = action.member, self._common
        if replica_spec.id in common.replicas:
            raise InputError(f"replica {replica_spec.id}", "was started twice")
        model = common.replica_models.replica_models[replica_spec.template, replica_spec.index]
        machines = tuple(
            [self._machine(at_s, replica_spec, model, number) for number in range(len(model.places))]
        )
        pipe = (
            machines[0].card if len(machines) == 1 else common.network.card(replica_spec.id, model.card_gbps)
        )
        replica = SimReplica(
            len(self.all_replicas), replica_spec, model, self._make(model, replica_spec.role), machines, pipe
        )
        if common.settings.caches and common.workload.blocks is not None:
            replica.cache = self._cache(replica_spec.model, common.workload.blocks.tokens)
        for machine in machines:
            machine.replicas.append(replica)
        common.replicas[replica_spec.id] = replica
        common.costs.store(at_s, replica_spec.region, replica_spec.model, 1)
        self.all_replicas.append(replica)
        replica.set_state(at_s, "starting")
        if any(machine.name in self.gone for machine in machines):
            common.events.push(at_s, CALL, lambda when_s: self.lose(when_s, replica, "its machine is gone"))
        elif self.warm:
            self.ready(at_s, replica)
        else:
            common.events.push(at_s + model.startup_s, READY, replica)
        return replica

    def ready(self, at_s: float, replica: SimReplica) -> None:
        if replica.state == "starting":
            replica.set_state(at_s, "ready")
            for machine in replica.machines:
                if not machine.served:
                    machine.served = True
                    self._common.costs.up(at_s, machine.region, machine.node)
            self._tell(at_s, ReplicaReady(replica.id))

    def drain(self, at_s: float, action: DrainReplica) -> None:
        replica = self._common.replicas.get(action.replica)
        if replica is None or replica.state in ("leaving", "draining"):
            return
        replica.set_state(at_s, "draining")
        if not replica.attempts:
            self._tell(at_s, ReplicaDrained(replica.id))

    def stop(self, at_s: float, action: StopReplica) -> None:
        replica = self._common.replicas.get(action.replica)
        if replica is not None:
            self._end(at_s, replica, "stopped")

    def flip(self, at_s: float, action: FlipReplica) -> None:
        replica = self._common.replicas.get(action.replica)
        if replica is not None:
            replica.role = action.role
            replica.set_state(at_s, replica.state)

    def reassign(self, at_s: float, action: Reassign) -> None:
        replica = self._common.replicas.get(action.member.id)
        if replica is not None:
            replica.member, replica.role = action.member, action.member.role
            replica.set_state(at_s, replica.state)

    def lose(self, at_s: float, replica: SimReplica, reason: str, notice_s: float = 0.0) -> None:
        """A replica is lost. With a notice period the Brain knows at once, and the machine ends after the period."""
        if not replica.exists:
            return
        if notice_s > 0:
            if replica.state != "leaving":
                replica.set_state(at_s, "leaving")
                again = partial(self.lose, replica=replica, reason=reason)
                self._common.events.push(at_s + notice_s, CALL, again)
                self._tell(at_s, ReplicaLost(replica.id, reason, notice_s))
            return
        heartbeat_s = self._common.settings.heartbeat_s
        if heartbeat_s > 0 and replica.state == "ready" and not replica.silent:
            self._fall_silent(at_s, replica, reason, heartbeat_s)
            return
        known = replica.state == "leaving"
        self._attempts.catch_up_if_due(at_s, replica)
        replica.set_state(at_s, "lost")
        if not known:
            self._tell(at_s, ReplicaLost(replica.id, reason))
        self._end(at_s, replica, "lost")

    def _fall_silent(self, at_s: float, replica: SimReplica, reason: str, heartbeat_s: float) -> None:
        """The replica stops computing and reporting; the Brain learns of it after the heartbeat timeout."""
        replica.silent = True
        replica.muted_until_s = inf
        self._attempts.catch_up_if_due(at_s, replica)
        replica.replica.set_speed(at_s, STOPPED_SLOWDOWN)
        self._attempts.touch(at_s, replica)
        self._common.events.push(at_s + heartbeat_s, CALL, lambda when_s: self.lose(when_s, replica, reason))

    def _end(self, at_s: float, replica: SimReplica, state: str) -> None:
        common = self._common
        if state == "stopped":
            self._attempts.catch_up_if_due(at_s, replica)
            replica.set_state(at_s, "stopped")
        del common.replicas[replica.id]
        common.costs.store(at_s, replica.member.region, replica.member.model, -1)
        replica.waiting.clear()
        for attempt in list(replica.attempts.values()):
            self._attempts.fail(at_s, attempt, "replica", replica.id)
        for machine in replica.machines:
            machine.replicas.remove(replica)
            if not machine.replicas:
                del self.machines[machine.name]
                common.costs.give_back(at_s, machine.region, machine.node, machine.served)

    def _machine(
        self, at_s: float, replica_spec: ReplicaSpec, model: ReplicaModel, number: int
    ) -> SimMachine:
        # Machines that a plan names belong to a pool; other machines are interchangeable.
        node, place = model.places[number]
        name = model.names[number] if model.names else f"{replica_spec.unit}/{node}/{place}"
        machine = self.machines.get(name)
        if machine is None:
            common, resolved = self._common, self._common.replica_models.resolved
            pipe = common.network.card(name, resolved.node(node).network_gbps)
            machine = self.machines[name] = SimMachine(name, node, replica_spec.region, pipe)
            common.costs.rent(at_s, replica_spec.region, node)
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


def running_of(plan: Plan, sim_replicas: Iterable[SimReplica]) -> Plan:
    """The plan with the whole copies that are starting or ready; draining copies do not count."""
    replicas = {template.name: len(template.replicas) for template in plan.repertoire}
    there = Counter(
        (replica.member.unit, replica.member.template, replica.member.region)
        for replica in sim_replicas
        if replica.state in ("starting", "ready")
    )
    whole = [key for key, count in there.items() if count >= replicas.get(key[1], inf)]
    return plan.holding(Counter((template, region) for _, template, region in whole))


MAX_REPLICA_SAMPLES = 40_000  # Over all replicas, so that sampling costs less than the run itself.
MIN_SAMPLES = 20


class StateSampler:
    """Samples replica and link states for plots; replicas that start later have zeros before."""

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
        replicas = max(1, len(common.replicas))
        count = max(min(count, MAX_REPLICA_SAMPLES // replicas), min(count, MIN_SAMPLES))
        self._every_s = common.workload.last_s / count or 1.0
        common.events.push(self._every_s, SAMPLE, None)

    def take(self, at_s: float, _: object) -> None:
        common = self._common
        rows = []
        for sim_replica in self._fleet.all_replicas:
            sim_engine = sim_replica.replica
            if not sim_replica.exists:
                rows.append((0, 0, 0.0, sim_engine.busy_s(at_s)))
                continue
            status = sim_engine.status(at_s)
            used = 1.0 - status.free_blocks / status.total_blocks
            rows.append((status.queued, status.running, used, sim_engine.busy_s(at_s)))
        sent = [pipe.sent_bytes + pipe.open_bytes(at_s) for pipe in common.network.links.values()]
        self._rows.append((at_s, rows, sent))
        common.events.push(at_s + self._every_s, SAMPLE, None)

    def samples(self) -> StateSamples | None:
        if not self._rows:
            return None
        states = np.zeros((4, len(self._rows), len(self._fleet.all_replicas)))
        for place, (_, rows, _) in enumerate(self._rows):
            if rows:
                states[:, place, : len(rows)] = np.array(rows).T
        at_s, sent = np.array([row[0] for row in self._rows]), np.array([row[2] for row in self._rows])
        queued, running = states[:2].astype(np.int32)
        return StateSamples(at_s, queued, running, states[2], states[3], sent)
