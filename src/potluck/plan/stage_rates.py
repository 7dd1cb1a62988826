"""How many tokens a second a node gives as one stage of a pipeline: CORAL's T̂_j(g), for every j and S.

A stage of j layers on node type g, one of S stages that share a latency budget of ℓ seconds, runs steps of B
requests (one new token each when it decodes, a whole prompt each when it prefills):

    τ_j(B) = j·a(B) + c(B)          seconds of a step: a is the mean over the model's layers, c the rest
    λ_j(B) = τ_j(B) + 2·w(B)        with the hand-overs to and from its neighbours; w = 0 when S = 1
    T̂_j(g) = max B·t / τ_j(B)       over B with λ_j(B) ≤ ℓ/S and S·B·j·m ≤ room for KV beside j layers

where t is the tokens of one request in a step (1, or the prompt) and m the KV bytes of one request and layer.
A pipeline keeps S batches in flight, so a stage holds the KV of S·B requests. The rest is on the safe side,
so that what a template promises holds for every order of its stages and every choice of neighbours:

- c(B), the head's product and the time between steps, is charged to every stage, though only the last one has
  the head: a stage does not know whether it will be the last. Exact when S = 1; a layer or so too much else.
- Likewise every stage keeps room for the embedding or the head, whichever is larger (both when S = 1).
- w(B) is the hand-over through the node's own card. One between unlike nodes takes the time of the slower
  card, which is at most the sum of the two, and each end pays its part.

T̂ does not increase in j: more layers make each step longer and leave fewer steps to choose from. It is kept
in whole hundredths of a token a second, so that comparing two placements leaves no doubt of rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.core.model import Model
from potluck.core.plan import Confidence
from potluck.core.types import NodeType, Slo
from potluck.perf.calibration import Calibration
from potluck.perf.capacity import STEP_TOKENS, stage_memory
from potluck.perf.memory import embedding_bytes, head_bytes, kv_bytes_per_gpu, weight_bytes_per_gpu
from potluck.perf.network import handover_s
from potluck.perf.roofline import RooflineTimer, check_tp, roofline
from potluck.perf.step import Floats, Steps, steps
from potluck.perf.throughput import MAX_BATCH

UNITS_PER_TOKEN = 100
"""Rates are whole numbers of 1/100 token a second."""

Phase = Literal["prefill", "decode"]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StageRates:
    """T̂ of one model and phase for some node types."""

    model: Model
    nodes: tuple[NodeType, ...]
    tps: tuple[int, ...]
    """Tensor-parallel degree on each node type."""
    confidences: tuple[Confidence, ...]
    phase: Phase
    latency_s: float
    """ℓ: what a step through all stages may take."""
    input_tokens: int
    output_tokens: int
    units: Integers
    """(S_max, G, L): T̂ in hundredths of a token a second; [S-1, g, j-1] is for j of L layers and S stages."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """What one node type needs for steps of B = 1, 2, ... requests."""

    layer_s: Floats
    """a(B)."""
    rest_s: Floats
    """c(B)."""
    handover_s: Floats
    """w(B)."""
    tokens: float
    """t."""


def stage_rates(
    model: Model,
    nodes: Sequence[NodeType],
    slo: Slo,
    input_tokens: int,
    output_tokens: int,
    *,
    max_stages: int = 6,
    calibration: Calibration | None = None,
) -> tuple[StageRates, StageRates]:
    """(prefill under `slo.ttft_s`, decode under `slo.tpot_s`) for requests of these mean lengths."""
    _check(model, nodes, input_tokens, output_tokens, max_stages)
    tps = tuple(largest_tp(model, node) for node in nodes)
    shape = (max_stages, len(nodes), model.layer_count)
    prefill, decode = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    confidences: list[Confidence] = []
    for g, (node, tp) in enumerate(zip(nodes, tps, strict=True)):
        timer = roofline(model, node, tp, calibration=calibration)
        confidences.append(timer.confidence)
        prompts = _prompt_steps(input_tokens)
        curve = _curve(timer, prompts, input_tokens)
        prefill[:, g] = _node_rates(curve, _most_requests(timer, input_tokens, max_stages), slo.ttft_s)
        curve = _curve(timer, _decode_steps(input_tokens, output_tokens), 1)
        most = _most_requests(timer, input_tokens + output_tokens, max_stages)
        decode[:, g] = _node_rates(curve, most, slo.tpot_s)
    shared = (model, tuple(nodes), tps, tuple(confidences))
    return (
        StageRates(*shared, "prefill", slo.ttft_s, input_tokens, output_tokens, prefill),
        StageRates(*shared, "decode", slo.tpot_s, input_tokens, output_tokens, decode),
    )


def largest_tp(model: Model, node: NodeType) -> int:
    """The largest tensor-parallel degree that the node has GPUs for and the model heads."""
    for tp in range(node.gpus, 1, -1):
        try:
            check_tp(model, node, tp)
        except InputError:
            continue
        return tp
    return 1


def _prompt_steps(input_tokens: int) -> Steps:
    """Steps of 1, 2, ... prompts, up to the tokens that activations are kept for (but always one prompt)."""
    most = max(STEP_TOKENS // input_tokens, 1)
    return steps(np.tril(np.ones((most, most))) * input_tokens)


def _decode_steps(input_tokens: int, output_tokens: int) -> Steps:
    """Steps of 1, 2, ... requests that are on average half done."""
    requests = np.arange(1.0, MAX_BATCH + 1)
    return steps(decodes=requests, decode_context=requests * (input_tokens + output_tokens / 2))


def _curve(timer: RooflineTimer, batch: Steps, tokens: int) -> _Curve:
    whole_s = timer.step_s(batch)
    layers_s = replace(timer, head_s=None, host_s=0.0).step_s(batch)
    size_bytes = batch.tokens * timer.model.hidden * 2.0
    return _Curve(
        layers_s / timer.model.layer_count,
        whole_s - layers_s,
        handover_s(size_bytes, timer.node, timer.node),
        float(tokens),
    )


def _most_requests(timer: RooflineTimer, tokens: int, max_stages: int) -> Integers:
    """(S_max, L) requests of so many tokens in one of S batches whose KV fits beside j layers."""
    model, tp, count = timer.model, timer.tp, timer.model.layer_count
    memory = stage_memory(model, timer.node, tp)
    layer_bytes = weight_bytes_per_gpu(model, tp, range(count), tables=False) / count
    embedding, head = embedding_bytes(model), head_bytes(model)
    both = embedding + head
    # A tied head stands beside a copy of the embedding on the last stage.
    one = both if model.tied_embeddings else max(embedding, head)
    stages = np.arange(1, max_stages + 1)[:, None]
    j = np.arange(1, count + 1)[None, :]
    tables = np.where(stages == 1, both, one) / tp
    room = memory.usable_bytes - memory.activation_bytes - tables - j * layer_bytes
    each = float(kv_bytes_per_gpu(model, tokens, tp)) / count * j * stages
    return np.asarray(np.floor(np.maximum(room, 0.0) / each), np.int64)


def _node_rates(curve: _Curve, most: Integers, latency_s: float) -> Integers:
    """(S_max, L) T̂ of one node type."""
    max_stages, layers = most.shape
    widest = min(len(curve.layer_s), int(most.max()))
    found = np.zeros(most.shape, np.int64)
    if not widest:
        return found
    requests = np.arange(1, widest + 1)
    j = np.arange(1, layers + 1)[:, None]
    step_s = j * curve.layer_s[:widest] + curve.rest_s[:widest]
    rate = UNITS_PER_TOKEN * curve.tokens * requests / step_s
    # best[j, B]: the most that any batch up to B gives; a batch that is too slow ends the row.
    best = np.maximum.accumulate(rate, axis=1)
    slowest_s = np.maximum.accumulate(step_s + 2.0 * curve.handover_s[:widest], axis=1)
    alone_s = np.maximum.accumulate(step_s, axis=1)
    for stages in range(1, max_stages + 1):
        latency = alone_s if stages == 1 else slowest_s
        within = np.count_nonzero(latency <= latency_s / stages, axis=1)
        batch = np.minimum(within, most[stages - 1])
        reached = best[np.arange(layers), np.maximum(batch, 1) - 1]
        found[stages - 1] = np.where(batch > 0, np.floor(reached), 0.0).astype(np.int64)
    return found


def _check(
    model: Model, nodes: Sequence[NodeType], input_tokens: int, output_tokens: int, max_stages: int
) -> None:
    if not nodes:
        raise InputError("nodes", "at least one node type is needed")
    if len({node.name for node in nodes}) < len(nodes):
        raise InputError("nodes", "a node type is named twice")
    if max_stages < 1:
        raise InputError("max_stages", f"must be at least 1, is {max_stages}")
    for name, tokens in (("input", input_tokens), ("output", output_tokens)):
        if tokens < 1:
            raise InputError(f"{name}_tokens", f"must be at least 1, is {tokens}")
    if input_tokens + output_tokens > model.max_context_tokens:
        raise InputError(
            "input_tokens",
            f"with the output exceeds the {model.max_context_tokens} tokens {model.name} takes",
        )
