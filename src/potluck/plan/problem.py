"""The planning problem: the models with their demand, and the fleet that a plan may rent.

Demand is divided into buckets of prompt lengths. A new bucket begins where the prefill work of a prompt would exceed
twice that of the bucket's shortest prompt. Each bucket keeps the mean lengths of its requests, so that total tokens
are preserved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from potluck.core.errors import InputError
from potluck.core.values.engine_abilities import UNLIMITED, EngineKind
from potluck.core.values.kv import LOSSLESS
from potluck.core.values.layout import Pool
from potluck.core.values.model import Format, Model, in_format
from potluck.core.values.service import NO_TERMS, ModelTerms
from potluck.core.values.types import (
    DEFAULT_CLASS,
    Codec,
    LengthBin,
    Link,
    NodeOffer,
    NodeType,
    Region,
    Slo,
    Traffic,
)
from potluck.perf.memory import kv_bytes
from potluck.perf.operators.layers import step_sums
from potluck.perf.step_timer import Floats, steps
from potluck.perf.timers.profile import Profile

MAX_WORK_RATIO = 2.0  # Prefill work of a bucket's longest prompt relative to its shortest.
HEADROOM = 0.8  # Largest planned utilization of a replica.
MIN_DEFAULT_CLASS_SHARE = 1e-6  # Smaller shares of requests without a class are rounding errors.
CODECS: tuple[Codec, ...] = ("fp16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class BucketDemand:
    """Demand of one model with prompts of about one length."""

    model: str
    bucket: int
    input_tokens: int  # Mean prompt, rounded up.
    longest_tokens: int
    output_tokens: int
    cached_tokens: int  # Mean prompt tokens that the prefix cache holds.
    rate_per_s: float
    kv_bytes: float  # KV of a mean prompt, to be transferred after prefill.
    promised: bool = True
    """False for the longest prompts beyond the attainment: the TTFT objective excludes them."""
    firm: bool = False
    """Must be met whole, even where only a fraction of the other demand can be (`plan.assemble.codecs`)."""

    @property
    def new_tokens(self) -> int:
        """Mean prompt tokens that must be computed."""
        return max(1, self.input_tokens - self.cached_tokens)


@dataclass(frozen=True, slots=True)
class ClassDemand:
    """A request class of a model: its share of the requests, and its SLO."""

    name: str
    share: float
    slo: Slo  # TTFT and TPOT limits that also meet an E2E objective.


@dataclass(frozen=True, slots=True)
class UserOrigin:
    """Users at one location: their share of a model's requests, and their round-trip times to regions."""

    name: str
    share: float
    rtt_s: tuple[tuple[str, float], ...]  # Region to seconds.

    def to(self, region: str) -> float:
        """Round-trip time to a region in seconds; infinite where unknown."""
        return next((rtt_s for name, rtt_s in self.rtt_s if name == region), inf)


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """One model with its traffic by bucket, its SLO, and the terms that its plan must keep."""

    name: str
    model: Model
    slo: Slo  # TTFT and TPOT limits that also meet an E2E objective.
    buckets: tuple[BucketDemand, ...]
    profiles: tuple[Profile, ...] = ()  # Measured step times of this model, for the GPUs that have them.
    terms: ModelTerms = NO_TERMS  # Redundancy, placement and other requirements beside the SLO.
    classes: tuple[ClassDemand, ...] = ()
    """Classes of its requests, where there are several; `slo` is the strictest of all."""
    origins: tuple[UserOrigin, ...] = ()
    """Locations of its users; `slo` does not include their round trips (`strategies.variants`)."""
    sure: float = 0.5
    """Probability that steps take no longer than planned; 0.5: planned with expected step times."""
    formats: tuple[Format, ...] = ()
    """Allowed weight formats, including `model`'s; empty: the checkpoint's own (`strategies.variants`)."""

    @property
    def rate_per_s(self) -> float:
        return sum(bucket.rate_per_s for bucket in self.buckets)

    def max_rtt_s(self, region: str) -> float:
        """Round-trip time from the farthest users to a region, as routing may send any user there."""
        return max((origin.to(region) for origin in self.origins if origin.share > 0), default=0.0)

    def mean_rtt_s(self, region: str) -> float:
        """Mean round-trip time of users to a region."""
        return sum(origin.share * origin.to(region) for origin in self.origins if origin.share > 0)

    def without_class(self, name: str) -> ModelDemand:
        """The same requests under the SLOs of the other classes alone."""
        others = tuple(class_demand for class_demand in self.classes if class_demand.name != name)
        return self if not others else replace(self, classes=others, slo=strictest([c.slo for c in others]))

    def in_format(self, weights: Format) -> ModelDemand:
        """The demand with the model's weights in this format."""
        return replace(self, model=in_format(self.model, weights), formats=(weights,))

    @property
    def variants(self) -> tuple[ModelDemand, ...]:
        """The demand in each allowed weight format."""
        return tuple(self.in_format(item) for item in self.formats) or (self,)

    @property
    def key(self) -> str:
        """Cache key of its templates, which includes the weight format."""
        return f"{self.name} in {self.model.weights_are}" if self.formats else self.name

    @property
    def tokens_per_s(self) -> float:
        """Prompt and answer tokens per second."""
        return sum(d.rate_per_s * (d.input_tokens + d.output_tokens) for d in self.buckets)


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """Models with their demand, and the fleet, links and rules to plan for."""

    demands: tuple[ModelDemand, ...]
    regions: tuple[Region, ...]
    nodes: tuple[NodeType, ...]
    links: tuple[Link, ...] = ()
    headroom: float = HEADROOM
    init_penalty: float = 0.0  # CORAL's K: start-up time of a node over the interval between two plans.
    budget_usd_per_h: float | None = None
    pool: Pool | None = None  # The named machines of the regions, where the spec lists them.
    codecs: tuple[Codec, ...] = (LOSSLESS,)
    """Allowed KV codecs, most exact first; a plan takes the first one that costs no more than the others."""
    engine: EngineKind = UNLIMITED  # Limits the templates to what the engine can run.
    complexity_share: float = 0.0
    """Complexity penalty per component of a copy, as a share of its rent, for comparing plans (`term_rows`)."""
    max_group_gpus: int | None = None
    """Largest group of a pool's GPUs; smaller groups lose less when a GPU fails."""

    def __post_init__(self) -> None:
        if not self.demands:
            raise InputError("models", "a plan needs at least one model")
        if not any(offer.available for region in self.regions for offer in region.offers):
            raise InputError("fleet", "has no GPUs: every node's `available` is 0")
        if not 0 < self.headroom <= 1:
            raise InputError("headroom", f"must be above 0 and at most 1, is {self.headroom}")
        if not self.codecs or list(self.codecs) != [codec for codec in CODECS if codec in self.codecs]:
            raise InputError("codecs", f"must be some of {', '.join(CODECS)}, in this order")

    def in_formats(self, formats: Sequence[tuple[str, Format]]) -> PlanningProblem:
        """The problem with each model's weights in the format that a plan chose."""
        chosen = dict(formats)
        if not any(demand.formats and demand.name in chosen for demand in self.demands):
            return self
        chosen_formats = (chosen.get(demand.name) if demand.formats else None for demand in self.demands)
        demands = (
            demand if weights is None else demand.in_format(weights)
            for demand, weights in zip(self.demands, chosen_formats, strict=True)
        )
        return replace(self, demands=tuple(demands))

    def with_nodes(self, count: Callable[[str, NodeOffer], int]) -> PlanningProblem:
        """The problem with the number of available nodes that `count` returns for each offer."""

        def with_counts(region: Region) -> Region:
            return replace(
                region, offers=tuple(replace(o, available=count(region.name, o)) for o in region.offers)
            )

        return replace(self, regions=tuple(map(with_counts, self.regions)))

    def node(self, name: str) -> NodeType:
        return self.by_name[name]

    def demand_of(self, model: str) -> ModelDemand | None:
        """The demand of a model; None where the problem does not have it."""
        return next((demand for demand in self.demands if demand.name == model), None)

    @property
    def by_name(self) -> Mapping[str, NodeType]:
        return {node.name: node for node in self.nodes}

    @property
    def offered(self) -> tuple[NodeType, ...]:
        """Node types with available nodes in some region."""
        names = {o.node for region in self.regions for o in region.offers if o.available > 0}
        return tuple(node for node in self.nodes if node.name in names)


def strictest(slos: Sequence[Slo]) -> Slo:
    """The SLO that meets all of them, as requests of all classes share replicas and their steps."""
    result = slos[0]
    for slo in slos[1:]:
        result = result.stricter(slo)
    return result


def model_demand(
    name: str,
    model: Model,
    slo: Slo,
    traffic: Traffic,
    terms: ModelTerms = NO_TERMS,
    *,
    promises: Mapping[str, Slo] | None = None,
    rtt_s: Mapping[str, tuple[tuple[str, float], ...]] | None = None,
) -> ModelDemand:
    """The demand of a model's traffic, divided into buckets. An E2E objective tightens the other two.

    `promises` has the SLOs of classes with their own, `rtt_s` the round-trip times from each origin to the regions.
    """

    def limits(slo: Slo) -> Slo:
        return slo.within_e2e(promised_output(traffic, slo.attainment))

    shares = [(class_name, share) for class_name, share in traffic.classes if share > 0]
    classes = [
        ClassDemand(class_name, share, limits((promises or {}).get(class_name, slo)))
        for class_name, share in shares
    ]
    default_share = 1.0 - sum(share for _, share in shares)
    if default_share > MIN_DEFAULT_CLASS_SHARE:
        classes.append(
            ClassDemand(DEFAULT_CLASS, default_share, limits((promises or {}).get(DEFAULT_CLASS, slo)))
        )
    strictest_slo = strictest([class_demand.slo for class_demand in classes]) if shares else limits(slo)
    origins = tuple(
        UserOrigin(class_name, share, (rtt_s or {}).get(class_name, ()))
        for class_name, share in traffic.origins
    )
    buckets = _without_ttft_tail(buckets_of(name, model, traffic), strictest_slo.attainment)
    return ModelDemand(
        name,
        model,
        strictest_slo,
        buckets,
        terms=terms,
        classes=tuple(classes) if shares else (),
        origins=origins,
    )


def promised_output(traffic: Traffic, attainment: float) -> float:
    """Tokens of the longest answer within the attained share of requests."""
    reached = 0.0
    bins = sorted(traffic.lengths, key=lambda length_bin: length_bin.output_tokens)
    for length_bin in bins:
        reached += length_bin.share
        if reached >= attainment - 1e-9:
            return length_bin.output_tokens
    return bins[-1].output_tokens


def buckets_of(
    name: str, model: Model, traffic: Traffic, *, work_ratio: float = MAX_WORK_RATIO
) -> tuple[BucketDemand, ...]:
    """Buckets of a model's traffic, shortest prompts first."""
    bins = sorted((b for b in traffic.lengths if b.share > 0), key=lambda b: b.input_tokens)
    prefill_flops_of_bins = prefill_work(model, np.array([b.input_tokens for b in bins]))
    groups: list[list[LengthBin]] = []
    first_flops = 0.0
    for length_bin, prefill_flops in zip(bins, prefill_flops_of_bins, strict=True):
        if not groups or prefill_flops > work_ratio * first_flops:
            groups.append([])
            first_flops = float(prefill_flops)
        groups[-1].append(length_bin)
    return tuple(_bucket(name, model, traffic, i, group) for i, group in enumerate(groups))


def _without_ttft_tail(buckets: tuple[BucketDemand, ...], attainment: float) -> tuple[BucketDemand, ...]:
    """Exclude the buckets of the longest requests from the TTFT objective: with attainment 0.9, a tenth of them."""
    total = sum(bucket.rate_per_s for bucket in buckets)
    marked, tail_per_s = list(buckets), 0.0
    for index in range(len(buckets) - 1, 0, -1):
        tail_per_s += buckets[index].rate_per_s
        if tail_per_s > (1.0 - attainment) * total * (1.0 + 1e-9):
            break
        marked[index] = replace(buckets[index], promised=False)
    return tuple(marked)


def prefill_work(model: Model, tokens: Floats) -> Floats:
    """FLOPs to prefill prompts of these lengths."""
    return step_sums(model, steps(np.asarray(tokens, np.float64))).flops


def _bucket(name: str, model: Model, traffic: Traffic, index: int, group: list[LengthBin]) -> BucketDemand:
    """The bucket of a group of length bins."""
    share = sum(b.share for b in group)
    mean_in = sum(b.share * b.input_tokens for b in group) / share
    mean_out = sum(b.share * b.output_tokens for b in group) / share
    # A request of fewer tokens than one is a bin's mean; at least one token is always computed.
    input_tokens, output_tokens = max(1, ceil(mean_in - 1e-6)), max(1, ceil(mean_out - 1e-6))
    cached = min(int(mean_in * traffic.prefix_hit_share), input_tokens - 1)
    return BucketDemand(
        name,
        index,
        input_tokens,
        max(1, ceil(max(b.input_tokens for b in group))),
        output_tokens,
        cached,
        traffic.rate_per_s * share,
        float(kv_bytes(model, float(input_tokens))),
    )


def without_nodes(problem: PlanningProblem, region: str, node: str, available: int) -> PlanningProblem:
    """The problem with `available` nodes of one type in one region."""
    return problem.with_nodes(lambda r, o: available if (r, o.node) == (region, node) else o.available)
