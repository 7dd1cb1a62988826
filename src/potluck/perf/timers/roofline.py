"""Step times from the roofline: a model's layers on one node, each operator timed by `perf.operators.kernels`.

Everything that depends on nothing but the number of new tokens (projections, experts, element-wise work,
all-reduce) is added up once for a grid of token counts and then looked up; only attention, which depends on
every chunk's length and context, is evaluated per step. So a million steps take a second.

Where experts are spread with data-parallel attention (`Ep`), each GPU has requests of its own: a step waits for the
GPU with the longest chunks, and in every mixture layer for the experts of all GPUs' tokens, which travel there and
back. With tensor-parallel attention every GPU has all tokens already, and what its experts make of them is added up.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from potluck.core.errors import InputError
from potluck.core.values.layout import Ep
from potluck.core.values.model import FullAttention, LatentAttention, LinearAttention, Model, MoeFfn
from potluck.core.values.plan import Confidence
from potluck.core.values.types import Gpu, NodeType
from potluck.perf.error_bars import slower
from potluck.perf.operators.calibration import Calibration, GpuCurves, bundled, bundled_curves, curves_for
from potluck.perf.operators.kernels import decode_attention_s, prefill_attention_s, stream_s
from potluck.perf.operators.layer_seconds import (
    chunk_features,
    experts_time_s,
    gemm_time_s,
    latent_decode_s,
    latent_prefill_s,
    units_for,
    windowed_prefill_s,
)
from potluck.perf.operators.layers import LayerWork, LinearWork, SoftmaxWork, head_gemm, layer_works
from potluck.perf.operators.network import all_reduce_s, all_to_all_s, network_for
from potluck.perf.step_timer import Floats, StepBatch, once
from potluck.perf.timers.engine_host import DEFAULT_HOST, EngineHost, own_cluster

TOKEN_GRID = once(
    np.concatenate([np.arange(1, 513), np.arange(512, 4096, 16), np.geomspace(4096, 1 << 17, 160).round()])
)
NO_ATTENTION = LinearWork(0.0, 0.0)
LIKE_LINK = 0.15
"""How far a link's rate may be from a measured one of its kind to count as measured."""
BLOCK_ROWS = 16384
"""Steps evaluated together: small enough that the intermediate arrays stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class RooflineTimer:
    """Times steps of some layers of a model on one node. Build it with `roofline`."""

    model: Model
    node: NodeType
    tp: int
    curves: GpuCurves
    works: tuple[tuple[LayerWork, int], ...]
    dense_s: Floats
    """Seconds at TOKEN_GRID of everything that only counts tokens."""
    latent_up_s: Floats | None
    """Seconds at TOKEN_GRID of expanding cached latents."""
    head_s: Floats | None
    """Seconds at TOKEN_GRID of the output head; None on a stage that has none."""
    host: EngineHost
    ep: Ep = "none"
    slower: float = 1.0
    """What all times are multiplied by: 1 is what is expected, more is for the slow end (`perf.fits.bars`)."""
    routed_s: Floats | None = None
    """Seconds at TOKEN_GRID of what counts the tokens of all GPUs together, where each has its own."""

    @property
    def layers(self) -> int:
        """How many it has."""
        return sum(count for _, count in self.works)

    @property
    def least_s(self) -> float:
        """The shortest step with a chunk: its launches."""
        return self.host.launch_s * self.layers

    @property
    def unlaunched(self) -> RooflineTimer:
        """The same without that least, so that steps add up."""
        return replace(self, host=replace(self.host, launch_s=0.0))

    @property
    def shared_reads_lost(self) -> bool:
        """Whether mixed steps run kernels that do not share KV reads between query heads."""
        capability = self.node.gpu.compute_capability
        return capability is not None and capability < 9.0

    @property
    def confidence(self) -> Confidence:
        """That of the GPU, unless the model has parts that were measured elsewhere, or nowhere."""
        if unmeasured_parts(self.model, self.node.gpu) or self.ep != "none":
            return "assumed"
        own = self.curves.confidence
        return "transferred" if own == "measured" and (self._carried or self._unlike_link) else own

    @property
    def _carried(self) -> list[str]:
        needed = needed_extras(self.model, self.node.gpu)
        return [text for name, text in needed.items() if name in self.curves.carried]

    @property
    def _unlike_link(self) -> bool:
        """Whether nobody measured collectives over such a link."""
        if self.tp == 1:
            return False
        network, rate = network_for(self.node.interconnect, self.tp, bundled().networks)
        return network is None or abs(network.gb_per_s * 1e9 / rate - 1.0) > LIKE_LINK

    @property
    def basis(self) -> str:
        """Where the figures come from, in words."""
        text, cluster = self.curves.basis, own_cluster()
        text += f"; host and links fitted to {cluster.runs} runs of yours" if cluster else ""
        carried = [*self._carried, *(["all-reduce over such a link"] if self._unlike_link else [])]
        if self.curves.confidence == "measured" and carried:
            text += f"; carried over: {', '.join(carried)}"
        parts = (
            *unmeasured_parts(self.model, self.node.gpu),
            *(["expert parallelism"] if self.ep != "none" else []),
        )
        return f"{text}; not measured: {', '.join(parts)}" if parts else text

    def step_s(self, batch: StepBatch, known: dict[Hashable, Floats] | None = None) -> Floats:
        """`known` has one layer's attention in this batch, of this and other timers; added to."""
        known = {} if known is None else known
        result = np.empty(len(batch))
        for start in range(0, len(batch), BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            block = StepBatch(
                batch.chunk_new[rows],
                batch.chunk_cached[rows],
                batch.decodes[rows],
                batch.decode_context[rows],
            )
            result[rows] = self._block_s(block, start, known)
        return result

    def _block_s(self, batch: StepBatch, start: int, known: dict[Hashable, Floats]) -> Floats:
        tokens = everyone = batch.tokens
        if self.ep == "dp":
            batch = _busiest(batch, self.tp)
            tokens = batch.tokens
        time = _look_up(tokens, self.dense_s)
        if self.routed_s is not None:
            time = time + _look_up(everyone, self.routed_s)
        if self.head_s is not None:
            time = time + _look_up(batch.sequences, self.head_s)
        if self.latent_up_s is not None:
            cached = np.where(batch.chunk_new > 0, batch.chunk_cached, 0.0).sum(axis=1)
            time = time + _look_up(cached, self.latent_up_s)
        for work, count in self.works:
            same = (start, self.node.gpu.name, id(self.curves), self.tp, self.ep, work.attention)
            if same not in known:
                known[same] = self._attention_s(work.attention, batch)
            time = time + count * known[same]
        whole_s = self.host.whole_s(time, batch, self.layers)
        return whole_s if self.slower == 1.0 else self.slower * whole_s

    def _attention_s(self, work: SoftmaxWork | LinearWork, batch: StepBatch) -> Floats:
        if isinstance(work, LinearWork):
            return self._linear_s(work, batch)
        total = np.zeros(len(batch))
        if batch.chunk_new.any():
            total = total + self._prefill_s(work, batch)
        if batch.decodes.any():
            total = total + self._decode_s(work, batch)
        return total

    def _prefill_s(self, work: SoftmaxWork, batch: StepBatch) -> Floats:
        curves = self.curves
        new, cached = batch.chunk_new, batch.chunk_cached
        if work.latent_up:
            return latent_prefill_s(work, new, cached, curves)
        shape = (work.heads, work.kv_heads, work.qk_dim, work.v_dim)
        features = chunk_features(work, new)
        if work.window is not None:
            return windowed_prefill_s(new, cached, shape, work.window, features, curves)
        time = prefill_attention_s(new, cached, *shape, curves.chip, curves.prefill)
        return time if curves.prefill_residual is None else time * curves.prefill_residual.factor(*features)

    def _decode_s(self, work: SoftmaxWork, batch: StepBatch) -> Floats:
        curves, count = self.curves, batch.decodes
        context = batch.decode_context
        if work.window is not None:
            context = np.minimum(context, count * work.window)
        if work.latent_up:
            return latent_decode_s(work, count, context, curves)
        moved = context * work.bytes_per_token
        if self.shared_reads_lost:
            # In one launch with a prefill chunk, FlashAttention-2 runs decodes as one-row tiles: query
            # heads that share a KV head read it apart, and about half of that hits the L2 cache
            # (measured on an RTX 4090: 1.8 times the bytes with 4 heads to a KV head).
            mixed = batch.chunk_new.any(axis=1)
            moved = np.where(mixed, moved * (work.heads / work.kv_heads) ** 0.5, moved)
        mean = context / np.maximum(count, 1.0)
        time = decode_attention_s(count, moved, mean, work.kv_heads, curves.chip, curves.decode)
        if curves.decode_residual is None:
            return time
        return time * curves.decode_residual.factor(moved, count * work.kv_heads, work.heads / work.kv_heads)

    def _linear_s(self, work: LinearWork, batch: StepBatch) -> Floats:
        """No measurements stand behind this one: it is the bare roofline at attention's shares."""
        curves, chip = self.curves, self.curves.chip
        new = batch.chunk_new.sum(axis=1)
        compute = new * work.flops_per_token / (chip.flops_per_s * curves.prefill.compute)
        requests = (batch.chunk_new > 0).sum(axis=1) + batch.decodes
        moved = 2.0 * requests * work.state_bytes
        memory = moved / (chip.bytes_per_s * curves.decode.bandwidth)
        return np.asarray(curves.decode.fixed_s + compute + memory, np.float64)


def roofline(
    model: Model,
    node: NodeType,
    tp: int,
    *,
    layers: range | None = None,
    calibration: Calibration | None = None,
    host: EngineHost = DEFAULT_HOST,
    ep: Ep = "none",
    sure: float = 0.5,
) -> RooflineTimer:
    """A timer for a model, or for some of its layers, sharded over `tp` GPUs of a node, its experts maybe spread.

    Above 0.5, `sure` is the probability with which no step should take longer than it says.
    """
    check_tp(model, node, tp, ep)
    source = bundled() if calibration is None else calibration
    curves = bundled_curves(node.gpu) if source is bundled() else curves_for(node.gpu, source)
    chosen = range(model.layer_count) if layers is None else layers
    works = tuple(layer_works(model, tp, chosen, ep))
    last = chosen.stop == model.layer_count
    timer = RooflineTimer(
        model,
        node,
        tp,
        curves,
        works,
        _dense_s(works, node, tp, curves, source),
        _latent_up_s(works, node.gpu, curves),
        gemm_time_s(head_gemm(model, 1 if ep == "dp" else tp), TOKEN_GRID, node.gpu, curves)
        if last
        else None,
        host,
        ep,
        routed_s=_routed_s(works, node, tp, curves, source) if ep == "dp" else None,
    )
    if sure <= 0.5:
        return timer
    return replace(timer, slower=slower(model, tp, node.gpu.name, timer.confidence, sure))


def check_tp(model: Model, node: NodeType, tp: int, ep: Ep = "none") -> None:
    """Refuse a tensor-parallel degree that the node or the model cannot have, and experts that cannot be spread."""
    if tp < 1:
        raise InputError("tp", f"must be at least 1, is {tp}")
    if tp > node.gpus:
        raise InputError("tp", f"{tp} exceeds the {node.gpus} GPU(s) of node {node.name}")
    if ep != "none":
        fewest = min((x.ffn.experts for x in model.layers if isinstance(x.ffn, MoeFfn)), default=0)
        if tp == 1:
            raise InputError("ep", "experts are spread over several GPUs; one has them all")
        if fewest < tp:
            raise InputError("ep", f"{model.name} has {fewest} experts, not one for each of {tp} GPUs")
    if ep == "dp":
        return  # every GPU has all heads
    for layer in model.layers:
        attention = layer.attention
        heads = attention.value_heads if isinstance(attention, LinearAttention) else attention.heads
        if heads % tp:
            raise InputError("tp", f"{tp} does not divide the {heads} attention heads of {model.name}")
        shared = attention.kv_heads if isinstance(attention, FullAttention) else tp
        if shared % tp and tp % shared:
            raise InputError("tp", f"{tp} neither divides nor copies the {shared} KV heads of {model.name}")


def needed_extras(model: Model, gpu: Gpu) -> dict[str, str]:
    """Operators besides the 16-bit ones that a model needs on a GPU, by name, in words."""
    texts = {}
    dense = units_for(model.weights_are, gpu)
    if dense.makes_small:
        texts[f"gemm:{dense.family}"] = f"{model.weights_are} products"
    if any(isinstance(layer.ffn, MoeFfn) for layer in model.layers):
        texts[f"experts:{units_for(model.experts_are, gpu).family}"] = f"{model.experts_are} experts"
    if any(isinstance(layer.attention, LatentAttention) for layer in model.layers):
        texts["latent:decode"] = "latent attention"
    return texts


def unmeasured_parts(model: Model, gpu: Gpu) -> tuple[str, ...]:
    """What no measurement behind the calibration has: it follows the bare formulas, or another format's figures."""
    texts = []
    if any(isinstance(layer.attention, LinearAttention) for layer in model.layers):
        texts.append("linear attention")
    dense, experts = units_for(model.weights_are, gpu), units_for(model.experts_are, gpu)
    if not (dense.plain or (dense.makes_small and dense.family == model.weights_are)):
        texts.append(f"{model.weights_are} products{'' if dense.makes_small else ', weights only'}")
    mixture = any(isinstance(layer.ffn, MoeFfn) for layer in model.layers)
    if mixture and not (experts.plain or experts.family == model.experts_are):
        texts.append(f"{model.experts_are} experts")
    return tuple(texts)


def _dense_s(
    works: tuple[tuple[LayerWork, int], ...],
    node: NodeType,
    tp: int,
    curves: GpuCurves,
    calibration: Calibration,
) -> Floats:
    total = np.zeros(len(TOKEN_GRID))
    for work, count in works:
        # A planner cuts the same few layers in a thousand ways, and many differ in their attention alone.
        layer = (
            _bundled_layer_s(replace(work, attention=NO_ATTENTION), node, tp)
            if calibration is bundled()
            else _layer_s(work, node, tp, curves, calibration)
        )
        total += count * layer
    return total


@lru_cache(maxsize=512)
def _bundled_layer_s(work: LayerWork, node: NodeType, tp: int) -> Floats:
    return _layer_s(work, node, tp, bundled_curves(node.gpu), bundled())


def _layer_s(work: LayerWork, node: NodeType, tp: int, curves: GpuCurves, calibration: Calibration) -> Floats:
    layer = stream_s(TOKEN_GRID * work.stream_bytes_per_token, work.launches, curves.chip, curves.stream)
    own_tokens = work.routed_bytes_per_token > 0
    for gemm in work.gemms:
        if not gemm.experts:
            layer = layer + gemm_time_s(gemm, TOKEN_GRID, node.gpu, curves)
    if not own_tokens:
        layer = layer + experts_time_s(work, TOKEN_GRID, node.gpu, curves)
    if work.reduced_bytes_per_token > 0:
        half = TOKEN_GRID * work.reduced_bytes_per_token / 2
        layer = layer + 2 * all_reduce_s(half, tp, node.interconnect, calibration.networks)
    return layer


def _routed_s(
    works: tuple[tuple[LayerWork, int], ...],
    node: NodeType,
    tp: int,
    curves: GpuCurves,
    calibration: Calibration,
) -> Floats:
    """Experts of all GPUs' tokens, on the GPU that got most of them, and the way of these there and back."""
    total = np.zeros(len(TOKEN_GRID))
    for work, count in works:
        if work.routed_bytes_per_token > 0:
            size = TOKEN_GRID / tp * work.routed_bytes_per_token
            layer = 2 * all_to_all_s(size, tp, node.interconnect, calibration.networks)
            total += count * (layer + experts_time_s(work, TOKEN_GRID, node.gpu, curves, own=True))
    return total


def _busiest(batch: StepBatch, ranks: int) -> StepBatch:
    """The part of a step on the GPU with the most of it: chunks are dealt out whole, the longest first."""
    order = np.argsort(-batch.chunk_new, axis=1, kind="stable")
    new = np.take_along_axis(batch.chunk_new, order, axis=1)[:, ::ranks]
    cached = np.take_along_axis(batch.chunk_cached, order, axis=1)[:, ::ranks]
    decodes = np.minimum(batch.decodes, np.maximum(batch.decodes / ranks, 1.0))
    share = decodes / np.maximum(batch.decodes, 1e-9)
    return StepBatch(new, cached, decodes, batch.decode_context * share)


def _latent_up_s(works: tuple[tuple[LayerWork, int], ...], gpu: Gpu, curves: GpuCurves) -> Floats | None:
    total: Floats | None = None
    for work, count in works:
        up = work.attention.latent_up if isinstance(work.attention, SoftmaxWork) else None
        if up is not None:
            part = count * gemm_time_s(up, TOKEN_GRID, gpu, curves)
            total = part if total is None else total + part
    return total


def _look_up(tokens: Floats, table: Floats) -> Floats:
    """Linear between grid points, proportional beyond the last, nothing at 0."""
    inside = np.interp(tokens, TOKEN_GRID, table)
    stretched = np.where(tokens > TOKEN_GRID[-1], inside * tokens / TOKEN_GRID[-1], inside)
    return np.where(tokens > 0, stretched, 0.0)
