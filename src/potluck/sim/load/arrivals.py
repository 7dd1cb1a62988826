"""When requests arrive: renewal processes, rates that change over a day, and traces brought to a rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.core.values.length_laws import Binned, Fixed, Law, Lengths, LogNormal

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def gamma(rng: np.random.Generator, rate_per_s: float, cv: float, count: int) -> Floats:
    """Gaps from a gamma law with this coefficient of variation: 1 is Poisson, above it bursts, 0 is a clock."""
    _positive("rate_per_s", rate_per_s)
    return np.cumsum(_gaps(rng, cv, count) / rate_per_s)


def curve(rng: np.random.Generator, rates_per_s: Sequence[float], step_s: float, cv: float = 1.0) -> Floats:
    """Arrivals at rates that hold for `step_s` each, such as the hours of a day.

    A process of rate 1 is run on the clock R(t), the requests expected until t; bursts keep their size in requests.
    """
    _positive("step_s", step_s)
    rates = np.asarray(rates_per_s, dtype=np.float64)
    if len(rates) == 0 or not (np.isfinite(rates).all() and rates.min() >= 0):
        raise InputError("rates_per_s", "must be finite and not negative")
    expected = np.concatenate(([0.0], np.cumsum(rates * step_s)))
    parts, reached = [], 0.0
    while reached < expected[-1]:
        more = int((expected[-1] - reached) * 1.05) + 64
        parts.append(reached + np.cumsum(_gaps(rng, cv, more)))
        reached = float(parts[-1][-1])
    if not parts:
        return np.zeros(0)
    units = np.concatenate(parts)
    units = units[units < expected[-1]]
    # Where the rate is 0 the clock R stands still; side "right" puts nobody there.
    step = np.searchsorted(expected, units, side="right") - 1
    when: Floats = (step + (units - expected[step]) / (rates[step] * step_s)) * step_s
    return when


def stretched(arrival_s: Floats, rate_per_s: float) -> Floats:
    """The same arrivals with all gaps multiplied alike, to this mean rate, from 0 on.

    The pattern of bursts is kept, but they last longer or shorter than they did.
    """
    _positive("rate_per_s", rate_per_s)
    span_s = _span_s(arrival_s)
    when: Floats = (arrival_s - arrival_s[0]) * ((len(arrival_s) - 1) / span_s / rate_per_s)
    return when


def repeated(arrival_s: Floats, count: int) -> tuple[Ints, Floats]:
    """(which request, when) for `count` arrivals: the trace's first ones, or the trace again and again.

    A round follows the one before after the trace's mean gap, so that its rate is kept.
    """
    own = len(arrival_s)
    if own == 0:
        raise InputError("trace", "has no requests")
    start_s = arrival_s - arrival_s[0]
    chosen = np.arange(count)
    period_s = float(start_s[-1]) * own / (own - 1) if own > 1 else 0.0
    return chosen % own, start_s[chosen % own] + (chosen // own) * period_s


def superposed(rng: np.random.Generator, arrival_s: Floats, rate_per_s: float) -> tuple[Ints, Floats]:
    """(which request, when): the trace brought to a rate by thinning or by laying copies over each other.

    The time scale of bursts and of the day is kept. Below the trace's own rate each request stays with the same
    chance. Above it, each copy is turned round by a random time (what leaves at the end enters at the start), the
    last thinned.
    """
    _positive("rate_per_s", rate_per_s)
    own = len(arrival_s)
    span_s = _span_s(arrival_s)
    factor = rate_per_s / ((own - 1) / span_s)
    copies = int(factor)
    start_s, period_s = arrival_s - arrival_s[0], span_s * own / (own - 1)
    chosen, times = [], []
    for copy in range(copies + 1):
        kept = np.arange(own) if copy < copies else np.flatnonzero(rng.random(own) < factor - copies)
        turn_s = 0.0 if copy == 0 else float(rng.random()) * period_s
        chosen.append(kept)
        times.append((start_s[kept] + turn_s) % period_s)
    when = np.concatenate(times)
    order = np.argsort(when, kind="stable")
    return np.concatenate(chosen)[order], when[order]


def _gaps(rng: np.random.Generator, cv: float, count: int) -> Floats:
    """Gaps of mean 1."""
    if not (np.isfinite(cv) and cv >= 0):
        raise InputError("cv", f"must not be negative, is {cv}")
    if cv == 0:
        return np.ones(count)
    if cv == 1:
        return rng.standard_exponential(count)
    shape = 1 / cv**2
    return rng.standard_gamma(shape, count) / shape


def _span_s(arrival_s: Floats) -> float:
    span_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) else 0.0
    if not span_s > 0:
        raise InputError("trace", "all its requests come at one moment, so it has no rate to scale")
    return span_s


def _positive(field: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise InputError(field, f"must be positive, is {value}")


def draw(rng: np.random.Generator, lengths: Lengths, count: int) -> tuple[Ints, Ints]:
    if isinstance(lengths, Binned):
        return draw_bins(rng, lengths, count)
    inputs, outputs = rng.spawn(2)
    return draw_law(inputs, lengths.prompt, count), draw_law(outputs, lengths.output, count)


def draw_law(rng: np.random.Generator, law: Law, count: int) -> Ints:
    if isinstance(law, Fixed):
        return whole(rng, np.full(count, float(law.tokens)))
    if isinstance(law, LogNormal):
        return whole(rng, _lognormal(rng, law, count))
    levels, tokens = np.array(law.points).T
    return whole(rng, np.interp(rng.random(count), levels, tokens))


def draw_bins(rng: np.random.Generator, binned_lengths: Binned, count: int) -> tuple[Ints, Ints]:
    """Each bin as often as its share says, by chance or just so; all of its requests have its mean lengths."""
    share = np.array([one.share for one in binned_lengths.bins])
    share /= share.sum()
    if binned_lengths.even:
        places = (np.arange(count) + rng.random()) / count
        chosen = rng.permutation(np.minimum(np.searchsorted(np.cumsum(share), places), len(share) - 1))
    else:
        chosen = rng.choice(len(share), size=count, p=share)
    inputs = np.array([one.input_tokens for one in binned_lengths.bins])[chosen]
    outputs = np.array([one.output_tokens for one in binned_lengths.bins])[chosen]
    return whole(rng, inputs), whole(rng, outputs)


def whole(rng: np.random.Generator, tokens: Floats) -> Ints:
    """Rounded at random without bias; at least 1."""
    return np.maximum(np.floor(tokens + rng.random(len(tokens))), 1.0).astype(np.int64)


def _lognormal(rng: np.random.Generator, log_normal: LogNormal, count: int) -> Floats:
    """What falls outside the bounds is drawn again; the law makes sure that enough falls inside."""
    drawn = rng.lognormal(log_normal.mu, log_normal.sigma, count)
    outside = np.flatnonzero((drawn < log_normal.low_tokens) | (drawn > log_normal.high_tokens))
    while len(outside):
        # Draw as many as it should take, so that a narrow window needs few rounds.
        tries = min(int(len(outside) / log_normal.mass * 1.1) + 16, 4_000_000)
        again = rng.lognormal(log_normal.mu, log_normal.sigma, tries)
        again = again[(again >= log_normal.low_tokens) & (again <= log_normal.high_tokens)][: len(outside)]
        drawn[outside[: len(again)]] = again
        outside = outside[len(again) :]
    return drawn
