"""What copies of templates serve and which nodes they hold, for comparing a fleet before and after a change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from potluck.core.scaling.copy_rates import CopyRates, planned_mix, rates_of, total
from potluck.core.state.fleet import FleetState, TemplateCopy
from potluck.core.values.plan import Plan, Template

Key = tuple[str, str]
"""(template, region)"""
Resource = tuple[str, str]
"""(region, node type), or (region, `machine NAME`) where a template names the machine."""
MACHINE = "machine "


class TemplateCapacity(NamedTuple):
    """A template and what one copy of it serves, under the mix of the plan it came with."""

    template: Template
    rates: CopyRates


def blueprints(plan: Plan) -> dict[str, TemplateCapacity]:
    mixes = {model: planned_mix(plan, model) for model in {t.model for t in plan.repertoire}}
    return {t.name: TemplateCapacity(t, rates_of(t, mixes[t.model])) for t in plan.repertoire}


class CopyMeasure:
    """What copies serve, for comparing before and after.

    Where the rates of one of a model's templates are not known, or replicas were flipped so that they no longer hold,
    copies of that model are counted instead, by what their replicas do.
    """

    def __init__(
        self, fleet: FleetState, wanted: Mapping[Key, int], known: Mapping[str, TemplateCapacity]
    ) -> None:
        self._known = known
        self._counted = {
            unit.model
            for unit in fleet.units.values()
            if unit.template not in known
            or not known[unit.template].rates.known
            or any(view.role != view.member.role for view in unit.views)
        }
        ours = {name: known[name] for name, _ in wanted if name in known}
        self._counted |= {each.template.model for each in ours.values() if not each.rates.known}
        parts: dict[str, list[CopyRates]] = {}
        for (name, _), count in wanted.items():
            if name in ours:
                parts.setdefault(ours[name].template.model, []).append(self._template(name).times(count))
        for unit in fleet.units.values():
            if (unit.template, unit.region) not in wanted and unit.whole and not unit.standby:
                parts.setdefault(unit.model, []).append(self.unit(unit))
        self.targets = {model: total(rates) for model, rates in parts.items()}

    def target_per_s(self, model: str) -> float:
        return self.targets[model].served_per_s if model in self.targets else 0.0

    def unit(self, unit: TemplateCopy) -> CopyRates:
        if unit.model in self._counted:
            return _by_roles(view.role for view in unit.views)
        return self._known[unit.template].rates

    def _template(self, name: str) -> CopyRates:
        template, rates = self._known[name]
        return _by_roles(r.role for r in template.replicas) if template.model in self._counted else rates


def _by_roles(roles: Iterable[str]) -> CopyRates:
    found = set(roles)
    if found == {"prefill"}:
        return CopyRates(prefill_per_s=1.0)
    return CopyRates(decode_per_s=1.0) if found == {"decode"} else CopyRates(closed_per_s=1.0)


class FreeNodes:
    """Nodes that are free, and GPUs of named machines."""

    __slots__ = ("_free", "_known")

    def __init__(self, known: Mapping[str, TemplateCapacity], free: dict[Resource, int]) -> None:
        self._known, self._free = known, free

    def copy(self) -> FreeNodes:
        return FreeNodes(self._known, dict(self._free))

    def take(self, key: Key) -> bool:
        """Set a copy's nodes aside if all are free."""
        needs = _needs(self._known[key[0]].template, key[1])
        if any(self._free.get(each, count) < count for each, count in needs.items()):
            return False
        self._add(needs, -1)
        return True

    def give(self, unit: TemplateCopy) -> None:
        """A copy's nodes are coming back."""
        if unit.template in self._known:
            self._add(_needs(self._known[unit.template].template, unit.region), 1)

    def helps(self, key: Key, unit: TemplateCopy) -> bool:
        """Whether a copy holds some of what this one lacks."""
        if unit.template not in self._known:
            return False
        holds = _needs(self._known[unit.template].template, unit.region)
        needs = _needs(self._known[key[0]].template, key[1])
        return any(self._free.get(each, count) < count for each, count in needs.items() if each in holds)

    def _add(self, needs: Mapping[Resource, int], sign: int) -> None:
        for each, count in needs.items():
            if each in self._free:
                self._free[each] += sign * count


def room_in(
    fleet: FleetState,
    wanted: Mapping[Key, int],
    known: Mapping[str, TemplateCapacity],
    available: Mapping[Resource, int] | None,
    stopped: Collection[str] = (),
) -> FreeNodes:
    """What is free beside all copies but those whose replicas have all been stopped.

    Node types that `available` does not name cannot be had; without it they are unlimited. How many GPUs a named
    machine has is not known here; both what is there and what is wanted fit, so the larger of the two is its limit.
    """
    held: dict[Resource, int] = {}
    for unit in fleet.units.values():
        if unit.template in known and not all(view.member.id in stopped for view in unit.views):
            for each, count in _needs(known[unit.template].template, unit.region).items():
                held[each] = held.get(each, 0) + count
    asked: dict[Resource, int] = {}
    for (name, region), copies in wanted.items():
        for each, count in _needs(known[name].template, region).items() if name in known else ():
            asked[each] = asked.get(each, 0) + count * copies
    free = {}
    for each in {*held, *asked}:
        if each[1].startswith(MACHINE):
            free[each] = max(held.get(each, 0), asked.get(each, 0)) - held.get(each, 0)
        elif available is not None:
            free[each] = available.get(each, 0) - held.get(each, 0)
    return FreeNodes(known, free)


def _needs(template: Template, region: str) -> dict[Resource, int]:
    needs = {(region, each.node): each.count for each in template.nodes}
    needs.update({(region, MACHINE + name): gpus for name, gpus in template.machines.items()})
    return needs
