"""Tabu search over groups and phases (THUNDERSERVE's algorithm 1), with restarts and a climb after each walk.

Every step looks at some random neighbours and goes to the best that is not tabu, better or not. A walk that has not
improved on its own best for `patience` steps ends; from that best on, all single moves are tried until none betters
it (`_climb`). The next walk starts from clusters, even shares of every kind of node, the best state, shaken, or the
best mixture of the groups seen so far (`recombine`). The search has converged when `walks` walks in a row have
brought nothing. Random numbers come from a seed; the clock can only cut the search short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random

from potluck.core.errors import CapacityError, InputError
from potluck.core.values.types import Role
from potluck.plan.search.deduce import PHASES, GroupConfiguration, StageTake, Takes, deducer
from potluck.plan.search.evaluate import GpuGroup, Orchestration, PoolEvaluator, PoolScore, PoolUse
from potluck.plan.search.moves import (
    NeighbourMoves,
    all_moves,
    all_near,
    dealt_state,
    flips_only,
    joined,
    kinds_of,
    make_state,
    starting_state,
    without,
)
from potluck.plan.search.recombine import look_around, recombined
from potluck.plan.search.workload import CalibratedCosts, LayerTiming, Pool, PoolWorkload

SCALES = (1.0, 1.6, 2.4)  # How many times over the groups of a start hold the model.
DEALT_SHARE = 0.6
"""Of the new states, those that are even shares of every kind of node; the others are clusters."""
ROUND = 8
"""Of so many walks the first starts from a mixture, every second from a new state, the others from the best."""

MOST_OTHERS = 20


@dataclass(frozen=True, slots=True)
class SearchLimits:
    neighbours: int = 30  # N_neigh: states looked at in a step.
    memory: int = 40  # N_mem: states that are tabu.
    patience: int = 10  # Steps without a better state of its own after which a walk ends.
    walks: int = 20  # Walks without a better state at all after which the search ends.
    steps: int = 1_000_000
    time_limit_s: float = 60.0


@dataclass(frozen=True, slots=True)
class SearchSettings:
    phases: tuple[Role, ...] = ("prefill", "decode", "mixed")  # THUNDERSERVE knows only the first two.
    max_group_gpus: int | None = None  # Large groups serve most; small ones lose less with a GPU.
    seed: int = 0
    limits: SearchLimits = field(default_factory=SearchLimits)
    timing: LayerTiming = field(default_factory=CalibratedCosts)
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class SearchResult:
    state: PoolUse
    score: PoolScore
    configurations: tuple[GroupConfiguration, ...]  # Of the groups, in their order.
    orchestration: Orchestration
    trace: tuple[tuple[float, float], ...]
    """(seconds since the start, attainment with its tie-break) whenever that rose."""
    evaluated: int
    steps: int
    converged: bool  # False when a limit ended the search.
    others: tuple[PoolUse, ...] = ()
    """Further states that no single move betters, each worth something else, the best first."""


def search(pool: Pool, work: PoolWorkload, settings: SearchSettings | None = None) -> SearchResult:
    """Group the pool's GPUs, give each group a phase and a configuration, and route."""
    return search_with(PoolEvaluator(deducer(pool, work, (settings or SearchSettings()).timing)), settings)


def search_with(evaluator: PoolEvaluator, settings: SearchSettings | None = None) -> SearchResult:
    """The same with an evaluator that may remember an earlier search."""
    chosen = settings or SearchSettings()
    pool, work = evaluator.deducer.pool, evaluator.deducer.work
    phases = tuple(PHASES[role] for role in chosen.phases)
    most = chosen.max_group_gpus or pool.gpus
    hunt = TabuSearch(evaluator, all_moves(pool, work, phases, most), chosen)

    learnt: dict[GpuGroup, float] = {}

    def mixture(attainment: float) -> PoolUse | None:
        if not hunt.looked_around:
            look_around(evaluator, hunt.moves, hunt.rng)
            hunt.looked_around = True
        return recombined(evaluator, hunt.moves, attainment * work.rate_per_s, learnt)

    kinds = kinds_of(pool)

    def start(scale: float) -> PoolUse:
        if hunt.rng.random() < DEALT_SHARE:
            return dealt_state(evaluator, phases, hunt.rng, kinds, most)
        return starting_state(evaluator, phases, hunt.rng, scale, most)

    hunt.run(start, mixture)
    return hunt.found()


@dataclass(slots=True)
class TabuSearch:
    evaluator: PoolEvaluator
    moves: NeighbourMoves
    settings: SearchSettings
    rng: Random = field(init=False)
    best: PoolUse | None = None
    best_score: PoolScore = PoolScore(-2.0, 0.0, 0.0)
    trace: list[tuple[float, float]] = field(default_factory=list)
    steps: int = 0
    converged: bool = False
    looked_around: bool = False
    peaks: set[PoolUse] = field(default_factory=set)  # States that no single move betters.
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.rng = Random(self.settings.seed)
        self._begun = self.settings.clock()

    def run(
        self, start: Callable[[float], PoolUse], mix: Callable[[float], PoolUse | None] = lambda _: None
    ) -> None:
        """Walk after walk until nothing new comes; `mix` makes a state out of groups seen, or None."""
        idle_walks, number = 0, 0
        while idle_walks < self.settings.limits.walks:
            before = self.best_score.value
            self._walk(self._start(number, start, mix))
            number += 1
            if self._over():
                return
            idle_walks = 0 if self.best_score.value > before + 1e-12 else idle_walks + 1
        self.converged = True

    def _start(
        self, number: int, start: Callable[[float], PoolUse], mix: Callable[[float], PoolUse | None]
    ) -> PoolUse:
        """The first walks start from clusters; then come rounds of a mixture, clusters and the best, shaken."""
        turn = number - len(SCALES)
        if turn >= 0 and turn % ROUND == 0:
            mixed = mix(self.best_score.attainment)
            if mixed is not None and self.evaluator.score(mixed.groups).value >= 0:
                return mixed
        if self.best is None or turn < 0 or turn % 2 == 1:
            return start(SCALES[number % len(SCALES)])
        return self._shaken(self.best, self.rng.randint(2, 6))

    def try_all(self, states: Sequence[PoolUse]) -> None:
        """Each of some states; a walk from the first when it is the only one."""
        for state in states:
            self._offer(state)
            if self._over():
                return
        if len(states) == 1:
            self.run(lambda _: states[0])
        self.converged = True

    def _walk(self, pool_use: PoolUse) -> None:
        limits = self.settings.limits
        tabu = {pool_use: None}  # a set that knows its oldest
        own, stale, summit = self._offer(pool_use), 0, pool_use
        while stale < limits.patience and not self._over():
            chosen: PoolUse | None = None
            value = -2.0
            for _ in range(limits.neighbours):
                near = self.moves.neighbour(pool_use, self.rng)
                if near is None or near in tabu:
                    continue
                worth = self.evaluator.score(near.groups).value
                if worth > value:
                    chosen, value = near, worth
            self.steps += 1
            stale += 1
            if chosen is None:
                continue
            pool_use = chosen
            tabu[pool_use] = None
            if len(tabu) > limits.memory:
                del tabu[next(iter(tabu))]
            if value > own + 1e-12:
                own, stale, summit = value, 0, pool_use
                self._offer(pool_use)
        self._climb(summit, own)

    def _climb(self, state: PoolUse, value: float) -> None:
        """On to a state that no single move betters: a walk sees few of the neighbours of its best one."""
        better = True
        while better and state not in self.peaks:
            better = False
            for tried, pool_use in enumerate(all_near(self.moves, state, self.rng)):
                if tried % self.settings.limits.neighbours == 0:
                    self.steps += 1
                    if self._over():
                        return
                worth = self.evaluator.score(pool_use.groups).value
                if worth > value + 1e-12:
                    state, value, better = pool_use, worth, True
                    self._offer(state)
                    break
        self.peaks.add(state)

    def _offer(self, pool_use: PoolUse) -> float:
        score = self.evaluator.score(pool_use.groups)
        if self.best is None:
            # Where nothing was compiled before, the first state takes a minute that is not the search's.
            self._begun = self.settings.clock()
        if self.best is None or score.value > self.best_score.value + 1e-12:
            self.best, self.best_score = pool_use, score
            self.trace.append((self.settings.clock() - self._begun, score.value))
        return score.value

    def _shaken(self, pool_use: PoolUse, times: int) -> PoolUse:
        for _ in range(times):
            near = self.moves.neighbour(pool_use, self.rng)
            if near is not None and self.evaluator.score(near.groups).value >= 0:
                pool_use = near
        return pool_use

    def _over(self) -> bool:
        limits = self.settings.limits
        return self.steps >= limits.steps or self.settings.clock() - self._begun >= limits.time_limit_s

    def found(self) -> SearchResult:
        """The answer; an error when no group can serve the model within its objective."""
        if self.best is None or self.best_score.goodput_per_s <= 0:
            work = self.evaluator.deducer.work
            raise CapacityError(
                f"{work.model.name} cannot be served on this pool within {work.slo.ttft_s:g} s to the first "
                f"token and {work.slo.tpot_s:g} s per token; add GPUs or relax the objective"
            )
        configurations = tuple(self.evaluator.deduced(group) for group in self.best.groups)
        return SearchResult(
            self.best,
            self.best_score,
            tuple(configuration for configuration in configurations if configuration is not None),
            self.evaluator.orchestrated(self.best.groups),
            tuple(self.trace),
            self.evaluator.evaluated,
            self.steps,
            self.converged,
            self._others(),
        )

    def _others(self) -> tuple[PoolUse, ...]:
        """States that are worth the same differ in nothing but which of two like machines they use."""
        known = {round(self.best_score.value, 9)}
        pool_uses = []
        ranked = ((self.evaluator.score(state.groups), state) for state in self.peaks)
        for score, state in sorted(ranked, key=lambda each: (-each[0].value, each[1])):
            if round(score.value, 9) not in known and score.goodput_per_s > 0:
                known.add(round(score.value, 9))
                pool_uses.append(state)
        return tuple(pool_uses[:MOST_OTHERS])


MOST_COMBINATIONS = 3000


@dataclass(frozen=True, slots=True)
class PoolSurvivors:
    pool: Pool
    kept: tuple[int, ...]  # Places of the groups that are whole.
    idle: Takes


def groups_left(
    pool: Pool, search_result: SearchResult, lost: Mapping[str, int], dead: Collection[int] | None = None
) -> PoolSurvivors:
    """Who survives losing so many GPUs of each named node.

    `dead` are the places of the groups that were hit, where that is known. Otherwise a node's idle GPUs are
    taken to be lost first, then the groups with the most GPUs on it: few groups explain the loss of a part.
    The loss of a whole node hits everyone on it in any case.
    """
    rest = pool.without(lost)
    free = {node: rest.nodes[node].gpus for node in range(len(rest.nodes))}
    groups = search_result.state.groups
    hit = set(dead or ())
    if not hit <= set(range(len(groups))):
        raise InputError("reschedule: dead", f"names a group beyond the {len(groups)} there are")
    if dead is None:
        hit = _fewest(groups, search_result.state.idle, {pool.index(name): n for name, n in lost.items()})
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
    survivors: PoolSurvivors,
    search_result: SearchResult,
    work: PoolWorkload,
    settings: SearchSettings | None = None,
) -> SearchResult:
    """New phases and routing for the groups that are left, for the same or another workload."""
    chosen = settings or SearchSettings()
    source = deducer(survivors.pool, work, chosen.timing)
    phases = tuple(PHASES[role] for role in chosen.phases)
    stages = [search_result.configurations[place].stages for place in survivors.kept]
    # Groups are named by their place: two of the same GPUs may be loaded unlike.
    for place, mine in enumerate(stages):
        for phase in phases:
            source.seen[((place, 1),), phase] = source.fixed(mine, phase)
    evaluator = PoolEvaluator(source)
    able = [[p for p in phases if source.seen[((place, 1),), p]] for place in range(len(stages))]
    working = [place for place in range(len(stages)) if able[place]]
    if not working:
        raise CapacityError("no group that is left can serve within the objective; search the pool anew")
    hunt = TabuSearch(evaluator, flips_only(survivors.pool, work, phases), chosen)
    hunt.try_all(_combinations(working, able, search_result, survivors))
    return _named(hunt.found(), survivors, search_result)


def _combinations(
    working: list[int], able: list[list[int]], search_result: SearchResult, survivors: PoolSurvivors
) -> list[PoolUse]:
    """The present designation, and all others if they are few."""
    size = 1
    now = []
    for place in working:
        size *= len(able[place])
        phase = search_result.state.groups[survivors.kept[place]].phase
        now.append(phase if phase in able[place] else able[place][0])
    choices = [tuple(now)]
    if size <= MOST_COMBINATIONS:
        choices += [each for each in product(*(able[place] for place in working)) if each != tuple(now)]
    return [
        make_state([GpuGroup(((w, 1),), p) for w, p in zip(working, chosen, strict=True)], ())
        for chosen in choices
    ]


def _named(result: SearchResult, survivors: PoolSurvivors, previous_result: SearchResult) -> SearchResult:
    """With the real GPUs in place of places; groups keep the order that the routing speaks of."""
    places = [survivors.kept[group.takes[0][0]] for group in result.state.groups]
    groups = tuple(
        GpuGroup(previous_result.state.groups[place].takes, group.phase)
        for place, group in zip(places, result.state.groups, strict=True)
    )
    useless = [previous_result.state.groups[p].takes for p in survivors.kept if p not in places]
    return replace(result, state=PoolUse(groups, joined((survivors.idle, *useless))))


def flipped(
    previous_result: SearchResult, next_result: SearchResult
) -> tuple[tuple[GroupConfiguration, int, int], ...]:
    old: dict[tuple[Takes, tuple[StageTake, ...]], list[int]] = {}
    for group, mine in zip(previous_result.state.groups, previous_result.configurations, strict=True):
        old.setdefault((group.takes, mine.stages), []).append(group.phase)
    changes = []
    for group, mine in zip(next_result.state.groups, next_result.configurations, strict=True):
        phases = old[group.takes, mine.stages]
        was = group.phase if group.phase in phases else phases[0]
        phases.remove(was)
        if was != group.phase:
            changes.append((mine, was, group.phase))
    return tuple(changes)
