"""What a person changes while the service runs, and how the controller keeps to it.

Copies that were set by hand are a plan version of their own, whose reason begins with `by hand`. While that is the
newest one, the planner's plans are advice only; `potluck fleet scale --auto` puts the planner's last one into force
again. A replica that is drained by hand gets a new engine: the old one is *leaving*, gets no other replica, and stops
once its requests have finished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from potluck.control.state_store import PlanVersion, StateStore
from potluck.core.errors import InputError, PotluckError, UnknownNameError
from potluck.core.values.fleet_cost import HEADS, heads_usd_per_h, offers_in, rent_usd_per_h
from potluck.core.values.plan import Charge, Deployment, Plan, PlannedShare
from potluck.core.values.types import Region

BY_HAND = "by hand"
CORDONED = "cordoned"
"""The setting that lists engines and machines that get nothing new, for a gateway that is started again."""
LEAVING = "leaving"  # The setting that lists engines whose replica is drained by hand.


def is_by_hand(version: PlanVersion | None) -> bool:
    return version is not None and version.reason.startswith(BY_HAND)


def planned_last(store: StateStore) -> PlanVersion | None:
    number = next((item for item, reason in store.versions() if not reason.startswith(BY_HAND)), None)
    return None if number is None else store.plan(number)


def put_plan(
    store: StateStore, tell: Callable[[Plan, str, int], None], plan: Plan, reason: str, now_s: float
) -> int:
    """Write a plan down and tell the gateway; its version. One that the gateway does not take is forgotten."""
    version = store.add_plan(plan, now_s, reason)
    try:
        tell(plan, reason, version)
    except PotluckError:
        store.forget_plan(version)
        raise
    return version


def scaled(
    plan: Plan,
    template: str,
    region: str,
    count: int,
    usd_per_h: Mapping[str, float],
    available: Mapping[tuple[str, str], int] | None = None,
    regions: Sequence[Region] = (),
) -> Plan:
    """The same plan with so many copies there; `usd_per_h` is what one costs in each region that can have it, and
    `available` how many nodes there are, (region, node) to a number: what cannot be had is refused. With
    `regions` the rent leaves out the reserved nodes, and head nodes are those of the regions that are used now."""
    names = [item.name for item in plan.templates]
    if template not in names:
        raise UnknownNameError("template", template, names)
    if region not in usd_per_h:
        there = {name for name, _ in available or ()}
        if region not in there:
            raise UnknownNameError("REGION", region, sorted(there) or usd_per_h)
        nodes = ", ".join(node_count.node for node_count in plan.template(template).nodes)
        where = ", ".join(usd_per_h) or "no region"
        raise InputError("REGION", f"{region} has not all that a copy needs ({nodes}); {where} has")
    if count < 0:
        raise InputError("COUNT", f"must not be negative, is {count}")
    _must_be_there(plan, template, region, count, available or {})
    rest = _others(plan, template, region)
    before = sum(each.count for each in plan.deployments) - sum(each.count for each in rest)
    deployments = (*rest, Deployment(template, region, count)) if count else rest
    cost = max(0.0, plan.cost_usd_per_h + (count - before) * usd_per_h[region])
    kept = tuple(share for share in plan.shares if (share.template, share.region) != (template, region))
    shares = _copy_shares(plan, template, region)
    new = tuple(replace(share, rate_per_s=share.rate_per_s * count) for share in shares)
    changed = replace(
        plan, deployments=deployments, shares=kept + (new if count else ()), cost_usd_per_h=cost
    )
    if not regions:
        return changed
    rent = rent_usd_per_h(offers_in(regions), changed.nodes)
    heads = Charge(HEADS, heads_usd_per_h(regions, {item.region for item in deployments}))
    others = tuple(charge for charge in changed.charges if charge.what != HEADS)
    return replace(changed, cost_usd_per_h=rent, charges=(*others, heads) if heads.usd_per_h > 0 else others)


def _others(plan: Plan, template: str, region: str) -> tuple[Deployment, ...]:
    """All but the copies of this template there."""
    return tuple(each for each in plan.deployments if (each.template, each.region) != (template, region))


def _must_be_there(
    plan: Plan, template: str, region: str, count: int, available: Mapping[tuple[str, str], int]
) -> None:
    """Refuse more copies than there are nodes for beside the plan's others."""
    others = replace(plan, deployments=_others(plan, template, region)).nodes
    fits = []
    for node_count in plan.template(template).nodes:
        place = (region, node_count.node)
        if place in available:
            free = max(0, available[place] - others.get(place, 0))
            fits.append((free // node_count.count, node_count.node))
    if not fits or count <= min(fits)[0]:
        return
    most, node = min(fits)
    taken = others.get((region, node), 0)
    used = f", {taken} of them for other copies" if taken else ""
    raise InputError(
        "COUNT",
        f"{count} cannot be had: {region} has {available[region, node]} x {node}{used}, enough for {most}; "
        f"ask for {most} at most, or offer more of them in the spec and start again",
    )


def _copy_shares(plan: Plan, template: str, region: str) -> tuple[PlannedShare, ...]:
    """What one copy is sent there: as the plan has it, or as for copies elsewhere, or as much as one can do. A plan
    without any shares sends each copy what it can do anyhow."""
    if not plan.shares:
        return ()
    counts = {(each.template, each.region): each.count for each in plan.deployments if each.count}
    others = [item for name, item in counts if name == template and item != region]
    for place in (region, *others):
        result = [share for share in plan.shares if (share.template, share.region) == (template, place)]
        if result and (template, place) in counts:
            count = counts[template, place]
            return tuple(replace(each, region=region, rate_per_s=each.rate_per_s / count) for each in result)
    able = plan.template(template).capacity
    shares = (
        *(PlannedShare(template, region, each.bucket, "prefill", each.prefill_per_s) for each in able),
        *(PlannedShare(template, region, each.bucket, "decode", each.decode_per_s) for each in able),
        *(PlannedShare(template, region, each.bucket, "closed", each.closed_per_s) for each in able),
    )
    return tuple(share for share in shares if share.rate_per_s > 0)


def leave(store: StateStore, names: Iterable[str]) -> None:
    there = {instance.name for instance in store.instances()}
    before = [name for name in store.get(LEAVING) or [] if name in there]
    store.set(LEAVING, sorted({*before, *names}))


def stay(store: StateStore, names: Iterable[str]) -> None:
    store.set(LEAVING, sorted(leaving(store) - frozenset(names)))


def leaving(store: StateStore) -> frozenset[str]:
    return frozenset(store.get(LEAVING) or ())


class KeptCordons:
    """What operators told the gateway of engines that get nothing new: one that is started again is told again."""

    def __init__(self, store: StateStore, tell: Callable[[Iterable[str]], None]) -> None:
        self._store, self._tell = store, tell
        self._up_s = inf  # How long the gateway had run when it was last asked.

    def heed(self, wanted: Mapping[str, Any]) -> str:
        """At every turn; why it could not be told, else nothing."""
        message, up_s = set(wanted.get("cordoned", ())), float(wanted.get("up_s", 0.0))
        fresh, kept = up_s < self._up_s, set(self._store.get(CORDONED) or ())
        if fresh and kept - message:
            try:
                self._tell(kept - message)
            except PotluckError as error:
                return str(error)
        elif not fresh and kept != message:
            self._store.set(CORDONED, sorted(message))
        self._up_s = up_s
        return ""


Snapshot = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UpgradeTurn:
    """One copy: replicas that are emptied together, and where their engines listen."""

    replicas: tuple[str, ...]
    urls: tuple[str, ...]


def turns(snapshot: Snapshot) -> tuple[UpgradeTurn, ...]:
    """All copies that serve, those of which there are most first: what goes wrong is seen where it costs least."""
    units: dict[str, list[Mapping[str, Any]]] = {}
    for item in _serving(snapshot):
        units.setdefault(str(item["unit"]), []).append(item)
    alike = Counter(_kind(unit[0]) for unit in units.values())
    ordered = sorted(units.values(), key=lambda mappings: -alike[_kind(mappings[0])])
    return tuple(
        UpgradeTurn(*(tuple(str(entry[name]) for entry in unit) for name in ("replica", "url")))
        for unit in ordered
    )


def due(snapshot: Snapshot, passed_s: float) -> tuple[UpgradeTurn, ...]:
    """Copies with an engine that was there before the upgrade began, so long ago. One that was lost meanwhile and
    came back is a new one already."""
    since = {str(item["url"]): float(item["uptime_s"]) for item in snapshot["engines"]}
    return tuple(
        turn for turn in turns(snapshot) if any(since.get(url, 0.0) >= passed_s for url in turn.urls)
    )


def lacks(snapshot: Snapshot, before: Snapshot, turn: UpgradeTurn, passed_s: float) -> str:
    """What is still waited for, so long after a copy was asked to drain; empty when another is in its place."""
    left = {str(item["replica"]) for item in snapshot["replicas"]} & set(turn.replicas)
    if left:
        return f"{min(left)} still has requests"
    engines = {str(item["url"]): item for item in snapshot["engines"]}
    for url in turn.urls:
        engine = engines.get(url)
        if engine is not None and not (engine["up"] and float(engine["uptime_s"]) < passed_s):
            return f"no other engine has come up at {url}"
    missing = Counter(map(_kind, _serving(before))) - Counter(map(_kind, _serving(snapshot)))
    for (template, _, region), count in missing.items():
        return f"{count} of {template} in {region} are not ready"
    return ""


def _serving(snapshot: Snapshot) -> Sequence[Mapping[str, Any]]:
    return [item for item in snapshot["replicas"] if item["state"] == "ready" and item["url"] is not None]


def _kind(replica: Mapping[str, Any]) -> tuple[str, int, str]:
    return str(replica["template"]), int(replica["index"]), str(replica["region"])
