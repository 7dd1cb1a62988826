"""Templates and plans: what is deployed together, how much of it where, and how requests flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final, Literal

from potluck.core.codec import dumps, loads
from potluck.core.errors import InputError
from potluck.core.values.layout import Layout
from potluck.core.values.model import Format
from potluck.core.values.types import Codec, EngineName, Role, not_negative


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    id: str
    unit: str
    """The copy it belongs to: its replicas were planned to work together."""
    template: str
    index: int
    kind: TemplateKind
    model: str
    role: Role
    region: str
    nodes: tuple[str, ...] = ()
    """The machines it stands on, by names that are theirs alone in the region; empty where nobody knows."""
    zone: str = ""
    """The part of the region that can go down by itself: a zone or a rack. Empty where nobody knows."""

    @property
    def node_domains(self) -> tuple[str, ...]:
        """The smallest failure domains it is in: its machines, or itself where these are not known."""
        return tuple(f"node {self.region}/{node}" for node in self.nodes) or (self.id,)

    @property
    def domains(self) -> tuple[str, ...]:
        """All failure domains it is in, smallest first; with any of them it goes down."""
        zone = (f"zone {self.region}/{self.zone}",) if self.zone else ()
        return (*self.node_domains, *zone, f"region {self.region}")

    def lies_in(self, names: frozenset[str]) -> bool:
        """Whether it, or a domain it is in, is among these."""
        return self.id in names or any(domain in names for domain in self.domains)


PLAN_VERSION = 1
UNKNOWN_NODE: Final = "unknown"
"""The node type in layouts of servers whose hardware is unknown; their templates have no nodes and no price."""

TemplateKind = Literal["homogeneous", "pipeline", "combo", "pair", "remote_prefill", "group"]


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    role: Role
    layout: Layout


@dataclass(frozen=True, slots=True)
class BucketCapacity:
    """What one copy of a template does for one bucket of a model's prompts, when it does nothing else."""

    bucket: int
    prefill_per_s: float
    """Prompts a second whose KV another replica decodes; 0 when it may not, or not within the objective."""
    decode_per_s: float
    """Requests a second that others prefilled."""
    closed_per_s: float
    """Requests a second it serves by itself, from prompt to last token."""
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class NodeCount:
    node: str
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"{self.node}: count", f"must be at least 1, is {self.count}")


@dataclass(frozen=True, slots=True)
class TemplateFlow:
    """How one copy shares a bucket among its replicas: THUNDERSERVE's X_i Y_ij, which add up to 1 in a bucket."""

    bucket: int
    prefill: int
    """Which of the template's replicas computes the prompt ..."""
    decode: int
    """... and which makes the answer; the same one may do both."""
    share: float
    """Of the requests of the bucket that the copy takes."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 + 1e-9:
            raise InputError("template: flows", f"shares must be above 0 and at most 1, one is {self.share}")


@dataclass(frozen=True, slots=True)
class Template:
    """A group of replicas that is deployed together: one column of the planner's program."""

    name: str
    kind: TemplateKind
    model: str
    nodes: tuple[NodeCount, ...]
    """What one copy rents. Several small replicas may share a node."""
    replicas: tuple[PlannedReplica, ...]
    capacity: tuple[BucketCapacity, ...]
    confidence: Confidence
    codec: Codec = "fp16"
    """In which KV crosses between its own replicas."""
    flows: tuple[TemplateFlow, ...] = ()
    """Who hands to whom inside a copy, where that was planned (groups); else the Brain's rules decide."""
    ce_tokens_per_usd: float = 0.0
    """CAUCHY's equation 15 of its two GPU types, where a strategy ranks by it; 0: by what it serves."""
    max_model_len: int = 0
    """Of servers whose hardware is unknown: longest prompt and answer together, in tokens; 0: unknown."""

    def __post_init__(self) -> None:
        count = len(self.replicas)
        if any(not (0 <= flow.prefill < count and 0 <= flow.decode < count) for flow in self.flows):
            raise InputError(f"template {self.name}: flows", f"name a replica beyond the {count} there are")

    @property
    def hardware_known(self) -> bool:
        """Whether it says on which nodes it runs; else its price and its speeds are unknown."""
        return all(UNKNOWN_NODE not in replica.layout.node_counts for replica in self.replicas)

    @property
    def node_counts(self) -> dict[str, int]:
        return {node_count.node: node_count.count for node_count in self.nodes}

    @property
    def hands_over(self) -> bool:
        """Whether some of its replicas prefill for others of it."""
        roles = {replica.role for replica in self.replicas}
        return "prefill" in roles and len(roles) > 1

    @property
    def machines(self) -> dict[str, int]:
        return dict(sum((Counter(replica.layout.machines) for replica in self.replicas), Counter()))


@dataclass(frozen=True, slots=True)
class Deployment:
    template: str
    region: str
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InputError(f"deployment {self.template}@{self.region}: count", "must not be negative")


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Prompts of one model up to a length: where the buckets meet are the plan's length thresholds."""

    model: str
    bucket: int
    longest_tokens: int
    rate_per_s: float
    new_share: float = 1.0
    """Of a prompt, the part that no prefix cache holds."""


@dataclass(frozen=True, slots=True)
class PlannedThreshold:
    """Prompts of a model with more tokens than this to be computed may cross from one region to another."""

    model: str
    prefill_region: str
    decode_region: str
    tokens: float

    @property
    def link(self) -> str:
        return f"{self.prefill_region}->{self.decode_region}"


@dataclass(frozen=True, slots=True)
class KvWire:
    """How KV crosses from one region to another: planner and simulator reckon with it, engines are told. Its codec is
    each flow's, in which states are whole (`core.values.kv`)."""

    source: str
    target: str
    connections: int  # That carry the KV of one request side by side.
    window_bytes: int  # That each keeps under way.
    piece_bytes: int  # That are acknowledged at once; less where a link is shared out among its senders.


@dataclass(frozen=True, slots=True)
class PlannedShare:
    """How much of a bucket a deployment takes in one phase: the routing weights."""

    template: str
    region: str
    bucket: int
    phase: Literal["prefill", "decode", "closed"]
    rate_per_s: float

    def __post_init__(self) -> None:
        not_negative(f"share {self.template}@{self.region}: rate_per_s", self.rate_per_s)


@dataclass(frozen=True, slots=True)
class PlannedFlow:
    """Requests of one bucket that are prefilled in one region and decoded in another, or in the same."""

    model: str
    bucket: int
    prefill_region: str
    decode_region: str
    rate_per_s: float
    codec: Codec = "fp16"

    def __post_init__(self) -> None:
        not_negative(f"flow {self.model}: rate_per_s", self.rate_per_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner expects of a model under this plan."""

    model: str
    demand_per_s: float
    capacity_per_s: float
    ttft_s: float
    tpot_s: float
    confidence: Confidence
    prompt_tokens_per_s: float = 0.0
    """Of what is served within the objective: CORAL's goodput, of prefill ..."""
    answer_tokens_per_s: float = 0.0
    """... and of decode."""
    fraction: float | None = None
    """Share of this model's demand that is met, where models have priorities; None: the plan's."""
    slowest_per_s: float = 0.0
    """8 in 10 of like replicas do between this ..."""
    fastest_per_s: float = 0.0
    """... and this, where they are expected to do `capacity_per_s`; 0 where nothing is known."""
    simulated: bool = False
    """Whether TTFT and TPOT are means of simulated runs at the demand; else of replicas as busy as they may be."""


@dataclass(frozen=True, slots=True)
class Charge:
    """Something that is paid for beside the rent of nodes."""

    what: str
    usd_per_h: float


@dataclass(frozen=True, slots=True)
class Tried:
    """What simulation showed of one model under a plan."""

    model: str
    promised: float
    """Share of requests that must be in time."""
    attained: float
    """Share that was, over all runs."""
    at_least: float
    """The same less what chance may have given."""
    answered: float
    """Share of the run in which it was least."""
    requests: int
    """Judged, over all runs."""
    runs: int
    answers: bool = True
    """Whether hardly anybody was turned away."""
    fresh: bool = False
    """Whether in runs that the search for the plan had not seen."""
    gap_cv: float | None = None
    """Variation of the gaps between requests, where another one than the spec's was asked for."""
    request_class: str = ""
    """Of the model's requests, the class that is worst off; empty where there is one."""

    @property
    def verdict(self) -> Literal["holds", "unsure", "misses"]:
        """Unsure: it did, by so little that chance may have helped."""
        if self.at_least >= self.promised and self.answers:
            return "holds"
        return "unsure" if self.attained >= self.promised and self.answers else "misses"


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """The evidence that a plan was chosen by."""

    of: str
    """A mark of the plan and of all that it was tried with: with another spec this says nothing."""
    models: tuple[Tried, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to rent, how it is laid out and how requests flow, with the price and the promise."""

    strategy: str
    templates: tuple[Template, ...]
    deployments: tuple[Deployment, ...]
    buckets: tuple[LengthBucket, ...]
    shares: tuple[PlannedShare, ...]
    flows: tuple[PlannedFlow, ...]
    predictions: tuple[Prediction, ...]
    cost_usd_per_h: float
    gap: float
    """Proven relative distance to the cheapest plan of this strategy's columns; 0 when proven optimal."""
    fraction: float = 1.0
    """Share of every demand that is met; below 1 when the fleet does not suffice."""
    start_usd_per_h: float = 0.0
    """Beside the rent: starting copies that did not run (CORAL's K times their price), spread until the next plan."""
    candidates: tuple[Template, ...] = ()
    """Templates of the same strategy that nothing is deployed of, which scaling may start (`plan/running`)."""
    charges: tuple[Charge, ...] = ()
    """Beside the rent: egress, what preemptions cost, weights in storage, head nodes."""
    formats: tuple[tuple[str, Format], ...] = ()
    """Model to its weights' format, where the spec names one; all its replicas share it, as they hand KV over."""
    rehearsed: Rehearsed | None = None
    """What it was proven to do in simulation, before it was written down; None: it was not tried."""
    engine: EngineName = "vllm"
    """The kind of engines that it was made for."""
    thresholds: tuple[PlannedThreshold, ...] = ()
    """Where routing begins, of models that both cross and stay (`plan.assemble.columns`)."""
    wires: tuple[KvWire, ...] = ()

    def __post_init__(self) -> None:
        for name in ("cost_usd_per_h", "gap", "fraction", "start_usd_per_h"):
            not_negative(f"plan: {name}", getattr(self, name))

    def template(self, name: str) -> Template:
        return next(template for template in self.templates if template.name == name)

    def format_of(self, model: str) -> Format | None:
        """In which a model's weights are, where that was asked or chosen; None: as its checkpoint has them."""
        return next((item for name, item in self.formats if name == model), None)

    def fraction_of(self, model: str) -> float:
        own = next((item.fraction for item in self.predictions if item.model == model), None)
        return self.fraction if own is None else own

    @property
    def priced(self) -> bool:
        """Whether `cost_usd_per_h` is the price of what is deployed; else some of it is unknown."""
        used = {deployment.template for deployment in self.deployments}
        return all(template.hardware_known for template in self.templates if template.name in used)

    @property
    def known_total_usd_per_h(self) -> float | None:
        """`total_usd_per_h`, or None where a part of it is unknown."""
        return self.total_usd_per_h if self.priced else None

    @property
    def total_usd_per_h(self) -> float:
        """Rent and all charges; starts of new copies apart."""
        return self.cost_usd_per_h + sum(charge.usd_per_h for charge in self.charges)

    @property
    def holds(self) -> bool:
        """Whether nothing is known of it that misses in simulation."""
        return self.rehearsed is None or all(item.verdict == "holds" for item in self.rehearsed.models)

    @property
    def repertoire(self) -> tuple[Template, ...]:
        """All that copies may be of: what the plan uses, and what scaling may start."""
        return self.templates + self.candidates if self.candidates else self.templates

    def of_models(self, names: Collection[str]) -> Plan:
        """What it has for these models alone."""
        models = {template.name: template.model for template in self.repertoire}
        return replace(
            self,
            templates=tuple(each for each in self.templates if each.model in names),
            candidates=tuple(each for each in self.candidates if each.model in names),
            deployments=tuple(each for each in self.deployments if models[each.template] in names),
            buckets=tuple(each for each in self.buckets if each.model in names),
            shares=tuple(each for each in self.shares if models[each.template] in names),
            flows=tuple(each for each in self.flows if each.model in names),
            predictions=tuple(each for each in self.predictions if each.model in names),
            thresholds=tuple(each for each in self.thresholds if each.model in names),
        )

    def holding(self, counts: Mapping[tuple[str, str], int]) -> Plan:
        """The plan with these copies, (template, region) to how many, of templates in its repertoire."""
        there = tuple(Deployment(*key, count) for key, count in sorted(counts.items()) if count)
        names = {deployment.template for deployment in there}
        begun = tuple(candidate for candidate in self.candidates if candidate.name in names)
        left = tuple(candidate for candidate in self.candidates if candidate.name not in names)
        return replace(self, templates=self.templates + begun, deployments=there, candidates=left)

    @property
    def nodes(self) -> dict[tuple[str, str], int]:
        """(region, node type) to how many are rented."""
        counts: Counter[tuple[str, str]] = Counter()
        for deployment in self.deployments:
            for item in self.template(deployment.template).nodes:
                counts[deployment.region, item.node] += item.count * deployment.count
        return dict(counts)


def price_text(plan: Plan) -> str:
    """`$1.50/h`, or that the price is unknown."""
    return f"${plan.total_usd_per_h:.2f}/h" if plan.priced else "unknown $/h"


def plan_to_json(plan: Plan) -> str:
    return dumps(plan, format_name="potluck.plan", version=PLAN_VERSION)


def plan_from_json(text: str) -> Plan:
    """Read a plan file; another version or an unknown key is an error that names it."""
    return loads(Plan, text, format_name="potluck.plan", version=PLAN_VERSION)


def mark_of(text: str) -> str:
    """A short name for a plan file's text: two that differ have two."""
    return sha256(text.encode()).hexdigest()[:16]


def plan_mark(plan: Plan) -> str:
    return mark_of(plan_to_json(plan))


Confidence = Literal["measured", "transferred", "assumed"]
"""This GPU was measured; it is predicted from measurements of its relatives; nothing near it was measured."""


def copies_changed(previous_plan: Plan, next_plan: Plan) -> str:
    """Which copies come and go: `2 more L4 (decode) in near, 1 fewer A10 (prefill) in far`."""
    counts: Counter[tuple[str, str]] = Counter()
    for plan, sign in ((previous_plan, -1), (next_plan, 1)):
        for deployment in plan.deployments:
            counts[_described(plan.template(deployment.template)), deployment.region] += (
                sign * deployment.count
            )
    lines = [
        f"{abs(more)} {'more' if more > 0 else 'fewer'} {what} in {region}"
        for (what, region), more in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if more
    ]
    return ", ".join(lines) or "the same GPUs in the same roles"


def _described(template: Template) -> str:
    parts = []
    for replica in template.replicas:
        counts = replica.layout.node_counts
        nodes = " + ".join(node.removeprefix("1x") if n == 1 else f"{n} {node}" for node, n in counts.items())
        parts.append(nodes if replica.role == "mixed" else f"{nodes} ({replica.role})")
    return " with ".join(parts)
