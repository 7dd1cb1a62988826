"""How strict the objective could have been: attainment against SLO scale, from one run.

A request keeps an objective that is s times as long from

    s = max(TTFT / slo.ttft_s, TPOT / slo.tpot_s, E2E / slo.e2e_s)

on, each part alone likewise. So one run answers for every scale: attainment at s is the share of requests whose own
scale is at most s, and the least scale that attains a share is a quantile. Refused requests are within no scale;
those that are still open or were cancelled are left out. Rules that look at the objective decided by the one in
force, above all admission, so scan with `admission=false`; another run with `--slo-scale` lets them decide anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from potluck.sim.results.metrics import Floats, limits_of, tpot
from potluck.sim.results.records import ANSWERED, REFUSED, SimResult

SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
LEVELS = (0.9, 0.99)
"""Shares whose least scale is told, THUNDERSERVE's two."""


@dataclass(frozen=True, slots=True)
class ScalePart:
    """One objective, or all at once."""

    name: str
    attainment: tuple[float, ...]
    """At each of the scan's scales."""
    least: tuple[float | None, ...]
    """Scale from which each of `LEVELS` is attained; None: at no scale, since too many were refused."""


@dataclass(frozen=True, slots=True)
class ScaleScan:
    """Attainment against SLO scale."""

    requests: int
    scales: tuple[float, ...]
    levels: tuple[float, ...]
    parts: tuple[ScalePart, ...]


def scan(result: SimResult, warm_up_s: float = 0.0, scales: tuple[float, ...] = SCALES) -> ScaleScan:
    """Of all requests to which something was promised, each against its own objective."""
    records = result.records
    promised, limits_s = limits_of(records, result.slos, result.classes)
    answered, refused = records.outcome == ANSWERED, records.outcome == REFUSED
    counted = promised & (answered | refused) & (records.arrival_s >= warm_up_s)
    times_s = (
        records.first_token_s - records.arrival_s,
        np.where(records.streamed_tokens > 1, tpot(records), 0.0),
        records.finish_s - records.arrival_s,
    )
    own = [
        np.where(answered, seconds / limit_s, inf)[counted]
        for seconds, limit_s in zip(times_s, limits_s, strict=True)
    ]
    parts = {"TTFT": own[0], "TPOT": own[1]}
    if bool((limits_s[2][counted] < inf).any()):
        parts["E2E"] = own[2]
    parts["all"] = np.maximum.reduce(own)
    found = tuple(_part(name, np.sort(values), scales) for name, values in parts.items())
    return ScaleScan(int(counted.sum()), scales, LEVELS, found)


def _part(name: str, ranked: Floats, scales: tuple[float, ...]) -> ScalePart:
    count = len(ranked)
    shares = np.searchsorted(ranked, scales, side="right") / max(count, 1)
    least = [float(ranked[ceil(level * count - 1e-9) - 1]) if count else inf for level in LEVELS]
    return ScalePart(name, tuple(shares.tolist()), tuple(None if s == inf else s for s in least))
