"""The spec's `policy:` section: the rules of the run-time policies, who shares the fleet, which classes there are.

Everything may be left out; then the rule is the one of `core.brain.policy.Policy`, which docs/policies.md explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from potluck.core.errors import InputError, did_you_mean
from potluck.core.routing.balance import BALANCES
from potluck.core.scaling.autoscaler import SCALERS
from potluck.core.state.policy import LISTS, Policy, SplitRule
from potluck.core.values.service import PrefixSharing, RequestClass, Tenant, with_built_in
from potluck.spec.schema_parts import Name, SloIn, Written
from potluck.spec.spec_problems import SpecProblems, shown

if TYPE_CHECKING:
    BalanceName = str
    ScalingName = str
else:  # the rules that there are, whatever they are
    BalanceName, ScalingName = Literal[tuple(BALANCES)], Literal[tuple(SCALERS)]


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


class SharingIn(Written):
    """Tenants that use each other's cached prefixes."""

    tenants: Literal["all"] | list[Name]
    models: Literal["all"] | list[Name] = "all"


class PolicyIn(Written):
    """Rules that differ from the default ones."""

    balance: BalanceName | None = None
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
    scaling: ScalingName | None = None
    retries: int | None = None
    hedge: float | None = None
    max_wait_s: float | None = None
    admission: bool | None = None
    queue_requests: int | None = None
    disturbance: float | None = None
    set_apart: bool | None = None
    tenants: list[TenantIn] = Field(default_factory=list)
    classes: list[ClassIn] = Field(default_factory=list)
    shared_prefixes: list[SharingIn] = Field(default_factory=list)
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
    standby: int | None = None
    advise: bool | None = None


def resolve_policy(written: PolicyIn | None, models: Sequence[str], problems: SpecProblems) -> Policy:
    """The rules; what is wrong with them is noted with its line. `models` are the names of those there are."""
    if written is None:
        return Policy()
    values: dict[str, Any] = {}
    for each in fields(Policy):
        value = getattr(written, each.name)
        if each.name not in LISTS and value is not None:
            values[each.name] = value
    for kind, entries in (("tenants", written.tenants), ("classes", written.classes)):
        seen: set[str] = set()
        for entry in entries:
            if entry.name in seen:
                problems.add((*entry.at, "name"), f"duplicate name {shown(entry.name)} in {kind}; keep one")
            seen.add(entry.name)
    values["shared_prefixes"] = tuple(_sharing(each, models, problems) for each in written.shared_prefixes)
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


def _sharing(written: SharingIn, models: Sequence[str], problems: SpecProblems) -> PrefixSharing:
    if written.tenants != "all" and len(set(written.tenants)) < 2:
        problems.add((*written.at, "tenants"), "must name two tenants or more that share, or say `all`")
    named = () if written.models == "all" else tuple(written.models)
    for place, name in enumerate(named):
        if models and name not in models:
            line = f"unknown model {shown(name)}{did_you_mean(name, models)}"
            problems.add((*written.at, "models", place), line)
    if written.models == []:
        problems.add((*written.at, "models"), "must name models, or say `all`")
    tenants = () if written.tenants == "all" else tuple(sorted(set(written.tenants)))
    return PrefixSharing(tenants, named)


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
