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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import BucketCapacity, NodeCount, PlannedReplica, Template
from potluck.perf.sizes.memory import weight_bytes
from potluck.perf.timers.pipeline_timer import ORDER
from potluck.plan.templates.multisets import Multisets, multisets
from potluck.plan.templates.pipeline_partitions import partitions
from potluck.plan.templates.pipeline_placement import best_placement
from potluck.plan.timing.stage_rates import UNITS_PER_TOKEN, StageRates

MAX_NODES = 6
MEMORY_RATIO = 12.0
"""CORAL's ρ: templates with more GPU memory than this many times the model's weights are left out."""
MOST_LAYERS = 128
MOST_UNITS = 2**45
CODE_SHIFT = 52 - 6
"""Levels are the numbers with 6 binary digits after the leading one: about a hundredth apart."""
LOW_QUANTILE = 0.01
LOW_SHARE = 0.02
"""The lowest level is this share of this quantile of the multisets' upper bounds."""

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class PipelineLibrary:
    """The pipeline templates of one model and phase, as arrays; ask for the placement of the chosen ones."""

    rates: StageRates
    max_nodes: int
    memory_ratio: float
    ids: Ints
    """(n,) which multiset each template is, ascending; see `plan.templates.multisets`."""
    units: Ints
    """(n,) throughput in hundredths of a token a second."""
    stages: Bytes
    """(n,) number of stages."""
    valid: int
    """Multisets within the memory limit that can serve the model at all: templates before pruning."""

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
        found = best_placement(
            self.rates.units, types, stages=int(self.stages[index]), target=int(self.units[index])
        )
        if found is None or found.units != self.units[index]:
            raise InputError("library", "does not belong to these stage rates; build it anew")
        return Layout(tuple(Stage(layers, self._members(group)) for layers, group in found.stages))

    def _members(self, group: tuple[int, ...]) -> tuple[StageNode, ...]:
        nodes, tps = self.rates.nodes, self.rates.tps
        return tuple(StageNode(nodes[g].name, tps[g]) for g in group for _ in range(nodes[g].gpus // tps[g]))

    def template(self, index: int, *, ask: str | None = None, bucket: int = 0) -> Template:
        """A column of the planner's program for the bucket whose lengths the rates are for.

        `ask` is the name under which the model is asked for; by default the model's own.
        """
        rates, layout = self.rates, self.placement(index)
        name = rates.model.name if ask is None else ask
        per_s = float(self.tokens_per_s[index])
        prefill = rates.phase == "prefill"
        capacity = BucketCapacity(
            bucket=bucket,
            prefill_per_s=per_s / rates.input_tokens if prefill else 0.0,
            decode_per_s=0.0 if prefill else per_s / rates.output_tokens,
            closed_per_s=0.0,
            ttft_s=rates.latency_s if prefill else 0.0,
            tpot_s=0.0 if prefill else rates.latency_s,
        )
        types = self.space.types_of(int(self.ids[index]))
        nodes = tuple(NodeCount(rates.nodes[g].name, types.count(g)) for g in sorted(set(types)))
        listed = " + ".join(f"{each.count} {each.node}" for each in nodes)
        return Template(
            name=f"{name}: {rates.phase} pipeline {listed}",
            kind="pipeline",
            model=name,
            nodes=nodes,
            replicas=(PlannedReplica(rates.phase, layout),),
            capacity=(capacity,),
            confidence=max((rates.confidences[g] for g in types), key=ORDER.index),
        )


def pipeline_library(
    rates: StageRates,
    *,
    max_nodes: int = MAX_NODES,
    memory_ratio: float = MEMORY_RATIO,
    prune: bool = True,
    running: Iterable[Mapping[str, int]] = (),
) -> PipelineLibrary:
    """Every template of at most `max_nodes` nodes; `running` are node counts of templates never to drop."""
    node_bytes, most_bytes = memory_limit(rates, memory_ratio)
    units, stages = solve(rates.units, node_bytes, most_bytes, max_nodes, prune=prune)
    ids = np.flatnonzero(stages)
    valid = int(np.count_nonzero(units))
    library = PipelineLibrary(rates, max_nodes, memory_ratio, ids, units[ids], stages[ids], valid)
    return with_running(library, running)


def with_running(library: PipelineLibrary, running: Iterable[Mapping[str, int]]) -> PipelineLibrary:
    """The library with these node counts in it, though a split may be as good or memory above the limit.

    What can no longer serve within the objective is left out.
    """
    added: dict[int, tuple[int, int]] = {}
    known = set(library.ids.tolist())
    for types in _running_types(library, running):
        number = library.space.id_of(types)
        if number in known or number in added:
            continue
        found = best_placement(library.rates.units, types)
        if found is not None:
            added[number] = found.units, len(found.stages)
    if not added:
        return library
    ids = np.concatenate([library.ids, np.fromiter(added, np.int64)])
    order = np.argsort(ids)
    units = np.concatenate([library.units, [units for units, _ in added.values()]])
    stages = np.concatenate([library.stages, np.array([s for _, s in added.values()], np.uint8)])
    return replace(library, ids=ids[order], units=units[order], stages=stages[order])


def memory_limit(rates: StageRates, memory_ratio: float) -> tuple[Ints, int]:
    """(bytes of each node type, the most that a template may have)."""
    if not memory_ratio > 0:
        raise InputError("memory_ratio", f"must be positive, is {memory_ratio}")
    node_bytes = np.array([int(node.gpu.memory_bytes) * node.gpus for node in rates.nodes], np.int64)
    most = min(memory_ratio * weight_bytes(rates.model), 2.0**60)
    return node_bytes, int(most)


def solve(
    rates: Ints, node_bytes: Ints, most_bytes: int, max_nodes: int, *, prune: bool
) -> tuple[Ints, Bytes]:
    """(T*, S) of every multiset by id, 0 where it cannot serve or has more than `most_bytes`.

    With `prune`, (W, S), and S = 0 also where a split is as good. `rates` is (S_max, G, L).
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
    )
    scratch = kernel.scratch(max_nodes, layers)
    holds = np.zeros(int(bases[-1]), np.uint8)
    rests = np.zeros((len(levels), most_stages, kinds), np.int64)
    for s in range(2, min(max_nodes, most_stages, layers) + 1):
        kernel.fill_holds(tables, scratch, s, holds, rests)
    best, stages = np.zeros(space.count, np.int64), np.zeros(space.count, np.uint8)
    kernel.solve_all(tables, scratch, holds, rests, prune, best, stages)
    return best, stages


def _levels(rates: Ints, node_bytes: Ints, most_bytes: int, space: Multisets) -> tuple[Ints, int]:
    """(v_k, code of the lowest): where most incumbents will be, as a sample's upper bounds tell.

    An incumbent below all levels is tested at v_0 = 1, one above all at the highest: valid, if less sharp.
    """
    layers = rates.shape[2]
    volume = (rates * np.arange(1, layers + 1)).max(axis=2)
    sample = np.unique(np.linspace(1, space.count - 1, 4096).astype(np.int64))
    counts = space.counts(sample).astype(np.int64)
    reach = (counts[counts @ node_bytes <= most_bytes] @ volume.T).max(axis=1, initial=0) / layers
    reach = reach[reach >= 1]
    low, high = (np.quantile(reach, LOW_QUANTILE), reach.max()) if len(reach) else (1.0, 1.0)
    codes = np.array([max(low * LOW_SHARE, 1.0), high]).view(np.int64) >> CODE_SHIFT
    levels = (np.arange(codes[0] - 1, codes[1] + 1) << CODE_SHIFT).view(np.float64).astype(np.int64)
    levels[0] = 1
    return np.maximum(levels, 1), int(codes[0]) - 1


def _shape(max_nodes: int, levels: int, space: Multisets) -> tuple[Ints, Ints, Ints]:
    """By S: up to how many nodes h_S is tabulated for, for how many multisets, and where it starts.

    A stage has at most N + 1 - S nodes. The only one of N - 1 is left out (it stands beside a single node,
    and there are more such multisets than all smaller ones together).
    """
    stages = np.arange(max_nodes + 1)
    tabulated = np.minimum(max_nodes + 1 - stages, max(max_nodes - 2, 1))
    tabulated[:2] = 0
    widths = np.where(stages < 2, 0, space.offsets[tabulated + 1])
    return tabulated, widths, np.concatenate([[0], np.cumsum(widths * levels)])


def _running_types(
    library: PipelineLibrary, running: Iterable[Mapping[str, int]]
) -> Iterator[tuple[int, ...]]:
    index = {node.name: g for g, node in enumerate(library.rates.nodes)}
    for counts in running:
        unknown = next((name for name in counts if name not in index), None)
        if unknown is not None:
            raise UnknownNameError("running: node", unknown, index)
        nodes = sum(counts.values())
        if not 0 < nodes <= library.max_nodes:
            raise InputError("running", f"a template of {nodes} nodes; they have 1 to {library.max_nodes}")
        yield tuple(sorted(index[name] for name, count in counts.items() for _ in range(count)))


def _check(rates: Ints, node_bytes: Ints) -> None:
    if rates.shape[2] > MOST_LAYERS:
        raise InputError("layers", f"pipelines of more than {MOST_LAYERS} layers are not supported")
    if rates.min() < 0 or rates.max() > MOST_UNITS:
        raise InputError("stage rates", f"must be 0 to {MOST_UNITS}, to be added up exactly")
    if node_bytes.min() <= 0:
        raise InputError("node memory", "must be positive")
