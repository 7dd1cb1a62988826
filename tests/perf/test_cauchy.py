"""CAUCHY's equations 1 to 18, its Table 1 and the bandwidth claim of its section 5."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.core.values.model import DenseFfn, FullAttention, Layer, LinearAttention, Model, MoeFfn
from potluck.core.values.types import Gpu
from potluck.perf.step_timer import steps
from potluck.perf.timers.cauchy_timer import (
    CauchyModel,
    CauchyTimer,
    ComboSide,
    ce,
    ce_throughput,
    combo_objective,
    combo_weight,
    gb_per_usd,
    tflop_per_usd,
)


def llama(name, layers, hidden, heads, intermediate, **changes):
    layer = Layer(FullAttention(heads, 8, 128, 128), DenseFfn(intermediate))
    return Model(name, hidden, 128256, (layer,) * layers, 131072, **changes)


LLAMA_8B = llama("Llama-3.1-8B", 32, 4096, 32, 14336)
LLAMA_70B = llama("Llama-3.1-70B", 80, 8192, 64, 28672)
A100 = Gpu("A100", 312, 80, 2039)
H20 = Gpu("H20", 148, 96, 4000)
H800 = Gpu("H800", 989, 80, 3350)
M8 = CauchyModel.from_model(LLAMA_8B)

tokens = st.integers(1, 20_000)
batches = st.integers(1, 256)


def test_the_letters_come_from_the_model():
    assert CauchyModel(l=32, h=4096, n=32, s=128, k=8, i=14336, v=128256, d=2.0) == M8


def test_equations_1_2_6_7_by_hand():
    assert M8.c1 == 4 * 32 * 4096
    assert M8.c2 == 8 * 32 * 4096**2 + 6 * 32 * 4096 * 14336
    assert M8.c3 == 2 * (2 * 128256 * 4096 + (4 * 4096**2 + 3 * 4096 * 14336 + 2 * 4096) * 32)
    assert M8.c4 == 2 * 2 * 32 * 8 * 128 == 131072


def test_equations_3_4_5_agree():
    flop = 4 * (M8.c1 * 1000**2 + M8.c2 * 1000)
    assert M8.flop_prefill(4, 1000) == pytest.approx(flop)
    assert M8.t_prefill_s(4, 1000, 2, 312e12) == pytest.approx(flop / 624e12)
    assert M8.s_prefill(1000, 2, 312e12) == pytest.approx(4 * 1000 / M8.t_prefill_s(4, 1000, 2, 312e12))


@given(b=batches, r_in=tokens, r_out=st.integers(1, 200))
def test_equation_8_is_its_sum_and_9_exceeds_it_by_half_a_token_each(b, r_in, r_out):
    total = sum(M8.c3 + b * M8.c4 * (r_in + j) for j in range(r_out))
    assert M8.byte_decode_sum(b, r_in, r_out) == pytest.approx(total, rel=1e-12)
    excess = M8.byte_decode(b, r_in, r_out) - M8.byte_decode_sum(b, r_in, r_out)
    assert excess == pytest.approx(b * M8.c4 * r_out / 2, rel=1e-6)


def test_the_difference_between_8_and_9_is_small_for_real_requests():
    exact, printed = M8.byte_decode_sum(32, 1024, 256), M8.byte_decode(32, 1024, 256)
    assert printed / exact - 1 == pytest.approx(9.32e-5, rel=1e-3)


@given(b=batches, r_in=tokens, r_out=tokens)
def test_equations_10_and_11_agree(b, r_in, r_out):
    t_decode = M8.t_decode_s(b, r_in, r_out, 2, 4e12)
    assert M8.s_decode(b, r_in, r_out, 2, 4e12) == pytest.approx(b * r_out / t_decode, rel=1e-9)


@given(b=batches, r_in=tokens, r_out=tokens, n_prefill=st.integers(1, 8), n_decode=st.integers(1, 8))
def test_equations_12_to_15_agree(b, r_in, r_out, n_prefill, n_decode):
    prefill, decode = ComboSide(H800, n_prefill, 2.69), ComboSide(H20, n_decode, 1.5)
    assert M8.a1(r_in) == pytest.approx(M8.s_prefill(r_in, 1, 1.0))
    assert M8.a2(b, r_in, r_out) == pytest.approx(M8.s_decode(b, r_in, r_out, 1, 1.0))
    by_throughput = ce_throughput(M8, b, r_in, r_out, prefill, decode)
    assert ce(M8, b, r_in, r_out, prefill, decode) == pytest.approx(by_throughput, rel=1e-9)


def test_the_direction_of_a_combo_matters():
    h800, h20 = ComboSide(H800, 1, 2.69), ComboSide(H20, 1, 1.5)
    assert ce(M8, 32, 1000, 250, h800, h20) > ce(M8, 32, 1000, 250, h20, h800)


def test_equation_16_charges_price_over_efficiency():
    """The paper's example: A800 at 1.09 $/h and 1.07M tokens/$ is chosen over H20 for what is left."""
    a800, h20 = combo_weight(1.09, 1.07e6), combo_weight(1.50, 1.15e6)
    assert a800 < h20
    assert combo_objective([(1.09, 1.07e6, 2), (1.50, 1.15e6, 1)]) == pytest.approx(2 * a800 + h20)
    with pytest.raises(InputError, match="cost-efficiency"):
        combo_weight(1.0, 0.0)


@given(b=batches, r_in=tokens)
def test_equations_17_and_18_agree(b, r_in):
    assert M8.net_bytes_per_s_17(r_in, 312e12, b) == pytest.approx(
        M8.net_bytes_per_s(r_in, 312e12, b), rel=1e-9
    )


@pytest.mark.parametrize(
    ("model", "printed_gb_per_s", "right_gb_per_s"), [(LLAMA_8B, 9.829, 2.457), (LLAMA_70B, 5.078, 0.6348)]
)
def test_section_5_bandwidth_with_the_printed_and_the_real_kv_heads(model, printed_gb_per_s, right_gb_per_s):
    """Printed: 10 and 5 GB/s, which only as many KV heads as heads give; with 8, a quarter and an eighth."""
    cauchy = CauchyModel.from_model(model)
    as_printed = cauchy.as_multi_head().net_bytes_per_s(2048, 312e12) / 1e9
    assert as_printed == pytest.approx(printed_gb_per_s, rel=1e-3)
    assert cauchy.net_bytes_per_s(2048, 312e12) / 1e9 == pytest.approx(right_gb_per_s, rel=1e-3)
    assert round(as_printed) in (10, 5)


@pytest.mark.parametrize(
    ("gpu", "tflops", "gb_per_s", "price", "tflop_usd", "gb_usd"),
    [
        ("H800-SXM", 989, 3350, 2.69, 1.32e6, 4.48e6),
        ("A10", 125, 600, 0.75, 600e3, 2.88e6),
        ("RTX4090", 165, 1008, 0.69, 861e3, 5.26e6),
        ("A800-PCIe", 312, 1935, 1.19, 944e3, 5.85e6),
        ("MI210", 181, 1638, 1.40, 465e3, 4.21e6),
        ("H20-NVL", 148, 4000, 1.50, 355e3, 9.60e6),
    ],
)
def test_table_1_derived_columns(gpu, tflops, gb_per_s, price, tflop_usd, gb_usd):
    assert tflop_per_usd(tflops, price) == pytest.approx(tflop_usd, rel=0.003), gpu
    assert gb_per_usd(gb_per_s, price) == pytest.approx(gb_usd, rel=0.003), gpu


def test_the_timer_prefills_as_equation_4_in_one_chunk_or_many():
    timer = CauchyTimer(M8, A100, 2)
    whole = timer.step_s(steps(4096))[0]
    assert whole == pytest.approx(M8.t_prefill_s(1, 4096, 2, 312e12))
    chunks = timer.step_s(steps(np.full(8, 512.0), np.arange(8) * 512.0))
    assert chunks.sum() == pytest.approx(whole)
    assert timer.confidence == "assumed"


def test_the_timer_decodes_as_equation_8_step_by_step():
    timer = CauchyTimer(M8, A100)
    contexts = 16 * (1000.0 + np.arange(50))
    seconds = timer.step_s(steps(decodes=np.full(50, 16.0), decode_context=contexts)).sum()
    assert seconds == pytest.approx(M8.byte_decode_sum(16, 1000, 50) / 2039e9)


def test_a_mixed_step_is_the_sum_and_an_empty_one_is_free():
    timer = CauchyTimer(M8, A100)
    mixed, prefill, decode, empty = timer.step_s(
        steps([512, 512, 0, 0], [100, 100, 0, 0], [8, 0, 8, 0], [800, 0, 800, 0])
    )
    assert mixed == pytest.approx(prefill + decode)
    assert empty == 0


def test_a_row_of_several_chunks_adds_up():
    timer = CauchyTimer(M8, A100)
    both = timer.step_s(steps([[256, 128]], [[0, 512]]))[0]
    assert both == pytest.approx(timer.step_s(steps([256, 128], [0, 512])).sum())


def _with(layer_index, layer):
    layers = list(LLAMA_8B.layers)
    layers[layer_index] = layer
    return Model("odd", 4096, 128256, tuple(layers), 131072)


ATTENTION = FullAttention(32, 8, 128, 128)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (_with(3, Layer(ATTENTION, MoeFfn(8, 2, 14336))), "layer 3 has FullAttention and MoeFfn"),
        (_with(2, Layer(LinearAttention("kda", 32, 32, 128, 128), DenseFfn(14336))), "layer 2 has LinearAtt"),
        (_with(1, Layer(FullAttention(32, 8, 128, 128, window=128), DenseFfn(14336))), "sliding window"),
        (_with(1, Layer(ATTENTION, DenseFfn(1024))), "layer 1 differs"),
        (llama("fp8", 32, 4096, 32, 14336, kv_bits=8.0), "KV of 8"),
    ],
)
def test_models_outside_the_equations_are_refused_in_one_line(model, problem):
    with pytest.raises(InputError, match=problem) as caught:
        CauchyModel.from_model(model)
    assert "dense models" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_values_are_refused():
    with pytest.raises(InputError, match="cauchy: k"):
        CauchyModel(32, 4096, 32, 128, 0, 14336, 128256, 2.0)
    with pytest.raises(InputError, match="gpu_n"):
        CauchyTimer(M8, A100, 0)
    with pytest.raises(InputError, match="price"):
        ComboSide(H20, 1, 0.0)
    with pytest.raises(InputError, match="gpu_n"):
        ComboSide(H20, 0, 1.0)
