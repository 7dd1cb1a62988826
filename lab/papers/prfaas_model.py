"""How much prefill to send to another datacenter: PrfaaS's throughput model (its section 3.4) and its optimum.

A site of N_prfaas prefill instances serves prompts longer than a threshold t; the local cluster prefills the rest on
N_p instances and decodes everything on N_d. With L the prompt's length, p = P(L > t), and l_long, l_short the means
above and below t (equations 3 to 6):

    Θ_prfaas = min(N_prfaas / T_remote(l_long), B_out / S_kv(l_long))        compute, or egress
    Θ_pd-p   = N_p / T_local(l_short)
    Θ_pd-d   = N_d / T_hold                                                 T_hold = T_decode L_out / BS_max
    Λ_max    = min(Θ_prfaas / p, Θ_pd-p / (1 - p), Θ_pd-d)

As t falls Θ_prfaas / p falls and Θ_pd-p / (1 - p) rises, so for each split of the local cluster the best t is where
they meet (equation 7), and the best split is where producers match the consumer (equation 8). Both are found by
trying every length at hand as t and every split.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import erf, sqrt

import numpy as np
from numpy.typing import ArrayLike

from potluck.core.errors import InputError
from potluck.perf.step_timer import Floats


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure measured at some prompt lengths, linear between them and beyond."""

    tokens: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.values) or len(self.tokens) < 2:
            raise InputError("curve", "needs as many values as lengths, and at least two")
        if any(b <= a for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise InputError("curve: tokens", "must increase")

    def at(self, tokens: ArrayLike) -> Floats:
        x, y = np.asarray(self.tokens), np.asarray(self.values)
        wanted = np.asarray(tokens, np.float64)
        inside = np.interp(wanted, x, y)
        above = y[-1] + (wanted - x[-1]) * (y[-1] - y[-2]) / (x[-1] - x[-2])
        below = np.maximum(y[0] + (wanted - x[0]) * (y[1] - y[0]) / (x[1] - x[0]), 0.0)
        return np.asarray(np.where(wanted > x[-1], above, np.where(wanted < x[0], below, inside)), np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Prompt lengths, ascending, with the share of requests at each."""

    tokens: Floats
    share: Floats


@dataclass(frozen=True, slots=True)
class Site:
    """What is given: instances, links, and how long things take."""

    remote_instances: int
    local_instances: int  # N_p + N_d.
    egress_gbps: float
    remote_prefill_s: Curve
    local_prefill_s: Curve
    kv_bytes: Curve
    hold_s: float  # Decode instance-seconds that one request takes.


@dataclass(frozen=True, slots=True)
class Operating:
    """A threshold and a split of the local cluster, and what they give."""

    threshold_tokens: float
    remote: int
    prefill: int
    decode: int
    remote_share: float  # p
    long_tokens: float
    short_tokens: float
    theta_remote: float
    theta_prefill: float
    theta_decode: float
    rate_per_s: float  # Λ_max
    egress_gbps: float
    ttft_mean_s: float  # Prefill times alone, without queueing.
    ttft_p90_s: float


def truncated_lognormal(mu: float, sigma: float, low: float, high: float, points: int = 4096) -> Lengths:
    """Equally likely lengths of a log-normal law cut to [low, high], each the middle of its quantile."""
    a, b = (_phi((np.log(x) - mu) / sigma) for x in (low, high))
    edges = np.linspace(np.log(low), np.log(high), 20001)
    below = np.array([_phi((x - mu) / sigma) for x in edges])
    wanted = a + (b - a) * (np.arange(points) + 0.5) / points
    return Lengths(np.exp(np.interp(wanted, below, edges)), np.full(points, 1.0 / points))


def operating(site: Site, lengths: Lengths, threshold_tokens: float, prefill: int) -> Operating:
    """The throughput model at one threshold and split; equations 3 to 6."""
    away = lengths.tokens > threshold_tokens
    p = float(lengths.share[away].sum())
    decode = site.local_instances - prefill
    long_tokens, short_tokens = _mean(lengths, away), _mean(lengths, ~away)
    bits = float(site.kv_bytes.at(long_tokens)) * 8 if p > 0 else 0.0
    theta_remote = _remote_rate(site, long_tokens, bits) if p > 0 else 0.0
    theta_prefill = prefill / float(site.local_prefill_s.at(short_tokens)) if p < 1 and prefill else 0.0
    theta_decode = decode / site.hold_s
    limits = [theta_decode]
    limits += [theta_remote / p] if p > 0 else []
    limits += [theta_prefill / (1.0 - p)] if p < 1 else []
    rate = min(limits)
    ttft_s = np.where(away, site.remote_prefill_s.at(lengths.tokens), site.local_prefill_s.at(lengths.tokens))
    order = np.argsort(ttft_s)
    ninth = ttft_s[order][np.searchsorted(np.cumsum(lengths.share[order]), 0.9)]
    return Operating(
        threshold_tokens,
        site.remote_instances,
        prefill,
        decode,
        p,
        long_tokens,
        short_tokens,
        theta_remote,
        theta_prefill,
        theta_decode,
        rate,
        rate * p * bits / 1e9,
        float((ttft_s * lengths.share).sum()),
        float(ninth),
    )


def optimum(site: Site, lengths: Lengths) -> Operating:
    """The best threshold and split; a site without remote instances keeps everything at home."""
    if site.local_instances < 1 or site.remote_instances < 0:
        raise InputError("site", "needs at least one local instance and no negative count")
    thresholds = np.concatenate([[0.0], lengths.tokens])
    if not site.remote_instances:
        thresholds = thresholds[-1:]
    rates = np.stack([_rates(site, lengths, thresholds, n) for n in range(site.local_instances)])
    prefill, place = np.unravel_index(int(np.argmax(rates)), rates.shape)
    return operating(site, lengths, float(thresholds[place]), int(prefill))


def _rates(site: Site, lengths: Lengths, thresholds: Floats, prefill: int) -> Floats:
    """Λ_max at many thresholds at once: the same equations over running sums."""
    share = np.concatenate([[0.0], np.cumsum(lengths.share)])
    tokens = np.concatenate([[0.0], np.cumsum(lengths.share * lengths.tokens)])
    below = np.searchsorted(lengths.tokens, thresholds, side="right")
    stay, away = share[below], share[-1] - share[below]
    some_stay, some_go = stay > 1e-12, away > 1e-12
    short = tokens[below] / np.where(some_stay, stay, 1.0)
    long = (tokens[-1] - tokens[below]) / np.where(some_go, away, 1.0)
    compute = site.remote_instances / np.maximum(site.remote_prefill_s.at(long), 1e-12)
    egress = site.egress_gbps * 1e9 / np.maximum(site.kv_bytes.at(long) * 8, 1e-12)
    remote = np.where(some_go, np.minimum(compute, egress) / np.where(some_go, away, 1.0), np.inf)
    local = prefill / np.maximum(site.local_prefill_s.at(short), 1e-12)
    local = np.where(some_stay, local / np.where(some_stay, stay, 1.0), np.inf)
    decode = (site.local_instances - prefill) / site.hold_s
    return np.asarray(np.minimum(np.minimum(remote, local), decode), np.float64)


def local_from_remote(remote: Curve, known: tuple[tuple[float, float], tuple[float, float]]) -> Curve:
    """A slower GPU's prefill times from a faster one's curve and two known times: T_local = α + β T_remote.

    PrfaaS measured prefill on H200 only; its Table 6 gives two throughputs of H20, from which two times follow.
    """
    (first, first_s), (second, second_s) = known
    a, b = float(remote.at(first)), float(remote.at(second))
    if a == b:
        raise InputError("known", "two times at the same length say nothing of the slope")
    beta = (second_s - first_s) / (b - a)
    alpha = first_s - beta * a
    return Curve(remote.tokens, tuple(alpha + beta * value for value in remote.values))


def _remote_rate(site: Site, long_tokens: float, bits: float) -> float:
    compute = site.remote_instances / float(site.remote_prefill_s.at(long_tokens))
    return min(compute, site.egress_gbps * 1e9 / bits) if bits > 0 else compute


def _mean(lengths: Lengths, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    share = float(lengths.share[mask].sum())
    return float((lengths.tokens[mask] * lengths.share[mask]).sum()) / share if share > 0 else 0.0


def _phi(x: float) -> float:
    return 0.5 * (1.0 + erf(x / sqrt(2.0)))
