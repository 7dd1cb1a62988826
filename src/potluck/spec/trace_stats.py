"""What a trace is like: how fast, how bursty, how long, how much of it is shared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from potluck.spec.traces import Trace

WINDOW_S = 60.0
DAY_S = 86_400.0
LEVELS = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """A length's distribution in tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Rates and burstiness are None where the trace has no times, or fewer than two windows of them."""

    format_name: str
    requests: int
    span_s: float
    rate_per_s: float | None
    gap_cv: float | None
    """Standard deviation over mean of the gaps: 1 is Poisson."""
    window_cv: float | None
    """The same of the counts in whole windows of WINDOW_S."""
    window_peak_to_mean: float | None
    dispersion: float | None
    """Variance over mean of those counts: 1 is Poisson at any rate."""
    input_tokens: LengthSpread
    output_tokens: LengthSpread
    prefix_hit_share: float | None
    empty_outputs: int
    passed_over: int


def trace_stats(trace: Trace) -> TraceStats:
    gaps = np.diff(trace.time_s)
    counts = window_counts(trace.time_s, WINDOW_S)
    mean = float(counts.mean()) if len(counts) >= 2 else 0.0
    return TraceStats(
        trace.format_name,
        len(trace),
        trace.span_s,
        trace.rate_per_s,
        float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None,
        float(counts.std() / mean) if mean else None,
        float(counts.max() / mean) if mean else None,
        float(counts.var() / mean) if mean else None,
        _spread(trace.input_tokens),
        _spread(trace.output_tokens),
        trace.prefix_hit_share,
        trace.empty_outputs,
        trace.passed_over,
    )


def window_counts(time_s: NDArray[np.float64], window_s: float) -> NDArray[np.int64]:
    """Requests in each whole window from the first request on; the last, partial one is left out."""
    since_s = time_s - time_s[0]
    whole = int(since_s[-1] // window_s)
    inside = since_s[since_s < whole * window_s]
    return np.bincount((inside // window_s).astype(np.int64), minlength=whole)


def _spread(tokens: NDArray[np.float64]) -> LengthSpread:
    p50, p90, p99 = (float(value) for value in np.quantile(tokens, LEVELS))
    return LengthSpread(float(tokens.mean()), p50, p90, p99, float(tokens.max()))


def rates_by_hour(trace: Trace, parts: int = 24) -> tuple[float, ...]:
    """Requests a second in equal parts of the day, by the hours the trace covers; empty when it covers too few.

    Times of a trace that has dates are hours of the day (UTC); others count from midnight. Parts that it does not
    reach have the least rate seen.
    """
    part_s = DAY_S / parts
    if trace.span_s < 2 * part_s:
        return ()
    start_s = float(trace.time_s[0]) if trace.time_s[0] > DAY_S * 365 else 0.0
    times = trace.time_s if start_s else trace.time_s - float(trace.time_s[0])
    place = (np.floor(times / part_s) % parts).astype(np.int64)
    counts = np.bincount(place, minlength=parts).astype(np.float64)
    first, last = float(times[0]), float(times[-1])
    edges = np.arange(np.floor(first / part_s), np.floor(last / part_s) + 1)
    held_s = np.zeros(parts)
    for edge in edges:
        held_s[int(edge) % parts] += min((edge + 1) * part_s, last) - max(edge * part_s, first)
    seen = held_s > part_s / 4
    rates = counts[seen] / held_s[seen]
    found = np.full(parts, rates.min())
    found[seen] = rates
    return tuple(found.tolist())
