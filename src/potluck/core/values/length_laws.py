"""Laws of request lengths as plain values: what a catalog entry or a file says, before anything is drawn from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import erfc, exp, inf, isfinite, log, sqrt

from potluck.core.errors import InputError
from potluck.core.values.types import LengthBin

Z99 = 2.3263478740408408  # Standard normal 99 % quantile.
LEAST_MASS = 1e-6  # Share of a log-normal that its truncation must keep, else it is cut where it hardly is.


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: float

    def __post_init__(self) -> None:
        _at_least_one("tokens", self.tokens)

    @property
    def mean_tokens(self) -> float:
        return self.tokens


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(mu + sigma Z), cut to [low_tokens, high_tokens] (what falls outside is drawn again)."""

    mu: float
    sigma: float
    low_tokens: float = 1.0
    high_tokens: float = inf

    def __post_init__(self) -> None:
        if not (isfinite(self.mu) and isfinite(self.sigma) and self.sigma > 0):
            raise InputError("lognormal: sigma", f"must be positive, is {self.sigma}")
        _at_least_one("lognormal: low_tokens", self.low_tokens)
        if not self.high_tokens > self.low_tokens:
            raise InputError("lognormal: high_tokens", "must be above low_tokens")
        if self.mass < LEAST_MASS:
            problem = f"[{self.low_tokens:g}, {self.high_tokens:g}] holds almost none of it; widen it"
            raise InputError("lognormal", problem)

    @property
    def mass(self) -> float:
        """Share of the uncut law that lies between the bounds."""
        return self._between(0.0)

    @property
    def mean_tokens(self) -> float:
        """Weighting a log-normal by its value shifts mu by sigma², so the cut mean needs no integral."""
        return exp(self.mu + self.sigma**2 / 2) * self._between(self.sigma) / self.mass

    def _between(self, shift: float) -> float:
        a = (log(self.low_tokens) - self.mu) / self.sigma - shift
        b = inf if self.high_tokens == inf else (log(self.high_tokens) - self.mu) / self.sigma - shift
        if a > 0:
            return (erfc(a / sqrt(2)) - erfc(b / sqrt(2))) / 2
        return (erfc(-b / sqrt(2)) - erfc(-a / sqrt(2))) / 2


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A law by its quantiles: lengths spread evenly between neighbours. `points` are (level, tokens)."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if len(self.points) < 2 or self.points[0][0] != 0 or self.points[-1][0] != 1:
            raise InputError("quantiles", "must go from level 0 to level 1")
        _at_least_one("quantiles: tokens", self.points[0][1])
        for (level, tokens), (next_level, next_tokens) in pairwise(self.points):
            if not (next_level > level and next_tokens >= tokens and isfinite(next_tokens)):
                raise InputError("quantiles", "levels must grow and tokens must not fall")

    @property
    def mean_tokens(self) -> float:
        return sum((q - p) * (x + y) / 2 for (p, x), (q, y) in pairwise(self.points))


Law = Fixed | LogNormal | Quantiles


@dataclass(frozen=True, slots=True)
class Independent:
    """Prompt and answer lengths that know nothing of each other."""

    prompt: Law
    output: Law


@dataclass(frozen=True, slots=True)
class Binned:
    """Prompt and answer lengths together, in bins: planning's view of traffic."""

    bins: tuple[LengthBin, ...]
    even: bool = False
    """Each just as often as its share says, not by chance."""

    def __post_init__(self) -> None:
        if not self.bins or not sum(one.share for one in self.bins) > 0:
            raise InputError("lengths", "needs at least one bin with a share")


Lengths = Independent | Binned


def lognormal_from_mean(mean: float, cv: float) -> tuple[float, float]:
    """(mu, sigma) of the uncut log-normal with this mean and coefficient of variation."""
    variance = log(1 + cv * cv)
    return log(mean) - variance / 2, sqrt(variance)


def lognormal_from_quantiles(p50: float, p99: float) -> tuple[float, float]:
    """(mu, sigma) of the uncut log-normal with this median and 99th percentile."""
    return log(p50), log(p99 / p50) / Z99


def _at_least_one(field: str, value: float) -> None:
    if not (isfinite(value) and value >= 1):
        raise InputError(field, f"must be at least 1, is {value}")
