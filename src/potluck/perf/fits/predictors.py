"""CRONUS's two predictors (section 4.4), and the sum over iterations (section 4.3).

    (2)  T_parprefill = k_p L + b_p                            L tokens of the prompt's first part
    (3)  t_chunked    = k_ctxp L_p + k_ctxd sum of L_d + b_c   contexts: L_p before the chunk, L_d per decode
    (1)  T_chunked    = N_iter (t_first + t_last) / 2          an arithmetic series, as (3) is linear in L_p

Three numbers per GPU and model are enough for a balancer that must answer within a request's arrival. Both
fit points as they were measured, or the answers of any StepTimer; both keep R^2 and the mean error.

The paper fits by plain least squares. A line through times that grow faster than the length then starts below zero
(-25 ms for Llama-3.1-8B on an A10 over 128 to 8,192 tokens), and short prompts look free. `in_use` is what decisions
are made with: the lengths that a plan is for, relative errors, and no term below zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from potluck.core.errors import InputError
from potluck.perf.fits.linear_fit import LinearFit, Weights, linear_fit
from potluck.perf.step_timer import Floats, StepTimer, steps

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
    """(2) T = k_p L + b_p, for a prefill alone on its GPU."""

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
        context, count, each = (axis.ravel() for axis in grid)
        if count.size and count.max() >= budget_tokens:
            raise InputError(
                "predictor: budget_tokens", f"{budget_tokens} leave no room beside {count.max():g} decodes"
            )
        seconds = timer.step_s(steps(budget_tokens - count, context, count, count * each))
        return cls.fit(np.column_stack([context, count * each, seconds]), weights, nonnegative=nonnegative)

    @classmethod
    def in_use(cls, timer: StepTimer, budget_tokens: int, longest_tokens: int) -> ChunkedIterationPredictor:
        """For chunks within prompts of up to so many tokens, beside decodes whose contexts are no longer."""
        decodes = [count for count in DECODES if count < budget_tokens] or [0, max(1, budget_tokens - 1)]
        contexts = np.concatenate([[0.0], _lengths(longest_tokens, 16)[:-1]])
        each = np.unique(np.array([longest_tokens / 8, longest_tokens / 3, longest_tokens]).round())
        return cls.from_timer(timer, budget_tokens, contexts, decodes, each, "relative", nonnegative=True)

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
