"""CRONUS's predictors on CAUCHY's closed form, and on steps put together from measured operators."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls as scipy_nnls

from potluck.catalog import models, nodes
from potluck.core.errors import InputError
from potluck.core.values.types import Gpu
from potluck.perf.linear_fit import (
    ChunkedIterationPredictor,
    PartialPrefillPredictor,
    linear_fit,
    mean_ape,
    nnls,
    prompt_curve,
    r2,
)
from potluck.perf.step_timer import steps
from potluck.perf.timers.roofline import roofline


@dataclass(frozen=True)
class ClosedForm:
    """CAUCHY's closed form as steps: FLOPs of chunks (equation 3), bytes of decodes (8), of Llama-3-8B."""

    gpu: Gpu
    confidence = "assumed"

    def step_s(self, batch):
        new, cached = batch.chunk_new, batch.chunk_cached
        c1, c2 = 4.0 * 32 * 4096, 8.0 * 32 * 4096**2 + 6.0 * 32 * 4096 * 14336
        c3 = 2.0 * (2 * 128256 * 4096 + (4 * 4096**2 + 3 * 4096 * 14336 + 2 * 4096) * 32)
        flops = (c1 * new * (new + 2.0 * cached) + c2 * new).sum(axis=1)
        read = np.where(batch.decodes > 0, c3 + 131072.0 * batch.decode_context, 0.0)
        return flops / (self.gpu.fp16_tflops * 1e12) + read / (self.gpu.bandwidth_gb_per_s * 1e9)


A30 = ClosedForm(Gpu("A30", 165, 24, 933))


A100 = ClosedForm(Gpu("A100", 312, 80, 2039))


DATA = Path(os.environ.get("POTLUCK_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))


needs_data = pytest.mark.skipif(
    not (DATA / "measured").is_dir(), reason="measured data is not here; point POTLUCK_DATA at it"
)


LENGTHS = np.arange(128.0, 8193, 128)


def line_of(timer, lengths=LENGTHS, weights=None):
    return PartialPrefillPredictor.fit(
        np.column_stack([lengths, timer.step_s(steps(chunk_new=lengths))]), weights
    )


def test_partial_prefill_of_the_closed_form_is_nearly_linear():
    """Paper, measured on an A30: R^2 0.993, mean error 7.4 %. The closed form bends more, having no floor."""
    predictor = line_of(A30)
    assert predictor.r2 == pytest.approx(0.9969, abs=5e-4)
    assert predictor.mape == pytest.approx(0.121, abs=2e-3)
    short = line_of(A30, np.arange(128.0, 2049, 128))
    assert short.r2 > 0.999
    assert short.mape < 0.03
    assert line_of(A30, weights="relative").mape < predictor.mape


def test_chunked_iterations_of_the_closed_form_are_nearly_planar():
    """Paper, measured on an A100 at 512 tokens: R^2 0.990, mean error 0.8 %.

    What is left is that more decodes leave a smaller chunk; with one number of decodes nothing is.
    """

    def plane_of(*decodes):
        grid = np.meshgrid(np.arange(0.0, 8192, 512), decodes, (256.0, 1024.0, 4096.0))
        context, count, tokens = (axis.ravel() for axis in grid)
        seconds = A100.step_s(steps(512 - count, context, count, count * tokens))
        return ChunkedIterationPredictor.fit(np.column_stack([context, count * tokens, seconds]))

    predictor = plane_of(8.0, 16.0, 32.0, 64.0)
    assert predictor.r2 == pytest.approx(0.955, abs=2e-3)
    assert predictor.mape == pytest.approx(0.023, abs=1e-3)
    same = plane_of(16.0)
    assert same.mape < 1e-9
    assert same.k_ctxd == pytest.approx(131072.0 / 2039e9)


def test_predictor_fits_recover_a_line_and_a_plane():
    lengths = np.arange(1, 20) * 100.0
    line = PartialPrefillPredictor.fit(np.column_stack([lengths, 2e-4 * lengths + 0.01]))
    assert (line.k_p, line.b_p) == pytest.approx((2e-4, 0.01))
    contexts = np.array(
        [(p, d, 1e-6 * p + 2e-7 * d + 0.04) for p in (0, 512, 2048) for d in (0, 9000, 30000)]
    )
    plane = ChunkedIterationPredictor.fit(contexts)
    assert (plane.k_ctxp, plane.k_ctxd, plane.b_c) == pytest.approx((1e-6, 2e-7, 0.04))
    assert plane.r2 == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: PartialPrefillPredictor.fit([[1.0, 2.0, 3.0]]), "rows of tokens and seconds"),
        (lambda: PartialPrefillPredictor.fit([[1.0, 0.1], [2.0, 0.2]]), "too few"),
        (lambda: PartialPrefillPredictor.fit([[1.0, 0.1], [2.0, -0.2], [3.0, 0.2]]), "not positive"),
        (lambda: ChunkedIterationPredictor.fit([[1.0, 2.0]]), "rows of prefill context"),
    ],
)
def test_predictor_fits_refuse_invalid_points(call, problem):
    with pytest.raises(InputError, match=problem):
        call()


@needs_data
def test_partial_prefill_fit_on_a_measured_a30_is_as_good_as_published():
    """Qwen2-7B's operators on an A30, added up to whole prefills: as good as the paper's 0.993, 7.4 %."""
    import pandas as pd

    attention = pd.read_parquet(DATA / "measured" / "vidurfork_a30_qwen2_7b_attention.parquet")
    dense = pd.read_parquet(DATA / "measured" / "vidurfork_a30_qwen2_7b_mlp.parquet")
    dense = dense.groupby("num_tokens").median(numeric_only=True)
    dense.columns = [name.removeprefix("time_stats.").removesuffix(".median") for name in dense.columns]
    # A third of the qkv projections read 2 us whatever their size: the timer missed the kernel.
    dense.loc[dense["attn_pre_proj"] < 0.03, "attn_pre_proj"] = np.nan
    prefill = attention[attention.is_prefill & (attention.kv_cache_size == 0)]
    prefill = prefill.groupby("prefill_chunk_size").median(numeric_only=True)
    tokens = prefill.index.to_numpy(float)
    layer_ms = (
        prefill["time_stats.attn_prefill.median"] + prefill["time_stats.attn_kv_cache_save.median"]
    ).to_numpy()
    parts = ["input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm"]
    for part in [*parts, "mlp_up_proj", "mlp_act", "mlp_down_proj", "add", "add"]:
        curve = dense[part].dropna()
        layer_ms = layer_ms + np.interp(tokens, curve.index.to_numpy(float), curve.to_numpy())
    points = np.column_stack([tokens, 28 * layer_ms * 1e-3])
    short = PartialPrefillPredictor.fit(points[tokens <= 2048])
    assert short.r2 == pytest.approx(0.994, abs=0.001)
    assert short.mape == pytest.approx(0.075, abs=0.002)
    whole = PartialPrefillPredictor.fit(points)
    assert whole.r2 == pytest.approx(0.9975, abs=0.001)
    assert whole.mape == pytest.approx(0.084, abs=0.002)


@needs_data
def test_chunked_iteration_fit_on_a_measured_rtx_4090_has_the_documented_error():
    """Llama-3.1-8B, 512 new tokens beside decodes. The paper's A100 gave R^2 0.990 and 0.8 %.

    Here a plane explains less (R^2 0.89, 2.8 %): in the same kernel many short decodes and few long ones of
    the same total context take different times, and that total is all the predictor sees.
    """
    import pandas as pd

    name = "llmservingsim_rtx4090_llama31_8b_{}.parquet"
    attention, dense, heads = (
        pd.read_parquet(DATA / "measured" / name.format(part))
        for part in ("attention", "dense", "per_sequence")
    )
    layers = dict.fromkeys(("act_fn", "down_proj", "gate_up_proj", "o_proj", "qkv_proj", "rotary_emb"), 32)
    layers |= {"layernorm": 64, "final_layernorm": 1, "embedding": 1}
    at_budget = dense[dense.tokens == 512].set_index("layer").time_us
    dense_us = sum(count * at_budget[layer] for layer, count in layers.items())
    total = attention.kv_decode * attention.n_decode
    # What fits beside 16 GB of weights in 24 GB: about 42,000 tokens of KV.
    held = attention.kv_prefill + total <= 42_000
    rows = (attention.prefill_chunk == 512) & (attention.n_decode > 0) & (attention.kv_prefill <= 8192) & held
    some = attention[rows]
    head = heads[heads.layer == "lm_head"].sort_values("sequences")
    head_us = np.interp(some.n_decode + 1, head.sequences, head.time_us)
    seconds = (32 * some.time_us + dense_us + head_us) * 1e-6
    predictor = ChunkedIterationPredictor.fit(np.column_stack([some.kv_prefill, total[rows], seconds]))
    assert len(some) > 700
    assert predictor.r2 == pytest.approx(0.893, abs=0.005)
    assert predictor.mape == pytest.approx(0.028, abs=0.002)


@pytest.mark.parametrize("longest", [600, 2048, 8192, 32768])
@pytest.mark.parametrize("node", ["1xA10", "1xA100", "1xL4"])
def test_prefill_line_for_used_lengths_is_near_the_timer_and_nonnegative(node: str, longest: int) -> None:
    timer = roofline(models.model("Llama-3.1-8B"), nodes.node_type(node), 1)
    line = PartialPrefillPredictor.in_use(timer, longest)
    assert line.b_p >= 0
    assert line.k_p > 0
    lengths = np.linspace(longest / 16, longest, 40)
    off = (line.k_p * lengths + line.b_p) / timer.step_s(steps(chunk_new=lengths)) - 1
    assert np.abs(off).mean() < 0.15  # a line through what is nearly a parabola at 32,768
    assert np.abs(off).max() < 0.35


def test_prefill_line_for_used_lengths_keeps_the_cost_of_short_prompts() -> None:
    """The plain fit puts 128 tokens on an A10 at 0.3 ms, where the timer says 46."""
    timer = roofline(models.model("Llama-3.1-8B"), nodes.node_type("1xA10"), 1)
    real_s = float(timer.step_s(steps(chunk_new=128.0))[0])
    plain, long, short = line_of(timer), *(PartialPrefillPredictor.in_use(timer, n) for n in (8192, 2048))
    assert plain.k_p * 128 + plain.b_p < 0.1 * real_s
    assert long.k_p * 128 + long.b_p > 0.4 * real_s
    assert short.k_p * 128 + short.b_p > 0.6 * real_s


@pytest.mark.parametrize("budget", [2, 40, 512, 2048])
def test_iteration_plane_for_used_lengths_holds_for_any_token_budget(budget: int) -> None:
    timer = roofline(models.model("Llama-3.1-8B"), nodes.node_type("1xA100"), 1)
    plane = ChunkedIterationPredictor.in_use(timer, budget, 4096)
    assert min(plane.k_ctxp, plane.k_ctxd, plane.b_c) >= 0
    chunk, decodes = max(1, budget - 8), min(8, budget - 1)
    seen = float(timer.step_s(steps(chunk, 1000.0, decodes, decodes * 1000.0))[0])
    assert plane.k_ctxp * 1000 + plane.k_ctxd * decodes * 1000 + plane.b_c == pytest.approx(seen, rel=0.15)


def test_prefill_curve_follows_long_prompts_where_a_line_does_not():
    """Attention is quadratic: over 128K tokens the best line is off by a third, the curve by a few percent."""
    lengths = np.linspace(2048, 131072, 64).round()
    for timer in (A30, A100):
        fixed, token, square = prompt_curve(timer, 131072)
        assert min(fixed, token, square) >= 0
        truth = timer.step_s(steps(chunk_new=lengths))
        line = PartialPrefillPredictor.in_use(timer, 131072)
        curved = np.abs(fixed + token * lengths + square * lengths**2 - truth) / truth
        straight = np.abs(line.k_p * lengths + line.b_p - truth) / truth
        assert curved.max() < 0.05
        assert straight.max() > 0.3


X = np.linspace(1, 100, 50)


def test_linear_fit_recovers_a_plane_and_reports_its_quality():
    z = np.sin(X)
    fit = linear_fit({"x": X, "z": z}, 3 * X - 2 * z + 7)
    assert fit.coefficients == pytest.approx({"x": 3, "z": -2})
    assert fit.intercept == pytest.approx(7)
    assert fit.r2 == pytest.approx(1)
    assert fit.mape == pytest.approx(0, abs=1e-12)


def test_relative_weights_lower_the_relative_error():
    """A parabola fitted by a line: per cents are better off with relative weights, squares without."""
    y = X + 0.05 * X**2
    plain, relative = linear_fit({"x": X}, y), linear_fit({"x": X}, y, "relative")
    assert relative.mape < plain.mape
    assert relative.r2 < plain.r2


def test_nonnegative_fit_holds_a_coefficient_at_zero():
    y = 5 * X - 100.0
    assert linear_fit({"x": X}, y).intercept == pytest.approx(-100)
    held = linear_fit({"x": X}, y, nonnegative=True)
    assert held.intercept == 0
    assert held.coefficients["x"] == pytest.approx((X @ y) / (X @ X))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 25))
def test_nnls_residual_equals_that_of_scipy(seed, count, extra):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(count + extra, count)), rng.normal(size=count + extra)
    x, (_, norm) = nnls(a, b), scipy_nnls(a, b)
    assert x.min() >= 0
    assert np.linalg.norm(a @ x - b) == pytest.approx(norm, rel=1e-7, abs=1e-9)


def test_nnls_accepts_repeated_and_empty_columns():
    a = np.column_stack([X, X, np.zeros_like(X), np.ones_like(X)])
    x = nnls(a, 4 * X + 1)
    assert x.min() >= 0
    assert a @ x == pytest.approx(4 * X + 1)
    assert nnls(a, np.zeros_like(X)).tolist() == [0, 0, 0, 0]


def test_error_measures_equal_hand_counts():
    assert mean_ape([1, 2, 4], [1.1, 2, 2]) == pytest.approx((0.1 + 0 + 0.5) / 3)
    assert r2([1, 2, 3], [1, 2, 3]) == 1
    assert r2([1, 2, 3], [2, 2, 2]) == 0
    assert r2([2, 2], [2, 2]) == 1
    assert r2([2, 2], [2, 3]) == 0
