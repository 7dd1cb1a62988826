"""Time on the links between the GPUs of a node and between nodes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from potluck.core.values.types import Interconnect, NodeType
from potluck.perf.calibration import Network
from potluck.perf.step import Floats

HANDOVER_FIXED_S = 3e-5
"""Start of a message between nodes over TCP or RDMA: Vidur's two-node send/receive starts at 19-40 µs."""
HANDOVER_SHARE = 0.8
"""Share of a network card's rate that one stream of activations reaches."""
LIKENESS = {"xgmi": "nvlink", "none": "pcie"}
"""Links without measurements of their own behave like these."""


def all_reduce_s(
    size_bytes: ArrayLike, ranks: int, link: Interconnect, networks: tuple[Network, ...]
) -> Floats:
    """Ring all-reduce inside a node: fixed + 2 (n-1)/n bytes / (share x link)."""
    return _collective_s(2.0, size_bytes, ranks, link, networks)


def all_to_all_s(
    size_bytes: ArrayLike, ranks: int, link: Interconnect, networks: tuple[Network, ...]
) -> Floats:
    """Each rank sends its bytes to all evenly, all at once: fixed + (n-1)/n bytes / (share x link).

    Nobody measured these; share and start are those of all-reduce on the same link.
    """
    return _collective_s(1.0, size_bytes, ranks, link, networks)


def _collective_s(
    passes: float, size_bytes: ArrayLike, ranks: int, link: Interconnect, networks: tuple[Network, ...]
) -> Floats:
    size = np.asarray(size_bytes, np.float64)
    if ranks == 1:
        return np.zeros_like(size)
    kind = LIKENESS.get(link.kind, link.kind)
    fitted = next((network for network in networks if network.kind == kind), None)
    share, fixed_s = (0.7, 2e-5) if fitted is None else (fitted.share, fitted.fixed_s)
    per_peer_s = 0.0 if fitted is None else fitted.fixed_per_peer_s * (ranks - 1)
    wire_s = passes * (ranks - 1) / ranks * size / (share * link.gb_per_s * 1e9)
    return np.asarray(fixed_s + per_peer_s + wire_s, np.float64)


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


def handover_s(size_bytes: ArrayLike, source: NodeType, target: NodeType) -> Floats:
    """Activations from one pipeline stage to the next, over the slower of the two network cards."""
    gbps = min(source.network_gbps, target.network_gbps) * HANDOVER_SHARE
    size = np.asarray(size_bytes, np.float64)
    return np.asarray(HANDOVER_FIXED_S + size * 8.0 / (gbps * 1e9), np.float64)
