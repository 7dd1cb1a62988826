"""Names of GPUs and node types in a spec become values: the catalog's, or the spec's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TypeVar

from potluck.core.errors import InputError, did_you_mean
from potluck.core.values.layout import REGION, RTT_S, Pool, PoolNode
from potluck.core.values.types import Gpu, Interconnect, Link, NodeOffer, NodeType, Region
from potluck.spec.schema import GpuIn, MachineIn, NodeIn, PoolIn, Written
from potluck.spec.spec_problems import Loc, SpecProblems, shown
from potluck.spec.spec_values import PriceNote

ASSUMED_LINK = Interconnect("pcie", 25.0, 10e-6)
"""What GPUs of an unknown node share: PCIe 4.0 x16 as it is usually reached."""
ASSUMED_NETWORK_GBPS = 10.0
T = TypeVar("T")
_COUNTED = re.compile(r"([0-9]{1,3})[xX](.+)\Z")


def made_of(kind: Callable[..., T], written: Written, problems: SpecProblems, **values: object) -> T | None:
    """The dataclass that a mapping was derived from; what it refuses is noted at the field's line, None then."""
    given = written.model_dump(exclude=set(values), exclude_none=True)
    try:
        return kind(**given, **values)
    except InputError as error:
        problems.add((*written.at, error.field.rpartition(": ")[2]), error.problem)
        return None


@dataclass(slots=True)
class SpecHardware:
    """GPUs and node types known so far; `notes` say what had to be assumed."""

    problems: SpecProblems
    gpus: dict[str, Gpu] = field(default_factory=dict)
    nodes: dict[str, NodeType] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_gpus(self, written: list[GpuIn]) -> None:
        """The spec's own GPUs. None may pass for a catalog GPU: two would bear one name."""
        for gpu in written:
            loc = (*gpu.at, "name")
            listed = _catalog_gpu(gpu.name)
            if listed is not None:
                self.problems.add(loc, f"{shown(listed.name)} is in the catalog; choose another name")
            elif gpu.name in self.gpus:
                self.problems.add(loc, f"duplicate GPU {shown(gpu.name)}")
            elif (made := made_of(Gpu, gpu, self.problems)) is not None:
                self.gpus[gpu.name] = made

    def node(self, node_in: str | NodeIn, loc: Loc) -> NodeType | None:
        """The node type; None, with a complaint, when there is no such thing."""
        try:
            node = self._named(node_in) if isinstance(node_in, str) else self._built(node_in, loc)
        except InputError as error:
            self.problems.add(loc, error.problem if error.field in ("node", "gpu", "") else str(error))
            return None
        if node is None:
            return None
        other = self.nodes.setdefault(node.name, node)
        if other != node:
            problem = f"{shown(node.name)} means two different machines here; give this one its own name"
            self.problems.add(loc, problem)
            return None
        return node

    def _named(self, name: str) -> NodeType:
        from potluck.catalog import nodes as catalog

        if name in self.nodes:
            return self.nodes[name]
        counted = _COUNTED.match(name)
        count, gpu = (int(counted[1]), counted[2]) if counted else (1, name)
        if gpu in self.gpus:
            return self._assemble(f"{count}x{gpu}", self.gpus[gpu], count, None, None)
        try:
            return catalog.node_type(name)
        except InputError:
            near = did_you_mean(gpu, self.gpus) if _COUNTED.match(name) else ""
            if "did you mean" not in near:
                raise
            raise InputError("node", f"{shown(name)}: unknown GPU {shown(gpu)}{near}") from None

    def _built(self, node_in: NodeIn, loc: Loc) -> NodeType | None:
        gpu = self._gpu(node_in.gpu, (*loc, "gpu"))
        if gpu is None:
            return None
        link = node_in.interconnect
        interconnect = Interconnect(link.kind, link.gb_per_s, link.latency_us * 1e-6) if link else None
        name = node_in.name or f"{node_in.count}x{gpu.name}"
        return self._assemble(name, gpu, node_in.count, interconnect, node_in.network_gbps)

    def _gpu(self, name: str, loc: Loc) -> Gpu | None:
        from potluck.catalog import gpus as catalog

        gpu = self.gpus.get(name) or _catalog_gpu(name)
        if gpu is None:
            near = did_you_mean(name, [*catalog.names(), *self.gpus])
            self.problems.add(loc, f"unknown GPU {shown(name)}{near}")
        return gpu

    def _assemble(
        self, name: str, gpu: Gpu, count: int, interconnect: Interconnect | None, network_gbps: float | None
    ) -> NodeType:
        """A node type whose open ends are filled from the catalog's nearest, else assumed and noted."""
        like = _catalog_node(f"{count}x{gpu.name}")
        if interconnect is None:
            interconnect = like.interconnect if like is not None else None
        if interconnect is None:
            interconnect = Interconnect("none", 0.0, 0.0) if count == 1 else ASSUMED_LINK
            if count > 1:
                self.note(f"{name}: interconnect assumed PCIe, {interconnect.gb_per_s:g} GB/s per GPU")
        if network_gbps is None:
            network_gbps = like.network_gbps if like is not None else ASSUMED_NETWORK_GBPS
            if like is None:
                self.note(f"{name}: network assumed {network_gbps:g} Gbps")
        return NodeType(name, gpu, count, interconnect, network_gbps)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def catalog_price(
        self, node: NodeType, region: str, cloud: str | None, spot: bool
    ) -> tuple[float, str] | None:
        """(price, source): the region's own price where the catalog lists it, else the cheapest listed."""
        from potluck.catalog import prices as catalog

        name = f"{node.gpus}x{node.gpu.name}"
        # A cloud's own price elsewhere is nearer the truth than another cloud's.
        places = [f"{cloud}/{region}", cloud] if cloud else [region]
        for place in (*places, None):
            try:
                price = catalog.price_usd_per_h(name, place, spot)
            except InputError:
                continue
            where = price.place if place == places[0] else f"{price.place}, the cheapest listed"
            basis = "" if price.listed else f", {price.basis}"
            return price.price_usd_per_h, f"catalog: {where} ({price.source} {price.date}{basis})"
        return None


def _catalog_node(name: str) -> NodeType | None:
    from potluck.catalog import nodes as catalog

    try:
        return catalog.node_type(name)
    except InputError:
        return None


def _catalog_gpu(name: str) -> Gpu | None:
    from potluck.catalog import gpus as catalog

    try:
        return catalog.gpu(name)
    except InputError:
        return None


MAX_GBPS = 1e6
MAX_RTT_MS = 60_000.0

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ResolvedPool:
    """What a pool, or a fleet, means."""

    pool: Pool | None
    """None for a fleet, or when something is wrong with it, which has been noted."""
    regions: tuple[Region, ...]
    node_types: tuple[NodeType, ...]
    links: tuple[Link, ...]
    price_notes: tuple[PriceNote, ...]


def resolve_pool(
    pool_in: PoolIn, machine_count: int, hardware: SpecHardware, problems: SpecProblems
) -> ResolvedPool:
    """`machine_count` is how many were written, those that were cut out as broken included.

    So that every strategy works on a pool, its machines are also a fleet: a region per place they name, offering each
    type as often as there are machines of it. Strategies that do not know which machine they get must count on the
    slowest link, so a type's network card is the slowest link within a region that one of its machines has. Between
    regions the slowest link of any two machines counts, unless `links` are written.
    """
    if not machine_count:
        problems.add((*pool_in.at, "machines"), "needs at least one entry")
    before = len(problems.found)
    nodes, notes = _nodes(pool_in.machines, hardware, problems)
    gbps = _matrix(pool_in, "gbps", machine_count, MAX_GBPS, problems)
    rtt_ms = _matrix(pool_in, "rtt_ms", machine_count, MAX_RTT_MS, problems)
    broken = len(problems.found) > before or len(nodes) < machine_count or not nodes
    if broken or gbps is None or rtt_ms is None:
        return ResolvedPool(None, (), (), (), ())
    types = _on_slowest(nodes, gbps)
    machines = tuple(replace(node, type=types[node.type.name]) for node in nodes)
    pool = Pool(machines, gbps, _seconds(rtt_ms))
    return ResolvedPool(pool, _regions(machines), tuple(types.values()), _links(pool), tuple(notes))


def _nodes(
    written: list[MachineIn], hardware: SpecHardware, problems: SpecProblems
) -> tuple[list[PoolNode], list[PriceNote]]:
    nodes: list[PoolNode] = []
    notes: dict[tuple[str, str], PriceNote] = {}
    first: dict[tuple[str, str], PoolNode] = {}  # Of each region and type.
    seen: set[str] = set()
    for machine in written:
        if machine.name in seen:
            problems.add(
                (*machine.at, "name"), f"duplicate machine {shown(machine.name)}; give each its own name"
            )
        seen.add(machine.name)
        node = hardware.node(machine.node, (*machine.at, "node"))
        if node is None:
            continue
        region = machine.region or REGION
        price = _price(machine, node, region, hardware)
        like = first.setdefault(
            (region, node.name), PoolNode(machine.name, node, node.gpus, price[0], region)
        )
        if like.price_usd_per_h != price[0]:
            problem = f"{price[0]:g} is not what {shown(like.name)} costs, {like.price_usd_per_h:g}"
            fix = "machines of one type and region have one price; give this one its own region or type name"
            problems.add((*machine.at, "price_usd_per_h"), f"{problem}; {fix}")
        nodes.append(PoolNode(machine.name, node, node.gpus, price[0], region, machine.zone or ""))
        notes.setdefault((region, node.name), PriceNote(region, node.name, price[1]))
    return nodes, list(notes.values())


def _price(machine: MachineIn, node: NodeType, region: str, hardware: SpecHardware) -> tuple[float, str]:
    """(price, where it came from): the machines of a pool are there already, so one without a price costs nothing."""
    if machine.price_usd_per_h is not None:
        return machine.price_usd_per_h, "spec"
    price = hardware.catalog_price(node, region, None, False)
    if price is None:
        hardware.note(f"{node.name}: nobody lists a price, so it is taken as owned and costs nothing")
        return 0.0, "owned: nothing"
    return price


def _matrix(pool_in: PoolIn, field: str, size: int, most: float, problems: SpecProblems) -> Matrix | None:
    """One number for every pair, or a square matrix in the order of the machines."""
    value, at = getattr(pool_in, field), (*pool_in.at, field)
    if value is None and field == "rtt_ms":
        value = RTT_S * 1000
    if not isinstance(value, list):
        known = _number(value, field, most, at, problems)
        return ((float(value),) * size,) * size if known else None
    square = f"must be one number, or {size} rows of {size}: a row and a column per machine"
    if len(value) != size:
        problems.add(at, f"{square}; has {len(value)} rows")
        return None
    rows, sound = [], True
    for i, row in enumerate(value):
        if not isinstance(row, list) or len(row) != size:
            has = f"has {len(row)} numbers" if isinstance(row, list) else f"is {shown(row)}"
            problems.add((*at, i), f"{square}; row {i + 1} {has}")
            sound = False
            continue
        good = [i == j or _number(item, field, most, (*at, i, j), problems) for j, item in enumerate(row)]
        sound = sound and all(good)
        rows.append(tuple(1.0 if i == j else float(item) for j, item in enumerate(row)) if all(good) else ())
    return tuple(rows) if sound else None


def _number(value: object, field: str, most: float, at: Loc, problems: SpecProblems) -> bool:
    problem = ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        problem = f"must be a number, is {shown(value)}"
    elif isinstance(value, float) and not isfinite(value):
        problem = "must be a finite number"
    elif value < 0 or (value == 0 and field == "gbps"):
        problem = f"must {'be positive' if field == 'gbps' else 'not be negative'}, is {shown(value)}"
    elif value > most:
        problem = f"must be at most {most:,g}, is {shown(value)}"
    if problem:
        problems.add(at, problem)
    return not problem


def _seconds(rtt_ms: Matrix) -> Matrix:
    """The same in seconds; rows that are one object stay one, as in a pool with one number for every pair."""
    rows = {id(row): row for row in rtt_ms}
    in_s = {key: tuple(value / 1000 for value in row) for key, row in rows.items()}
    return tuple(in_s[id(row)] for row in rtt_ms)


def _uniform(matrix: Matrix) -> bool:
    """Whether one number was written for every pair: all rows are then one object."""
    return all(row is matrix[0] for row in matrix)


def _places(nodes: Sequence[PoolNode]) -> dict[str, list[int]]:
    """Region to the places of its machines, in order of the first."""
    places: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        places.setdefault(node.region, []).append(place)
    return places


def _on_slowest(nodes: Sequence[PoolNode], gbps: Matrix) -> dict[str, NodeType]:
    """Each type by name, with the slowest link that its machines have within their regions, where they have one."""
    types = {node.type.name: node.type for node in nodes}
    slowest: dict[str, float] = {}
    uniform = _uniform(gbps)
    incoming: Matrix = gbps if uniform else tuple(zip(*gbps, strict=True))
    for places in _places(nodes).values():
        for a in places if len(places) > 1 else ():
            row, column = gbps[a], incoming[a]
            least = row[a] if uniform else min(min(row[b], column[b]) for b in places if b != a)
            name = nodes[a].type.name
            slowest[name] = min(slowest.get(name, least), least)
    return {
        name: replace(kind, network_gbps=slowest[name]) if name in slowest else kind
        for name, kind in types.items()
    }


def _regions(nodes: tuple[PoolNode, ...]) -> tuple[Region, ...]:
    offers: dict[str, dict[str, NodeOffer]] = {}
    for node in nodes:
        here = offers.setdefault(node.region, {})
        before = here[node.type.name].available if node.type.name in here else 0
        here[node.type.name] = NodeOffer(node.type.name, node.price_usd_per_h, before + 1)
    return tuple(Region(name, tuple(here.values())) for name, here in offers.items())


def _links(pool: Pool) -> tuple[Link, ...]:
    """A link for each two regions, as slow and as far as the worst of two machines in them."""
    places = _places(pool.nodes)
    worst: dict[tuple[str, str], tuple[float, float]] = {}
    uniform = _uniform(pool.gbps) and _uniform(pool.rtt_s)
    for source, own in places.items():
        for target, others in places.items():
            if source == target:
                continue
            for a in own[:1] if uniform else own:
                row, far = pool.gbps[a], pool.rtt_s[a]
                ends = others[:1] if uniform else others
                slow_gbps, far_s = min(row[b] for b in ends), max(far[b] for b in ends)
                known = worst.get((source, target), (slow_gbps, far_s))
                worst[source, target] = min(known[0], slow_gbps), max(known[1], far_s)
    return tuple(Link(*key, gbps, rtt_s) for key, (gbps, rtt_s) in worst.items())
