"""Fits formats, experts and latent attention: a few figures for each GPU and operator, and what is left over.

Each (GPU, operator) is fitted alone, on top of that GPU's 16-bit figures: the formulas' shapes are shared already.
How they carry over to a GPU without them is `perf.operators.calibration`'s to say, as for everything else.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from accuracy_study.measured import Measurements
from accuracy_study.residual_fit import fit_residual
from potluck.core.values.model import DenseFfn, LatentAttention, Layer, Model
from potluck.core.values.types import Gpu
from potluck.perf.operators.calibration import WINDOWED, Calibration, ExtraOperator, GpuCurves, curves_for
from potluck.perf.operators.layer_seconds import (
    expert_time_s,
    gemm_time_s,
    latent_decode_s,
    latent_prefill_s,
    product_s,
    window_features,
    windowed_prefill_s,
)
from potluck.perf.operators.layers import latent_gemms, latent_work
from potluck.perf.step_timer import Floats, once

SAMPLE = 700
SMALL_S = 5e-5
"""Below it a product shows what starting one takes."""
SURFACE_SAMPLE = 8000
START: dict[str, tuple[float, ...]] = {
    "gemm": (0.75, 0.8, 3e-6, 400.0),
    "experts": (0.5, 0.8, 2e-5, 0.6),
    "latent": (0.6, 0.8, 4e-5),
    "windowed": (0.6, 0.8, 6e-6),
}
ATTENTION = LatentAttention(128, 512, 128, 64, 128, 1536)
DEEPSEEK = Model("DeepSeek-V3", 7168, 129280, (Layer(ATTENTION, DenseFfn(18432)),), 163840)
"""Whose attention module was measured."""


def with_extras(calibration: Calibration, rows: dict[str, Measurements], *, surfaces: bool) -> Calibration:
    """The calibration with every format, expert and latent operator that the rows have of its GPUs."""
    entries = []
    calibration = replace(calibration, gpus=tuple(replace(s, extras=()) for s in calibration.gpus))
    for scales in calibration.gpus:
        result = []
        for every in rows.values():
            part = every.where(every.gpu == scales.gpu)
            if len(part):
                result.append(_fit(part, calibration.spec(scales.gpu), calibration, surfaces))
                calibration = _with_extra(calibration, scales.gpu, result[-1])
        entries.append(replace(scales, extras=tuple(result)))
    return replace(calibration, gpus=tuple(entries))


def _with_extra(calibration: Calibration, gpu: str, extra: ExtraOperator) -> Calibration:
    gpus = tuple(replace(s, extras=(*s.extras, extra)) if s.gpu == gpu else s for s in calibration.gpus)
    return replace(calibration, gpus=gpus)


def _fit(rows: Measurements, gpu: Gpu, calibration: Calibration, surface: bool) -> ExtraOperator:
    from scipy.optimize import least_squares

    part, operator = _some(rows, SAMPLE), rows.operator
    curves = curves_for(gpu, calibration)
    start, pull = _start(part, curves)
    target = np.log(part.seconds)

    def residuals(x: Floats) -> Floats:
        extra = ExtraOperator(operator, tuple(np.exp(x)))
        # The pull to the start decides only what the rows do not show.
        return np.concatenate([np.log(predict(part, gpu, curves, extra)) - target, pull * (x - start)])

    result = least_squares(residuals, start, loss="soft_l1", f_scale=0.15, x_scale=0.3, max_nfev=25)
    extra = ExtraOperator(operator, tuple(float(f"{v:.4g}") for v in np.exp(result.x)))
    if not surface:
        return extra
    rows = _some(rows, SURFACE_SAMPLE)
    if operator.startswith("latent"):
        # The surface is of attention alone, which a step is asked for apart from its projections.
        around, attention = _latent(rows, gpu, replace(curves, extras={**curves.extras, operator: extra}))
        ratio = np.log(np.clip((rows.seconds - around) / attention, 0.25, 4.0))
    else:
        ratio = np.log(rows.seconds / predict(rows, gpu, curves, extra))
    knots = (14, 10) if operator.startswith("gemm") else (12, 9)
    return replace(extra, residual=fit_residual(*features(rows), ratio, knots=knots))


def _some(rows: Measurements, count: int) -> Measurements:
    """So many of the rows, by chance but always the same."""
    if len(rows) <= count:
        return rows
    mask = np.zeros(len(rows), bool)
    mask[np.random.default_rng(1).choice(len(rows), count, replace=False)] = True
    return rows.where(mask)


def _start(rows: Measurements, curves: GpuCurves) -> tuple[Floats, Floats]:
    """Where a fit begins, and how hard each figure is held there.

    Where all rows of block-wise FP8 products are large, what small ones show is taken from those per tensor.
    """
    operator = rows.operator
    values = START[operator.split(":")[0]]
    whole = curves.extras.get("gemm:fp8")
    if operator == "gemm:fp8_block" and whole is not None and rows.seconds.min() > SMALL_S:
        return np.log(whole.values), np.array([1.0, 100.0, 100.0, 1.0])
    return np.log(values), np.ones(len(values))


def predict(rows: Measurements, gpu: Gpu, curves: GpuCurves, extra: ExtraOperator | None = None) -> Floats:
    """Seconds of one GPU's rows, with the operator's own figures or those that the curves hold."""
    held = curves if extra is None else replace(curves, extras={**curves.extras, rows.operator: extra})
    kind = rows.operator.split(":")[0]
    if kind == "gemm":
        return _gemms(rows, gpu, held)
    if kind == "experts":
        return _experts(rows, gpu, held)
    if kind == "windowed":
        return _windowed(rows, held)
    around, attention = _latent(rows, gpu, held)
    return around + attention


def features(rows: Measurements) -> tuple[Floats, Floats, Floats]:
    """The three features of an operator's residual surface; `perf.timers.roofline` uses the same."""
    c = rows.columns
    if rows.operator.startswith("gemm"):
        return c["m"], c["n"] * c["k"], c["n"] / c["k"]
    if rows.operator.startswith("experts"):
        return c["tokens"], c["hidden"] * c["inner"] * c["experts"] / c["ranks"], c["ranks"]
    if rows.operator == WINDOWED:
        many, dim = c["requests"], c["head_dim"]
        return window_features(c["new"], many * c["heads"], many * c["kv_heads"], dim, dim)
    if rows.operator == "latent:prefill":
        return c["new"], c["requests"] * c["heads"], np.ones(len(rows))
    return c["requests"] * (c["cached"] + 1.0), c["requests"] * c["heads"], np.ones(len(rows))


def _gemms(rows: Measurements, gpu: Gpu, curves: GpuCurves) -> Floats:
    c, kind = rows.columns, rows.operator.split(":")[1]
    return product_s(kind, c["m"], c["n"], c["k"], gpu, curves, warm_share=rows.warm)  # type: ignore[arg-type]


def _experts(rows: Measurements, gpu: Gpu, curves: GpuCurves) -> Floats:
    c, kind = rows.columns, rows.operator.split(":")[1]
    return expert_time_s(
        kind,  # type: ignore[arg-type]
        c["tokens"],
        c["hidden"],
        c["inner"],
        c["experts"],
        c["active"],
        gpu,
        curves,
        ranks=c["ranks"],
        skew=c["skew"],
    )


def _windowed(rows: Measurements, curves: GpuCurves) -> Floats:
    c, seconds = rows.columns, np.empty(len(rows))
    for window in once(c["window"]):
        mask = c["window"] == window
        part = {name: column[mask] for name, column in c.items()}
        # A batch of equal prompts is one launch over as many heads more.
        many, dim, new = part["requests"], part["head_dim"], part["new"]
        shape = (part["heads"] * many, part["kv_heads"] * many, dim, dim)
        kept = (new, part["heads"] * many, dim / 128.0)
        alone = np.zeros((len(new), 1))
        seconds[mask] = windowed_prefill_s(new[:, None], alone, shape, float(window), kept, curves)
    return seconds


def _latent(rows: Measurements, gpu: Gpu, curves: GpuCurves) -> tuple[Floats, Floats]:
    """Seconds of a module's projections, and of attention with all else that lies around it."""
    c = rows.columns
    around, attention = np.empty(len(rows)), np.empty(len(rows))
    for heads, kv_bits, blocks in {*zip(c["heads"], c["kv_bits"], c["blocks"], strict=True)}:
        mask = (c["heads"] == heads) & (c["kv_bits"] == kv_bits) & (c["blocks"] == blocks)
        model = replace(DEEPSEEK, kv_bits=float(kv_bits))
        if blocks:
            model = replace(model, weight_bits=8.0, weight_format="fp8_block")
        tp = int(ATTENTION.heads // heads)
        part = {name: column[mask] for name, column in c.items()}
        tokens = part["requests"] * part["new"]
        gemms = latent_gemms(ATTENTION, model, tp)
        around[mask] = np.sum([gemm_time_s(gemm, tokens, gpu, curves) for gemm in gemms], axis=0)
        work = latent_work(ATTENTION, model, tp)
        if rows.operator == "latent:prefill":
            chunks = part["new"][:, None], part["cached"][:, None]
            attention[mask] = latent_prefill_s(work, *chunks, curves, requests=part["requests"])
        else:
            context = part["requests"] * (part["cached"] + 1.0)
            attention[mask] = latent_decode_s(work, part["requests"], context, curves)
    return around, attention
