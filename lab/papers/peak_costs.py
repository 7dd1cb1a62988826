"""Layers timed by data sheets alone, as the cost model that THUNDERSERVE's own search uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.core.values.model import Model
from potluck.core.values.plan import Confidence
from potluck.core.values.types import NodeType
from potluck.perf.memory import head_bytes
from potluck.perf.operators.layers import step_sums
from potluck.perf.operators.network import all_reduce_s
from potluck.perf.step_timer import Floats, StepBatch
from potluck.perf.timers.engine_host import DEFAULT_HOST
from potluck.perf.timers.roofline import check_tp


@dataclass(frozen=True, slots=True)
class PeakCosts:
    """Data-sheet rates times two shares, as HexGen's cost model that THUNDERSERVE uses: nothing fitted.

    A layer takes max(FLOPs / (share F), bytes / (share M)) plus two all-reduces of its activations.
    """

    compute_share: float = 0.7
    bandwidth_share: float = 0.8

    def parts(self, model: Model, node: NodeType, tp: int, batch: StepBatch) -> tuple[Floats, Floats]:
        check_tp(model, node, tp)
        sums = step_sums(model, batch, tp, range(model.layer_count))
        flops_per_s = node.gpu.fp16_tflops * 1e12 * self.compute_share
        bytes_per_s = node.gpu.bandwidth_gb_per_s * 1e9 * self.bandwidth_share
        layers_s = np.maximum(sums.flops / flops_per_s, sums.bytes / bytes_per_s)
        reduced = all_reduce_s(batch.tokens * model.hidden * 2.0, tp, node.interconnect, ())
        head = np.where(
            batch.tokens > 0, head_bytes(model) / tp / bytes_per_s + DEFAULT_HOST.step_s(batch), 0.0
        )
        return layers_s / model.layer_count + 2.0 * reduced, head

    def confidence(self, model: Model, node: NodeType, tp: int) -> Confidence:
        return "assumed"
