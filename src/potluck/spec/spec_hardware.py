"""Names of GPUs and node types in a spec become values: the catalog's, or the spec's own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from potluck.core.errors import InputError, did_you_mean
from potluck.core.values.types import Gpu, Interconnect, NodeType
from potluck.spec.schema import GpuIn, NodeIn
from potluck.spec.spec_problems import Loc, SpecProblems, shown

ASSUMED_LINK = Interconnect("pcie", 25.0, 10e-6)
"""What GPUs of an unknown node share: PCIe 4.0 x16 as it is usually reached."""
ASSUMED_NETWORK_GBPS = 10.0
_COUNTED = re.compile(r"([0-9]{1,3})[xX](.+)\Z")


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
            else:
                self.gpus[gpu.name] = Gpu(**gpu.model_dump())  # the fields bear the same names

    def node(self, written: str | NodeIn, loc: Loc) -> NodeType | None:
        """The node type; None, with a complaint, when there is no such thing."""
        try:
            node = self._named(written) if isinstance(written, str) else self._built(written, loc)
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

    def _built(self, written: NodeIn, loc: Loc) -> NodeType | None:
        gpu = self._gpu(written.gpu, (*loc, "gpu"))
        if gpu is None:
            return None
        link = written.interconnect
        interconnect = Interconnect(link.kind, link.gb_per_s, link.latency_us * 1e-6) if link else None
        name = written.name or f"{written.count}x{gpu.name}"
        return self._assemble(name, gpu, written.count, interconnect, written.network_gbps)

    def _gpu(self, name: str, loc: Loc) -> Gpu | None:
        from potluck.catalog import gpus as catalog

        gpu = self.gpus.get(name) or _catalog_gpu(name)
        if gpu is None:
            near = did_you_mean(name, [*catalog.names(), *self.gpus])
            self.problems.add(loc, f"unknown GPU {shown(name)}{near}")
        return gpu

    def _assemble(
        self, name: str, gpu: Gpu, count: int, link: Interconnect | None, network_gbps: float | None
    ) -> NodeType:
        """A node type whose open ends are filled from the catalog's nearest, else assumed and noted."""
        like = _catalog_node(f"{count}x{gpu.name}")
        if link is None:
            link = like.interconnect if like is not None else None
        if link is None:
            link = Interconnect("none", 0.0, 0.0) if count == 1 else ASSUMED_LINK
            if count > 1:
                self.note(f"{name}: interconnect assumed PCIe, {link.gb_per_s:g} GB/s per GPU")
        if network_gbps is None:
            network_gbps = like.network_gbps if like is not None else ASSUMED_NETWORK_GBPS
            if like is None:
                self.note(f"{name}: network assumed {network_gbps:g} Gbps")
        return NodeType(name, gpu, count, link, network_gbps)

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
