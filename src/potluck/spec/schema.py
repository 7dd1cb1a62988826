"""What may be written in `potluck.yaml`: names, shapes and ranges. Meaning comes later, in `resolve`.

Ranges are wide: they refuse slips of the unit or the finger (a price of 3e9, a TTFT of a month), not
unusual hardware. Lists may be empty here, since broken entries are cut out before the rest is resolved;
`resolve` complains of those that were empty from the start. Each mapping remembers where it stood (`at`),
so that later complaints find their line.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
    model_validator,
)

from potluck.core.routing.balance import BALANCES
from potluck.core.scaling.autoscaler import SCALERS
from potluck.core.state.policy import Policy
from potluck.core.values.model import ChosenFormat
from potluck.core.values.service import FailureDomain, RequestClass
from potluck.core.values.types import Codec, Gpu, Slo
from potluck.spec.spec_problems import Loc

AT = "@at"
"""Key under which the loader puts a mapping's location before it is validated."""

MAX_TOKENS = 10_000_000
MOST = 1e9
"""Of any number of a GPU, a class or the policy: more is a slip."""

Name = Annotated[str, Field(min_length=1, max_length=200)]
PathText = Annotated[str, Field(min_length=1, max_length=4096)]
Tokens = Annotated[float, Field(ge=1, le=MAX_TOKENS)]


class Written(BaseModel):
    """Base of every mapping a person writes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    at: Loc = Field(default=(), validation_alias=AT, exclude=True, repr=False)


class SloIn(Written):
    """What users were promised."""

    ttft_ms: float = Field(gt=0, le=3_600_000, validation_alias=AliasChoices("ttft_ms", "ttft"))
    tpot_ms: float = Field(gt=0, le=600_000, validation_alias=AliasChoices("tpot_ms", "tpot"))
    e2e_ms: float | None = Field(
        default=None, gt=0, le=36_000_000, validation_alias=AliasChoices("e2e_ms", "e2e")
    )
    attainment: float = Field(default=0.9, gt=0, le=1)

    def value(self) -> Slo:
        e2e_s = None if self.e2e_ms is None else self.e2e_ms / 1000
        return Slo(self.ttft_ms / 1000, self.tpot_ms / 1000, self.attainment, e2e_s)


T = TypeVar("T")


def derived(called: str, kind: type[Any], unset: bool = False, **shapes: tuple[Any, Any]) -> type[Written]:
    """A mapping with the fields of a dataclass, each written once; `shapes` differ in (type, default).

    With `unset` a field may be left open, which is not the same as writing its default. Numbers are at most MOST;
    what else the dataclass refuses, it says itself when it is made (`resolve`).
    """
    hints, made = get_type_hints(kind), dict[str, Any]()
    for field in fields(kind):
        hint = hints[field.name]
        if {float, int} & {hint, *get_args(hint)}:
            hint = Annotated[hint, Field(le=MOST)]
        default = ... if field.default is MISSING else field.default
        made[field.name] = shapes.get(field.name) or ((hint | None, None) if unset else (hint, default))
    return create_model(called, __base__=Written, __doc__=kind.__doc__, __module__=__name__, **made)


class TenantIn(Written):
    """Somebody who shares the fleet."""

    name: Name
    weight: float = Field(default=1.0, gt=0, le=1e6)


class SharingIn(Written):
    """Tenants that use each other's cached prefixes."""

    tenants: Literal["all"] | list[Name]
    models: Literal["all"] | list[Name] = "all"


if TYPE_CHECKING:

    class GpuIn(Written):
        name: str

    class ClassIn(Written):
        name: str
        slo: SloIn | None

    class PolicyIn(Written):
        tenants: list[TenantIn]
        classes: list[ClassIn]
        shared_prefixes: list[SharingIn]

else:
    GpuIn = derived("GpuIn", Gpu, name=(Name, ...), architecture=(Name, "unknown"))
    ClassIn = derived("ClassIn", RequestClass, name=(Name, ...), slo=(SloIn | None, None))
    lists = {"tenants": TenantIn, "classes": ClassIn, "shared_prefixes": SharingIn}
    rules = {"balance": BALANCES, "scaling": SCALERS}
    shapes = {n: (list[k], Field(default_factory=list)) for n, k in lists.items()}
    shapes |= {n: (Literal[tuple(known)] | None, None) for n, known in rules.items()}
    PolicyIn = derived("PolicyIn", Policy, True, **shapes)


class LognormalIn(Written):
    """A lognormal law cut to [min, max] tokens."""

    mu: float = Field(ge=0, le=20)
    sigma: float = Field(ge=0.001, le=4)
    min: Tokens = 1.0
    max: Tokens = float(MAX_TOKENS)

    @model_validator(mode="after")
    def _ordered(self) -> LognormalIn:
        if self.min >= self.max:
            raise ValueError(f"min must be below max, {self.min:g} is not below {self.max:g}")
        return self


FORMS = "{mean}, {mean, cv}, {p50, p99}, {lognormal}, {uniform} or {values, weights}"


class LengthsIn(Written):
    """One distribution of token counts, in one of the FORMS."""

    mean: Tokens | None = None
    cv: float | None = Field(default=None, ge=0, le=50)
    p50: Tokens | None = None
    p99: Tokens | None = None
    lognormal: LognormalIn | None = None
    uniform: list[Tokens] | None = Field(default=None, min_length=2, max_length=2)
    values: list[Tokens] | None = Field(default=None, min_length=1)
    weights: list[Annotated[float, Field(ge=0, le=1e12)]] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> LengthsIn:
        given = frozenset(self.model_fields_set - {"at"})
        allowed = (
            {"mean"},
            {"mean", "cv"},
            {"p50", "p99"},
            {"lognormal"},
            {"uniform"},
            {"values"},
            {"values", "weights"},
        )
        if given not in [frozenset(form) for form in allowed]:
            written = ", ".join(sorted(given)) or "nothing"
            raise ValueError(f"must be one of {FORMS}; given is {written}")
        if any(getattr(self, name) is None for name in given):
            raise ValueError("has a key without a value")
        if self.p50 is not None and self.p99 is not None and self.p99 < self.p50:
            raise ValueError(f"p99 must not be below p50, {self.p99:g} is below {self.p50:g}")
        if self.uniform is not None and self.uniform[0] > self.uniform[1]:
            raise ValueError("uniform must be [low, high], its first number is above its second")
        if self.weights is not None and self.values is not None:
            if len(self.weights) != len(self.values):
                raise ValueError(f"{len(self.values)} values need as many weights, not {len(self.weights)}")
            if not sum(self.weights) > 0:
                raise ValueError("weights must not all be 0")
        return self


def _bare_number(value: object) -> object:
    """`input: 1024` is short for `input: {mean: 1024}`."""
    return {"mean": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


LengthField = Annotated[LengthsIn | None, BeforeValidator(_bare_number)]


def _named(value: object) -> object:
    """A mapping of names that are no keys of ours: without the note of where it stood."""
    return {key: item for key, item in value.items() if key != AT} if isinstance(value, dict) else value


Shares = Annotated[dict[Name, Annotated[float, Field(ge=0, le=1)]], BeforeValidator(_named)]
Distances = Annotated[dict[Name, Annotated[float, Field(ge=0, le=60_000)]], BeforeValidator(_named)]


class OriginIn(Written):
    """A place where users are, and how far the regions are from it."""

    name: Name
    rtt_ms: Distances


class TrafficIn(Written):
    """What users send: a rate with two distributions, or a trace."""

    rate_per_s: float | None = Field(
        default=None, ge=0, le=1e6, validation_alias=AliasChoices("rate_per_s", "rps", "qps")
    )
    input: LengthField = Field(
        default=None, validation_alias=AliasChoices("input", "input_tokens", "isl", "input_length")
    )
    output: LengthField = Field(
        default=None, validation_alias=AliasChoices("output", "output_tokens", "osl", "output_length")
    )
    trace: PathText | None = None
    prefix_hit_share: float | None = Field(default=None, ge=0, lt=1)
    rate_by_hour: list[Annotated[float, Field(ge=0, le=1e6)]] | None = Field(
        default=None, min_length=2, max_length=96
    )
    """Requests a second in equal parts of a day, from midnight; `rate_per_s`, left out, is the most of them."""
    classes: Shares = Field(default_factory=dict)
    """Classes of its requests (`policy.classes`) and the share of each; the rest is of the default one."""
    origins: Shares = Field(default_factory=dict)
    """Where its users are (`origins`), and the share of each."""

    @model_validator(mode="after")
    def _trace_or_lengths(self) -> TrafficIn:
        lengths = [name for name in ("input", "output") if getattr(self, name) is not None]
        if self.trace is not None and lengths:
            raise ValueError(f"has both a trace and {' and '.join(lengths)}; keep one of them")
        if self.trace is None:
            missing = [name for name in ("input", "output") if name not in lengths]
            if missing:
                raise ValueError(f"needs {' and '.join(missing)} lengths, or a trace")
            if self.rate_per_s is None and not self.rate_by_hour:
                raise ValueError("needs rate_per_s; only a trace brings its own rate")
        return self


class WeightsIn(Written):
    """Where a model's weights lie, as the machines see it, and how fast one of them reads from there."""

    place: Literal["directory", "cache", "store"]
    path: PathText | None = None
    """A directory with the model's files, or with one of the model's name that has them; relative to the spec."""
    gb_per_s: float | None = Field(default=None, gt=0, le=1000)


class RedundancyIn(Written):
    """What may be lost, any one of it, and the share of the demand that is served without it."""

    survive: FailureDomain
    share: float = Field(default=1.0, gt=0, le=1)


def _bare_domain(value: object) -> object:
    """`redundancy: node` is short for `redundancy: {survive: node}`."""
    return {"survive": value} if isinstance(value, str) else value


RedundancyField = Annotated[RedundancyIn | None, BeforeValidator(_bare_domain)]


class LimitsIn(Written):
    """Where and how a model may run. A list of `only_...` names all that is allowed, one of `no_...` what is not."""

    only_regions: list[Name] | None = None
    no_regions: list[Name] = Field(default_factory=list)
    only_nodes: list[Name] | None = None
    no_nodes: list[Name] = Field(default_factory=list)
    only_clouds: list[Name] | None = None
    no_clouds: list[Name] = Field(default_factory=list)
    residency: list[Name] | None = None
    """Regions, or clouds, that its prompts, KV and answers may be in."""
    max_gpu_kinds: int | None = Field(default=None, ge=1, le=1000)
    max_stages: int | None = Field(default=None, ge=1, le=1000)
    max_nodes: int | None = Field(default=None, ge=1, le=1000)
    min_copies: int = Field(default=0, ge=0, le=1_000_000)
    max_copies: int | None = Field(default=None, ge=1, le=1_000_000)


def _bare_format(value: object) -> object:
    """`precision: fp8` is short for `precision: [fp8]`."""
    return [value] if isinstance(value, str) else value


def _once_each(value: list[T]) -> list[T]:
    if len(set(value)) < len(value):
        raise ValueError("names one of them twice")
    return value


Precision = Annotated[
    Annotated[list[ChosenFormat], Field(min_length=1), AfterValidator(_once_each)] | None,
    BeforeValidator(_bare_format),
]


KV_CODECS: dict[str, Codec] = {"raw": "fp16", "int8": "int8", "int4": "int4"}
"""As they are written, and as plans name them."""
KvCodecs = Annotated[
    list[Literal["raw", "int8", "int4"]], BeforeValidator(_bare_format), AfterValidator(_once_each)
]


class ModelIn(Written):
    """A model to serve."""

    model: PathText
    name: Name | None = None
    files: PathText | None = None
    """Where its tokenizer lies, for the gateway: a directory, relative to the spec; or `shipped`."""
    slo: SloIn
    traffic: TrafficIn
    idle_s: float | None = Field(default=None, ge=1, le=1e8)
    """After so long without a request its copies go, until the next one; without it they stay."""
    weights: WeightsIn | None = None
    priority: int = Field(default=0, ge=-1000, le=1000)
    redundancy: RedundancyField = None
    max_spot_share: float | None = Field(default=None, ge=0, le=1)
    limits: LimitsIn | None = None
    precision: Precision = None
    """Serve it as if its weights were stored in this format, or in that of these which is cheapest; without it, as
    they are."""


class InterconnectIn(Written):
    """How the GPUs of a node talk; bandwidth per GPU in one direction."""

    kind: Literal["pcie", "nvlink", "nvswitch", "xgmi"]
    gb_per_s: float = Field(gt=0, le=1e5)
    latency_us: float = Field(default=10.0, ge=0, le=1e6)


class NodeIn(Written):
    """A machine that the catalog does not have, or one with other links."""

    name: Name | None = None
    gpu: Name
    count: int = Field(ge=1, le=64)
    interconnect: InterconnectIn | None = None
    network_gbps: float | None = Field(default=None, gt=0, le=1e5)


NODE_TAGS = ("<name>", "<type>")
"""How pydantic tells the two kinds of `node` apart; the loader drops them from error paths."""


def _node_kind(value: Any) -> str:
    return NODE_TAGS[isinstance(value, dict)]


NodeField = Annotated[
    Annotated[Name, Tag("<name>")] | Annotated[NodeIn, Tag("<type>")], Discriminator(_node_kind)
]


class OfferIn(Written):
    """Nodes of one type in one region."""

    node: NodeField
    available: int = Field(ge=0, le=1_000_000)
    price_usd_per_h: float | None = Field(default=None, ge=0, le=100_000)
    spot: bool = False
    preemptions_per_h: float | None = Field(default=None, ge=0, le=1000)
    """Of spot nodes: how often one is taken away."""
    reserved: int = Field(default=0, ge=0, le=1_000_000)
    """Paid for already: so many of them cost nothing more."""
    zone: Name | None = None

    @model_validator(mode="after")
    def _sensible(self) -> OfferIn:
        if self.reserved > self.available:
            raise ValueError(
                f"reserved must not be above available, {self.reserved} is above {self.available}"
            )
        if self.reserved and self.spot:
            raise ValueError("spot nodes cannot be reserved; leave one of them out")
        if self.preemptions_per_h is not None and not self.spot:
            raise ValueError("preemptions_per_h is for spot nodes; add spot: true")
        return self


class RegionIn(Written):
    """A place with fast links inside it."""

    name: Name
    cloud: Name | None = None
    nodes: list[OfferIn]
    head_usd_per_h: float = Field(default=0.0, ge=0, le=100_000)
    """Paid while anything runs there: a head node, a control plane."""
    storage_usd_per_gb_month: float = Field(default=0.0, ge=0, le=1000)
    """For the weights of each model that runs there."""


class FleetIn(Written):
    """Everything that could be rented."""

    regions: list[RegionIn]


class MachineIn(Written):
    """One machine of a pool."""

    name: Name
    node: NodeField
    price_usd_per_h: float | None = Field(default=None, ge=0, le=100_000)
    region: Name | None = None
    zone: Name | None = None


class PoolIn(Written):
    """The machines one has. Links are a number, or a matrix in the order of the machines (`spec.pools` checks)."""

    machines: list[MachineIn]
    gbps: Any
    rtt_ms: Any = None
    max_group_gpus: int | None = Field(default=None, ge=1, le=256)


class LinkIn(Written):
    """A link between two regions: `between` means both directions, `from` and `to` one."""

    between: list[Name] | None = Field(default=None, min_length=2, max_length=2)
    source: Name | None = Field(default=None, validation_alias="from")
    target: Name | None = Field(default=None, validation_alias="to")
    gbps: float = Field(gt=0, le=1e6)
    rtt_ms: float = Field(ge=0, le=60_000)
    egress_usd_per_gb: float = Field(default=0.0, ge=0, le=1000)

    @model_validator(mode="after")
    def _ends(self) -> LinkIn:
        one_way = self.source is not None and self.target is not None
        if one_way == (self.between is not None) or (self.source is None) != (self.target is None):
            raise ValueError("needs between: [a, b] for both directions, or from: a and to: b for one")
        return self


class SpecIn(Written):
    """The root of `potluck.yaml`."""

    models: list[ModelIn]
    fleet: FleetIn | None = None
    pool: PoolIn | None = None
    gpus: list[GpuIn] = Field(default_factory=list)
    links: list[LinkIn] = Field(default_factory=list)
    origins: list[OriginIn] = Field(default_factory=list)
    budget_usd_per_h: float | None = Field(default=None, gt=0, le=1e9)
    policy: PolicyIn | None = None
    kv_codecs: KvCodecs = Field(default_factory=list)
    """In which KV may cross between replicas. `raw`, as the model has it, always may; the others lose something."""
    engine: Literal["vllm", "embedded", "openai"] = "vllm"
    """The kind of engines that serve: plans keep to what these can do."""
    complexity_share: float = Field(default=0.05, ge=0, le=1)
    """Of its rent, what each further moving part of a copy counts for where plans are compared."""


class FleetSpecIn(SpecIn):
    """The root when no pool is written: then there must be a fleet."""

    fleet: FleetIn
