"""Least squares with a report: y = sum of c_j x_j + intercept.

Times span three decades, and a planner cares about per cents, so rows can be weighted by 1/y ("relative").
Costs do not help: coefficients can be held at or above zero (`nonnegative`). Errors are fractions: 0.07 is 7 %.
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


@dataclass(frozen=True, slots=True)
class LinearFit:
    """A fitted line or plane, and how well it lies on its own points."""

    coefficients: dict[str, float]
    intercept: float
    r2: float
    mape: float
    """Mean absolute percentage error, as a fraction."""


def linear_fit(
    columns: Mapping[str, Floats], y: Floats, weights: Weights | None = None, *, nonnegative: bool = False
) -> LinearFit:
    """Fit y by the columns; InputError when there are too few points for that many coefficients."""
    parts = [*columns.values(), np.ones_like(y)]
    if y.size <= len(parts):
        raise InputError("fit: points", f"{y.size} are too few for {len(parts)} coefficients")
    design = np.column_stack(parts)
    row_weights = relative_weights(y) if weights == "relative" else np.ones_like(y)
    solution = solve(design, y, row_weights, nonnegative=nonnegative)
    predicted = design @ solution
    return LinearFit(
        coefficients=dict(zip(columns, map(float, solution), strict=False)),
        intercept=float(solution[-1]),
        r2=r2(y, predicted),
        mape=mean_ape(y, predicted),
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
    errors: Floats = np.abs((guess - actual) / actual)
    return errors


def mean_ape(y: ArrayLike, predicted: ArrayLike) -> float:
    """Mean absolute percentage error, as a fraction."""
    return float(absolute_errors(y, predicted).mean())


def relative_weights(y: Floats) -> Floats:
    """1/|y|: squares of weighted residuals are squares of relative errors. y must have no zeros."""
    weights: Floats = 1.0 / np.abs(y)
    return weights


def _on(a: Floats, b: Floats, passive: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Floats:
    z = np.zeros(a.shape[1])
    z[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
    return z


DECODES = (8, 16, 32, 64)


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

    CRONUS's two predictors (section 4.4).

        (2)  T_parprefill = k_p L + b_p                            L tokens of the prompt's first part
        (3)  t_chunked    = k_ctxp L_p + k_ctxd sum of L_d + b_c   contexts: L_p before the chunk, L_d per decode

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
        fit = linear_fit({"tokens": rows[:, 0]}, rows[:, 1], weights, nonnegative=nonnegative)
        return cls(fit.coefficients["tokens"], fit.intercept, fit.r2, fit.mape)

    @classmethod
    def in_use(cls, timer: StepTimer, longest_tokens: int) -> PartialPrefillPredictor:
        """For prompts of up to so many tokens."""
        tokens = _lengths(longest_tokens)
        points = np.column_stack([tokens, timer.step_s(steps(chunk_new=tokens))])
        return cls.fit(points, "relative", nonnegative=True)


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
    def in_use(cls, timer: StepTimer, budget_tokens: int, longest_tokens: int) -> ChunkedIterationPredictor:
        """For chunks within prompts of up to so many tokens, beside decodes whose contexts are no longer."""
        decodes = [count for count in DECODES if count < budget_tokens] or [0, max(1, budget_tokens - 1)]
        contexts = np.concatenate([[0.0], _lengths(longest_tokens, 16)[:-1]])
        each_tokens = np.unique(np.array([longest_tokens / 8, longest_tokens / 3, longest_tokens]).round())
        grid = np.meshgrid(contexts, np.array(decodes, dtype=np.float64), each_tokens)
        context, count, tokens = (axis.ravel() for axis in grid)
        # So many decodes leave the chunk the rest of the budget.
        seconds = timer.step_s(steps(budget_tokens - count, context, count, count * tokens))
        points = np.column_stack([context, count * tokens, seconds])
        return cls.fit(points, "relative", nonnegative=True)


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
