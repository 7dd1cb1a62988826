"""Seconds of a layer's parts on one GPU, in the formats it is stored in: products, experts, latent attention.

Formulas are those of `kernels.py`, figures those of `calibration.py`; here both meet with the units that a format
runs on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from potluck.core.values.model import FORMAT_BITS, Format
from potluck.core.values.types import Gpu
from potluck.perf.operators.calibration import WINDOWED, ExtraOperator, GpuCurves
from potluck.perf.operators.kernels import (
    GEMM_TILES,
    SHORT_TILES,
    DecodeCurve,
    ExpertCurve,
    GemmCurve,
    decode_attention_s,
    expert_layer_s,
    gemm_s,
    prefill_attention_s,
    quantise_s,
    spread,
)
from potluck.perf.operators.layers import GemmWork, LayerWork, SoftmaxWork
from potluck.perf.step_timer import Floats


@dataclass(frozen=True, slots=True)
class MathUnits:
    """What multiplies, and what it is fed."""

    family: str
    """Whose fitted shares hold: bf16, fp8, fp8_block, nvfp4, int4 or mxfp4."""
    flops_per_s: float
    input_bytes: float
    """Of an input element as the product reads it."""
    makes_small: bool
    """Whether inputs of 16 bits are made small first, by a kernel of its own."""
    said: str = ""
    """What a person should know of it; empty when nothing."""

    @property
    def plain(self) -> bool:
        """Whether weights and inputs are of 16 bits."""
        return self.family == "bf16"


MARLIN_FROM = 8.0
"""Compute capability from which engines multiply weights of 4 bits as fast as they are read, whatever the batch."""
WITHOUT_MARLIN = 0.3
"""Of the rate in 16 bits, what the plain AWQ kernel has: on an L4 a token of Qwen2.5-7B takes it 0.9 ms."""
MADE_BIG_BYTES = 2.5
"""Of a weight, what is read and written to make it big first, as is done for long prompts where that is faster."""


def units_for(kind: Format, gpu: Gpu) -> MathUnits:
    """The units of a GPU that multiply with weights of a format."""
    plain = gpu.fp16_tflops * 1e12
    if kind in ("bf16", "fp16", "fp32"):
        text = "" if gpu.bf16 or kind == "fp16" else f"{gpu.name} has no bf16: fp16 instead"
        return MathUnits("bf16", plain, 2.0, False, text)
    if kind in ("fp8", "fp8_block"):
        if gpu.fp8_tflops:
            return MathUnits(kind, gpu.fp8_tflops * 1e12, 1.0, True)
        return MathUnits("int4", plain, 2.0, False, f"{gpu.name} has no FP8 units: weights only")
    if kind == "int8":
        if gpu.fp8_tflops:
            return MathUnits("fp8", gpu.fp8_tflops * 1e12, 1.0, True)
        if gpu.compute_capability is not None and gpu.compute_capability >= 7.5:
            return MathUnits("fp8", 2.0 * plain, 1.0, True)
        return MathUnits("int4", plain, 2.0, False, f"{gpu.name} has no INT8 units: weights only")
    if kind == "nvfp4" and gpu.fp4_tflops:
        return MathUnits("nvfp4", gpu.fp4_tflops * 1e12, 0.5, True)
    family = "mxfp4" if kind == "mxfp4" else "int4"
    if gpu.compute_capability is not None and gpu.compute_capability < MARLIN_FROM:
        return MathUnits(
            family, WITHOUT_MARLIN * plain, 2.0, False, f"{gpu.name} has no Marlin: slow in batches"
        )
    return MathUnits(family, plain, 2.0, False)


SMALL_TILES = ((64, 64), (64, 128), (128, 64), (128, 128))
"""Of products on FP8 units before Hopper."""


def gemm_time_s(gemm: GemmWork, tokens: ArrayLike, gpu: Gpu, curves: GpuCurves) -> Floats:
    """One product of a layer for so many tokens; experts are `experts_time_s`'s."""
    assert not gemm.experts
    return product_s(gemm.format, tokens, gemm.n, gemm.k, gpu, curves, weight_bytes=gemm.bits / 8)


def product_s(
    kind: Format,
    rows: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    gpu: Gpu,
    curves: GpuCurves,
    *,
    weight_bytes: float | None = None,
    warm_share: ArrayLike = 0.0,
) -> Floats:
    """A product with weights of a format, its inputs made small first where the units want that."""
    units = units_for(kind, gpu)
    width = FORMAT_BITS[kind] / 8 if weight_bytes is None else weight_bytes
    m, cols, depth = np.asarray(rows, np.float64), np.asarray(n, np.float64), np.asarray(k, np.float64)
    if not units.makes_small:
        chip = replace(curves.chip, flops_per_s=units.flops_per_s)
        tiles = GEMM_TILES if units.plain else (*SHORT_TILES, *GEMM_TILES)
        time = gemm_s(
            m, cols, depth, chip, curves.gemm, weight_bytes=width, tiles=tiles, warm_share=warm_share
        )
        if units.flops_per_s < curves.chip.flops_per_s:
            big_s = cols * depth * MADE_BIG_BYTES / (chip.bytes_per_s * curves.gemm.bandwidth)
            time = np.minimum(time, big_s + gemm_s(m, cols, depth, curves.chip, curves.gemm))
        surface = curves.gemm_residual
    else:
        extra = curves.extras.get(f"gemm:{units.family}")
        chip = replace(curves.chip, flops_per_s=units.flops_per_s)
        time = quantise_s(m, depth, curves.chip) + gemm_s(
            m,
            cols,
            depth,
            chip,
            curves.gemm if extra is None else _gemm_curve(curves.gemm, extra),
            weight_bytes=width,
            input_bytes=units.input_bytes,
            tiles=SMALL_TILES,
            splits=(1,),
            picked=gpu.compute_capability in (9.0, 10.0, 10.3),
            warm_share=warm_share,
        )
        surface = None if extra is None else extra.residual
    return time if surface is None else time * surface.factor(m, cols * depth, cols / depth)


def _gemm_curve(plain_curve: GemmCurve, extra: ExtraOperator) -> GemmCurve:
    compute, bandwidth, fixed_s, depth = extra.values
    return replace(plain_curve, compute=compute, bandwidth=bandwidth, fixed_s=fixed_s, extra_depth=depth)


def experts_time_s(
    work: LayerWork, tokens: ArrayLike, gpu: Gpu, curves: GpuCurves, *, own: bool = False
) -> Floats:
    """A layer's routed experts on the busiest rank; nothing where it has none. `own`: only its rows came to it."""
    up = next((gemm for gemm in work.gemms if gemm.experts), None)
    if up is None:
        return np.zeros_like(np.asarray(tokens, np.float64))
    return expert_time_s(
        up.format,
        tokens,
        up.k,
        up.n / 2,
        up.experts,
        up.active,
        gpu,
        curves,
        ranks=up.ranks,
        weight_bytes=up.bits / 8,
        own=own,
    )


def expert_time_s(
    kind: Format,
    tokens: ArrayLike,
    hidden: ArrayLike,
    inner: ArrayLike,
    experts: ArrayLike,
    active: ArrayLike,
    gpu: Gpu,
    curves: GpuCurves,
    *,
    ranks: ArrayLike = 1.0,
    skew: ArrayLike | None = None,
    weight_bytes: float | None = None,
    own: bool = False,
) -> Floats:
    """Experts of `inner` width, spread over `ranks` whole, or each cut (then `inner` is a rank's part)."""
    count = np.asarray(tokens, np.float64)
    units = units_for(kind, gpu)
    extra = _experts_of(units, curves)
    expert_spread = spread(count, experts, active, ranks, skew)
    chosen = expert_spread.rows / np.maximum(np.atleast_1d(count), 1e-9) if own else active
    time = expert_layer_s(
        expert_spread,
        np.atleast_1d(count),
        chosen,
        hidden,
        inner,
        replace(curves.chip, flops_per_s=units.flops_per_s),
        _expert_curve(curves.gemm, extra),
        weight_bytes=FORMAT_BITS[kind] / 8 if weight_bytes is None else weight_bytes,
        input_bytes=units.input_bytes,
        makes_small=units.makes_small,
    )
    if extra.residual is not None:
        held = np.multiply(hidden, inner) * np.divide(experts, ranks)
        time = time * extra.residual.factor(np.atleast_1d(count), held, ranks)
    return np.reshape(time, np.shape(count))


def _expert_curve(plain_curve: GemmCurve, extra: ExtraOperator) -> ExpertCurve:
    compute, bandwidth, fixed_s, stream = extra.values
    return ExpertCurve(compute, bandwidth, fixed_s, stream, plain_curve.extra_depth, plain_curve.p)


def _experts_of(units: MathUnits, curves: GpuCurves) -> ExtraOperator:
    """The figures of a format's experts; without any, those of the products."""
    extra = curves.extras.get(f"experts:{units.family}") or curves.extras.get("experts:bf16")
    if extra is not None:
        return extra
    return ExtraOperator("experts", (float(curves.gemm.compute), float(curves.gemm.bandwidth), 2e-5, 0.6))


def windowed_prefill_s(
    new: Floats,
    cached: Floats,
    shape: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike],
    window: float,
    features: tuple[ArrayLike, ArrayLike, ArrayLike],
    curves: GpuCurves,
) -> Floats:
    """Attention of prompts to the last tokens alone: the same kernels, with figures of their own where measured.

    `shape` is query heads, KV heads and the widths of keys and values; `features` are those of the plain surface.
    """
    extra = curves.extras.get(WINDOWED)
    curve, surface = curves.prefill, curves.prefill_residual
    if extra is not None:
        compute, bandwidth, fixed_s = extra.values
        curve, surface = replace(curve, compute=compute, bandwidth=bandwidth, fixed_s=fixed_s), extra.residual
        features = window_features(new.sum(axis=-1), *shape)
    time = prefill_attention_s(new, cached, *shape, curves.chip, curve, window=window)
    return time if surface is None else time * surface.factor(*features)


def window_features(
    new: ArrayLike, heads: ArrayLike, kv_heads: ArrayLike, qk_dim: ArrayLike, v_dim: ArrayLike
) -> tuple[Floats, Floats, Floats]:
    """Of windowed attention's surface: rows of queries, their width, and how many heads share a KV head."""
    width = (np.asarray(qk_dim, np.float64) + np.asarray(v_dim, np.float64)) / 2.0
    return np.multiply(new, heads), width, np.divide(heads, kv_heads)


def chunk_features(work: SoftmaxWork, new: Floats) -> tuple[Floats, ArrayLike, float]:
    """Of a launch over chunks, as its residual surface is kept: the longest, the heads of all, their width."""
    longest = new[:, 0] if new.shape[1] == 1 else new.max(axis=1)
    heads = work.heads if new.shape[1] == 1 else work.heads * np.maximum((new > 0).sum(axis=1), 1)
    return longest, heads, (work.qk_dim + work.v_dim) / 256.0


def latent_prefill_s(
    work: SoftmaxWork, new: Floats, cached: Floats, curves: GpuCurves, *, requests: ArrayLike = 1.0
) -> Floats:
    """Latent attention of prompts: keys and values of all heads are made from the latents, then as anywhere."""
    extra = curves.extras.get("latent:prefill")
    curve = curves.prefill
    if extra is not None:
        compute, bandwidth, fixed_s = extra.values
        curve = replace(curve, compute=compute, bandwidth=bandwidth, fixed_s=fixed_s)
    heads = work.heads * np.asarray(requests, np.float64)
    time = prefill_attention_s(new, cached, heads, heads, work.qk_dim, work.v_dim, curves.chip, curve)
    if extra is None or extra.residual is None:
        return time
    # As prompts of one length, that which a token finds on average: a short one beside a long one changes little.
    tokens = np.maximum(new.sum(axis=-1), 1.0)
    length = np.maximum((new**2).sum(axis=-1) / tokens, 1.0)
    return time * extra.residual.factor(length, heads * np.maximum(tokens / length, 1.0))


def latent_decode_s(work: SoftmaxWork, count: Floats, context: Floats, curves: GpuCurves) -> Floats:
    """Latent attention of decodes: all heads read one small cache, so that arithmetic shows."""
    extra = curves.extras.get("latent:decode")
    curve, compute = curves.decode, float(curves.prefill.compute)
    if extra is not None:
        compute, bandwidth, fixed_s = extra.values
        curve = DecodeCurve(bandwidth, fixed_s, curve.combine_s, curve.block_s, curve.p)
    mean = context / np.maximum(count, 1.0)
    moved, flops = context * work.bytes_per_token, context * work.decode_flops_per_token
    time = decode_attention_s(
        count, moved, mean, work.kv_heads, curves.chip, curve, flops=flops, compute=compute
    )
    if extra is None or extra.residual is None:
        return time
    return time * extra.residual.factor(context, count * work.heads)
