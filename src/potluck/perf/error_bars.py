"""Error bars: how far what is measured may lie from what is predicted, at the level of the figure that is printed.

Predictions were put beside measurements at three levels: single operators, whole steps (sums of measured operators),
and whole serving runs. A figure takes its bar from errors at its own level, for its kind of model, number format and
tensor-parallel degree, as far as enough was measured there:

    rate, TPOT            serving runs that the fit had not seen; they exist for H100 alone
    TTFT                  the same by engine and by how many requests are under way, once as if nobody had seen the
                          engine's version: servers and clients make more of it than GPUs do
    another GPU           besides, what carrying operators over to it adds: errors of its operators, or of those of
                          GPUs that were left out, less what H100's own have
    nothing of its kind   twice the latter

Errors are of time, predicted to measured, in logarithms: a bar multiplies. Rates and prices get the same, turned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, hypot
from typing import Literal

from potluck.core.codec import loads
from potluck.core.values.model import Model, MoeFfn
from potluck.core.values.plan import Confidence
from potluck.perf import shipped

FORMAT = "potluck.bars"
VERSION = 1
SHARE = 0.8
"""Of what is measured, what lies within a bar where nothing else is said."""
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Of runs: those below each of an error's quantiles."""
LEAST_RUNS, LEAST_CONFIGURATIONS = 60, 12
"""Of a group that has a bar of its own: fewer say little of the tenth that lies outside."""

Metric = Literal["rate", "ttft", "tpot"]
Kind = Literal["dense", "experts"]
Group = tuple[str, int, int, str, str]
"""Kind, bits, degree, engine and load; empty or 0: any."""
METRICS: tuple[Metric, ...] = ("rate", "ttft", "tpot")
FEW = 16
"""Requests under way, up to which first tokens are those of an engine with few."""


@dataclass(frozen=True, slots=True)
class RunErrors:
    """Of runs that a fit had not seen: log(measured time / predicted time) at SHARES."""

    metric: Metric
    kind: str
    """Empty: of any."""
    bits: int
    """Of a weight (of an expert's, where there are any); 0: any."""
    tp: int
    """0: any."""
    runs: int
    quantiles: tuple[float, ...]
    engine: str = ""
    """Of first tokens alone, as is the load."""
    load: str = ""
    """few, many, or empty: any."""

    @property
    def group(self) -> Group:
        return self.kind, self.bits, self.tp, self.engine, self.load


@dataclass(frozen=True, slots=True)
class ErrorBars:
    """All that is known of errors."""

    gpu: str
    """On which the runs were made."""
    runs: tuple[RunErrors, ...]
    carried: dict[str, float]
    """By kind of model and how a GPU's operators were had, of some GPUs by name too: what standard deviation it adds
    to a step's error."""


@dataclass(frozen=True, slots=True)
class ErrorBar:
    """A time is within [low, high] times its prediction for so many of those that were measured."""

    low: float
    high: float
    share: float
    basis: str
    """Which errors it comes from, in words."""

    def around(self, time_s: float) -> tuple[float, float]:
        return time_s * self.low, time_s * self.high

    def around_rate(self, rate: float) -> tuple[float, float]:
        return rate / self.high, rate / self.low


def kind_of(model: Model) -> Kind:
    return "experts" if any(isinstance(layer.ffn, MoeFfn) for layer in model.layers) else "dense"


def bits_of(model: Model) -> float:
    """Of a weight, where most of them are."""
    return model.expert_bits if kind_of(model) == "experts" else model.weight_bits


@lru_cache(maxsize=1)
def bundled_bars() -> ErrorBars:
    """The errors that ship with the package."""
    text = shipped("bars.json")
    return loads(ErrorBars, text, format_name=FORMAT, version=VERSION)


def bar(
    metric: Metric,
    model: Model,
    tp: int,
    gpu: str,
    confidence: Confidence,
    share: float = SHARE,
    bars: ErrorBars | None = None,
    *,
    engine: str = "",
    requests: float = 0.0,
) -> ErrorBar:
    """The bar of one figure of a model on `tp` GPUs; of first tokens by an engine that has so many requests."""
    known = bundled_bars() if bars is None else bars
    half = (1.0 - share) / 2
    kind, bits = kind_of(model), round(bits_of(model))
    wanted = first_token_groups(kind, engine, requests) if metric == "ttft" else step_groups(kind, bits, tp)
    alike = {errors.group: errors for errors in known.runs if errors.metric == metric}
    errors = next(alike[group] for group in wanted if group in alike)
    carried = f"{kind} {confidence}"
    more = known.carried.get(f"{carried} {gpu}", known.carried.get(carried, 0.0))
    if gpu == known.gpu and confidence == "measured":
        more = 0.0
    low, high = (_quantile(errors, at, more) for at in (half, 1.0 - half))
    words = f"{errors.runs} serving runs on {known.gpu} ({_named(errors)})"
    if more:
        how = {"measured": "its operators were measured", "transferred": "carried over", "assumed": "assumed"}
        words += f"; on {gpu} {how[confidence]}"
    return ErrorBar(exp(low), exp(high), share, words)


def slower(model: Model, tp: int, gpu: str, confidence: Confidence, sure: float) -> float:
    """How many times longer than predicted steps may be so that this is exceeded with probability 1 - `sure`."""
    return max(1.0, bar("rate", model, tp, gpu, confidence, 2.0 * max(sure, 0.5) - 1.0).high)


def step_groups(kind: str, bits: int, tp: int) -> tuple[Group, ...]:
    """Nearest first: like this in all; of any degree; in any format; of any kind."""
    nearest = ((kind, bits, tp), (kind, bits, 0), (kind, 0, tp), (kind, 0, 0), ("", 0, 0))
    return tuple((*group, "", "") for group in nearest)


def first_token_groups(kind: str, engine: str, requests: float) -> tuple[Group, ...]:
    """Nearest first: like this in all; of any engine; of any kind; at any load."""
    load = "" if requests <= 0 else "few" if requests <= FEW else "many"
    nearest = ((kind, engine, load), (kind, "", load), ("", engine, load), ("", "", load), (kind, engine, ""))
    return tuple((k, 0, 0, e, n) for k, e, n in (*nearest, (kind, "", ""), ("", "", "")))


def _quantile(errors: RunErrors, share: float, more: float) -> float:
    """Of the runs' errors together with a normal one that is independent of them."""
    middle = _between(errors.quantiles, 0.5)
    own = _between(errors.quantiles, share) - middle
    added = 0.0
    if more:
        from statistics import NormalDist  # slow to import

        added = more * NormalDist().inv_cdf(share)
    sign = 1.0 if share >= 0.5 else -1.0
    return middle + sign * hypot(own, added)


def _between(quantiles: Sequence[float], share: float) -> float:
    """On the line between the two nearest shares; beyond the last, that one."""
    at = min(max(share, SHARES[0]), SHARES[-1])
    for (x0, y0), (x1, y1) in zip(
        zip(SHARES, quantiles, strict=True), zip(SHARES[1:], quantiles[1:], strict=False), strict=False
    ):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return quantiles[-1]


def _named(errors: RunErrors) -> str:
    bits, tp = f"{errors.bits} bit" if errors.bits else "", f"tp {errors.tp}" if errors.tp else ""
    load = f"{errors.load} requests under way" if errors.load else ""
    return ", ".join(part for part in (errors.kind or "all", errors.engine, bits, tp, load) if part)
