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
from potluck.perf.throughput import MixedSteps, best_shared, shared_steps
from potluck.perf.timers.engine_host import DEFAULT_HOST
from potluck.perf.timers.pipeline_timer import ORDER, layout_requests
from potluck.perf.transfer import crossing_bytes
from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem
from potluck.plan.timing.network_cards import NetworkCards, cards_of, sides, sojourn_s
from potluck.plan.timing.rate_cache import RateCache, RatedLayout, layout_text
from potluck.plan.timing.replica_rates import UNPROMISED_TTFT_S, layout_timer, useful, wait_factor

GRID = tuple(i / 16 for i in range(1, 17))  # Shares of a prompt that the low-end GPU may take.


def pairs(
    problem: PlanningProblem, demand: ModelDemand, single: Sequence[Template], rate_cache: RateCache
) -> list[Template]:
    """One low-end and one high-end node, for every two unlike GPU types that can take their parts."""
    low = {t.nodes[0].node: t for t in single if t.replicas[0].role == "prefill" and t.model == demand.name}
    high = [t for t in single if t.replicas[0].role == "mixed" and t.model == demand.name]
    templates = []
    for weak, first_template in low.items():
        giver = first_template.replicas[0].layout
        takers = {
            t.nodes[0].node: t
            for t in high
            if not limit_of_hand_over(giver, t.replicas[0].layout, demand.model, problem.engine)
        }
        for strong, second_template in takers.items():
            if not _weaker(problem.node(weak), problem.node(strong)):
                continue
            template = _pair(problem, demand, first_template, second_template, rate_cache)
            if useful(template.capacity):
                templates.append(template)
    return templates


def _weaker(low_node_type: NodeType, high_node_type: NodeType) -> bool:
    """Whether the whole node has less compute and less bandwidth: the pair's direction."""
    compute = (
        low_node_type.gpu.fp16_tflops * low_node_type.gpus
        < high_node_type.gpu.fp16_tflops * high_node_type.gpus
    )
    bandwidth = (
        low_node_type.gpu.bandwidth_gb_per_s * low_node_type.gpus
        < high_node_type.gpu.bandwidth_gb_per_s * high_node_type.gpus
    )
    return low_node_type.gpu.name != high_node_type.gpu.name and compute and bandwidth


def _pair(
    problem: PlanningProblem,
    demand: ModelDemand,
    first_template: Template,
    second_template: Template,
    rate_cache: RateCache,
) -> Template:
    low, high = first_template.nodes[0].node, second_template.nodes[0].node
    replicas, codec = first_template.replicas + second_template.replicas, problem.codecs[-1]
    return Template(
        name=f"{demand.name}: pair {low} + {high}",
        kind="pair",
        model=demand.name,
        nodes=(NodeCount(low, 1), NodeCount(high, 1)),
        replicas=replicas,
        capacity=pair_capacity(problem, demand, replicas, codec, rate_cache),
        confidence=max((first_template.confidence, second_template.confidence), key=ORDER.index),
        codec=codec,
    )


def pair_capacity(
    problem: PlanningProblem,
    demand: ModelDemand,
    replicas: Sequence[PlannedReplica],
    codec: Codec,
    rate_cache: RateCache,
) -> tuple[BucketCapacity, ...]:
    low, high = sides(replicas)
    both = " + ".join(f"{len(side)} x {layout_text(side[0].layout)}" for side in (low, high))
    return rate_cache.rated(
        f"pair {codec} {both}", partial(_rated, problem, demand, low, high, codec, rate_cache)
    ).capacity


def _rated(
    problem: PlanningProblem,
    demand: ModelDemand,
    low: Sequence[PlannedReplica],
    high: Sequence[PlannedReplica],
    codec: Codec,
    rate_cache: RateCache,
) -> RatedLayout:
    alone, sure = rate_cache.replica(problem, demand, high[0].layout, "mixed").times(len(high))
    both = (cards_of(low, problem.by_name), cards_of(high, problem.by_name))
    cards = NetworkCards(
        min(network_cards.one_bits_per_s for network_cards in both),
        min(network_cards.all_bits_per_s for network_cards in both),
    )
    served = []
    for bucket in demand.buckets:
        # Each side is timed once, whoever is on the other.
        prompt_parts = partial(_prompt_parts, problem, demand, low[0].layout, bucket, codec)
        takes = rate_cache.once(("low", codec, layout_text(low[0].layout), bucket.bucket), prompt_parts)
        rest = partial(_prompt_rests, problem, demand, high[0].layout, bucket)
        rests = rate_cache.once(("high", layout_text(high[0].layout), bucket.bucket), rest)
        work = _PairWork(problem, demand, bucket, len(low), len(high), cards)
        served.append(_balanced(work, takes, rests, alone[bucket.bucket]))
    return RatedLayout(tuple(served), sure)


@dataclass(frozen=True, slots=True)
class _PairWork:
    problem: PlanningProblem
    ask: ModelDemand
    demand: BucketDemand
    low_copies: int
    high_copies: int
    cards: NetworkCards


class _PromptPart(NamedTuple):
    """What the low-end node may take of a prompt."""

    tokens: int
    service_s: float
    wire_bits: float
    fits: bool


class _PromptRests(NamedTuple):
    """What the high-end node does with the rest of each of `_parts`."""

    room: int
    steps: MixedSteps | None


def _parts(demand: BucketDemand) -> list[int]:
    new = demand.new_tokens
    return sorted({min(max(1, round(new * share)), new - 1) for share in GRID} - {0})


def _prompt_parts(
    problem: PlanningProblem, model_demand: ModelDemand, layout: Layout, demand: BucketDemand, codec: Codec
) -> list[_PromptPart]:
    nodes, cached, parts = problem.by_name, demand.cached_tokens, _parts(demand)
    result = []
    times_s = prefill_s(layout_timer(model_demand, layout, nodes), parts, cached).tolist()
    for part, service_s in zip(parts, times_s, strict=True):
        longest = (part + cached) * demand.longest_tokens / demand.input_tokens
        fits = layout_requests(model_demand.model, layout, nodes, longest) >= 1
        result.append(_PromptPart(part, service_s, _wire_bits(model_demand, part + cached, codec), fits))
    return result


def _prompt_rests(
    problem: PlanningProblem, model_demand: ModelDemand, layout: Layout, demand: BucketDemand
) -> _PromptRests:
    longest = demand.longest_tokens + demand.output_tokens
    room = layout_requests(model_demand.model, layout, problem.by_name, longest)
    there = [demand.cached_tokens + part for part in _parts(demand)]
    timer = layout_timer(model_demand, layout, problem.by_name)
    return _PromptRests(room, shared_steps(timer, demand.input_tokens, demand.output_tokens, room, there))


def _balanced(
    work: _PairWork, takes: Sequence[_PromptPart], rests: _PromptRests, capacity_alone: BucketCapacity
) -> BucketCapacity:
    """The best split of this bucket's prompts; no split at all where that serves more."""
    best, whole, demand = capacity_alone, capacity_alone.closed_per_s, work.demand
    for row, part in enumerate(takes):
        first = _first(work, part)
        if first is None or rests.steps is None:
            continue
        slo = replace(work.ask.slo, ttft_s=first.left_s)
        rest = best_shared(rests.steps, row, demand.output_tokens, rests.room, slo)
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
    per_s: float
    taken_s: float
    left_s: float  # Of TTFT, for the other side.


def _first(work: _PairWork, part: _PromptPart) -> _First | None:
    """The low-end node's part; None where its KV does not fit there, or no time is left."""
    headroom, cards = work.problem.headroom, work.cards
    limit_s = work.ask.slo.ttft_s if work.demand.promised else UNPROMISED_TTFT_S
    low_rate = min(work.low_copies / part.service_s, cards.all_bits_per_s / max(part.wire_bits, 1e-9))
    busy = headroom * low_rate * part.wire_bits / cards.all_bits_per_s
    crossing_s = sojourn_s(part.wire_bits / cards.one_bits_per_s, busy)
    waited_s = part.service_s * (wait_factor(headroom) - 1.0) + DEFAULT_HOST.request_s
    taken_s = waited_s + max(part.service_s, crossing_s)
    return _First(low_rate, taken_s, limit_s - taken_s) if taken_s < limit_s and part.fits else None


def _wire_bits(demand: ModelDemand, tokens: int, codec: Codec) -> float:
    """What the KV of a prompt's first tokens puts on the wire."""
    return crossing_bytes(demand.model, kv_bytes(demand.model, float(tokens)), codec) * 8
