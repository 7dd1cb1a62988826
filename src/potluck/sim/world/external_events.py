"""What comes from outside: faults, prices and supply. Each is noted with its time, for the report.

Of prices and supply the Brain is told (`MarketReported`) once for each moment in which some change, as a live one is
by the market file, and the planner sees them.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from math import inf

from potluck.core.errors import UnknownNameError
from potluck.core.state.events import MarketReported
from potluck.core.values.types import NodeOffer, Region
from potluck.sim.results.records import FaultRecord
from potluck.sim.world.attempts import SimAttempts
from potluck.sim.world.common_state import CommonState, Tell
from potluck.sim.world.event_queue import CALL, FAULT
from potluck.sim.world.faults import Fault, Faults, PriceChange, SupplyChange
from potluck.sim.world.sim_fleet import SimFleet
from potluck.sim.world.sim_state import SimMachine, SimReplica


class ExternalEvents:
    """Carries out what a fault file or chance has in store."""

    __slots__ = ("_falls", "_ground", "_journeys", "_quoted_s", "_tell", "_yard", "noted", "prices", "supply")

    def __init__(self, common: CommonState, attempts: SimAttempts, fleet: SimFleet, tell: Tell) -> None:
        self._ground = common
        self._journeys = attempts
        self._yard = fleet
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
            if fault.kind == "link" and fault.pick is None and ends not in self._ground.network.links:
                known = ("->".join(each) for each in self._ground.network.links)
                raise UnknownNameError("faults: link", "->".join(ends), known)
            self._ground.events.push(fault.at_s, FAULT, fault)
        changes: tuple[PriceChange | SupplyChange, ...] = (*faults.prices, *faults.availability)
        for change in changes:
            self._ground.events.push(change.at_s, FAULT, change)

    def happen(self, at_s: float, what: Fault | PriceChange | SupplyChange) -> None:
        if isinstance(what, PriceChange):
            self.prices[what.region, what.node] = what.usd_per_h
            self._ground.purse.reprice(at_s, what.region, what.node, what.usd_per_h)
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
            self._ground.events.push(at_s, CALL, self._quote)

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
            for region in self._ground.replica_models.resolved.regions
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
        self._yard.lose(at_s, site, "fault", fault.notice_s)

    def _node(self, at_s: float, fault: Fault) -> None:
        machines = list(self._yard.machines.values())
        machine: SimMachine | None = None
        if fault.pick is not None:
            machine = machines[int(fault.pick * len(machines))] if machines else None
        else:
            machine = next((each for each in machines if fnmatchcase(each.name, fault.node)), None)
        if machine is None:
            self._note(at_s, f"no node {fault.node or 'is there'} to lose")
            return
        self._note(at_s, f"lost node {machine.name}")
        self._lose_machine(at_s, machine, "node lost", fault.notice_s)

    def _region(self, at_s: float, fault: Fault) -> None:
        self._note(at_s, f"lost region {fault.region}")
        for machine in list(self._yard.machines.values()):
            if machine.region == fault.region:
                self._lose_machine(at_s, machine, "region lost", 0.0)

    def _spot(self, at_s: float, fault: Fault) -> None:
        region, node = fault.region, fault.node
        if fault.pick is not None:
            machines = list(self._yard.machines.values())
            if not machines:
                self._note(at_s, "no spot node to take")
                return
            picked = machines[int(fault.pick * len(machines))]
            region, node = picked.region, picked.node
        self._take(at_s, region, node, fault.count, fault.notice_s, "spot preemption")

    def _link(self, at_s: float, fault: Fault) -> None:
        """A link slows down or breaks; what is on a broken one fails."""
        common, network = self._ground, self._ground.network
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
                self._journeys.fail(at_s, running, "link", f"{ends[0]}->{ends[1]}")
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
            self._ground.events.push(
                at_s + fault.duration_s, CALL, lambda when_s: self._speed(when_s, site, 1.0)
            )

    def _reports(self, at_s: float, fault: Fault) -> None:
        if fault.pick is not None:
            found = self._site(fault)
            sites = [] if found is None else [found]
        else:
            sites = [site for site in self._ground.sites.values() if fnmatchcase(site.id, fault.replica)]
        for site in sites:
            site.muted_until_s = max(site.muted_until_s, at_s + fault.duration_s)
        self._note(at_s, f"reports of {len(sites)} replicas are lost for {fault.duration_s:.3g} s")

    def _cancel(self, at_s: float, fault: Fault) -> None:
        self._journeys.cancel(at_s, fault.request)

    def _speed(self, at_s: float, site: SimReplica, factor: float) -> None:
        if site.there:
            self._journeys.catch_up_if_due(at_s, site)
            site.replica.set_speed(at_s, factor)
            # Its next happening may be later than the agenda thinks, which costs one look too many, or earlier.
            self._journeys.touch(at_s, site)

    def _set_rate(self, at_s: float, ends: tuple[str, str], rate: float) -> None:
        pipe = self._ground.network.links[ends]
        pipe.set_rate(at_s, rate)
        self._ground.handovers.schedule(pipe)
        self._ground.reports.link_touched(at_s)

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
            for machine in self._yard.machines.values()
            if (machine.region, machine.node) == (region, node)
            and any(site.state != "leaving" for site in machine.sites)
        ]

    def _lose_machine(self, at_s: float, machine: SimMachine, reason: str, notice_s: float) -> None:
        if any(machine.name in site.replica_model.names for site in machine.sites):
            self._yard.gone.add(machine.name)
        for site in list(machine.sites):
            self._yard.lose(at_s, site, reason, notice_s)

    def _site(self, fault: Fault) -> SimReplica | None:
        sites = [site for site in self._ground.sites.values() if site.state != "starting"]
        if fault.pick is not None:
            return sites[int(fault.pick * len(sites))] if sites else None
        return next(
            (site for site in self._ground.sites.values() if fnmatchcase(site.id, fault.replica)), None
        )

    def _note(self, at_s: float, what: str) -> None:
        self.noted.append(FaultRecord(at_s, what))
