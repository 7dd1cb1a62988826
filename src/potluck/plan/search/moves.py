"""THUNDERSERVE's four ways from a state to a neighbour: flip a phase, split a group, merge two, move GPUs.

GPUs in no group can be moved into one, or made into one, and the other way round. A neighbour one of whose new
groups has less memory than the weights need is dropped before anything else is asked about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from potluck.perf.memory import weight_bytes
from potluck.plan.search.deduce import MAX_STAGES, Takes
from potluck.plan.search.evaluate import Group, State
from potluck.plan.search.groups import joined, make_state, size_of, usable_bytes
from potluck.plan.search.pool import Pool, Workload

MAX_NODES = 4
"""Nodes that one group may span."""
EXCHANGE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Moves:
    """Random neighbours of states of one pool."""

    pool: Pool
    phases: tuple[int, ...]
    model_bytes: float
    most_gpus: int
    """In one group."""
    kinds: tuple[Callable[[Moves, State, Random], State | None], ...]

    def neighbour(self, state: State, rng: Random) -> State | None:
        """One neighbour; None when the drawn move cannot be done."""
        return rng.choice(self.kinds)(self, state, rng)

    def possible(self, takes: Takes) -> bool:
        """Whether a group may be worth a look."""
        if len(takes) > min(MAX_NODES, MAX_STAGES) or size_of(takes) > self.most_gpus:
            return False
        return usable_bytes(self.pool, takes) > self.model_bytes


def all_moves(pool: Pool, work: Workload, phases: tuple[int, ...], most_gpus: int) -> Moves:
    """All four; moving and splitting, which have the most outcomes, are drawn more often."""
    kinds = (flip, split, split, merge, move, move, move)
    return Moves(pool, phases, weight_bytes(work.model), most_gpus, kinds)


def flips_only(pool: Pool, work: Workload, phases: tuple[int, ...]) -> Moves:
    """What lightweight rescheduling may do."""
    return Moves(pool, phases, weight_bytes(work.model), pool.gpus, (flip,))


def flip(moves: Moves, state: State, rng: Random) -> State | None:
    """Another phase for one group."""
    if not state.groups or len(moves.phases) < 2:
        return None
    place = rng.randrange(len(state.groups))
    group = state.groups[place]
    other = rng.choice([phase for phase in moves.phases if phase != group.phase])
    return _replaced(state, (place,), [Group(group.takes, other)], state.idle)


def split(moves: Moves, state: State, rng: Random) -> State | None:
    """Two groups, or a group and idle GPUs, in place of one; or a group out of idle GPUs."""
    place = rng.randrange(len(state.groups) + 1) if state.idle else _any(state, rng)
    if place is None:
        return None
    source = state.idle if place == len(state.groups) else state.groups[place].takes
    first, second = _cut(source, rng)
    if not first or not second:
        return None
    if place == len(state.groups):
        if not moves.possible(first):
            return None
        return _replaced(state, (), [Group(first, rng.choice(moves.phases))], second)
    able = [part for part in (first, second) if moves.possible(part)]
    if not able:
        return None
    groups = [Group(part, rng.choice(moves.phases)) for part in able]
    rest = [part for part in (first, second) if part not in able]
    return _replaced(state, (place,), groups, joined((state.idle, *rest)))


def merge(moves: Moves, state: State, rng: Random) -> State | None:
    """One group in place of two."""
    if len(state.groups) < 2:
        return None
    i, j = rng.sample(range(len(state.groups)), 2)
    takes = joined((state.groups[i].takes, state.groups[j].takes))
    if not moves.possible(takes):
        return None
    return _replaced(state, (i, j), [Group(takes, rng.choice(moves.phases))], state.idle)


def move(moves: Moves, state: State, rng: Random) -> State | None:
    """Some GPUs of one node from a group to another, at times some of another node in return.

    Either group may be the idle GPUs. The paper's m_t moves so many GPUs of every type t at once; in return is a
    negative one, and without it two full groups could not exchange what they have.
    """
    places = len(state.groups) + 1
    if places < 2:
        return None
    i, j = rng.sample(range(places), 2)
    first, second = (state.groups[p].takes if p < len(state.groups) else state.idle for p in (i, j))
    if not first:
        return None
    part = _some(first, rng)
    back = _some(second, rng) if second and rng.random() < EXCHANGE_SHARE else ()
    if back and back[0][0] == part[0][0]:
        return None
    after = (joined((without(first, part), back)), joined((without(second, back), part)))
    idle = state.idle
    groups = []
    for place, left in zip((i, j), after, strict=True):
        if place == len(state.groups):
            idle = left
        elif left:
            if not moves.possible(left):
                return None
            groups.append(Group(left, state.groups[place].phase))
    gone = tuple(place for place in (i, j) if place < len(state.groups))
    return _replaced(state, gone, groups, idle)


def _some(takes: Takes, rng: Random) -> Takes:
    node, most = rng.choice(takes)
    return ((node, rng.randint(1, most)),)


def without(takes: Takes, part: Takes) -> Takes:
    """What is left of a group."""
    counts = dict(takes)
    for node, count in part:
        counts[node] -= count
    return tuple((node, count) for node, count in sorted(counts.items()) if count)


def _cut(takes: Takes, rng: Random) -> tuple[Takes, Takes]:
    """Two parts: of every node the same random share, or some nodes whole, or one node's GPUs."""
    way = rng.random()
    if way < 0.5 or len(takes) == 1:
        share = rng.random()
        first = tuple((node, int(count * share + rng.random())) for node, count in takes)
        first = tuple((node, min(count, dict(takes)[node])) for node, count in first if count)
    else:
        first = tuple(each for each in takes if rng.random() < 0.5)
    return first, without(takes, first)


def _any(state: State, rng: Random) -> int | None:
    return rng.randrange(len(state.groups)) if state.groups else None


def _replaced(state: State, gone: tuple[int, ...], groups: list[Group], idle: Takes) -> State:
    kept = [group for place, group in enumerate(state.groups) if place not in gone]
    return make_state([*kept, *groups], idle)
