"""Length distributions as a few bins, without randomness.

A law of token counts is cut into groups, and each group is stood for by its mean, so means are kept
exactly. Where to cut matters: groups of equal probability would lump the long prompts together, which are
few but carry most tokens. So groups are cut at equal steps of the average of two measures,

    m(x) = (F(x) + T(x)) / 2,    F(x) = share of requests up to x,  T(x) = share of tokens in them,

and no group of k holds more than 2/k of the requests or 2/k of the tokens (one atom excepted). Input and
output of a written distribution are independent: bins are INPUT_GROUPS x OUTPUT_GROUPS products. A trace
is grouped jointly: by input first, then by output within each input group, so correlation survives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import erfc, exp, log, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from potluck.core.errors import InputError
from potluck.core.values.length_laws import LEAST_MASS
from potluck.core.values.types import LengthBin

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
    """Groups of a discrete law."""
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
    """Bins of independent input and output lengths."""
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
    found = sum(share * tokens for share, tokens in groups) / total
    return [(share / total, tokens * mean / found) for share, tokens in groups]
