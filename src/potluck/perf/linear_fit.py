"""Least squares with a report: y = sum of c_j x_j + intercept.

Times span three decades, and a planner cares about per cents, so rows can be weighted by 1/y ("relative").
Costs do not help: coefficients can be held at or above zero (`nonnegative`). A few measurements disturbed by
a neighbour can be kept from bending the rest (`robust`). Errors are fractions: 0.07 is 7 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from potluck.core.errors import InputError
from potluck.perf.step_timer import Floats, StepTimer, steps

Weights = Literal["relative"]

HUBER = 1.345
"""Residuals beyond so many standard deviations count linearly; 95 % efficient where there are no outliers."""
ROBUST_ROUNDS = 30


@dataclass(frozen=True, slots=True)
class LinearFit:
    """A fitted line or plane, and how well it lies on its own points."""

    coefficients: dict[str, float]
    intercept: float
    r2: float
    mape: float
    """Mean absolute percentage error, as a fraction."""
    median_ape: float
    points: int

    def predict(self, columns: Mapping[str, ArrayLike]) -> Floats:
        """The fit at other values of its columns."""
        missing = [name for name in self.coefficients if name not in columns]
        if missing:
            raise InputError(f"fit: {missing[0]}", "column is missing")
        total: Floats = np.asarray(self.intercept, dtype=np.float64)
        for name, coefficient in self.coefficients.items():
            total = total + coefficient * np.asarray(columns[name], dtype=np.float64)
        return total


def linear_fit(
    columns: Mapping[str, ArrayLike],
    y: ArrayLike,
    weights: Weights | None = None,
    *,
    intercept: bool = True,
    nonnegative: bool = False,
    robust: bool = False,
) -> LinearFit:
    """Fit y by the columns; InputError when the points cannot carry that many coefficients."""
    names = list(columns)
    target = _checked("y", y)
    parts = [_checked(name, columns[name]) for name in names]
    for name, part in zip(names, parts, strict=True):
        if part.shape != target.shape:
            raise InputError(f"fit: {name}", f"has {part.size} values, y has {target.size}")
    if intercept:
        parts.append(np.ones_like(target))
    if target.size <= len(parts):
        raise InputError("fit: points", f"{target.size} are too few for {len(parts)} coefficients")
    design = np.column_stack(parts)
    _independent(design, [*names, "intercept"] if intercept else names)
    row_weights = relative_weights(target) if weights == "relative" else np.ones_like(target)
    solution = _robust(design, target, row_weights, nonnegative) if robust else None
    if solution is None:
        solution = solve(design, target, row_weights, nonnegative=nonnegative)
    values = [float(value) for value in solution]
    predicted = design @ solution
    return LinearFit(
        coefficients=dict(zip(names, values, strict=False)),
        intercept=values[-1] if intercept else 0.0,
        r2=r2(target, predicted),
        mape=mean_ape(target, predicted),
        median_ape=median_ape(target, predicted),
        points=int(target.size),
    )


def solve(design: Floats, y: Floats, weights: Floats, *, nonnegative: bool) -> Floats:
    """Weighted least squares, with or without the sign constraint; columns are scaled for the arithmetic."""
    rows, right = design * weights[:, None], y * weights
    scale = np.sqrt((rows**2).sum(axis=0))
    scale[scale == 0] = 1.0
    if nonnegative:
        held: Floats = nnls(rows / scale, right) / scale
        return held
    solution: Floats = np.linalg.lstsq(rows / scale, right, rcond=None)[0] / scale
    return solution


def nnls(a: Floats, b: Floats) -> Floats:
    """min |a x - b| with x >= 0, by Lawson and Hanson's active set (1974, chapter 23).

    The passive set P holds the coordinates that are free. Each round frees the coordinate whose gradient
    w = a'(b - a x) promises most, solves on P, and steps back towards the old x as far as signs demand.
    """
    count = a.shape[1]
    x = np.zeros(count)
    passive = np.zeros(count, dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(a.T @ b).max(initial=0.0)))
    for _ in range(10 * count + 10):
        w = np.where(passive, -np.inf, a.T @ (b - a @ x))
        if passive.all() or w.max() <= tolerance:
            return x
        freed = int(np.argmax(w))
        passive[freed] = True
        z = _on(a, b, passive)
        if z[freed] <= 0:
            # Rounding promised a gain that the solve does not confirm: x is optimal to working precision.
            return x
        while z[passive].min() <= 0:
            blocked = passive & (z <= 0)
            step = float((x[blocked] / (x[blocked] - z[blocked])).min())
            x = x + step * (z - x)
            passive &= x > 1e-15 * max(1.0, float(x.max()))
            x[~passive] = 0.0
            if not passive.any():
                break
            z = _on(a, b, passive)
        x = np.where(passive, z, 0.0)
    return x


def r2(y: ArrayLike, predicted: ArrayLike) -> float:
    """1 - residual over total sum of squares; for a constant y, 1 when met exactly and 0 otherwise."""
    actual, guess = np.asarray(y, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    residual, total = float(((actual - guess) ** 2).sum()), float(((actual - actual.mean()) ** 2).sum())
    if total == 0:
        return 1.0 if residual == 0 else 0.0
    return 1.0 - residual / total


def absolute_errors(y: ArrayLike, predicted: ArrayLike) -> Floats:
    """|predicted - y| / |y|, as fractions; y must have no zeros."""
    actual, guess = np.asarray(y, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    if actual.size == 0:
        raise InputError("fit: points", "there are none")
    if (actual == 0).any():
        raise InputError("fit: y", "has zeros, of which no percentage can be taken")
    errors: Floats = np.abs((guess - actual) / actual)
    return errors


def mean_ape(y: ArrayLike, predicted: ArrayLike) -> float:
    """Mean absolute percentage error, as a fraction."""
    return float(absolute_errors(y, predicted).mean())


def median_ape(y: ArrayLike, predicted: ArrayLike) -> float:
    """Median absolute percentage error, as a fraction."""
    return float(np.median(absolute_errors(y, predicted)))


def relative_weights(y: Floats) -> Floats:
    """1/|y|: squares of weighted residuals are squares of relative errors."""
    if (y == 0).any():
        raise InputError("fit: y", "has zeros, which relative weights cannot take")
    weights: Floats = 1.0 / np.abs(y)
    return weights


def _robust(design: Floats, y: Floats, weights: Floats, nonnegative: bool) -> Floats:
    """Huber's M-estimate by iteratively reweighted least squares, started from the plain fit."""
    solution = solve(design, y, weights, nonnegative=nonnegative)
    for _ in range(ROBUST_ROUNDS):
        residual = np.abs((design @ solution - y) * weights)
        # The median absolute deviation as a standard deviation, since outliers do not move it.
        sigma = float(np.median(residual)) / 0.6745
        if sigma <= 1e-14 * float(np.abs(y * weights).max()):
            break
        trust = np.minimum(1.0, HUBER * sigma / np.maximum(residual, 1e-300))
        before, solution = solution, solve(design, y, weights * np.sqrt(trust), nonnegative=nonnegative)
        if np.abs(solution - before).max() <= 1e-10 * np.abs(solution).max(initial=1e-300):
            break
    return solution


def _on(a: Floats, b: Floats, passive: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Floats:
    z = np.zeros(a.shape[1])
    z[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
    return z


def _independent(design: Floats, names: list[str]) -> None:
    """Refuse columns that others make up: their coefficients would be arbitrary."""
    norms = np.sqrt((design**2).sum(axis=0))
    for index, name in enumerate(names):
        if norms[index] == 0:
            raise InputError(f"fit: {name}", "is zero at every point")
        if np.linalg.matrix_rank(design[:, : index + 1] / norms[: index + 1], tol=1e-9) <= index:
            raise InputError(f"fit: {name}", f"is collinear with {', '.join(names[:index])}; leave one out")


def _checked(name: str, values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise InputError(f"fit: {name}", f"must be a list of numbers, has {array.ndim} dimensions")
    if not np.isfinite(array).all():
        raise InputError(f"fit: {name}", "has values that are not finite")
    return array


LENGTHS = tuple(range(128, 8193, 128))
CONTEXTS = tuple(range(0, 8192, 512))
DECODES = (8, 16, 32, 64)
DECODE_CONTEXTS = (256, 1024, 4096)
"""Tokens of context of each decode."""
CHUNK_BUDGET = 512
"""Tokens of an iteration, decodes included: CRONUS's own setting on the A100."""


def prompt_curve(timer: StepTimer, longest_tokens: int) -> tuple[float, float, float]:
    """Seconds of a prompt alone of up to so many tokens: fixed, per token, per token squared, none below zero.

    A line cannot follow attention over long prompts: where these matter, decisions take this.
    """
    tokens = _lengths(longest_tokens)
    columns = {"tokens": tokens, "squares": tokens * tokens}
    fit = linear_fit(columns, timer.step_s(steps(chunk_new=tokens)), "relative", nonnegative=True)
    return fit.intercept, fit.coefficients["tokens"], fit.coefficients["squares"]


@dataclass(frozen=True, slots=True)
class PartialPrefillPredictor:
    """(2) T = k_p L + b_p, for a prefill alone on its GPU.

    CRONUS's two predictors (section 4.4), and the sum over iterations (section 4.3).

        (2)  T_parprefill = k_p L + b_p                            L tokens of the prompt's first part
        (3)  t_chunked    = k_ctxp L_p + k_ctxd sum of L_d + b_c   contexts: L_p before the chunk, L_d per decode
        (1)  T_chunked    = N_iter (t_first + t_last) / 2          an arithmetic series, as (3) is linear in L_p

    Three numbers per GPU and model are enough for a balancer that must answer within a request's arrival. Both
    fit points as they were measured, or the answers of any StepTimer; both keep R^2 and the mean error.

    The paper fits by plain least squares. A line through times that grow faster than the length then starts below
    zero (-25 ms for Llama-3.1-8B on an A10 over 128 to 8,192 tokens), and short prompts look free. `in_use` is what
    decisions are made with: the lengths that a plan is for, relative errors, and no term below zero.
    """

    k_p: float
    b_p: float
    r2: float
    mape: float

    @classmethod
    def fit(
        cls, points: ArrayLike, weights: Weights | None = None, *, nonnegative: bool = False
    ) -> PartialPrefillPredictor:
        """From rows of (tokens, seconds), by plain least squares as in the paper when weights is None."""
        rows = _rows(points, 2, "tokens and seconds")
        return cls._of(linear_fit({"tokens": rows[:, 0]}, rows[:, 1], weights, nonnegative=nonnegative))

    @classmethod
    def in_use(cls, timer: StepTimer, longest_tokens: int) -> PartialPrefillPredictor:
        """For prompts of up to so many tokens."""
        tokens = _lengths(longest_tokens)
        points = np.column_stack([tokens, timer.step_s(steps(chunk_new=tokens))])
        return cls.fit(points, "relative", nonnegative=True)

    @classmethod
    def from_timer(
        cls, timer: StepTimer, lengths: ArrayLike = LENGTHS, weights: Weights | None = None
    ) -> PartialPrefillPredictor:
        """From a timer's answers for whole prompts of these lengths."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return cls.fit(np.column_stack([tokens, timer.step_s(steps(chunk_new=tokens))]), weights)

    @classmethod
    def _of(cls, fit: LinearFit) -> PartialPrefillPredictor:
        return cls(fit.coefficients["tokens"], fit.intercept, fit.r2, fit.mape)

    def seconds(self, tokens: ArrayLike) -> Floats:
        """(2), held at zero: a line through a parabola's points can start below it."""
        line: Floats = np.maximum(self.k_p * np.asarray(tokens, dtype=np.float64) + self.b_p, 0.0)
        return line


@dataclass(frozen=True, slots=True)
class ChunkedIterationPredictor:
    """(3) t = k_ctxp L_p + k_ctxd sum of L_d + b_c, for iterations that are filled up to one token budget."""

    k_ctxp: float
    k_ctxd: float
    b_c: float
    r2: float
    mape: float

    @classmethod
    def fit(
        cls, points: ArrayLike, weights: Weights | None = None, *, nonnegative: bool = False
    ) -> ChunkedIterationPredictor:
        """From rows of (prefill context, sum of decode contexts, seconds) at one token budget."""
        rows = _rows(points, 3, "prefill context, decode context and seconds")
        columns = {"ctxp": rows[:, 0], "ctxd": rows[:, 1]}
        fit = linear_fit(columns, rows[:, 2], weights, nonnegative=nonnegative)
        return cls(fit.coefficients["ctxp"], fit.coefficients["ctxd"], fit.intercept, fit.r2, fit.mape)

    @classmethod
    def from_timer(
        cls,
        timer: StepTimer,
        budget_tokens: int = CHUNK_BUDGET,
        contexts: ArrayLike = CONTEXTS,
        decodes: ArrayLike = DECODES,
        decode_contexts: ArrayLike = DECODE_CONTEXTS,
        weights: Weights | None = None,
        *,
        nonnegative: bool = False,
    ) -> ChunkedIterationPredictor:
        """From a timer's answers on a grid: d decodes leave the chunk budget - d tokens."""
        grid = np.meshgrid(
            *(np.asarray(axis, dtype=np.float64) for axis in (contexts, decodes, decode_contexts))
        )
        context, count, array = (axis.ravel() for axis in grid)
        if count.size and count.max() >= budget_tokens:
            raise InputError(
                "predictor: budget_tokens", f"{budget_tokens} leave no room beside {count.max():g} decodes"
            )
        seconds = timer.step_s(steps(budget_tokens - count, context, count, count * array))
        return cls.fit(np.column_stack([context, count * array, seconds]), weights, nonnegative=nonnegative)

    @classmethod
    def in_use(cls, timer: StepTimer, budget_tokens: int, longest_tokens: int) -> ChunkedIterationPredictor:
        """For chunks within prompts of up to so many tokens, beside decodes whose contexts are no longer."""
        decodes = [count for count in DECODES if count < budget_tokens] or [0, max(1, budget_tokens - 1)]
        contexts = np.concatenate([[0.0], _lengths(longest_tokens, 16)[:-1]])
        item = np.unique(np.array([longest_tokens / 8, longest_tokens / 3, longest_tokens]).round())
        return cls.from_timer(timer, budget_tokens, contexts, decodes, item, "relative", nonnegative=True)

    def seconds(self, prefill_context: ArrayLike, decode_context: ArrayLike = 0.0) -> Floats:
        """(3), held at zero."""
        ctxp, ctxd = (
            np.asarray(prefill_context, dtype=np.float64),
            np.asarray(decode_context, dtype=np.float64),
        )
        plane: Floats = np.maximum(self.k_ctxp * ctxp + self.k_ctxd * ctxd + self.b_c, 0.0)
        return plane


def chunked_prefill_s(n_iter: ArrayLike, first_s: ArrayLike, last_s: ArrayLike) -> Floats:
    """(1) T_chunked = N_iter (t_first + t_last) / 2."""
    count = np.asarray(n_iter, dtype=np.float64)
    if count.size and count.min() < 0:
        raise InputError("predictor: n_iter", "must not be negative")
    total: Floats = count * (np.asarray(first_s, dtype=np.float64) + np.asarray(last_s, dtype=np.float64)) / 2
    return total


def _lengths(longest_tokens: int, count: int = 64) -> Floats:
    """Lengths up to the longest, evenly spread; at least as many as a fit needs."""
    longest = max(longest_tokens, count)
    lengths: Floats = np.unique(np.linspace(longest / count, longest, count).round())
    return lengths


def _rows(points: ArrayLike, width: int, what: str) -> Floats:
    rows = np.asarray(points, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != width:
        raise InputError("predictor: points", f"must be rows of {what}")
    if rows.size and rows[:, -1].min() <= 0:
        raise InputError("predictor: points", "have seconds that are not positive")
    return rows
