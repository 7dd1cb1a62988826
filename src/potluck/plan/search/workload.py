"""What the search is given: GPUs on nodes with the bandwidth between them (`core.pool`), the work, and costs of
stages.

A stage of l layers on tp GPUs of a node takes l·a(B) + r(B) seconds for a step of B requests. These are tables: one
row per (GPU type and links, tp), one column per batch B.

    prefill   one prompt
    decode    B requests that are on average half done
    mixed     B decodes with the c = B·L/O prompt tokens that keep them coming, at most `CHUNK_TOKENS`; and
              beside it the first-token tables: a whole prompt in such chunks among B decodes

Every stage is charged the output head and the larger of embedding and head, so that its cost does not depend on its
place (as in `plan.timing.stage_rates`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.core.values.engine_abilities import UNLIMITED, EngineKind
from potluck.core.values.layout import Pool, PoolNode, uniform_pool
from potluck.core.values.model import Model
from potluck.core.values.plan import Confidence
from potluck.core.values.types import Codec, NodeType, Slo
from potluck.perf.kv_capacity import USABLE_SHARE, stage_memory
from potluck.perf.memory import embedding_bytes, head_bytes, kv_bytes, kv_bytes_per_gpu, weight_bytes_per_gpu
from potluck.perf.operators.calibration import Calibration
from potluck.perf.operators.network import HANDOVER_FIXED_S, HANDOVER_SHARE
from potluck.perf.phases import CHUNK_TOKENS
from potluck.perf.step_timer import Floats, StepBatch, steps
from potluck.perf.throughput import MAX_BATCH
from potluck.perf.timers.roofline import check_tp, roofline
from potluck.perf.transfer import alpha_beta, crossing_bytes
from potluck.plan.problem import HEADROOM, ModelDemand
from potluck.plan.timing.replica_rates import inside_server

__all__ = ["Pool", "PoolLinks", "PoolNode", "PoolWorkload", "uniform_pool", "wires_of", "workload_of"]


@dataclass(frozen=True, slots=True)
class PoolWorkload:
    model: Model
    slo: Slo
    input_tokens: int
    output_tokens: int
    rate_per_s: float
    codec: Codec = "fp16"
    """In which KV crosses from prefill to decode replicas; they compute in 16 bits all the same."""
    headroom: float = HEADROOM  # Share of its time a replica is planned to be busy.
    cached_tokens: int = 0
    """Prompt tokens beside `input_tokens` that are not computed again, but handed over all the same."""
    engine: EngineKind = UNLIMITED  # What groups may be cut into.

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "rate_per_s"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise InputError(f"workload: {name}", f"must be positive, is {value}")
        if not 0 < self.headroom < 1:
            raise InputError("workload: headroom", f"must be above 0 and below 1, is {self.headroom}")
        most = self.model.max_context_tokens
        if self.input_tokens + self.output_tokens > most:
            raise InputError("workload: input_tokens", f"{self.model.name} takes at most {most} tokens")

    @property
    def kv_bytes_per_layer(self) -> float:
        """What one layer of one prompt puts on the wire."""
        whole = kv_bytes(self.model, float(self.input_tokens + self.cached_tokens))
        return crossing_bytes(self.model, whole, self.codec) / self.model.layer_count


def workload_of(
    demand: ModelDemand, codec: Codec = "fp16", headroom: float = HEADROOM, engine: EngineKind = UNLIMITED
) -> PoolWorkload:
    """A planner's demand in its means, which preserve the tokens that pass through.

    Where the means are beyond the model's context the prompt is cut to what it takes.
    """
    rate = demand.rate_per_s
    if not rate > 0:
        raise InputError(f"model {demand.name}: rate_per_s", "must be positive for a search")
    mean_in = sum(bucket.rate_per_s * bucket.new_tokens for bucket in demand.buckets) / rate
    mean_out = sum(bucket.rate_per_s * bucket.output_tokens for bucket in demand.buckets) / rate
    cached = sum(bucket.rate_per_s * bucket.cached_tokens for bucket in demand.buckets) / rate
    most = demand.model.max_context_tokens
    output = min(max(1, round(mean_out)), most - 1)
    prompt = min(max(1, round(mean_in)), most - output)
    slo = inside_server(demand.slo)
    return PoolWorkload(demand.model, slo, prompt, output, rate, codec, headroom, round(cached), engine)


@dataclass(frozen=True, slots=True, eq=False)
class PoolLinks:
    """A pool's links as alpha-beta tables, [from node, to node]."""

    hop_alpha_s: Floats  # Activations from a stage to the next.
    hop_s_per_byte: Floats
    kv_alpha_s: Floats  # KV from a replica to another.
    kv_s_per_byte: Floats


def wires_of(pool: Pool) -> PoolLinks:
    """Between nodes the matrix, inside one its interconnect."""
    size = len(pool.nodes)
    hop_alpha, hop_beta, kv_alpha, kv_beta = (np.zeros((size, size)) for _ in range(4))
    for a, node in enumerate(pool.nodes):
        inside = node.type.interconnect
        for b in range(size):
            if a != b:
                path = alpha_beta(pool.gbps[a][b], pool.rtt_s[a][b])
                hop_alpha[a, b] = HANDOVER_FIXED_S + pool.rtt_s[a][b] / 2
                hop_beta[a, b] = 8.0 / (pool.gbps[a][b] * 1e9 * HANDOVER_SHARE)
                kv_alpha[a, b], kv_beta[a, b] = path.alpha_s, 1.0 / path.beta_bytes_per_s
            elif inside.kind != "none":
                speed = inside.gb_per_s * 1e9 * HANDOVER_SHARE
                hop_alpha[a, a] = kv_alpha[a, a] = inside.latency_s
                hop_beta[a, a] = kv_beta[a, a] = 1.0 / speed
    return PoolLinks(hop_alpha, hop_beta, kv_alpha, kv_beta)


DENSE_BATCHES = 16  # Up to here every batch is in the grid; beyond, steps of about an eighth.

Ints = NDArray[np.int64]


class LayerTiming(Protocol):
    """Seconds of one (mean) layer and of everything beside the layers, for steps on `tp` GPUs of a node."""

    def parts(self, model: Model, node: NodeType, tp: int, batch: StepBatch) -> tuple[Floats, Floats]: ...

    def confidence(self, model: Model, node: NodeType, tp: int) -> Confidence: ...


@dataclass(frozen=True, slots=True)
class CalibratedCosts:
    """The fitted roofline, on whatever GPU figures the nodes carry."""

    calibration: Calibration | None = None

    def parts(self, model: Model, node: NodeType, tp: int, batch: StepBatch) -> tuple[Floats, Floats]:
        timer = roofline(model, node, tp, calibration=self.calibration)
        whole_s = timer.step_s(batch)
        layers_s = replace(timer, head_s=None, host=timer.host.launching).step_s(batch)
        return layers_s / model.layer_count, whole_s - layers_s

    def confidence(self, model: Model, node: NodeType, tp: int) -> Confidence:
        return roofline(model, node, tp, calibration=self.calibration).confidence


@dataclass(frozen=True, slots=True, eq=False)
class StageCosts:
    """Tables [kind, batch]; a kind is a (node type, tp)."""

    batches: Floats
    kinds: dict[tuple[int, int], int]  # (node of the pool, tp) to its row.
    degrees: tuple[tuple[int, ...], ...]  # Tensor-parallel degrees that each node of the pool may use.
    prefill: Floats  # [kind, 2]: a and r of one prompt.
    decode: Floats  # [kind, batch, 2]
    mixed: Floats  # [kind, batch, 4]: a, r of an iteration, then of a whole prompt up to its first token.
    room: Floats
    """[kind, 2]: bytes of one GPU for layers and KV, on a stage among others and on the only stage."""
    layer_bytes: Floats  # [kind]: weights of one layer on one GPU.
    kv_bytes: Floats
    """[kind, 2]: KV of one layer of one request on one GPU: at the end of its prompt, of its output."""
    chunk_tokens: Floats  # [batch]: prompt tokens in a mixed iteration.


def costs_of(pool: Pool, work: PoolWorkload, timing: LayerTiming) -> StageCosts:
    model = work.model
    batches = _batches(pool, work)
    ids: dict[tuple[object, ...], int] = {}
    kinds: dict[tuple[int, int], int] = {}
    members: list[tuple[NodeType, int]] = []
    degrees = []
    for index, node in enumerate(pool.nodes):
        most = min(node.type.gpus, work.engine.most_tensor or node.type.gpus)
        mine = tuple(tp for tp in range(1, most + 1) if _allowed(model, node.type, tp))
        degrees.append(tuple(tp for tp in mine if tp <= node.gpus))
        for tp in mine:
            # The name and the card do not matter to a stage, the GPU and the link inside do.
            key = (node.type.gpu, node.type.interconnect, tp)
            if key not in ids:
                ids[key] = len(members)
                members.append((node.type, tp))
            kinds[index, tp] = ids[key]
    chunk = np.minimum(batches * work.input_tokens / work.output_tokens, CHUNK_TOKENS)
    return StageCosts(
        batches,
        kinds,
        tuple(degrees),
        np.array([_prefill(work, timing, *member) for member in members]),
        np.array([_decode(work, timing, batches, *member) for member in members]),
        np.array([_mixed(work, timing, batches, chunk, *member) for member in members]),
        np.array([_room(model, *member) for member in members]),
        np.array([_layer_bytes(model, tp) for _, tp in members]),
        np.array([_kv_bytes(work, tp) for _, tp in members]),
        chunk,
    )


def _allowed(model: Model, node: NodeType, tp: int) -> bool:
    try:
        check_tp(model, node, tp)
    except InputError:
        return False
    return True


def _batches(pool: Pool, work: PoolWorkload) -> Floats:
    """1, 2, ... up to what all GPUs together could keep, in steps of at most an eighth beyond 16."""
    tokens = float(work.input_tokens + work.output_tokens)
    memory = sum(node.gpus * node.type.gpu.memory_bytes for node in pool.nodes)
    value = float(kv_bytes_per_gpu(work.model, tokens, 1))
    most = int(min(MAX_BATCH, max(1.0, memory / value if value > 0 else MAX_BATCH)))
    grid = [1]
    while grid[-1] < most:
        grid.append(min(most, grid[-1] + max(1, grid[-1] // 8 if grid[-1] >= DENSE_BATCHES else 1)))
    return np.array(grid, np.float64)


def _prefill(work: PoolWorkload, timing: LayerTiming, node: NodeType, tp: int) -> Floats:
    layer_s, rest_s = timing.parts(work.model, node, tp, steps(work.input_tokens))
    return np.array([layer_s[0], rest_s[0]])


def _decode(work: PoolWorkload, timing: LayerTiming, batches: Floats, node: NodeType, tp: int) -> Floats:
    context = work.input_tokens + work.output_tokens / 2
    batch = steps(decodes=batches, decode_context=batches * context)
    return np.stack(timing.parts(work.model, node, tp, batch), axis=1)


def _mixed(
    work: PoolWorkload, timing: LayerTiming, batches: Floats, chunk: Floats, node: NodeType, tp: int
) -> Floats:
    context = batches * (work.input_tokens + work.output_tokens / 2)
    # With more prompt tokens than the budget, prefill paces the decodes: such a batch is as slow as that.
    paced = np.maximum(batches * work.input_tokens / work.output_tokens / chunk, 1.0)
    width = float(work.input_tokens)
    starts = np.arange(ceil(chunk.max() / width)) * width
    prompts = np.clip(chunk[:, None] - starts, 0.0, width)
    behind = np.maximum(width - chunk, 0.0)[:, None] / 2
    layer_s, rest_s = timing.parts(
        work.model, node, tp, steps(prompts, np.broadcast_to(behind, prompts.shape), batches, context)
    )
    first_layer, first_rest = np.zeros(len(batches)), np.zeros(len(batches))
    for start in range(0, work.input_tokens, CHUNK_TOKENS):
        size = float(min(CHUNK_TOKENS, work.input_tokens - start))
        part = steps(np.full(len(batches), size), float(start), batches, context)
        for total, more in zip(
            (first_layer, first_rest), timing.parts(work.model, node, tp, part), strict=True
        ):
            total += more
    return np.stack([layer_s * paced, rest_s * paced, first_layer, first_rest], axis=1)


def _room(model: Model, node: NodeType, tp: int) -> Floats:
    embedding, head = embedding_bytes(model) / tp, head_bytes(model) / tp
    activation = stage_memory(model, node, tp).activation_bytes
    usable = node.gpu.memory_bytes * USABLE_SHARE - activation
    both = embedding + head
    shared = both if model.tied_embeddings else max(embedding, head)
    return np.array([usable - shared, usable - both])


def _layer_bytes(model: Model, tp: int) -> float:
    return weight_bytes_per_gpu(model, tp, range(model.layer_count), tables=False) / model.layer_count


def _kv_bytes(work: PoolWorkload, tp: int) -> tuple[float, float]:
    whole = work.input_tokens + work.output_tokens
    count = work.model.layer_count
    return (
        float(kv_bytes_per_gpu(work.model, float(work.input_tokens), tp)) / count,
        float(kv_bytes_per_gpu(work.model, float(whole), tp)) / count,
    )
