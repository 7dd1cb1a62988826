"""THUNDERSERVE's four ways from a state to a neighbour: flip a phase, split a group, merge two, move GPUs.

A fifth, `swap`, exchanges two nodes that differ only in their links, everywhere at once. GPUs in no group can be
moved into one, or made into one, and the other way round. A neighbour one of whose new groups has less memory than
the weights need is dropped at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from random import Random

from potluck.perf.kv_capacity import USABLE_SHARE
from potluck.perf.memory import weight_bytes
from potluck.plan.search.deduce import MAX_STAGES, Takes
from potluck.plan.search.evaluate import GpuGroup, PoolEvaluator, PoolUse
from potluck.plan.search.workload import Pool, PoolWorkload

MOST_DEALT = 12
MARGIN = 1.15  # How much more memory than the weights a first group gets, for KV.


def starting_state(
    evaluator: PoolEvaluator,
    phases: tuple[int, ...],
    rng: Random,
    scale: float = 1.0,
    most_gpus: int | None = None,
) -> PoolUse:
    """Clusters that hold the model `scale` times over, each with a random phase that it can do."""
    pool = evaluator.deducer.pool
    model_bytes = weight_bytes(evaluator.deducer.work.model)

    def holds(cluster: Takes) -> bool:
        full = most_gpus is not None and size_of(cluster) >= most_gpus
        return full or usable_bytes(pool, cluster) >= model_bytes * MARGIN * scale

    groups, idle = [], []
    for cluster in clusters(pool, holds):
        small = most_gpus is None or size_of(cluster) <= most_gpus
        able = [p for p in phases if small and evaluator.number(GpuGroup(cluster, p)) >= 0]
        if able:
            groups.append(GpuGroup(cluster, rng.choice(able)))
        else:
            idle.append(cluster)
    return make_state(groups, joined(idle))


def dealt_state(
    evaluator: PoolEvaluator,
    phases: tuple[int, ...],
    rng: Random,
    kinds: Sequence[Sequence[int]],
    most_gpus: int,
) -> PoolUse:
    """A random number of groups that are dealt even shares of every kind of node, and random phases.

    Clusters keep like nodes together; groups of unlike ones that mirror each other are as often good.
    """
    pool = evaluator.deducer.pool
    count = rng.randint(2, max(2, min(MOST_DEALT, pool.gpus // 3)))
    hands: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    turn = 0
    for nodes in rng.sample(kinds, len(kinds)):
        pieces = -(-count // len(nodes))
        for node in nodes:
            gpus = pool.nodes[node].gpus
            for piece in range(pieces):
                size = gpus * (piece + 1) // pieces - gpus * piece // pieces
                if size:
                    hands[turn % count].append((node, size))
                    turn += 1
    groups, idle = [], []
    for hand in hands:
        takes = joined([tuple(hand)])
        if not takes:
            continue
        able = [
            p for p in phases if size_of(takes) <= most_gpus and evaluator.number(GpuGroup(takes, p)) >= 0
        ]
        if able:
            groups.append(GpuGroup(takes, rng.choice(able)))
        else:
            idle.append(takes)
    return make_state(groups, joined(idle))


def clusters(pool: Pool, holds: Callable[[Takes], bool]) -> list[Takes]:
    """Agglomerate until every cluster holds the model or is the only one left."""
    members: list[Takes] = [((i, 1),) for i, node in enumerate(pool.nodes) for _ in range(node.gpus)]
    done: list[Takes] = []
    while members:
        done += [cluster for cluster in members if holds(cluster)]
        members = [cluster for cluster in members if not holds(cluster)]
        # A cluster that is done takes no more in unless somebody is left alone.
        partners = members if len(members) > 1 else [*members, *done]
        if not members or len(partners) < 2:
            break
        first, second = _closest(pool, members, partners)
        for item in (first, second):
            (members if item in members else done).remove(item)
        members.append(joined((first, second)))
    return sorted(done + members)


def _closest(pool: Pool, members: list[Takes], partners: list[Takes]) -> tuple[Takes, Takes]:
    best: tuple[float, int, Takes, Takes] | None = None
    known: set[tuple[Takes, Takes]] = set()
    for i, first in enumerate(members):
        for j, second in enumerate(partners):
            if j == i and partners[j] is members[i]:
                continue
            if (first, second) in known:
                continue
            known.add((first, second))
            key = (-_mean_gbps(pool, first, second), size_of(first) + size_of(second), first, second)
            if best is None or key < best:
                best = key
    assert best is not None
    return best[2], best[3]


def _mean_gbps(pool: Pool, first: Takes, second: Takes) -> float:
    total = weight = 0.0
    for a, i in first:
        for b, j in second:
            inside = pool.nodes[a].type.interconnect.gb_per_s * 8.0
            total += i * j * (inside if a == b else pool.gbps[a][b])
            weight += i * j
    return total / weight


def size_of(takes: Takes) -> int:
    return sum(count for _, count in takes)


def usable_bytes(pool: Pool, takes: Takes) -> float:
    return sum(count * pool.nodes[node].type.gpu.memory_bytes for node, count in takes) * USABLE_SHARE


def joined(parts: Iterable[Takes]) -> Takes:
    counts: dict[int, int] = {}
    for part in parts:
        for node, count in part:
            counts[node] = counts.get(node, 0) + count
    return tuple(sorted((node, count) for node, count in counts.items() if count))


def make_state(groups: Iterable[GpuGroup], idle: Takes) -> PoolUse:
    return PoolUse(tuple(sorted(groups)), idle)


MAX_NODES = 4  # Nodes that one group may span.
MOST_PARTS = min(MAX_NODES, MAX_STAGES)
EXCHANGE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class NeighbourMoves:
    pool: Pool
    phases: tuple[int, ...]
    model_bytes: float
    most_gpus: int  # In one group.
    gpu_bytes: tuple[float, ...]  # Usable memory of a GPU of each node.
    kinds: tuple[Callable[[NeighbourMoves, PoolUse, Random], PoolUse | None], ...]
    alike: tuple[tuple[int, int], ...] = ()  # Pairs of nodes that differ only in their links.

    def neighbour(self, pool_use: PoolUse, rng: Random) -> PoolUse | None:
        """One neighbour; None when the drawn move cannot be done."""
        return rng.choice(self.kinds)(self, pool_use, rng)

    def possible(self, takes: Takes) -> bool:
        """Whether a group may be worth a look."""
        if len(takes) > MOST_PARTS:
            return False
        gpus, room = 0, 0.0
        for node, count in takes:
            gpus += count
            room += count * self.gpu_bytes[node]
        return gpus <= self.most_gpus and room > self.model_bytes


def all_moves(pool: Pool, work: PoolWorkload, phases: tuple[int, ...], most_gpus: int) -> NeighbourMoves:
    """All of them; moving and splitting, which have the most outcomes, are drawn more often."""
    alike = tuple(pair for nodes in kinds_of(pool) for pair in combinations(nodes, 2))
    kinds = (flip, split, split, merge, move, move, move, *((swap,) if alike else ()))
    return NeighbourMoves(pool, phases, weight_bytes(work.model), most_gpus, _gpu_bytes(pool), kinds, alike)


def flips_only(pool: Pool, work: PoolWorkload, phases: tuple[int, ...]) -> NeighbourMoves:
    """What lightweight rescheduling may do."""
    return NeighbourMoves(pool, phases, weight_bytes(work.model), pool.gpus, _gpu_bytes(pool), (flip,))


def _gpu_bytes(pool: Pool) -> tuple[float, ...]:
    return tuple(usable_bytes(pool, ((place, 1),)) for place in range(len(pool.nodes)))


def flip(moves: NeighbourMoves, pool_use: PoolUse, rng: Random) -> PoolUse | None:
    if not pool_use.groups or len(moves.phases) < 2:
        return None
    place = rng.randrange(len(pool_use.groups))
    group = pool_use.groups[place]
    other = rng.choice([phase for phase in moves.phases if phase != group.phase])
    return _replaced(pool_use, (place,), [GpuGroup(group.takes, other)], pool_use.idle)


def split(moves: NeighbourMoves, pool_use: PoolUse, rng: Random) -> PoolUse | None:
    """Two groups, or a group and idle GPUs, in place of one; or a group out of idle GPUs."""
    place = rng.randrange(len(pool_use.groups) + 1) if pool_use.idle else _any(pool_use, rng)
    if place is None:
        return None
    source = pool_use.idle if place == len(pool_use.groups) else pool_use.groups[place].takes
    first, second = _cut(source, rng)
    if not first or not second:
        return None
    if place == len(pool_use.groups):
        if not moves.possible(first):
            return None
        return _replaced(pool_use, (), [GpuGroup(first, rng.choice(moves.phases))], second)
    able = [part for part in (first, second) if moves.possible(part)]
    if not able:
        return None
    groups = [GpuGroup(part, rng.choice(moves.phases)) for part in able]
    rest = [part for part in (first, second) if part not in able]
    return _replaced(pool_use, (place,), groups, joined((pool_use.idle, *rest)))


def merge(moves: NeighbourMoves, pool_use: PoolUse, rng: Random) -> PoolUse | None:
    if len(pool_use.groups) < 2:
        return None
    i, j = rng.sample(range(len(pool_use.groups)), 2)
    takes = joined((pool_use.groups[i].takes, pool_use.groups[j].takes))
    if not moves.possible(takes):
        return None
    return _replaced(pool_use, (i, j), [GpuGroup(takes, rng.choice(moves.phases))], pool_use.idle)


def move(moves: NeighbourMoves, pool_use: PoolUse, rng: Random) -> PoolUse | None:
    """Some GPUs of one node from a group to another, at times some of another node in return.

    Either group may be the idle GPUs. The paper's m_t moves so many GPUs of every type t at once; in return is a
    negative one, and without it two full groups could not exchange what they have.
    """
    places = len(pool_use.groups) + 1
    if places < 2:
        return None
    i, j = rng.sample(range(places), 2)
    first, second = (pool_use.groups[p].takes if p < len(pool_use.groups) else pool_use.idle for p in (i, j))
    if not first:
        return None
    part = _some(first, rng)
    back = _some(second, rng) if second and rng.random() < EXCHANGE_SHARE else ()
    if back and back[0][0] == part[0][0]:
        return None
    after = (joined((without(first, part), back)), joined((without(second, back), part)))
    return _between(moves, pool_use, (i, j), after)


def _between(
    moves: NeighbourMoves, pool_use: PoolUse, places: tuple[int, int], after: tuple[Takes, Takes]
) -> PoolUse | None:
    """The state in which two groups, or one and the idle GPUs, have these GPUs."""
    idle = pool_use.idle
    groups = []
    for place, left in zip(places, after, strict=True):
        if place == len(pool_use.groups):
            idle = left
        elif left:
            if not moves.possible(left):
                return None
            groups.append(GpuGroup(left, pool_use.groups[place].phase))
    gone = tuple(place for place in places if place < len(pool_use.groups))
    return _replaced(pool_use, gone, groups, idle)


def all_near(moves: NeighbourMoves, pool_use: PoolUse, rng: Random) -> Iterator[PoolUse]:
    """Every neighbour by one flip, one swap, GPUs of one node moved, or as many of two nodes exchanged.

    Where only flips are allowed, every neighbour by one flip: groups are then named by places, not by nodes.
    In random order of the groups and nodes concerned, and made one by one: whoever looks for a better one may
    find it soon.
    """
    sides = [*(group.takes for group in pool_use.groups), pool_use.idle]
    tasks: list[tuple[Callable[[NeighbourMoves, PoolUse, int, int], Iterator[PoolUse]], int, int]] = []
    tasks += [(_flips, place, place) for place in range(len(pool_use.groups))]
    tasks += [(_swaps, a, b) for a, b in moves.alike]
    if move in moves.kinds:
        tasks += [(_exchanges, i, j) for i, j in permutations(range(len(sides)), 2)]
    rng.shuffle(tasks)
    for make, i, j in tasks:
        yield from make(moves, pool_use, i, j)


def _flips(moves: NeighbourMoves, pool_use: PoolUse, place: int, _: int) -> Iterator[PoolUse]:
    takes, now = pool_use.groups[place]
    for phase in moves.phases:
        if phase != now:
            yield _replaced(pool_use, (place,), [GpuGroup(takes, phase)], pool_use.idle)


def _swaps(_: NeighbourMoves, pool_use: PoolUse, a: int, b: int) -> Iterator[PoolUse]:
    yield _swapped(pool_use, a, b)


def _exchanges(moves: NeighbourMoves, pool_use: PoolUse, i: int, j: int) -> Iterator[PoolUse]:
    """GPUs of a node from i to j; for i < j also as many of another node in return."""
    first, second = (pool_use.groups[p].takes if p < len(pool_use.groups) else pool_use.idle for p in (i, j))
    for node, most in first:
        for count in range(1, most + 1):
            part = ((node, count),)
            backs = [((other, count),) for other, has in second if i < j and other != node and has >= count]
            for back in [(), *backs]:
                after = joined((without(first, part), back)), joined((without(second, back), part))
                near = _between(moves, pool_use, (i, j), after)
                if near is not None:
                    yield near


def swap(moves: NeighbourMoves, pool_use: PoolUse, rng: Random) -> PoolUse | None:
    return _swapped(pool_use, *rng.choice(moves.alike))


def _swapped(pool_use: PoolUse, a: int, b: int) -> PoolUse:
    groups = [GpuGroup(_renamed(group.takes, a, b), group.phase) for group in pool_use.groups]
    return make_state(groups, _renamed(pool_use.idle, a, b))


def _renamed(takes: Takes, a: int, b: int) -> Takes:
    other = {a: b, b: a}
    return tuple(sorted((other.get(node, node), count) for node, count in takes))


def kinds_of(pool: Pool) -> list[list[int]]:
    """Nodes of the same GPUs, as many of them, linked alike inside."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, node in enumerate(pool.nodes):
        if node.gpus:
            kinds.setdefault((node.type.gpu, node.type.interconnect, node.gpus), []).append(index)
    return list(kinds.values())


def _some(takes: Takes, rng: Random) -> Takes:
    node, most = rng.choice(takes)
    return ((node, rng.randint(1, most)),)


def without(takes: Takes, part: Takes) -> Takes:
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
        first = tuple(take for take in takes if rng.random() < 0.5)
    return first, without(takes, first)


def _any(pool_use: PoolUse, rng: Random) -> int | None:
    return rng.randrange(len(pool_use.groups)) if pool_use.groups else None


def _replaced(pool_use: PoolUse, gone: tuple[int, ...], groups: list[GpuGroup], idle: Takes) -> PoolUse:
    kept = [group for place, group in enumerate(pool_use.groups) if place not in gone]
    return make_state([*kept, *groups], idle)
