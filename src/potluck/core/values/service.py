"""Who asks, and what for: tenants share the fleet by weight; a class says how soon answers are wanted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from potluck.core.errors import InputError
from potluck.core.values.types import DEFAULT_CLASS, Slo, positive


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        positive(f"tenant {self.name}: weight", self.weight)


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Tenants that use each other's cached prefixes; others', and those of other models, they do not."""

    tenants: tuple[str, ...] = ()
    """None: all of them."""
    models: tuple[str, ...] = ()
    """None: all of them."""

    def covers(self, tenant: str, model: str) -> bool:
        return (not self.tenants or tenant in self.tenants) and (not self.models or model in self.models)

    def meets(self, other_sharing: PrefixSharing) -> bool:
        """Whether both would cover the same tenant and model."""
        return all(
            not first or not second or not set(first).isdisjoint(second)
            for first, second in ((self.tenants, other_sharing.tenants), (self.models, other_sharing.models))
        )


@dataclass(frozen=True, slots=True)
class RequestClass:
    name: str
    matters: int = 1
    """Classes that matter more go first, and those that matter least are turned away first."""
    slo: Slo | None = None
    """An objective of its own; None: the model's."""
    factor: float = 1.0
    """On all times of the objective."""
    late: bool = False
    """A late answer is wanted too; otherwise a request that cannot be in time any more is refused at once."""
    stops: bool = False
    """One that runs is stopped when its deadline passes."""
    fill: float = 1.0
    """Share of a replica's room that it may take, so that others find some."""
    max_wait_s: float | None = None
    """How long it may wait for its turn; None: as long as the policy says."""

    def __post_init__(self) -> None:
        positive(f"class {self.name}: factor", self.factor)
        if not 0 < self.fill <= 1:
            raise InputError(f"class {self.name}: fill", f"must be above 0 and at most 1, is {self.fill}")
        if self.max_wait_s is not None and not self.max_wait_s >= 0:
            raise InputError(f"class {self.name}: max_wait_s", f"must not be negative, is {self.max_wait_s}")

    def objective(self, model: Slo | None) -> Slo | None:
        """What its requests to a model were promised; None: nothing."""
        slo = self.slo if self.slo is not None else model
        return None if slo is None else slo.scaled(self.factor)


CLASSES = (
    RequestClass("interactive", matters=2),
    RequestClass(DEFAULT_CLASS),
    RequestClass("batch", matters=0, factor=30.0, late=True, fill=0.85, max_wait_s=600.0),
)
"""Known without being written: somebody is watching; the usual; whenever there is room."""


def with_built_in(own: tuple[RequestClass, ...]) -> tuple[RequestClass, ...]:
    """A policy's classes: those of ours, replaced by own ones of the same name, and the other own ones."""
    named = {request_class.name: request_class for request_class in (*CLASSES, *own)}
    return tuple(named.values())


FailureDomain = Literal["node", "zone", "region"]


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """Of one model. Each can be left out, and `asked` tells which are there."""

    survive: FailureDomain | None = None
    """What may be lost, any one of it, while `survive_share` of the demand is still served by the rest."""
    survive_share: float = 1.0
    max_spot_share: float | None = None
    """Without any spot node the rest of the demand must still be served."""
    regions: tuple[str, ...] | None = None
    """Where alone it may run; None: everywhere."""
    residency: tuple[str, ...] | None = None
    """Where alone its prompts, KV and answers may be; None: everywhere."""
    nodes: tuple[str, ...] | None = None
    """On which node types alone; None: on all."""
    max_gpu_kinds: int | None = None
    max_stages: int | None = None
    max_nodes: int | None = None
    """Nodes of one replica."""
    min_copies: int = 0
    max_copies: int | None = None
    priority: int = 0
    """Where not all demand fits, models of a higher one are served first."""

    def __post_init__(self) -> None:
        if not 0 < self.survive_share <= 1:
            raise InputError("redundancy: share", f"must be above 0 and at most 1, is {self.survive_share}")
        if self.max_spot_share is not None and not 0 <= self.max_spot_share <= 1:
            raise InputError("max_spot_share", f"must be between 0 and 1, is {self.max_spot_share}")
        if self.max_copies is not None and self.max_copies < self.min_copies:
            raise InputError("max_copies", f"must not be below min_copies, {self.min_copies}")

    @property
    def asked(self) -> dict[str, str]:
        """Name of each term that is there, to what it asks in words."""
        spot, survive = self.max_spot_share, self.survive
        words = {
            "redundancy": f"{self.survive_share:.0%} served without any one {survive}" if survive else "",
            "max_spot_share": "" if spot is None else f"{1 - spot:.0%} served without spot nodes",
            "regions": _only("in", self.regions),
            "residency": _only("data in", self.residency),
            "nodes": _only("on", self.nodes),
            "max_gpu_kinds": _most(self.max_gpu_kinds, "kinds of GPU"),
            "max_stages": _most(self.max_stages, "stages"),
            "max_nodes": _most(self.max_nodes, "nodes a replica"),
            "min_copies": f"at least {self.min_copies} copies" if self.min_copies else "",
            "max_copies": _most(self.max_copies, "copies"),
        }
        return {name: text for name, text in words.items() if text}

    def without(self, name: str) -> ModelTerms:
        if name == "redundancy":
            return replace(self, survive=None)
        if name == "min_copies":
            return replace(self, min_copies=0)
        return replace(self, **{name: None})  # type: ignore[arg-type]

    def allows(self, region: str) -> bool:
        return all(only is None or region in only for only in (self.regions, self.residency))


NO_TERMS = ModelTerms()


def _only(where: str, names: tuple[str, ...] | None) -> str:
    if names is None:
        return ""
    return f"{where} {', '.join(names[:4])}{', ...' if len(names) > 4 else ''} only"


def _most(count: int | None, what: str) -> str:
    return "" if count is None else f"at most {count} {what}"
