"""How one replica lies on nodes: a pipeline of stages, data-parallel nodes within a stage.

Nodes of a stage may be of unlike types: each shards all its layers over `tp` GPUs and takes some requests (CORAL 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal, get_args

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.model import Format
from potluck.core.values.types import NodeType

Ep = Literal["none", "tp", "dp"]
"""Experts of a mixture: each sharded over all GPUs, or each whole on one, with attention tensor or data parallel."""


@dataclass(frozen=True, slots=True)
class StageNode:
    """One node of a stage, over how many of its GPUs it shards the layers, and how their experts lie."""

    node: str
    tp: int
    """GPUs that it takes; with `ep` they share attention or requests, and the experts."""
    machine: str = ""
    ep: Ep = "none"

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise InputError(f"{self.node}: tp", f"must be at least 1, is {self.tp}")
        if self.ep not in get_args(Ep):
            raise InputError(f"{self.node}: ep", f"must be one of {', '.join(get_args(Ep))}, is {self.ep!r}")
        if self.ep != "none" and self.tp == 1:
            raise InputError(f"{self.node}: ep", "experts are spread over several GPUs; one has them all")


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers, and the nodes that share the work on them."""

    layers: int
    nodes: tuple[StageNode, ...]

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise InputError("stage: layers", f"must be at least 1, is {self.layers}")
        if not self.nodes:
            raise InputError("stage: nodes", "a stage needs at least one node")


@dataclass(frozen=True, slots=True)
class Layout:
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise InputError("layout: stages", "a layout needs at least one stage")

    @property
    def layer_count(self) -> int:
        return sum(stage.layers for stage in self.stages)

    @property
    def node_counts(self) -> dict[str, int]:
        """How many nodes of each type the replica takes; a named machine is one, however many stages it holds."""
        counts: dict[str, int] = {}
        named: set[tuple[str, str]] = set()
        for stage in self.stages:
            for node in stage.nodes:
                if not node.machine or (node.node, node.machine) not in named:
                    named.add((node.node, node.machine))
                    counts[node.node] = counts.get(node.node, 0) + 1
        return counts

    @property
    def machines(self) -> dict[str, int]:
        gpus: Counter[str] = Counter()
        for stage in self.stages:
            for node in stage.nodes:
                if node.machine:
                    gpus[node.machine] += node.tp
        return dict(gpus)

    @property
    def owners(self) -> tuple[str, ...]:
        """The machine of every layer, by name; of nodes that share a stage the first."""
        return tuple(stage.nodes[0].machine for stage in self.stages for _ in range(stage.layers))


def layers_between(first_layout: Layout, second_layout: Layout) -> dict[tuple[str, str], int]:
    """How many layers' KV goes from which machine to which when one replica hands over to another."""
    return dict(Counter(zip(first_layout.owners, second_layout.owners, strict=True)))


def single(node: str, tp: int, layers: int, ep: Ep = "none") -> Layout:
    """The plainest layout: one node holds the whole model."""
    return Layout((Stage(layers, (StageNode(node, tp, ep=ep),)),))


@dataclass(frozen=True, slots=True)
class EmulatedReplica:
    """A model by its name in the catalog, laid out as planned."""

    model: str
    layout: Layout
    links: tuple[tuple[str, str, float, float], ...] = ()
    """(from machine, to machine, gbps, round trip in s) where the layout names machines; else their cards count."""
    weights: Format | None = None
    """In which they are; None: as the catalog has them."""


REGION = "pool"  # The region of machines that name none.
RTT_S = 1e-4  # A round trip between two machines of one site when nothing is said.


@dataclass(frozen=True, slots=True)
class PoolNode:
    name: str
    type: NodeType
    gpus: int
    """How many of its GPUs the pool has: fewer than the type's once some were lost."""
    price_usd_per_h: float = 0.0
    region: str = REGION
    zone: str = ""
    """What of its region goes down by itself with it: a zone or a rack. Empty where nobody says."""

    def __post_init__(self) -> None:
        if not 0 <= self.gpus <= self.type.gpus:
            raise InputError(f"pool: {self.name}", f"has {self.gpus} GPUs of {self.type.gpus}")
        if not (isfinite(self.price_usd_per_h) and self.price_usd_per_h >= 0):
            raise InputError(f"pool: {self.name}: price_usd_per_h", "must not be negative")


@dataclass(frozen=True, slots=True)
class Pool:
    """Machines, and between each two the bandwidth and the round trip. The diagonals are not used."""

    nodes: tuple[PoolNode, ...]
    gbps: tuple[tuple[float, ...], ...]
    """[from, to]; the two directions may be unlike."""
    rtt_s: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not self.gpus:
            raise InputError("pool", "has no GPUs")
        if len(set(names)) < len(names):
            raise InputError("pool", "two nodes have the same name")
        for field in ("gbps", "rtt_s"):
            rows = getattr(self, field)
            if len(rows) != len(names) or any(len(row) != len(names) for row in rows):
                size = f"{len(names)} x {len(names)}"
                raise InputError(f"pool: {field}", f"the matrix must be {size}, one row and column per node")
        self._check("gbps", lambda value: value > 0, "must be positive, is {:g}")
        self._check("rtt_s", lambda value: value >= 0, "must not be negative")

    def _check(self, field: str, allowed: Callable[[float], bool], problem: str) -> None:
        """Refuse a matrix with a wrong value. Rows that are one object, as with one number for all, are read once."""
        rows: tuple[tuple[float, ...], ...] = getattr(self, field)
        sound: set[int] = set()
        for a, row in enumerate(rows):
            if id(row) in sound:
                continue
            wrong = [b for b, value in enumerate(row) if a != b and not (isfinite(value) and allowed(value))]
            if wrong:
                ends = f"{self.nodes[a].name} to {self.nodes[wrong[0]].name}"
                raise InputError(f"pool: {field}", f"{ends} {problem.format(row[wrong[0]])}")
            if isfinite(row[a]) and allowed(row[a]):  # else only this machine may leave it out: its diagonal
                sound.add(id(row))

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def links(self) -> tuple[tuple[str, str, float, float], ...]:
        """(from machine, to machine, gbps, round trip in s) for each two."""
        return tuple(
            (first.name, second.name, self.gbps[a][b], self.rtt_s[a][b])
            for a, first in enumerate(self.nodes)
            for b, second in enumerate(self.nodes)
            if a != b
        )

    def index(self, name: str) -> int:
        names = [node.name for node in self.nodes]
        if name not in names:
            raise UnknownNameError("pool: node", name, names)
        return names.index(name)

    def node(self, name: str) -> PoolNode | None:
        return next((node for node in self.nodes if node.name == name), None)

    def without(self, lost: Mapping[str, int]) -> Pool:
        """The pool after losing so many GPUs of each named node; nodes keep their place."""
        for name, count in lost.items():
            if not 0 <= count <= self.nodes[self.index(name)].gpus:
                have = self.nodes[self.index(name)].gpus
                raise InputError(f"pool: {name}", f"cannot lose {count} GPUs of {have}")
        kept = tuple(replace(node, gpus=node.gpus - lost.get(node.name, 0)) for node in self.nodes)
        return replace(self, nodes=kept)

    def only(self, places: Sequence[int]) -> Pool:
        gbps = tuple(tuple(self.gbps[a][b] for b in places) for a in places)
        rtt_s = tuple(tuple(self.rtt_s[a][b] for b in places) for a in places)
        return Pool(tuple(self.nodes[a] for a in places), gbps, rtt_s)

    def with_link(self, source: str, target: str, gbps: float) -> Pool:
        a, b = self.index(source), self.index(target)
        rows = [list(row) for row in self.gbps]
        rows[a][b] = gbps
        return replace(self, gbps=tuple(map(tuple, rows)))


def uniform_pool(nodes: Sequence[PoolNode], gbps: float, rtt_s: float = RTT_S) -> Pool:
    size = len(nodes)
    return Pool(tuple(nodes), ((gbps,) * size,) * size, ((rtt_s,) * size,) * size)
