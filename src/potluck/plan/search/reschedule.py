"""Lightweight rescheduling (THUNDERSERVE 3.4): new phases and new routing, nothing is loaded again.

After GPUs were lost or the work has shifted, the groups that are whole keep their stages and layers; only
which phase each does and how requests are routed is decided anew, by flips alone: all combinations where they
are few, else a tabu search. GPUs of broken groups stay idle until a full search.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import product

from potluck.core.errors import CapacityError, InputError
from potluck.plan.search.deduce import PHASES, GroupConfiguration, StageTake, Takes, deducer
from potluck.plan.search.evaluate import GpuGroup, PoolEvaluator, PoolUse
from potluck.plan.search.groups import joined, make_state
from potluck.plan.search.moves import flips_only, without
from potluck.plan.search.pool_workload import Pool, PoolWorkload
from potluck.plan.search.tabu import SearchResult, SearchSettings, TabuSearch

MOST_COMBINATIONS = 3000


@dataclass(frozen=True, slots=True)
class PoolSurvivors:
    """What is left after a loss."""

    pool: Pool
    kept: tuple[int, ...]
    """Places of the groups that are whole."""
    idle: Takes


def survivors(
    pool: Pool, found: SearchResult, lost: Mapping[str, int], dead: Collection[int] | None = None
) -> PoolSurvivors:
    """Who survives losing so many GPUs of each named node.

    `dead` are the places of the groups that were hit, where that is known. Otherwise a node's idle GPUs are
    taken to be lost first, then the groups with the most GPUs on it: few groups explain the loss of a part.
    The loss of a whole node hits everyone on it in any case.
    """
    rest = pool.without(lost)
    free = {node: rest.nodes[node].gpus for node in range(len(rest.nodes))}
    groups = found.state.groups
    hit = set(dead or ())
    if not hit <= set(range(len(groups))):
        raise InputError("reschedule: dead", f"names a group beyond the {len(groups)} there are")
    if dead is None:
        hit = _fewest(groups, found.state.idle, {pool.index(name): n for name, n in lost.items()})
    kept = tuple(place for place in range(len(groups)) if place not in hit)
    used = joined(groups[place].takes for place in kept)
    if any(count > free[node] for node, count in used):
        raise InputError("reschedule: dead", "the groups left need more GPUs than the pool has")
    everything = tuple((node, count) for node, count in free.items() if count)
    return PoolSurvivors(rest, kept, without(everything, used))


def _fewest(groups: tuple[GpuGroup, ...], idle: Takes, lost: Mapping[int, int]) -> set[int]:
    hit: set[int] = set()
    for node, count in sorted(lost.items()):
        left = count - dict(idle).get(node, 0) - sum(dict(groups[g].takes).get(node, 0) for g in hit)
        mine = [(dict(g.takes)[node], p) for p, g in enumerate(groups) if node in dict(g.takes)]
        for taken, place in sorted(mine, reverse=True):
            if left <= 0:
                break
            if place not in hit:
                hit.add(place)
                left -= taken
    return hit


def reschedule(
    left: PoolSurvivors, found: SearchResult, work: PoolWorkload, settings: SearchSettings | None = None
) -> SearchResult:
    """New phases and routing for the groups that are left, for the same or another workload."""
    chosen = settings or SearchSettings()
    source = deducer(left.pool, work, chosen.timing)
    phases = tuple(PHASES[role] for role in chosen.phases)
    stages = [found.configurations[place].stages for place in left.kept]
    # Groups are named by their place: two of the same GPUs may be loaded unlike.
    for place, mine in enumerate(stages):
        for phase in phases:
            source.seen[((place, 1),), phase] = source.fixed(mine, phase)
    evaluator = PoolEvaluator(source)
    able = [[p for p in phases if source.seen[((place, 1),), p]] for place in range(len(stages))]
    working = [place for place in range(len(stages)) if able[place]]
    if not working:
        raise CapacityError("no group that is left can serve within the objective; search the pool anew")
    hunt = TabuSearch(evaluator, flips_only(left.pool, work, phases), chosen)
    hunt.try_all(_combinations(working, able, found, left))
    return _named(hunt.found(), left, found)


def _combinations(
    working: list[int], able: list[list[int]], found: SearchResult, left: PoolSurvivors
) -> list[PoolUse]:
    """The present designation, and all others if they are few."""
    size = 1
    now = []
    for place in working:
        size *= len(able[place])
        phase = found.state.groups[left.kept[place]].phase
        now.append(phase if phase in able[place] else able[place][0])
    choices = [tuple(now)]
    if size <= MOST_COMBINATIONS:
        choices += [each for each in product(*(able[place] for place in working)) if each != tuple(now)]
    return [
        make_state([GpuGroup(((w, 1),), p) for w, p in zip(working, chosen, strict=True)], ())
        for chosen in choices
    ]


def _named(answer: SearchResult, left: PoolSurvivors, before: SearchResult) -> SearchResult:
    """With the real GPUs in place of places; groups keep the order that the routing speaks of."""
    places = [left.kept[group.takes[0][0]] for group in answer.state.groups]
    groups = tuple(
        GpuGroup(before.state.groups[place].takes, group.phase)
        for place, group in zip(places, answer.state.groups, strict=True)
    )
    useless = [before.state.groups[p].takes for p in left.kept if p not in places]
    return replace(answer, state=PoolUse(groups, joined((left.idle, *useless))))


def flipped(before: SearchResult, after: SearchResult) -> tuple[tuple[GroupConfiguration, int, int], ...]:
    """(configuration, old phase, new phase) of every group that changes its phase."""
    old: dict[tuple[Takes, tuple[StageTake, ...]], list[int]] = {}
    for group, mine in zip(before.state.groups, before.configurations, strict=True):
        old.setdefault((group.takes, mine.stages), []).append(group.phase)
    changes = []
    for group, mine in zip(after.state.groups, after.configurations, strict=True):
        phases = old[group.takes, mine.stages]
        was = group.phase if group.phase in phases else phases[0]
        phases.remove(was)
        if was != group.phase:
            changes.append((mine, was, group.phase))
    return tuple(changes)
