"""Who asks, and what for: tenants with their weights, classes of requests with what each allows.

A *tenant* is whoever shares the fleet with others: tenants that all have requests waiting get its work in proportion
to their weights. A *class* says what a request is for: how soon its answer is wanted, whether a late one is of use,
and how much it matters when not all can be served.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from potluck.core.errors import InputError
from potluck.core.values.types import DEFAULT_CLASS, Slo


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody with a share of the fleet."""

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (isfinite(self.weight) and self.weight > 0):
            raise InputError(f"tenant {self.name}: weight", f"must be positive, is {self.weight}")


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Tenants that use each other's cached prefixes; others', and those of other models, they do not."""

    tenants: tuple[str, ...] = ()
    """None: all of them."""
    models: tuple[str, ...] = ()
    """None: all of them."""

    def covers(self, tenant: str, model: str) -> bool:
        return (not self.tenants or tenant in self.tenants) and (not self.models or model in self.models)

    def meets(self, other: PrefixSharing) -> bool:
        """Whether both would cover the same tenant and model."""
        return all(
            not first or not second or not set(first).isdisjoint(second)
            for first, second in ((self.tenants, other.tenants), (self.models, other.models))
        )


@dataclass(frozen=True, slots=True)
class RequestClass:
    """What requests of a class allow."""

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
        if not (isfinite(self.factor) and self.factor > 0):
            raise InputError(f"class {self.name}: factor", f"must be positive, is {self.factor}")
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
    named = {each.name: each for each in (*CLASSES, *own)}
    return tuple(named.values())
