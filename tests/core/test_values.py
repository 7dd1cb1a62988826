"""Core values refuse what cannot be, in one line that names the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import core_strategies as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.core.values.model import (
    DenseFfn,
    FullAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    Model,
    MoeFfn,
)
from potluck.core.values.plan import Deployment
from potluck.core.values.service import RequestClass
from potluck.core.values.types import (
    Gpu,
    Interconnect,
    LengthBin,
    Link,
    NodeOffer,
    NodeType,
    Region,
    Request,
    Slo,
    Traffic,
)

GPU = Gpu("L4", 121, 24, 300)
PCIE = Interconnect("pcie", 25, 1e-5)
NODE = NodeType("2xL4", GPU, 2, PCIE, 25)
OFFER = NodeOffer("2xL4", 1.5, 4)
LINK = Link("east", "west", 100, 0.04)
SLO = Slo(0.5, 0.05)
BIN = LengthBin(1024, 256, 1)
TRAFFIC = Traffic("llama", 3, (BIN,))
REQUEST = Request("r1", "llama", 0, 10, 10)
FULL = FullAttention(32, 8, 128, 128)
LATENT = LatentAttention(128, 512, 128, 64, 128)
LINEAR = LinearAttention("kda", 32, 32, 128, 128)
MOE = MoeFfn(8, 2, 1024)
MODEL = Model("m", 64, 100, (Layer(FULL, DenseFfn(128)),), 4096)

NAN, INF = float("nan"), float("inf")
NOT_POSITIVE = (0.0, -1.0, NAN, INF)
NEGATIVE = (-1.0, -1e-9, NAN, INF)

REFUSED: list[tuple[Any, str, tuple[Any, ...], str]] = [
    (GPU, "fp16_tflops", NOT_POSITIVE, "gpu L4: fp16_tflops"),
    (GPU, "memory_gb", NOT_POSITIVE, "gpu L4: memory_gb"),
    (GPU, "bandwidth_gb_per_s", NOT_POSITIVE, "gpu L4: bandwidth_gb_per_s"),
    (GPU, "fp8_tflops", NOT_POSITIVE, "gpu L4: fp8_tflops"),
    (GPU, "sm_count", (0, -1), "gpu L4: sm_count"),
    (PCIE, "latency_s", NEGATIVE, "interconnect pcie: latency_s"),
    (PCIE, "gb_per_s", NOT_POSITIVE, "interconnect pcie: gb_per_s"),
    (NODE, "gpus", (0, -1), "node 2xL4: gpus"),
    (NODE, "interconnect", (Interconnect("none", 0, 0),), "node 2xL4: interconnect"),
    (NODE, "network_gbps", NOT_POSITIVE, "node 2xL4: network_gbps"),
    (OFFER, "price_usd_per_h", NEGATIVE, "2xL4: price_usd_per_h"),
    (OFFER, "available", (-1,), "2xL4: available"),
    (LINK, "gbps", NOT_POSITIVE, "link east->west: gbps"),
    (LINK, "rtt_s", NEGATIVE, "link east->west: rtt_s"),
    (SLO, "ttft_s", NOT_POSITIVE, "slo: ttft_s"),
    (SLO, "tpot_s", NOT_POSITIVE, "slo: tpot_s"),
    (SLO, "e2e_s", NOT_POSITIVE, "slo: e2e_s"),
    (SLO, "attainment", (0.0, -1.0, 1.01, NAN, INF), "slo: attainment"),
    (BIN, "input_tokens", NOT_POSITIVE, "lengths: input_tokens"),
    (BIN, "output_tokens", NOT_POSITIVE, "lengths: output_tokens"),
    (BIN, "share", (-1.0, -1e-9, NAN), "lengths: share"),
    (TRAFFIC, "rate_per_s", NEGATIVE, "traffic llama: rate_per_s"),
    (TRAFFIC, "lengths", ((), (BIN, BIN)), "traffic llama: lengths"),
    (TRAFFIC, "prefix_hit_share", (-0.1, 1.0, NAN, INF), "traffic llama: prefix_hit_share"),
    (REQUEST, "prompt_tokens", (0, -1), "request r1: prompt_tokens"),
    (REQUEST, "max_output_tokens", (0, -1), "request r1: max_output_tokens"),
    (FULL, "heads", (0, -1), "heads"),
    (FULL, "kv_heads", (0, 5), "kv_heads"),
    (FULL, "window", (0, -1), "window"),
    (LATENT, "kv_lora_rank", (0, -1), "kv_lora_rank"),
    (LINEAR, "key_heads", (0, -1), "key_heads"),
    (LINEAR, "state_bytes_per_element", (0, -1), "state_bytes_per_element"),
    (MOE, "active", (0, 9), "active"),
    (MOE, "intermediate", (0, -1), "intermediate"),
    (MODEL, "hidden", (0, -1), "hidden"),
    (MODEL, "layers", ((),), "layers"),
    (MODEL, "kv_bits", (0.0, -1.0, NAN, INF), "kv_bits"),
    (Deployment("t", "east", 1), "count", (-1,), "deployment t@east: count"),
]
CASES = [
    pytest.param(value, name, bad, says, id=f"{type(value).__name__}.{name}={bad!r:.20}")
    for value, name, bads, says in REFUSED
    for bad in bads
]


def changed(value: Any, **fields: object) -> object:
    """A copy with other fields, made the way that checks them."""
    if isinstance(value, Request):
        return Request(**{**value._asdict(), **fields})
    return dataclasses.replace(value, **fields)


@pytest.mark.parametrize(("value", "name", "bad", "says"), CASES)
def test_a_field_that_cannot_be_is_named(value: Any, name: str, bad: Any, says: str) -> None:
    with pytest.raises(InputError) as caught:
        changed(value, **{name: bad})
    assert caught.value.field == says
    assert caught.value.problem
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sound",
    [
        lambda: dataclasses.replace(OFFER, price_usd_per_h=0.0, available=0),
        lambda: dataclasses.replace(LINK, rtt_s=0.0),
        lambda: dataclasses.replace(SLO, attainment=1.0),
        lambda: dataclasses.replace(TRAFFIC, rate_per_s=0.0, prefix_hit_share=0.0),
        lambda: dataclasses.replace(NODE, gpus=1, interconnect=Interconnect("none", 0, 0)),
        lambda: dataclasses.replace(MOE, active=8),
    ],
)
def test_the_edge_of_what_can_be_is_taken(sound: Callable[[], object]) -> None:
    sound()


@given(build.anything, st.data())
def test_values_are_frozen(value: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([field.name for field in dataclasses.fields(value)]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
    assert not hasattr(value, "__dict__")
    hash(value)


@given(build.requests, st.data())
def test_requests_are_frozen_and_the_same_one_by_one_and_many_at_once(
    request: Request, data: st.DataObject
) -> None:
    with pytest.raises(AttributeError):
        setattr(request, data.draw(st.sampled_from(request._fields)), None)
    assert not hasattr(request, "__dict__")
    [again] = Request.many([tuple(request)])
    assert (type(again), again, hash(again)) == (Request, request, hash(request))


@given(build.traffics())
def test_mean_lengths_lie_within_the_bins(traffic: Traffic) -> None:
    for mean, values in [
        (traffic.mean_input_tokens, [length.input_tokens for length in traffic.lengths]),
        (traffic.mean_output_tokens, [length.output_tokens for length in traffic.lengths]),
    ]:
        assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)


def test_an_objective_is_scaled_as_a_whole() -> None:
    slo = Slo(2.0, 0.1, 0.95, 20.0)
    assert slo.scaled(0.5) == Slo(1.0, 0.05, 0.95, 10.0)
    assert SLO.scaled(3.0).e2e_s is None
    assert RequestClass("batch", factor=10.0).objective(slo) == slo.scaled(10.0)
    with pytest.raises(InputError, match="slo: scale"):
        slo.scaled(0.0)


@given(st.floats(0.01, 100), st.floats(0.001, 10), st.floats(0.1, 1000), st.integers(1, 5000))
def test_tighter_phases_keep_an_objective_for_the_whole_answer(
    ttft_s: float, tpot_s: float, e2e_s: float, output_tokens: int
) -> None:
    slo = Slo(ttft_s, tpot_s, 0.9, e2e_s)
    limits = slo.within_e2e(output_tokens)
    whole_s = limits.ttft_s + (output_tokens - 1) * limits.tpot_s
    assert whole_s <= e2e_s * (1 + 1e-9)
    assert limits.ttft_s <= ttft_s
    assert limits.ttft_s / limits.tpot_s == pytest.approx(ttft_s / tpot_s)
    assert limits == slo or whole_s == pytest.approx(e2e_s)  # no tighter than it must be
    assert slo.kept(limits.ttft_s, limits.tpot_s, min(whole_s, e2e_s))
    assert not slo.kept(limits.ttft_s, limits.tpot_s, e2e_s * 1.001)


def test_a_region_finds_its_offer() -> None:
    region = Region("east", (OFFER, NodeOffer("1xL4", 0.8, 2)))
    assert region.offer("2xL4") is OFFER
    assert region.offer("8xH100") is None


def test_derived_sizes() -> None:
    assert GPU.memory_bytes == 24e9
    assert MODEL.layer_count == 1
    # Kimi-Linear's KDA layer: 32 heads with a 128 by 128 state, convolution over q, k and v.
    assert LINEAR.state_elements == 32 * 128 * 128
    assert LINEAR.conv_channels == 3 * 32 * 128
