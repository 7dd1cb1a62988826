"""What a run amounts to: latencies, objectives met, goodput, money, how busy everything was.

Which requests count: those that arrived at or after `warm_up_s`. For the share that met its objective (attainment):

    met       answered, TTFT <= slo.ttft_s, TPOT <= slo.tpot_s (an answer of one token has no TPOT) and, where it
              is promised, E2E <= slo.e2e_s; the objective is the model's, or what the request's class makes of it
    missed    answered otherwise; refused; still open with TTFT or E2E already broken
    left out  cancelled by the user; still open in a run that was cut short

    TTFT = first_token_s - arrival_s           TPOT = (finish_s - first_token_s) / (streamed_tokens - 1)
    E2E  = finish_s - arrival_s                TBT  = one gap between two tokens, from the replicas' histograms

Rates of arrival and goodput are over the time in which requests arrived, so goodput = attainment x rate when nothing
is left out; throughput and cost are over the time until the last one ended. TBT and the busy times are of the
whole run, warm-up included: replicas keep sums, not moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, sqrt

import numpy as np
from numpy.typing import NDArray

from potluck.core import codec
from potluck.core.values.service import RequestClass
from potluck.core.values.types import Slo
from potluck.sim.results.records import (
    ANSWERED,
    CANCELLED,
    OPEN,
    REASONS,
    REFUSED,
    ReplicaRecord,
    RequestRecords,
    SimResult,
    cost_between,
)


@dataclass(frozen=True, slots=True)
class HardwareUse:
    """All replicas that stand on the same node types."""

    nodes: str
    replicas: int
    gpus: int
    busy_share: float
    """Of the time from ready to stopped, weighted by GPUs: with a step running, full or not. It is no load: a replica
    with one request at a time may be busy all the time."""
    gpu_h: float
    """GPU-hours from ready to stopped."""
    lost: int


@dataclass(frozen=True, slots=True)
class LinkUse:
    source: str
    target: str
    kind: str
    gbps: float
    sent_bytes: float
    mean_share: float
    """Of what it could have carried in the whole run."""
    busy_share: float
    """Of the run, with at least one transfer."""


def hardware_use(replicas: Sequence[ReplicaRecord], end_s: float) -> tuple[HardwareUse, ...]:
    groups: dict[str, list[ReplicaRecord]] = {}
    for replica in replicas:
        groups.setdefault("+".join(sorted(set(replica.nodes))) or "unknown", []).append(replica)
    hardware_uses = []
    for nodes, members in sorted(groups.items()):
        busy_s = sum(member.busy_s * member.gpus for member in members)
        there_s = sum(serving_s(member, end_s) * member.gpus for member in members)
        lost = sum(member.changes[-1][1] == "lost" for member in members)
        share = min(busy_s / there_s, 1.0) if there_s > 0 else 0.0
        gpus = sum(member.gpus for member in members)
        hardware_uses.append(HardwareUse(nodes, len(members), gpus, share, there_s / 3600.0, lost))
    return tuple(hardware_uses)


def serving_s(replica: ReplicaRecord, end_s: float) -> float:
    ready_s = replica.ready_s
    return 0.0 if ready_s is None else max(0.0, min(replica.ended_s(end_s), end_s) - ready_s)


def link_use(result: SimResult) -> tuple[LinkUse, ...]:
    span_s = result.end_s
    link_uses = []
    for link in result.links:
        if link.kind == "card" and link.sent_bytes == 0:
            continue
        most_bytes = link.gbps * 1e9 / 8 * span_s
        share = min(link.sent_bytes / most_bytes, 1.0) if most_bytes > 0 else 0.0
        busy = min(link.busy_s / span_s, 1.0) if span_s > 0 else 0.0
        ends = (link.source, link.target, link.kind)
        link_uses.append(LinkUse(*ends, link.gbps, link.sent_bytes, share, busy))
    return tuple(link_uses)


Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Ints = NDArray[np.integer]
FORMAT, VERSION = "potluck-summary", 1
MOMENT_S = 1e-6
"""Less than this is no time to speak of rates."""


@dataclass(frozen=True, slots=True)
class LatencySpread:
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    answered: int
    refused: int
    cancelled: int
    open: int
    refusals: dict[str, int]
    retried: int
    preempted: int
    """Put back at least once for want of memory."""


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model's requests, or a tenant's, a class's or all of them. A spread is None when nothing was measured."""

    model: str
    requests: int
    outcomes: OutcomeCounts
    rate_per_s: float
    throughput_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    """Tokens that reached users."""
    cached_tokens: int
    ttft_s: LatencySpread | None
    tpot_s: LatencySpread | None
    tbt_s: LatencySpread | None
    e2e_s: LatencySpread | None
    slo: Slo | None
    """None for all models together, or where none was promised."""
    attainment: float | None
    ttft_attainment: float | None
    tpot_attainment: float | None
    goodput_per_s: float | None
    e2e_attainment: float | None = None
    """None, too, where nothing was promised of it."""
    goodput_tokens_per_s: float | None = None
    """Answer tokens a second of requests within their objective (CORAL's goodput)."""

    @property
    def holds(self) -> bool | None:
        """Whether the objective was kept for the share that was promised."""
        if self.slo is None or self.attainment is None:
            return None
        return self.attainment >= self.slo.attainment


@dataclass(frozen=True, slots=True)
class RunSummary:
    total: ModelSummary
    models: tuple[ModelSummary, ...]
    start_s: float
    """End of the warm-up."""
    end_s: float
    cost_usd: float
    """From `start_s` to `end_s`, as in a plan: rent beyond reserved nodes, head nodes, storage and egress."""
    cost_usd_per_h: float
    output_tokens_per_usd: float | None
    met_per_usd: float | None
    """Requests within their objective for a dollar."""
    hardware: tuple[HardwareUse, ...]
    links: tuple[LinkUse, ...]
    replicas: int
    faults: int
    seed: int
    tenants: tuple[ModelSummary, ...] = ()
    """The same by tenant and by class, where the workload has them; named in place of the model."""
    classes: tuple[ModelSummary, ...] = ()
    start_usd: float = 0.0
    """Of `cost_usd`, what was paid for nodes before they served."""
    egress_usd: float = 0.0
    """Of `cost_usd`, what was paid for bytes that crossed links."""

    def to_json(self) -> str:
        return codec.dumps(self, format_name=FORMAT, version=VERSION)


def summarise(result: SimResult, warm_up_s: float = 0.0) -> RunSummary:
    records = result.records
    counted = records.arrival_s >= warm_up_s
    verdict = judge(records, result.slos, result.end_s, result.classes)
    last_s = float(records.arrival_s[-1]) if len(records) else 0.0
    window = _Window(warm_up_s, last_s, max(result.end_s, warm_up_s))
    models = []
    for index, name in enumerate(records.models):
        chosen = counted & (records.model == index)
        if not chosen.any() and name not in result.slos:
            continue
        gaps = merge_gaps(replica for replica in result.replicas if replica.model == name)
        models.append(_summary(name, result, chosen, verdict, gaps, result.slos.get(name), window))
    total_summary = _summary("all", result, counted, verdict, merge_gaps(result.replicas), None, window)
    sent_bytes = float(records.wire_bytes.sum())
    counted_share = float(records.wire_bytes[counted].sum()) / sent_bytes if sent_bytes > 0 else 1.0
    egress_usd = result.egress_usd * counted_share
    cost_usd = cost_between(result.cost_rates, window.start_s, window.end_s) + egress_usd
    hours = (window.end_s - window.start_s) / 3600.0
    return RunSummary(
        total_summary,
        tuple(models),
        window.start_s,
        window.end_s,
        cost_usd,
        cost_usd / hours if hours > 0 else 0.0,
        total_summary.output_tokens / cost_usd if cost_usd > 0 else None,
        int((verdict.met & counted).sum()) / cost_usd if cost_usd > 0 and result.slos else None,
        hardware_use(result.replicas, result.end_s),
        link_use(result),
        len(result.replicas),
        len(result.faults),
        result.seed,
        *_groups(result, counted, verdict, window),
        start_usd=cost_between(result.start_rates, window.start_s, window.end_s),
        egress_usd=egress_usd,
    )


def _groups(
    result: SimResult, counted: Mask, verdict: RequestVerdicts, window: _Window
) -> tuple[tuple[ModelSummary, ...], tuple[ModelSummary, ...]]:
    labels = result.records.labels
    if labels is None:
        return (), ()

    def each(names: tuple[str, ...], places: Ints) -> tuple[ModelSummary, ...]:
        parts = [(name, counted & (places == place)) for place, name in enumerate(names)]
        return tuple(_summary(n, result, part, verdict, {}, None, window) for n, part in parts if part.any())

    return each(labels.tenants, labels.tenant), each(labels.classes, labels.request_class)


@dataclass(frozen=True, slots=True)
class _Window:
    start_s: float
    last_arrival_s: float
    end_s: float

    @property
    def arriving_s(self) -> float:
        """How long requests arrived; where all came at one moment, how long it took to end them."""
        arriving_s = self.last_arrival_s - self.start_s
        return arriving_s if arriving_s > MOMENT_S else self.running_s

    @property
    def running_s(self) -> float:
        running_s = self.end_s - self.start_s
        return running_s if running_s > MOMENT_S else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class RequestVerdicts:
    """Per request: does it count, did it keep its objective, and each part of it."""

    judged: Mask
    met: Mask
    ttft_ok: Mask
    tpot_ok: Mask
    e2e_ok: Mask
    e2e_promised: Mask


def judge(
    records: RequestRecords,
    slos: dict[str, Slo],
    end_s: float,
    classes: Mapping[str, RequestClass] | None = None,
) -> RequestVerdicts:
    """The rule stands at the top of this file. Models without an objective are not judged."""
    promised, (ttft_limit_s, tpot_limit_s, e2e_limit_s) = limits_of(records, slos, classes)
    answered, is_open = records.outcome == ANSWERED, records.outcome == OPEN
    waited_s = end_s - records.arrival_s
    # A comparison with nan is false: without a first token the objective is not kept.
    in_time = records.first_token_s - records.arrival_s <= ttft_limit_s
    late = is_open & ((~in_time & (waited_s > ttft_limit_s)) | (waited_s > e2e_limit_s))
    judged = promised & (answered | (records.outcome == REFUSED) | late)
    paced = (tpot(records) <= tpot_limit_s) | (records.streamed_tokens <= 1)
    whole = records.finish_s - records.arrival_s <= e2e_limit_s
    ttft_ok, tpot_ok, e2e_ok = (judged & answered & kept for kept in (in_time, paced, whole))
    met = ttft_ok & tpot_ok & e2e_ok
    return RequestVerdicts(judged, met, ttft_ok, tpot_ok, e2e_ok, e2e_limit_s < inf)


def limits_of(
    records: RequestRecords, slos: dict[str, Slo], classes: Mapping[str, RequestClass] | None = None
) -> tuple[Mask, Floats]:
    """(whether anything was promised, [TTFT, TPOT, E2E] that were) of each request; infinite where nothing was."""
    kinds = records.labels.classes if records.labels is not None else ("",)
    kind = records.labels.request_class if records.labels is not None else np.zeros(len(records), np.int32)
    limits_s = np.full((len(records.models), len(kinds), 3), inf)
    promised = np.zeros(limits_s.shape[:2], np.bool_)
    for i, name in enumerate(records.models):
        for j, known_class in enumerate(map((classes or {}).get, kinds)):
            slo = slos.get(name) if known_class is None else known_class.objective(slos.get(name))
            if slo is not None:
                promised[i, j] = True
                limits_s[i, j] = slo.ttft_s, slo.tpot_s, inf if slo.e2e_s is None else slo.e2e_s
    return promised[records.model, kind], limits_s[records.model, kind].T


def tpot(records: RequestRecords) -> Floats:
    """Mean gap between output tokens; nan for answers of one token."""
    gaps = np.where(records.streamed_tokens > 1, records.streamed_tokens - 1, np.nan)
    result: Floats = (records.finish_s - records.first_token_s) / gaps
    return result


def spread(values: Floats) -> LatencySpread | None:
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    p50, p90, p99 = (float(value) for value in np.quantile(values, (0.5, 0.9, 0.99)))
    return LatencySpread(len(values), float(values.mean()), p50, p90, p99, float(values.max()))


def merge_gaps(replicas: Iterable[ReplicaRecord]) -> dict[float, float]:
    """The histograms of several replicas as one: upper edge -> count."""
    merged: dict[float, float] = {}
    for replica in replicas:
        for edge_s, count in replica.gaps:
            merged[edge_s] = merged.get(edge_s, 0.0) + count
    return merged


def gap_spread(gaps: dict[float, float]) -> LatencySpread | None:
    """Quantiles of a histogram, at the upper edge of the bin they fall in: at most one bin's width too high."""
    edges = sorted(edge_s for edge_s, count in gaps.items() if count > 0)
    if not edges:
        return None
    counts = np.array([gaps[edge_s] for edge_s in edges])
    reached = np.cumsum(counts)
    total = float(reached[-1])
    # Bins are narrow and logarithmic; the ratio of the closest two is the width of all.
    ratio = min((b / a for a, b in pairwise(edges) if a > 0), default=1.0)
    middle = np.array(edges) / sqrt(ratio)

    def at(level: float) -> float:
        return edges[min(int(np.searchsorted(reached, level * total)), len(edges) - 1)]

    mean = float((middle * counts).sum() / total)
    return LatencySpread(round(total), mean, at(0.5), at(0.9), at(0.99), edges[-1])


def _summary(
    name: str,
    result: SimResult,
    chosen: Mask,
    verdict: RequestVerdicts,
    gaps: dict[float, float],
    slo: Slo | None,
    window: _Window,
) -> ModelSummary:
    records = result.records
    answered = chosen & (records.outcome == ANSWERED)
    ttft_s = (records.first_token_s - records.arrival_s)[chosen]
    asked = chosen & verdict.judged
    count, arriving_s, running_s = int(asked.sum()), window.arriving_s, window.running_s

    kept_tokens = records.streamed_tokens[verdict.met & asked].sum()

    def share(kept: Mask) -> float | None:
        return int((kept & asked).sum()) / count if count else None

    return ModelSummary(
        name,
        int(chosen.sum()),
        _outcomes(records, chosen),
        int(chosen.sum()) / arriving_s if arriving_s else 0.0,
        int(answered.sum()) / running_s if running_s else 0.0,
        int(records.streamed_tokens[chosen].sum()) / running_s if running_s else 0.0,
        int(records.prompt_tokens[chosen].sum()),
        int(records.streamed_tokens[chosen].sum()),
        int(records.cached_tokens[chosen].sum()),
        spread(ttft_s),
        spread(tpot(records)[answered]),
        gap_spread(gaps),
        spread((records.finish_s - records.arrival_s)[answered]),
        slo,
        share(verdict.met),
        share(verdict.ttft_ok),
        share(verdict.tpot_ok),
        int((verdict.met & asked).sum()) / arriving_s if count and arriving_s else None,
        share(verdict.e2e_ok) if bool((asked & verdict.e2e_promised).any()) else None,
        int(kept_tokens) / arriving_s if count and arriving_s else None,
    )


def _outcomes(records: RequestRecords, chosen: Mask) -> OutcomeCounts:
    ended = np.bincount(records.outcome[chosen], minlength=4).tolist()
    reasons = np.bincount(records.reason[chosen], minlength=len(REASONS)).tolist()
    refusals = {reason: count for reason, count in zip(REASONS, reasons, strict=True) if reason and count}
    retried, preempted = (records.attempts > 1)[chosen].sum(), (records.preemptions > 0)[chosen].sum()
    outcomes = (ended[ANSWERED], ended[REFUSED], ended[CANCELLED], ended[OPEN])
    return OutcomeCounts(*outcomes, refusals, int(retried), int(preempted))


SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
LEVELS = (0.9, 0.99)
"""Shares whose least scale is told, THUNDERSERVE's two."""


@dataclass(frozen=True, slots=True)
class ScalePart:
    name: str
    attainment: tuple[float, ...]
    """At each of the scan's scales."""
    least: tuple[float | None, ...]
    """Scale from which each of `LEVELS` is attained; None: at no scale, since too many were refused."""


@dataclass(frozen=True, slots=True)
class ScaleScan:
    requests: int
    scales: tuple[float, ...]
    levels: tuple[float, ...]
    parts: tuple[ScalePart, ...]


def scan(result: SimResult, warm_up_s: float = 0.0, scales: tuple[float, ...] = SCALES) -> ScaleScan:
    """Of all requests to which something was promised, each against its own objective.

    A request keeps an objective that is s times as long from s = max(TTFT / slo.ttft_s, TPOT / slo.tpot_s,
    E2E / slo.e2e_s) on, each part alone likewise. So one run answers for every scale: attainment at s is the share of
    requests whose own scale is at most s. Refused requests are within no scale; those that are still open or were
    cancelled are left out. Admission decides by the objective in force, so scan with `admission=false`."""
    records = result.records
    promised, limits_s = limits_of(records, result.slos, result.classes)
    answered, refused = records.outcome == ANSWERED, records.outcome == REFUSED
    counted = promised & (answered | refused) & (records.arrival_s >= warm_up_s)
    times_s = (
        records.first_token_s - records.arrival_s,
        np.where(records.streamed_tokens > 1, tpot(records), 0.0),
        records.finish_s - records.arrival_s,
    )
    own = [np.where(answered, s / most_s, inf)[counted] for s, most_s in zip(times_s, limits_s, strict=True)]
    parts = {"TTFT": own[0], "TPOT": own[1]}
    if bool((limits_s[2][counted] < inf).any()):
        parts["E2E"] = own[2]
    parts["all"] = np.maximum.reduce(own)
    scale_parts = tuple(_part(name, np.sort(values), scales) for name, values in parts.items())
    return ScaleScan(int(counted.sum()), scales, LEVELS, scale_parts)


def _part(name: str, ranked: Floats, scales: tuple[float, ...]) -> ScalePart:
    count = len(ranked)
    shares = np.searchsorted(ranked, scales, side="right") / max(count, 1)
    least = [float(ranked[ceil(level * count - 1e-9) - 1]) if count else inf for level in LEVELS]
    return ScalePart(name, tuple(shares.tolist()), tuple(None if s == inf else s for s in least))
