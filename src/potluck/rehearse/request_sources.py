"""Requests of simulation runs by run number: generated at the spec's rates, or pieces of recorded traces.

Generated runs differ by their seed. A recorded trace is cut into pieces by time: runs of the search use the even
pieces, fresh runs the odd ones, which the search has not used. Pieces alternate so that both cover the whole trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from potluck.core.errors import InputError
from potluck.core.values.types import Traffic
from potluck.sim.load.workload import Workload, at_rate, merge, of_traffic

FRESH = 1_000_000  # Runs numbered from here on are fresh: no search run has such a number.

Source = Callable[[int, Collection[str], float], Workload]
"""(run number, models, seconds) to the requests of a run; equal numbers yield equal requests."""


def generated(traffic: Sequence[Traffic], cv: float = 1.0, seed: int = 0) -> Source:
    """A source of generated requests with gamma-distributed gaps of this coefficient of variation (1: Poisson).

    A model's requests do not depend on which other models are in the run.
    """
    active_traffic = [item for item in traffic if item.rate_per_s > 0]
    if not active_traffic:
        raise InputError("traffic", "has no requests to rehearse; give a model a rate_per_s above 0")

    def source(run: int, names: Collection[str], span_s: float) -> Workload:
        return merge(
            [
                of_traffic([item], max(2, round(item.rate_per_s * span_s)), _seed(seed, run, index), cv)
                for index, item in enumerate(active_traffic)
                if item.model in names
            ]
        )

    return source


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


TRACE_PIECES = 10  # Half of them for fresh runs.
MIN_PIECE_REQUESTS = 20


def recorded(
    traces: Mapping[str, Workload], traffic: Sequence[Traffic], cv: float = 1.0, pieces: int = TRACE_PIECES
) -> Source:
    """A source of trace pieces at the traffic's rates; models without a trace get generated requests.

    A run is at most one piece long, and run numbers wrap around after the last piece.
    """
    workloads = {item.model: _fitted(traces[item.model], item) for item in traffic if item.model in traces}
    piece_s = min(workload.span_s for workload in workloads.values()) / pieces
    other_traffic = [item for item in traffic if item.model not in workloads and item.rate_per_s > 0]
    if min(len(workload) for workload in workloads.values()) < pieces * MIN_PIECE_REQUESTS:
        raise InputError(
            "trace", f"is too short to be cut into {pieces} pieces of {MIN_PIECE_REQUESTS} requests or more"
        )

    def source(run: int, names: Collection[str], span_s: float) -> Workload:
        piece = 2 * (run % FRESH % (pieces // 2)) + (run >= FRESH)
        cut_s = min(span_s, piece_s)
        workloads_of_run = [
            _piece(workload, piece * piece_s, cut_s) for name, workload in workloads.items() if name in names
        ]
        if generated_traffic := [item for item in other_traffic if item.model in names]:
            workloads_of_run.append(generated(generated_traffic, cv)(run, names, cut_s))
        return merge(workloads_of_run)

    return source


def _fitted(workload: Workload, traffic: Traffic) -> Workload:
    """A trace at the planned rate; its bursts keep their length."""
    trace_rate = workload.rate_per_s
    if trace_rate is None or abs(trace_rate / traffic.rate_per_s - 1) < 0.01:
        return workload
    return at_rate(workload, traffic.rate_per_s, "superpose")


def _piece(workload: Workload, from_s: float, span_s: float) -> Workload:
    """A piece of a trace, with arrival times from its start."""
    start_s = float(workload.arrival_s[0]) + from_s
    chosen = np.flatnonzero((workload.arrival_s >= start_s) & (workload.arrival_s < start_s + span_s))
    cut = workload.take(chosen)
    return replace(cut, arrival_s=np.asarray(cut.arrival_s - start_s))
