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
        rows, row_share = knot_position(self.x, x)
        cols, col_share = knot_position(self.y, y)
        grid = np.asarray(self.log_factor)
        low = grid[rows, cols] * (1 - col_share) + grid[rows, cols + 1] * col_share
        high = grid[rows + 1, cols] * (1 - col_share) + grid[rows + 1, cols + 1] * col_share
        third = self.z_power * np.log2(np.asarray(z, np.float64))
        result: Floats = np.exp(low * (1 - row_share) + high * row_share + third)
        return result


def knot_position(
    knots: tuple[float, ...], value: ArrayLike
) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], Floats]:
    """Which knot lies before, and how far it is to the next; knots lie evenly, so none is looked for."""
    last = len(knots) - 1
    at = np.log2(np.maximum(np.asarray(value, np.float64), 1e-12))
    at = np.clip((at - knots[0]) * (last / (knots[-1] - knots[0])), 0.0, float(last))
    index = np.minimum(at.astype(np.intp), last - 1)
    share: Floats = at - index
    return index, share
