"""How many tokens a second a node gives as one stage of a pipeline: CORAL's T̂_j(g), for every j and S.

A stage of j layers on node type g, one of S stages that share a latency budget of ℓ seconds, runs steps of B requests
(one new token each when it decodes, a whole prompt each when it prefills):

    τ_j(B) = j·a(B) + c(B)          seconds of a step: a is the mean over the model's layers, c the rest
    λ_j(B) = τ_j(B) + 2·w(B)        with the hand-overs to and from its neighbours; w = 0 when S = 1
    T̂_j(g) = max B·t / τ_j(B)       over B with λ_j(B) ≤ ℓ/S and S·B·j·m ≤ room for KV beside j layers

where t is the tokens of one request in a step (1, or the prompt) and m the KV bytes of one request and layer. A
pipeline keeps S batches in flight. What a template promises must hold for every order of its stages, so:

- c(B), with the head's product, is charged to every stage, and each keeps room for the embedding or the head,
  whichever is larger. Exact when S = 1; a layer or so too much else.
- w(B) is the hand-over through the node's own card; each end pays its part.

That is CORAL's rule. A plan asks for more (`BucketRule`): prompts wait for others, some of TTFT is kept for handing
KV over, the longest prompt of a bucket must be in time too, and KV does not fill all its room. All GPUs of a node are
one tensor-parallel group; where the model's heads do not allow that, the node carries several copies of its stage. T̂
does not increase in j. It is kept in whole hundredths of a token a second, so that comparisons do not round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.core.values.model import Model
from potluck.core.values.plan import Confidence
from potluck.core.values.types import NodeType, Slo
from potluck.perf.kv_capacity import USABLE_SHARE, stage_memory
from potluck.perf.memory import embedding_bytes, head_bytes, kv_bytes_per_gpu, weight_bytes_per_gpu
from potluck.perf.operators.calibration import Calibration
from potluck.perf.operators.network import handover_s
from potluck.perf.phases import CHUNK_TOKENS, prefill_s, prompts_in_step
from potluck.perf.step_timer import Floats, StepBatch, steps
from potluck.perf.throughput import MAX_BATCH
from potluck.perf.timers.roofline import RooflineTimer, check_tp, roofline
from potluck.plan.timing.replica_rates import UNPROMISED_TTFT_S, filled_room

UNITS_PER_TOKEN = 100  # Rates are whole numbers of 1/100 token a second.

Phase = Literal["prefill", "decode"]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BucketRule:
    """What a plan asks of a bucket's prompts beyond the objective (as `replica_rates` times templates)."""

    wait: float  # w: time in the system over time of service, while as busy as planned.
    ttft_share: float  # Of TTFT, what is not kept for handing KV over.
    longest_tokens: int
    cached_tokens: int  # Of a prompt's tokens, those that are there already; the others are the input tokens.
    promised: bool
    headroom: float
    attainment: float
    uneven: float = 1.0
    """How much longer than the mean a stage may take: what others take less is for the plan to see."""

    def prompt_s(self, ttft_s: float, input_tokens: int, max_stages: int, longest: float) -> Floats:
        """By S, the longest that one of S stages may take for a prompt; the longest one takes `longest` times that.

        A prompt takes S stages, waits w - 1 of them, and before that on average half a round of chunks.
        """
        if not self.promised:
            return np.full(max_stages, UNPROMISED_TTFT_S)
        stages = np.arange(1.0, max_stages + 1)
        rounds = np.where(stages > 1, stages / 2 * min(1.0, CHUNK_TOKENS / input_tokens), 0.0)
        whole = np.maximum(stages + self.wait - 1.0 + rounds, stages * longest)
        return ttft_s * self.ttft_share / whole * self.unlike(max_stages)

    def unlike(self, max_stages: int) -> Floats:
        """By S, how much longer than the mean a stage may take."""
        return np.where(np.arange(max_stages) > 0, self.uneven, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class StageRates:
    """T̂ of one model and phase for some node types."""

    model: Model
    nodes: tuple[NodeType, ...]
    tps: tuple[int, ...]
    """Tensor-parallel degree on each node type; a node carries `gpus // tp` copies of its stage."""
    confidences: tuple[Confidence, ...]
    phase: Phase
    latency_s: float  # ℓ: what a step through all stages may take.
    input_tokens: int
    output_tokens: int
    units: Integers
    """(S_max, G, L): T̂ in hundredths of a token a second; [S-1, g, j-1] is for j of L layers and S stages."""


@dataclass(frozen=True, slots=True)
class _Share:
    layer: float
    embedding: float
    head: float
    activation: float
    kv_prefill: float  # KV of a prompt in one layer.
    kv_decode: float  # KV of a finished request in one layer.


def stage_rates(
    model: Model,
    nodes: Sequence[NodeType],
    slo: Slo,
    input_tokens: int,
    output_tokens: int,
    *,
    max_stages: int = 6,
    calibration: Calibration | None = None,
    rule: BucketRule | None = None,
    sure: float = 0.5,
    most_tp: int | None = None,
) -> tuple[StageRates, StageRates]:
    """(prefill under `slo.ttft_s`, decode under `slo.tpot_s`) for requests of these mean lengths.

    Without a `rule`, by CORAL's.
    """
    _check(model, nodes, input_tokens, output_tokens, max_stages)
    tps = tuple(largest_tp(model, node, most_tp) for node in nodes)
    cached, prompt = (0, input_tokens) if rule is None else (rule.cached_tokens, rule.longest_tokens)
    shares = {tp: _share(model, nodes[tps.index(tp)], tp, prompt, output_tokens) for tp in set(tps)}
    lengths = (input_tokens, output_tokens, cached)
    shape = (max_stages, len(nodes), model.layer_count)
    prefill, decode = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    by_stages = np.arange(1.0, max_stages + 1)
    confidences: list[Confidence] = []
    for g, (node, tp) in enumerate(zip(nodes, tps, strict=True)):
        timed = (
            _bundled_times(model, node, tp, sure, lengths)
            if calibration is None
            else _times(roofline(model, node, tp, calibration=calibration, sure=sure), lengths)
        )
        timer, share = timed.timer, shares[tp]
        confidences.append(timer.confidence)
        most = _most_requests(node, share, share.kv_prefill, shape, tied=model.tied_embeddings)
        within_s, answering = slo.ttft_s / by_stages, 1.0
        if rule is not None:
            mean_s, longest_s = prefill_s(timer, [input_tokens, rule.longest_tokens], [cached, 0])
            within_s = rule.prompt_s(slo.ttft_s, input_tokens, max_stages, float(longest_s / mean_s))
            answering = output_tokens * slo.tpot_s / (output_tokens * slo.tpot_s + float(mean_s))
        prefill[:, g] = _node_rates(timer, timed.prompts, input_tokens, most, within_s)
        most = _most_requests(node, share, share.kv_decode, shape, tied=model.tied_embeddings)
        if rule is not None:
            room = most * np.arange(1, max_stages + 1)[:, None]
            most = filled_room(room, rule.attainment, rule.headroom, answering) // by_stages[:, None].astype(
                int
            )
            most[1:] = np.minimum.accumulate(
                most[1:], axis=0
            )  # rounding apart, more stages never have more room
        within_s = slo.tpot_s / by_stages * (1.0 if rule is None else rule.unlike(max_stages))
        decode[:, g] = _node_rates(timer, timed.decodes, 1, most, within_s)
    shared = (model, tuple(nodes), tps, tuple(confidences))
    return (
        StageRates(*shared, "prefill", slo.ttft_s, input_tokens, output_tokens, prefill),
        StageRates(*shared, "decode", slo.tpot_s, input_tokens, output_tokens, decode),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Phase:
    """Steps of 1, 2, ... requests of one phase on one node."""

    whole_s: Floats
    layers_s: Floats  # Without the output head and what a step takes once.
    wire_s: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Times:
    timer: RooflineTimer
    prompts: _Phase
    decodes: _Phase


@lru_cache(maxsize=256)
def _bundled_times(
    model: Model, node: NodeType, tp: int, sure: float, lengths: tuple[int, int, int]
) -> _Times:
    """One for all rules: they differ in what a stage may take, not in what it takes."""
    return _times(roofline(model, node, tp, sure=sure), lengths)


def _times(timer: RooflineTimer, lengths: tuple[int, int, int]) -> _Times:
    input_tokens, output_tokens, cached = lengths
    prompts = _prompt_steps(input_tokens, cached)
    decodes = _decode_steps(cached + input_tokens, output_tokens)
    return _Times(timer, _phase(timer, prompts), _phase(timer, decodes))


def _phase(timer: RooflineTimer, batch: StepBatch) -> _Phase:
    copies = timer.node.gpus // timer.tp
    layers_s = replace(timer, head_s=None, host=timer.host.launching).step_s(batch)
    wire_s = handover_s(copies * batch.tokens * timer.model.hidden * 2.0, timer.node, timer.node)
    return _Phase(timer.step_s(batch), layers_s, wire_s)


def largest_tp(model: Model, node: NodeType, most_tp: int | None = None) -> int:
    """The largest tensor-parallel degree that divides the node's GPUs and that model and engine can have."""
    most = min(node.gpus, most_tp or node.gpus)
    for tp in (degree for degree in range(most, 1, -1) if node.gpus % degree == 0):
        try:
            check_tp(model, node, tp)
        except InputError:
            continue
        return tp
    return 1


def _prompt_steps(input_tokens: int, cached_tokens: int = 0) -> StepBatch:
    """Steps of 1, 2, ... whole prompts, as many as a replica takes at once."""
    most = prompts_in_step(input_tokens)
    there = np.tril(np.ones((most, most)))
    return steps(there * input_tokens, there * cached_tokens)


def _decode_steps(input_tokens: int, output_tokens: int) -> StepBatch:
    """Steps of 1, 2, ... requests that are on average half done."""
    requests = np.arange(1.0, MAX_BATCH + 1)
    return steps(decodes=requests, decode_context=requests * (input_tokens + output_tokens / 2))


def _share(model: Model, node: NodeType, tp: int, input_tokens: int, output_tokens: int) -> _Share:
    count = model.layer_count
    return _Share(
        layer=weight_bytes_per_gpu(model, tp, range(count), tables=False) / count,
        embedding=embedding_bytes(model) / tp,
        head=head_bytes(model) / tp,
        activation=stage_memory(model, node, tp).activation_bytes,
        kv_prefill=kv_bytes_per_gpu(model, float(input_tokens), tp) / count,
        kv_decode=kv_bytes_per_gpu(model, float(input_tokens + output_tokens), tp) / count,
    )


def _most_requests(
    node: NodeType, share: _Share, kv_bytes: float, shape: tuple[int, int, int], *, tied: bool
) -> Integers:
    """(S_max, L) requests in one of S batches whose KV fits beside j layers."""
    stages = np.arange(1, shape[0] + 1)[:, None]
    j = np.arange(1, shape[2] + 1)[None, :]
    both = share.embedding + share.head
    # A tied head stands beside a copy of the embedding on the last stage.
    tables = np.where((stages == 1) | tied, both, max(share.embedding, share.head))
    usable = node.gpu.memory_bytes * USABLE_SHARE
    room = usable - share.activation - tables - j * share.layer
    return np.asarray(np.floor(np.maximum(room, 0.0) / (kv_bytes * j * stages)), np.int64)


def _node_rates(
    timer: RooflineTimer, phase: _Phase, tokens: int, most: Integers, stage_s: Floats
) -> Integers:
    """(S_max, L) T̂ of one node type; `timed` are steps of 1, 2, ... requests of so many tokens each.

    `stage_s` (S_max) is what one of S stages may take.
    """
    from potluck.plan.templates.pipeline_kernel import best_rates  # numba is slow to load

    array = np.zeros(most.shape)
    if most.max() > 0:
        units = float(UNITS_PER_TOKEN * tokens * (timer.node.gpus // timer.tp))
        each_s = phase.layers_s / timer.model.layer_count
        best_rates(each_s, phase.whole_s - phase.layers_s, phase.wire_s, most, stage_s, units, array)
    return np.floor(array).astype(np.int64)


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
