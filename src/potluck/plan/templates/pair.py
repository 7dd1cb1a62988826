"""CRONUS's pairs: a low-end node prefills the first part of a prompt, a high-end one the rest and decodes.

For a prompt of L tokens the low-end GPU takes L_p of them, at a rate of λ = 1 / T_low(L_p). The high-end GPU
batches the other L - L_p tokens of each prompt with its decodes (`perf.throughput` with L_p tokens cached) at
a rate of μ(L_p); a prompt that it takes whole costs it 1 / μ(0). So the pair serves

    μ(L_p)                              when λ ≥ μ(L_p): the low-end GPU keeps up
    μ(0) + λ (1 - μ(0) / μ(L_p))        else: λ split prompts a second, the rest whole

and the best L_p of a grid is where the two nearly meet. TTFT is both parts one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from potluck.core.values.plan import BucketCapacity, NodeCount, Replica, Template
from potluck.core.values.types import NodeType
from potluck.perf.phases import prefill_s
from potluck.perf.pipeline import ORDER, layout_requests
from potluck.perf.step import StepTimer
from potluck.perf.throughput import best_operating
from potluck.plan.problem import Ask, Demand, Problem
from potluck.plan.rates import UNPROMISED_TTFT_S, layout_timer, replica_capacity, useful, wait_factor

GRID = tuple(i / 16 for i in range(1, 17))
"""Shares of a prompt that the low-end GPU may take."""


def pairs(problem: Problem, ask: Ask, single: Sequence[Template]) -> list[Template]:
    """One low-end and one high-end node, for every two unlike GPU types that can take their parts."""
    low = {t.nodes[0].node: t for t in single if t.replicas[0].role == "prefill" and t.model == ask.name}
    high = {t.nodes[0].node: t for t in single if t.replicas[0].role == "mixed" and t.model == ask.name}
    found = []
    for weak, first in low.items():
        for strong, second in high.items():
            if not _weaker(problem.node(weak), problem.node(strong)):
                continue
            template = _pair(problem, ask, first, second)
            if useful(template.capacity):
                found.append(template)
    return found


def _weaker(low: NodeType, high: NodeType) -> bool:
    """Whether the whole node has less compute and less bandwidth: the pair's direction."""
    compute = low.gpu.fp16_tflops * low.gpus < high.gpu.fp16_tflops * high.gpus
    bandwidth = low.gpu.bandwidth_gb_per_s * low.gpus < high.gpu.bandwidth_gb_per_s * high.gpus
    return low.gpu.name != high.gpu.name and compute and bandwidth


def _pair(problem: Problem, ask: Ask, first: Template, second: Template) -> Template:
    low, high = first.nodes[0].node, second.nodes[0].node
    return Template(
        name=f"{ask.name}: pair {low} + {high}",
        kind="pair",
        model=ask.name,
        nodes=(NodeCount(low, 1), NodeCount(high, 1)),
        replicas=first.replicas + second.replicas,
        capacity=pair_capacity(problem, ask, first.replicas, second.replicas),
        confidence=max((first.confidence, second.confidence), key=ORDER.index),
    )


def pair_capacity(
    problem: Problem, ask: Ask, low: Sequence[Replica], high: Sequence[Replica]
) -> tuple[BucketCapacity, ...]:
    """What low-end and high-end replicas serve together, bucket by bucket."""
    low_timer = layout_timer(ask, low[0].layout, problem.by_name)
    high_timer = layout_timer(ask, high[0].layout, problem.by_name)
    alone = replica_capacity(ask, high[0].layout, problem.by_name, "mixed", problem.headroom, len(high))
    return tuple(
        _balanced(problem, ask, demand, low_timer, len(low), high_timer, high, alone[demand.bucket])
        for demand in ask.demands
    )


def _balanced(
    problem: Problem,
    ask: Ask,
    demand: Demand,
    low: StepTimer,
    low_copies: int,
    high: StepTimer,
    high_replicas: Sequence[Replica],
    alone: BucketCapacity,
) -> BucketCapacity:
    """The best split of this bucket's prompts; no split at all where that serves more."""
    best, whole = alone, alone.closed_per_s
    layout, copies = high_replicas[0].layout, len(high_replicas)
    room = layout_requests(ask.model, layout, problem.by_name, demand.longest_tokens + demand.output_tokens)
    for share in GRID:
        part = min(max(1, round(demand.new_tokens * share)), demand.new_tokens - 1)
        if part < 1:
            continue
        found = _split(ask, demand, part, low, low_copies, high, copies, room, problem.headroom, whole)
        if found is not None and found.closed_per_s > best.closed_per_s:
            best = found
    return best


def _split(
    ask: Ask,
    demand: Demand,
    part: int,
    low: StepTimer,
    low_copies: int,
    high: StepTimer,
    high_copies: int,
    room: int,
    headroom: float,
    whole_per_s: float,
) -> BucketCapacity | None:
    service_s = float(prefill_s(low, part, demand.cached_tokens)[0])
    first_s = service_s * wait_factor(headroom)
    limit_s = ask.slo.ttft_s if demand.promised else UNPROMISED_TTFT_S
    if first_s >= limit_s:
        return None
    slo = replace(ask.slo, ttft_s=limit_s - first_s)
    lengths = (demand.input_tokens, demand.output_tokens)
    rest = best_operating(high, *lengths, room, slo, "mixed", cached_tokens=demand.cached_tokens + part)
    if rest is None:
        return None
    low_rate, split_rate = low_copies / service_s, rest.requests_per_s * high_copies
    spare = 1.0 - min(1.0, low_rate / split_rate)
    rate = min(low_rate, split_rate) + spare * whole_per_s
    return BucketCapacity(demand.bucket, 0.0, 0.0, rate, first_s + rest.ttft_s, rest.tpot_s)
