"""CAUCHY's equations 1 to 15."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.core.values.model import DenseFfn, FullAttention, Layer, LinearAttention, Model, MoeFfn
from potluck.core.values.types import Gpu
from potluck.perf.timers.cauchy_timer import CauchyModel, ComboSide, ce


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


def test_cauchy_model_parameters_come_from_the_model():
    assert CauchyModel(l=32, h=4096, n=32, s=128, k=8, i=14336, v=128256, d=2.0) == M8


def test_cauchy_equations_1_2_6_and_7_equal_hand_counts():
    assert M8.c1 == 4 * 32 * 4096
    assert M8.c2 == 8 * 32 * 4096**2 + 6 * 32 * 4096 * 14336
    assert M8.c3 == 2 * (2 * 128256 * 4096 + (4 * 4096**2 + 3 * 4096 * 14336 + 2 * 4096) * 32)
    assert M8.c4 == 2 * 2 * 32 * 8 * 128 == 131072


def test_cauchy_equations_3_4_and_5_agree():
    flop = 4 * (M8.c1 * 1000**2 + M8.c2 * 1000)
    assert M8.flop_prefill(4, 1000) == pytest.approx(flop)
    assert M8.t_prefill_s(4, 1000, 2, 312e12) == pytest.approx(flop / 624e12)
    assert M8.s_prefill(1000, 2, 312e12) == pytest.approx(4 * 1000 / M8.t_prefill_s(4, 1000, 2, 312e12))


@given(b=batches, r_in=tokens, r_out=tokens)
def test_cauchy_equations_10_and_11_agree(b, r_in, r_out):
    t_decode = M8.t_decode_s(b, r_in, r_out, 2, 4e12)
    assert M8.s_decode(b, r_in, r_out, 2, 4e12) == pytest.approx(b * r_out / t_decode, rel=1e-9)


@given(b=batches, r_in=tokens, r_out=tokens, n_prefill=st.integers(1, 8), n_decode=st.integers(1, 8))
def test_cauchy_equations_12_to_15_agree(b, r_in, r_out, n_prefill, n_decode):
    prefill_side, decode_side = ComboSide(H800, n_prefill, 2.69), ComboSide(H20, n_decode, 1.5)
    assert M8.a1(r_in) == pytest.approx(M8.s_prefill(r_in, 1, 1.0))
    assert M8.a2(b, r_in, r_out) == pytest.approx(M8.s_decode(b, r_in, r_out, 1, 1.0))
    # (14): tokens a second of each side, over what it costs.
    by_throughput = M8.s_prefill(r_in, n_prefill, prefill_side.gpu_f) / (n_prefill * 2.69 / 3600)
    by_throughput += M8.s_decode(b, r_in, r_out, n_decode, decode_side.gpu_b) / (n_decode * 1.5 / 3600)
    assert ce(M8, b, r_in, r_out, prefill_side, decode_side) == pytest.approx(by_throughput, rel=1e-9)


def test_cauchy_cost_efficiency_depends_on_the_combo_direction():
    h800, h20 = ComboSide(H800, 1, 2.69), ComboSide(H20, 1, 1.5)
    assert ce(M8, 32, 1000, 250, h800, h20) > ce(M8, 32, 1000, 250, h20, h800)


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
def test_models_outside_cauchys_equations_are_refused_in_one_line(model, problem):
    with pytest.raises(InputError, match=problem) as caught:
        CauchyModel.from_model(model)
    assert "dense models" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_invalid_cauchy_values_are_refused():
    with pytest.raises(InputError, match="cauchy: k"):
        CauchyModel(32, 4096, 32, 128, 0, 14336, 128256, 2.0)
    with pytest.raises(InputError, match="price"):
        ComboSide(H20, 1, 0.0)
    with pytest.raises(InputError, match="gpu_n"):
        ComboSide(H20, 0, 1.0)
