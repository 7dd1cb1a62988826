"""What the search is given: GPUs on nodes with the bandwidth between them, and the work they are to do.

GPUs of one node are alike and linked alike, so a group of GPUs is how many it takes of which node, and the
bandwidth matrix is one between nodes. Inside a node its interconnect counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.model import Model
from potluck.core.types import Codec, NodeType, Slo
from potluck.perf.memory import kv_bytes
from potluck.perf.network import HANDOVER_FIXED_S, HANDOVER_SHARE
from potluck.perf.step import Floats
from potluck.perf.transfer import alpha_beta, codec_ratio
from potluck.plan.problem import HEADROOM, Ask


@dataclass(frozen=True, slots=True)
class PoolNode:
    """One machine of the pool."""

    name: str
    type: NodeType
    gpus: int
    """How many of its GPUs the pool has: fewer than the type's once some were lost."""
    price_usd_per_h: float = 0.0
    """Of the whole machine."""

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

    def index(self, name: str) -> int:
        names = [node.name for node in self.nodes]
        if name not in names:
            raise UnknownNameError("pool: node", name, names)
        return names.index(name)

    def without(self, lost: Mapping[str, int]) -> Pool:
        """The pool after losing so many GPUs of each named node; nodes keep their place."""
        for name, count in lost.items():
            if not 0 <= count <= self.nodes[self.index(name)].gpus:
                have = self.nodes[self.index(name)].gpus
                raise InputError(f"pool: {name}", f"cannot lose {count} GPUs of {have}")
        kept = tuple(replace(node, gpus=node.gpus - lost.get(node.name, 0)) for node in self.nodes)
        return replace(self, nodes=kept)


def uniform_pool(nodes: Sequence[PoolNode], gbps: float, rtt_s: float = 1e-4) -> Pool:
    """A pool with the same link between any two nodes."""
    size = len(nodes)
    return Pool(tuple(nodes), ((gbps,) * size,) * size, ((rtt_s,) * size,) * size)


@dataclass(frozen=True, slots=True)
class Workload:
    """One model's requests in their means, and the promise."""

    model: Model
    slo: Slo
    input_tokens: int
    output_tokens: int
    rate_per_s: float
    codec: Codec = "int4"
    """In which KV crosses from prefill to decode replicas; they compute in 16 bits all the same."""
    headroom: float = HEADROOM
    """Share of its time a replica is planned to be busy."""

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "rate_per_s"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise InputError(f"workload: {name}", f"must be positive, is {value}")
        if not 0 < self.headroom < 1:
            raise InputError("workload: headroom", f"must be above 0 and below 1, is {self.headroom}")
        most = self.model.max_context_tokens
        if self.input_tokens + self.output_tokens > most:
            raise InputError("workload: input_tokens", f"{self.model.name} takes at most {most} tokens")

    @property
    def kv_bytes_per_layer(self) -> float:
        """What one layer of one prompt puts on the wire."""
        whole = float(kv_bytes(self.model, float(self.input_tokens)))
        return whole * codec_ratio(self.codec, stored_bits=self.model.kv_bits) / self.model.layer_count


def workload_of(ask: Ask, codec: Codec = "int4", headroom: float = HEADROOM) -> Workload:
    """A planner's demand in its means, which preserve the tokens that pass through."""
    rate = ask.rate_per_s
    if not rate > 0:
        raise InputError(f"model {ask.name}: rate_per_s", "must be positive for a search")
    mean_in = sum(d.rate_per_s * d.new_tokens for d in ask.demands) / rate
    mean_out = sum(d.rate_per_s * d.output_tokens for d in ask.demands) / rate
    lengths = max(1, round(mean_in)), max(1, round(mean_out))
    return Workload(ask.model, ask.slo, *lengths, rate, codec, headroom)


@dataclass(frozen=True, slots=True, eq=False)
class Wires:
    """A pool's links as alpha-beta tables, [from node, to node]."""

    hop_alpha_s: Floats
    """Activations from a stage to the next."""
    hop_s_per_byte: Floats
    kv_alpha_s: Floats
    """KV from a replica to another."""
    kv_s_per_byte: Floats


def wires_of(pool: Pool) -> Wires:
    """Between nodes the matrix, inside one its interconnect."""
    size = len(pool.nodes)
    hop_alpha, hop_beta, kv_alpha, kv_beta = (np.zeros((size, size)) for _ in range(4))
    for a, node in enumerate(pool.nodes):
        inside = node.type.interconnect
        for b in range(size):
            if a != b:
                path = alpha_beta(pool.gbps[a][b], pool.rtt_s[a][b])
                hop_alpha[a, b] = HANDOVER_FIXED_S + pool.rtt_s[a][b] / 2
                hop_beta[a, b] = 8.0 / (pool.gbps[a][b] * 1e9 * HANDOVER_SHARE)
                kv_alpha[a, b], kv_beta[a, b] = path.alpha_s, 1.0 / path.beta_bytes_per_s
            elif inside.kind != "none":
                speed = inside.gb_per_s * 1e9 * HANDOVER_SHARE
                hop_alpha[a, a] = kv_alpha[a, a] = inside.latency_s
                hop_beta[a, a] = kv_beta[a, a] = 1.0 / speed
    return Wires(hop_alpha, hop_beta, kv_alpha, kv_beta)
