"""A run over time as plain data, small enough to plot: at most BINS intervals and ROWS rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from potluck.core.values.types import Slo
from potluck.sim.results.metrics import judge, tpot
from potluck.sim.results.records import (
    ANSWERED,
    REFUSED,
    ReplicaRecord,
    RequestRecords,
    SimResult,
    StateSamples,
    cost_between,
)

BINS = 200
ROWS = 64
"""Rows of the heat maps and the timeline; more replicas than that are put together or left out."""
POINTS = 160
MOST_LINKS = 6
MOST_FAULTS = 200

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """A distribution: (seconds, share of requests up to there), from lowest to highest."""

    model: str
    points: tuple[tuple[float, float], ...]
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaBand:
    """One replica's life: (from_s, to_s, state, role) without gaps."""

    label: str
    what: str
    spans: tuple[tuple[float, float, str, str], ...]
    lost_s: float | None = None


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Rows are replicas, or groups of them; a cell is None while nothing of the row was there."""

    labels: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class PlotLine:
    label: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RunSeries:
    """Values between `edges_s[i]` and `edges_s[i + 1]`. Requests are counted where they arrived."""

    edges_s: tuple[float, ...]
    arrivals_per_s: PlotLine
    answered_per_s: PlotLine
    refused_per_s: PlotLine
    goodput_per_s: PlotLine | None
    cost_usd: tuple[float, ...]
    """Paid up to each edge."""
    cost_usd_per_h: tuple[float, ...]
    ttft: tuple[LatencyCurve, ...]
    tpot: tuple[LatencyCurve, ...]
    e2e: tuple[LatencyCurve, ...]
    bands: tuple[ReplicaBand, ...]
    replicas: int
    """How many there were; `bands` may hold fewer."""
    utilisation: HeatMap | None
    queue: HeatMap | None
    memory: HeatMap | None
    links: tuple[PlotLine, ...]
    faults: tuple[tuple[float, str], ...]
    more_faults: int


def series(result: SimResult, bins: int = BINS) -> RunSeries:
    records, end_s = result.records, max(result.end_s, 1e-9)
    edges = np.linspace(0.0, end_s, bins + 1)
    verdict = judge(records, result.slos, result.end_s, result.classes)
    costs = np.array([cost_between(result.cost_rates, 0.0, at_s) for at_s in edges]) + _egress_usd(
        result, edges
    )
    maps = _heat_maps(result, edges)
    return RunSeries(
        tuple(edges.tolist()),
        _rate("arrivals", records, np.ones(len(records), dtype=np.bool_), edges),
        _rate("answered", records, records.outcome == ANSWERED, edges),
        _rate("refused", records, records.outcome == REFUSED, edges),
        _rate("within SLO", records, verdict.met, edges) if result.slos else None,
        tuple(costs.tolist()),
        tuple((np.diff(costs) / np.diff(edges) * 3600.0).tolist()),
        _curves(records, result.slos, "ttft"),
        _curves(records, result.slos, "tpot"),
        _curves(records, result.slos, "e2e"),
        bands(result.replicas, end_s),
        len(result.replicas),
        *maps,
        _links(result, edges),
        tuple((fault.at_s, fault.what) for fault in result.faults[:MOST_FAULTS]),
        max(0, len(result.faults) - MOST_FAULTS),
    )


def _egress_usd(result: SimResult, edges: Floats) -> Floats:
    """Paid for egress up to each edge; without samples evenly over the run."""
    samples = result.samples
    if samples is None or len(samples.at_s) < 2 or not result.links:
        even: Floats = result.egress_usd * edges / edges[-1]
        return even
    count = min(samples.link_bytes.shape[1], len(result.links))
    prices = np.array([link.egress_usd_per_gb for link in result.links[:count]])
    paid: Floats = _at(samples, samples.link_bytes[:, :count], edges) @ prices / 1e9
    return paid


def _rate(label: str, records: RequestRecords, chosen: NDArray[np.bool_], edges: Floats) -> PlotLine:
    counts, _ = np.histogram(records.arrival_s[chosen], bins=edges)
    return PlotLine(label, tuple((counts / np.diff(edges)).tolist()))


def _curves(records: RequestRecords, slos: dict[str, Slo], what: str) -> tuple[LatencyCurve, ...]:
    ttft, e2e = records.first_token_s - records.arrival_s, records.finish_s - records.arrival_s
    values = {"ttft": ttft, "tpot": tpot(records), "e2e": e2e}[what]
    if what != "ttft":
        values = np.where(records.outcome == ANSWERED, values, np.nan)
    latency_curves = []
    for index, model in enumerate(records.models):
        own = values[(records.model == index) & ~np.isnan(values)]
        if len(own):
            limit_s = getattr(slos[model], f"{what}_s") if model in slos else None
            latency_curves.append(LatencyCurve(model, curve(own), limit_s))
    return tuple(latency_curves)


def curve(values: Floats, points: int = POINTS) -> tuple[tuple[float, float], ...]:
    """Quantiles of a sample, closer together towards both ends, where it matters."""
    levels = (1 - np.cos(np.linspace(0, np.pi, points))) / 2
    return tuple(zip(np.quantile(values, levels).tolist(), levels.tolist(), strict=True))


def bands(replicas: Sequence[ReplicaRecord], end_s: float, most: int = ROWS) -> tuple[ReplicaBand, ...]:
    chosen = list(range(len(replicas)))
    if len(replicas) > most:
        by_events = sorted(chosen, key=lambda i: (-len(replicas[i].changes), i))
        chosen = sorted(by_events[:most])
    replica_bands = []
    for index in chosen:
        replica = replicas[index]
        spans, lost_s = [], None
        for place, (from_s, state, role) in enumerate(replica.changes):
            after = replica.changes[place + 1 :]
            to_s = after[0][0] if after else end_s
            if state == "lost":
                lost_s = from_s
            if state not in ("lost", "stopped") and min(to_s, end_s) > from_s:
                spans.append((from_s, min(to_s, end_s), state, role))
        what = f"{replica.model}, {' + '.join(replica.nodes)}, {replica.region}"
        replica_bands.append(ReplicaBand(replica.id, what, tuple(spans), lost_s))
    return tuple(replica_bands)


def _heat_maps(result: SimResult, edges: Floats) -> tuple[HeatMap | None, HeatMap | None, HeatMap | None]:
    samples = result.samples
    if samples is None or len(samples.at_s) < 2 or not result.replicas:
        return None, None, None
    count = min(samples.busy_s.shape[1], len(result.replicas))
    replicas = result.replicas[:count]
    rows = _row_groups(replicas)
    labels = tuple(
        replicas[row[0]].id + (f" and {len(row) - 1} more" if len(row) > 1 else "") for row in rows
    )
    there = _presence(replicas, edges)
    busy = _at(samples, samples.busy_s[:, :count], edges)
    use = np.clip(np.diff(busy, axis=0) / np.diff(edges)[:, None], 0.0, 1.0)
    last = np.clip(np.searchsorted(samples.at_s, edges[1:], side="right") - 1, 0, len(samples.at_s) - 1)
    return (
        _heat_map(labels, rows, use, there),
        _heat_map(labels, rows, samples.queued[last, :count].astype(np.float64), there),
        _heat_map(labels, rows, samples.used_share[last, :count], there),
    )


def _at(samples: StateSamples, values: Floats, edges: Floats) -> Floats:
    """A running total at the edges of the bins, between two samples on a straight line."""
    at_s = np.concatenate(([0.0], samples.at_s))
    padded = np.concatenate((np.zeros((1, values.shape[1])), values))
    place = np.clip(np.searchsorted(at_s, edges, side="right"), 1, len(at_s) - 1)
    before, after = at_s[place - 1], at_s[place]
    share = np.where(after > before, (edges - before) / np.where(after > before, after - before, 1.0), 1.0)
    share = np.clip(share, 0.0, 1.0)[:, None]
    result: Floats = padded[place - 1] * (1 - share) + padded[place] * share
    return result


def _presence(replicas: Sequence[ReplicaRecord], edges: Floats) -> NDArray[np.bool_]:
    """Bins x replicas: whether it was ready in any part of the bin."""
    from_s = np.array([np.inf if replica.ready_s is None else replica.ready_s for replica in replicas])
    to_s = np.array([replica.ended_s(float(edges[-1])) for replica in replicas])
    there: NDArray[np.bool_] = (from_s[None, :] < edges[1:, None]) & (to_s[None, :] > edges[:-1, None])
    return there


def _row_groups(replicas: Sequence[ReplicaRecord], most: int = ROWS) -> list[list[int]]:
    """Which replicas share a row: one each, or when there are too many, neighbours of the same template."""
    if len(replicas) <= most:
        return [[i] for i in range(len(replicas))]
    templates: dict[tuple[str, str, str, str], list[int]] = {}
    for index, replica in enumerate(replicas):
        key = (replica.model, replica.region, replica.template, replica.role)
        templates.setdefault(key, []).append(index)
    size = max(1, -(-len(replicas) // max(1, most - len(templates))))
    groups = [members[i : i + size] for members in templates.values() for i in range(0, len(members), size)]
    return groups[: most * 4]


def _heat_map(
    labels: tuple[str, ...], rows: list[list[int]], values: Floats, there: NDArray[np.bool_]
) -> HeatMap:
    cells = []
    for members in rows:
        weight = there[:, members]
        counts = weight.sum(axis=1)
        means = (values[:, members] * weight).sum(axis=1) / np.maximum(counts, 1)
        cells.append(tuple(round(float(m), 3) if c else None for m, c in zip(means, counts, strict=True)))
    return HeatMap(labels, tuple(cells))


def _links(result: SimResult, edges: Floats) -> tuple[PlotLine, ...]:
    samples = result.samples
    if samples is None or len(samples.at_s) < 2 or not result.links:
        return ()
    count = min(samples.link_bytes.shape[1], len(result.links))
    order = sorted(range(count), key=lambda i: (result.links[i].kind != "link", -result.links[i].sent_bytes))
    sent = _at(samples, samples.link_bytes[:, :count], edges)
    plot_lines = []
    for index in [i for i in order if result.links[i].sent_bytes > 0][:MOST_LINKS]:
        link = result.links[index]
        per_s = np.diff(sent[:, index]) / np.diff(edges) * 8 / 1e9
        label = f"{link.source} → {link.target}" if link.kind == "link" else f"card of {link.source}"
        shares = np.clip(per_s / link.gbps, 0.0, 1.0)
        plot_lines.append(PlotLine(f"{label}, {link.gbps:g} Gbps", tuple(shares.round(4).tolist())))
    return tuple(plot_lines)
