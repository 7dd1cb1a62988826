"""GPUs one has: named machines, and the bandwidth and round trip between each two.

GPUs of one machine are alike and linked alike, so the matrices are between machines. Inside one its
interconnect counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.types import NodeType

REGION = "pool"
"""The region of machines that name none."""
RTT_S = 1e-4
"""A round trip between two machines of one site when nothing is said."""


@dataclass(frozen=True, slots=True)
class PoolNode:
    """One machine of the pool."""

    name: str
    type: NodeType
    gpus: int
    """How many of its GPUs the pool has: fewer than the type's once some were lost."""
    price_usd_per_h: float = 0.0
    """Of the whole machine."""
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
        for a, first in enumerate(names):
            for b, second in enumerate(names):
                if a != b and not (isfinite(self.gbps[a][b]) and self.gbps[a][b] > 0):
                    problem = f"{first} to {second} must be positive, is {self.gbps[a][b]}"
                    raise InputError("pool: gbps", problem)
                if a != b and not (isfinite(self.rtt_s[a][b]) and self.rtt_s[a][b] >= 0):
                    raise InputError("pool: rtt_s", f"{first} to {second} must not be negative")

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
        """The pool of some of its machines, in the order given."""
        gbps = tuple(tuple(self.gbps[a][b] for b in places) for a in places)
        rtt_s = tuple(tuple(self.rtt_s[a][b] for b in places) for a in places)
        return Pool(tuple(self.nodes[a] for a in places), gbps, rtt_s)

    def with_link(self, source: str, target: str, gbps: float) -> Pool:
        """The pool with another bandwidth in one direction."""
        a, b = self.index(source), self.index(target)
        rows = [list(row) for row in self.gbps]
        rows[a][b] = gbps
        return replace(self, gbps=tuple(map(tuple, rows)))


def uniform_pool(nodes: Sequence[PoolNode], gbps: float, rtt_s: float = RTT_S) -> Pool:
    """A pool with the same link between any two nodes."""
    size = len(nodes)
    return Pool(tuple(nodes), ((gbps,) * size,) * size, ((rtt_s,) * size,) * size)
