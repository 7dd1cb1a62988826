"""What the search is given: GPUs on nodes with the bandwidth between them (`core.pool`), and the work.

GPUs of one node are alike and linked alike, so a group of GPUs is how many it takes of which node.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from potluck.core.errors import InputError
from potluck.core.values.layout import Pool, PoolNode, uniform_pool
from potluck.core.values.model import Model
from potluck.core.values.types import Codec, Slo
from potluck.perf.delays.transfer import alpha_beta, crossing_bytes
from potluck.perf.operators.network import HANDOVER_FIXED_S, HANDOVER_SHARE
from potluck.perf.sizes.memory import kv_bytes
from potluck.perf.step_timer import Floats
from potluck.plan.problem import HEADROOM, ModelDemand

__all__ = ["Pool", "PoolLinks", "PoolNode", "PoolWorkload", "uniform_pool", "wires_of", "workload_of"]


@dataclass(frozen=True, slots=True)
class PoolWorkload:
    """One model's requests in their means, and the promise."""

    model: Model
    slo: Slo
    input_tokens: int
    output_tokens: int
    rate_per_s: float
    codec: Codec = "fp16"
    """In which KV crosses from prefill to decode replicas; they compute in 16 bits all the same."""
    headroom: float = HEADROOM
    """Share of its time a replica is planned to be busy."""
    cached_tokens: int = 0
    """Prompt tokens beside `input_tokens` that are not computed again, but handed over all the same."""

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
        whole = kv_bytes(self.model, float(self.input_tokens + self.cached_tokens))
        return crossing_bytes(self.model, whole, self.codec) / self.model.layer_count


def workload_of(ask: ModelDemand, codec: Codec = "fp16", headroom: float = HEADROOM) -> PoolWorkload:
    """A planner's demand in its means, which preserve the tokens that pass through.

    Where the means are beyond the model's context the prompt is cut to what it takes.
    """
    rate = ask.rate_per_s
    if not rate > 0:
        raise InputError(f"model {ask.name}: rate_per_s", "must be positive for a search")
    mean_in = sum(d.rate_per_s * d.new_tokens for d in ask.demands) / rate
    mean_out = sum(d.rate_per_s * d.output_tokens for d in ask.demands) / rate
    cached = sum(d.rate_per_s * d.cached_tokens for d in ask.demands) / rate
    most = ask.model.max_context_tokens
    output = min(max(1, round(mean_out)), most - 1)
    prompt = min(max(1, round(mean_in)), most - output)
    return PoolWorkload(ask.model, ask.slo, prompt, output, rate, codec, headroom, round(cached))


@dataclass(frozen=True, slots=True, eq=False)
class PoolLinks:
    """A pool's links as alpha-beta tables, [from node, to node]."""

    hop_alpha_s: Floats
    """Activations from a stage to the next."""
    hop_s_per_byte: Floats
    kv_alpha_s: Floats
    """KV from a replica to another."""
    kv_s_per_byte: Floats


def wires_of(pool: Pool) -> PoolLinks:
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
    return PoolLinks(hop_alpha, hop_beta, kv_alpha, kv_beta)
