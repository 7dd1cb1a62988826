"""The papers' GPU tables from their own figures, and from the catalog's where the two agree."""

from __future__ import annotations

import pytest

from potluck.catalog import gpus

CAUCHY = gpus.paper_gpus("cauchy")
THUNDERSERVE = gpus.paper_gpus("thunderserve")


def printed(per_usd: float) -> str:
    """As CAUCHY's Table 1 prints: thousands below a million, else millions with two decimals."""
    return f"{per_usd / 1e3:.0f}K" if per_usd < 999_500 else f"{per_usd / 1e6:.2f}M"


@pytest.mark.parametrize("name", CAUCHY)
def test_cauchy_table_1_from_its_own_figures(name: str) -> None:
    row = CAUCHY[name]
    assert printed(row.fp16_tflops * 3600 / row.price_usd_per_h) == row.tflop_per_usd
    assert printed(row.bandwidth_gb_per_s * 3600 / row.price_usd_per_h) == row.gb_per_usd


@pytest.mark.parametrize("name", CAUCHY)
def test_cauchy_table_1_from_the_catalog(name: str) -> None:
    """The catalog agrees with all six rows to the printed digits (the RTX 4090's 165.2 prints as 862K)."""
    row, gpu = CAUCHY[name], gpus.gpu(name)
    assert gpu.name == row.gpu
    tflop_per_usd = gpu.fp16_tflops * 3600 / row.price_usd_per_h
    assert printed(tflop_per_usd) == ("862K" if name == "RTX4090" else row.tflop_per_usd)
    assert printed(gpu.bandwidth_gb_per_s * 3600 / row.price_usd_per_h) == row.gb_per_usd
    assert gpu.memory_gb == row.memory_gb


def test_cauchy_prints_one_wrong_ratio() -> None:
    """165 / 1008 is 0.16; the table prints 0.21 for the RTX 4090, the ratio of the row above."""
    for name, row in CAUCHY.items():
        ratio = round(row.fp16_tflops / row.bandwidth_gb_per_s, 2)
        assert ratio == (0.16 if name == "RTX4090" else row.tflops_per_bandwidth)
    assert CAUCHY["RTX4090"].tflops_per_bandwidth == CAUCHY["A10"].tflops_per_bandwidth == 0.21


def test_thunderserve_disagrees_where_the_doubt_says_so() -> None:
    assert {name: row.gpu for name, row in THUNDERSERVE.items()}["3090Ti"] == "RTX3090Ti"
    for row in THUNDERSERVE.values():
        gpu = gpus.gpu(row.gpu)
        agrees = gpu.fp16_tflops == row.fp16_tflops and gpu.bandwidth_gb_per_s == row.bandwidth_gb_per_s
        doubt = gpus.facts(row.gpu).doubt or ""
        assert agrees or "ThunderServe" in doubt, row.name
    # 8 x A100 at its price is the budget that section 5 states.
    assert 8 * THUNDERSERVE["A100"].price_usd_per_h == pytest.approx(14.024)
    # Its A6000 and A5000 rates are a quarter of the tensor-core rate: FP32 on CUDA cores.
    for name in ("A6000", "A5000"):
        assert gpus.gpu(name).fp16_tflops / THUNDERSERVE[name].fp16_tflops == pytest.approx(4, rel=0.01)
