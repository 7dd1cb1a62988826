"""Hypothesis strategies that build valid core values."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from potluck.core.values import types
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.model import (
    DenseFfn,
    FullAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    LinearKind,
    Model,
    MoeFfn,
)
from potluck.core.values.plan import (
    BucketCapacity,
    Confidence,
    Deployment,
    LengthBucket,
    NodeCount,
    Plan,
    PlannedFlow,
    PlannedReplica,
    PlannedShare,
    Prediction,
    Template,
    TemplateKind,
)
from potluck.core.values.route import Route, Segment

names = st.text(min_size=1, max_size=12)
counts = st.integers(1, 10**6)
small = st.integers(1, 8)
positive = st.floats(1e-9, 1e15)
not_negative = st.floats(0, 1e15)
roles = st.sampled_from(get_args(types.Role))
confidences = st.sampled_from(get_args(Confidence))


def tuples_of(items: st.SearchStrategy[Any], least: int = 0, most: int = 3) -> st.SearchStrategy[Any]:
    return st.lists(items, min_size=least, max_size=most).map(tuple)


def optional(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | items


gpus = st.builds(
    types.Gpu,
    name=names,
    fp16_tflops=positive,
    memory_gb=positive,
    bandwidth_gb_per_s=positive,
    fp8_tflops=optional(positive),
    tdp_w=optional(positive),
    sm_count=optional(counts),
    l2_mb=optional(positive),
    boost_ghz=optional(positive),
    architecture=names,
    bf16=st.booleans(),
)
interconnects = st.builds(
    types.Interconnect,
    kind=st.sampled_from(["pcie", "nvlink", "nvswitch", "xgmi"]),
    gb_per_s=positive,
    latency_s=not_negative,
)
node_types = st.builds(
    types.NodeType, name=names, gpu=gpus, gpus=small, interconnect=interconnects, network_gbps=positive
)
some, cheap = st.integers(0, 99), not_negative
offers = st.builds(types.NodeOffer, node=names, price_usd_per_h=cheap, available=some, spot=st.booleans())
regions = st.builds(types.Region, name=names, offers=tuples_of(offers))
links = st.builds(types.Link, source=names, target=names, gbps=positive, rtt_s=not_negative)
slos = st.builds(types.Slo, ttft_s=positive, tpot_s=positive, attainment=st.floats(1e-6, 1))
requests = st.builds(
    types.Request,
    id=names,
    model=names,
    arrival_s=not_negative,
    prompt_tokens=counts,
    max_output_tokens=counts,
    priority=st.integers(-9, 9),
)


@st.composite
def traffics(draw: st.DrawFn) -> types.Traffic:
    weights = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=5))
    shares = [weight / sum(weights) for weight in weights]
    bins = tuple(types.LengthBin(draw(positive), draw(positive), share) for share in shares)
    return types.Traffic(draw(names), draw(not_negative), bins, draw(st.floats(0, 0.99)))


@st.composite
def full_attentions(draw: st.DrawFn) -> FullAttention:
    kv_heads = draw(small)
    flags = {name: draw(st.booleans()) for name in ("bias", "output_gate", "sinks", "output_bias")}
    return FullAttention(
        heads=kv_heads * draw(small),
        kv_heads=kv_heads,
        head_dim=draw(counts),
        v_head_dim=draw(counts),
        window=draw(optional(counts)),
        qk_norm=draw(st.sampled_from(["none", "head", "full"])),
        **flags,
    )


latent_attentions = st.builds(
    LatentAttention,
    heads=counts,
    kv_lora_rank=counts,
    qk_nope_head_dim=counts,
    qk_rope_head_dim=counts,
    v_head_dim=counts,
    q_lora_rank=optional(counts),
)
linear_attentions = st.builds(
    LinearAttention,
    kind=st.sampled_from(get_args(LinearKind)),
    key_heads=counts,
    value_heads=counts,
    key_head_dim=counts,
    value_head_dim=counts,
    conv_kernel=st.integers(0, 4),
    state_bytes_per_element=st.sampled_from([2, 4]),
    gate_rank=st.integers(0, 128),
)
attentions = full_attentions() | latent_attentions | linear_attentions


@st.composite
def moe_ffns(draw: st.DrawFn) -> MoeFfn:
    active = draw(small)
    flags = {name: draw(st.booleans()) for name in ("bias", "router_bias", "shared_gate")}
    extra = draw(st.integers(0, 999))
    return MoeFfn(active + extra, active, draw(counts), draw(st.integers(0, 999)), **flags)


ffns = st.builds(DenseFfn, intermediate=counts) | moe_ffns()
layers = st.builds(Layer, attention=attentions, ffn=ffns)
models = st.builds(
    Model,
    name=names,
    hidden=counts,
    vocab=counts,
    layers=tuples_of(layers, least=1),
    max_context_tokens=counts,
    tied_embeddings=st.booleans(),
    weight_bits=st.sampled_from([4.25, 8.0, 16.0]),
    expert_bits=st.sampled_from([4.25, 8.0, 16.0]),
    kv_bits=st.sampled_from([8.0, 16.0]),
)

node_names = st.sampled_from(["1xL4", "2xL40S", "8xH100"])
stages = st.builds(
    Stage, layers=small, nodes=tuples_of(st.builds(StageNode, node=node_names, tp=small), least=1)
)
layouts = st.builds(Layout, stages=tuples_of(stages, least=1))
replicas = st.builds(PlannedReplica, role=roles, layout=layouts)
capacities = st.builds(
    BucketCapacity,
    bucket=counts,
    prefill_per_s=not_negative,
    decode_per_s=not_negative,
    closed_per_s=not_negative,
    ttft_s=not_negative,
    tpot_s=not_negative,
)
node_counts = st.builds(NodeCount, node=names, count=st.integers(1, 64))
templates = st.builds(
    Template,
    name=names,
    kind=st.sampled_from(get_args(TemplateKind)),
    model=names,
    nodes=tuples_of(node_counts),
    replicas=tuples_of(replicas),
    capacity=tuples_of(capacities),
    confidence=confidences,
)
deployments = st.builds(Deployment, template=names, region=names, count=st.integers(0, 99))
flows = st.builds(
    PlannedFlow,
    model=names,
    bucket=counts,
    prefill_region=names,
    decode_region=names,
    rate_per_s=not_negative,
    codec=st.sampled_from(get_args(types.Codec)),
)
buckets = st.builds(LengthBucket, model=names, bucket=counts, longest_tokens=counts, rate_per_s=not_negative)
shares = st.builds(
    PlannedShare,
    template=names,
    region=names,
    bucket=counts,
    phase=st.sampled_from(["prefill", "decode", "closed"]),
    rate_per_s=not_negative,
)
predictions = st.builds(
    Prediction,
    model=names,
    demand_per_s=not_negative,
    capacity_per_s=not_negative,
    ttft_s=not_negative,
    tpot_s=not_negative,
    confidence=confidences,
)
plans = st.builds(
    Plan,
    strategy=names,
    templates=tuples_of(templates),
    deployments=tuples_of(deployments),
    buckets=tuples_of(buckets),
    shares=tuples_of(shares),
    flows=tuples_of(flows),
    predictions=tuples_of(predictions),
    cost_usd_per_h=not_negative,
    gap=not_negative,
    fraction=st.floats(0, 1),
)


@st.composite
def routes(draw: st.DrawFn) -> Route:
    cuts = sorted(draw(st.sets(st.integers(1, 10**6), max_size=4)))
    bounds = [0, *cuts]
    stops = [*cuts, None]
    replica = st.sampled_from(["a", "b", "c"])
    return Route(tuple(Segment(draw(replica), s, e) for s, e in zip(bounds, stops, strict=True)))


anything = st.one_of(
    gpus, node_types, regions, links, slos, traffics(), models, layouts, templates, plans, routes()
)
"""Any value that has a JSON form."""
