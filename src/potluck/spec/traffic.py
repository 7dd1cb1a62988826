"""A model's traffic: distributions or a trace become bins of lengths, a rate and a prefix-hit share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import erfc, exp, log, sqrt
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from potluck.core.errors import InputError, did_you_mean
from potluck.core.state.policy import Policy
from potluck.core.values.length_laws import LEAST_MASS, lognormal_from_mean, lognormal_from_quantiles
from potluck.core.values.types import LengthBin, Traffic
from potluck.spec.schema import LengthsIn, ModelIn, OriginIn, TrafficIn
from potluck.spec.spec_problems import Loc, SpecProblems, shown
from potluck.spec.spec_values import ModelSpec
from potluck.spec.traces import Trace, load_trace

TAIL_SIGMAS = 9.0
"""Where an unbounded lognormal is cut: beyond it lies less than a float's last digit."""
MIN_SIGMA = 1e-6
"""Narrower than this is one length."""
MAX_SIGMA = 4.0


def resolve_traffic(
    traffic_in: TrafficIn, model: str, folder: Path, problems: SpecProblems
) -> tuple[Traffic | None, str]:
    """The traffic, and in words where its lengths came from; None when something is wrong with it."""
    if traffic_in.trace is not None:
        return _from_trace(traffic_in, traffic_in.trace, model, folder, problems)
    assert traffic_in.input is not None
    assert traffic_in.output is not None
    inputs = _groups(traffic_in.input, INPUT_GROUPS, (*traffic_in.at, "input"), problems)
    outputs = _groups(traffic_in.output, OUTPUT_GROUPS, (*traffic_in.at, "output"), problems)
    if inputs is None or outputs is None:
        return None, ""
    bins = product_bins(inputs, outputs)
    words = f"{describe(traffic_in.input)} in, {describe(traffic_in.output)} out"
    rate_per_s = (
        max(traffic_in.rate_by_hour or [0.0]) if traffic_in.rate_per_s is None else traffic_in.rate_per_s
    )
    return Traffic(model, rate_per_s, bins, traffic_in.prefix_hit_share or 0.0), words


def _from_trace(
    traffic_in: TrafficIn, trace_path: str, model: str, folder: Path, problems: SpecProblems
) -> tuple[Traffic | None, str]:
    loc = (*traffic_in.at, "trace")
    try:
        trace = load_trace(folder / trace_path)
        bins: tuple[LengthBin, ...] = joint_bins(trace.input_tokens, trace.output_tokens)
    except (OSError, ValueError) as error:
        problems.add(loc, f"cannot be read: {getattr(error, 'strerror', None) or error}")
        return None, ""
    except InputError as error:
        problems.add(loc, str(error))
        return None, ""
    rate_per_s = trace.rate_per_s if traffic_in.rate_per_s is None else traffic_in.rate_per_s
    if traffic_in.rate_per_s is None and traffic_in.rate_by_hour:
        rate_per_s = max(traffic_in.rate_by_hour)
    if rate_per_s is None:
        problems.add(loc, "all its requests come at one moment, so it has no rate; add rate_per_s")
        return None, ""
    share = traffic_in.prefix_hit_share
    if share is None:
        share = trace.prefix_hit_share or 0.0
    return Traffic(model, rate_per_s, bins, share), _trace_words(trace, Path(trace_path).name)


def _trace_words(trace: Trace, name: str) -> str:
    words = f"{trace.format_name} trace {name}, {len(trace):,} requests"
    if trace.empty_outputs:
        words += f" ({trace.empty_outputs:,} without output counted as one token)"
    if trace.format_name == "sharegpt":
        words += ", token counts estimated where not given"
    return words


def _groups(lengths_in: LengthsIn, groups: int, loc: Loc, problems: SpecProblems) -> list[Group] | None:
    try:
        return cut(lengths_in, groups)
    except InputError as error:
        problems.add(loc, str(error))
        return None


def cut(lengths_in: LengthsIn, groups: int) -> list[Group]:
    """A written distribution as (share, mean tokens) groups."""
    if lengths_in.values is not None:
        weights = lengths_in.weights or [1.0] * len(lengths_in.values)
        return cut_values(lengths_in.values, weights, groups)
    if lengths_in.uniform is not None:
        low, high = lengths_in.uniform
        return [(1.0, low)] if low == high else cut_law(uniform(low, high), groups)
    if lengths_in.lognormal is not None:
        law = lengths_in.lognormal
        return cut_law(lognormal(law.mu, law.sigma, law.min, law.max), groups)
    if lengths_in.p50 is not None and lengths_in.p99 is not None:
        middle = lengths_in.p50
        mu, sigma = lognormal_from_quantiles(lengths_in.p50, lengths_in.p99)
    else:
        assert lengths_in.mean is not None
        middle = lengths_in.mean
        mu, sigma = lognormal_from_mean(lengths_in.mean, lengths_in.cv or 0.0)
    if sigma < MIN_SIGMA:
        return [(1.0, middle)]
    if sigma > MAX_SIGMA:
        raise InputError("", "p99 is over 10,000 times p50; check the two")
    low, high = exp(mu - TAIL_SIGMAS * sigma), exp(mu + (TAIL_SIGMAS + sigma) * sigma)
    return cut_law(lognormal(mu, sigma, low, high), groups)


def describe(lengths_in: LengthsIn) -> str:
    if lengths_in.values is not None:
        return f"{len(lengths_in.values)} values"
    if lengths_in.uniform is not None:
        return f"uniform {lengths_in.uniform[0]:g}-{lengths_in.uniform[1]:g}"
    if lengths_in.lognormal is not None:
        law = lengths_in.lognormal
        return f"lognormal({law.mu:g}, {law.sigma:g}) on [{law.min:g}, {law.max:g}]"
    if lengths_in.p50 is not None:
        return f"lognormal p50 {lengths_in.p50:g} p99 {lengths_in.p99:g}"
    return (
        f"fixed {lengths_in.mean:g}"
        if not lengths_in.cv
        else f"lognormal mean {lengths_in.mean:g} cv {lengths_in.cv:g}"
    )


Distances = tuple[tuple[str, float], ...]
"""Region to seconds, there and back."""
WHOLE = 1e-6


def resolve_origins(
    written: Sequence[OriginIn], regions: Sequence[str], problems: SpecProblems
) -> tuple[tuple[str, Distances], ...]:
    """Every place with its distance to every region."""
    result: dict[str, Distances] = {}
    for origin in written:
        if origin.name in result:
            problems.add((*origin.at, "name"), f"duplicate origin {shown(origin.name)}; keep one")
        for region in origin.rtt_ms:
            if regions and region not in regions:
                problem = f"unknown region {shown(region)}{did_you_mean(region, regions)}"
                problems.add((*origin.at, "rtt_ms", region), problem)
        missing = [region for region in regions if region not in origin.rtt_ms]
        if missing:
            problems.add((*origin.at, "rtt_ms"), f"says nothing of {shown(missing[0])}; add it")
        result[origin.name] = tuple((region, ms / 1000) for region, ms in origin.rtt_ms.items())
    return tuple(result.items())


def with_shares(
    written: Sequence[ModelIn],
    models: list[ModelSpec],
    policy: Policy,
    origins: Mapping[str, Distances],
    problems: SpecProblems,
) -> list[ModelSpec]:
    """Models whose traffic knows its classes and origins."""
    classes = [request_class.name for request_class in policy.classes]
    for model_in in written:
        at = model_in.traffic.at
        _check(model_in.traffic.classes, classes, "class", (*at, "classes"), problems)
        _check(model_in.traffic.origins, origins, "origin", (*at, "origins"), problems)
        total = sum(model_in.traffic.origins.values())
        if model_in.traffic.origins and abs(total - 1) > WHOLE:
            problems.add((*at, "origins"), f"shares must add up to 1, not {total:g}")
        if sum(model_in.traffic.classes.values()) > 1 + WHOLE:
            problems.add((*at, "classes"), "shares must not add up to more than 1")
    if problems.found or len(models) != len(written):
        return models
    return [
        replace(
            model,
            traffic=replace(
                model.traffic,
                classes=tuple(model_in.traffic.classes.items()),
                origins=tuple(model_in.traffic.origins.items()),
            ),
        )
        for model_in, model in zip(written, models, strict=True)
    ]


def _check(
    named: Collection[str],
    known: Collection[str],
    what: str,
    at: tuple[str | int, ...],
    problems: SpecProblems,
) -> None:
    for name in named:
        if name not in known:
            problems.add((*at, name), f"unknown {what} {shown(name)}{did_you_mean(name, known)}")


INPUT_GROUPS = 16
OUTPUT_GROUPS = 4
Group = tuple[float, float]
"""(share, mean tokens)"""


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """A continuous law on [low, high]: its F, T and mean."""

    low: float
    high: float
    requests: Callable[[float], float]
    tokens: Callable[[float], float]
    mean: float


def uniform(low: float, high: float) -> LengthLaw:
    """Every length in [low, high] is as likely as any other."""
    return LengthLaw(
        low,
        high,
        lambda x: (x - low) / (high - low),
        lambda x: (x * x - low * low) / (high * high - low * low),
        (low + high) / 2,
    )


def lognormal(mu: float, sigma: float, low: float, high: float) -> LengthLaw:
    """exp(mu + sigma Z) cut to [low, high].

    T needs no integral: weighting a lognormal by its value shifts mu by sigma².
    """

    def between(x: float, shift: float) -> float:
        """Mass of Z in [z(low), z(x)], from the tail that keeps the digits."""
        a, b = (log(low) - mu) / sigma - shift, (log(x) - mu) / sigma - shift
        if a > 0:
            return (erfc(a / sqrt(2)) - erfc(b / sqrt(2))) / 2
        return (erfc(-b / sqrt(2)) - erfc(-a / sqrt(2))) / 2

    mass, token_mass = between(high, 0.0), between(high, sigma)
    if mass < LEAST_MASS or token_mass < LEAST_MASS:
        problem = f"[{low:g}, {high:g}] holds almost none of lognormal({mu:g}, {sigma:g}); widen it"
        raise InputError("", problem)
    mean = exp(mu + sigma * sigma / 2) * token_mass / mass
    return LengthLaw(
        low, high, lambda x: between(x, 0.0) / mass, lambda x: between(x, sigma) / token_mass, mean
    )


def cut_law(law: LengthLaw, groups: int) -> list[Group]:
    """Groups of a continuous law; their means are exact, so they add up to the law's."""
    edges = [law.low, *(_edge(law, i / groups) for i in range(1, groups)), law.high]
    result: list[Group] = []
    for a, b in pairwise(edges):
        share = law.requests(b) - law.requests(a)
        if share <= 0:
            continue
        mean = law.mean * (law.tokens(b) - law.tokens(a)) / share
        # Rounding can push the mean of a tiny group over its own edge.
        result.append((share, min(max(mean, a), b)))
    return _exact(result, law.mean)


def cut_values(values: ArrayLike, weights: ArrayLike, groups: int) -> list[Group]:
    """Groups of a discrete law.

    A law of token counts is cut into groups, and each group is stood for by its mean, so means are kept
    exactly. Where to cut matters: groups of equal probability would lump the long prompts together, which are
    few but carry most tokens. So groups are cut at equal steps of the average of two measures,

        m(x) = (F(x) + T(x)) / 2,    F(x) = share of requests up to x,  T(x) = share of tokens in them,

    and no group of k holds more than 2/k of the requests or 2/k of the tokens (one atom excepted). Input and
    output of a written distribution are independent: bins are INPUT_GROUPS x OUTPUT_GROUPS products. A trace
    is grouped jointly: by input first, then by output within each input group, so correlation survives.
    """
    x, w = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    w = w / w.sum()
    result: list[Group] = []
    for members in split(x, w, groups):
        share = float(w[members].sum())
        if share > 0:
            result.append((share, float((w[members] * x[members]).sum()) / share))
    return result


def split(x: NDArray[np.float64], w: NDArray[np.float64], groups: int) -> list[NDArray[np.intp]]:
    """Positions of the members of each group; equal values always share a group."""
    order = np.argsort(x, kind="stable")
    distinct, inverse = np.unique(x, return_inverse=True)
    weight = np.bincount(inverse, weights=w, minlength=len(distinct))
    measure = (weight / weight.sum() + weight * distinct / (weight * distinct).sum()) / 2
    middle = np.cumsum(measure) - measure / 2
    if len(distinct) <= groups:
        group = np.arange(len(distinct))
    else:
        group = np.minimum((middle * groups).astype(np.intp), groups - 1)
    member = group[inverse][order]
    cuts = np.flatnonzero(np.diff(member)) + 1
    return list(np.split(order, cuts))


def product_bins(inputs: list[Group], outputs: list[Group]) -> tuple[LengthBin, ...]:
    return tuple(LengthBin(i, o, p * q) for p, i in inputs for q, o in outputs)


def joint_bins(inputs: ArrayLike, outputs: ArrayLike) -> tuple[LengthBin, ...]:
    """Bins of requests whose lengths were seen together."""
    x, y = np.asarray(inputs, dtype=np.float64), np.asarray(outputs, dtype=np.float64)
    if len(x) == 0:
        raise InputError("", "has no requests")
    bins: list[LengthBin] = []
    for column in split(x, np.ones(len(x)), INPUT_GROUPS):
        for cell in split(y[column], np.ones(len(column)), OUTPUT_GROUPS):
            chosen = column[cell]
            bins.append(LengthBin(float(x[chosen].mean()), float(y[chosen].mean()), len(chosen) / len(x)))
    return tuple(bins)


def _edge(law: LengthLaw, level: float) -> float:
    """x with m(x) = level, by bisection: 200 halvings reach the last bit of any interval used here."""
    low, high = law.low, law.high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if (law.requests(middle) + law.tokens(middle)) / 2 < level:
            low = middle
        else:
            high = middle
    return high


def _exact(groups: list[Group], mean: float) -> list[Group]:
    """Take the last digits' error out, so that shares add up to 1 and means to the law's mean."""
    total = sum(share for share, _ in groups)
    value = sum(share * tokens for share, tokens in groups) / total
    return [(share / total, tokens * mean / value) for share, tokens in groups]
