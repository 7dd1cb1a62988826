"""Rates of a replica for each bucket of a model within its SLO.

A prefill replica runs up to K prompts per step within its token budget (longer prompts in chunks), at K / T(K)
prompts per second. At utilization h a step has b prompts, the fewest that keep up, and prompts queue: an M/D/1 queue,
as service times hardly vary, plus half of the running step where several prompts share one, so

    TTFT = T(b) + S h / (2 (1 - h)) + [K > 1] T(b) / 2 + hand-over          S = T(K) / K

must meet the objective; K is the largest that does and whose KV fits. In a pipeline T is the time between two steps,
and the first token takes all stages, after the current round of chunks. A decode replica runs the largest batch whose
step meets TPOT and whose KV fits; its KV memory is reserved from the start of the prefill elsewhere. A mixed replica
runs both phases and must meet both objectives (`perf.throughput`); in a pipeline of S stages S batches alternate, so
a request's step is a cycle of them. The server's time outside of steps is added to TTFT (`EngineHost.request_s`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import ceil
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import CapacityError
from potluck.core.routing.capacity import MARGIN
from potluck.core.values.layout import Ep, Layout
from potluck.core.values.model import Model
from potluck.core.values.plan import BucketCapacity, Confidence, PlannedShare, Template
from potluck.core.values.types import NodeType, Role, Slo
from potluck.perf.error_bars import bar, slower
from potluck.perf.kv_capacity import STEP_TOKENS
from potluck.perf.phases import CHUNK_TOKENS, chunked_prefill_s, prefill_s, prompts_in_step, prompts_s
from potluck.perf.step_timer import Floats, StepBatch, StepTimer, steps
from potluck.perf.throughput import MAX_BATCH, best_operating
from potluck.perf.timers.engine_host import DEFAULT_HOST
from potluck.perf.timers.pipeline_timer import PipelineTimer, layout_requests, pipeline
from potluck.perf.timers.profile import ProfileTimer, profile_for
from potluck.perf.timers.roofline import roofline
from potluck.plan.problem import BucketDemand, ModelDemand

UNPROMISED_TTFT_S = 600.0  # TTFT limit of requests beyond the attainment.
HANDOVER_SHARE = 0.1
"""Part of the TTFT objective reserved for KV transfer, which overlaps with prefill."""


def inside_server(slo: Slo) -> Slo:
    """The SLO without the server's time outside of queues and steps."""
    return replace(slo, ttft_s=max(slo.ttft_s - DEFAULT_HOST.request_s, 1e-9))


def wait_factor(headroom: float) -> float:
    """Sojourn over service time of an M/D/1 queue at this utilisation."""
    utilization = min(headroom, 0.99)
    return 1.0 + utilization / (2.0 * (1.0 - utilization))


def decode_room(
    demand: ModelDemand, bucket: BucketDemand, timer: StepTimer, room: int, headroom: float
) -> int:
    """Largest decode batch of a replica whose KV memory holds `room` requests.

    KV memory is reserved during the prefill elsewhere, which takes about as long as here. A request that finds all
    memory reserved waits for an answer to end and is late; so that only the allowed share is, room for c requests is
    filled to 1 - z / sqrt(c) on average (square-root staffing, z: normal quantile of the attainment).
    """
    answer_s = bucket.output_tokens * demand.slo.tpot_s
    prefill_time_s = float(prefill_s(timer, bucket.new_tokens, bucket.cached_tokens)[0])
    filled = filled_room(
        np.array(room), demand.slo.attainment, headroom, answer_s / (answer_s + prefill_time_s)
    )
    return int(filled)


def filled_room(
    room: NDArray[np.int64], attainment: float, headroom: float, answer_share: float
) -> NDArray[np.int64]:
    """Largest batches for these sizes of KV memory; `answer_share`: share of the reserved time that decodes."""
    z = NormalDist().inv_cdf(min(max(attainment, 0.5), 0.999))
    filled = 1.0 - z / np.sqrt(np.maximum(room, 1))
    batch = room * np.minimum(1.0, filled / headroom) * answer_share
    return np.where(room < 1, 0, np.maximum(batch, 1.0)).astype(np.int64)


def layout_timer(demand: ModelDemand, layout: Layout, nodes: Mapping[str, NodeType]) -> StepTimer:
    """The step timer of a layout: measured profile or roofline for one node, pipeline timer for several."""
    stage = layout.stages[0]
    if len(layout.stages) == 1 and len(stage.nodes) == 1:
        node, tp, ep = nodes[stage.nodes[0].node], stage.nodes[0].tp, stage.nodes[0].ep
        profile = profile_for(demand.profiles, demand.model, node, tp) if ep == "none" else None
        return (
            roofline(demand.model, node, tp, ep=ep, sure=demand.sure)
            if profile is None
            else ProfileTimer(profile)
        )
    return pipeline(demand.model, layout, nodes, sure=demand.sure)


def replica_capacity(
    demand: ModelDemand,
    layout: Layout,
    nodes: Mapping[str, NodeType],
    role: Role,
    headroom: float,
    copies: int = 1,
    *,
    timer: StepTimer | None = None,
) -> tuple[BucketCapacity, ...]:
    """Rates of `copies` replicas of one layout in one role by bucket; 0 where it cannot serve a bucket."""
    timer = layout_timer(demand, layout, nodes) if timer is None else timer
    return tuple(
        _bucket(demand, bucket, timer, layout, nodes, role, headroom, copies) for bucket in demand.buckets
    )


def useful(capacity: tuple[BucketCapacity, ...]) -> bool:
    """Whether any bucket has a positive rate."""
    return any(c.prefill_per_s > 0 or c.decode_per_s > 0 or c.closed_per_s > 0 for c in capacity)


def fits(demand: ModelDemand, layout: Layout, nodes: Mapping[str, NodeType]) -> bool:
    """Whether the weights and the KV of one prompt of the shortest bucket fit in memory."""
    shortest = min((bucket.longest_tokens for bucket in demand.buckets), default=1)
    try:
        return layout_requests(demand.model, layout, nodes, float(shortest)) >= 1
    except CapacityError:
        return False


def _bucket(
    demand: ModelDemand,
    bucket: BucketDemand,
    timer: StepTimer,
    layout: Layout,
    nodes: Mapping[str, NodeType],
    role: Role,
    headroom: float,
    copies: int,
) -> BucketCapacity:
    no_capacity = BucketCapacity(bucket.bucket, 0.0, 0.0, 0.0, 0.0, 0.0)
    tokens = bucket.longest_tokens + (0 if role == "prefill" else bucket.output_tokens)
    max_requests = layout_requests(demand.model, layout, nodes, tokens)
    if role == "prefill":
        return _prefill(demand, bucket, timer, max_requests, headroom, copies) or no_capacity
    if role == "decode":
        max_requests = decode_room(demand, bucket, timer, max_requests, headroom)
    if isinstance(timer, PipelineTimer) and role == "decode":
        rate, tpot_s = _pipeline_decode(timer, bucket, max_requests, demand.slo.tpot_s)
        return BucketCapacity(bucket.bucket, 0.0, rate * copies, 0.0, 0.0, tpot_s)
    server_s = DEFAULT_HOST.request_s
    slo = inside_server(demand.slo) if bucket.promised else replace(demand.slo, ttft_s=UNPROMISED_TTFT_S)
    if isinstance(timer, PipelineTimer) and len(timer.stages) > 1:
        rate, ttft_s, tpot_s = _pipeline_mixed(timer, bucket, max_requests, slo)
        ttft_s += server_s if rate > 0 else 0.0
        return BucketCapacity(bucket.bucket, 0.0, 0.0, rate * copies, ttft_s, tpot_s)
    lengths = (bucket.input_tokens, bucket.output_tokens)
    operating_point = best_operating(
        timer, *lengths, max_requests, slo, role, cached_tokens=bucket.cached_tokens
    )
    if operating_point is None:
        return no_capacity
    rate = operating_point.requests_per_s * copies
    if role == "decode":
        return BucketCapacity(bucket.bucket, 0.0, rate, 0.0, 0.0, operating_point.tpot_s)
    ttft_s, tpot_s = operating_point.ttft_s + server_s, operating_point.tpot_s
    return BucketCapacity(bucket.bucket, 0.0, 0.0, rate, ttft_s, tpot_s)


def _prefill(
    demand: ModelDemand, bucket: BucketDemand, timer: StepTimer, room: int, headroom: float, copies: int
) -> BucketCapacity | None:
    """Capacity with the most prompts per step that the token budget, KV memory and TTFT allow."""
    new, cached = bucket.new_tokens, bucket.cached_tokens
    counts = np.arange(1, min(prompts_in_step(new), room) + 1)
    if not len(counts):
        return None
    round_s = 0.0
    if isinstance(timer, PipelineTimer):
        # The longest prompt and a single chunk are timed in the same call.
        whole_s, between_s = timer.both_s(
            _prompts(counts, new, cached, (bucket.longest_tokens, 0), (min(new, CHUNK_TOKENS), cached))
        )
        latency_s, interval_s, longest_s = whole_s[:-2], between_s[:-2], float(whole_s[-2])
        # At most one step per node, or as many as KV memory holds, run at once; with a slow stage, steps wait.
        least_s = latency_s * np.minimum(np.maximum(1 / sum(map(len, timer.stages)), counts / room), 1.0)
        interval_s = np.clip(interval_s, least_s, latency_s)
        round_s = float(whole_s[-1]) / 2 if len(timer.stages) > 1 else 0.0
    else:
        latency_s = interval_s = prompts_s(timer, counts, new, cached)
        longest_s = chunked_prefill_s(timer, bucket.longest_tokens, STEP_TOKENS)
    rates, round_s, longest_s = (
        counts / interval_s,
        round_s + DEFAULT_HOST.request_s,
        longest_s + DEFAULT_HOST.request_s,
    )
    limit_s = demand.slo.ttft_s * (1.0 - HANDOVER_SHARE) if bucket.promised else np.inf
    for max_prompts in counts[::-1]:
        rate = float(rates[:max_prompts].max())
        smallest = int(np.argmax(rates >= headroom * rate))
        ttft_s = float(latency_s[smallest]) + (wait_factor(headroom) - 1.0) / rate + round_s
        ttft_s += float(interval_s[smallest]) / 2 if max_prompts > 1 else 0.0
        if max(ttft_s, longest_s) <= limit_s:
            return BucketCapacity(bucket.bucket, copies * rate, 0.0, 0.0, ttft_s, 0.0)
    return None


def _prompts(counts: NDArray[np.int64], new: int, cached: int, *alone: tuple[int, int]) -> StepBatch:
    """Steps with these counts of equal prompts, then steps of single prompts of (new, cached) tokens."""
    present = np.arange(counts.max())[None, :] < np.concatenate([counts, np.ones(len(alone))])[:, None]
    lengths = np.array([*((new, cached) for _ in counts), *alone], np.float64)
    return steps(present * lengths[:, :1], present * lengths[:, 1:])


def _pipeline_decode(
    timer: PipelineTimer, bucket: BucketDemand, room: int, tpot_s: float
) -> tuple[float, float]:
    """(requests/s, TPOT) with the largest batch per stage that TPOT and KV memory allow."""
    stages = len(timer.stages)
    max_batch = min(room // stages, MAX_BATCH)
    if max_batch < 1:
        return 0.0, 0.0
    batches = np.unique(np.geomspace(1, max_batch, 64).round())
    context = bucket.input_tokens + bucket.output_tokens / 2
    batch = steps(decodes=batches, decode_context=batches * context)
    step_s, interval_s = timer.both_s(batch)
    tokens_per_s = np.minimum(batches / interval_s, stages * batches / step_s)
    tokens_per_s = np.where(step_s <= tpot_s, tokens_per_s, 0.0)
    best_index = int(np.argmax(tokens_per_s))
    return float(tokens_per_s[best_index]) / bucket.output_tokens, float(step_s[best_index])


def _pipeline_mixed(
    timer: PipelineTimer, bucket: BucketDemand, room: int, slo: Slo
) -> tuple[float, float, float]:
    """(requests/s, TTFT, TPOT) of a mixed pipeline: each of S batches has B decodes and the prompt tokens they need.

    A step of one batch takes T in all and I in the slowest stage, so with S batches the cycle is C = max(S I, T). A
    prompt of several chunks takes as many cycles. The cycle does not depend on the utilization, so it must stay
    within the part of TPOT that admission control uses, or planned requests would be refused.
    """
    stages = len(timer.stages)
    max_batch = min(room // stages, MAX_BATCH)
    if max_batch < 1:
        return 0.0, 0.0, 0.0
    batches = np.unique(np.geomspace(1, max_batch, 64).round())
    new_tokens, output_tokens = bucket.new_tokens, bucket.output_tokens
    context = batches * (bucket.input_tokens + output_tokens / 2)

    def cycle_s(chunk: Floats, cached: Floats) -> Floats:
        step_s, interval_s = timer.both_s(steps(chunk, cached, batches, context))
        return np.maximum(stages * interval_s, step_s)

    chunk = np.minimum(batches * new_tokens / output_tokens, CHUNK_TOKENS)
    starts = np.arange(ceil(chunk.max() / new_tokens)) * float(new_tokens)
    prompts = np.clip(chunk[:, None] - starts, 0.0, float(new_tokens))
    context_before = bucket.cached_tokens + np.maximum(new_tokens - chunk, 0.0)[:, None] / 2
    turns = np.maximum(batches * new_tokens / output_tokens / chunk, 1.0)
    tpot_s = cycle_s(prompts, np.broadcast_to(context_before, prompts.shape)) * turns
    ttft_s = np.zeros(len(batches))
    for start in range(0, new_tokens, CHUNK_TOKENS):
        size = np.full(len(batches), float(min(CHUNK_TOKENS, new_tokens - start)))
        ttft_s += cycle_s(size, np.full(len(batches), float(bucket.cached_tokens + start)))
    rate = stages * batches / (tpot_s * output_tokens)
    rate = np.where((tpot_s <= MARGIN * slo.tpot_s) & (ttft_s <= slo.ttft_s), rate, 0.0)
    best_index = int(np.argmax(rate))
    if not rate[best_index] > 0:
        return 0.0, 0.0, 0.0
    return float(rate[best_index]), float(ttft_s[best_index]), float(tpot_s[best_index])


@lru_cache(maxsize=1024)
def _confidence(model: Model, node: NodeType, tp: int, ep: Ep) -> Confidence:
    return roofline(model, node, tp, ep=ep).confidence


def range_per_s(
    demand: ModelDemand,
    shares: Iterable[PlannedShare],
    templates: Mapping[str, Template],
    nodes: Mapping[str, NodeType],
    rate_per_s: float,
) -> tuple[float, float]:
    """(lowest, highest) total rate of a model's replicas by the 80 % interval of step times, planned at `rate_per_s`.

    Errors of replicas are taken as fully correlated, so they do not average out; node types measured by
    `potluck profile` have none. (0, 0) where nothing is served.
    """
    low_ratios, high_ratios = [1.0], [1.0]
    names = {share.template for share in shares if share.rate_per_s > 0}
    shards = {
        (stage_node.node, stage_node.tp, stage_node.ep)
        for name in names
        for replica in templates[name].replicas
        for stage in replica.layout.stages
        for stage_node in stage.nodes
    }
    for name, tp, ep in shards:
        node = nodes[name]
        if profile_for(demand.profiles, demand.model, node, tp) is not None:
            continue
        configuration = (demand.model, tp, node.gpu.name, _confidence(demand.model, node, tp, ep))
        planned, interval = (
            slower(*configuration, demand.sure) if demand.sure > 0.5 else 1.0,
            bar("rate", *configuration),
        )
        low_ratios.append(planned / interval.high)
        high_ratios.append(planned / interval.low)
    return (rate_per_s * min(low_ratios), rate_per_s * max(high_ratios)) if shards else (0.0, 0.0)
