"""The spec's `policy:` section: the rules of the run-time policies, who shares the fleet, which classes there are.

Everything may be left out; then the rule is the one of `core.brain.policy.Policy`, which docs/policies.md explains.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import Field

from potluck.core.brain.policy import Balance, Policy, Scaling, SplitRule
from potluck.core.errors import InputError
from potluck.core.values.service import RequestClass, Tenant, with_built_in
from potluck.spec.problems import Problems, shown
from potluck.spec.schema_parts import Name, SloIn, Written


class TenantIn(Written):
    """Somebody who shares the fleet."""

    name: Name
    weight: float = Field(default=1.0, gt=0, le=1e6)


class ClassIn(Written):
    """A class of requests. One with the name of a built-in class takes its place."""

    name: Name
    matters: int = Field(default=1, ge=-100, le=100)
    slo: SloIn | None = None
    factor: float = Field(default=1.0, gt=0, le=1e6)
    late: bool = False
    stops: bool = False
    fill: float = Field(default=1.0, gt=0, le=1)
    max_wait_s: float | None = Field(default=None, ge=0, le=1e9)


class PolicyIn(Written):
    """Rules that differ from the default ones."""

    balance: Balance | None = None
    opportunistic: bool | None = None
    split: bool | None = None
    split_rule: SplitRule | None = None
    adapt_threshold: bool | None = None
    affinity: float | None = None
    pool_caches: bool | None = None
    rebalance: bool | None = None
    grants: bool | None = None
    split_overflow: bool | None = None
    low_decodes: bool | None = None
    scaling: Scaling | None = None
    retries: int | None = None
    max_wait_s: float | None = None
    admission: bool | None = None
    queue_requests: int | None = None
    disturbance: float | None = None
    set_apart: bool | None = None
    tenants: list[TenantIn] = Field(default_factory=list)
    classes: list[ClassIn] = Field(default_factory=list)
    tick_s: float | None = None
    window_s: float | None = None
    ratio: float | None = None
    global_window_s: float | None = None
    grace_s: float | None = None
    replan_s: float | None = None
    forecast_share: float | None = None
    keep_s: float | None = None
    busiest: float | None = None
    headroom: float | None = None
    dip: float | None = None
    advise: bool | None = None


def resolve_policy(written: PolicyIn | None, problems: Problems) -> Policy:
    """The rules; what is wrong with them is noted with its line."""
    if written is None:
        return Policy()
    values: dict[str, Any] = {}
    for each in fields(Policy):
        value = getattr(written, each.name)
        if each.name not in ("tenants", "classes") and value is not None:
            values[each.name] = value
    for kind, entries in (("tenants", written.tenants), ("classes", written.classes)):
        seen: set[str] = set()
        for entry in entries:
            if entry.name in seen:
                problems.add((*entry.at, "name"), f"duplicate name {shown(entry.name)} in {kind}; keep one")
            seen.add(entry.name)
    if problems.found:
        return Policy()
    values["tenants"] = tuple(Tenant(tenant.name, tenant.weight) for tenant in written.tenants)
    values["classes"] = with_built_in(tuple(_class(each) for each in written.classes))
    try:
        return Policy(**values)
    except InputError as error:
        name = error.field.removeprefix("policy: ")
        problems.add(("policy", name), error.problem)
        return Policy()


def _class(written: ClassIn) -> RequestClass:
    slo = written.slo
    return RequestClass(
        written.name,
        written.matters,
        None if slo is None else slo.value(),
        written.factor,
        written.late,
        written.stops,
        written.fill,
        written.max_wait_s,
    )
