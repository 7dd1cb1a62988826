"""Fits the surface of what a formula leaves over (`perf.operators.residual`)."""

from __future__ import annotations

import numpy as np

from potluck.perf.operators.calibration import Residual, knot_position
from potluck.perf.step_timer import Floats


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
    floats: Floats = np.zeros(size + 1)
    for _ in range(8):
        weighted = design * weights[:, None]
        floats = np.asarray(
            np.linalg.solve(design.T @ weighted + penalty, weighted.T @ log_ratio), np.float64
        )
        left = log_ratio - design @ floats
        scale = max(1.4826 * float(np.median(np.abs(left))), 1e-3)
        weights = 1.0 / np.maximum(1.0, np.abs(left) / (1.5 * scale))
    grid = floats[:size].reshape(len(xs), len(ys)).round(4)
    rows = tuple(tuple(map(float, row)) for row in grid)
    return Residual(tuple(map(float, xs)), tuple(map(float, ys)), rows, round(float(floats[size]), 4))


def _knots(value: Floats, count: int) -> Floats:
    logs = np.log2(np.maximum(value, 1e-12))
    low, high = np.quantile(logs, [0.0, 1.0])
    result: Floats = np.linspace(low, max(high, low + 1e-3), count).round(4)
    return result


def _design(x: Floats, y: Floats, xs: Floats, ys: Floats) -> Floats:
    rows, row_share = knot_position(tuple(xs), x)
    cols, col_share = knot_position(tuple(ys), y)
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
