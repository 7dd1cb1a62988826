"""Time on the links between the GPUs of a node and between nodes.

Engines add up activations over tensor-parallel ranks in three ways, by what joins the GPUs and how much there is:

    direct   every rank reads all others' parts at once:  t = a + b log2 n + (n-1) B / (s L)
    split    each reduces a part, then reads the others': t = a + b log2 n + 2 (n-1)/n B / (s L)
    library  NCCL's rings and trees:                      t = a + b (n-1)  + 2 (n-1)/n B / (s L)

B bytes, n ranks, L the link's rate in one direction per GPU. Direct and split are vLLM's own kernels in CUDA graphs;
they need peer access between all ranks, and a switch (or a pair). Over PCIe without peer access everything goes
through the host's memory: where no GPU reads another's, each over its own lanes; where only some do, as measured with
pairs of L40S, on a path that all ranks share, so that each has L / n of it.
"""

from __future__ import annotations

from math import log2

import numpy as np
from numpy.typing import ArrayLike

from potluck.core.values.types import Interconnect, NodeType
from potluck.perf.operators.calibration import CollectivePath, NodeNetwork
from potluck.perf.step_timer import Floats

HANDOVER_FIXED_S = 3e-5
"""Start of a message between nodes over TCP or RDMA: Vidur's two-node send/receive starts at 19-40 µs."""
HANDOVER_SHARE = 0.8
"""Share of a network card's rate that one stream of activations reaches."""
DIRECT_MOST_BYTES = {2: 8 << 20, 4: 512 << 10, 8: 256 << 10}
"""Up to how many bytes vLLM reduces directly, by ranks."""
OWN_MOST_BYTES = 8 << 20
"""From here vLLM leaves it to NCCL."""
PCIE_GB_PER_S = 32.0
"""Of the way through the host where the named link does not join all ranks."""
UNKNOWN = CollectivePath(2e-5, 0.0, 0.7)
"""Of a link when no measurements are given at all."""


def all_reduce_s(
    size_bytes: ArrayLike, ranks: int, interconnect: Interconnect, networks: tuple[NodeNetwork, ...]
) -> Floats:
    """Seconds until each of `ranks` GPUs has the sum of everyone's bytes."""
    size = np.asarray(size_bytes, np.float64)
    if ranks == 1:
        return np.zeros_like(size)
    network, rate = network_for(interconnect, ranks, networks)
    if network is None:
        return _floats(UNKNOWN.fixed_s + 2.0 * (ranks - 1) / ranks * size / (UNKNOWN.share * rate))
    if network.kind == "host":
        rate = rate / ranks
    passes = 2.0 * (ranks - 1) / ranks
    library = _way_s(network.library, ranks - 1.0, passes * size, rate)
    if not _own_kernels(interconnect, network, ranks):
        return library
    direct = _way_s(network.direct, log2(ranks), (ranks - 1.0) * size, rate)
    least = min(limit for few, limit in DIRECT_MOST_BYTES.items() if few >= min(ranks, 8))
    split = direct if network.split is None else _way_s(network.split, log2(ranks), passes * size, rate)
    own = np.where(size < least, direct, split)
    return _floats(np.where(size < OWN_MOST_BYTES, own, library))


def all_to_all_s(
    size_bytes: ArrayLike, ranks: int, interconnect: Interconnect, networks: tuple[NodeNetwork, ...]
) -> Floats:
    """Each rank sends its bytes to all evenly, all at once: a + b (n-1) + (n-1)/n B / (s L)."""
    size = np.asarray(size_bytes, np.float64)
    if ranks == 1:
        return np.zeros_like(size)
    network, rate = network_for(interconnect, ranks, networks)
    path = UNKNOWN if network is None else network.shuffle
    if network is not None and network.kind == "host":
        rate = rate / ranks
    return _way_s(path, ranks - 1.0, (ranks - 1) / ranks * size, rate)


def network_for(
    interconnect: Interconnect, ranks: int, networks: tuple[NodeNetwork, ...]
) -> tuple[NodeNetwork | None, float]:
    """The measured network that is most like a link between so many ranks, and the link's bytes a second.

    The nearest in rate of its kind: how long a message takes to start is a matter of the generation.
    """
    joined = interconnect.domain is None or ranks <= interconnect.domain
    kind: str = interconnect.kind
    rate = interconnect.gb_per_s
    if not joined:
        kind = "lanes" if interconnect.domain == 1 else "host"
        rate = min(rate, PCIE_GB_PER_S) if interconnect.kind != "pcie" else rate
    elif kind in ("nvlink", "xgmi"):
        kind = "nvswitch"
    elif kind == "none":
        kind = "host"
    alike = [network for network in networks if network.kind == kind]
    if not alike:
        return None, rate * 1e9
    return min(alike, key=lambda n: abs(log2(n.gb_per_s / max(rate, 1e-9)))), rate * 1e9


def _own_kernels(interconnect: Interconnect, network: NodeNetwork, ranks: int) -> bool:
    """Whether the engine has kernels of its own there: over a switch, or between two; a mesh of links is NCCL's."""
    if ranks == 2:
        return network.direct is not None
    return network.split is not None and interconnect.kind != "nvlink"


def _way_s(path: CollectivePath | None, steps: float, moved_bytes: Floats, rate: float) -> Floats:
    assert path is not None
    return _floats(path.fixed_s + path.step_s * steps + moved_bytes / (path.share * rate))


def _floats(value: ArrayLike) -> Floats:
    return np.asarray(value, np.float64)


Hop = tuple[float, float]
"""(seconds, seconds per byte) of activations from one pipeline stage to the next."""


def hop_between(gbps: float, rtt_s: float) -> Hop:
    """From one machine to another."""
    return HANDOVER_FIXED_S + rtt_s / 2, 8.0 / (gbps * 1e9 * HANDOVER_SHARE)


def hop_inside(node: NodeType) -> Hop:
    """From GPU to GPU of one machine; nothing to cross where it has one alone."""
    inside = node.interconnect
    if inside.kind == "none":
        return 0.0, 0.0
    return inside.latency_s, 1.0 / (inside.gb_per_s * 1e9 * HANDOVER_SHARE)


def handover_s(size_bytes: ArrayLike, source_node_type: NodeType, target_node_type: NodeType) -> Floats:
    """Activations from one pipeline stage to the next, over the slower of the two network cards."""
    gbps = min(source_node_type.network_gbps, target_node_type.network_gbps) * HANDOVER_SHARE
    size = np.asarray(size_bytes, np.float64)
    return np.asarray(HANDOVER_FIXED_S + size * 8.0 / (gbps * 1e9), np.float64)
