"""How a router's tokens fall on experts, and what that means in tiles.

Routers are not fair: of the experts of one layer some get many times the rows of others. As in the published
measurements, the loads of E experts follow a power law with density x^-a between 1 and 0.8 T (T tokens, each choosing
k); they are scaled to T k rows. a = 0 stands for a router that is fair to the row. With expert parallelism the
busiest rank decides: its load is above the mean by Blom's z, times the deviation of a sum of E / ranks such loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from potluck.perf.step_timer import Floats, once

UNEVEN = 1.01
"""What serving takes for a router: nearly every load equally likely on a logarithmic scale."""
EVEN = 0.0
QUANTILES = 32
"""Loads are followed at so many quantiles, not expert by expert."""
TALL = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class ExpertSpread:
    """What the busiest rank's experts get; an entry of each array is one number of tokens."""

    rows: Floats
    used: Floats
    """Experts with at least one row: their weights are read."""
    tiles: dict[int, Floats]
    """Tiles of so many rows that it takes; a tile has rows of one expert."""


def busiest_share(rows: Floats, ranks: int) -> Floats:
    """The part of all rows that the busiest of some ranks gets, on average, when each row picks one by chance.

    The largest of n normal numbers is about Phi^-1((n - 3/8) / (n + 1/4)) deviations above their mean (Blom); as
    counts add up to a given number they are correlated, which widens it.
    """
    mean = 1.0 / ranks
    deviation = np.sqrt(mean * (1.0 - mean) / np.maximum(rows, 1.0))
    share: Floats = np.minimum(mean + _blom(ranks) * deviation, 1.0)
    return share


def spread(
    tokens: ArrayLike, experts: ArrayLike, active: ArrayLike, ranks: ArrayLike = 1.0, skew: ArrayLike = UNEVEN
) -> ExpertSpread:
    """Loads on the experts of the busiest of `ranks`, each of which has experts / ranks of them whole."""
    chosen, many, per_token, places, power = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(v, np.float64)) for v in (tokens, experts, active, ranks, skew))
    )
    loads = _even(chosen, many, per_token)
    if (power != EVEN).any():
        uneven = _uneven(chosen, many, per_token, places, np.where(power == EVEN, UNEVEN, power))
        loads = np.where((power == EVEN)[:, None], loads, uneven)
    local = np.maximum(many / places, 1.0)
    weight = local / QUANTILES
    rows = np.maximum(loads.sum(axis=1) * weight, 1.0)
    # No token chooses an expert twice, so few tokens touch at least as many experts as each has rows for.
    least = np.minimum(rows / np.maximum(chosen, 1.0), local)
    used = np.maximum((loads >= 0.5).sum(axis=1) * weight, np.maximum(least, 1.0))
    tiles = {tall: np.maximum(np.ceil(loads / tall).sum(axis=1) * weight, used) for tall in TALL}
    return ExpertSpread(rows, used, tiles)


def _even(tokens: Floats, experts: Floats, active: Floats) -> Floats:
    load = (tokens * active / experts)[:, None]
    place = (np.arange(QUANTILES) + 0.5) / QUANTILES
    few = (place[None, :] < load).astype(np.float64)
    result: Floats = np.where(load < 1.0, few, load)
    return result


def _uneven(tokens: Floats, experts: Floats, active: Floats, ranks: Floats, skew: Floats) -> Floats:
    total = tokens * active
    many = total > experts
    low = np.where(many, 1.0, 0.01)[:, None]
    high = np.maximum(np.where(many, 0.8 * tokens, 2.0)[:, None], low * 1.0001)
    place = (np.arange(QUANTILES) + 0.5) / QUANTILES
    power = (1.0 - skew)[:, None]
    drawn = ((high**power - low**power) * place + low**power) ** (1.0 / power)
    loads = drawn / drawn.mean(axis=1, keepdims=True) * (total / experts)[:, None]
    if (ranks > 1).any():
        deviation = loads.std(axis=1) / np.maximum(loads.mean(axis=1), 1e-12)
        blom = {float(n): _blom(float(n)) if n > 1 else 0.0 for n in once(ranks)}
        above = 1.0 + np.array([blom[float(n)] for n in ranks]) * deviation / np.sqrt(
            np.maximum(experts / ranks, 1.0)
        )
        loads = loads * np.minimum(above, ranks)[:, None]
    result: Floats = np.round(loads)
    return result


def _blom(ranks: float) -> float:
    from statistics import NormalDist  # slow to import, and of experts alone

    return float(NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) * (ranks / (ranks - 1)) ** 0.5)
