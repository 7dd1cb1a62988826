"""Calibration: what ships loads and is sane, and figures carry over to GPUs that nobody measured."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.catalog import gpus, models, nodes
from potluck.core.codec import dumps, loads
from potluck.core.errors import FormatError
from potluck.core.values.model import CHOSEN, Format, in_format
from potluck.core.values.types import Gpu
from potluck.perf.error_bars import bar
from potluck.perf.operators.calibration import (
    CALIBRATION_VERSION,
    FORMAT,
    Calibration,
    GpuCurves,
    PowerLimit,
    bundled,
    chip_of,
    curves_for,
)
from potluck.perf.step_timer import steps
from potluck.perf.timers.roofline import roofline

FINE = [s.gpu for s in bundled().gpus if s.gemm and not s.coarse]
BARE = Gpu("NewChip", 200.0, 48.0, 1000.0)


def calibration_without(gpu: str) -> Calibration:
    full = bundled()
    kept = tuple(s for s in full.gpus if s.gpu != gpu)
    return replace(full, gpus=kept, specs=tuple(s for s in full.specs if s.name != gpu))


def numbers(curves: GpuCurves) -> list[float]:
    parts = (curves.chip, curves.gemm, curves.prefill, curves.decode, curves.stream)
    values = [getattr(part, field.name) for part in parts for field in fields(part)]
    flat: list[float] = []
    for value in values:
        flat.extend(value if isinstance(value, tuple) else [value])
    return flat


def test_bundled_calibration_covers_the_measured_gpus_and_links() -> None:
    assert {"A100-80", "B200", "H100-SXM", "A40", "A30", "L40S", "RTX4090"} <= set(FINE)
    assert {"nvswitch", "pcie", "lanes", "host"} == {network.kind for network in bundled().networks}
    assert set(bundled().errors) >= {"measured", "transferred"}
    assert bundled().errors["measured"].median < bundled().errors["transferred"].median
    for error in bundled().errors.values():
        assert 0 < error.median < error.p90


def test_calibrated_gpu_specs_equal_the_catalog() -> None:
    """The fits divided by these; if the catalog changes, the calibration must be made anew."""
    assert {spec.name for spec in bundled().specs} == {scales.gpu for scales in bundled().gpus}
    for spec in bundled().specs:
        assert spec == gpus.gpu(spec.name)


def test_calibrated_shares_are_physically_possible() -> None:
    """A share is of the data sheet's rate; boost clocks lift a product to 1.1 at most."""
    for scales in bundled().gpus:
        assert scales.gemm is not None
        assert (0.2 if scales.gpu == "MI300X" else 0.3) < scales.gemm[0] <= 1.1  # as of 2024's kernels
        assert 0.5 < scales.gemm[1] <= 1.1
        assert 0 < scales.gemm[2] < 1e-4
        if scales.decode:
            assert 0.5 < scales.decode[0] <= 1.1
            assert all(0 < fixed_s < 1e-4 for fixed_s in scales.decode[1:])


def test_calibration_survives_its_file() -> None:
    text = dumps(bundled(), format_name=FORMAT, version=CALIBRATION_VERSION)
    assert loads(Calibration, text, format_name=FORMAT, version=CALIBRATION_VERSION) == bundled()
    with pytest.raises(FormatError, match="version"):
        loads(Calibration, text, format_name=FORMAT, version=CALIBRATION_VERSION + 1)


@given(
    st.sampled_from(["volta", "turing", "ampere", "ada", "hopper", "blackwell", "unknown"]),
    st.none() | st.floats(20, 1500),
    st.floats(10, 3000),
)
def test_power_share_is_positive_below_its_ceiling_and_grows_with_tdp(
    arch: str, tdp: float | None, tflops: float
) -> None:
    power = bundled().power
    share = power.share(replace(BARE, architecture=arch, tdp_w=tdp, fp16_tflops=tflops))
    assert 0 < share <= power.ceiling
    if tdp is not None:
        assert share <= power.share(replace(BARE, architecture=arch, tdp_w=2 * tdp, fp16_tflops=tflops))


def test_power_limit_is_a_soft_minimum() -> None:
    power = PowerLimit(1.0, {"ampere": 2.0}, sharpness=4.0)
    gpu = replace(BARE, architecture="ampere", fp16_tflops=100.0)
    assert power.share(replace(gpu, tdp_w=200.0)) == pytest.approx(2**-0.25)
    assert power.share(replace(gpu, tdp_w=20.0)) == pytest.approx(0.1, rel=0.01)
    assert power.share(replace(gpu, tdp_w=2000.0)) == pytest.approx(1.0, rel=0.01)
    assert power.share(gpu) == 1.0
    assert power.share(replace(gpu, tdp_w=20.0, architecture="elsewhere")) == 1.0


def test_power_limited_gpus_have_a_lower_share_than_an_rtx_4090() -> None:
    """The text says so of L4, L40S and A30, and that an RTX 4090 is not."""
    power = bundled().power
    shares = {name: power.share(gpus.gpu(name)) for name in ("L4", "L40S", "A30", "RTX4090")}
    assert max(shares["L4"], shares["L40S"], shares["A30"]) < shares["RTX4090"]


@pytest.mark.parametrize("name", gpus.names())
def test_every_catalog_gpu_has_finite_curves(name: str) -> None:
    curves = curves_for(gpus.gpu(name), bundled())
    assert all(np.isfinite(value) and value >= 0 for value in numbers(curves))
    assert 0 < curves.gemm.compute <= 1.1
    assert curves.confidence in ("measured", "transferred", "assumed")


@pytest.mark.parametrize("name", FINE)
def test_measured_gpu_uses_its_own_figures(name: str) -> None:
    own_scales, curves = bundled().scales(name), curves_for(gpus.gpu(name), bundled())
    assert own_scales is not None
    assert own_scales.gemm is not None
    assert curves.confidence == "measured"
    assert name in curves.basis
    assert (curves.gemm.compute, curves.gemm.bandwidth, curves.gemm.fixed_s) == own_scales.gemm
    assert curves.gemm_residual == own_scales.gemm_residual


@pytest.mark.parametrize("name", FINE)
def test_transferred_figures_are_near_the_measured_ones(name: str) -> None:
    """Each measured GPU as if it had not been: compute within 40 %, bandwidth within 40 %, no surface."""
    own, carried = (
        curves_for(gpus.gpu(name), bundled()),
        curves_for(gpus.gpu(name), calibration_without(name)),
    )
    assert carried.confidence != "measured"
    assert carried.gemm_residual is carried.prefill_residual is carried.decode_residual is None
    assert carried.gemm.compute == pytest.approx(own.gemm.compute, rel=0.4)
    assert carried.gemm.bandwidth == pytest.approx(own.gemm.bandwidth, rel=0.4)
    assert carried.prefill.compute == pytest.approx(own.prefill.compute, rel=0.4)
    assert carried.decode.bandwidth == pytest.approx(own.decode.bandwidth, rel=0.4)


def test_curves_of_an_unmeasured_gpu_come_from_its_nearest_relative() -> None:
    """The same chip first (A800, H200), else the same compute capability (8.6: A10 and A40)."""
    chips = {"A800-SXM": "A100", "H200": "H100", "H800": "H100", "V100-32": "V100"}
    chips |= {"A10": "A40", "RTX3090Ti": "A40"}
    for name, chip in chips.items():
        curves = curves_for(gpus.gpu(name), bundled())
        assert curves.confidence == "transferred"
        sources = curves.basis.removeprefix("carried over from ").split(", ")
        assert {source.split("-")[0] for source in sources} == {chip}


TWINS = [("H200", "H100-SXM"), ("H800", "H100-SXM"), ("A800-SXM", "A100-80")]
TWINS += [("A100-40", "A100-80"), ("GB200", "B200"), ("B300", "B200")]  # A100-40: whole layers give way


@pytest.mark.parametrize(("name", "twin"), TWINS)
def test_gpus_with_the_same_chip_have_the_same_figures_and_residuals(name: str, twin: str) -> None:
    """H200 is an H100 with other memory; more power than the twin's lifts compute alone."""
    here, there = (curves_for(gpus.gpu(each), bundled()) for each in (name, twin))
    more = bundled().power.share(gpus.gpu(name)) / bundled().power.share(gpus.gpu(twin))
    assert here.gemm.compute == pytest.approx(there.gemm.compute * more)
    assert here.prefill.compute == pytest.approx(there.prefill.compute * more)
    assert (here.gemm.bandwidth, here.decode) == (there.gemm.bandwidth, there.decode)
    assert here.gemm_residual == there.gemm_residual is not None
    assert all(here.extras[name].residual == extra.residual for name, extra in there.extras.items())
    assert (there.confidence, here.confidence) == ("measured", "transferred")


def no_worse(better: Gpu, other: Gpu) -> bool:
    """In every figure of the data sheet, the units that it has among them."""
    named = [f.name for f in fields(Gpu) if f.name not in ("name", "architecture")]
    return all((getattr(better, name) or 0) >= (getattr(other, name) or 0) for name in named)


DECODES = [(0.0, 0.0, float(n), float(n * context)) for n in (1, 8, 64, 256) for context in (128, 8192)]
BATCH = steps(*zip(*DECODES, (64, 0, 0, 0), (512, 0, 16, 16e3), (2048, 4096, 64, 64e3), strict=True))  # type: ignore[arg-type]


@settings(max_examples=60)
@given(
    st.sampled_from(gpus.names()),
    st.sampled_from(CHOSEN),
    st.lists(st.floats(0.5, 1.0), min_size=3, max_size=3),
)
def test_gpu_is_never_slower_than_itself_with_lower_figures(
    name: str, kind: Format, less: list[float]
) -> None:
    """Less arithmetic, bandwidth or power, of any GPU of the catalog: a hundredth is left to waves and surfaces."""
    node, scale = (
        nodes.node_type(name),
        dict(zip(("tflops", "bandwidth_gb_per_s", "tdp_w"), less, strict=True)),
    )
    figures = {
        field.name: value * scale["tflops" if field.name.endswith("tflops") else field.name]
        for field in fields(Gpu)
        if field.name.endswith(tuple(scale)) and (value := getattr(node.gpu, field.name))
    }
    lesser = replace(node, name="lesser", gpu=replace(node.gpu, name="lesser", **figures))
    for model in (in_format(models.model(each), kind) for each in ("Llama-3.1-8B", "GPT-OSS-120B")):
        assert (
            roofline(model, node, 1).step_s(BATCH) <= 1.01 * roofline(model, lesser, 1).step_s(BATCH)
        ).all()


@pytest.mark.slow
def test_gpu_with_figures_at_least_as_high_is_hardly_ever_slower() -> None:
    """None with the chip of one that was measured, and none of a data centre's, is slower than a lesser one in any
    format. A GPU that was not has no surfaces, so that it may look faster than a better one."""
    sheet = {name: gpus.gpu(name) for name in gpus.names() if not name.startswith("MI")}
    worst = {(a, b): 0.0 for a in sheet for b in sheet if a != b and no_worse(sheet[a], sheet[b])}
    for name, kind in product(("Llama-3.1-8B", "DeepSeek-V3", "GPT-OSS-120B"), CHOSEN):
        model = in_format(models.model(name), kind)
        times = {gpu: roofline(model, nodes.node_type(gpu), 1).step_s(BATCH) for gpu in sheet}
        worst = {(a, b): max(by, float((times[a] / times[b]).max())) for (a, b), by in worst.items()}
    over = {pair: by for pair, by in worst.items() if by > 1.0 + 1e-9}
    known = {name for pair in TWINS for name in pair} | {"A30", "L40S", "V100-16", "V100-32"}
    assert len([pair for pair in worst if set(pair) <= known]) > 40
    assert [pair for pair in over if set(pair) <= known] == []
    assert len(over) <= 0.08 * len(worst), over
    assert max(over.values()) <= 1.27, over


def test_error_bars_hold_for_b200_predicted_from_other_gpus() -> None:
    """Steps on B200 by what was learnt from older GPUs and links, beside those with its own figures; its attention
    is foretold by how the two before it differ."""
    known, node = bundled(), nodes.node_type("8xB200")
    others = replace(
        known,
        gpus=tuple(scales for scales in known.gpus if scales.gpu != "B200"),
        specs=tuple(spec for spec in known.specs if spec.name != "B200"),
        networks=tuple(network for network in known.networks if network.gb_per_s != 900.0),
    )
    foretold = curves_for(node.gpu, others).decode
    assert foretold.fixed_s == pytest.approx(curves_for(node.gpu, known).decode.fixed_s, rel=0.12)
    batch = steps([0, 0, 0, 512, 8192, 1024], 0.0, [1, 8, 64, 0, 0, 64], [1e3, 8e3, 64e3, 0, 0, 64e3])
    inside, off = [], []
    for name, tp in product(("Llama-3.1-8B", "Qwen3-32B", "DeepSeek-V3", "GPT-OSS-120B"), (1, 8)):
        timer = roofline(models.model(name), node, tp, calibration=others)
        assert timer.confidence == "assumed"
        ratio = roofline(models.model(name), node, tp).step_s(batch) / timer.step_s(batch)
        width = bar("tpot", models.model(name), tp, "B200", timer.confidence)
        inside += list((ratio >= width.low) & (ratio <= width.high))
        off += list(np.abs(ratio - 1.0))
    assert np.mean(inside) >= 0.8
    assert np.median(off) <= 0.12


def test_lower_power_limit_lowers_compute() -> None:
    sxm, pcie = (curves_for(gpus.gpu(name), bundled()) for name in ("A800-SXM", "A100-80-PCIe"))
    assert pcie.gemm.compute < 0.9 * sxm.gemm.compute


@pytest.mark.parametrize("name", ["MI210", "RTX-PRO-6000"])
def test_gpu_of_an_unmeasured_architecture_has_assumed_confidence(name: str) -> None:
    curves = curves_for(gpus.gpu(name), bundled())
    assert curves.confidence == "assumed"
    assert "no GPU of its architecture" in curves.basis


def test_gpu_measured_only_by_whole_layers_has_transferred_confidence() -> None:
    curves = curves_for(gpus.gpu("L4"), bundled())
    assert curves.confidence == "transferred"
    assert "whole-layer" in curves.basis


def test_gpu_with_only_the_required_figures_has_curves() -> None:
    curves = curves_for(BARE, bundled())
    assert curves.confidence == "assumed"
    assert all(np.isfinite(value) and value >= 0 for value in numbers(curves))
    assert chip_of(BARE).sm_count == 80.0
    assert curves.gemm.compute <= 1.1


@pytest.mark.parametrize(("capability", "tile"), [(8.0, 128.0), (8.6, 64.0), (8.9, 64.0), (9.0, 128.0)])
def test_query_tile_size_follows_the_compute_capability(capability: float, tile: float) -> None:
    assert chip_of(replace(BARE, compute_capability=capability)).query_tile == tile
