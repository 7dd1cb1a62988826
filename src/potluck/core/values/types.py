"""Hardware, places, objectives and traffic: the nouns that every other package shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import repeat
from math import isfinite
from typing import Literal, NamedTuple, Self

from potluck.core.errors import InputError

Role = Literal["prefill", "decode", "mixed"]
Codec = Literal["fp16", "int8", "int4"]
EngineName = Literal["vllm", "embedded", "openai", "any"]
"""Kinds of engines (`core.values.engine_abilities`); `any`: planned with none of their limits."""
DEFAULT_TENANT, DEFAULT_CLASS = "default", "standard"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its maker describes it. Rates are dense (no structured sparsity), per GPU."""

    name: str
    fp16_tflops: float
    """bf16/fp16 matrix rate with FP32 accumulation."""
    memory_gb: float
    """Decimal gigabytes, as vendors print them."""
    bandwidth_gb_per_s: float
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    """Of units that multiply 4-bit floats; None: it has none."""
    tdp_w: float | None = None
    sm_count: int | None = None
    """Streaming multiprocessors (compute units on AMD); sets how work quantises into waves."""
    l2_mb: float | None = None
    boost_ghz: float | None = None
    architecture: str = "unknown"
    compute_capability: float | None = None
    """NVIDIA's number for the instruction set (8.0, 8.6, ...); kernels are chosen by it."""
    bf16: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and field.name != "bf16":
                positive(f"gpu {self.name}: {field.name}", value)

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9


@dataclass(frozen=True, slots=True)
class Interconnect:
    """How the GPUs inside one node talk: per-GPU bandwidth in one direction, and a start-up time."""

    kind: Literal["none", "pcie", "nvlink", "nvswitch", "xgmi"]
    gb_per_s: float
    latency_s: float
    domain: int | None = None
    """How many GPUs it joins directly, each reading the others' memory; more go through the host. None: all."""

    def __post_init__(self) -> None:
        if self.domain is not None and self.domain < 1:
            raise InputError(f"interconnect {self.kind}: domain", "must be at least 1")
        if self.kind != "none":
            positive(f"interconnect {self.kind}: gb_per_s", self.gb_per_s)
        not_negative(f"interconnect {self.kind}: latency_s", self.latency_s)


@dataclass(frozen=True, slots=True)
class NodeType:
    """A machine one can rent: `gpus` of one GPU type, how they are linked, and its network card."""

    name: str
    gpu: Gpu
    gpus: int
    interconnect: Interconnect
    network_gbps: float
    """Bandwidth to other nodes, one direction, whole node."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise InputError(f"node {self.name}: gpus", "must be at least 1")
        if self.gpus > 1 and self.interconnect.kind == "none":
            raise InputError(f"node {self.name}: interconnect", "a node with several GPUs needs one")
        positive(f"node {self.name}: network_gbps", self.network_gbps)


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """A node type that a region rents: at what price, and how many can be had."""

    node: str
    price_usd_per_h: float
    available: int
    spot: bool = False
    preemptions_per_h: float = 0.0
    """How often one of these is taken away, per hour that it is held."""
    reserved: int = 0
    """So many are paid for already, and cost nothing more where they are to be had."""
    zone: str = ""
    """What these go down with, within the region; empty: nobody said."""

    def __post_init__(self) -> None:
        for name in ("reserved", "preemptions_per_h", "price_usd_per_h", "available"):
            not_negative(f"{self.node}: {name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class Region:
    """A place with fast links inside it; templates never span two."""

    name: str
    offers: tuple[NodeOffer, ...]
    head_usd_per_h: float = 0.0
    """What is paid while anything runs there beside its nodes: a head node, a control plane."""
    storage_usd_per_gb_month: float = 0.0
    """For the weights of each model that runs there."""

    def offer(self, node: str) -> NodeOffer | None:
        return next((offer for offer in self.offers if offer.node == node), None)


@dataclass(frozen=True, slots=True)
class Link:
    source: str
    target: str
    gbps: float
    rtt_s: float
    egress_usd_per_gb: float = 0.0

    def __post_init__(self) -> None:
        positive(f"link {self.source}->{self.target}: gbps", self.gbps)
        not_negative(f"link {self.source}->{self.target}: rtt_s", self.rtt_s)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a user was promised, and for which share of requests it must hold."""

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9
    e2e_s: float | None = None
    """From a request's arrival to the last token of its answer; None: nothing was said of it."""

    def __post_init__(self) -> None:
        positive("slo: ttft_s", self.ttft_s)
        positive("slo: tpot_s", self.tpot_s)
        if not 0 < self.attainment <= 1:
            raise InputError("slo: attainment", f"must be above 0 and at most 1, is {self.attainment}")
        if self.e2e_s is not None:
            positive("slo: e2e_s", self.e2e_s)

    def stricter(self, other_slo: Slo) -> Slo:
        known = [e2e_s for e2e_s in (self.e2e_s, other_slo.e2e_s) if e2e_s is not None]
        ttft_s, tpot_s = min(self.ttft_s, other_slo.ttft_s), min(self.tpot_s, other_slo.tpot_s)
        return Slo(ttft_s, tpot_s, max(self.attainment, other_slo.attainment), min(known, default=None))

    def kept(self, ttft_s: float, tpot_s: float, e2e_s: float) -> bool:
        """Whether an answer with these times is within all of it."""
        if ttft_s > self.ttft_s or tpot_s > self.tpot_s:
            return False
        return self.e2e_s is None or e2e_s <= self.e2e_s

    def scaled(self, factor: float) -> Slo:
        """All times so many times as long: an SLO scale."""
        positive("slo: scale", factor)
        if factor == 1.0:
            return self
        e2e_s = None if self.e2e_s is None else self.e2e_s * factor
        return Slo(self.ttft_s * factor, self.tpot_s * factor, self.attainment, e2e_s)

    def within_e2e(self, output_tokens: float) -> Slo:
        """TTFT and TPOT tightened by one factor so that both keep E2E for so long an answer, each phase by itself."""
        if self.e2e_s is None:
            return self
        whole_s = self.ttft_s + max(0.0, output_tokens - 1.0) * self.tpot_s
        if whole_s <= self.e2e_s:
            return self
        factor = self.e2e_s / whole_s
        return Slo(self.ttft_s * factor, self.tpot_s * factor, self.attainment, self.e2e_s)


@dataclass(frozen=True, slots=True)
class LengthBin:
    """A share of the requests with (about) these lengths."""

    input_tokens: float
    output_tokens: float
    share: float

    def __post_init__(self) -> None:
        positive("lengths: input_tokens", self.input_tokens)
        positive("lengths: output_tokens", self.output_tokens)
        if not self.share >= 0:
            raise InputError("lengths: share", f"must not be negative, is {self.share}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests for one model: how many a second, how long, how much of a prompt is already cached."""

    model: str
    rate_per_s: float
    lengths: tuple[LengthBin, ...]
    prefix_hit_share: float = 0.0
    classes: tuple[tuple[str, float], ...] = ()
    """Classes of its requests and the share of each; the rest is of the default one."""
    origins: tuple[tuple[str, float], ...] = ()
    """Where its users are, and the share of each; empty: nobody said."""

    def __post_init__(self) -> None:
        for what, shares in (("classes", self.classes), ("origins", self.origins)):
            if any(not share >= 0 for _, share in shares) or sum(share for _, share in shares) > 1 + 1e-6:
                why = "shares must not be negative, nor above 1 in all"
                raise InputError(f"traffic {self.model}: {what}", why)
        not_negative(f"traffic {self.model}: rate_per_s", self.rate_per_s)
        if not self.lengths:
            raise InputError(f"traffic {self.model}: lengths", "needs at least one bin")
        total = sum(length.share for length in self.lengths)
        if abs(total - 1.0) > 1e-6:
            raise InputError(f"traffic {self.model}: lengths", f"shares must add up to 1, not {total:g}")
        if not 0 <= self.prefix_hit_share < 1:
            raise InputError(f"traffic {self.model}: prefix_hit_share", "must be at least 0 and below 1")

    @property
    def mean_input_tokens(self) -> float:
        return sum(length.input_tokens * length.share for length in self.lengths)

    @property
    def mean_output_tokens(self) -> float:
        return sum(length.output_tokens * length.share for length in self.lengths)


class Request(NamedTuple):
    """One request as the policies see it: a named tuple, like the events, as it is made by the million."""

    id: str
    model: str
    arrival_s: float
    prompt_tokens: int
    max_output_tokens: int
    priority: int = 0
    """Higher goes first."""
    deadline_s: float | None = None
    """When nobody waits for the answer any more."""
    blocks: tuple[int, ...] = ()
    """Chained hashes of the prompt's prefix blocks, where prefixes may be shared."""
    tenant: str = DEFAULT_TENANT
    """Whose share of the fleet it uses."""
    request_class: str = DEFAULT_CLASS
    """What it allows, by the name of a class (`core/values/service.py`)."""
    exact: bool = False
    """Whether its KV must cross as it is, though the plan allows a lossy codec."""
    grammar: bool = False
    """Whether the replica that decodes it compiles a grammar of the client's, which may be what ends that replica."""

    @classmethod
    def many(cls, rows: Iterable[tuple[object, ...]]) -> Iterator[Self]:
        """Requests of rows; one by one it takes seven times as long."""
        return map(tuple.__new__, repeat(cls), rows)


def not_negative(field: str, value: float) -> None:
    if not (isfinite(value) and value >= 0):
        raise InputError(field, f"must not be negative, is {value}")


def positive(field: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise InputError(field, f"must be positive, is {value}")
