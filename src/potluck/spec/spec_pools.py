"""A written `pool`: named machines and their links, and the regions that follow from them.

So that every strategy works on a pool, its machines are also a fleet: a region per place they name, offering each
type as often as there are machines of it. Strategies that do not know which machine they get must count on the
slowest link, so a type's network card is the slowest link within a region that one of its machines has. Between
regions the slowest link of any two machines counts, unless `links` are written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from potluck.core.values.layout import REGION, RTT_S, Pool, PoolNode
from potluck.core.values.types import Link, NodeOffer, NodeType, Region
from potluck.spec.schema import MachineIn, PoolIn
from potluck.spec.spec_hardware import SpecHardware
from potluck.spec.spec_problems import Loc, SpecProblems, shown
from potluck.spec.spec_values import PriceNote

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
    written: PoolIn, machine_count: int, hardware: SpecHardware, problems: SpecProblems
) -> ResolvedPool:
    """`machine_count` is how many were written, those that were cut out as broken included."""
    if not machine_count:
        problems.add((*written.at, "machines"), "needs at least one entry")
    before = len(problems.found)
    nodes, notes = _nodes(written.machines, hardware, problems)
    gbps = _matrix(written, "gbps", machine_count, MAX_GBPS, problems)
    rtt_ms = _matrix(written, "rtt_ms", machine_count, MAX_RTT_MS, problems)
    broken = len(problems.found) > before or len(nodes) < machine_count or not nodes
    if broken or gbps is None or rtt_ms is None:
        return ResolvedPool(None, (), (), (), ())
    types = {node.type.name: _on_slowest(node.type, nodes, gbps) for node in nodes}
    machines = tuple(replace(node, type=types[node.type.name]) for node in nodes)
    pool = Pool(machines, gbps, tuple(tuple(value / 1000 for value in row) for row in rtt_ms))
    return ResolvedPool(pool, _regions(machines), tuple(types.values()), _links(pool), tuple(notes))


def _nodes(
    written: list[MachineIn], hardware: SpecHardware, problems: SpecProblems
) -> tuple[list[PoolNode], list[PriceNote]]:
    nodes: list[PoolNode] = []
    notes: dict[tuple[str, str], PriceNote] = {}
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
        like = next((each for each in nodes if (each.region, each.type.name) == (region, node.name)), None)
        if like is not None and like.price_usd_per_h != price[0]:
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
    found = hardware.catalog_price(node, region, None, False)
    if found is None:
        hardware.note(f"{node.name}: nobody lists a price, so it is taken as owned and costs nothing")
        return 0.0, "owned: nothing"
    return found


def _matrix(written: PoolIn, field: str, size: int, most: float, problems: SpecProblems) -> Matrix | None:
    """One number for every pair, or a square matrix in the order of the machines."""
    value, at = getattr(written, field), (*written.at, field)
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
        good = [i == j or _number(each, field, most, (*at, i, j), problems) for j, each in enumerate(row)]
        sound = sound and all(good)
        rows.append(tuple(1.0 if i == j else float(each) for j, each in enumerate(row)) if all(good) else ())
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


def _on_slowest(kind: NodeType, nodes: list[PoolNode], gbps: Matrix) -> NodeType:
    """A type with the slowest link that its machines have within their regions, where they have one."""
    found = [
        min(gbps[a][b], gbps[b][a])
        for a, node in enumerate(nodes)
        for b, other in enumerate(nodes)
        if a != b and node.type.name == kind.name and node.region == other.region
    ]
    return replace(kind, network_gbps=min(found)) if found else kind


def _regions(nodes: tuple[PoolNode, ...]) -> tuple[Region, ...]:
    offers: dict[str, dict[str, NodeOffer]] = {}
    for node in nodes:
        here = offers.setdefault(node.region, {})
        before = here[node.type.name].available if node.type.name in here else 0
        here[node.type.name] = NodeOffer(node.type.name, node.price_usd_per_h, before + 1)
    return tuple(Region(name, tuple(here.values())) for name, here in offers.items())


def _links(pool: Pool) -> tuple[Link, ...]:
    ends: dict[tuple[str, str], Link] = {}
    for a, first in enumerate(pool.nodes):
        for b, second in enumerate(pool.nodes):
            if first.region != second.region:
                key = (first.region, second.region)
                known = ends.get(key, Link(*key, pool.gbps[a][b], pool.rtt_s[a][b]))
                slow, far = min(known.gbps, pool.gbps[a][b]), max(known.rtt_s, pool.rtt_s[a][b])
                ends[key] = Link(*key, slow, far)
    return tuple(ends.values())
