"""Whole steps put together from measured operators, to hold the step-time model against.

No public table has the time of mixed engine steps; LLMServingSim's comes nearest: on an RTX 4090 with
Llama-3.1-8B it measured attention over a prefill chunk beside decodes, every dense operator against tokens,
and the head and sampler against sequences. Their sum over 32 layers is a step without the engine's own
overhead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accuracy_study.measured import read_table
from potluck.perf.step_timer import Floats, StepBatch, steps

LAYERS = 32
PER_LAYER = {
    "qkv_proj": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "down_proj": 1,
    "act_fn": 1,
    "rotary_emb": 1,
    "layernorm": 2,
}


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Steps and how long they took."""

    gpu: str
    model: str
    batch: StepBatch
    seconds: Floats


def read_steps(folder: Path) -> MeasuredSteps:
    """The RTX 4090's steps, those within the measured token counts."""
    attention = read_table(folder, "llmservingsim_rtx4090_llama31_8b_attention")
    dense = read_table(folder, "llmservingsim_rtx4090_llama31_8b_dense")
    tail = read_table(folder, "llmservingsim_rtx4090_llama31_8b_per_sequence")
    chunk, cached, count, context = (
        np.asarray(attention[name], np.float64)
        for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    )
    tokens = chunk + count
    layer_s = np.asarray(attention["time_us"], np.float64) * 1e-6
    names = np.asarray(dense["layer"], str)
    for name, times in PER_LAYER.items():
        mask = names == name
        grid = np.asarray(dense["tokens"], np.float64)[mask]
        layer_s = layer_s + times * np.interp(tokens, grid, np.asarray(dense["time_us"], float)[mask]) * 1e-6
    heads = np.asarray(tail["layer"], str) == "lm_head"
    grid = np.asarray(tail["sequences"], np.float64)[heads]
    head_s = np.interp(count + (chunk > 0), grid, np.asarray(tail["time_us"], float)[heads]) * 1e-6
    inside = tokens <= 2048
    batch = steps(chunk[inside], cached[inside], count[inside], (count * context)[inside])
    return MeasuredSteps("RTX4090", "Llama-3.1-8B", batch, (LAYERS * layer_s + head_s)[inside])
