"""Reads measurements of formats, experts and latent attention, as rows per operator.

Operators are named `gemm:fp8`, `experts:mxfp4`, `latent:decode` and so on. All are aiconfigurator's, under vLLM.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from accuracy_study.measured import AIC_GPUS, AIC_WARM, Measurements, joined, read_table, rows_of, valid
from potluck.perf.operators.calibration import WINDOWED
from potluck.perf.step_timer import Floats

HARNESS = "aiconfigurator"
FORMAT_GPUS = {"b200_sxm": "B200", "h100_sxm": "H100-SXM", "l40s": "L40S"}
GEMM_FORMATS = ("fp8", "fp8_block", "nvfp4")
EXPERT_FORMATS = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "int4_wo": "int4",
    "w4a16_mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}
TWO_MATRICES = {(2688.0, 1856.0), (2048.0, 5120.0)}
"""(hidden, inner) of experts without a gate: other work than the formula's three matrices."""
DOUBTED = {("H100-SXM", "fp8")}
"""Experts per tensor on H100 were timed in a kernel that takes six times as long as reading their weights, twice as
long as 16 bits, where the same kernel in blocks, and the same format elsewhere, take half of that."""
HALF_READ = ("fp8_block", "nvfp4")
"""On B200 these rows of DeepSeek's 256 experts would need more bandwidth than there is: routed to half of them."""
SKEWS = {"balanced": 0.0, "power_law_1.01": 1.01, "power_law_1.2": 1.2}
LAUNCHES = 3.5
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
        if not mask.any():
            continue
        if kind == "fp8" and gpu == "B200":
            mask &= m > 1  # one row takes 1.7 times as long as two
        if kind == "fp8_block":
            small = mask & (m <= 16) & (_column(table, "n") <= 256) & (_column(table, "k") <= 256)
            mask &= _column(table, "latency") > LAUNCHES * np.median(_column(table, "latency")[small])
        columns: dict[str, Floats | float] = {axis: _column(table, axis)[mask] for axis in "mnk"}
        seconds = _column(table, "latency")[mask] * 1e-3
        # Six copies of the weights take turns, but of nvfp4 there is one.
        warm = float(gpu in AIC_WARM) / (1 if kind == "nvfp4" else 6)
        gemms.append(rows_of(f"gemm:{kind}", gpu, HARNESS, seconds, m[mask], columns, warm=warm))
    return [*gemms, *_graphed(folder, name, gpu)]


def _graphed(folder: Path, name: str, gpu: str) -> list[Measurements]:
    """Block-wise products that the other engines timed in graphs, where somebody did: small ones show there."""
    if not (folder / f"aic_{name}_gemm_fp8_block_trtllm_sglang.parquet").is_file():
        return []
    table = read_table(folder, f"aic_{name}_gemm_fp8_block_trtllm_sglang")
    columns: dict[str, Floats | float] = {axis: _column(table, axis) for axis in "mnk"}
    seconds = _column(table, "latency") * 1e-3
    return [rows_of("gemm:fp8_block", gpu, HARNESS, seconds, _column(table, "m"), columns, warm=1 / 6)]


def _experts(folder: Path, name: str, gpu: str) -> list[Measurements]:
    table = read_table(folder, f"aic_{name}_moe")
    kinds, routing = np.asarray(table["moe_dtype"], str), np.asarray(table["distribution"], str)
    skews = np.array([SKEWS[kind] for kind in routing])
    experts = []
    for kind, called in EXPERT_FORMATS.items():
        mask = (kinds == kind) & ~_unlike(table, gpu, kind)
        if not mask.any() or (gpu, called) in DOUBTED:
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


def _unlike(table: Table, gpu: str, kind: str) -> NDArray[np.bool_]:
    """Rows that are not what serving runs: other layers, a preview of an engine, a router that leaves half out."""
    shapes = list(zip(_column(table, "hidden_size"), _column(table, "inter_size"), strict=True))
    unlike = np.array([shape in TWO_MATRICES for shape in shapes])
    unlike |= np.char.find(np.asarray(table["version"], str), "dev") >= 0
    if gpu == "B200" and kind in HALF_READ:
        unlike |= (_column(table, "num_experts") == 256) & (_column(table, "hidden_size") == 7168)
    return unlike


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
        batch, kinds = _column(table, "batch_size"), np.asarray(table["gemm_type"], str)
        columns: dict[str, Floats | float] = {
            "requests": batch,
            "new": new,
            "cached": step,
            "heads": _column(table, "num_heads"),
            "kv_bits": np.where(np.asarray(table["kv_cache_dtype"], str) == "fp8", 8.0, 16.0),
            "blocks": (kinds == "fp8_block").astype(np.float64),
        }
        seconds = _column(table, "latency") * 1e-3
        rows = rows_of(f"latent:{phase}", gpu, HARNESS, seconds, batch * new, columns)
        # Attention itself in 8 bits, and projections in 4, are other kernels.
        latent.append(rows.where((kinds != "nvfp4") & (np.asarray(table["mla_dtype"], str) == "bfloat16")))
    return latent
