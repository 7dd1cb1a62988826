"""Whole serving runs: the few figures of an engine and a client that are fitted to them, and what is off then.

Seven figures for each version of an engine and kind of model: its host (fixed, per sequence, launches of a layer:
`perf.timers.host`), how its benchmark's client sends (`closed_loop`), and how slow its experts are beside vLLM's, of
which the tables are. The rest is roofline. Left
out: configurations (model, format, degree, engine, lengths) are dealt into two halves, by a hash of their names;
each half is predicted with what the other one was fitted to. Versions with fewer than LEAST_FITTED runs take the
engine's newest that has more. First tokens are what a server and its client make of them: a version that nobody saw
is taken for the middle of its engine's others; bars count each run twice, once so and once as if it were of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import log
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from accuracy_study.ranking import ranking
from potluck.cli.engine.calibrate import WEIGHTS
from potluck.cli.engine.own_runs import bar_of, log_ratios, works
from potluck.cli.engine.run_tables import Placed
from potluck.perf.closed_loop import RunWork, served, slowed
from potluck.perf.error_bars import (
    LEAST_CONFIGURATIONS,
    LEAST_RUNS,
    METRICS,
    SHARES,
    ErrorBars,
    Group,
    Kind,
    Metric,
    RunErrors,
    first_token_groups,
    step_groups,
)
from potluck.perf.operators.calibration import bundled
from potluck.perf.operators.layer_seconds import units_for
from potluck.perf.operators.layers import step_sums
from potluck.perf.operators.network import network_for
from potluck.perf.step_timer import Floats, steps
from potluck.perf.timers.engine_host import BenchClient, EngineFit, EngineHost

Mask = NDArray[np.bool_]
LEAST_FITTED = 24
"""Runs of a version of an engine that figures of its own are fitted to."""
START = (1e-3, 2e-5, 2e-4, 0.2, 1.0, 0.02)
PULL = 0.2
"""Of each figure to its usual value: not every one shows in every engine's runs."""
FASTEST = 0.75
"""Of what experts were measured to take: then they read their weights at nine tenths of an H100's bandwidth."""
LEAST_READ = 0.9
"""Of the experts that a fair router would choose, what an unfair one has read."""
TTFT = METRICS.index("ttft")
FOLDS = 5
"""Parts that the bars are tried on, each with those of the others."""


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
    ranking: dict[str, float] = field(default_factory=dict)
    """How well predictions choose by cost per token (`ranking.py`)."""


def possible(placed: Placed) -> bool:
    """Whether its GPUs could do a run: answer no faster than their memory gives weights and KV, beside the prompts.

    Not those where requests failed, prefixes were cached or several tokens guessed at once; tables do not say so.
    """
    run, gpu = placed.run, placed.node.gpu
    answering = run.requests_per_s * (run.output_tokens - 1) * (run.tpot_s or np.inf)
    if not np.isfinite(answering):
        return True
    context = answering * (run.input_tokens + run.output_tokens / 2)
    prompt, answers = (
        step_sums(placed.model, batch, run.tp)
        for batch in (steps(float(run.input_tokens)), steps(0.0, 0.0, answering, context))
    )
    rate = max(
        units_for(kind, gpu).flops_per_s for kind in (placed.model.weights_are, placed.model.experts_are)
    )
    left = 1.0 - run.requests_per_s * float(prompt.flops[0]) / rate
    least_s = float(answers.weight_bytes[0] + answers.kv_bytes[0]) / (gpu.bandwidth_gb_per_s * 1e9)
    return left * (run.tpot_s or 0.0) >= LEAST_READ * least_s


def study_runs(
    placed: Sequence[Placed], left_out: int = 0, report_progress: Callable[[str], None] = lambda _: None
) -> tuple[RunStudy, tuple[RunErrors, ...]]:
    """Fit, score what was left out, and see what bars hold and how well one would choose."""

    every = works(placed), works(placed, experts=2.0)
    versions = _versions(placed)
    half = np.array([crc32(" ".join(item.run.configuration).encode()) % 2 for item in placed])
    ratios = np.zeros((len(METRICS), len(placed)))
    engines, likes = [], {}
    for version in _fitted_versions(versions):
        report_progress(f"serving runs of {version}")
        mine = versions == version
        _, engine, number = version.split(" ", 2)
        kind = placed[int(np.flatnonzero(mine)[0])].kind
        engines.append(EngineFit(engine, number, kind, int(mine.sum()), *fit(every, placed, mine)))
        like = likes[version] = np.array([_stand_in(v, versions) == version for v in versions])
        for side in (0, 1):
            seen, left = mine & (half == side), like & (half != side)
            host, client, experts = fit(every, placed, seen)
            report = served(slowed(*every, experts).where(left), host, client)
            ratios[:, left] = log_ratios(report, _of(placed, left))
    unseen = np.full_like(ratios, np.nan)
    for version, fitted in zip(likes, engines, strict=True):
        others = [item for item in engines if item.engine == fitted.engine and item != fitted]
        if others:
            unknown = middle(others, fitted.engine, fitted.kind)
            work = slowed(*every, unknown.experts).where(likes[version])
            report = served(work, unknown.host, unknown.client)
            unseen[TTFT, likes[version]] = log_ratios(report, _of(placed, likes[version]))[TTFT]
    names = dict.fromkeys((item.engine, item.kind) for item in engines)
    engines += [middle(engines, *name) for name in names]
    errors = run_errors(placed, ratios, unseen=unseen)
    held = coverage(placed, ratios, unseen)
    scores, choices = run_scores(placed, ratios), ranking(placed, ratios, run_errors)
    return RunStudy(tuple(engines), scores, held, left_out, ranking=choices), errors


def middle(engines: Sequence[EngineFit], engine: str, kind: Kind) -> EngineFit:
    """A version that nobody saw: the newest one's host, and the mean of all those known as to first tokens."""
    mine = [item for item in engines if item.engine == engine and item.version]
    newest = max(mine, key=lambda item: (item.kind == kind, numbers(item.version)))
    clients = np.array([(item.client.burst, item.client.ahead, item.client.request_s) for item in mine])
    values = (float(f"{value:.3g}") for value in np.exp(np.log(clients).mean(axis=0)))
    runs = sum(item.runs for item in mine)
    return EngineFit(engine, "", kind, runs, newest.host, BenchClient(*values), newest.experts)


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
    every = works(placed, others), works(placed, others, 2.0)
    versions, ratios = _versions(placed), np.zeros((len(METRICS), len(placed)))
    fits = {f"{item.kind} {item.engine} {item.version}": item for item in engines}
    for version in set(versions):
        mine, fitted = versions == version, fits[_stand_in(str(version), versions)]
        report = served(slowed(*every, fitted.experts).where(mine), fitted.host, fitted.client)
        ratios[:, mine] = log_ratios(report, _of(placed, mine))
    result = {}
    for kind in dict.fromkeys(item.kind for item in placed):
        for m, metric in enumerate(METRICS):
            rows = [i for i, item in enumerate(placed) if item.kind == kind and np.isfinite(ratios[m, i])]
            made = [bar_of(metric, placed[i], "transferred", bars) for i in rows]
            held = [np.log(b.low) <= ratios[m, i] <= np.log(b.high) for i, b in zip(rows, made, strict=True)]
            result[f"{kind}, {metric}"] = round(float(np.median(np.abs(np.expm1(ratios[m, rows])))), 4)
            result[f"{kind}, {metric}: within"] = round(float(np.mean(held)), 3)
    return result


def _of(placed: Sequence[Placed], mask: Mask) -> list[Placed]:
    return [item for item, wanted in zip(placed, mask, strict=True) if wanted]


def fit(
    every: tuple[RunWork, RunWork], placed: Sequence[Placed], mask: Mask
) -> tuple[EngineHost, BenchClient, float]:
    """The host, client and slowness of experts with which predictions are nearest to some of the runs.

    `every` has all of them with experts as measured, and twice as slow. What shows in none stays as it is usual; as
    launches show only where they take longest, the fit begins with short and with long ones.
    """
    from scipy.optimize import least_squares

    some, pair = _of(placed, mask), (every[0].where(mask), every[1].where(mask))
    weights = np.array([WEIGHTS[metric] for metric in METRICS])[:, None]
    pull = np.array([PULL] * len(START) + [1.0])
    bounds = [[-np.inf] * len(START) + [log(FASTEST)], [np.inf] * len(START) + [log(1 / FASTEST)]]

    def misses(logs: Floats) -> Floats:
        values = np.exp(logs)
        report = served(slowed(*pair, values[6]), EngineHost(*values[:3]), BenchClient(*values[3:6]))
        ratios = np.nan_to_num(weights * log_ratios(report, some))
        return np.concatenate([ratios.ravel(), pull * (logs - usual)])

    best = None
    for burst, launch_s in product((0.15, 0.9), (START[2], 3 * START[2])):
        usual = np.log([*START[:3], burst, *START[4:], 1.0])
        start = np.log([*START[:2], launch_s, burst, *START[4:], 1.0])
        result = least_squares(misses, start, bounds=bounds, loss="soft_l1", f_scale=0.1, diff_step=1e-3)
        best = result if best is None or result.cost < best.cost else best
    assert best is not None
    values = [float(f"{value:.3g}") for value in np.exp(best.x)]
    return EngineHost(*values[:3]), BenchClient(*values[3:6]), values[6]


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


def _groups(metric: Metric, placed: Placed) -> Iterable[Group]:
    if metric == "ttft":
        return dict.fromkeys(first_token_groups(placed.kind, placed.run.engine, placed.run.concurrency))
    return step_groups(placed.kind, placed.bits, placed.run.tp)


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
