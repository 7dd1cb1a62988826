"""Requests for runs by number: made up at the spec's rates, or pieces of recorded traces.

Made-up runs differ by their seed. A recorded trace has happened once, so it is cut in time into twice as many
pieces as there are runs of the search: these take the even pieces, the final ones the odd, which were not looked at
before. Pieces alternate so that both see all hours of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from potluck.core.errors import InputError
from potluck.core.values.types import Traffic
from potluck.sim.load.workload import Workload, at_rate, first, merge, of_traffic

FRESH = 1_000_000
"""Runs numbered from here on are fresh: no search run has such a number."""
LEAST_REQUESTS = 300
"""Of the model with the fewest requests, in each run."""
LEAST_SPAN_S = 300.0
"""Of a run: several times as long as the longest answers take, so that batches fill up."""
PER_MODEL, MOST_REQUESTS = 2_000, 40_000

SHORT_REQUESTS, SHORT_LEAST, SHORT_LATE, SHORT_MOST = 1_500, 150, 12, 6_000
"""Of a run of a short rehearsal: usually, of every model, of every model that may be late, and at most."""

Source = Callable[[int], Workload]


def made_up(traffic: Sequence[Traffic], cv: float = 1.0, requests: int | None = None) -> Source:
    """Every model at its rate, gaps gamma-distributed with this coefficient of variation (1: Poisson)."""
    asked = [item for item in traffic if item.rate_per_s > 0]
    count = requests or enough(asked)

    def source(run: int) -> Workload:
        return of_traffic(asked, count, run, cv)

    return source


def enough(traffic: Sequence[Traffic]) -> int:
    """So many requests that the rarest model has a few hundred and the run takes a while, within reason."""
    rates = [item.rate_per_s for item in traffic if item.rate_per_s > 0]
    if not rates:
        raise InputError("traffic", "has no requests to rehearse; give a model a rate_per_s above 0")
    for_all = LEAST_REQUESTS * sum(rates) / min(rates)
    for_long = LEAST_SPAN_S * sum(rates)
    return round(min(max(PER_MODEL * len(rates), for_all, for_long), MOST_REQUESTS))


def few(traffic: Sequence[Traffic], promised: Mapping[str, float]) -> int:
    """Requests of a run that tells, in seconds, whether a plan misses by much: some of every model.

    The more is promised, the more it takes to see it kept: `promised` has the share that must be in time.
    """
    asked = [item for item in traffic if item.rate_per_s > 0]
    rate = sum(item.rate_per_s for item in asked)
    for_all = [short_of(promised.get(item.model, 0.0)) * rate / item.rate_per_s for item in asked]
    return round(min(max([SHORT_REQUESTS, *for_all]), SHORT_MOST))


def short_of(promised: float) -> float:
    """Requests of one model in a short run."""
    return max(SHORT_LEAST, SHORT_LATE / max(1.0 - promised, 1e-3))


def recorded(
    traces: Mapping[str, Workload],
    traffic: Sequence[Traffic],
    runs: int,
    cv: float = 1.0,
    most: int | None = None,
) -> Source:
    """Traces cut into pieces, at the traffic's rates; models without one are made up for as long.

    `most` requests of a piece at most, where it has more: the first of it.
    """
    fitted = {item.model: _fitted(traces[item.model], item) for item in traffic if item.model in traces}
    piece_s = min(made.span_s for made in fitted.values()) / (2 * runs)
    others = [item for item in traffic if item.model not in fitted and item.rate_per_s > 0]
    if min(len(made) for made in fitted.values()) < 2 * runs * 20:
        raise InputError("trace", f"is too short to be cut into {2 * runs} pieces of 20 requests or more")

    def source(run: int) -> Workload:
        fresh = run >= FRESH
        piece = 2 * (run % FRESH % runs) + fresh
        parts = [_piece(made, piece, piece_s) for made in fitted.values()]
        if others:
            rate = sum(item.rate_per_s for item in others)
            parts.append(of_traffic(others, max(1, round(rate * piece_s)), run, cv))
        whole = merge(parts)
        return whole if most is None or len(whole) <= most else first(whole, most)

    return source


def _fitted(made: Workload, traffic: Traffic) -> Workload:
    """A trace at the rate that is planned for; its bursts keep their length."""
    own = made.rate_per_s
    if own is None or abs(own / traffic.rate_per_s - 1) < 0.01:
        return made
    return at_rate(made, traffic.rate_per_s, "superpose")


def _piece(made: Workload, piece: int, piece_s: float) -> Workload:
    start_s = float(made.arrival_s[0]) + piece * piece_s
    chosen = np.flatnonzero((made.arrival_s >= start_s) & (made.arrival_s < start_s + piece_s))
    cut = made.take(chosen)
    return replace(cut, arrival_s=np.asarray(cut.arrival_s - start_s))
