"""What a formula leaves over, as a smooth surface over two features.

Kernels have habits that no short formula catches. Where a GPU was measured, the logarithm of measured over
predicted time is kept on a coarse grid of two base-2 logarithms and interpolated bilinearly; outside the
grid the nearest edge holds. A third feature enters as a power. A GPU that was not measured has no surface.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from potluck.perf.step_timer import Floats


@dataclass(frozen=True, slots=True)
class Residual:
    """`log_factor[i][j]` belongs to `x[i]`, `y[j]`, both base-2 logarithms of a feature."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    log_factor: tuple[tuple[float, ...], ...]
    z_power: float = 0.0

    def factor(self, x: ArrayLike, y: ArrayLike, z: ArrayLike = 1.0) -> Floats:
        """What to multiply a predicted time with; `x`, `y` and `z` are the features themselves."""
        rows, row_share = _position(self.x, x)
        cols, col_share = _position(self.y, y)
        grid = np.asarray(self.log_factor)
        low = grid[rows, cols] * (1 - col_share) + grid[rows, cols + 1] * col_share
        high = grid[rows + 1, cols] * (1 - col_share) + grid[rows + 1, cols + 1] * col_share
        third = self.z_power * np.log2(np.asarray(z, np.float64))
        result: Floats = np.exp(low * (1 - row_share) + high * row_share + third)
        return result


def fit_residual(
    x: Floats,
    y: Floats,
    z: Floats,
    log_ratio: Floats,
    *,
    knots: tuple[int, int] = (10, 10),
    smoothing: float = 1.0,
) -> Residual:
    """Fit a surface to log(measured / predicted), robustly: far-off rows lose their weight."""
    xs, ys = _knots(x, knots[0]), _knots(y, knots[1])
    size = len(xs) * len(ys)
    design = np.column_stack([_design(x, y, xs, ys), np.log2(z)])
    penalty = 0.3 * np.eye(size + 1)
    penalty[:size, :size] += smoothing * _roughness(len(xs), len(ys))
    weights: Floats = np.ones(len(log_ratio))
    found: Floats = np.zeros(size + 1)
    for _ in range(8):
        weighted = design * weights[:, None]
        found = np.asarray(np.linalg.solve(design.T @ weighted + penalty, weighted.T @ log_ratio), np.float64)
        left = log_ratio - design @ found
        scale = max(1.4826 * float(np.median(np.abs(left))), 1e-3)
        weights = 1.0 / np.maximum(1.0, np.abs(left) / (1.5 * scale))
    grid = found[:size].reshape(len(xs), len(ys)).round(4)
    rows = tuple(tuple(map(float, row)) for row in grid)
    return Residual(tuple(map(float, xs)), tuple(map(float, ys)), rows, round(float(found[size]), 4))


def _position(
    knots: tuple[float, ...], value: ArrayLike
) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], Floats]:
    """Which knot lies before, and how far it is to the next; knots lie evenly (`_knots`), so none is looked for."""
    last = len(knots) - 1
    at = np.log2(np.maximum(np.asarray(value, np.float64), 1e-12))
    at = np.clip((at - knots[0]) * (last / (knots[-1] - knots[0])), 0.0, float(last))
    index = np.minimum(at.astype(np.intp), last - 1)
    share: Floats = at - index
    return index, share


def _knots(value: Floats, count: int) -> Floats:
    logs = np.log2(np.maximum(value, 1e-12))
    low, high = np.quantile(logs, [0.0, 1.0])
    result: Floats = np.linspace(low, max(high, low + 1e-3), count).round(4)
    return result


def _design(x: Floats, y: Floats, xs: Floats, ys: Floats) -> Floats:
    rows, row_share = _position(tuple(xs), x)
    cols, col_share = _position(tuple(ys), y)
    design = np.zeros((len(x), len(xs) * len(ys)))
    index = np.arange(len(x))
    for row_step in (0, 1):
        for col_step in (0, 1):
            share = (row_share if row_step else 1 - row_share) * (col_share if col_step else 1 - col_share)
            design[index, (rows + row_step) * len(ys) + cols + col_step] += share
    return design


def _roughness(rows: int, cols: int) -> Floats:
    """Squared differences between neighbours of the grid."""
    size = rows * cols
    result = np.zeros((size, size))
    for row in range(rows):
        for col in range(cols):
            here = row * cols + col
            for there in (here + cols if row + 1 < rows else None, here + 1 if col + 1 < cols else None):
                if there is not None:
                    result[here, here] += 1
                    result[there, there] += 1
                    result[here, there] -= 1
                    result[there, here] -= 1
    return result
