"""Host and links fitted to runs of one's own: few figures, each held near what is known until runs say otherwise.

Collectives are a part of every step, so steps are linear in how slow a link is: runs are timed with it as measured
elsewhere and twice as slow, and anything between follows. Errors are told of runs that the fit had not seen:
configurations are dealt into two halves, and each is predicted with what the other one was fitted to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from accuracy.closed_loop import BenchClient, BenchReport, RunWork, served, slowed
from accuracy.serving import WEIGHTS, EngineFit, Placed, log_ratios, works
from potluck.core.errors import InputError
from potluck.perf.error_bars import METRICS
from potluck.perf.operators.calibration import bundled, linked, shipped_calibration
from potluck.perf.operators.network import network_for
from potluck.perf.step_timer import Floats
from potluck.perf.timers.engine_host import EngineHost, OwnCluster

LEAST_RUNS = 8
HELD = (0.1, 0.1, 0.5, 0.2, 0.2, 0.1, 1.0)
"""How hard each figure is held: host (fixed, per sequence, launches), client (burst, ahead, per request), link."""
SLOWEST_LINK = 16.0


@dataclass(frozen=True, slots=True)
class OwnFit:
    """What was fitted, and median errors of runs it had not seen, by metric: as shipped, and then."""

    cluster: OwnCluster
    client: BenchClient
    before: dict[str, float]
    after: dict[str, float]


_Pair = tuple[RunWork, RunWork]
"""Runs with links as measured elsewhere, and twice as slow."""


def fit_cluster(placed: Sequence[Placed], usual: EngineFit) -> OwnFit:
    """The host and link with which predictions are nearest to these runs; what they do not show is as usual."""
    if len(placed) < LEAST_RUNS:
        raise InputError(
            "runs", f"{len(placed)} are too few to fit to; {LEAST_RUNS} are the least, 30 do well"
        )
    kinds = {kind for item in placed if item.run.tp > 1 and (kind := _network(item))}
    base = shipped_calibration()
    slow = linked(base, dict.fromkeys(kinds, 2.0))
    work = works(placed, base, usual.experts), works(placed, slow, usual.experts)
    everyone = np.ones(len(placed), bool)
    half = np.array([crc32(" ".join(item.run.configuration).encode()) % 2 for item in placed])
    before = log_ratios(served(work[0], usual.host, usual.client), placed, everyone)
    after = np.full_like(before, np.nan)
    for side in (0, 1):
        seen = half == side
        if seen.any() and not seen.all():
            values = _fit(work, placed, seen, usual)
            after[:, ~seen] = log_ratios(_report(work, values), placed, everyone)[:, ~seen]
    values = _fit(work, placed, everyone, usual)
    figures = [float(f"{value:.3g}") for value in values]
    host = EngineHost(figures[0], figures[1], figures[2], figures[5])
    links = dict.fromkeys(sorted(kinds), figures[6])
    cluster = OwnCluster(host, links, len(placed), usual.experts)
    return OwnFit(cluster, BenchClient(*figures[3:6]), _medians(before), _medians(after))


def _network(item: Placed) -> str:
    network, _ = network_for(item.node.interconnect, item.run.tp, bundled().networks)
    return "" if network is None else network.kind


def _report(work: _Pair, values: Floats) -> BenchReport:
    return served(slowed(*work, float(values[6])), EngineHost(*values[:3]), BenchClient(*values[3:6]))


def _fit(work: _Pair, placed: Sequence[Placed], seen: np.ndarray, usual: EngineFit) -> Floats:
    from scipy.optimize import least_squares

    host, client = usual.host, usual.client
    known = (host.fixed_s, host.sequence_s, host.launch_s, client.burst, client.ahead, client.request_s, 1.0)
    start = np.log(np.maximum(known, 1e-7))
    everyone = np.ones(len(placed), bool)
    weights = np.array([WEIGHTS[metric] for metric in METRICS])[:, None]

    def misses(logs: Floats) -> Floats:
        ratios = log_ratios(_report(work, np.exp(logs)), placed, everyone)[:, seen]
        return np.concatenate([np.nan_to_num(weights * ratios).ravel(), np.array(HELD) * (logs - start)])

    high = start + np.log(1e3)
    high[6] = np.log(SLOWEST_LINK)
    result = least_squares(
        misses, start, bounds=(start - np.log(1e3), high), loss="soft_l1", f_scale=0.1, diff_step=1e-3
    )
    return np.asarray(np.exp(result.x), np.float64)


def _medians(ratios: Floats) -> dict[str, float]:
    """Of the absolute error, where anything was measured."""
    errors = {m: np.abs(np.expm1(row[np.isfinite(row)])) for m, row in zip(METRICS, ratios, strict=True)}
    return {metric: round(float(np.median(part)), 4) for metric, part in errors.items() if len(part)}
