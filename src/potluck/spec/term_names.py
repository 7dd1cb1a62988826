"""What a fleet's owner asks of each model's plan: names of regions, clouds and nodes become those that are left.

Also the names of nodes that one region offers twice: of one type on demand and as spot, or in two zones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from potluck.core.errors import InputError, did_you_mean
from potluck.core.values.service import ModelTerms
from potluck.core.values.types import NodeType
from potluck.spec.schema import LimitsIn, ModelIn, OfferIn, RegionIn, SpecIn
from potluck.spec.spec_hardware import SpecHardware
from potluck.spec.spec_pools import ResolvedPool
from potluck.spec.spec_problems import Loc, SpecProblems, shown

ASSUMED_PREEMPTIONS_PER_H = 0.05
"""Of a spot node when nothing is said: once in 20 hours. Clouds publish bands by month, far apart by type."""


@dataclass(frozen=True, slots=True)
class TermNames:
    """What terms may name."""

    regions: tuple[str, ...]
    clouds: dict[str, str]
    """Region to its cloud, where it has one."""
    nodes: tuple[NodeType, ...]
    zones: bool
    pool: bool

    def node_names(self) -> dict[str, tuple[str, ...]]:
        """A node's name, its type's without zone or spot, or its GPU's, to the nodes that it means."""
        found: dict[str, set[str]] = {}
        for node in self.nodes:
            for name in (node.name, f"{node.gpus}x{node.gpu.name}", node.gpu.name):
                found.setdefault(name, set()).add(node.name)
        return {name: tuple(sorted(each)) for name, each in found.items()}


def places_of(written: SpecIn, pooled: ResolvedPool, regions: Sequence[str]) -> TermNames:
    clouds = {} if written.fleet is None else {r.name: r.cloud for r in written.fleet.regions if r.cloud}
    zones = any(offer.zone for region in pooled.regions for offer in region.offers)
    return TermNames(tuple(regions), clouds, pooled.node_types, zones, written.pool is not None)


def beside(region: RegionIn, hardware: SpecHardware) -> Iterator[tuple[OfferIn, NodeType]]:
    """A region's offers with their nodes; those of one type that are spot or in another zone are named so."""
    found = [(offer, hardware.node(offer.node, (*offer.at, "node"))) for offer in region.nodes]
    named = [node.name for _, node in found if node is not None]
    for offer, node in found:
        if node is None:
            continue
        kinds = {(o.spot, o.zone) for o, n in found if n is not None and n.name == node.name}
        if named.count(node.name) > 1 and len(kinds) > 1:
            name = node.name + (f" {offer.zone}" if offer.zone else "") + (" spot" if offer.spot else "")
            node = hardware.nodes.setdefault(name, replace(node, name=name))
        yield offer, node


def resolve_terms(entry: ModelIn, places: TermNames, problems: SpecProblems) -> ModelTerms:
    """The terms of one model; what is wrong with them is noted with its line."""
    limits = entry.limits or LimitsIn()
    before = len(problems.found)
    redundancy = entry.redundancy
    if redundancy is not None and redundancy.survive == "zone" and not places.zones:
        fix = "add zone: to the fleet's nodes" if not places.pool else "a pool's plans name no zones"
        problems.add((*entry.at, "redundancy"), f"zone is not known of any node; {fix}, or survive: node")
    regions = _regions(limits, places, problems)
    residency = None
    if limits.residency is not None:
        known = {*places.regions, *places.clouds.values()}
        asked = _known(limits.residency, known, "region or cloud", (*limits.at, "residency"), problems)
        residency = tuple(r for r in places.regions if r in asked or places.clouds.get(r) in asked)
    nodes = _nodes(limits, places, problems)
    for only, name in ((regions, "only_regions"), (residency, "residency"), (nodes, "only_nodes")):
        if only == () and len(problems.found) == before:
            problems.add((*limits.at, name), "leaves nothing to run on; allow more")
    try:
        return ModelTerms(
            None if redundancy is None else redundancy.survive,
            1.0 if redundancy is None else redundancy.share,
            entry.max_spot_share,
            regions,
            residency,
            nodes,
            limits.max_gpu_kinds,
            limits.max_stages,
            limits.max_nodes,
            limits.min_copies,
            limits.max_copies,
            entry.priority,
        )
    except InputError as error:
        problems.add((*limits.at, error.field), error.problem)
        return ModelTerms()


def _regions(limits: LimitsIn, places: TermNames, problems: SpecProblems) -> tuple[str, ...] | None:
    """The regions that are left; None when nothing is said."""
    at, clouds = limits.at, places.clouds
    said = (limits.only_regions, limits.only_clouds, limits.no_regions or None, limits.no_clouds or None)
    if all(each is None for each in said):
        return None
    left = set(places.regions)
    for field, names, known, allowed in (
        ("only_regions", limits.only_regions, places.regions, True),
        ("no_regions", limits.no_regions, places.regions, False),
        ("only_clouds", limits.only_clouds, tuple(clouds.values()), True),
        ("no_clouds", limits.no_clouds, tuple(clouds.values()), False),
    ):
        if not names and (names is None or not allowed):
            continue
        what = "cloud" if "clouds" in field else "region"
        asked = _known(names, set(known), what, (*at, field), problems)
        mine = {r for r in left if (clouds.get(r) if what == "cloud" else r) in asked}
        left = mine if allowed else left - mine
    return tuple(region for region in places.regions if region in left)


def _nodes(limits: LimitsIn, places: TermNames, problems: SpecProblems) -> tuple[str, ...] | None:
    if limits.only_nodes is None and not limits.no_nodes:
        return None
    names = places.node_names()
    left = {node.name for node in places.nodes}
    for field, written, allowed in (
        ("only_nodes", limits.only_nodes, True),
        ("no_nodes", limits.no_nodes, False),
    ):
        if written is None or (not written and not allowed):
            continue
        spelt = [_spelt(each, names) for each in written]
        asked = _known(spelt, set(names), "node", (*limits.at, field), problems)
        mine = {node for name in asked for node in names[name]}
        left = left & mine if allowed else left - mine
    return tuple(node.name for node in places.nodes if node.name in left)


def _spelt(name: str, known: Collection[str]) -> str:
    """The name under which the catalog has a node or a GPU, where it is not known as it is."""
    from potluck.catalog import gpus, nodes

    if name in known:
        return name
    for gpu in (True, False):
        try:
            found = gpus.gpu(name).name if gpu else nodes.canonical(name)
        except InputError:
            continue
        if found in known:
            return found
    return name


def _known(written: Sequence[str], known: set[str], what: str, at: Loc, problems: SpecProblems) -> set[str]:
    """Those of the names that there are; each other one is a complaint."""
    for place, name in enumerate(written):
        if name not in known and known:
            problems.add((*at, place), f"unknown {what} {shown(name)}{did_you_mean(name, known)}")
        elif not known:
            problems.add((*at, place), f"unknown {what} {shown(name)}; the fleet names none")
    return {name for name in written if name in known}
