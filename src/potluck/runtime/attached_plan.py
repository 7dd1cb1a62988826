"""A plan over servers whose hardware is unknown: one template for each, without nodes, so without a price.

Speeds are not planned either. Every replica begins with the same assumed facts, and routing learns from there how
fast each one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from potluck.core.state.facts import ReplicaFacts
from potluck.core.values.layout import single
from potluck.core.values.model import DenseFfn, FullAttention, Layer, Model
from potluck.core.values.plan import (
    UNKNOWN_NODE,
    BucketCapacity,
    Deployment,
    LengthBucket,
    Plan,
    PlannedReplica,
    PlannedShare,
    Template,
    TemplateKind,
)
from potluck.core.values.types import Region, Role
from potluck.runtime.resolved_plan import ResolvedPlan

STRATEGY: Final = "attached"
REGION: Final = "attached"
UNBOUNDED_TOKENS: Final = 1 << 40
"""The longest request of a server that does not tell its limit, and the KV that it is taken to hold."""
ASSUMED_FACTS: Final = ReplicaFacts(
    prefill_s_per_token=1e-4,
    prefill_fixed_s=0.0,
    decode_step_s=0.02,
    decode_batch=256,
    total_blocks=UNBOUNDED_TOKENS,
    max_tokens=UNBOUNDED_TOKENS,
    assumed=True,
)
"""Where learning starts; alike for all servers, so that only observed speeds tell them apart."""


@dataclass(frozen=True, slots=True)
class AttachedServer:
    name: str
    """Its address, unique among the servers of a model."""
    model: str
    role: Role = "mixed"
    max_model_len: int = 0
    """Longest prompt and answer together, in tokens; 0: unknown."""


def template_name(model: str, servers: Sequence[AttachedServer]) -> str:
    return f"{model}: {' + '.join(server.name for server in servers)}"


def copies_of(servers: Iterable[AttachedServer]) -> tuple[tuple[AttachedServer, ...], ...]:
    """Servers that are one copy together: all that prefill or decode apart for a model, else each by itself."""
    by_model: dict[str, list[AttachedServer]] = {}
    for server in servers:
        by_model.setdefault(server.model, []).append(server)
    copies: list[tuple[AttachedServer, ...]] = []
    for mine in by_model.values():
        apart = [server for server in mine if server.role != "mixed"]
        if len({server.role for server in apart}) == 2:
            copies.append(tuple(sorted(apart, key=lambda server: server.role, reverse=True)))
        else:
            apart = []
        copies += [(server,) for server in mine if server not in apart]
    return tuple(copies)


def attached_plan(servers: Sequence[AttachedServer], layers: Mapping[str, int]) -> Plan:
    """`layers` has the depth of models that are known, for engines that hand KV to each other."""
    templates = tuple(_template(copy, layers.get(copy[0].model, 1)) for copy in copies_of(servers))
    models = dict.fromkeys(server.model for server in servers)
    return Plan(
        STRATEGY,
        templates,
        tuple(Deployment(template.name, REGION, 1) for template in templates),
        tuple(LengthBucket(model, 0, UNBOUNDED_TOKENS, 0.0) for model in models),
        tuple(PlannedShare(template.name, REGION, 0, "closed", 1.0) for template in templates),
        (),
        (),
        0.0,
        0.0,
    )


def _template(copy: tuple[AttachedServer, ...], layers: int) -> Template:
    # A server that prefills or decodes in a plan without its counterpart serves whole requests.
    roles: tuple[Role, ...] = tuple(server.role for server in copy) if len(copy) > 1 else ("mixed",)
    replicas = tuple(PlannedReplica(role, single(UNKNOWN_NODE, 1, layers)) for role in roles)
    kind: TemplateKind = "homogeneous" if len(roles) == 1 else "combo"
    alike = BucketCapacity(0, 0.0, 0.0, 1.0, 0.0, 0.0)  # a weight: all servers count alike
    limits = [server.max_model_len for server in copy]
    return Template(
        template_name(copy[0].model, copy),
        kind,
        copy[0].model,
        (),
        replicas,
        (alike,),
        "assumed",
        max_model_len=min(limits) if all(limits) else 0,
    )


def unknown_model(name: str) -> Model:
    """Stands for a model of unknown architecture where one is needed; nothing of it is shown or counted on."""
    layer = Layer(FullAttention(1, 1, 1, 1), DenseFfn(1))
    return Model(name, 1, 1, (layer,), UNBOUNDED_TOKENS)


def resolved_attached(plan: Plan, models: Mapping[str, Model]) -> ResolvedPlan:
    """The plan with the models whose configuration is known; without objectives, prices and nodes."""
    names = dict.fromkeys(template.model for template in plan.templates)
    return ResolvedPlan(
        plan,
        {name: models.get(name) or unknown_model(name) for name in names},
        {},
        (Region(REGION, ()),),
        unknown_models=frozenset(names) - models.keys(),
    )
