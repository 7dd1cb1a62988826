"""CRONUS's pairs: a low-end node prefills the first part of a prompt, a high-end one the rest and decodes.

For a prompt of L tokens the low-end GPU takes L_p of them, at a rate of λ = 1 / T_low(L_p). The high-end GPU
batches the other L - L_p tokens of each prompt with its decodes (`perf.serving.throughput` with L_p tokens cached) at
a rate of μ(L_p); a prompt that it takes whole costs it 1 / μ(0). So the pair serves

    μ(L_p)                              when λ ≥ μ(L_p): the low-end GPU keeps up
    μ(0) + λ (1 - μ(0) / μ(L_p))        else: λ split prompts a second, the rest whole

and the best L_p of a grid is where the two nearly meet. TTFT is both parts one after the other. The KV of L_p
tokens crosses the narrower of the two network cards, so λ is at most what that carries, and the first part takes as
long as its prefill or its KV, whichever is longer (`plan.timing.network_cards`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from potluck.core.values.engine_abilities import limit_of_hand_over
from potluck.core.values.layout import Layout
from potluck.core.values.plan import BucketCapacity, NodeCount, PlannedReplica, Template
from potluck.core.values.types import Codec, NodeType
from potluck.perf.memory import kv_bytes
from potluck.perf.phases import prefill_s
from potluck.perf.step_timer import StepTimer
from potluck.perf.throughput import best_shared
from potluck.perf.timers.pipeline_timer import ORDER, layout_requests
from potluck.perf.transfer import crossing_bytes
from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem
from potluck.plan.timing.network_cards import NetworkCards, cards_of, sides, sojourn_s
from potluck.plan.timing.rate_cache import RateCache, RatedLayout, layout_text
from potluck.plan.timing.replica_rates import UNPROMISED_TTFT_S, layout_timer, useful, wait_factor

GRID = tuple(i / 16 for i in range(1, 17))
"""Shares of a prompt that the low-end GPU may take."""


def pairs(
    problem: PlanningProblem, ask: ModelDemand, single: Sequence[Template], book: RateCache
) -> list[Template]:
    """One low-end and one high-end node, for every two unlike GPU types that can take their parts."""
    low = {t.nodes[0].node: t for t in single if t.replicas[0].role == "prefill" and t.model == ask.name}
    high = [t for t in single if t.replicas[0].role == "mixed" and t.model == ask.name]
    templates = []
    for weak, first in low.items():
        giver = first.replicas[0].layout
        takers = {
            t.nodes[0].node: t
            for t in high
            if not limit_of_hand_over(giver, t.replicas[0].layout, ask.model, problem.engine)
        }
        for strong, second in takers.items():
            if not _weaker(problem.node(weak), problem.node(strong)):
                continue
            template = _pair(problem, ask, first, second, book)
            if useful(template.capacity):
                templates.append(template)
    return templates


def _weaker(low: NodeType, high: NodeType) -> bool:
    """Whether the whole node has less compute and less bandwidth: the pair's direction."""
    compute = low.gpu.fp16_tflops * low.gpus < high.gpu.fp16_tflops * high.gpus
    bandwidth = low.gpu.bandwidth_gb_per_s * low.gpus < high.gpu.bandwidth_gb_per_s * high.gpus
    return low.gpu.name != high.gpu.name and compute and bandwidth


def _pair(
    problem: PlanningProblem, ask: ModelDemand, first: Template, second: Template, book: RateCache
) -> Template:
    low, high = first.nodes[0].node, second.nodes[0].node
    replicas, codec = first.replicas + second.replicas, problem.codecs[-1]
    return Template(
        name=f"{ask.name}: pair {low} + {high}",
        kind="pair",
        model=ask.name,
        nodes=(NodeCount(low, 1), NodeCount(high, 1)),
        replicas=replicas,
        capacity=pair_capacity(problem, ask, replicas, codec, book),
        confidence=max((first.confidence, second.confidence), key=ORDER.index),
        codec=codec,
    )


def pair_capacity(
    problem: PlanningProblem,
    ask: ModelDemand,
    replicas: Sequence[PlannedReplica],
    codec: Codec,
    book: RateCache,
) -> tuple[BucketCapacity, ...]:
    low, high = sides(replicas)
    both = " + ".join(f"{len(side)} x {layout_text(side[0].layout)}" for side in (low, high))
    return book.rated(f"pair {codec} {both}", partial(_rated, problem, ask, low, high, codec, book)).capacity


def _rated(
    problem: PlanningProblem,
    ask: ModelDemand,
    low: Sequence[PlannedReplica],
    high: Sequence[PlannedReplica],
    codec: Codec,
    book: RateCache,
) -> RatedLayout:
    layout = high[0].layout
    alone, sure = book.replica(problem, ask, layout, "mixed").times(len(high))
    both = (cards_of(low, problem.by_name), cards_of(high, problem.by_name))
    work = _PairWork(
        problem,
        ask,
        low[0].layout,
        layout_timer(ask, low[0].layout, problem.by_name),
        len(low),
        layout_timer(ask, layout, problem.by_name),
        len(high),
        NetworkCards(
            min(network_cards.one_bits_per_s for network_cards in both),
            min(network_cards.all_bits_per_s for network_cards in both),
        ),
        codec,
    )
    rooms = [
        layout_requests(ask.model, layout, problem.by_name, d.longest_tokens + d.output_tokens)
        for d in ask.demands
    ]
    served = tuple(
        _balanced(work, demand, room, alone[demand.bucket])
        for demand, room in zip(ask.demands, rooms, strict=True)
    )
    return RatedLayout(served, sure)


@dataclass(frozen=True, slots=True)
class _PairWork:
    problem: PlanningProblem
    ask: ModelDemand
    low_layout: Layout
    low: StepTimer
    low_copies: int
    high: StepTimer
    high_copies: int
    cards: NetworkCards
    codec: Codec


def _balanced(work: _PairWork, demand: BucketDemand, room: int, alone: BucketCapacity) -> BucketCapacity:
    """The best split of this bucket's prompts; no split at all where that serves more."""
    best, whole, new = alone, alone.closed_per_s, demand.new_tokens
    parts = sorted({min(max(1, round(new * share)), new - 1) for share in GRID} - {0})
    firsts = _firsts(work, demand, parts)
    slos = [replace(work.ask.slo, ttft_s=item.left_s) for item in firsts]
    there = [demand.cached_tokens + item.tokens for item in firsts]
    rests = best_shared(work.high, demand.input_tokens, demand.output_tokens, room, slos, there)
    for first, rest in zip(firsts, rests, strict=True):
        if rest is None:
            continue
        split_rate = rest.requests_per_s * work.high_copies
        spare = 1.0 - min(1.0, first.per_s / split_rate)
        rate = min(first.per_s, split_rate) + spare * whole
        if rate > best.closed_per_s:
            ttft_s = first.taken_s + rest.ttft_s
            best = BucketCapacity(demand.bucket, 0.0, 0.0, rate, ttft_s, rest.tpot_s)
    return best


class _First(NamedTuple):
    tokens: int
    per_s: float
    taken_s: float
    left_s: float
    """Of TTFT, for the other side."""


def _firsts(work: _PairWork, demand: BucketDemand, parts: Sequence[int]) -> list[_First]:
    """Those whose KV fits on the low-end node and that leave any time."""
    ask, headroom, nodes = work.ask, work.problem.headroom, work.problem.by_name
    limit_s = ask.slo.ttft_s if demand.promised else UNPROMISED_TTFT_S
    firsts = []
    for part, service_s in zip(parts, prefill_s(work.low, parts, demand.cached_tokens).tolist(), strict=True):
        bits = _wire_bits(ask, part + demand.cached_tokens, work.codec)
        low_rate = min(work.low_copies / service_s, work.cards.all_bits_per_s / max(bits, 1e-9))
        busy = headroom * low_rate * bits / work.cards.all_bits_per_s
        crossing_s = sojourn_s(bits / work.cards.one_bits_per_s, busy)
        first_s = service_s * (wait_factor(headroom) - 1.0) + max(service_s, crossing_s)
        longest = (part + demand.cached_tokens) * demand.longest_tokens / demand.input_tokens
        if first_s < limit_s and layout_requests(ask.model, work.low_layout, nodes, longest) >= 1:
            firsts.append(_First(part, low_rate, first_s, limit_s - first_s))
    return firsts


def _wire_bits(ask: ModelDemand, tokens: int, codec: Codec) -> float:
    """What the KV of a prompt's first tokens puts on the wire."""
    return crossing_bytes(ask.model, kv_bytes(ask.model, float(tokens)), codec) * 8
