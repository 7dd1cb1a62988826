"""Runs of one's own beside what is predicted for them, and how far plans can be trusted there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path

import click
import numpy as np

from potluck.cli.common.files import option_group
from potluck.cli.engine.run_tables import Placed, placed, read_runs
from potluck.core.errors import InputError
from potluck.core.values.model import Model
from potluck.core.values.plan import Confidence
from potluck.perf.closed_loop import BenchReport, RunWork, run_work, served, together
from potluck.perf.error_bars import METRICS, ErrorBar, ErrorBars, Metric, bar
from potluck.perf.kv_capacity import max_requests, stage_memory
from potluck.perf.operators.calibration import Calibration, bundled, kernels_of, slower_experts
from potluck.perf.step_timer import Floats
from potluck.perf.timers.engine_host import NO_HOST, EngineFit, engines, own_cluster
from potluck.perf.timers.roofline import RooflineTimer, roofline, unmeasured_parts

METRIC_WORDS: dict[Metric, str] = {"rate": "throughput", "ttft": "TTFT", "tpot": "TPOT"}
RUN_KERNELS = "hopper"
"""Of the GPU that engines' runs were measured on."""
WORSE = 0.6
"""With fewer than this share of runs within their bars of 80 %, the bars are not to be trusted."""


RUN_FILES = option_group(
    click.option("--gpu", help="Of runs in files that do not say."),
    click.option("--tp", type=click.IntRange(1), help="Tensor-parallel degree, the same."),
)
"""Options of commands that read runs."""


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
    within: dict[Metric, float]
    """By metric: the share of runs within their bars of 80 %."""
    bias: dict[Metric, float]
    """By metric: the median of predicted / measured - 1."""
    median: dict[Metric, float]
    """By metric: of its absolute value."""
    unmeasured: tuple[str, ...]
    """Operators of the runs that were measured on no GPU, with the GPU."""
    figures: tuple[RunFigure, ...]

    @property
    def holds(self) -> bool:
        """Whether rates are as uncertain as their bars say."""
        return self.within["rate"] >= WORSE


def read_placed(path: Path, gpu: str | None, tp: int | None) -> tuple[list[Placed], int]:
    """A file's runs with what their names mean, and how many rows were left out."""
    told = {name: value for name, value in (("gpu", gpu), ("tp", tp)) if value is not None}
    read = read_runs(path, told)
    try:
        return [placed(run) for run in read.runs], read.left_out
    except InputError as error:
        raise InputError(f"{path.name}: {error.field}", error.problem) from error


def works(placed: Sequence[Placed], calibration: Calibration | None = None, experts: float = 1.0) -> RunWork:
    """The GPU's part of every run, experts so many times as slow."""
    timers: dict[tuple[Model, str, int, str], RooflineTimer] = {}
    if experts != 1.0:
        calibration = slower_experts(bundled() if calibration is None else calibration, experts)
    result = []
    for item in placed:
        run, model, node = item.run, item.model, item.node
        key = (model, node.name, run.tp, run.ep)
        if key not in timers:
            timers[key] = roofline(model, node, run.tp, host=NO_HOST, ep=run.ep, calibration=calibration)
        # Engines take requests in as long as there is room for what is there, so half of an answer counts.
        tokens = run.input_tokens + run.output_tokens / 2
        room = max_requests(model, stage_memory(model, node, run.tp, ep=run.ep), run.tp, tokens, ep=run.ep)
        lengths = (run.concurrency, run.input_tokens, run.output_tokens)
        result.append(run_work(timers[key], model.layer_count, *lengths, room))
    return together(result)


def log_ratios(report: BenchReport, placed: Sequence[Placed]) -> Floats:
    """log(measured time / predicted time), a row for each metric; NaN where nothing was measured."""
    runs = [item.run for item in placed]
    measured = [
        [1.0 / run.requests_per_s for run in runs],
        [run.ttft_s or np.nan for run in runs],
        [run.tpot_s or np.nan for run in runs],
    ]
    predicted = np.stack([1.0 / report.requests_per_s, report.ttft_s, report.tpot_s])
    return np.asarray(np.log(np.asarray(measured, np.float64) / predicted), np.float64)


def usual_fit(placed: Placed) -> EngineFit:
    """Of the same engine and kind of model, that version or the middle; else of any kind; else of vLLM.

    Where one's own cluster is known, its host. Of experts that an engine has on other chips nothing is known.
    """
    run, cluster, known = placed.run, own_cluster(), engines()
    likes = ((run.engine, placed.kind), (run.engine, "dense"), ("vllm", placed.kind))
    wanted = ((*like, version) for like in likes for version in (run.version, ""))
    fits = {(item.engine, item.kind, item.version): item for item in known}
    fit = next(fits[name] for name in wanted if name in fits)
    if cluster is not None:
        client = replace(fit.client, request_s=cluster.host.request_s)
        return replace(fit, host=cluster.host, client=client, experts=1.0)
    return fit if kernels_of(placed.node.gpu) == RUN_KERNELS else replace(fit, experts=1.0)


def verdict(placed: Sequence[Placed]) -> RunVerdict:
    """Runs predicted with the host and client of their engine's version, or of an unknown one."""
    ratios = np.zeros((len(METRICS), len(placed)))
    fits = [usual_fit(item) for item in placed]
    for fit in dict.fromkeys(fits):
        mine = np.array([item == fit for item in fits])
        alike = [placed[int(i)] for i in np.flatnonzero(mine)]
        ratios[:, mine] = log_ratios(served(works(alike, None, fit.experts), fit.host, fit.client), alike)
    figures: list[RunFigure] = []
    within, bias, median = {}, {}, {}
    for m, metric in enumerate(METRICS):
        seen = np.flatnonzero(np.isfinite(ratios[m]))
        if len(seen):
            found = [_figure(metric, int(i), placed[int(i)], float(ratios[m, i])) for i in seen]
            off = np.array([item.predicted / item.measured - 1.0 for item in found])
            within[metric] = round(float(np.mean([item.inside for item in found])), 3)
            bias[metric], median[metric] = (
                round(float(np.median(values)), 3) for values in (off, np.abs(off))
            )
            figures += found
    parts = {
        f"{part} on {item.node.gpu.name}"
        for item in placed
        for part in unmeasured_parts(item.model, item.node.gpu)
    }
    return RunVerdict(len(placed), within, bias, median, tuple(sorted(parts)), tuple(figures))


def _figure(metric: Metric, place: int, placed: Placed, ratio: float) -> RunFigure:
    run, timer = placed.run, roofline(placed.model, placed.node, placed.run.tp, ep=placed.run.ep)
    width = bar_of(metric, placed, timer.confidence)
    if metric == "rate":
        predicted = run.requests_per_s * exp(ratio)
        return RunFigure(place, metric, run.requests_per_s, predicted, *width.around_rate(predicted))
    measured = (run.ttft_s if metric == "ttft" else run.tpot_s) or 0.0
    return RunFigure(place, metric, measured, measured / exp(ratio), *width.around(measured / exp(ratio)))


def bar_of(metric: Metric, placed: Placed, confidence: Confidence, bars: ErrorBars | None = None) -> ErrorBar:
    """The bar of a run's figure."""
    run, gpu = placed.run, placed.node.gpu.name
    load = float(run.concurrency)
    return bar(metric, placed.model, run.tp, gpu, confidence, bars=bars, engine=run.engine, requests=load)
