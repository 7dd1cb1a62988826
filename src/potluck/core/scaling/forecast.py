"""Rate forecasts: a model's request rate ahead, learned from its own past, with quantiles of its error.

Time is cut into bins of BIN_S. From the log x of the present rate, the log of the rate h bins ahead is

    f_h = x + sum_k b_hk m_hk      each m a move that one view of the past suggests:

    trend    the mean move of the last bins             level    back to the mean of the last hour
    day      the mean move at this time of past days    week     the move at this time a week ago

b_h is fitted by ridge regression on the past, older bins counting less; where no view helps, all b are near 0.
Quantiles are empirical, from the errors of f. Rates below one request per bin count as that."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from math import ceil, exp, log, sqrt
from statistics import NormalDist
from typing import NamedTuple

BIN_S = 600.0
DAY_BINS, WEEK_BINS = 144, 1008  # One day and one week, in bins.
HORIZON_BINS = 6  # Forecast horizon: an hour.
MAX_BINS = 2 * WEEK_BINS
DAYS_AVERAGED = 5
TREND_BINS, LEVEL_BINS = 3, 6
BIN_DECAY = 0.995  # Weight of a bin per bin of age: half after a day.
MAX_LOG_MOVE = 0.5  # Larger moves, in logs, are clipped before learning: an outage is not a pattern.
RIDGE = 0.3  # Regularization, in squared logs.
MAX_ERRORS = 288  # Errors kept per horizon for quantiles: two days.
MIN_LOG_MOVE = 0.02  # Lower bound of the assumed error of a rate, in logs.
# With fewer errors, quantiles are those of a normal distribution with deviation PRIOR_ERROR.
MIN_ERRORS_FOR_QUANTILES = 24
PRIOR_ERROR = 0.2
VIEWS = ("trend", "level", "day", "week")


class RateForecast(NamedTuple):
    mean_per_s: float
    high_per_s: float  # Quantile of the share that was asked for.
    reason: str  # The view with the largest effect, at the horizon of the highest rate.


class _HorizonFit:
    """One horizon: the regression's sums and coefficients, and its errors."""

    __slots__ = ("coefficients", "errors", "ordered", "sums", "targets")

    def __init__(self) -> None:
        self.sums = [[RIDGE if i == j else 0.0 for j in range(len(VIEWS))] for i in range(len(VIEWS))]
        self.targets = [0.0] * len(VIEWS)
        self.coefficients = [0.0] * len(VIEWS)
        self.errors: deque[float] = deque()
        self.ordered: list[float] = []

    def learn(self, moves: Sequence[float], moved: float) -> None:
        """Learn from one bin: the views suggested `moves`, the log moved by `moved`."""
        error = moved - self.expected(moves)
        self.errors.append(error)
        insort(self.ordered, error)
        if len(self.errors) > MAX_ERRORS:
            self.ordered.remove(self.errors.popleft())
        moved = _clipped(moved)
        for i, move in enumerate(moves):
            row = self.sums[i]
            for j, other_move in enumerate(moves):
                decayed = BIN_DECAY * row[j] + ((1 - BIN_DECAY) * RIDGE if i == j else 0.0)
                row[j] = decayed + move * other_move
            self.targets[i] = BIN_DECAY * self.targets[i] + move * moved
        self.coefficients = _solved(self.sums, self.targets)

    def expected(self, moves: Sequence[float]) -> float:
        return sum(b * m for b, m in zip(self.coefficients, moves, strict=True))

    def quantile(self, share: float) -> float:
        if len(self.ordered) < MIN_ERRORS_FOR_QUANTILES:
            return NormalDist(0.0, PRIOR_ERROR).inv_cdf(share)
        position = share * (len(self.ordered) - 1)
        index = min(int(position), len(self.ordered) - 2)
        return self.ordered[index] + (position - index) * (self.ordered[index + 1] - self.ordered[index])


class Forecaster:
    """Forecasts one model's rate from its past; `count` is the only mutator."""

    __slots__ = ("_bin", "_fits", "_logs", "_predictions", "_since")

    def __init__(self, history: Sequence[float] = ()) -> None:
        self._logs: list[float] = []
        self._fits = [_HorizonFit() for _ in range(HORIZON_BINS)]
        self._predictions: deque[tuple[float, list[list[float]]]] = deque(maxlen=HORIZON_BINS)
        """For each of the last bins: its log, and the moves suggested for each horizon."""
        self._bin = -1
        self._since = 0  # Arrivals before the present bin.
        for rate_per_s in history:
            self._add_bin(rate_per_s)

    def count(self, at_s: float, arrivals_ever: int) -> None:
        """Take the total number of arrivals; learn from the bins that are complete."""
        bin_index = int(at_s / BIN_S)
        if self._bin < 0:
            self._bin, self._since = bin_index, arrivals_ever
            return
        bins_passed = bin_index - self._bin
        if bins_passed > 0:
            # After a gap of several bins, arrivals are spread evenly over them.
            rate_per_s = (arrivals_ever - self._since) / bins_passed / BIN_S
            for _ in range(min(bins_passed, MAX_BINS)):
                self._add_bin(rate_per_s)
            self._bin, self._since = bin_index, arrivals_ever

    def outlook(self, now_per_s: float, noise: float, span_s: float, share: float) -> RateForecast:
        """The mean and the `share` quantile of the highest rate until `span_s` from now; `noise`: relative error of
        the present rate."""
        x = self._present_log(now_per_s, noise)
        mean, high, reason = x, x, "stays as it is"
        for h in range(min(HORIZON_BINS, ceil(span_s / BIN_S))):
            fit, moves = self._fits[h], self._moves(x, h)
            f = x + fit.expected(moves)
            if f > mean:
                contributions = [b * m for b, m in zip(fit.coefficients, moves, strict=True)]
                view = VIEWS[max(range(len(contributions)), key=contributions.__getitem__)]
                mean, reason = f, f"{exp(f - x) - 1:+.0%} in {(h + 1) * BIN_S / 60:.0f} min by {view}"
            high = max(high, f + fit.quantile(share))
        return RateForecast(exp(mean), exp(high), reason)

    @property
    def error(self) -> float:
        """Root mean square of the errors one bin ahead, in logs, of late."""
        errors = self._fits[0].errors
        return sqrt(sum(e * e for e in errors) / len(errors)) if errors else PRIOR_ERROR

    def _present_log(self, now_per_s: float, noise: float) -> float:
        """The log of the present rate, weighing the noisy present window against the last bin."""
        now_log = _log(now_per_s)
        if not self._logs or noise <= 0:
            return now_log
        moved = now_log - self._logs[-1]
        # A change beyond two deviations of the noise is a move, however steady the rate was before.
        move_variance = max(self.error, MIN_LOG_MOVE, abs(moved) - 2 * noise) ** 2
        return self._logs[-1] + move_variance / (move_variance + noise * noise) * moved

    def _add_bin(self, rate_per_s: float) -> None:
        rate_log = _log(rate_per_s)
        for h, (past_log, moves) in enumerate(reversed(self._predictions)):
            self._fits[h].learn(moves[h], rate_log - past_log)
        self._logs.append(rate_log)
        if len(self._logs) > MAX_BINS + WEEK_BINS:
            del self._logs[:WEEK_BINS]
        self._predictions.append((rate_log, [self._moves(rate_log, h) for h in range(HORIZON_BINS)]))

    def _moves(self, x: float, h: int) -> list[float]:
        """The move of the log that each view suggests until h + 1 bins ahead."""
        logs, last_index = self._logs, len(self._logs) - 1
        trend = (x - logs[last_index - TREND_BINS]) / TREND_BINS if last_index >= TREND_BINS else 0.0
        recent_logs = logs[-LEVEL_BINS:]
        level = sum(recent_logs) / len(recent_logs) - x if recent_logs else 0.0
        starts = [
            last_index - d * DAY_BINS for d in range(1, DAYS_AVERAGED + 1) if last_index >= d * DAY_BINS
        ]
        day = sum(logs[start + h + 1] - logs[start] for start in starts) / len(starts) if starts else 0.0
        week = (
            logs[last_index - WEEK_BINS + h + 1] - logs[last_index - WEEK_BINS]
            if last_index >= WEEK_BINS
            else 0.0
        )
        return [_clipped(trend), _clipped(level), _clipped(day), _clipped(week)]


def _log(rate_per_s: float) -> float:
    return log(max(rate_per_s, 1.0 / BIN_S))


def _clipped(move: float) -> float:
    return min(max(move, -MAX_LOG_MOVE), MAX_LOG_MOVE)


def _solved(rows: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """A x = y for a symmetric positive definite A, by Cholesky's A = L Lᵀ."""
    n = len(right)
    low = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            rest = rows[i][j] - sum(low[i][k] * low[j][k] for k in range(j))
            low[i][j] = sqrt(max(rest, 1e-12)) if i == j else rest / low[j][j]
    y = [0.0] * n
    for i in range(n):
        y[i] = (right[i] - sum(low[i][k] * y[k] for k in range(i))) / low[i][i]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (y[i] - sum(low[k][i] * x[k] for k in range(i + 1, n))) / low[i][i]
    return x
