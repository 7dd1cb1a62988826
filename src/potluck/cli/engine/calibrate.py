"""`potluck calibrate`: host and links fitted to runs of one's own, held near what is known until runs say otherwise.

Collectives are a part of every step, so steps are linear in how slow a link is: runs are timed with it as measured
elsewhere and twice as slow, and anything between follows. Errors are told of runs that the fit had not seen:
configurations are dealt into two halves, and each is predicted with what the other one was fitted to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import click
import numpy as np

from potluck.cli.common.render import emit_json, percent, table
from potluck.cli.engine.own_runs import METRIC_WORDS, RUN_FILES, log_ratios, read_placed, usual_fit, works
from potluck.cli.engine.run_tables import Placed
from potluck.cli.engine.score_runs import score_runs
from potluck.core.codec import dumps, encode
from potluck.core.errors import InputError
from potluck.perf.closed_loop import BenchReport, RunWork, served, slowed
from potluck.perf.error_bars import METRICS
from potluck.perf.operators.calibration import bundled, linked, shipped_calibration
from potluck.perf.operators.network import network_for
from potluck.perf.step_timer import Floats
from potluck.perf.timers.engine_host import (
    OWN_FORMAT,
    BenchClient,
    EngineFit,
    EngineHost,
    OwnCluster,
    own_cluster,
    own_path,
)

WEIGHTS = {"rate": 2.0, "tpot": 1.0, "ttft": 0.5}
"""Of errors in a fit: throughput is what is paid for, first tokens depend on the client most."""
MIN_RUNS = 8
HELD = (0.1, 0.1, 0.5, 0.2, 0.2, 0.1, 1.0)
"""How hard each figure is held: host (fixed, per sequence, launches), client (burst, ahead, per request), link."""
SLOWEST_LINK = 16.0
SMALL_MISS, MOST_STEPS = 0.1, 60


@dataclass(frozen=True, slots=True)
class OwnFit:
    """What was fitted, and median errors of runs it had not seen, by metric: as shipped, and then."""

    cluster: OwnCluster
    client: BenchClient
    before: dict[str, float]
    after: dict[str, float]


_Pair = tuple[RunWork, RunWork]
"""Runs with links as measured elsewhere, and twice as slow."""


def fit_cluster(placed: Sequence[Placed], usual_fit: EngineFit) -> OwnFit:
    """The host and link with which predictions are nearest to these runs; what they do not show is as usual."""
    if len(placed) < MIN_RUNS:
        raise InputError("runs", f"{len(placed)} are too few to fit to; {MIN_RUNS} are the least, 30 do well")
    kinds = {kind for item in placed if item.run.tp > 1 and (kind := _network(item))}
    base = shipped_calibration()
    slow = linked(base, dict.fromkeys(kinds, 2.0))
    work = works(placed, base, usual_fit.experts), works(placed, slow, usual_fit.experts)
    half = np.array([crc32(" ".join(item.run.configuration).encode()) % 2 for item in placed])
    before = log_ratios(served(work[0], usual_fit.host, usual_fit.client), placed)
    after = np.full_like(before, np.nan)
    for side in (0, 1):
        seen = half == side
        if seen.any() and not seen.all():
            values = _fit(work, placed, seen, usual_fit)
            after[:, ~seen] = log_ratios(_report(work, values), placed)[:, ~seen]
    values = _fit(work, placed, np.ones(len(placed), bool), usual_fit)
    figures = [float(f"{value:.3g}") for value in values]
    host = EngineHost(figures[0], figures[1], figures[2], figures[5])
    links = dict.fromkeys(sorted(kinds), figures[6])
    cluster = OwnCluster(host, links, len(placed), usual_fit.experts)
    return OwnFit(cluster, BenchClient(*figures[3:6]), _medians(before), _medians(after))


def _network(placed: Placed) -> str:
    network, _ = network_for(placed.node.interconnect, placed.run.tp, bundled().networks)
    return "" if network is None else network.kind


def _report(work: _Pair, values: Floats) -> BenchReport:
    return served(slowed(*work, float(values[6])), EngineHost(*values[:3]), BenchClient(*values[3:6]))


def _fit(work: _Pair, placed: Sequence[Placed], seen: np.ndarray, usual_fit: EngineFit) -> Floats:
    host, client = usual_fit.host, usual_fit.client
    known = (host.fixed_s, host.sequence_s, host.launch_s, client.burst, client.ahead, client.request_s, 1.0)
    start = np.log(np.maximum(known, 1e-7))
    weights = np.array([WEIGHTS[metric] for metric in METRICS])[:, None]

    def misses(logs: Floats) -> Floats:
        ratios = log_ratios(_report(work, np.exp(logs)), placed)[:, seen]
        return np.concatenate([np.nan_to_num(weights * ratios).ravel(), np.array(HELD) * (logs - start)])

    far = np.log([1e3] * (len(start) - 1) + [SLOWEST_LINK])
    return np.asarray(np.exp(nearest(misses, start, start - far, start + far)), np.float64)


def nearest(misses: Callable[[Floats], Floats], start: Floats, low: Floats, high: Floats) -> Floats:
    """Where misses are least (Levenberg-Marquardt); beyond SMALL_MISS they count as they are, not by their square."""

    def loss(off: Floats) -> float:
        return float(np.sqrt(1.0 + (off / SMALL_MISS) ** 2).sum())

    at, damping = start, 1e-2
    off = misses(at)
    for _ in range(MOST_STEPS):
        slopes = np.stack([(misses(at + move) - off) / 1e-3 for move in 1e-3 * np.eye(len(at))], axis=1)
        weighed = slopes / np.sqrt(1.0 + (off / SMALL_MISS) ** 2)[:, None]
        square = weighed.T @ slopes
        step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-6), -weighed.T @ off)
        tried = np.clip(at + step, low, high)
        there = misses(tried)
        if loss(there) < loss(off) * (1.0 - 1e-6):
            at, off, damping = tried, there, damping / 3
        else:
            damping *= 10
    return at


def _medians(ratios: Floats) -> dict[str, float]:
    """Of the absolute error, where anything was measured."""
    errors = {m: np.abs(np.expm1(row[np.isfinite(row)])) for m, row in zip(METRICS, ratios, strict=True)}
    return {metric: round(float(np.median(part)), 4) for metric, part in errors.items() if len(part)}


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@RUN_FILES
@click.option("--score", is_flag=True, help="Fit nothing; show how far predictions are from these runs.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the fit there instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def calibrate(
    runs: tuple[Path, ...], gpu: str | None, tp: int | None, score: bool, out: Path | None, as_json: bool
) -> None:
    """Fit an engine's host and the GPUs' links to your own serving runs; every command uses the fit from then on.

    RUNS are tables (CSV, JSON, Parquet), results of vLLM's `bench serve --save-result` or aiperf's JSON: about 30
    runs, at low and at high concurrency. The fit is kept in ~/.config/potluck/cluster.json; remove the file to
    discard it. With --score nothing is fitted; the exit code is 1 where the error bars of predictions do not hold.

    \b
    Examples:
      potluck calibrate runs.csv --score
      potluck calibrate runs.csv
      potluck calibrate results/*.json --gpu H200 --tp 4
    """
    if score and out is not None:
        raise click.UsageError("--out goes with a fit, not with --score")
    tables = [read_placed(path, gpu, tp) for path in runs]
    placed_runs = [placed for table_runs, _ in tables for placed in table_runs]
    if score:
        left_out = sum(count for _, count in tables)
        holds = score_runs([path.name for path in runs], placed_runs, left_out, as_json)
        raise SystemExit(0 if holds else 1)
    found = fit_cluster(placed_runs, usual_fit(placed_runs[0]))
    path = out or own_path()
    if path is None:
        raise InputError("--out", "is needed: there is no home to keep it in")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dumps(found.cluster, format_name=OWN_FORMAT, version=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), f"cannot be written ({error.strerror})") from error
    own_cluster.cache_clear()
    if as_json:
        emit_json({"file": str(path), "found": encode(found)})
        return
    rows = [
        (words, percent(found.before[m]), percent(found.after[m]))
        for m, words in METRIC_WORDS.items()
        if m in found.after
    ]
    table(f"{len(placed_runs)} runs: median error of runs left out", ("figure", "before", "calibrated"), rows)
    host = found.cluster.host
    click.echo(
        f"Host: {host.fixed_s * 1e3:.2f} ms a step, {host.sequence_s * 1e6:.0f} µs a sequence, "
        f"{host.request_s * 1e3:.0f} ms a request."
    )
    for kind, times in found.cluster.links.items():
        click.echo(f"Collectives over {kind}: {times:.2f} times as long as measured elsewhere.")
    use = "every command uses it" if out is None else f"used once it is {own_path()}"
    click.echo(f"Kept in {path}; {use}.")
