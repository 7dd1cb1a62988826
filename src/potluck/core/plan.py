"""Templates and plans: what is deployed together, how much of it where, and how requests flow."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from potluck.core.codec import dumps, loads
from potluck.core.errors import InputError
from potluck.core.layout import Layout
from potluck.core.types import Codec, Role

PLAN_VERSION = 1

TemplateKind = Literal["homogeneous", "pipeline", "combo", "pair", "remote_prefill", "group"]
Confidence = Literal["measured", "transferred", "assumed"]
"""measured: this GPU was measured; transferred: predicted from measurements of its relatives;
assumed: nothing near it was measured."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine instance of a template."""

    role: Role
    layout: Layout


@dataclass(frozen=True, slots=True)
class BucketCapacity:
    """What one copy of a template does for prompts of one length bucket."""

    prompt_tokens: int
    """Longest prompt of the bucket."""
    prefill_per_s: float
    """Prompts a second when it does nothing else."""
    decode_per_s: float
    """Requests a second it can decode when it does nothing else."""
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Template:
    """A group of replicas that is deployed together: one column of the planner's program."""

    name: str
    kind: TemplateKind
    model: str
    replicas: tuple[Replica, ...]
    capacity: tuple[BucketCapacity, ...]
    kv_bytes: float
    """KV cache memory of its decoding replicas together."""
    confidence: Confidence

    @property
    def node_counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for replica in self.replicas:
            for node, count in replica.layout.node_counts.items():
                counts[node] = counts.get(node, 0) + count
        return counts


@dataclass(frozen=True, slots=True)
class Deployment:
    """So many copies of a template in a region."""

    template: str
    region: str
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InputError(f"deployment {self.template}@{self.region}: count", "must not be negative")


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests of one bucket that are prefilled in one deployment and decoded in another."""

    model: str
    prompt_tokens: int
    prefill: str
    decode: str
    rate_per_s: float
    codec: Codec = "fp16"

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise InputError(
                f"flow {self.model}: prompt_tokens", f"must be positive, is {self.prompt_tokens}"
            )
        if not 0 <= self.rate_per_s < inf:
            raise InputError(f"flow {self.model}: rate_per_s", f"must not be negative, is {self.rate_per_s}")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner expects of a model under this plan."""

    model: str
    demand_per_s: float
    capacity_per_s: float
    ttft_s: float
    tpot_s: float
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class Plan:
    """What to rent, how it is laid out and how requests flow, with the price and the promise."""

    strategy: str
    templates: tuple[Template, ...]
    deployments: tuple[Deployment, ...]
    flows: tuple[Flow, ...]
    predictions: tuple[Prediction, ...]
    cost_usd_per_h: float
    gap: float
    """Proven relative distance to the cheapest plan; 0 when proven optimal."""

    def __post_init__(self) -> None:
        for name in ("cost_usd_per_h", "gap"):
            if not 0 <= getattr(self, name) < inf:
                raise InputError(f"plan: {name}", f"must not be negative, is {getattr(self, name)}")


def plan_to_json(plan: Plan) -> str:
    """The text of a plan file."""
    return dumps(plan, format_name="potluck.plan", version=PLAN_VERSION)


def plan_from_json(text: str) -> Plan:
    """Read a plan file; another version or an unknown key is an error that names it."""
    return loads(Plan, text, format_name="potluck.plan", version=PLAN_VERSION)
