"""What a plan must do: the models and their demand, and the fleet it may draw on.

Demand comes in buckets of prompt lengths. A bucket is cut wherever the prefill work of its longest prompt
would exceed twice that of its shortest, so that no bucket hides a factor of two; each keeps the mean lengths
of its requests, which preserve the tokens that pass through.
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

WORK_RATIO = 2.0
HEADROOM = 0.8  # Share of its time a replica is planned to be busy.
SHARE_LEFT = 1e-6  # Of requests that no class was named for; less is none.
CODECS: tuple[Codec, ...] = ("fp16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class BucketDemand:
    model: str
    bucket: int
    input_tokens: int  # Mean prompt, rounded up.
    longest_tokens: int
    output_tokens: int
    cached_tokens: int  # Of a mean prompt, those that a prefix cache already holds.
    rate_per_s: float
    kv_bytes: float  # What a mean prompt leaves to be handed over.
    promised: bool = True
    """False for the longest prompts beyond the attained share: TTFT need not hold for them."""
    firm: bool = False
    """Must be met whole, also where of the rest only a fraction can be (`plan.assemble.codecs`)."""

    @property
    def new_tokens(self) -> int:
        return max(1, self.input_tokens - self.cached_tokens)


@dataclass(frozen=True, slots=True)
class ClassDemand:
    name: str
    share: float
    slo: Slo  # Limits that keep it, an E2E objective included.


@dataclass(frozen=True, slots=True)
class UserOrigin:
    """Users at one place: their share of a model's requests, and how far the regions are."""

    name: str
    share: float
    rtt_s: tuple[tuple[str, float], ...]  # Region to seconds.

    def to(self, region: str) -> float:
        return next((rtt_s for name, rtt_s in self.rtt_s if name == region), inf)


@dataclass(frozen=True, slots=True)
class ModelDemand:
    name: str
    model: Model
    slo: Slo  # Limits that keep what was promised, an E2E objective included.
    buckets: tuple[BucketDemand, ...]
    profiles: tuple[Profile, ...] = ()  # Measured step times of this model, for the GPUs that have them.
    terms: ModelTerms = NO_TERMS  # What its owner asks of the plan beside that.
    classes: tuple[ClassDemand, ...] = ()
    """Classes of its requests, where there are several; `slo` is the strictest of all."""
    origins: tuple[UserOrigin, ...] = ()
    """Where its users are; `slo` does not know of it (`strategies.variants`)."""
    sure: float = 0.5
    """With what probability steps take no longer than is planned with; 0.5: as long as they are expected to."""
    formats: tuple[Format, ...] = ()
    """Which its weights may be in, `model`'s among them; empty: as they are (`strategies.variants`)."""

    @property
    def rate_per_s(self) -> float:
        return sum(demand.rate_per_s for demand in self.buckets)

    def far_s(self, region: str) -> float:
        """From the farthest of its users to a region and back; nobody knows who is sent where."""
        return max((origin.to(region) for origin in self.origins if origin.share > 0), default=0.0)

    def mean_far_s(self, region: str) -> float:
        """The same of a mean user."""
        return sum(origin.share * origin.to(region) for origin in self.origins if origin.share > 0)

    def without_class(self, name: str) -> ModelDemand:
        """Its requests as they are, held to what the other classes were promised."""
        left = tuple(class_demand for class_demand in self.classes if class_demand.name != name)
        return self if not left else replace(self, classes=left, slo=strictest([each.slo for each in left]))

    def in_format(self, weights: Format) -> ModelDemand:
        return replace(self, model=in_format(self.model, weights), formats=(weights,))

    @property
    def variants(self) -> tuple[ModelDemand, ...]:
        return tuple(self.in_format(item) for item in self.formats) or (self,)

    @property
    def key(self) -> str:
        """What its templates are kept under: those of two formats have the same names."""
        return f"{self.name} in {self.model.weights_are}" if self.formats else self.name

    @property
    def tokens_per_s(self) -> float:
        return sum(d.rate_per_s * (d.input_tokens + d.output_tokens) for d in self.buckets)


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    demands: tuple[ModelDemand, ...]
    regions: tuple[Region, ...]
    nodes: tuple[NodeType, ...]
    links: tuple[Link, ...] = ()
    headroom: float = HEADROOM
    init_penalty: float = 0.0  # CORAL's K: start-up time of a node over the interval between two plans.
    budget_usd_per_h: float | None = None
    pool: Pool | None = None  # The machines behind the regions, by name, where they are known.
    codecs: tuple[Codec, ...] = (LOSSLESS,)
    """In which KV may cross the network, the most exact first; a plan takes the first that costs no more."""
    engine: EngineKind = UNLIMITED  # What the engines that serve can do; templates beyond that are not made.
    complexity_share: float = 0.0
    """Of its rent, what each further moving part of a copy counts for where plans are compared (`term_rows`)."""
    max_group_gpus: int | None = None
    """Of a pool's GPUs, that serve together: small groups lose less with one."""

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
        """The problem with models' weights settled, as a plan has them."""
        chosen = dict(formats)
        if not any(demand.formats and demand.name in chosen for demand in self.demands):
            return self
        named = (chosen.get(demand.name) if demand.formats else None for demand in self.demands)
        demands = (
            demand if n is None else demand.in_format(n)
            for demand, n in zip(self.demands, named, strict=True)
        )
        return replace(self, demands=tuple(demands))

    def with_nodes(self, count: Callable[[str, NodeOffer], int]) -> PlanningProblem:
        """The problem with as many nodes of a region's offer as this says."""

        def counted(region: Region) -> Region:
            return replace(
                region, offers=tuple(replace(o, available=count(region.name, o)) for o in region.offers)
            )

        return replace(self, regions=tuple(map(counted, self.regions)))

    def node(self, name: str) -> NodeType:
        return self.by_name[name]

    def ask(self, model: str) -> ModelDemand | None:
        """What is asked of a model; None where nothing is."""
        return next((demand for demand in self.demands if demand.name == model), None)

    @property
    def by_name(self) -> Mapping[str, NodeType]:
        return {node.name: node for node in self.nodes}

    @property
    def offered(self) -> tuple[NodeType, ...]:
        names = {o.node for region in self.regions for o in region.offers if o.available > 0}
        return tuple(node for node in self.nodes if node.name in names)


def strictest(slos: Sequence[Slo]) -> Slo:
    """What keeps all of them: requests of all classes share replicas, and a replica's steps are everybody's."""
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
    """Cut a model's traffic into buckets. An E2E objective makes the other two tighter (`Slo.within_e2e`).

    `promises` has the objective of each class that is not the model's, `rtt_s` how far regions are from each origin.
    """

    def limits(slo: Slo) -> Slo:
        return slo.within_e2e(promised_output(traffic, slo.attainment))

    shares = [(item, share) for item, share in traffic.classes if share > 0]
    classes = [ClassDemand(item, share, limits((promises or {}).get(item, slo))) for item, share in shares]
    rest = 1.0 - sum(share for _, share in shares)
    if rest > SHARE_LEFT:
        classes.append(ClassDemand(DEFAULT_CLASS, rest, limits((promises or {}).get(DEFAULT_CLASS, slo))))
    kept = strictest([class_demand.slo for class_demand in classes]) if shares else limits(slo)
    origins = tuple(UserOrigin(item, share, (rtt_s or {}).get(item, ())) for item, share in traffic.origins)
    demands = _promised(demands_of(name, model, traffic), kept.attainment)
    return ModelDemand(
        name, model, kept, demands, terms=terms, classes=tuple(classes) if shares else (), origins=origins
    )


def promised_output(traffic: Traffic, attainment: float) -> float:
    """Tokens of the longest answer that is among the attained share."""
    reached = 0.0
    bins = sorted(traffic.lengths, key=lambda each: each.output_tokens)
    for length_bin in bins:
        reached += length_bin.share
        if reached >= attainment - 1e-9:
            return length_bin.output_tokens
    return bins[-1].output_tokens


def demands_of(
    name: str, model: Model, traffic: Traffic, *, work_ratio: float = WORK_RATIO
) -> tuple[BucketDemand, ...]:
    """Buckets of a model's traffic, shortest prompts first."""
    bins = sorted((b for b in traffic.lengths if b.share > 0), key=lambda b: b.input_tokens)
    works = prefill_work(model, np.array([b.input_tokens for b in bins]))
    groups: list[list[LengthBin]] = []
    first = 0.0
    for length_bin, work in zip(bins, works, strict=True):
        if not groups or work > work_ratio * first:
            groups.append([])
            first = float(work)
        groups[-1].append(length_bin)
    return tuple(_demand(name, model, traffic, i, group) for i, group in enumerate(groups))


def _promised(demands: tuple[BucketDemand, ...], attainment: float) -> tuple[BucketDemand, ...]:
    """An attainment of 0.9 lets the longest tenth of requests wait: their buckets lose the TTFT promise."""
    total = sum(demand.rate_per_s for demand in demands)
    kept, tail = list(demands), 0.0
    for place in range(len(demands) - 1, 0, -1):
        tail += demands[place].rate_per_s
        if tail > (1.0 - attainment) * total * (1.0 + 1e-9):
            break
        kept[place] = replace(demands[place], promised=False)
    return tuple(kept)


def prefill_work(model: Model, tokens: Floats) -> Floats:
    return step_sums(model, steps(np.asarray(tokens, np.float64))).flops


def _demand(name: str, model: Model, traffic: Traffic, index: int, group: list[LengthBin]) -> BucketDemand:
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
    return problem.with_nodes(lambda r, o: available if (r, o.node) == (region, node) else o.available)
