"""CAUCHY's combos as the paper counts them: in GPUs, <2 x H800, 4 x H20>, for pairs of types ranked by equation 15.

*Ranking* (3.3.1). A pair's cost efficiency is equation 15 of `perf.timers.cauchy` with the demand's mean lengths,
the price of one GPU of a node, and the batch that the decoding GPUs run at. Of the two directions of a pair the
better one is kept, and the SHORTLIST best pairs whose sides keep the objective are candidates. A model that the
closed form does not cover is ranked by what its combos are seen to serve per dollar.

*Counts.* One or two units of GPUs prefill for one to six that decode (1:1 to 2:6), a unit being as many GPUs as the
model needs on that node. GPUs of one phase are one tensor-parallel instance, as far as a node and the model allow.
Nodes are rented whole, so a template is as many combos as fill its nodes; two sides that fit one node share it,
and their KV uses no network card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from potluck.core.errors import InputError
from potluck.core.values.layout import Layout, single
from potluck.core.values.plan import NodeCount, PlannedReplica, Template
from potluck.core.values.types import NodeType, Role
from potluck.perf.timers.cauchy_timer import CauchyModel, ComboSide, ce
from potluck.perf.timers.pipeline_timer import ORDER
from potluck.perf.timers.roofline import check_tp
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.templates.combo import combo_capacity, efficiency_tokens_per_usd
from potluck.plan.timing.rate_cache import RateCache
from potluck.plan.timing.replica_rates import fits, useful

SHORTLIST = 4
"""Pairs of types that are passed on, as in the paper's example."""
PREFILL_UNITS, DECODE_UNITS = (1, 2), (1, 2, 3, 4, 5, 6)
MOST_NODES = 8


@dataclass(frozen=True, slots=True)
class RankedPair:
    """A pair of node types, prefill first, and its cost efficiency in tokens per dollar."""

    prefill: str
    decode: str
    ce_tokens_per_usd: float
    printed: bool
    """By equation 15; otherwise by what its combos serve."""


def ranked(
    problem: PlanningProblem,
    ask: ModelDemand,
    single_node: Sequence[Template],
    prices: Mapping[str, float],
    book: RateCache,
) -> list[RankedPair]:
    """All pairs whose sides keep the objective, in their better direction, the most efficient first."""
    able = {
        role: sorted({t.nodes[0].node for t in single_node if t.replicas[0].role == role})
        for role in ("prefill", "decode")
    }
    found: dict[frozenset[str], RankedPair] = {}
    for first in able["prefill"]:
        for second in able["decode"]:
            value = _efficiency(problem, ask, single_node, prices, first, second, book)
            best = found.get(frozenset((first, second)))
            if best is None or value.ce_tokens_per_usd > best.ce_tokens_per_usd:
                found[frozenset((first, second))] = value
    return sorted(found.values(), key=lambda each: (-each.ce_tokens_per_usd, each.prefill, each.decode))


def gpu_combos(
    problem: PlanningProblem, ask: ModelDemand, pairs: Sequence[RankedPair], book: RateCache
) -> list[Template]:
    """The combos of some pairs of types, counted in GPUs."""
    found: dict[str, Template] = {}
    for pair in pairs:
        first, second = problem.node(pair.prefill), problem.node(pair.decode)
        for n_p in PREFILL_UNITS:
            for n_d in DECODE_UNITS:
                template = _combo(problem, ask, (first, second), n_p, n_d, book)
                if template is not None:
                    found.setdefault(template.name, template)
    return list(found.values())


def _combo(
    problem: PlanningProblem,
    ask: ModelDemand,
    types: tuple[NodeType, NodeType],
    n_p: int,
    n_d: int,
    book: RateCache,
) -> Template | None:
    first, second = types
    prefill = _instances(problem, ask, first, "prefill", n_p, book)
    decode = _instances(problem, ask, second, "decode", n_d, book)
    if prefill is None or decode is None:
        return None
    nodes: tuple[NodeCount, ...]
    gpus_p, gpus_d = (sum(_gpus(replica) for replica in side) for side in (prefill, decode))
    if first.name == second.name and first.gpus % (gpus_p + gpus_d) == 0:
        times, nodes = first.gpus // (gpus_p + gpus_d), (NodeCount(first.name, 1),)
    else:
        times = _lcm(first.gpus // gcd(first.gpus, gpus_p), second.gpus // gcd(second.gpus, gpus_d))
        counts = (times * gpus_p // first.gpus, times * gpus_d // second.gpus)
        if sum(counts) > MOST_NODES:
            return None
        nodes = (NodeCount(first.name, counts[0]), NodeCount(second.name, counts[1]))
        if first.name == second.name:
            nodes = (NodeCount(first.name, sum(counts)),)
    replicas = tuple(prefill) * times + tuple(decode) * times
    codec = problem.codecs[-1]
    capacity = combo_capacity(problem, ask, replicas, codec, book)
    if not useful(capacity):
        return None
    known = [book.replica(problem, ask, side[0].layout, side[0].role) for side in (prefill, decode)]
    name = f"{times} x <{gpus_p} {first.gpu.name}, {gpus_d} {second.gpu.name}>"
    on = " + ".join(f"{each.count} {each.node}" for each in nodes)
    return Template(
        name=f"{ask.name}: combo {name} on {on}",
        kind="combo",
        model=ask.name,
        nodes=nodes,
        replicas=replicas,
        capacity=capacity,
        confidence=max((each.confidence for each in known), key=ORDER.index),
        codec=codec,
    )


def _instances(
    problem: PlanningProblem, ask: ModelDemand, node: NodeType, role: Role, units: int, book: RateCache
) -> list[PlannedReplica] | None:
    """So many units of a node's GPUs as few instances of the largest tensor-parallel degree there is."""
    degrees = book.once(("degrees", node.name), lambda: _degrees(problem, ask, node))
    if not degrees:
        return None
    gpus = min(degrees) * units
    tp = max(tp for tp in degrees if gpus % tp == 0)
    return [PlannedReplica(role, degrees[tp])] * (gpus // tp)


def _degrees(problem: PlanningProblem, ask: ModelDemand, node: NodeType) -> dict[int, Layout]:
    """Layouts on one node by tensor-parallel degree, where the model fits."""
    made = {tp: _layout(problem, ask, node, tp) for tp in range(1, node.gpus + 1) if node.gpus % tp == 0}
    return {tp: layout for tp, layout in made.items() if layout is not None}


def _layout(problem: PlanningProblem, ask: ModelDemand, node: NodeType, tp: int) -> Layout | None:
    try:
        check_tp(ask.model, node, tp)
    except InputError:
        return None
    layout = single(node.name, tp, ask.model.layer_count)
    return layout if fits(ask, layout, problem.by_name) else None


def _gpus(replica: PlannedReplica) -> int:
    return sum(node.tp for stage in replica.layout.stages for node in stage.nodes)


def _lcm(a: int, b: int) -> int:
    return a * b // gcd(a, b)


def _efficiency(
    problem: PlanningProblem,
    ask: ModelDemand,
    single_node: Sequence[Template],
    prices: Mapping[str, float],
    first: str,
    second: str,
    book: RateCache,
) -> RankedPair:
    rate = ask.rate_per_s or 1.0
    r_in = sum(d.rate_per_s * d.input_tokens for d in ask.demands) / rate or ask.demands[0].input_tokens
    r_out = sum(d.rate_per_s * d.output_tokens for d in ask.demands) / rate or ask.demands[0].output_tokens
    try:
        model = CauchyModel.from_model(ask.model)
        sides = [
            ComboSide(node.gpu, node.gpus, prices[node.name] / node.gpus)
            for node in (problem.node(first), problem.node(second))
        ]
    except InputError:  # not covered, or free of charge
        pair = [RankedPair(first, second, 0.0, False)]
        made = gpu_combos(problem, ask, pair, book)
        best = max((efficiency_tokens_per_usd(ask, each, dict(prices)) for each in made), default=0.0)
        return RankedPair(first, second, best, False)
    batch = max(_batch(ask, t) for t in single_node if _is(t, second, "decode"))
    return RankedPair(first, second, ce(model, batch, r_in, r_out, sides[0], sides[1]), True)


def _is(template: Template, node: str, role: Role) -> bool:
    return template.nodes[0].node == node and template.replicas[0].role == role


def _batch(ask: ModelDemand, template: Template) -> float:
    """Answers that one of its replicas makes at a time, at its rate in the bucket that most requests are of."""
    most = max(ask.demands, key=lambda demand: demand.rate_per_s)
    capacity = template.capacity[most.bucket]
    return max(1.0, capacity.decode_per_s * most.output_tokens * capacity.tpot_s / len(template.replicas))
