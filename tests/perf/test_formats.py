"""Formats: which units multiply, what it costs, and how far that is from what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from accuracy.scores import stored_scores
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import gpus, models, nodes
from potluck.core.errors import InputError
from potluck.core.values.model import CHOSEN, FORMAT_BITS, format_named, format_of_bits, in_format
from potluck.perf.operators.calibration import WINDOWED, bundled, curves_for
from potluck.perf.operators.expert_routing import EVEN, TALL, UNEVEN, spread
from potluck.perf.operators.kernels import prefill_attention_s
from potluck.perf.operators.layer_seconds import expert_time_s, product_s, windowed_prefill_s
from potluck.perf.operators.math_units import units_for
from potluck.perf.step_timer import StepBatch
from potluck.perf.timers.roofline import roofline

H100, L40S, A100, V100, B200 = (gpus.gpu(n) for n in ("H100-SXM", "L40S", "A100-80", "V100-16", "B200"))


def test_every_format_finds_units_on_every_gpu_of_the_catalog() -> None:
    for name in gpus.names():
        for kind in CHOSEN:
            units = units_for(kind, gpus.gpu(name))
            assert units.flops_per_s >= gpus.gpu(name).fp16_tflops * 1e12


def test_a_gpu_without_the_units_says_so() -> None:
    assert "fp16" in units_for("bf16", V100).said
    assert "weights only" in units_for("fp8", A100).said
    assert units_for("fp8", H100).makes_small
    assert units_for("nvfp4", B200).flops_per_s == 9000e12
    assert not units_for("mxfp4", H100).makes_small


@given(st.sampled_from(CHOSEN))
def test_bits_and_names_agree(kind: str) -> None:
    named = format_named(kind)
    assert FORMAT_BITS[format_of_bits(FORMAT_BITS[named])] == FORMAT_BITS[named]


def test_an_unknown_format_is_refused_with_a_hint() -> None:
    with pytest.raises(InputError, match="fp8"):
        format_named("fp7")


def test_fp8_pays_where_matrices_are_large_and_not_where_inputs_cost_more() -> None:
    """As measured: 1.8 times as fast for 8192 x 8192, slower than bf16 for 1024 x 4096."""
    curves = curves_for(H100, bundled())
    large, narrow = (
        [float(product_s(kind, 16384, n, k, H100, curves)) for kind in ("bf16", "fp8")]
        for n, k in ((8192, 8192), (1024, 4096))
    )
    assert 1.5 < large[0] / large[1] < 2.0
    assert narrow[1] > narrow[0]


def test_small_weights_make_decodes_faster_on_any_gpu() -> None:
    model = models.model("Llama-3.1-8B")
    step = StepBatch(np.zeros((1, 1)), np.zeros((1, 1)), np.array([8.0]), np.array([8.0 * 512]))
    for node in ("H100-SXM", "L40S", "A100-80", "RTX4090"):
        times = [
            float(roofline(in_format(model, kind), nodes.node_type(node), 1).step_s(step)[0])
            for kind in ("bf16", "fp8", "int4")
        ]
        assert times[0] > times[1] > times[2], node


@given(
    tokens=st.integers(1, 20_000),
    shape=st.sampled_from([(8, 2), (128, 8), (256, 8), (32, 4)]),
    ranks=st.sampled_from([1, 2, 8]),
    skew=st.sampled_from([EVEN, UNEVEN, 1.2]),
)
def test_loads_add_up_and_the_busiest_rank_has_most(
    tokens: int, shape: tuple[int, int], ranks: int, skew: float
) -> None:
    experts, active = shape
    found = spread(float(tokens), experts, active, ranks, skew)
    rows, used = float(found.rows[0]), float(found.used[0])
    assert 1.0 <= used <= experts / ranks + 1e-9
    assert rows >= 0.5 * tokens * active / ranks - experts  # rounding aside, at least the fair share
    assert rows <= 1.5 * tokens * active + experts
    for tall in TALL:
        assert found.tiles[tall][0] >= max(used, rows / tall) - 1e-6


def test_uneven_routers_cost_more_tiles_and_whole_experts_wait_for_the_busiest() -> None:
    even, uneven = (spread(4096.0, 128, 8, 8, skew) for skew in (EVEN, UNEVEN))
    assert uneven.rows[0] > 1.2 * even.rows[0]
    curves = curves_for(H100, bundled())
    shape = (4096.0, 4096.0, 1536.0, 128.0, 8.0)
    fair, skewed = (expert_time_s("bf16", *shape, H100, curves, skew=skew) for skew in (EVEN, UNEVEN))
    assert float(skewed) > 1.1 * float(fair)


def test_what_was_not_measured_on_a_gpu_is_carried_over_by_ratio() -> None:
    own, other = curves_for(H100, bundled()), curves_for(gpus.gpu("H200"), bundled())
    assert "gemm:fp8" not in own.carried
    assert "gemm:fp8" in other.carried
    assert other.extras["gemm:fp8"].values == pytest.approx(own.extras["gemm:fp8"].values, rel=1e-6)
    assert other.extras["gemm:fp8"].residual is None
    slower = curves_for(replace(gpus.gpu("H200"), name="X", tdp_w=200.0, sm_count=100), bundled())
    assert slower.extras["gemm:fp8"].values[0] < other.extras["gemm:fp8"].values[0]


def test_stored_errors_are_within_what_was_promised() -> None:
    """Left out: FP8 within 20 %, latent modules within 25 %; calibrated within 8 % and 12 %.

    Of experts the A100's, left out, are 26.6 % off: a kernel of its own (docs/accuracy.md).
    """
    found = {(s.question, s.kind, s.gpu): s.median for s in stored_scores() if s.group == ""}
    for gpu in ("H100-SXM", "L40S"):
        assert found["GPU left out", "FP8 GEMM", gpu] <= 0.20
        assert found["calibrated", "FP8 GEMM", gpu] <= 0.08
        assert found["GPU left out", "latent module", gpu] <= 0.25
        assert found["calibrated", "latent module", gpu] <= 0.12
        assert found["GPU left out", "windowed attention", gpu] <= 0.25
        assert found["calibrated", "windowed attention", gpu] <= 0.10
        assert found["GPU left out", "experts", gpu] <= 0.25
        assert found["calibrated", "experts", gpu] <= 0.12
    assert found["GPU left out", "experts", "A100-80"] <= 0.27
    assert found["calibrated", "experts", "A100-80"] <= 0.12


def test_windowed_attention_has_its_own_figures_only_where_it_was_measured() -> None:
    new, cached = np.array([[4096.0]]), np.array([[0.0]])
    shape, plain = (64.0, 8.0, 64.0, 64.0), (np.array([4096.0]), 64.0, 0.5)
    own, other = curves_for(H100, bundled()), curves_for(gpus.gpu("A100-80"), bundled())
    assert WINDOWED in own.extras
    assert WINDOWED not in other.extras
    for curves in (own, other):
        seconds = [
            float(windowed_prefill_s(new, cached, shape, w, plain, curves)[0])
            for w in (128.0, 1024.0, 4096.0)
        ]
        assert sorted(seconds) == seconds, "a wider window is more work"
    bare = replace(own, extras={}, prefill_residual=None)
    whole = prefill_attention_s(new, cached, *shape, bare.chip, bare.prefill)
    assert float(windowed_prefill_s(new, cached, shape, 128.0, plain, bare)[0]) < 0.5 * float(whole[0])


def test_products_that_nobody_measured_are_assumed() -> None:
    """int8 everywhere, FP8 without units for it; FP8 on an H100 was measured."""
    model, a100, h100 = models.model("Llama-3.1-8B"), nodes.node_type("1xA100-80"), nodes.node_type("1xH100")
    found = {
        (node.gpu.name, kind): roofline(in_format(model, kind), node, 1).confidence
        for node in (a100, h100)
        for kind in ("bf16", "fp8", "int8", "int4")
    }
    assert {key for key, said in found.items() if said == "measured"} == {
        ("A100-80", "bf16"),
        ("H100-SXM", "bf16"),
        ("H100-SXM", "fp8"),
    }
