"""Requests for runs by number: made up at the spec's rates, or pieces of recorded traces.

Made-up runs differ by their seed. A recorded trace has happened once, so it is cut in time into pieces: runs of the
search take the even ones, the final ones the odd, which were not looked at before. Pieces alternate so that both see
all hours of the trace.
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
"""The requests of a run by its number, of these models, for so many seconds; the same number, the same requests."""


def made_up(traffic: Sequence[Traffic], cv: float = 1.0, seed: int = 0) -> Source:
    """Every model at its rate, gaps gamma-distributed with this coefficient of variation (1: Poisson).

    A model's requests are the same whichever others are asked for beside it.
    """
    asked = [item for item in traffic if item.rate_per_s > 0]
    if not asked:
        raise InputError("traffic", "has no requests to rehearse; give a model a rate_per_s above 0")

    def source(run: int, names: Collection[str], span_s: float) -> Workload:
        return merge(
            [
                of_traffic([item], max(2, round(item.rate_per_s * span_s)), _seed(seed, run, place), cv)
                for place, item in enumerate(asked)
                if item.model in names
            ]
        )

    return source


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


PIECES, LEAST_PIECE = 10, 20  # Of a trace, half of them for fresh runs; requests of each at least.


def recorded(
    traces: Mapping[str, Workload], traffic: Sequence[Traffic], cv: float = 1.0, pieces: int = PIECES
) -> Source:
    """Traces cut into pieces, at the traffic's rates; models without one are made up for as long.

    Where a run is to be longer than a piece, it is the piece; there are no more runs than pieces.
    """
    fitted = {item.model: _fitted(traces[item.model], item) for item in traffic if item.model in traces}
    piece_s = min(workload.span_s for workload in fitted.values()) / pieces
    others = [item for item in traffic if item.model not in fitted and item.rate_per_s > 0]
    if min(len(workload) for workload in fitted.values()) < pieces * LEAST_PIECE:
        raise InputError(
            "trace", f"is too short to be cut into {pieces} pieces of {LEAST_PIECE} requests or more"
        )

    def source(run: int, names: Collection[str], span_s: float) -> Workload:
        piece = 2 * (run % FRESH % (pieces // 2)) + (run >= FRESH)
        cut_s = min(span_s, piece_s)
        parts = [
            _piece(workload, piece * piece_s, cut_s) for name, workload in fitted.items() if name in names
        ]
        if rest := [item for item in others if item.model in names]:
            parts.append(made_up(rest, cv)(run, names, cut_s))
        return merge(parts)

    return source


def _fitted(workload: Workload, traffic: Traffic) -> Workload:
    """A trace at the rate that is planned for; its bursts keep their length."""
    own = workload.rate_per_s
    if own is None or abs(own / traffic.rate_per_s - 1) < 0.01:
        return workload
    return at_rate(workload, traffic.rate_per_s, "superpose")


def _piece(workload: Workload, from_s: float, span_s: float) -> Workload:
    start_s = float(workload.arrival_s[0]) + from_s
    chosen = np.flatnonzero((workload.arrival_s >= start_s) & (workload.arrival_s < start_s + span_s))
    cut = workload.take(chosen)
    return replace(cut, arrival_s=np.asarray(cut.arrival_s - start_s))
