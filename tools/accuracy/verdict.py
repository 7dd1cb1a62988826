"""A table of somebody's own runs beside what is predicted for them, and how far plans can be trusted there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np

from accuracy.closed_loop import served
from accuracy.serving import (
    EngineFit,
    Placed,
    RunScore,
    bar_of,
    log_ratios,
    run_scores,
    works,
)
from potluck.perf.error_bars import METRICS, Metric
from potluck.perf.timers.engine_host import own_cluster
from potluck.perf.timers.roofline import roofline, unmeasured_parts

WORSE = 0.6
"""With fewer than this share of runs within their bars of 80 %, the bars are not to be trusted."""
ASTRAY = 0.15
"""A bias beyond which it should be taken out of plans."""


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """How predictions fare on a table of runs."""

    runs: int
    scores: tuple[RunScore, ...]
    within: dict[str, float]
    """By metric: the share of runs within their bars of 80 %."""
    bias: dict[str, float]
    """By metric: the median of predicted / measured - 1."""
    unmeasured: tuple[str, ...] = ()
    """Parts of the runs that nobody measured on any GPU, with the GPU."""

    @property
    def holds(self) -> bool:
        """Whether rates are as uncertain as their bars say."""
        return self.within["rate"] >= WORSE


def verdict(placed: Sequence[Placed], engines: Sequence[EngineFit]) -> RunVerdict:
    """Runs predicted with the host and client of their engine's version, or of one that nobody saw."""
    ratios = np.zeros((len(METRICS), len(placed)))
    work = works(placed)
    fits = [usual_fit(item, engines) for item in placed]
    for fit in dict.fromkeys(fits):
        mine = np.array([item == fit for item in fits])
        ratios[:, mine] = log_ratios(served(work.where(mine), fit.host, fit.client), placed, mine)
    within: dict[str, float] = {}
    bias: dict[str, float] = {}
    for m, metric in enumerate(METRICS):
        seen = np.flatnonzero(np.isfinite(ratios[m]))
        if len(seen):
            hits = [_hit(metric, placed[int(i)], float(ratios[m, i])) for i in seen]
            within[metric] = round(float(np.mean(hits)), 3)
            off = np.exp(ratios[m, seen] if metric == "rate" else -ratios[m, seen]) - 1.0
            bias[metric] = round(float(np.median(off)), 3)
    parts = {
        f"{part} on {item.node.gpu.name}"
        for item in placed
        for part in unmeasured_parts(item.model, item.node.gpu)
    }
    return RunVerdict(len(placed), run_scores(placed, ratios), within, bias, tuple(sorted(parts)))


def _hit(metric: Metric, each: Placed, ratio: float) -> bool:
    timer = roofline(each.model, each.node, each.run.tp, ep=each.run.ep)
    result = bar_of(metric, each, timer.confidence)
    return log(result.low) <= ratio <= log(result.high)


def usual_fit(placed: Placed, engines: Sequence[EngineFit]) -> EngineFit:
    """Of the same engine and kind of model, that version or the middle; else of any kind; else of vLLM.

    Where one's own cluster is known, its host.
    """
    cluster = own_cluster()
    for like in ((placed.run.engine, placed.kind), (placed.run.engine, "dense"), ("vllm", placed.kind)):
        for version in (placed.run.version, ""):
            if same := [e for e in engines if (e.engine, e.kind, e.version) == (*like, version)]:
                return same[0] if cluster is None else replace(same[0], host=cluster.host)
    return engines[-1]
