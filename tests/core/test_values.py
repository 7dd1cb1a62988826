"""Core values refuse invalid fields in one line that names the field."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import core_strategies as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.core.values import model as models
from potluck.core.values import types
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import Deployment
from potluck.core.values.route import Route, Segment, aggregated, handed_over
from potluck.core.values.service import RequestClass

GPU = types.Gpu("L4", 121, 24, 300)
PCIE = types.Interconnect("pcie", 25, 1e-5)
NODE = types.NodeType("2xL4", GPU, 2, PCIE, 25)
OFFER = types.NodeOffer("2xL4", 1.5, 4)
LINK = types.Link("east", "west", 100, 0.04)
SLO = types.Slo(0.5, 0.05)
BIN = types.LengthBin(1024, 256, 1)
TRAFFIC = types.Traffic("llama", 3, (BIN,))
FULL = models.FullAttention(32, 8, 128, 128)
LATENT = models.LatentAttention(128, 512, 128, 64, 128)
LINEAR = models.LinearAttention("kda", 32, 32, 128, 128)
MOE = models.MoeFfn(8, 2, 1024)
MODEL = models.Model("m", 64, 100, (models.Layer(FULL, models.DenseFfn(128)),), 4096)

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
    (NODE, "interconnect", (types.Interconnect("none", 0, 0),), "node 2xL4: interconnect"),
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


@pytest.mark.parametrize(("value", "name", "bad", "says"), CASES)
def test_invalid_field_is_refused_by_name(value: Any, name: str, bad: Any, says: str) -> None:
    with pytest.raises(InputError) as caught:
        dataclasses.replace(value, **{name: bad})
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
        lambda: dataclasses.replace(NODE, gpus=1, interconnect=types.Interconnect("none", 0, 0)),
        lambda: dataclasses.replace(MOE, active=8),
    ],
)
def test_boundary_values_are_accepted(sound: Callable[[], object]) -> None:
    sound()


@given(build.anything, st.data())
def test_values_are_frozen(value: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([field.name for field in dataclasses.fields(value)]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
    assert not hasattr(value, "__dict__")
    hash(value)


@given(build.requests, st.data())
def test_requests_are_frozen_and_equal_when_built_singly_or_in_bulk(
    request: types.Request, data: st.DataObject
) -> None:
    with pytest.raises(AttributeError):
        setattr(request, data.draw(st.sampled_from(request._fields)), None)
    assert not hasattr(request, "__dict__")
    [again] = types.Request.many([tuple(request)])
    assert (type(again), again, hash(again)) == (types.Request, request, hash(request))


@given(build.traffics())
def test_mean_lengths_lie_within_their_bins(traffic: types.Traffic) -> None:
    for mean, values in [
        (traffic.mean_input_tokens, [length.input_tokens for length in traffic.lengths]),
        (traffic.mean_output_tokens, [length.output_tokens for length in traffic.lengths]),
    ]:
        assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)


def test_slo_scaling_applies_to_all_limits() -> None:
    slo = types.Slo(2.0, 0.1, 0.95, 20.0)
    assert slo.scaled(0.5) == types.Slo(1.0, 0.05, 0.95, 10.0)
    assert SLO.scaled(3.0).e2e_s is None
    assert RequestClass("batch", factor=10.0).objective(slo) == slo.scaled(10.0)
    with pytest.raises(InputError, match="slo: scale"):
        slo.scaled(0.0)


@given(st.floats(0.01, 100), st.floats(0.001, 10), st.floats(0.1, 1000), st.integers(1, 5000))
def test_slo_within_e2e_keeps_the_ratio_of_ttft_to_tpot(
    ttft_s: float, tpot_s: float, e2e_s: float, output_tokens: int
) -> None:
    slo = types.Slo(ttft_s, tpot_s, 0.9, e2e_s)
    limits = slo.within_e2e(output_tokens)
    whole_s = limits.ttft_s + (output_tokens - 1) * limits.tpot_s
    assert whole_s <= e2e_s * (1 + 1e-9)
    assert limits.ttft_s <= ttft_s
    assert limits.ttft_s / limits.tpot_s == pytest.approx(ttft_s / tpot_s)
    assert limits == slo or whole_s == pytest.approx(e2e_s)  # no tighter than it must be
    assert slo.kept(limits.ttft_s, limits.tpot_s, min(whole_s, e2e_s))
    assert not slo.kept(limits.ttft_s, limits.tpot_s, e2e_s * 1.001)


def test_region_returns_its_offer_by_node() -> None:
    region = types.Region("east", (OFFER, types.NodeOffer("1xL4", 0.8, 2)))
    assert region.offer("2xL4") is OFFER
    assert region.offer("8xH100") is None


def test_derived_sizes_of_gpu_model_and_attention_equal_hand_counts() -> None:
    assert GPU.memory_bytes == 24e9
    assert MODEL.layer_count == 1
    # Kimi-Linear's KDA layer: 32 heads with a 128 by 128 state, convolution over q, k and v.
    assert LINEAR.state_elements == 32 * 128 * 128
    assert LINEAR.conv_channels == 3 * 32 * 128


# A layout counts its layers and nodes, and refuses to be empty.


@given(build.layouts)
def test_layout_layer_and_node_counts_add_up(layout: Layout) -> None:
    names = [node.node for stage in layout.stages for node in stage.nodes]
    assert layout.node_counts == Counter(names)
    assert sum(layout.node_counts.values()) == sum(len(stage.nodes) for stage in layout.stages)
    assert layout.layer_count == sum(stage.layers for stage in layout.stages) >= len(layout.stages)


def test_single_layout_has_one_stage_on_one_node() -> None:
    layout = single("2xL40S", 2, 32)
    assert layout.stages == (Stage(32, (StageNode("2xL40S", 2),)),)
    assert (layout.layer_count, layout.node_counts) == (32, {"2xL40S": 1})


def test_layout_stage_may_have_different_nodes() -> None:
    stage = Stage(8, (StageNode("8xH100", 8), StageNode("2xL40S", 2)))
    assert Layout((stage, stage)).node_counts == {"8xH100": 2, "2xL40S": 2}


def test_invalid_layout_is_refused_with_its_reason() -> None:
    node = StageNode("1xL4", 1)
    for build_it, says in [
        (lambda: StageNode("1xL4", 0), "1xL4: tp: must be at least 1, is 0"),
        (lambda: Stage(0, (node,)), "stage: layers: must be at least 1, is 0"),
        (lambda: Stage(1, ()), "stage: nodes: a stage needs at least one node"),
        (lambda: Layout(()), "layout: stages: a layout needs at least one stage"),
    ]:
        with pytest.raises(InputError) as caught:
            build_it()
        assert str(caught.value) == says


def test_stages_on_one_named_machine_count_it_once() -> None:
    def on(*places: tuple[str, str]) -> Layout:
        return Layout(tuple(Stage(8, (StageNode(node, 2, machine),)) for node, machine in places))

    named = on(("4xA40", "x"), ("4xA40", "x"), ("4xA40", "y"), ("2xL4", "z"))
    assert named.node_counts == {"4xA40": 2, "2xL4": 1}
    assert named.machines == {"x": 4, "y": 2, "z": 2}
    unnamed = on(("4xA40", ""), ("4xA40", ""))
    assert unnamed.node_counts == {"4xA40": 2}
    assert unnamed.machines == {}


# A route covers the prompt from token 0 without a gap, and exactly its last segment is open.

LENGTH = 6  # Prompt tokens in the brute-force check; segments are drawn from 0 to here.

bounds = st.integers(0, LENGTH)
segments = st.tuples(bounds, st.none() | bounds).filter(lambda pair: pair[1] is None or pair[0] < pair[1])
rows = st.lists(segments, max_size=4)


def is_route(pairs: list[tuple[int, int | None]]) -> bool:
    """The rule by counting: each token, far beyond the prompt, is run once, in the order of the list."""
    if sum(stop is None for _, stop in pairs) != 1:
        return False
    end = 2 * LENGTH
    tokens = [token for start, stop in pairs for token in range(start, end if stop is None else stop)]
    return tokens == list(range(end))


def accepted(pairs: list[tuple[int, int | None]]) -> bool:
    try:
        Route(tuple(Segment("r", start, stop) for start, stop in pairs))
    except InputError:
        return False
    return True


@given(rows)
def test_route_constructor_accepts_exactly_the_valid_segments(pairs: list[tuple[int, int | None]]) -> None:
    assert accepted(pairs) == is_route(pairs)


def test_route_constructor_accepts_exactly_the_valid_short_segment_lists() -> None:
    ends: list[int | None] = [1, 2, 3, None]
    every = [(start, stop) for start in range(4) for stop in ends if stop is None or start < stop]
    lists = [[], *([a] for a in every), *([a, b] for a in every for b in every)]
    lists += [[a, b, c] for a in every for b in every for c in every]
    verdicts = [accepted(pairs) for pairs in lists]
    assert verdicts == [is_route(pairs) for pairs in lists]
    # One uncut, cut after 1, 2 or 3 tokens, or cut twice.
    assert sum(verdicts) == 1 + 3 + 3


@given(build.routes())
def test_route_segments_cover_the_prompt_and_the_last_has_no_stop(route: Route) -> None:
    assert route.segments[0].start == 0
    assert [s.stop for s in route.segments[:-1]] == [s.start for s in route.segments[1:]]
    assert [s.stop is None for s in route.segments] == [False] * (len(route.segments) - 1) + [True]
    assert route.decoder == route.segments[-1].replica


def test_aggregated_and_disaggregated_routes_have_their_segments() -> None:
    assert aggregated("X").segments == (Segment("X", 0, None),)
    disaggregated = handed_over("P", "D", 100)
    assert disaggregated.segments == (Segment("P", 0, 100), Segment("D", 100, None))
    assert disaggregated.decoder == "D"


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ([], "route: segments: a route needs at least one"),
        ([(1, None)], "route: segments: one starts at 1, not at 0"),
        ([(0, 2), (3, None)], "route: segments: one starts at 3, not at 2"),
        ([(0, None), (0, None)], "route: segments: only the last one may be open"),
        ([(0, 2)], "route: segments: the last one must be open: it decodes"),
        ([(-1, None)], "segment: start: must not be negative, is -1"),
        ([(2, 2)], "segment: stop: must be beyond its start 2, is 2"),
    ],
)
def test_invalid_route_is_refused_with_its_reason(pairs: list[tuple[int, int | None]], says: str) -> None:
    with pytest.raises(InputError) as caught:
        Route(tuple(Segment("r", start, stop) for start, stop in pairs))
    assert str(caught.value) == says


@pytest.mark.parametrize("at_token", [0, -1])
def test_transfer_before_the_first_token_is_refused(at_token: int) -> None:
    with pytest.raises(InputError, match="segment: stop"):
        handed_over("a", "b", at_token)
