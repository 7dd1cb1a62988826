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

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from math import inf, isfinite
from typing import Any, Literal, get_args

import numpy as np
import yaml

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.state.events import MarketReported
from potluck.core.values.types import NodeOffer, Region
from potluck.sim.results.records import FaultRecord
from potluck.sim.world.attempts import SimAttempts
from potluck.sim.world.common_state import CommonState, Tell
from potluck.sim.world.event_queue import CALL, FAULT
from potluck.sim.world.sim_fleet import SimFleet
from potluck.sim.world.sim_state import SimMachine, SimReplica

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
    notice_s: float = 0.0
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
    """Everything that happens to a fleet from outside."""

    faults: tuple[Fault, ...] = ()
    random: FaultRates | None = None
    prices: tuple[PriceChange, ...] = ()
    availability: tuple[SupplyChange, ...] = ()

    def drawn(self, seed: int, horizon_s: float) -> tuple[Fault, ...]:
        """The listed faults and those by chance, in order of time."""
        chance = () if self.random is None else random_faults(self.random, seed, horizon_s)
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
            duration_s = -np.log1p(-long) * 30.0
            kind = field.name.removesuffix("_per_h")
            if kind == "link":
                faults.append(
                    Fault(at_s, "link", factor=max(0.0, size * 1.2 - 0.2), duration_s=duration_s, pick=pick)
                )
            elif kind == "slow":
                faults.append(Fault(at_s, "slow", factor=1.0 + 4.0 * size, duration_s=duration_s, pick=pick))
            elif kind == "reports":
                faults.append(Fault(at_s, "reports", duration_s=duration_s, pick=pick))
            elif kind == "spot":
                faults.append(Fault(at_s, "spot", notice_s=NOTICE_S, pick=pick))
            else:
                faults.append(Fault(at_s, "replica" if kind == "replica" else "node", pick=pick))
    return tuple(faults)


NEEDS: dict[str, tuple[str, ...]] = {
    "replica": ("replica",),
    "node": ("node",),
    "region": ("region",),
    "link": ("source", "target"),
    "slow": ("replica", "factor", "duration_s"),
    "reports": ("duration_s",),
    "spot": ("region", "node"),
    "cancel": ("request",),
}
MAY: dict[str, tuple[str, ...]] = {
    "link": ("factor", "gbps", "duration_s"),
    "reports": ("replica",),
    "spot": ("count", "notice_s"),
    "node": ("notice_s",),
    "replica": ("notice_s",),
}


def parse_faults(text: str, name: str = "faults") -> Faults:
    """Read a fault file; an error names the entry and what is wrong with it, on one line."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(name, f"is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise InputError(name, "must have `faults:`, `random:`, `prices:` or `availability:` at the top")
    known = [field.name for field in fields(Faults)]
    for key in data:
        if key not in known:
            raise UnknownNameError(name, str(key), known)
    random = data.get("random")
    return Faults(
        tuple(_fault(entry, where) for where, entry in _entries(data, "faults", name)),
        None
        if random is None
        else FaultRates(**_numbers(random, [field.name for field in fields(FaultRates)], f"{name}: random")),
        tuple(_change(PriceChange, entry, where) for where, entry in _entries(data, "prices", name)),
        tuple(_change(SupplyChange, entry, where) for where, entry in _entries(data, "availability", name)),
    )


def _entries(data: Mapping[str, Any], key: str, name: str) -> list[tuple[str, dict[str, Any]]]:
    entries = data.get(key) or []
    if not isinstance(entries, list):
        raise InputError(f"{name}: {key}", "must be a list")
    result = []
    for place, entry in enumerate(entries):
        where = f"{name}: {key}[{place}]"
        if not isinstance(entry, dict):
            raise InputError(where, "must be a mapping such as {at_s: 60, ...}")
        result.append((where, {str(k): v for k, v in entry.items()}))
    return result


def _fault(entry: dict[str, Any], where: str) -> Fault:
    kind = str(entry.get("kind"))
    if kind not in get_args(FaultKind):
        raise UnknownNameError(f"{where}: kind", kind, get_args(FaultKind))
    needed, allowed = NEEDS[kind], ("at_s", "kind", *NEEDS[kind], *MAY.get(kind, ()))
    _keys(entry, ("at_s", *needed), allowed, where)
    if kind == "link" and ("factor" in entry) == ("gbps" in entry):
        raise InputError(where, "needs either `factor` or `gbps`")
    values: dict[str, Any] = {"kind": kind}
    if kind == "reports":
        values["replica"] = "*"
    if kind == "spot":
        values["notice_s"] = NOTICE_S
    for key, value in entry.items():
        if key == "kind":
            continue
        values[key] = _value(key, value, where)
    if kind == "slow" and not values["factor"] > 0:
        raise InputError(f"{where}: factor", f"must be above 0, is {values['factor']:g}")
    return Fault(**values)


def _change(kind: type[Any], entry: dict[str, Any], where: str) -> Any:
    names = [field.name for field in fields(kind)]
    _keys(entry, [n for n in names if n != "notice_s"], names, where)
    return kind(**{key: _value(key, value, where) for key, value in entry.items()})


def _keys(entry: Mapping[str, Any], needed: Any, allowed: Any, where: str) -> None:
    for key in entry:
        if key not in allowed:
            raise UnknownNameError(where, key, allowed)
    for key in needed:
        if key not in entry:
            raise InputError(f"{where}: {key}", "is missing")


def _value(key: str, value: Any, where: str) -> Any:
    if key in ("replica", "node", "region", "source", "target"):
        if not isinstance(value, str) or not value:
            raise InputError(f"{where}: {key}", "must be a name")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise InputError(f"{where}: {key}", f"must be a number that is not negative, is {str(value)[:40]!r}")
    if key in ("count", "request", "available"):
        if value != int(value):
            raise InputError(f"{where}: {key}", f"must be a whole number, is {value}")
        return int(value)
    return float(value)


def _numbers(data: Any, names: list[str], where: str) -> dict[str, float]:
    if not isinstance(data, dict):
        raise InputError(where, "must be a mapping such as {replica_per_h: 2}")
    _keys(data, (), names, where)
    return {str(key): float(_value(str(key), value, where)) for key, value in data.items()}


class ExternalEvents:
    """Carries out what a fault file or chance has in store.

    Of prices and supply the Brain is told (`MarketReported`) once for each moment in which some change, as a live
    one is by the market file, and the planner sees them.
    """

    __slots__ = (
        "_attempts",
        "_common",
        "_falls",
        "_fleet",
        "_quoted_s",
        "_tell",
        "noted",
        "prices",
        "supply",
    )

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
        """Put everything on the agenda."""
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
        """Prices and nodes as they are now."""
        return tuple(
            replace(region, offers=tuple(self._offer(region.name, offer) for offer in region.offers))
            for region in self._common.replica_models.resolved.regions
        )

    def _offer(self, region: str, offer: NodeOffer) -> NodeOffer:
        key = (region, offer.node)
        price = self.prices.get(key, offer.price_usd_per_h)
        return replace(offer, price_usd_per_h=price, available=self.supply.get(key, offer.available))

    def started(self, at_s: float, site: SimReplica) -> None:
        """A replica took machines: there may be fewer than that by now."""
        for node in sorted({node for node, _ in site.replica_model.places}):
            self.enforce(at_s, site.member.region, node, 0.0)

    def enforce(self, at_s: float, region: str, node: str, notice_s: float) -> None:
        """Take machines away until no more are in use than there are."""
        available = self.supply.get((region, node))
        if available is not None:
            self._take(
                at_s, region, node, len(self._staying(region, node)) - available, notice_s, "no supply"
            )

    def _replica(self, at_s: float, fault: Fault) -> None:
        site = self._site(fault)
        if site is None:
            self._note(at_s, f"no replica {fault.replica or 'is there'} to lose")
            return
        self._note(at_s, f"lost replica {site.id}")
        self._fleet.lose(at_s, site, "fault", fault.notice_s)

    def _node(self, at_s: float, fault: Fault) -> None:
        machines = list(self._fleet.machines.values())
        machine: SimMachine | None = None
        if fault.pick is not None:
            machine = machines[int(fault.pick * len(machines))] if machines else None
        else:
            machine = next((item for item in machines if fnmatchcase(item.name, fault.node)), None)
        if machine is None:
            self._note(at_s, f"no node {fault.node or 'is there'} to lose")
            return
        self._note(at_s, f"lost node {machine.name}")
        self._lose_machine(at_s, machine, "node lost", fault.notice_s)

    def _region(self, at_s: float, fault: Fault) -> None:
        self._note(at_s, f"lost region {fault.region}")
        for machine in list(self._fleet.machines.values()):
            if machine.region == fault.region:
                self._lose_machine(at_s, machine, "region lost", 0.0)

    def _spot(self, at_s: float, fault: Fault) -> None:
        region, node = fault.region, fault.node
        if fault.pick is not None:
            machines = list(self._fleet.machines.values())
            if not machines:
                self._note(at_s, "no spot node to take")
                return
            picked = machines[int(fault.pick * len(machines))]
            region, node = picked.region, picked.node
        self._take(at_s, region, node, fault.count, fault.notice_s, "spot preemption")

    def _link(self, at_s: float, fault: Fault) -> None:
        """A link slows down or breaks; what is on a broken one fails."""
        common, network = self._common, self._common.network
        ends = (fault.source, fault.target)
        if fault.pick is not None:
            if not network.links:
                self._note(at_s, "no link to break")
                return
            ends = list(network.links)[int(fault.pick * len(network.links))]
        factor = fault.factor if fault.factor is not None else 1.0
        rate = network.full_rate(ends) * factor if fault.gbps is None else network.rate_of(ends, fault.gbps)
        self._note(at_s, f"link {ends[0]}->{ends[1]} at {rate / network.full_rate(ends):.0%}")
        self._set_rate(at_s, ends, rate)
        if rate <= 0:
            for running in common.handovers.broken(network.links[ends]):
                self._attempts.fail(at_s, running, "link", f"{ends[0]}->{ends[1]}")
        if fault.duration_s < inf:
            full = network.full_rate(ends)
            common.events.push(
                at_s + fault.duration_s, CALL, lambda when_s: self._set_rate(when_s, ends, full)
            )

    def _slow(self, at_s: float, fault: Fault) -> None:
        site = self._site(fault)
        if site is None:
            self._note(at_s, "no replica to slow down")
            return
        factor = 1.0 if fault.factor is None else fault.factor
        self._note(at_s, f"replica {site.id} {factor:g} times slower")
        self._speed(at_s, site, factor)
        if fault.duration_s < inf:
            self._common.events.push(
                at_s + fault.duration_s, CALL, lambda when_s: self._speed(when_s, site, 1.0)
            )

    def _reports(self, at_s: float, fault: Fault) -> None:
        if fault.pick is not None:
            result = self._site(fault)
            sites = [] if result is None else [result]
        else:
            sites = [site for site in self._common.sites.values() if fnmatchcase(site.id, fault.replica)]
        for site in sites:
            site.muted_until_s = max(site.muted_until_s, at_s + fault.duration_s)
        self._note(at_s, f"reports of {len(sites)} replicas are lost for {fault.duration_s:.3g} s")

    def _cancel(self, at_s: float, fault: Fault) -> None:
        self._attempts.cancel(at_s, fault.request)

    def _speed(self, at_s: float, site: SimReplica, factor: float) -> None:
        if site.there:
            self._attempts.catch_up_if_due(at_s, site)
            site.replica.set_speed(at_s, factor)
            # Its next happening may be later than the agenda thinks, which costs one look too many, or earlier.
            self._attempts.touch(at_s, site)

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
            and any(site.state != "leaving" for site in machine.sites)
        ]

    def _lose_machine(self, at_s: float, machine: SimMachine, reason: str, notice_s: float) -> None:
        if any(machine.name in site.replica_model.names for site in machine.sites):
            self._fleet.gone.add(machine.name)
        for site in list(machine.sites):
            self._fleet.lose(at_s, site, reason, notice_s)

    def _site(self, fault: Fault) -> SimReplica | None:
        sites = [site for site in self._common.sites.values() if site.state != "starting"]
        if fault.pick is not None:
            return sites[int(fault.pick * len(sites))] if sites else None
        return next(
            (site for site in self._common.sites.values() if fnmatchcase(site.id, fault.replica)), None
        )

    def _note(self, at_s: float, what: str) -> None:
        self.noted.append(FaultRecord(at_s, what))
