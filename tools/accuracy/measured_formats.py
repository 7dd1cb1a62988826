"""Reads measurements of formats, experts and latent attention, as rows per operator.

Operators are named `gemm:fp8`, `experts:mxfp4`, `latent:decode` and so on. All are aiconfigurator's, under vLLM.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from accuracy.measured import AIC_GPUS, AIC_WARM, Measurements, joined, read_table, rows_of, valid
from potluck.perf.operators.calibration import WINDOWED
from potluck.perf.step_timer import Floats

HARNESS = "aiconfigurator"
FORMAT_GPUS = {"h100_sxm": "H100-SXM", "l40s": "L40S"}
GEMM_FORMATS = ("fp8", "fp8_block")
EXPERT_FORMATS = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "int4_wo": "int4",
    "w4a16_mxfp4": "mxfp4",
}
SKEWS = {"balanced": 0.0, "power_law_1.01": 1.01, "power_law_1.2": 1.2}
LAUNCHES = 2.0
"""Block-wise FP8 products were timed with their launch from Python, 60 to 340 µs, which serving in CUDA graphs does
not have. Rows that took less than so many such launches show nothing else."""
Table = dict[str, NDArray[np.generic]]


def read_formats(folder: Path) -> dict[str, Measurements]:
    """Every operator's rows; a missing file is an error that names it."""
    parts: dict[str, list[Measurements]] = {}
    for name, gpu in FORMAT_GPUS.items():
        for rows in (*_gemms(folder, name, gpu), *_latent(folder, name, gpu), _windowed(folder, name, gpu)):
            parts.setdefault(rows.operator, []).append(rows)
    for name, gpu in AIC_GPUS.items():
        for rows in _experts(folder, name, gpu):
            parts.setdefault(rows.operator, []).append(rows)
    return {operator: valid(joined(rows)) for operator, rows in parts.items()}


def _column(table: Table, name: str) -> Floats:
    return np.asarray(table[name], np.float64)


def _gemms(folder: Path, name: str, gpu: str) -> list[Measurements]:
    table = read_table(folder, f"aic_{name}_gemm_all_dtypes")
    kinds, m = np.asarray(table["gemm_dtype"], str), _column(table, "m")
    gemms = []
    for kind in GEMM_FORMATS:
        mask = kinds == kind
        if kind == "fp8_block":
            small = mask & (m <= 16) & (_column(table, "n") <= 256) & (_column(table, "k") <= 256)
            mask &= _column(table, "latency") > LAUNCHES * np.median(_column(table, "latency")[small])
        columns: dict[str, Floats | float] = {axis: _column(table, axis)[mask] for axis in "mnk"}
        seconds = _column(table, "latency")[mask] * 1e-3
        warm = float(gpu in AIC_WARM) / 6
        gemms.append(rows_of(f"gemm:{kind}", gpu, HARNESS, seconds, m[mask], columns, warm=warm))
    return gemms


def _experts(folder: Path, name: str, gpu: str) -> list[Measurements]:
    table = read_table(folder, f"aic_{name}_moe")
    kinds, routing = np.asarray(table["moe_dtype"], str), np.asarray(table["distribution"], str)
    skews = np.array([SKEWS[kind] for kind in routing])
    experts = []
    for kind, called in EXPERT_FORMATS.items():
        mask = kinds == kind
        if not mask.any():
            continue
        tokens = _column(table, "num_tokens")[mask]
        columns: dict[str, Floats | float] = {
            "hidden": _column(table, "hidden_size")[mask],
            "inner": _column(table, "inter_size")[mask] / _column(table, "moe_tp_size")[mask],
            "active": _column(table, "topk")[mask],
            "experts": _column(table, "num_experts")[mask],
            "ranks": _column(table, "moe_ep_size")[mask],
            "skew": skews[mask],
            "tokens": tokens,
        }
        seconds = _column(table, "latency")[mask] * 1e-3
        experts.append(rows_of(f"experts:{called}", gpu, HARNESS, seconds, tokens, columns))
    return experts


def _windowed(folder: Path, name: str, gpu: str) -> Measurements:
    """Prompts that see the last 128, 1,024 or 8,192 tokens; heads of at most 256, as of plain attention."""
    table = read_table(folder, f"aic_{name}_context_attention_perf")
    rows = {
        "requests": _column(table, "batch_size"),
        "new": _column(table, "isl"),
        "heads": _column(table, "num_heads"),
        "kv_heads": _column(table, "num_key_value_heads"),
        "head_dim": _column(table, "head_dim"),
        "window": _column(table, "window_size"),
    }
    mask = (rows["window"] > 0) & (rows["head_dim"] <= 256)
    columns: dict[str, Floats | float] = {key: column[mask] for key, column in rows.items()}
    seconds = _column(table, "latency")[mask] * 1e-3
    return rows_of(WINDOWED, gpu, HARNESS, seconds, rows["new"][mask], columns)


def _latent(folder: Path, name: str, gpu: str) -> list[Measurements]:
    """Whole modules of DeepSeek-V3 with its projections; `heads` of its 128 stand for a tensor-parallel rank."""
    latent = []
    for phase, table_name in (("prefill", "context"), ("decode", "generation")):
        table = read_table(folder, f"aic_{name}_mla_{table_name}_module")
        new, step = _column(table, "isl"), _column(table, "step")
        batch = _column(table, "batch_size")
        columns: dict[str, Floats | float] = {
            "requests": batch,
            "new": new,
            "cached": step,
            "heads": _column(table, "num_heads"),
            "kv_bits": np.where(np.asarray(table["kv_cache_dtype"], str) == "fp8", 8.0, 16.0),
            "blocks": (np.asarray(table["gemm_type"], str) == "fp8_block").astype(np.float64),
        }
        seconds = _column(table, "latency") * 1e-3
        latent.append(rows_of(f"latent:{phase}", gpu, HARNESS, seconds, batch * new, columns))
    return latent
