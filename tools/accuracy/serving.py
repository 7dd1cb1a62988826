"""Whole serving runs: the few figures of an engine and a client that are fitted to them, and what is off then.

Six figures for each version of an engine and kind of model: its host (fixed, per sequence, launches of a layer:
`perf.timers.host`), and how its benchmark's client sends (`closed_loop`). The rest is roofline. Left
out: configurations (model, format, degree, engine, lengths) are dealt into two halves, by a hash of their names;
each half is predicted with what the other one was fitted to. Versions with fewer than LEAST_FITTED runs take the
engine's newest that has more. First tokens are what a server and its client make of them: a version that nobody saw
is taken for the middle of its engine's others; bars count each run twice, once so and once as if it were of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from accuracy.closed_loop import BenchClient, BenchReport, RunWork, run_work, served, together
from accuracy.runs import MeasuredRun
from potluck.core.values.model import Model
from potluck.core.values.plan import Confidence
from potluck.core.values.types import NodeType
from potluck.perf.error_bars import (
    LEAST_CONFIGURATIONS,
    LEAST_RUNS,
    METRICS,
    SHARES,
    ErrorBar,
    ErrorBars,
    Group,
    Kind,
    Metric,
    RunErrors,
    bar,
    bits_of,
    first_token_groups,
    kind_of,
    step_groups,
)
from potluck.perf.kv_capacity import max_requests, stage_memory
from potluck.perf.operators.calibration import Calibration, bundled
from potluck.perf.operators.network import network_for
from potluck.perf.step_timer import Floats
from potluck.perf.timers.engine_host import NO_HOST, EngineHost
from potluck.perf.timers.roofline import RooflineTimer, roofline

Mask = NDArray[np.bool_]
WEIGHTS = {"rate": 2.0, "tpot": 1.0, "ttft": 0.5}
"""Of their errors in the fit: throughput is what is paid for, first tokens depend on the client most."""
LEAST_FITTED = 24
"""Runs of a version of an engine that figures of its own are fitted to."""
START = (1e-3, 2e-5, 2e-4, 0.2, 1.0, 0.02)
PULL = 0.2
"""Of each figure to its usual value: not every one shows in every engine's runs."""
TTFT = METRICS.index("ttft")
FOLDS = 5
"""Parts that the bars are tried on, each with those of the others."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A run with what its names mean."""

    run: MeasuredRun
    model: Model
    node: NodeType

    @property
    def kind(self) -> Kind:
        return kind_of(self.model)

    @property
    def bits(self) -> int:
        return round(bits_of(self.model))


@dataclass(frozen=True, slots=True)
class EngineFit:
    """What was fitted to the runs of one version of an engine."""

    engine: str
    version: str
    kind: Kind
    runs: int
    host: EngineHost
    client: BenchClient


@dataclass(frozen=True, slots=True)
class RunScore:
    """Errors of runs that the fit had not seen."""

    metric: Metric
    kind: str
    gpu: str
    engine: str
    bits: int
    tp: int
    runs: int
    median: float
    """Of the absolute percentage error."""
    bias: float
    """Median of predicted / measured - 1."""
    p90: float


@dataclass(frozen=True, slots=True)
class RunStudy:
    """All that was learnt from serving runs."""

    engines: tuple[EngineFit, ...]
    scores: tuple[RunScore, ...]
    coverage: dict[str, float]
    """Share of runs within a bar of 80 % that was made without them, by metric, and by metric and kind."""
    left_out: int = 0
    """Rows of the table that no run was made of."""
    carried: dict[str, float] = field(default_factory=dict)
    """With the GPU's operators left out: by kind and metric the median error, and the share within bars of 80 %."""


def works(placed: Sequence[Placed], calibration: Calibration | None = None) -> RunWork:
    """The GPU's part of every run."""
    timers: dict[tuple[Model, str, int, str], RooflineTimer] = {}
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


def study_runs(
    placed: Sequence[Placed], left_out: int = 0, said: Callable[[str], None] = lambda _: None
) -> tuple[RunStudy, tuple[RunErrors, ...]]:
    """Fit, score what was left out, and see what bars hold."""
    work = works(placed)
    versions = _versions(placed)
    half = np.array([crc32(" ".join(item.run.configuration).encode()) % 2 for item in placed])
    ratios = np.zeros((len(METRICS), len(placed)))
    engines, likes = [], {}
    for version in _fitted_versions(versions):
        said(f"serving runs of {version}")
        mine = versions == version
        host, client = fit(work.where(mine), [p.run for p, m in zip(placed, mine, strict=True) if m])
        _, engine, number = version.split(" ", 2)
        kind = placed[int(np.flatnonzero(mine)[0])].kind
        engines.append(EngineFit(engine, number, kind, int(mine.sum()), host, client))
        like = likes[version] = np.array([_stand_in(v, versions) == version for v in versions])
        for side in (0, 1):
            seen, left = mine & (half == side), like & (half != side)
            pair = fit(work.where(seen), [p.run for p, m in zip(placed, seen, strict=True) if m])
            ratios[:, left] = log_ratios(served(work.where(left), *pair), placed, left)
    unseen = np.full_like(ratios, np.nan)
    for version, fitted in zip(likes, engines, strict=True):
        others = [item for item in engines if item.engine == fitted.engine and item != fitted]
        if others:
            unknown = middle(others, fitted.engine, fitted.kind)
            report = served(work.where(likes[version]), unknown.host, unknown.client)
            unseen[TTFT, likes[version]] = log_ratios(report, placed, likes[version])[TTFT]
    names = dict.fromkeys((item.engine, item.kind) for item in engines)
    engines += [middle(engines, *name) for name in names]
    errors = run_errors(placed, ratios, unseen=unseen)
    held = coverage(placed, ratios, unseen)
    return RunStudy(tuple(engines), run_scores(placed, ratios), held, left_out), errors


def middle(engines: Sequence[EngineFit], engine: str, kind: Kind) -> EngineFit:
    """A version that nobody saw: the newest one's host, and the mean of all those known as to first tokens."""
    mine = [item for item in engines if item.engine == engine and item.version]
    newest = max(mine, key=lambda item: (item.kind == kind, numbers(item.version)))
    clients = np.array([(item.client.burst, item.client.ahead, item.client.request_s) for item in mine])
    values = (float(f"{value:.3g}") for value in np.exp(np.log(clients).mean(axis=0)))
    return EngineFit(engine, "", kind, sum(item.runs for item in mine), newest.host, BenchClient(*values))


def carried_over(placed: Sequence[Placed], engines: Sequence[EngineFit], bars: ErrorBars) -> dict[str, float]:
    """Runs predicted as if nobody had measured an operator of their GPU, nor collectives over its link."""
    known, gpu = bundled(), placed[0].node.gpu.name
    link, _ = network_for(placed[0].node.interconnect, 8, known.networks)
    others = replace(
        known,
        gpus=tuple(item for item in known.gpus if item.gpu != gpu),
        specs=tuple(item for item in known.specs if item.name != gpu),
        networks=tuple(item for item in known.networks if item != link),
    )
    work, versions, ratios = works(placed, others), _versions(placed), np.zeros((len(METRICS), len(placed)))
    fits = {f"{item.kind} {item.engine} {item.version}": item for item in engines}
    for version in set(versions):
        mine, fitted = versions == version, fits[_stand_in(str(version), versions)]
        ratios[:, mine] = log_ratios(served(work.where(mine), fitted.host, fitted.client), placed, mine)
    result = {}
    for kind in dict.fromkeys(item.kind for item in placed):
        for m, metric in enumerate(METRICS):
            rows = [i for i, item in enumerate(placed) if item.kind == kind and np.isfinite(ratios[m, i])]
            made = [bar_of(metric, placed[i], "transferred", bars) for i in rows]
            held = [np.log(b.low) <= ratios[m, i] <= np.log(b.high) for i, b in zip(rows, made, strict=True)]
            result[f"{kind}, {metric}"] = round(float(np.median(np.abs(np.expm1(ratios[m, rows])))), 4)
            result[f"{kind}, {metric}: within"] = round(float(np.mean(held)), 3)
    return result


def fit(work: RunWork, runs: Sequence[MeasuredRun]) -> tuple[EngineHost, BenchClient]:
    """The host and client with which predictions are nearest to these runs."""
    from scipy.optimize import least_squares

    measured = {metric: _measured(runs, metric) for metric in METRICS}

    def misses(logs: Floats) -> Floats:
        values = np.exp(logs)
        times = _times(served(work, EngineHost(*values[:3]), BenchClient(*values[3:])))
        parts = [WEIGHTS[m] * np.nan_to_num(np.log(times[m] / measured[m])) for m in METRICS]
        return np.concatenate([*parts, PULL * (logs - usual)])

    best = None
    for burst in (0.15, 0.9):
        usual = np.log([*START[:3], burst, *START[4:]])
        result = least_squares(misses, usual, loss="soft_l1", f_scale=0.1, diff_step=1e-3)
        best = result if best is None or result.cost < best.cost else best
    assert best is not None
    values = [float(f"{value:.3g}") for value in np.exp(best.x)]
    return EngineHost(*values[:3]), BenchClient(*values[3:])


def log_ratios(bench_report: BenchReport, placed: Sequence[Placed], mask: Mask) -> Floats:
    """log(measured time / predicted time) for every metric; NaN where nothing was measured."""
    runs = [item.run for item, wanted in zip(placed, mask, strict=True) if wanted]
    times = _times(bench_report)
    return np.stack([np.log(_measured(runs, metric) / times[metric]) for metric in METRICS])


def run_scores(placed: Sequence[Placed], ratios: Floats) -> tuple[RunScore, ...]:
    """By kind, engine, format and degree, and over all of them."""
    groups: dict[tuple[str, str, str, int, int], list[int]] = {}
    for i, item in enumerate(placed):
        run, gpu = item.run, item.node.gpu.name
        keys = [
            (item.kind, gpu, run.engine, item.bits, run.tp),
            (item.kind, gpu, "", 0, 0),
            ("", gpu, "", 0, run.tp),
        ]
        for key in keys:
            groups.setdefault(key, []).append(i)
    result = []
    for (kind, gpu, engine, bits, tp), rows in sorted(groups.items()):
        for m, metric in enumerate(METRICS):
            part = ratios[m, rows]
            part = part[np.isfinite(part)]
            if not len(part):
                continue
            off = np.exp(-part) - 1.0 if metric != "rate" else np.exp(part) - 1.0
            median, p90 = np.quantile(np.abs(off), [0.5, 0.9])
            figures = (round(float(v), 4) for v in (median, np.median(off), p90))
            result.append(RunScore(metric, kind, gpu, engine, bits, tp, len(part), *figures))
    return tuple(result)


def run_errors(
    placed: Sequence[Placed], ratios: Floats, mask: Mask | None = None, unseen: Floats | None = None
) -> tuple[RunErrors, ...]:
    """Quantiles of every group that has runs and configurations enough; `unseen` has further ratios of these runs."""
    result = []
    for m, metric in enumerate(METRICS):
        groups: dict[Group, list[int]] = {}
        for i, item in enumerate(placed):
            if mask is None or mask[i]:
                for key in _groups(metric, item):
                    groups.setdefault(key, []).append(i)
        for key, rows in sorted(groups.items()):
            configurations = {placed[i].run.configuration for i in rows}
            enough = len(rows) >= LEAST_RUNS and len(configurations) >= LEAST_CONFIGURATIONS
            part, count = ratios[m, rows], int(np.isfinite(ratios[m, rows]).sum())
            if unseen is not None:
                part = np.concatenate([part, unseen[m, rows]])
            part = part[np.isfinite(part)]
            # An engine of which one version is known says nothing of the next.
            enough &= not key[3] or len(part) > count
            if count and (enough or not any(key)):
                at = tuple(round(float(v), 4) for v in np.quantile(part, _widened(len(configurations))))
                result.append(RunErrors(metric, *key[:3], count, at, *key[3:]))
    return tuple(result)


def _groups(metric: Metric, item: Placed) -> Iterable[Group]:
    if metric == "ttft":
        return dict.fromkeys(first_token_groups(item.kind, item.run.engine, item.run.concurrency))
    return step_groups(item.kind, item.bits, item.run.tp)


def _widened(configurations: int) -> Floats:
    """SHARES as a new configuration sees them: of n that are alike and one more, it is as often the outermost."""
    shares = np.asarray(SHARES)
    wider = (shares - 0.5) * (configurations + 1) / configurations + 0.5
    return np.clip(wider, 0.0, 1.0)


def coverage(placed: Sequence[Placed], ratios: Floats, unseen: Floats | None = None) -> dict[str, float]:
    """Of left-out runs, how many lie within the bar of 80 % that errors of other configurations make."""
    fold = np.array([crc32(" ".join(reversed(entry.run.configuration)).encode()) % FOLDS for entry in placed])
    inside: dict[str, list[bool]] = {}
    for k in range(FOLDS):
        made = ErrorBars(placed[0].node.gpu.name, run_errors(placed, ratios, fold != k, unseen), {})
        for i in np.flatnonzero(fold == k):
            item = placed[int(i)]
            for m, metric in enumerate(METRICS):
                tried = [ratios[m, i], *([] if unseen is None else [unseen[m, i]])]
                for ratio in (value for value in tried if np.isfinite(value)):
                    within = bar_of(metric, item, "measured", made)
                    hit = bool(np.log(within.low) <= ratio <= np.log(within.high))
                    for name in (metric, f"{metric}, {item.kind}"):
                        inside.setdefault(name, []).append(hit)
    return {name: round(float(np.mean(hits)), 3) for name, hits in sorted(inside.items())}


def bar_of(metric: Metric, item: Placed, confidence: Confidence, bars: ErrorBars | None = None) -> ErrorBar:
    """The bar of a run's figure."""
    model, run, gpu = item.model, item.run, item.node.gpu.name
    under_way = {"engine": run.engine, "requests": run.concurrency}
    return bar(metric, model, run.tp, gpu, confidence, bars=bars, **under_way)  # type: ignore[arg-type]


def _times(bench_report: BenchReport) -> dict[Metric, Floats]:
    return {
        "rate": 1.0 / bench_report.requests_per_s,
        "ttft": bench_report.ttft_s,
        "tpot": bench_report.tpot_s,
    }


def _measured(runs: Sequence[MeasuredRun], metric: Metric) -> Floats:
    values = {
        "rate": [1.0 / run.requests_per_s for run in runs],
        "ttft": [run.ttft_s or np.nan for run in runs],
        "tpot": [run.tpot_s or np.nan for run in runs],
    }
    return np.asarray(values[metric], np.float64)


def numbers(version: str) -> tuple[int, ...]:
    """A version's numbers, in order; one that is not told comes first."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _versions(placed: Sequence[Placed]) -> NDArray[np.str_]:
    """Kind of model, engine and version of each run; where none is told, the newest of the engine's that are."""
    newest: dict[str, str] = {}
    for run in (item.run for item in placed):
        newest[run.engine] = max(newest.get(run.engine, ""), run.version, key=numbers)
    return np.array([f"{p.kind} {p.run.engine} {p.run.version or newest[p.run.engine]}" for p in placed])


def _fitted_versions(versions: NDArray[np.str_]) -> list[str]:
    return [str(v) for v in sorted(set(versions)) if (versions == v).sum() >= LEAST_FITTED]


def _stand_in(version: str, versions: NDArray[np.str_]) -> str:
    """Itself, or the newest version of its engine that has runs enough, or the newest of all."""
    known = _fitted_versions(versions)
    if version in known:
        return version
    kind, engine, _ = version.split(" ", 2)
    for like in (f"{kind} {engine} ", f"dense {engine} ", ""):
        if result := [item for item in known if item.startswith(like)]:
            return max(result, key=numbers)
    raise AssertionError(version)
