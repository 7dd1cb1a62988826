"""Pipelines of unlike nodes (CORAL 4.2): the best placement of every small multiset of nodes, exactly.

For a multiset M of at most N nodes, with T̂ the table of `plan.timing.stage_rates`,

    T*(M) = max  min_s Σ_{g in A_s} T̂_{j_s}(g)      T̂ being that for S stages
            over S, partitions of M into non-empty A_1, ..., A_S, and j_s ≥ 1 with Σ_s j_s = L

CORAL solves an integer program for each M and S. Here nothing is solved twice, because node types are
interchangeable and stages are multisets too, shared by all that contain them:

1. h_S(A, k), the most layers that the nodes A hold together at throughput v_k, is tabulated for every A that
   can be a stage (at most N + 1 - S nodes) and for log-spaced levels v_k, in bytes.
2. Multisets are taken by size. Each starts from an incumbent t that smaller ones give.
3. S is skipped when Σ_{g in M} max_j j·T̂_j(g) < L·(t + 1): a stage of j layers that reaches T has
   Σ_g j·T̂_j(g) ≥ j·T, and the stages' layers add up to L.
4. A partition is skipped when Σ_s h_S(A_s, k) < L at the highest level v_k ≤ t + 1.
5. What is left is settled with the integers themselves: how many layers each stage holds at t + 1; if L or
   more in all, layers are given up where they are slowest until L are left, and t rises to what remains.

Steps 4 and 5 need T̂ not to increase in j. Where it does (noisy profiles) they run on the least non-increasing
table above it, which is optimistic and so loses nothing, and what passes is settled with the sets of layer
counts at which each stage reaches a throughput, added by shift and or, and bisection.

Pruning. A template is worth keeping only if its nodes do better together than apart. With
W(M) = max(T*(M), max W(A) + W(M - A)), M is dropped when a split reaches T*(M): the same nodes, or fewer,
then serve as much. So the incumbent starts at the best split, and most multisets are never settled. No
optimum of an allocation is lost, as long as templates that already run stay: leaving one costs a new start.

Multisets of node types as numbers: all those of at most N nodes over G types, without gaps.

A multiset is written as its types in ascending order, t_1 ≤ ... ≤ t_n. Its rank among those of n nodes is

    r = Σ_i C(t_i + i - 1, i)

(the combinatorial number system, with repetition), and its id adds the number of smaller multisets:

    id = offset_n + r,   offset_n = C(G + n - 1, n - 1);   the empty multiset has id 0.

The rank is a sum of one term per node that depends on nothing but its type and its place. So the id of every
part of a multiset follows from that of a part with one node less by one look-up and one addition.

The best placement of one multiset of nodes: which nodes and how many layers each stage has.

`plan.templates.pipeline` keeps only the throughput and the number of stages of its many templates; this finds
the placement of a chosen one again. It tries every partition of the nodes and divides the layers by a
recursion over stages that supposes nothing of T̂, so it also is a second opinion on the compiled search:

    F_s(l) = max_j min(F_{s-1}(l - j), Σ_{g in stage s} T̂_j(g)),    F_0(0) = ∞,    T = F_S(L)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.perf.memory import weight_bytes
from potluck.plan.timing.stage_rates import UNITS_PER_TOKEN, StageRates


@dataclass(frozen=True, slots=True, eq=False)
class Partitions:
    """Partitions of up to `most` nodes for every pattern, in one array."""

    most: int
    masks: NDArray[np.uint8]  # (P, most) stages of each partition; 0 beyond its number of stages.
    starts: NDArray[np.int64]
    """(most + 1, 2^(most-1), most + 2): those of n nodes, a pattern and S stages are the rows starts[n, pattern, S]
    to starts[n, pattern, S + 1].
    """

    def of(self, n: int, pattern: int, stages: int) -> NDArray[np.uint8]:
        """(P, stages) masks of the partitions of n nodes into so many stages."""
        first, last = self.starts[n, pattern, stages : stages + 2]
        return self.masks[first:last, :stages]


@lru_cache(maxsize=8)
def partitions(most: int) -> Partitions:
    starts = np.zeros((most + 1, 1 << (most - 1), most + 2), np.int64)
    blocks: list[NDArray[np.uint8]] = []
    total = 0
    for n in range(1, most + 1):
        every = np.array(list(_set_partitions(n, most)), np.uint8)
        for pattern in range(1 << (n - 1)):
            unlike = every[_first_of_alike(every, n, pattern)]
            stages = np.count_nonzero(unlike, axis=1)
            blocks.append(unlike[np.argsort(stages, kind="stable")])
            ends = np.cumsum(np.bincount(stages, minlength=most + 1))
            starts[n, pattern] = total + np.concatenate([[0], ends])
            total += len(unlike)
    return Partitions(most, np.concatenate(blocks), starts)


def pattern_of(types: tuple[int, ...]) -> int:
    """Which neighbours in a multiset, in ascending order, are of the same type."""
    return sum(1 << i for i, (a, b) in enumerate(pairwise(types)) if a == b)


def _set_partitions(n: int, width: int) -> Iterator[list[int]]:
    """Masks of the stages, padded with 0: node i joins one of the stages so far or opens the next."""

    def extend(node: int, masks: list[int]) -> Iterator[list[int]]:
        if node == n:
            yield masks + [0] * (width - len(masks))
            return
        for stage in range(len(masks)):
            yield from extend(node + 1, [m | (1 << node) * (s == stage) for s, m in enumerate(masks)])
        yield from extend(node + 1, [*masks, 1 << node])

    return extend(0, [])


def _first_of_alike(every: NDArray[np.uint8], n: int, pattern: int) -> NDArray[np.int64]:
    """Rows that no earlier row equals up to swapping nodes of one type and stages."""
    group, weights = 0, []
    for node in range(n):
        group += node > 0 and not pattern >> (node - 1) & 1
        weights.append((n + 1) ** group)  # how many of each type a mask has, as digits
    bits = np.arange(1 << n)[:, None] >> np.arange(n) & 1
    content = bits @ np.array(weights, np.int64)
    keys = np.sort(content[every], axis=1)
    _, first = np.unique(keys, axis=0, return_index=True)
    return np.sort(first)


MAX_NODES = 6
MEMORY_RATIO = 12.0
"""CORAL's ρ: templates with more GPU memory than this many times the model's weights are left out."""
MOST_LAYERS = 128
MOST_UNITS = 2**45
CODE_SHIFT = 52 - 6
"""Levels are the numbers with 6 binary digits after the leading one: about a hundredth apart."""
LOW_QUANTILE = 0.01
LOW_SHARE = 0.02  # The lowest level is this share of this quantile of the multisets' upper bounds.

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class PipelineLibrary:
    """The pipeline templates of one model and phase, as arrays; ask for the placement of the chosen ones."""

    rates: StageRates
    max_nodes: int
    memory_ratio: float
    ids: Ints  # (n,) which multiset each template is, ascending; see `Multisets`.
    units: Ints  # (n,) throughput in hundredths of a token a second.
    stages: Bytes
    valid: int  # Multisets within the memory limit that can serve the model at all: templates before pruning.

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def space(self) -> Multisets:
        return multisets(len(self.rates.nodes), self.max_nodes)

    @property
    def counts(self) -> Bytes:
        """(n, G) nodes of each type."""
        return self.space.counts(self.ids)

    @property
    def tokens_per_s(self) -> NDArray[np.float64]:
        """(n,) prompt tokens (prefill) or output tokens (decode) a second."""
        return self.units / UNITS_PER_TOKEN

    def placement(self, index: int) -> Layout:
        """The layout that reaches the throughput of a template; a node with several groups is there often."""
        types = self.space.types_of(int(self.ids[index]))
        result = best_placement(
            self.rates.units, types, stages=int(self.stages[index]), target=int(self.units[index])
        )
        if result is None or result.units != self.units[index]:
            raise InputError("library", "does not belong to these stage rates; build it anew")
        return Layout(tuple(Stage(layers, self._members(group)) for layers, group in result.stages))

    def _members(self, group: tuple[int, ...]) -> tuple[StageNode, ...]:
        nodes, tps = self.rates.nodes, self.rates.tps
        return tuple(StageNode(nodes[g].name, tps[g]) for g in group for _ in range(nodes[g].gpus // tps[g]))


def pipeline_library(
    rates: StageRates,
    *,
    max_nodes: int = MAX_NODES,
    memory_ratio: float = MEMORY_RATIO,
    prune: bool = True,
    alone: bool = False,
) -> PipelineLibrary:
    """Every template of at most `max_nodes` nodes; `alone`: each of them a stage of its own."""
    node_bytes, most_bytes = memory_limit(rates, memory_ratio)
    units, stages = solve(rates.units, node_bytes, most_bytes, max_nodes, prune=prune, alone=alone)
    ids = np.flatnonzero(stages)
    valid = int(np.count_nonzero(units))
    return PipelineLibrary(rates, max_nodes, memory_ratio, ids, units[ids], stages[ids], valid)


def memory_limit(rates: StageRates, memory_ratio: float) -> tuple[Ints, int]:
    """(bytes of each node type, the most that a template may have)."""
    if not memory_ratio > 0:
        raise InputError("memory_ratio", f"must be positive, is {memory_ratio}")
    node_bytes = np.array([int(node.gpu.memory_bytes) * node.gpus for node in rates.nodes], np.int64)
    most = min(memory_ratio * weight_bytes(rates.model), 2.0**60)
    return node_bytes, int(most)


def solve(
    rates: Ints, node_bytes: Ints, most_bytes: int, max_nodes: int, *, prune: bool, alone: bool = False
) -> tuple[Ints, Bytes]:
    """(T*, S) of every multiset by id, 0 where it cannot serve or has more than `most_bytes`.

    With `prune`, (W, S), and S = 0 also where a split is as good; `alone`, which needs it, lets no two nodes share a
    stage. `rates` is (S_max, G, L).
    """
    from potluck.plan.templates import pipeline_kernel as kernel  # numba is slow to load

    _check(rates, node_bytes)
    most_stages, kinds, layers = rates.shape
    space, table = multisets(kinds, max_nodes), partitions(max_nodes)
    # The least non-increasing table above T̂: itself, when it is monotone.
    upper = np.ascontiguousarray(np.maximum.accumulate(rates[:, :, ::-1], axis=2)[:, :, ::-1])
    levels, first_code = _levels(rates, node_bytes, most_bytes, space)
    tabulated, widths, bases = _shape(max_nodes, len(levels), space)
    tables = kernel.PipelineTables(
        rates=np.ascontiguousarray(rates),
        upper=upper,
        monotone=bool((upper == rates).all()),
        node_bytes=node_bytes,
        least_bytes=int(node_bytes.min()),
        most_bytes=most_bytes,
        members=space.members,
        offsets=space.offsets,
        terms=space.terms,
        masks=table.masks,
        starts=table.starts,
        sizes=np.bitwise_count(np.arange(1 << max_nodes)).astype(np.int64),
        levels=levels,
        first_code=first_code,
        shift=CODE_SHIFT,
        bases=bases,
        widths=widths,
        tabulated=tabulated,
        alone=alone,
    )
    scratch = kernel.scratch(max_nodes, layers)
    holds = np.zeros(int(bases[-1]), np.uint8)
    rests = np.zeros((len(levels), most_stages, kinds), np.int64)
    for s in range(2, min(max_nodes, most_stages, layers) + 1):
        kernel.fill_holds(tables, scratch, s, holds, rests)
    best, stages = np.zeros(space.count, np.int64), np.zeros(space.count, np.uint8)
    kernel.solve_all(tables, scratch, holds, rests, prune, best, stages)
    return best, stages


def _levels(rates: Ints, node_bytes: Ints, most_bytes: int, multisets: Multisets) -> tuple[Ints, int]:
    """(v_k, code of the lowest): where most incumbents will be, as a sample's upper bounds tell.

    An incumbent below all levels is tested at v_0 = 1, one above all at the highest: valid, if less sharp.
    """
    layers = rates.shape[2]
    volume = (rates * np.arange(1, layers + 1)).max(axis=2)
    sample = np.unique(np.linspace(1, multisets.count - 1, 4096).astype(np.int64))
    counts = multisets.counts(sample).astype(np.int64)
    reach = (counts[counts @ node_bytes <= most_bytes] @ volume.T).max(axis=1, initial=0) / layers
    reach = reach[reach >= 1]
    low, high = (np.quantile(reach, LOW_QUANTILE), reach.max()) if len(reach) else (1.0, 1.0)
    codes = np.array([max(low * LOW_SHARE, 1.0), high]).view(np.int64) >> CODE_SHIFT
    levels = (np.arange(codes[0] - 1, codes[1] + 1) << CODE_SHIFT).view(np.float64).astype(np.int64)
    levels[0] = 1
    return np.maximum(levels, 1), int(codes[0]) - 1


def _shape(max_nodes: int, levels: int, multisets: Multisets) -> tuple[Ints, Ints, Ints]:
    """By S: up to how many nodes h_S is tabulated for, for how many multisets, and where it starts.

    A stage has at most N + 1 - S nodes. The only one of N - 1 is left out (it stands beside a single node,
    and there are more such multisets than all smaller ones together).
    """
    stages = np.arange(max_nodes + 1)
    tabulated = np.minimum(max_nodes + 1 - stages, max(max_nodes - 2, 1))
    tabulated[:2] = 0
    widths = np.where(stages < 2, 0, multisets.offsets[tabulated + 1])
    return tabulated, widths, np.concatenate([[0], np.cumsum(widths * levels)])


def _check(rates: Ints, node_bytes: Ints) -> None:
    if rates.shape[2] > MOST_LAYERS:
        raise InputError("layers", f"pipelines of more than {MOST_LAYERS} layers are not supported")
    if rates.min() < 0 or rates.max() > MOST_UNITS:
        raise InputError("stage rates", f"must be 0 to {MOST_UNITS}, to be added up exactly")
    if node_bytes.min() <= 0:
        raise InputError("node memory", "must be positive")


NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages as (layers, types of their nodes), and the throughput of the slowest one."""

    units: int
    stages: tuple[tuple[int, tuple[int, ...]], ...]


def best_placement(
    units: Ints, types: tuple[int, ...], *, stages: int | None = None, target: int | None = None
) -> Placement | None:
    """The best placement of these node types (ascending); None when they cannot hold the model.

    `units` is T̂ as in `StageRates`. With `stages`, only with so many; the search ends early at `target`.
    """
    best: Placement | None = None
    most = min(len(types), units.shape[0], units.shape[2])
    for count in range(1, most + 1) if stages is None else (stages,):
        for masks in partitions(len(types)).of(len(types), pattern_of(types), count):
            groups = [tuple(t for i, t in enumerate(types) if mask >> i & 1) for mask in masks]
            rates = np.stack([units[count - 1, list(group)].sum(axis=0) for group in groups])
            reached, layers = divide(rates)
            if reached > (best.units if best else 0):
                best = Placement(reached, tuple(zip(layers, groups, strict=True)))
            if best and target is not None and best.units >= target:
                return best
    return best


def divide(rates: Ints) -> tuple[int, tuple[int, ...]]:
    """(T, layers of each stage) for stages with these rates: (S, L), [s, j-1] is stage s with j layers."""
    layers = rates.shape[1]
    total = np.arange(layers + 1)
    before = total[:, None] - np.arange(1, layers + 1)[None, :]  # l - j
    reached = np.where(total == 0, NEVER, 0)
    choices = []
    for row in rates:
        options = np.where(before >= 0, np.minimum(reached[before], row), 0)
        choice = options.argmax(axis=1)
        reached = options[total, choice]
        choices.append(choice + 1)
    split: list[int] = []
    left = layers
    for choice in reversed(choices):
        split.append(int(choice[left]))
        left -= split[-1]
        if left < 0:  # only where nothing is reached at all
            return 0, ()
    return int(reached[layers]), tuple(reversed(split))


MOST_MULTISETS = 20_000_000  # More would not fit in memory beside what is stored of each.


@dataclass(frozen=True)
class Multisets:
    """All multisets of at most `most` nodes over `kinds` types."""

    kinds: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.kinds <= 255:
            raise InputError("node types", f"must be 1 to 255, are {self.kinds}")
        if not 1 <= self.most <= 8:
            raise InputError("nodes per template", f"must be 1 to 8, are {self.most}")
        if self.count > MOST_MULTISETS:
            problem = f"{self.count} of up to {self.most} nodes of {self.kinds} types are too many"
            raise InputError("node combinations", f"{problem}; take fewer types or fewer nodes per template")

    @property
    def count(self) -> int:
        return comb(self.kinds + self.most, self.most)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """(most + 2,) first id of each size; the last entry is the count."""
        sizes = [0, *(comb(self.kinds + n - 1, n - 1) for n in range(1, self.most + 2))]
        return np.array(sizes, np.int64)

    @cached_property
    def terms(self) -> NDArray[np.int64]:
        """(kinds, most + 1) C(t + i - 1, i): what type t in place i adds to the rank; column 0 is unused."""
        table = [[comb(t + i - 1, i) if i else 0 for i in range(self.most + 1)] for t in range(self.kinds)]
        return np.array(table, np.int64)

    @cached_property
    def members(self) -> NDArray[np.uint8]:
        """(count, most) types of every multiset in ascending order; what is beyond its size is 0."""
        table = np.zeros((self.count, self.most), np.uint8)
        for n in range(1, self.most + 1):
            left = np.arange(self.offsets[n + 1] - self.offsets[n])
            rows = slice(self.offsets[n], self.offsets[n + 1])
            for i in range(n, 0, -1):
                kind = np.searchsorted(self.terms[:, i], left, side="right") - 1
                table[rows, i - 1] = kind
                left = left - self.terms[kind, i]
        return table

    def sizes(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray(np.searchsorted(self.offsets, ids, side="right") - 1, np.int64)

    def counts(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """(len(ids), kinds) how many nodes of each type."""
        array = np.zeros((len(ids), self.kinds), np.uint8)
        sizes, rows = self.sizes(ids), np.arange(len(ids))
        for i in range(self.most):
            there = sizes > i
            # One place at a time: a row occurs once in each, so plain indexing counts right.
            array[rows[there], self.members[ids[there], i]] += 1
        return array

    def types_of(self, number: int) -> tuple[int, ...]:
        """The types of a multiset in ascending order."""
        if not 0 <= number < self.count:
            raise InputError("multiset", f"{number} is not below {self.count}")
        size = int(np.searchsorted(self.offsets, number, side="right")) - 1
        return tuple(int(t) for t in self.members[number, :size])


@lru_cache(maxsize=4)
def multisets(kinds: int, most: int) -> Multisets:
    """The same object for the same question: its tables are made once."""
    return Multisets(kinds, most)
