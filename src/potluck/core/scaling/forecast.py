"""What will be asked soon: a model's rate ahead, learned from its own past, with its error.

Time is cut into bins of BIN_S. From the rate at hand, whose log is x, the log of the rate h bins ahead is

    f_h = x + sum_k b_hk m_hk      each m a move that one view of the past suggests:

    trend    what the last bins moved by            level    back to the mean of the last hour
    day      as between these times of day before   week     as between these times a week ago

b_h is ridge regression on the past, older bins counting less: where no view helps all b are near 0. Quantiles come
from what f missed by, with no shape assumed. Rates below one request a bin count as that."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from math import ceil, exp, log, sqrt
from statistics import NormalDist
from typing import NamedTuple

BIN_S = 600.0
DAY, WEEK = 144, 1008  # In bins.
AHEAD = 6  # Bins ahead that are forecast: an hour.
KEPT = 2 * WEEK
DAYS = 5
TREND_BINS, LEVEL_BINS = 3, 6
FADE = 0.995  # What a bin counts after each further one: half after a day.
LARGEST = 0.5  # Moves beyond this, in logs, are learned as this: an outage is not a law.
RIDGE = 0.3  # Evidence, in squared logs, that it takes to believe in a view by half.
ERRORS = 288  # Errors that quantiles are taken from, per horizon: two days.
LEAST_MOVE = 0.02  # A rate is never believed to be stiller than this.
FEW = 24  # With fewer errors than this, quantiles are those of a normal law with a deviation of PRIOR.
PRIOR = 0.2
VIEWS = ("trend", "level", "day", "week")


class RateForecast(NamedTuple):
    mean_per_s: float
    high_per_s: float  # Not exceeded in the share of cases that was asked for.
    reason: str  # What moves it most, at the horizon where it is highest.


class _Fit:
    """One horizon: the regression's sums, its coefficients, and what it missed by."""

    __slots__ = ("coefficients", "errors", "ordered", "sums", "targets")

    def __init__(self) -> None:
        self.sums = [[RIDGE if i == j else 0.0 for j in range(len(VIEWS))] for i in range(len(VIEWS))]
        self.targets = [0.0] * len(VIEWS)
        self.coefficients = [0.0] * len(VIEWS)
        self.errors: deque[float] = deque()
        self.ordered: list[float] = []

    def learn(self, moves: Sequence[float], moved: float) -> None:
        """The views said `moves`, and it moved by `moved`."""
        error = moved - self.expected(moves)
        self.errors.append(error)
        insort(self.ordered, error)
        if len(self.errors) > ERRORS:
            self.ordered.remove(self.errors.popleft())
        moved = _clipped(moved)
        for i, mine in enumerate(moves):
            row = self.sums[i]
            for j, other in enumerate(moves):
                keep = FADE * row[j] + ((1 - FADE) * RIDGE if i == j else 0.0)
                row[j] = keep + mine * other
            self.targets[i] = FADE * self.targets[i] + mine * moved
        self.coefficients = _solved(self.sums, self.targets)

    def expected(self, moves: Sequence[float]) -> float:
        return sum(b * m for b, m in zip(self.coefficients, moves, strict=True))

    def quantile(self, share: float) -> float:
        if len(self.ordered) < FEW:
            return NormalDist(0.0, PRIOR).inv_cdf(share)
        place = share * (len(self.ordered) - 1)
        low = min(int(place), len(self.ordered) - 2)
        return self.ordered[low] + (place - low) * (self.ordered[low + 1] - self.ordered[low])


class Forecaster:
    """One model's past. `count` is its only mutator."""

    __slots__ = ("_bin", "_fits", "_logs", "_made", "_since")

    def __init__(self, history: Sequence[float] = ()) -> None:
        self._logs: list[float] = []
        self._fits = [_Fit() for _ in range(AHEAD)]
        self._made: deque[tuple[float, list[list[float]]]] = deque(maxlen=AHEAD)
        """For each of the last bins: its log, and the moves that each horizon's views suggested."""
        self._bin = -1
        self._since = 0  # Arrivals before the present bin.
        for rate_per_s in history:
            self._close(rate_per_s)

    def count(self, at_s: float, arrivals_ever: int) -> None:
        """So many have come in all; bins that are over are learned from."""
        place = int(at_s / BIN_S)
        if self._bin < 0:
            self._bin, self._since = place, arrivals_ever
            return
        over = place - self._bin
        if over > 0:
            # Nobody looked for longer than a bin: what came is spread evenly over those that passed.
            value = (arrivals_ever - self._since) / over / BIN_S
            for _ in range(min(over, KEPT)):
                self._close(value)
            self._bin, self._since = place, arrivals_ever

    def outlook(self, now_per_s: float, noise: float, span_s: float, share: float) -> RateForecast:
        """The highest rate until `span_s` from now, `share` of cases within it. `noise`: of the rate, relative."""
        x = self._at_hand(now_per_s, noise)
        mean, high, reason = x, x, "stays as it is"
        for h in range(min(AHEAD, ceil(span_s / BIN_S))):
            fit, moves = self._fits[h], self._moves(x, h)
            f = x + fit.expected(moves)
            if f > mean:
                parts = [b * m for b, m in zip(fit.coefficients, moves, strict=True)]
                view = VIEWS[max(range(len(parts)), key=parts.__getitem__)]
                mean, reason = f, f"{exp(f - x) - 1:+.0%} in {(h + 1) * BIN_S / 60:.0f} min by {view}"
            high = max(high, f + fit.quantile(share))
        return RateForecast(exp(mean), exp(high), reason)

    @property
    def error(self) -> float:
        """Root mean square of the errors one bin ahead, in logs, of late."""
        errors = self._fits[0].errors
        return sqrt(sum(e * e for e in errors) / len(errors)) if errors else PRIOR

    def _at_hand(self, now_per_s: float, noise: float) -> float:
        """The log of the present rate: a short window knows of moves, the last bin is less noisy."""
        now = _log(now_per_s)
        if not self._logs or noise <= 0:
            return now
        moved = now - self._logs[-1]
        # What noise cannot explain is a move, however still it was before.
        moves = max(self.error, LEAST_MOVE, abs(moved) - 2 * noise) ** 2
        return self._logs[-1] + moves / (moves + noise * noise) * moved

    def _close(self, rate_per_s: float) -> None:
        value = _log(rate_per_s)
        for h, (was, moves) in enumerate(reversed(self._made)):
            self._fits[h].learn(moves[h], value - was)
        self._logs.append(value)
        if len(self._logs) > KEPT + WEEK:
            del self._logs[:WEEK]
        self._made.append((value, [self._moves(value, h) for h in range(AHEAD)]))

    def _moves(self, x: float, h: int) -> list[float]:
        """What each view suggests that the log moves by until the bin after h further ones."""
        logs, at = self._logs, len(self._logs) - 1
        trend = (x - logs[at - TREND_BINS]) / TREND_BINS if at >= TREND_BINS else 0.0
        lately = logs[-LEVEL_BINS:]
        level = sum(lately) / len(lately) - x if lately else 0.0
        starts = [at - d * DAY for d in range(1, DAYS + 1) if at >= d * DAY]
        day = sum(logs[start + h + 1] - logs[start] for start in starts) / len(starts) if starts else 0.0
        week = logs[at - WEEK + h + 1] - logs[at - WEEK] if at >= WEEK else 0.0
        return [_clipped(trend), _clipped(level), _clipped(day), _clipped(week)]


def _log(rate_per_s: float) -> float:
    return log(max(rate_per_s, 1.0 / BIN_S))


def _clipped(move: float) -> float:
    return min(max(move, -LARGEST), LARGEST)


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
