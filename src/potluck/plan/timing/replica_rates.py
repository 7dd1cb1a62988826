"""What a replica offers a model, bucket by bucket, within the objective.

A replica that prefills takes up to K prompts into a step, as many as its token budget has room for (a longer one in
chunks), so it does K / T(K) a second. At utilisation h there are b in a step, as few as keep up, and they queue: with
service times that hardly vary that is an M/D/1 queue, and where several share a step, half of the one that runs, so

    TTFT = T(b) + S h / (2 (1 - h)) + [K > 1] T(b) / 2 + hand-over          S = T(K) / K

must stay within the objective; K is the largest that does and whose KV fits. In a pipeline T is the time between two
steps, and the first token waits for all stages, after the round of chunks that is under way. A decoding replica runs
the largest batch whose step is within TPOT and whose KV fits; as KV comes while its prompt is computed, its room is
taken before the first token. A mixed one does both and must keep both (`perf.serving.throughput`); in a pipeline of S
stages S batches take turns, so a request's step is a cycle of them. All first tokens come later by what a server adds
to them outside of steps (`EngineHost.request_s`).
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

UNPROMISED_TTFT_S = 600.0  # What requests beyond the attained share may take at most.
HANDOVER_SHARE = 0.1
"""Part of the TTFT objective that is kept free for handing the KV over, which overlaps with prefill."""


def inside_server(slo: Slo) -> Slo:
    """What is left of an objective for queues and steps."""
    return replace(slo, ttft_s=max(slo.ttft_s - DEFAULT_HOST.request_s, 1e-9))


def wait_factor(headroom: float) -> float:
    """Sojourn over service time of an M/D/1 queue at this utilisation."""
    busy = min(headroom, 0.99)
    return 1.0 + busy / (2.0 * (1.0 - busy))


def decode_room(
    model_demand: ModelDemand, demand: BucketDemand, timer: StepTimer, room: int, headroom: float
) -> int:
    """Of the requests whose KV fits a decoding replica, those that may make answers at a time when it is busy.

    KV has its room from when its prompt is computed elsewhere: about as long as here. And whoever finds all room
    taken waits for an answer to end, which is late; so that no more than the attained share do, c requests' room is
    filled to 1 - z / sqrt(c) on average (square-root staffing, z the attained share's normal quantile).
    """
    answer_s = demand.output_tokens * model_demand.slo.tpot_s
    held_s = float(prefill_s(timer, demand.new_tokens, demand.cached_tokens)[0])
    filled = filled_room(
        np.array(room), model_demand.slo.attainment, headroom, answer_s / (answer_s + held_s)
    )
    return int(filled)


def filled_room(
    room: NDArray[np.int64], attainment: float, headroom: float, answer_share: float
) -> NDArray[np.int64]:
    """The same for many rooms at once; `answer_share` is the part of its time in the room that KV is decoded."""
    z = NormalDist().inv_cdf(min(max(attainment, 0.5), 0.999))
    filled = 1.0 - z / np.sqrt(np.maximum(room, 1))
    most = room * np.minimum(1.0, filled / headroom) * answer_share
    return np.where(room < 1, 0, np.maximum(most, 1.0)).astype(np.int64)


def layout_timer(demand: ModelDemand, layout: Layout, nodes: Mapping[str, NodeType]) -> StepTimer:
    """What was measured or the plain roofline for one node, the pipeline for more."""
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
    """Rates of `copies` replicas of one layout in one role, for every bucket; 0 where it cannot."""
    timer = layout_timer(demand, layout, nodes) if timer is None else timer
    return tuple(
        _bucket(demand, bucket, timer, layout, nodes, role, headroom, copies) for bucket in demand.buckets
    )


def useful(capacity: tuple[BucketCapacity, ...]) -> bool:
    return any(c.prefill_per_s > 0 or c.decode_per_s > 0 or c.closed_per_s > 0 for c in capacity)


def fits(demand: ModelDemand, layout: Layout, nodes: Mapping[str, NodeType]) -> bool:
    """Whether the weights fit with room for at least one prompt of some bucket."""
    shortest = min((bucket.longest_tokens for bucket in demand.buckets), default=1)
    try:
        return layout_requests(demand.model, layout, nodes, float(shortest)) >= 1
    except CapacityError:
        return False


def _bucket(
    model_demand: ModelDemand,
    demand: BucketDemand,
    timer: StepTimer,
    layout: Layout,
    nodes: Mapping[str, NodeType],
    role: Role,
    headroom: float,
    copies: int,
) -> BucketCapacity:
    nothing = BucketCapacity(demand.bucket, 0.0, 0.0, 0.0, 0.0, 0.0)
    tokens = demand.longest_tokens + (0 if role == "prefill" else demand.output_tokens)
    batch = layout_requests(model_demand.model, layout, nodes, tokens)
    if role == "prefill":
        return _prefill(model_demand, demand, timer, batch, headroom, copies) or nothing
    if role == "decode":
        batch = decode_room(model_demand, demand, timer, batch, headroom)
    if isinstance(timer, PipelineTimer) and role == "decode":
        rate, tpot_s = _pipeline_decode(timer, demand, batch, model_demand.slo.tpot_s)
        return BucketCapacity(demand.bucket, 0.0, rate * copies, 0.0, 0.0, tpot_s)
    added_s = DEFAULT_HOST.request_s
    slo = (
        inside_server(model_demand.slo)
        if demand.promised
        else replace(model_demand.slo, ttft_s=UNPROMISED_TTFT_S)
    )
    if isinstance(timer, PipelineTimer) and len(timer.stages) > 1:
        rate, ttft_s, tpot_s = _pipeline_mixed(timer, demand, batch, slo)
        ttft_s += added_s if rate > 0 else 0.0
        return BucketCapacity(demand.bucket, 0.0, 0.0, rate * copies, ttft_s, tpot_s)
    lengths = (demand.input_tokens, demand.output_tokens)
    operating_point = best_operating(timer, *lengths, batch, slo, role, cached_tokens=demand.cached_tokens)
    if operating_point is None:
        return nothing
    rate = operating_point.requests_per_s * copies
    if role == "decode":
        return BucketCapacity(demand.bucket, 0.0, rate, 0.0, 0.0, operating_point.tpot_s)
    ttft_s, tpot_s = operating_point.ttft_s + added_s, operating_point.tpot_s
    return BucketCapacity(demand.bucket, 0.0, 0.0, rate, ttft_s, tpot_s)


def _prefill(
    model_demand: ModelDemand, demand: BucketDemand, timer: StepTimer, room: int, headroom: float, copies: int
) -> BucketCapacity | None:
    """Steps of as many prompts as budget and KV have room for and the objective allows."""
    new, cached = demand.new_tokens, demand.cached_tokens
    counts = np.arange(1, min(prompts_in_step(new), room) + 1)
    if not len(counts):
        return None
    round_s = 0.0
    if isinstance(timer, PipelineTimer):
        # The longest prompt and one chunk alone are timed with them.
        whole_s, between_s = timer.both_s(
            _prompts(counts, new, cached, (demand.longest_tokens, 0), (min(new, CHUNK_TOKENS), cached))
        )
        latency_s, apart_s, longest_s = whole_s[:-2], between_s[:-2], float(whole_s[-2])
        # As many steps are under way as there are nodes, or as KV has room for: where one is much slower, they wait.
        least_s = latency_s * np.minimum(np.maximum(1 / sum(map(len, timer.stages)), counts / room), 1.0)
        apart_s = np.clip(apart_s, least_s, latency_s)
        round_s = float(whole_s[-1]) / 2 if len(timer.stages) > 1 else 0.0
    else:
        latency_s = apart_s = prompts_s(timer, counts, new, cached)
        longest_s = chunked_prefill_s(timer, demand.longest_tokens, STEP_TOKENS)
    rates, round_s, longest_s = (
        counts / apart_s,
        round_s + DEFAULT_HOST.request_s,
        longest_s + DEFAULT_HOST.request_s,
    )
    limit_s = model_demand.slo.ttft_s * (1.0 - HANDOVER_SHARE) if demand.promised else np.inf
    for most in counts[::-1]:
        rate = float(rates[:most].max())
        b = int(np.argmax(rates >= headroom * rate))
        ttft_s = float(latency_s[b]) + (wait_factor(headroom) - 1.0) / rate + round_s
        ttft_s += float(apart_s[b]) / 2 if most > 1 else 0.0
        if max(ttft_s, longest_s) <= limit_s:
            return BucketCapacity(demand.bucket, copies * rate, 0.0, 0.0, ttft_s, 0.0)
    return None


def _prompts(counts: NDArray[np.int64], new: int, cached: int, *alone: tuple[int, int]) -> StepBatch:
    """Steps of so many prompts each, then those of one prompt, (new, cached) tokens of it."""
    there = np.arange(counts.max())[None, :] < np.concatenate([counts, np.ones(len(alone))])[:, None]
    lengths = np.array([*((new, cached) for _ in counts), *alone], np.float64)
    return steps(there * lengths[:, :1], there * lengths[:, 1:])


def _pipeline_decode(
    timer: PipelineTimer, demand: BucketDemand, room: int, tpot_s: float
) -> tuple[float, float]:
    """(requests/s, TPOT) with a batch of B requests in each of S stages, B as large as TPOT and KV allow."""
    stages = len(timer.stages)
    most = min(room // stages, MAX_BATCH)
    if most < 1:
        return 0.0, 0.0
    batches = np.unique(np.geomspace(1, most, 64).round())
    context = demand.input_tokens + demand.output_tokens / 2
    batch = steps(decodes=batches, decode_context=batches * context)
    step_s, interval_s = timer.both_s(batch)
    tokens_per_s = np.minimum(batches / interval_s, stages * batches / step_s)
    tokens_per_s = np.where(step_s <= tpot_s, tokens_per_s, 0.0)
    best = int(np.argmax(tokens_per_s))
    return float(tokens_per_s[best]) / demand.output_tokens, float(step_s[best])


def _pipeline_mixed(
    timer: PipelineTimer, demand: BucketDemand, room: int, slo: Slo
) -> tuple[float, float, float]:
    """(requests/s, TTFT, TPOT): in each of S stages a batch of B decodes with the prompt tokens that feed it.

    A step of one batch takes T and the slowest stage I of it; with S batches under way each has its turn every
    C = max(S I, T). A prompt of several chunks takes as many turns. A turn is as long however busy the pipeline is,
    so it must be within the part of TPOT that admission keeps to, or requests are refused that were planned for.
    """
    stages = len(timer.stages)
    most = min(room // stages, MAX_BATCH)
    if most < 1:
        return 0.0, 0.0, 0.0
    batches = np.unique(np.geomspace(1, most, 64).round())
    new, out = demand.new_tokens, demand.output_tokens
    context = batches * (demand.input_tokens + out / 2)

    def cycle_s(chunk: Floats, cached: Floats) -> Floats:
        step_s, interval_s = timer.both_s(steps(chunk, cached, batches, context))
        return np.maximum(stages * interval_s, step_s)

    chunk = np.minimum(batches * new / out, CHUNK_TOKENS)
    starts = np.arange(ceil(chunk.max() / new)) * float(new)
    prompts = np.clip(chunk[:, None] - starts, 0.0, float(new))
    behind = demand.cached_tokens + np.maximum(new - chunk, 0.0)[:, None] / 2
    paced = np.maximum(batches * new / out / chunk, 1.0)
    tpot_s = cycle_s(prompts, np.broadcast_to(behind, prompts.shape)) * paced
    ttft_s = np.zeros(len(batches))
    for start in range(0, new, CHUNK_TOKENS):
        size = np.full(len(batches), float(min(CHUNK_TOKENS, new - start)))
        ttft_s += cycle_s(size, np.full(len(batches), float(demand.cached_tokens + start)))
    rate = stages * batches / (tpot_s * out)
    rate = np.where((tpot_s <= MARGIN * slo.tpot_s) & (ttft_s <= slo.ttft_s), rate, 0.0)
    best = int(np.argmax(rate))
    if not rate[best] > 0:
        return 0.0, 0.0, 0.0
    return float(rate[best]), float(ttft_s[best]), float(tpot_s[best])


@lru_cache(maxsize=1024)
def _confidence(model: Model, node: NodeType, tp: int, ep: Ep) -> Confidence:
    return roofline(model, node, tp, ep=ep).confidence


def range_per_s(
    demand: ModelDemand,
    shares: Iterable[PlannedShare],
    used: Mapping[str, Template],
    nodes: Mapping[str, NodeType],
    rate_per_s: float,
) -> tuple[float, float]:
    """(slowest, fastest) of a model's replicas together, where they are planned to do `rate_per_s`.

    Replicas are taken to err alike, as what they have in common is most of it: so nothing averages out. Where one
    was measured by `potluck profile`, it does not err at all. (0, 0) where nothing is served.
    """
    lows, highs = [1.0], [1.0]
    names = {share.template for share in shares if share.rate_per_s > 0}
    places = {
        (stage_node.node, stage_node.tp, stage_node.ep)
        for name in names
        for replica in used[name].replicas
        for stage in replica.layout.stages
        for stage_node in stage.nodes
    }
    for name, tp, ep in places:
        node = nodes[name]
        if profile_for(demand.profiles, demand.model, node, tp) is not None:
            continue
        who = (demand.model, tp, node.gpu.name, _confidence(demand.model, node, tp, ep))
        planned, around = slower(*who, demand.sure) if demand.sure > 0.5 else 1.0, bar("rate", *who)
        lows.append(planned / around.high)
        highs.append(planned / around.low)
    return (rate_per_s * min(lows), rate_per_s * max(highs)) if places else (0.0, 0.0)
