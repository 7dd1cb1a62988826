"""How long KV takes from one replica to another.

    T = alpha + bytes / beta        (Hockney's alpha-beta model, per pair of replicas; THUNDERSERVE's eq. 1)

Bytes are what crosses the wire: the part of the KV that belongs to tokens may be quantised (THUNDERSERVE 4),
the fixed state of linear attention never is, since its errors would stay for the rest of the request.
Sent layer by layer while the prefill still runs (CAUCHY 3.6), only a tail of T shows after its end.
Every function takes arrays of bytes as well as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from potluck.core.values.kv import WINDOW_BYTES, codec_ratio, connections_for
from potluck.core.values.model import Model
from potluck.core.values.types import Codec, Link
from potluck.perf.memory import state_bytes as model_state_bytes
from potluck.perf.step_timer import Floats

EFFICIENCY = 0.94
"""Payload share of TCP over Ethernet: 1448 of 1538 bytes on the wire with a 1500-byte MTU, more with jumbo
frames. Arithmetic, not a measurement."""


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A pair of replicas: seconds before the first byte is there, and bytes a second from then on."""

    alpha_s: float
    beta_bytes_per_s: float

    def stream_s(self, wire_bytes: ArrayLike) -> Floats:
        """Seconds that the bytes occupy the link: the part that can overlap with work."""
        return np.asarray(wire_bytes, np.float64) / self.beta_bytes_per_s

    def time_s(self, wire_bytes: ArrayLike) -> Floats:
        """Seconds until the last byte is there, alpha once and for all of them; nothing to send takes 0."""
        sent = np.asarray(wire_bytes, np.float64)
        return np.where(sent > 0, self.alpha_s + sent / self.beta_bytes_per_s, 0.0)


def alpha_beta(
    gbps: float,
    rtt_s: float = 0.0,
    connections: int | None = None,
    efficiency: float = EFFICIENCY,
    window_bytes: float | None = WINDOW_BYTES,
) -> AlphaBeta:
    """A link as alpha and beta.

    alpha is one round trip: the receiver asks with its handle and the first byte comes back. beta is the
    payload share of the link, or what `connections` windows per round trip allow where that is less, which
    is what a long way does to few connections; `window_bytes=None` leaves that limit out. None: as many as engines
    open on such a link (`core.values.kv`).
    """
    connections = connections_for(gbps, rtt_s) if connections is None else connections
    beta = gbps * 1e9 / 8 * efficiency
    if window_bytes is not None and rtt_s > 0:
        beta = min(beta, connections * window_bytes / rtt_s)
    return AlphaBeta(rtt_s, beta)


def link_alpha_beta(link: Link, connections: int | None = None, efficiency: float = EFFICIENCY) -> AlphaBeta:
    """A link between regions as alpha and beta."""
    return alpha_beta(link.gbps, link.rtt_s, connections, efficiency)


def crossing_bytes(model: Model, held_bytes: float, codec: Codec) -> float:
    """What a request's KV of so many bytes, its state among them, puts on the wire."""
    state = min(held_bytes, model_state_bytes(model))
    return (held_bytes - state) * codec_ratio(codec, model.kv_bits, latent=model.is_latent) + state
