"""The smaller fits: power limits, whole-layer times, and whole batches on MI300X."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from potluck.core.errors import InputError
from potluck.core.values.types import Gpu
from potluck.perf.operators.calibration import Calibration, GpuScales, PowerLimit, curves_for, family_of
from potluck.perf.operators.kernels import gemm_s
from potluck.perf.step_timer import Floats

HELIX_GPUS = {"l4": "L4", "t4": "T4", "v100": "V100-16", "a100": "A100-40"}
LLAMA2_70B_GEMMS = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
"""(n, k) of one layer: fused qkv, output, fused gate and up, down."""


def fit_power(shares: dict[str, float], gpus: dict[str, Gpu]) -> PowerLimit:
    """Energy per FLOP of each family and the ceiling of the kernels, from measured compute shares."""
    from scipy.optimize import least_squares

    names = [gpu for gpu in sorted(shares) if gpus[gpu].tdp_w is not None]
    families = sorted({family_of(gpus[gpu]) for gpu in names})
    target = np.log([shares[gpu] for gpu in names])

    def power(x: Floats) -> PowerLimit:
        energies = {family: float(np.exp(value)) for family, value in zip(families, x[1:], strict=True)}
        return PowerLimit(float(np.exp(x[0])), energies)

    def residuals(x: Floats) -> Floats:
        guess = power(x)
        fit = np.log([guess.share(gpus[gpu]) for gpu in names]) - target
        # A weak pull keeps a family with one GPU from taking an extreme energy.
        return np.concatenate([fit, 0.05 * (x[1:] - np.log(1.2)), [0.1 * (x[0] - np.log(0.95))]])

    start = np.log([0.95] + [1.2] * len(families))
    result = power(least_squares(residuals, start, loss="soft_l1", f_scale=0.1).x)
    energies = {family: round(value, 4) for family, value in result.watts_per_tflops.items()}
    return PowerLimit(round(result.ceiling, 4), energies)


def layer_scales(folder: Path, gpus: dict[str, Gpu], calibration: Calibration) -> list[GpuScales]:
    """Coarse scales from Helix's times of one Llama-2-70B layer: prompts give compute, decodes bandwidth.

    The table is rounded and carries about 10 % noise, so two figures a GPU are all it can give.
    """
    path = folder / "helix_llama2_70b_bs2time.csv"
    if not path.is_file():
        raise InputError("data", f"{path.name} is not in the folder of measurements")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["node"] in HELIX_GPUS and float(row["c1"]) > 0]
    gpu_scale = []
    for node, name in HELIX_GPUS.items():
        gpu = gpus[name]
        if not calibration.gpus:
            break
        curves = curves_for(gpu, calibration)
        prompt = [
            (float(r["c0"]), float(r["c1"]) * 1e-3)
            for r in rows
            if (r["node"], r["phase"]) == (node, "prompt")
        ]
        decode = [
            (float(r["c0"]), float(r["c1"]) * 1e-3)
            for r in rows
            if (r["node"], r["phase"]) == (node, "decode")
        ]
        gemm = curves.gemm
        for _ in range(6):  # the two figures hardly touch each other: a few rounds settle both
            for field, points in (("compute", prompt), ("bandwidth", [d for d in decode if d[0] <= 32])):
                tokens = np.array([p[0] for p in points])
                seconds = np.array([p[1] for p in points])
                layer = sum(gemm_s(tokens, n, k, curves.chip, gemm) for n, k in LLAMA2_70B_GEMMS)
                factor = float(np.median(layer / seconds))
                gemm = (
                    replace(gemm, compute=gemm.compute * factor)
                    if field == "compute"
                    else replace(gemm, bandwidth=gemm.bandwidth * factor)
                )
        scales = (float(gemm.compute), float(gemm.bandwidth), float(gemm.fixed_s))
        gpu_scale.append(GpuScales(name, tuple(float(f"{v:.4g}") for v in scales), coarse=True))  # type: ignore[arg-type]
    return gpu_scale


BATCH_GPU, BATCH_NODE = "MI300X", "8xMI300X"
BATCH_MODELS = {
    "Llama-2-7b-hf": "Llama-2-7B",
    "Meta-Llama-3-8B": "Llama-3-8B",
    "Llama-2-70b-hf": "Llama-2-70B",
}
BATCH_MODELS |= {"Meta-Llama-3-70B": "Llama-3-70B", "Qwen2-7B": "Qwen2-7B"}
BATCH_MOST, BATCH_LEAST_TOKENS, BATCH_ROWS = 16, 256, 48
"""Larger batches grew in proportion, as on no other GPU; the shortest were timed while still warming up."""
BATCH_START, BATCH_PULL = (0.4, 0.6, 1e-5), (0.3, 1.0, 0.03)
BatchRow = tuple[str, int, int, int, float]
"""Model, degree, tokens of a prompt and as many of its answer, prompts, seconds."""


def batch_scales(folder: Path, calibration: Calibration, spec: Gpu) -> GpuScales:
    """Coarse scales of an MI300X from Argonne's whole batches with vLLM 0.6.1: nobody measured operators of it."""
    from scipy.optimize import least_squares

    every = [row for row in _batches(folder) if row[3] <= BATCH_MOST]
    rows, start = every[:: max(1, len(every) // BATCH_ROWS)], np.log(BATCH_START)

    def scales(logs: Floats) -> GpuScales:
        values = tuple(float(f"{v:.4g}") for v in np.exp(logs))
        return GpuScales(BATCH_GPU, values, coarse=True)  # type: ignore[arg-type]

    def misses(logs: Floats) -> Floats:
        gpus, specs = (*calibration.gpus, scales(logs)), (*calibration.specs, spec)
        known = replace(calibration, gpus=gpus, specs=specs)
        return np.concatenate([_batch_misses(rows, known), BATCH_PULL * (logs - start)])

    return scales(least_squares(misses, start, loss="soft_l1", f_scale=0.15, diff_step=1e-2, max_nfev=12).x)


def batch_errors(folder: Path, calibration: Calibration) -> Floats:
    """Measured over predicted seconds of batches of any size, less 1."""
    return np.expm1(-_batch_misses(_batches(folder)[::3], calibration))


def _batches(folder: Path) -> list[BatchRow]:
    from accuracy_study.measured import read_table

    table = read_table(folder, "argonne_mi300x_static")
    columns = (
        "Hardware",
        "Framework",
        "Model",
        "Num of Hardware",
        "Input Output Length",
        "Batch Size",
        "Latency",
    )
    return [
        (BATCH_MODELS[name.split("/")[1]], int(tp), int(tokens), int(batch), float(seconds))
        for chip, engine, name, tp, tokens, batch, seconds in zip(*(table[c] for c in columns), strict=True)
        if BATCH_GPU in str(chip) and engine == "vLLM" and name.split("/")[1] in BATCH_MODELS
        if tokens >= BATCH_LEAST_TOKENS
    ]


def _batch_misses(rows: list[BatchRow], calibration: Calibration) -> Floats:
    """Logarithms of predicted over measured seconds."""
    from potluck.catalog import models, nodes
    from potluck.perf.phases import decode_step_s, prompts_s
    from potluck.perf.timers.roofline import roofline

    off = []
    for name, tp, tokens, batch, seconds in rows:
        timer = roofline(models.model(name), nodes.node_type(BATCH_NODE), tp, calibration=calibration)
        context = tokens + np.linspace(1, tokens, 4)
        answers_s = float(decode_step_s(timer, batch, context).mean()) * (tokens - 1)
        off.append(np.log((float(prompts_s(timer, [batch], tokens)[0]) + answers_s) / seconds))
    return np.asarray(off, np.float64)
