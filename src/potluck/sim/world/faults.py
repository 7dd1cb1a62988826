"""What goes wrong, and when: faults by hand or by chance, and prices and supply that change.

A fault file is YAML or JSON:

    faults:
      - {at_s: 60, kind: replica, replica: 'chat*#0/0'}     # gone; names may hold * and ?
      - {at_s: 60, kind: node, node: 'chat*#1/1xL40S/0'}    # a machine, with every replica on it
      - {at_s: 90, kind: region, region: east}
      - {at_s: 90, kind: link, source: east, target: west, factor: 0.1, duration_s: 30}    # or gbps: 2; 0 is down
      - {at_s: 120, kind: slow, replica: '*', factor: 3, duration_s: 20}     # steps take three times as long
      - {at_s: 150, kind: reports, replica: '*', duration_s: 10}             # its reports do not arrive
      - {at_s: 200, kind: spot, region: east, node: 1xL40S, count: 2, notice_s: 30}
      - {at_s: 210, kind: cancel, request: 17}                               # the user goes away
    random: {replica_per_h: 2, node_per_h: 1, link_per_h: 4, slow_per_h: 6, reports_per_h: 6, spot_per_h: 1}
    prices: [{at_s: 3600, region: east, node: 1xL40S, usd_per_h: 2.5}]
    availability: [{at_s: 1800, region: east, node: 1xL40S, available: 3}]

A pattern means the first replica (or machine) that it fits and that is there at the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from math import inf
from typing import Any, Literal, TypeVar, cast

import numpy as np
import yaml

from potluck.core.codec import decode
from potluck.core.errors import FormatError, InputError, UnknownNameError
from potluck.core.state.events import MarketReported
from potluck.core.values.types import NodeOffer, Region
from potluck.sim.results.records import FaultRecord
from potluck.sim.world.attempts import SimAttempts
from potluck.sim.world.common_state import CommonState, Tell
from potluck.sim.world.event_queue import CALL, FAULT
from potluck.sim.world.sim_fleet import SimFleet
from potluck.sim.world.sim_state import SimMachine, SimReplica

T = TypeVar("T")
FaultKind = Literal["replica", "node", "region", "link", "slow", "reports", "spot", "cancel"]
NOTICE_S = 30.0
"""Warning before a spot machine goes when nothing is said (Azure and Google give 30 s, Amazon 120 s)."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. Which fields count depends on the kind; see the module's text."""

    at_s: float
    kind: FaultKind
    replica: str = ""
    node: str = ""
    region: str = ""
    source: str = ""
    target: str = ""
    factor: float | None = None
    gbps: float | None = None
    duration_s: float = inf
    notice_s: float | None = None  # None: NOTICE_S for spot machines, else none at all.
    count: int = 1
    request: int = -1
    pick: float | None = None
    """Instead of a name: a number in [0, 1) that picks among those there are. Made by `random_faults`."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How often each kind of fault comes by chance, per hour of the whole fleet."""

    replica_per_h: float = 0.0
    node_per_h: float = 0.0
    link_per_h: float = 0.0
    slow_per_h: float = 0.0
    reports_per_h: float = 0.0
    spot_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class PriceChange:
    at_s: float
    region: str
    node: str
    usd_per_h: float


@dataclass(frozen=True, slots=True)
class SupplyChange:
    """From then on a region has so many nodes of a type; what is in use beyond that is taken away."""

    at_s: float
    region: str
    node: str
    available: int
    notice_s: float = NOTICE_S


@dataclass(frozen=True, slots=True)
class Faults:
    faults: tuple[Fault, ...] = ()
    random: FaultRates = FaultRates()
    prices: tuple[PriceChange, ...] = ()
    availability: tuple[SupplyChange, ...] = ()

    def drawn(self, seed: int, horizon_s: float) -> tuple[Fault, ...]:
        chance = random_faults(self.random, seed, horizon_s)
        return tuple(sorted((*self.faults, *chance), key=lambda fault: fault.at_s))


def random_faults(rates: FaultRates, seed: int, horizon_s: float) -> tuple[Fault, ...]:
    """Poisson faults of every kind up to a time; whom they hit is picked when they come."""
    faults: list[Fault] = []
    streams = np.random.default_rng(np.random.SeedSequence((seed, 0xFA))).spawn(len(fields(FaultRates)))
    for field, stream in zip(fields(FaultRates), streams, strict=True):
        rate_per_s = getattr(rates, field.name) / 3600.0
        count = int(stream.poisson(rate_per_s * horizon_s)) if rate_per_s > 0 else 0
        for at_s in np.sort(stream.random(count) * horizon_s).tolist():
            pick, size, long = stream.random(3).tolist()
            kind = cast(FaultKind, field.name.removesuffix("_per_h"))
            fault = Fault(at_s, kind, pick=pick)
            if kind in ("link", "slow", "reports"):
                factor = {"link": max(0.0, size * 1.2 - 0.2), "slow": 1.0 + 4.0 * size}.get(kind)
                fault = replace(fault, factor=factor, duration_s=-np.log1p(-long) * 30.0)
            faults.append(fault)
    return tuple(faults)


KEYS: dict[str, tuple[str, str]] = {
    "replica": ("replica", "notice_s"),
    "node": ("node", "notice_s"),
    "region": ("region", ""),
    "link": ("source target", "factor gbps duration_s"),
    "slow": ("replica factor duration_s", ""),
    "reports": ("duration_s", "replica"),
    "spot": ("region node", "count notice_s"),
    "cancel": ("request", ""),
}
"""Kind of fault to the keys that it needs in a file, and those that it may have."""


def parse_faults(text: str, name: str = "faults") -> Faults:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(name, f"is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise InputError(name, "must have `faults:`, `random:`, `prices:` or `availability:` at the top")
    data = {key: value for key, value in data.items() if value is not None}
    try:
        faults = decode(Faults, data)
        _check_entry("random", data.get("random", {}))
        for key in ("faults", "prices", "availability"):
            for place, entry in enumerate(data.get(key, ())):
                _check_entry(f"{key}[{place}]", entry)
    except FormatError as error:
        raise InputError(f"{name}: {error.field}", error.problem) from error
    return faults


def _check_entry(where: str, entry: dict[str, Any]) -> None:
    """What types do not say."""
    kind = entry.get("kind")
    for key, value in entry.items():
        if isinstance(value, int | float) and value < 0:
            raise FormatError(f"{where}.{key}", f"must not be negative, is {value:g}")
    if kind is None:
        return
    needed, allowed = (keys.split() for keys in KEYS[kind])
    for key in needed:
        if entry.get(key, "") == "":
            raise FormatError(f"{where}.{key}", "is missing")
    for key in entry:
        if key not in ("at_s", "kind", *needed, *allowed):
            raise FormatError(f"{where}.{key}", f"is no key of a {kind} fault")
    if kind == "link" and ("factor" in entry) == ("gbps" in entry):
        raise FormatError(where, "needs either `factor` or `gbps`")
    if kind == "slow" and not entry["factor"] > 0:
        raise FormatError(f"{where}.factor", f"must be above 0, is {entry['factor']:g}")


class ExternalEvents:
    """Carries out what a fault file or chance has in store.

    Of prices and supply the Brain is told (`MarketReported`) once for each moment in which some change, as a live
    one is by the market file, and the planner sees them.
    """

    def __init__(self, common: CommonState, attempts: SimAttempts, fleet: SimFleet, tell: Tell) -> None:
        self._common = common
        self._attempts = attempts
        self._fleet = fleet
        self._tell = tell
        self._quoted_s = -1.0
        """The last moment of which the Brain was told, or is about to be."""
        self._falls: dict[tuple[str, str], float] = {}
        """Supply that changed now, and how much notice machines beyond it get."""
        self.noted: list[FaultRecord] = []
        self.prices: dict[tuple[str, str], float] = {}
        """(region, node) to its price, where that ever changed."""
        self.supply: dict[tuple[str, str], int] = {}
        """(region, node) to what there is, where that was ever said."""

    def plan(self, faults: Faults, seed: int, horizon_s: float) -> None:
        for fault in faults.drawn(seed, horizon_s):
            ends = (fault.source, fault.target)
            if fault.kind == "link" and fault.pick is None and ends not in self._common.network.links:
                known = ("->".join(link) for link in self._common.network.links)
                raise UnknownNameError("faults: link", "->".join(ends), known)
            self._common.events.push(fault.at_s, FAULT, fault)
        changes: tuple[PriceChange | SupplyChange, ...] = (*faults.prices, *faults.availability)
        for change in changes:
            self._common.events.push(change.at_s, FAULT, change)

    def happen(self, at_s: float, what: Fault | PriceChange | SupplyChange) -> None:
        if isinstance(what, PriceChange):
            self.prices[what.region, what.node] = what.usd_per_h
            self._common.costs.reprice(at_s, what.region, what.node, what.usd_per_h)
            self._note(at_s, f"{what.node} in {what.region} now costs {what.usd_per_h:g} USD/h")
        elif isinstance(what, SupplyChange):
            self.supply[what.region, what.node] = what.available
            self._falls[what.region, what.node] = what.notice_s
            self._note(at_s, f"{what.region} now has {what.available} {what.node}")
        else:
            getattr(self, f"_{what.kind}")(at_s, what)
            return
        if self._quoted_s < at_s:  # after all that changes now, which is on the agenda before
            self._quoted_s = at_s
            self._common.events.push(at_s, CALL, self._quote)

    def _quote(self, at_s: float) -> None:
        """The Brain hears of the market before machines go, or it would start others where there are none."""
        self._tell(at_s, MarketReported(self.regions()))
        falls, self._falls = self._falls, {}
        for (region, node), notice_s in falls.items():
            self.enforce(at_s, region, node, notice_s)

    def regions(self) -> tuple[Region, ...]:
        return tuple(
            replace(region, offers=tuple(self._offer(region.name, offer) for offer in region.offers))
            for region in self._common.replica_models.resolved.regions
        )

    def _offer(self, region: str, offer: NodeOffer) -> NodeOffer:
        key = (region, offer.node)
        price = self.prices.get(key, offer.price_usd_per_h)
        return replace(offer, price_usd_per_h=price, available=self.supply.get(key, offer.available))

    def started(self, at_s: float, replica: SimReplica) -> None:
        """A replica took machines: there may be fewer than that by now."""
        for node in sorted({node for node, _ in replica.replica_model.places}):
            self.enforce(at_s, replica.member.region, node, 0.0)

    def enforce(self, at_s: float, region: str, node: str, notice_s: float) -> None:
        available = self.supply.get((region, node))
        if available is not None:
            count = len(self._staying(region, node)) - available
            self._take(at_s, region, node, count, notice_s, "no supply")

    def _replica(self, at_s: float, fault: Fault) -> None:
        replica = self._matching_replica(fault)
        if replica is None:
            self._note(at_s, f"no replica {fault.replica or 'is there'} to lose")
            return
        self._note(at_s, f"lost replica {replica.id}")
        self._fleet.lose(at_s, replica, "fault", fault.notice_s or 0.0)

    def _node(self, at_s: float, fault: Fault) -> None:
        machine = self._machine(fault)
        if machine is None:
            self._note(at_s, f"no node {fault.node or 'is there'} to lose")
            return
        self._note(at_s, f"lost node {machine.name}")
        self._lose_machine(at_s, machine, "node lost", fault.notice_s or 0.0)

    def _region(self, at_s: float, fault: Fault) -> None:
        self._note(at_s, f"lost region {fault.region}")
        for machine in list(self._fleet.machines.values()):
            if machine.region == fault.region:
                self._lose_machine(at_s, machine, "region lost", 0.0)

    def _spot(self, at_s: float, fault: Fault) -> None:
        region, node = fault.region, fault.node
        if fault.pick is not None:
            picked = self._machine(fault)
            if picked is None:
                self._note(at_s, "no spot node to take")
                return
            region, node = picked.region, picked.node
        notice_s = NOTICE_S if fault.notice_s is None else fault.notice_s
        self._take(at_s, region, node, fault.count, notice_s, "spot preemption")

    def _link(self, at_s: float, fault: Fault) -> None:
        """A link slows down or breaks; what is on a broken one fails."""
        common, network = self._common, self._common.network
        ends: tuple[str, str] | None = (fault.source, fault.target)
        if fault.pick is not None:
            ends = _picked(list(network.links), fault.pick)
        if ends is None:
            self._note(at_s, "no link to break")
            return
        full, factor = network.full_rate(ends), 1.0 if fault.factor is None else fault.factor
        rate = full * factor if fault.gbps is None else network.rate_of(ends, fault.gbps)
        self._note(at_s, f"link {ends[0]}->{ends[1]} at {rate / full:.0%}")
        self._set_rate(at_s, ends, rate)
        if rate <= 0:
            for attempt in common.handovers.broken(network.links[ends]):
                self._attempts.fail(at_s, attempt, "link", f"{ends[0]}->{ends[1]}")
        if fault.duration_s < inf:
            again = partial(self._set_rate, ends=ends, rate=full)
            common.events.push(at_s + fault.duration_s, CALL, again)

    def _slow(self, at_s: float, fault: Fault) -> None:
        replica = self._matching_replica(fault)
        if replica is None:
            self._note(at_s, "no replica to slow down")
            return
        factor = 1.0 if fault.factor is None else fault.factor
        self._note(at_s, f"replica {replica.id} {factor:g} times slower")
        self._speed(at_s, replica, factor)
        if fault.duration_s < inf:
            again = partial(self._speed, replica=replica, factor=1.0)
            self._common.events.push(at_s + fault.duration_s, CALL, again)

    def _reports(self, at_s: float, fault: Fault) -> None:
        replicas = [
            replica
            for replica in self._common.replicas.values()
            if fnmatchcase(replica.id, fault.replica or "*")
        ]
        if fault.pick is not None:
            replicas = [replica for replica in (self._matching_replica(fault),) if replica is not None]
        for replica in replicas:
            replica.muted_until_s = max(replica.muted_until_s, at_s + fault.duration_s)
        self._note(at_s, f"reports of {len(replicas)} replicas are lost for {fault.duration_s:.3g} s")

    def _cancel(self, at_s: float, fault: Fault) -> None:
        self._attempts.cancel(at_s, fault.request)

    def _speed(self, at_s: float, replica: SimReplica, factor: float) -> None:
        if replica.exists:
            self._attempts.catch_up_if_due(at_s, replica)
            replica.replica.set_speed(at_s, factor)
            # Its next happening may be later than the agenda thinks, which costs one look too many, or earlier.
            self._attempts.touch(at_s, replica)

    def _set_rate(self, at_s: float, ends: tuple[str, str], rate: float) -> None:
        pipe = self._common.network.links[ends]
        pipe.set_rate(at_s, rate)
        self._common.handovers.schedule(pipe)
        self._common.reports.link_touched(at_s)

    def _take(self, at_s: float, region: str, node: str, count: int, notice_s: float, reason: str) -> None:
        """Take so many machines of a type, the newest first."""
        staying = self._staying(region, node)
        for machine in staying[::-1][: max(0, count)]:
            self._note(at_s, f"{reason}: {machine.name} goes in {notice_s:g} s")
            self._lose_machine(at_s, machine, reason, notice_s)

    def _staying(self, region: str, node: str) -> list[SimMachine]:
        """Machines of a type that are not already on their way out, oldest first."""
        return [
            machine
            for machine in self._fleet.machines.values()
            if (machine.region, machine.node) == (region, node)
            and any(replica.state != "leaving" for replica in machine.replicas)
        ]

    def _lose_machine(self, at_s: float, machine: SimMachine, reason: str, notice_s: float) -> None:
        if any(machine.name in replica.replica_model.names for replica in machine.replicas):
            self._fleet.gone.add(machine.name)
        for replica in list(machine.replicas):
            self._fleet.lose(at_s, replica, reason, notice_s)

    def _matching_replica(self, fault: Fault) -> SimReplica | None:
        replicas = list(self._common.replicas.values())
        if fault.pick is not None:
            return _picked([replica for replica in replicas if replica.state != "starting"], fault.pick)
        return next((replica for replica in replicas if fnmatchcase(replica.id, fault.replica)), None)

    def _machine(self, fault: Fault) -> SimMachine | None:
        machines = list(self._fleet.machines.values())
        if fault.pick is not None:
            return _picked(machines, fault.pick)
        return next((item for item in machines if fnmatchcase(item.name, fault.node)), None)

    def _note(self, at_s: float, what: str) -> None:
        self.noted.append(FaultRecord(at_s, what))


def _picked(items: Sequence[T], pick: float) -> T | None:
    return items[int(pick * len(items))] if items else None
