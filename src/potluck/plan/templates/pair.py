"""CRONUS's pairs: a low-end node prefills the first part of a prompt, a high-end node the rest and decodes.

Of a prompt of L tokens the low-end node prefills L_p, at a rate of λ = 1 / T_low(L_p). The high-end node batches the
other L - L_p tokens with its decodes (`perf.throughput` with L_p tokens cached) at a rate of μ(L_p), and whole
prompts at μ(0). So the pair serves

    μ(L_p)                              when λ ≥ μ(L_p): the low-end node keeps up
    μ(0) + λ (1 - μ(0) / μ(L_p))        else: λ split prompts per second, the others whole

and the best L_p of a grid nearly balances both nodes. TTFT is the sum of both parts. The KV of L_p tokens crosses the
slower of the two network cards, which limits λ, and the first part takes as long as its prefill or its KV transfer,
whichever is longer (`plan.timing.network_cards`).
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
from potluck.plan.timing.network_cards import NetworkCards, cards_of, prefill_and_other_replicas, sojourn_s
from potluck.plan.timing.rate_cache import RateCache, RatedLayout, layout_text
from potluck.plan.timing.replica_rates import UNPROMISED_TTFT_S, layout_timer, useful, wait_factor

PROMPT_SHARES = tuple(i / 16 for i in range(1, 17))  # Shares of a prompt that the low-end node may prefill.


def pairs(
    problem: PlanningProblem, demand: ModelDemand, single: Sequence[Template], rate_cache: RateCache
) -> list[Template]:
    """Templates of one low-end and one high-end node, for every two different GPU types that can serve together."""
    prefill_by_node = {
        t.nodes[0].node: t for t in single if t.replicas[0].role == "prefill" and t.model == demand.name
    }
    mixed_templates = [t for t in single if t.replicas[0].role == "mixed" and t.model == demand.name]
    templates = []
    for low_node, low_template in prefill_by_node.items():
        low_layout = low_template.replicas[0].layout
        mixed_by_node = {
            t.nodes[0].node: t
            for t in mixed_templates
            if not limit_of_hand_over(low_layout, t.replicas[0].layout, demand.model, problem.engine)
        }
        for high_node, high_template in mixed_by_node.items():
            if not _is_weaker(problem.node(low_node), problem.node(high_node)):
                continue
            template = _pair(problem, demand, low_template, high_template, rate_cache)
            if useful(template.capacity):
                templates.append(template)
    return templates


def _is_weaker(low_node_type: NodeType, high_node_type: NodeType) -> bool:
    """Whether the first node has another GPU type with less compute and less memory bandwidth in total."""
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
    """Capacity of a pair by bucket."""
    low, high = prefill_and_other_replicas(replicas)
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
    """Capacity of a pair, from the cached times of each side."""
    unsplit_capacity, confidence = rate_cache.replica(problem, demand, high[0].layout, "mixed").times(
        len(high)
    )
    cards_of_sides = (cards_of(low, problem.by_name), cards_of(high, problem.by_name))
    cards = NetworkCards(
        min(network_cards.one_bits_per_s for network_cards in cards_of_sides),
        min(network_cards.all_bits_per_s for network_cards in cards_of_sides),
    )
    capacities = []
    for bucket in demand.buckets:
        # The times of each side do not depend on the other side.
        prompt_parts = partial(_prompt_parts, problem, demand, low[0].layout, bucket, codec)
        prompt_parts_of_low = rate_cache.once(
            ("low", codec, layout_text(low[0].layout), bucket.bucket), prompt_parts
        )
        compute_rests = partial(_prompt_rests, problem, demand, high[0].layout, bucket)
        rests = rate_cache.once(("high", layout_text(high[0].layout), bucket.bucket), compute_rests)
        work = _PairWork(problem, demand, bucket, len(low), len(high), cards)
        capacities.append(_best_split(work, prompt_parts_of_low, rests, unsplit_capacity[bucket.bucket]))
    return RatedLayout(tuple(capacities), confidence)


@dataclass(frozen=True, slots=True)
class _PairWork:
    """One bucket of a model on a pair of nodes."""

    problem: PlanningProblem
    demand: ModelDemand
    bucket: BucketDemand
    low_copies: int
    high_copies: int
    cards: NetworkCards


class _PromptPart(NamedTuple):
    """A first part of a prompt on the low-end node."""

    tokens: int
    service_s: float
    wire_bits: float
    fits: bool


class _PromptRests(NamedTuple):
    """Step times of the high-end node for the rest of each of `_parts`."""

    room: int
    steps: MixedSteps | None


def _parts(demand: BucketDemand) -> list[int]:
    """Candidate lengths of the first part of a bucket's mean prompt."""
    new = demand.new_tokens
    return sorted({min(max(1, round(new * share)), new - 1) for share in PROMPT_SHARES} - {0})


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


def _best_split(
    work: _PairWork, parts: Sequence[_PromptPart], rests: _PromptRests, capacity_alone: BucketCapacity
) -> BucketCapacity:
    """Capacity with the best split of the bucket's prompts; the high-end node alone where that serves more."""
    best_capacity, whole_rate, bucket = capacity_alone, capacity_alone.closed_per_s, work.bucket
    for row, part in enumerate(parts):
        low_part = _low_end_part(work, part)
        if low_part is None or rests.steps is None:
            continue
        slo = replace(work.demand.slo, ttft_s=low_part.left_s)
        high_part = best_shared(rests.steps, row, bucket.output_tokens, rests.room, slo)
        if high_part is None:
            continue
        split_rate = high_part.requests_per_s * work.high_copies
        spare_share = 1.0 - min(1.0, low_part.per_s / split_rate)
        rate = min(low_part.per_s, split_rate) + spare_share * whole_rate
        if rate > best_capacity.closed_per_s:
            ttft_s = low_part.taken_s + high_part.ttft_s
            best_capacity = BucketCapacity(bucket.bucket, 0.0, 0.0, rate, ttft_s, high_part.tpot_s)
    return best_capacity


class _LowEndPart(NamedTuple):
    """Rate and time of the low-end node's part."""

    per_s: float
    taken_s: float
    left_s: float  # TTFT left for the high-end node.


def _low_end_part(work: _PairWork, part: _PromptPart) -> _LowEndPart | None:
    """The low-end node's part; None where its KV does not fit there, or no TTFT is left."""
    headroom, cards = work.problem.headroom, work.cards
    limit_s = work.demand.slo.ttft_s if work.bucket.promised else UNPROMISED_TTFT_S
    low_rate = min(work.low_copies / part.service_s, cards.all_bits_per_s / max(part.wire_bits, 1e-9))
    utilization = headroom * low_rate * part.wire_bits / cards.all_bits_per_s
    transfer_s = sojourn_s(part.wire_bits / cards.one_bits_per_s, utilization)
    waited_s = part.service_s * (wait_factor(headroom) - 1.0) + DEFAULT_HOST.request_s
    taken_s = waited_s + max(part.service_s, transfer_s)
    return _LowEndPart(low_rate, taken_s, limit_s - taken_s) if taken_s < limit_s and part.fits else None


def _wire_bits(demand: ModelDemand, tokens: int, codec: Codec) -> float:
    """Bits on the network for the KV of this many tokens."""
    return crossing_bytes(demand.model, kv_bytes(demand.model, float(tokens)), codec) * 8
