"""One node, one model, one kind of request: how fast, how many, how dear, and what binds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from potluck.core.errors import CapacityError, InputError
from potluck.core.values.layout import Ep
from potluck.core.values.model import Model
from potluck.core.values.plan import Confidence
from potluck.core.values.types import NodeType, Role, Slo
from potluck.perf.error_bars import METRICS, ErrorBar, Metric, bar
from potluck.perf.kv_capacity import StageMemory, max_requests, require_fit, stage_memory
from potluck.perf.operators.layers import step_sums
from potluck.perf.phases import decode_step_s, prefill_s
from potluck.perf.step_timer import StepBatch, StepTimer, steps
from potluck.perf.throughput import Limit, OperatingPoint, best_operating
from potluck.perf.timers.roofline import RooflineTimer, check_tp, roofline

if TYPE_CHECKING:
    from potluck.perf.timers.profile import Profile

Bound = Literal["compute", "bandwidth"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a node does for a model; rates and prices are for the whole node."""

    model: str
    node: str
    role: Role
    tp: int
    ep: Ep
    replicas: int
    """Copies of the model side by side on the node."""
    prefill_s: float
    """One prompt alone."""
    prefill_bound: Bound
    decode_step_s: float
    """One request alone, half of its output done."""
    decode_bound: Bound
    """At the operating point."""
    max_batch: int
    """Requests whose KV fits in one replica."""
    kv_bytes: float
    """KV memory of one replica."""
    weight_bytes: float
    """Weights of one replica."""
    operating: OperatingPoint | None
    """None when the objective cannot be met at all, or not even one request fits."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    price_usd_per_h: float | None
    usd_per_million_output_tokens: float | None
    usd_per_million_tokens: float | None
    binds: str
    """What keeps the node from doing more, in a few words."""
    confidence: Confidence
    basis: str
    rate_bar: ErrorBar | None
    """Of rates and prices, and of steps; None where they were measured by `potluck profile`."""
    ttft_bar: ErrorBar | None
    tpot_bar: ErrorBar | None


def estimate(
    model: Model,
    node: NodeType,
    *,
    input_tokens: int,
    output_tokens: int,
    tp: int | None = None,
    slo: Slo | None = None,
    price_usd_per_h: float | None = None,
    role: Role = "mixed",
    profiles: Sequence[Profile] = (),
    ep: Ep = "none",
) -> Estimate:
    """Estimate a node; without `tp`, with the degree that serves the most requests. Where `profiles` has this model
    on this GPU with that degree, step times are those that were measured. `ep` spreads a mixture's experts."""
    if input_tokens < 1 or output_tokens < 1:
        name, tokens = ("input", input_tokens) if input_tokens < 1 else ("output", output_tokens)
        raise InputError(name, f"must be at least 1 token, is {tokens}")
    if input_tokens + output_tokens > model.max_context_tokens:
        raise InputError(
            "input", f"with the output exceeds the {model.max_context_tokens} tokens {model.name} takes"
        )
    asked = (input_tokens, output_tokens, slo, role, profiles)
    if tp is not None:
        return _estimate_of(_serving_figures(model, node, tp, ep, *asked), *asked[:2], price_usd_per_h, role)
    serveds: list[_ServingFigures] = []
    refused: CapacityError | None = None
    for degree in _degrees(model, node, ep):
        try:
            serveds.append(_serving_figures(model, node, degree, ep, *asked))
        except CapacityError as error:
            refused = error
    if not serveds:
        if refused is None and ep != "none":
            check_tp(model, node, node.gpus, ep)
        raise refused or InputError("tp", f"no degree divides the heads of {model.name}")
    best = max(serveds, key=lambda each: (each.requests_per_s, -each.prefill_s))
    return _estimate_of(best, *asked[:2], price_usd_per_h, role)


def _degrees(model: Model, node: NodeType, ep: Ep) -> list[int]:
    degrees = []
    for tp in (d for d in range(1, node.gpus + 1) if node.gpus % d == 0):
        try:
            check_tp(model, node, tp, ep)
        except InputError:
            continue
        degrees.append(tp)
    return degrees


def _profiled(profiles: Sequence[Profile], roofline_timer: RooflineTimer) -> tuple[Profile | None, StepTimer]:
    """The profile of this model on this node and its timer, if one was measured; else the roofline's."""
    from potluck.perf.timers.profile import ProfileTimer, profile_for  # most estimates have none

    profile = profile_for(profiles, roofline_timer.model, roofline_timer.node, roofline_timer.tp)
    return profile, roofline_timer if profile is None else ProfileTimer(profile)


@dataclass(frozen=True, slots=True)
class _ServingFigures:
    """The figures by which the degree of tensor parallelism is chosen, and from which the estimate is made."""

    roofline_timer: RooflineTimer
    timer: StepTimer
    profile: Profile | None
    memory: StageMemory
    batch: int
    operating: OperatingPoint | None
    prefill_s: float

    @property
    def replicas(self) -> int:
        return self.roofline_timer.node.gpus // self.roofline_timer.tp

    @property
    def requests_per_s(self) -> float:
        return self.operating.requests_per_s * self.replicas if self.operating else 0.0


def _serving_figures(
    model: Model,
    node: NodeType,
    tp: int,
    ep: Ep,
    input_tokens: int,
    output_tokens: int,
    slo: Slo | None,
    role: Role,
    profiles: Sequence[Profile],
) -> _ServingFigures:
    check_tp(model, node, tp, ep)
    memory = stage_memory(model, node, tp, ep=ep)
    require_fit(model, memory, node, tp)
    roofline_timer = roofline(model, node, tp, ep=ep)
    profile, timer = (
        _profiled(profiles, roofline_timer) if profiles and ep == "none" else (None, roofline_timer)
    )
    batch = max_requests(model, memory, tp, input_tokens + output_tokens, ep=ep)
    added_s = 0.0 if role == "decode" else roofline_timer.host.request_s
    within = slo if slo is None else replace(slo, ttft_s=max(slo.ttft_s - added_s, 1e-9))
    operating = best_operating(timer, input_tokens, output_tokens, batch, within, role)
    if operating is not None:
        operating = replace(operating, ttft_s=operating.ttft_s + added_s)
    return _ServingFigures(
        roofline_timer, timer, profile, memory, batch, operating, float(prefill_s(timer, input_tokens)[0])
    )


def _estimate_of(
    served: _ServingFigures, input_tokens: int, output_tokens: int, price_usd_per_h: float | None, role: Role
) -> Estimate:
    roofline_timer, profile, operating = served.roofline_timer, served.profile, served.operating
    model, node, tp = roofline_timer.model, roofline_timer.node, roofline_timer.tp
    requests_per_s = served.requests_per_s
    context = input_tokens + output_tokens / 2
    running = float(operating.batch) if operating else 1.0
    decode_bound = _bound(roofline_timer, steps(decodes=running, decode_context=running * context))
    output_per_request = {"prefill": 0, "decode": output_tokens, "mixed": output_tokens}[role]
    input_per_request = 0 if role == "decode" else input_tokens
    confidence = roofline_timer.confidence
    bars: dict[Metric, ErrorBar | None] = dict.fromkeys(METRICS)
    if profile is None:
        load = {"engine": "vllm", "requests": running}
        bars = {m: bar(m, model, tp, node.gpu.name, confidence, **load) for m in METRICS}  # type: ignore[arg-type]
    return Estimate(
        model=model.name,
        node=node.name,
        role=role,
        tp=tp,
        ep=roofline_timer.ep,
        replicas=served.replicas,
        prefill_s=served.prefill_s,
        prefill_bound=_bound(roofline_timer, steps(chunk_new=float(input_tokens))),
        decode_step_s=float(decode_step_s(served.timer, 1.0, context)[0]),
        decode_bound=decode_bound,
        max_batch=served.batch,
        kv_bytes=served.memory.kv_bytes * tp,
        weight_bytes=served.memory.weight_bytes * tp,
        operating=operating,
        requests_per_s=requests_per_s,
        output_tokens_per_s=requests_per_s * output_per_request,
        total_tokens_per_s=requests_per_s * (output_per_request + input_per_request),
        price_usd_per_h=price_usd_per_h,
        usd_per_million_output_tokens=_usd_per_million(price_usd_per_h, requests_per_s * output_per_request),
        usd_per_million_tokens=_usd_per_million(
            price_usd_per_h, requests_per_s * (output_per_request + input_per_request)
        ),
        binds=_binds(operating, decode_bound, served.batch),
        confidence=confidence if profile is None else served.timer.confidence,
        basis=roofline_timer.basis
        if profile is None
        else f"{len(profile.points)} steps measured {profile.date}",
        **{f"{metric}_bar": output_per_request for metric, output_per_request in bars.items()},
    )


def _bound(timer: RooflineTimer, batch: StepBatch) -> Bound:
    """Whether a step is compute- or bandwidth-bound on ideal hardware."""
    sums = step_sums(timer.model, batch, timer.tp)
    gpu = timer.node.gpu
    compute_s = float(sums.flops[0]) / (gpu.fp16_tflops * 1e12)
    memory_s = float(sums.bytes[0]) / (gpu.bandwidth_gb_per_s * 1e9)
    return "compute" if compute_s > memory_s else "bandwidth"


def _binds(operating: OperatingPoint | None, decode_bound: Bound, max_batch: int) -> str:
    if max_batch < 1:
        return "KV memory: not even one such request fits"
    if operating is None:
        return "the objective cannot be met, even by one request alone"
    words: dict[Limit, str] = {
        "memory": "KV memory: no room for more requests",
        "tpot": f"TPOT objective ({decode_bound}-bound steps)",
        "ttft": "TTFT objective",
        "compute": "compute: a larger batch would not serve more",
        "batch": "batch limit of the engine",
    }
    return words[operating.limit]


def _usd_per_million(price_usd_per_h: float | None, tokens_per_s: float) -> float | None:
    if price_usd_per_h is None or not np.isfinite(tokens_per_s) or tokens_per_s <= 0:
        return None
    return price_usd_per_h / 3600.0 / tokens_per_s * 1e6
