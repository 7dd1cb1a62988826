"""FLOPs and bytes of steps: plain sums over the layers, without any efficiency.

They tell what a step is made of (arithmetic intensity, what binds) and give the physical minimum of its time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.core.values.model import Model
from potluck.perf.operators.kernels import mean_keys
from potluck.perf.operators.layers import GemmWork, LayerWork, LinearWork, SoftmaxWork, head_gemm, layer_works
from potluck.perf.sizes.memory import Layers
from potluck.perf.step_timer import Floats, StepBatch


@dataclass(frozen=True, slots=True)
class StepSums:
    """(N,) sums over all layers of what one of `tp` GPUs does in each step."""

    flops: Floats
    weight_bytes: Floats
    kv_bytes: Floats
    """KV that is read and written."""
    activation_bytes: Floats

    @property
    def bytes(self) -> Floats:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


def step_sums(model: Model, batch: StepBatch, tp: int = 1, layers: Layers = None) -> StepSums:
    """FLOPs and bytes of steps on one of `tp` ranks, for all layers or some; the head counts with all."""
    total = [np.zeros(len(batch)) for _ in range(4)]
    for work, count in layer_works(model, tp, layers):
        for sums, part in zip(total, _layer_sums(work, batch), strict=True):
            sums += count * part
    if layers is None:
        flops, moved = _gemm_sums(head_gemm(model, tp), batch.sequences)
        total[0] += flops
        total[1] += moved
    return StepSums(*total)


def _layer_sums(work: LayerWork, batch: StepBatch) -> tuple[Floats, Floats, Floats, Floats]:
    tokens = batch.tokens
    flops, weights = np.zeros(len(batch)), np.zeros(len(batch))
    for gemm in work.gemms:
        gemm_flops, gemm_bytes = _gemm_sums(gemm, tokens)
        flops += gemm_flops
        weights += gemm_bytes
    if isinstance(work.attention, LinearWork):
        requests = batch.sequences
        attention_flops = tokens * work.attention.flops_per_token
        moved = 2.0 * requests * work.attention.state_bytes
    else:
        attention_flops, moved = _softmax_sums(work.attention, batch)
    return flops + attention_flops, weights, moved, tokens * work.stream_bytes_per_token


def _gemm_sums(gemm: GemmWork, tokens: Floats) -> tuple[Floats, Floats]:
    rows, used = gemm.spread(tokens)
    busy = tokens > 0
    flops = 2.0 * rows * used * gemm.n * gemm.k
    moved = np.where(busy, used * gemm.n * gemm.k * gemm.bits / 8, 0.0)
    return flops, moved


def _softmax_sums(work: SoftmaxWork, batch: StepBatch) -> tuple[Floats, Floats]:
    new, cached = batch.chunk_new, batch.chunk_cached
    pairs = (new * mean_keys(new, cached, work.window)).sum(axis=1)
    context = batch.decode_context
    reach = np.where(new > 0, cached + new, 0.0)
    if work.window is not None:
        context = np.minimum(context, batch.decodes * work.window)
        reach = np.minimum(reach, work.window + new)
    flops = 2.0 * work.heads * (work.qk_dim + work.v_dim) * pairs + work.decode_flops_per_token * context
    moved = work.bytes_per_token * (context + reach.sum(axis=1))
    return flops, moved
