"""A plan that wants the same replicas in other roles: copies become another template's, and nothing is started.

A copy that there is too much of can become one that is missing if both are of one model, in one region, on the same
layouts (GPUs, cuts, named machines): then only roles differ, and roles change in place. Copies whose replicas work
together (combos, pairs) stay what they are: who hands to whom is a part of them. So do copies with a role that a
person gave.

Of several, those go first that have the wanted roles already (they were flipped), then those with the least to do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from potluck.core.scaling.copy_capacity import Key, TemplateCapacity
from potluck.core.scaling.roles import FLIPPABLE
from potluck.core.state.actions import Reassign
from potluck.core.state.fleet import FleetState, ReplicaState, TemplateCopy
from potluck.core.values.plan import PlannedReplica, Template


def recasts(
    fleet: FleetState,
    wanted: Mapping[Key, int],
    known: Mapping[str, TemplateCapacity],
    fixed: Collection[str] = (),
) -> tuple[Reassign, ...]:
    """Which replicas become whose, so that as little as possible is missing; `fixed` ones stay."""
    live: dict[Key, list[TemplateCopy]] = {}
    for unit in fleet.units.values():
        if not unit.standby and not any(view.state == "draining" for view in unit.views):
            live.setdefault((unit.template, unit.region), []).append(unit)
    spare = {
        key: [unit for unit in units if _free(unit, fixed)]
        for key, units in live.items()
        if key in wanted and len(units) > wanted[key] and _plain(known, key)
    }
    left = {key: len(live[key]) - wanted[key] for key in spare}
    found: list[Reassign] = []
    for key in sorted(key for key in wanted if _plain(known, key)):
        template = known[key[0]].template
        for _ in range(wanted[key] - len(live.get(key, ()))):
            best = _best(template, key, spare, left, known)
            if best is None:
                break
            source, unit, places = best
            spare[source].remove(unit)
            left[source] -= 1
            found += [_recast(view, template, index) for index, view in enumerate(places)]
    return tuple(found)


def _plain(known: Mapping[str, TemplateCapacity], key: Key) -> bool:
    return key[0] in known and known[key[0]].template.kind in FLIPPABLE


def _free(unit: TemplateCopy, fixed: Collection[str]) -> bool:
    return unit.whole and not any(view.member.id in fixed for view in unit.views)


def _best(
    template: Template,
    key: Key,
    spare: Mapping[Key, list[TemplateCopy]],
    left: Mapping[Key, int],
    known: Mapping[str, TemplateCapacity],
) -> tuple[Key, TemplateCopy, list[ReplicaState]] | None:
    """A copy that can become one of these, with its replicas in their new places."""
    ranked = []
    for source, units in spare.items():
        if left[source] <= 0 or source[1] != key[1] or known[source[0]].template.model != template.model:
            continue
        for unit in units:
            places = _placed(unit, known[source[0]].template.replicas, template.replicas)
            if places is not None:
                pairs = zip(places, template.replicas, strict=True)
                flips = sum(view.role != replica.role for view, replica in pairs)
                load = sum(view.open_requests for view in unit.views)
                ranked.append(((flips, load, unit.id), source, unit, places))
    return min(ranked, key=lambda each: each[0])[1:] if ranked else None


def _placed(
    unit: TemplateCopy, old: Sequence[PlannedReplica], new: Sequence[PlannedReplica]
) -> list[ReplicaState] | None:
    """For each new replica one of the copy's on its layout, in its role if there is one; None where there is none."""
    views = list(unit.views)
    if len(views) != len(new):
        return None
    found = []
    for replica in new:
        alike = [view for view in views if old[view.member.index].layout == replica.layout]
        if not alike:
            return None
        chosen = next((view for view in alike if view.role == replica.role), alike[0])
        views.remove(chosen)
        found.append(chosen)
    return found


def _recast(view: ReplicaState, template: Template, index: int) -> Reassign:
    role = template.replicas[index].role
    return Reassign(replace(view.member, template=template.name, index=index, kind=template.kind, role=role))
