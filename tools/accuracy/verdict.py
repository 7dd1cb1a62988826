"""A table of somebody's own runs beside what is predicted for them, and how far plans can be trusted there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp

import numpy as np

from accuracy.closed_loop import served
from accuracy.serving import EngineFit, Placed, RunScore, bar_of, log_ratios, possible, run_scores, works
from potluck.core.errors import InputError
from potluck.perf.error_bars import METRICS, Metric
from potluck.perf.operators.calibration import kernels_of
from potluck.perf.timers.engine_host import own_cluster
from potluck.perf.timers.roofline import roofline, unmeasured_parts

RUN_KERNELS = "hopper"
"""Of the GPU that engines' runs were measured on."""
WORSE = 0.6
"""With fewer than this share of runs within their bars of 80 %, the bars are not to be trusted."""
ASTRAY = 0.15
"""A bias beyond which it should be taken out of plans."""


@dataclass(frozen=True, slots=True)
class RunFigure:
    """One figure of one run, requests a second or seconds, and the bar of 80 % of what was predicted for it."""

    run: int
    """Which of the table's, from 0."""
    metric: Metric
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


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
    figures: tuple[RunFigure, ...] = ()
    beyond: tuple[int, ...] = ()
    """Runs that are faster than memory allows, so that they are no measure of serving; in `figures` alone."""

    @property
    def holds(self) -> bool:
        """Whether rates are as uncertain as their bars say."""
        return self.within["rate"] >= WORSE


def verdict(placed: Sequence[Placed], engines: Sequence[EngineFit]) -> RunVerdict:
    """Runs predicted with the host and client of their engine's version, or of one that nobody saw."""
    ratios = np.zeros((len(METRICS), len(placed)))
    fits = [usual_fit(item, engines) for item in placed]
    for fit in dict.fromkeys(fits):
        mine = np.array([item == fit for item in fits])
        work = works([item for item, wanted in zip(placed, mine, strict=True) if wanted], None, fit.experts)
        ratios[:, mine] = log_ratios(served(work, fit.host, fit.client), placed, mine)
    counted = np.array([possible(item) for item in placed])
    if not counted.any():
        raise InputError(
            "runs", "all are faster than the memory of their GPUs allows; what did they measure?"
        )
    figures: list[RunFigure] = []
    within: dict[str, float] = {}
    bias: dict[str, float] = {}
    for m, metric in enumerate(METRICS):
        seen = np.flatnonzero(np.isfinite(ratios[m]))
        if len(seen):
            found = [_figure(metric, int(i), placed[int(i)], float(ratios[m, i])) for i in seen]
            figures += found
            found = [item for item in found if counted[item.run]]
            within[metric] = round(float(np.mean([item.inside for item in found])), 3)
            bias[metric] = round(
                float(np.median([item.predicted / item.measured - 1.0 for item in found])), 3
            )
    parts = {
        f"{part} on {item.node.gpu.name}"
        for item in placed
        for part in unmeasured_parts(item.model, item.node.gpu)
    }
    scores = run_scores([placed[int(i)] for i in np.flatnonzero(counted)], ratios[:, counted])
    beyond = tuple(int(i) for i in np.flatnonzero(~counted))
    return RunVerdict(len(placed), scores, within, bias, tuple(sorted(parts)), tuple(figures), beyond)


def _figure(metric: Metric, place: int, each: Placed, ratio: float) -> RunFigure:
    run, timer = each.run, roofline(each.model, each.node, each.run.tp, ep=each.run.ep)
    bar = bar_of(metric, each, timer.confidence)
    if metric == "rate":
        predicted = run.requests_per_s * exp(ratio)
        return RunFigure(place, metric, run.requests_per_s, predicted, *bar.around_rate(predicted))
    measured = (run.ttft_s if metric == "ttft" else run.tpot_s) or 0.0
    return RunFigure(place, metric, measured, measured / exp(ratio), *bar.around(measured / exp(ratio)))


def usual_fit(placed: Placed, engines: Sequence[EngineFit]) -> EngineFit:
    """Of the same engine and kind of model, that version or the middle; else of any kind; else of vLLM.

    Where one's own cluster is known, its host. Of experts that an engine has on other chips nothing is known.
    """
    cluster, alike = own_cluster(), kernels_of(placed.node.gpu) == RUN_KERNELS
    for like in ((placed.run.engine, placed.kind), (placed.run.engine, "dense"), ("vllm", placed.kind)):
        for version in (placed.run.version, ""):
            if same := [e for e in engines if (e.engine, e.kind, e.version) == (*like, version)]:
                if cluster is None:
                    return same[0] if alike else replace(same[0], experts=1.0)
                client = replace(same[0].client, request_s=cluster.host.request_s)
                return replace(same[0], host=cluster.host, client=client, experts=1.0)
    return engines[-1]
