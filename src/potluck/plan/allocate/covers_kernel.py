"""The compiled inner loop of `plan.allocate.covers`: which partial covers can take which copy next."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from potluck.plan.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Shorts = NDArray[np.int16]


@compiled
def extend(
    first: int,
    uses: Shorts,
    left: Floats,
    paid: Floats,
    last: Ints,
    step: Shorts,
    part: Floats,
    price: Floats,
    twin: Ints,
    limit: Shorts,
    table: Floats,
    ceiling: float,
    state: Ints,
    column: Ints,
) -> tuple[int, int]:
    """Write pairs (state, column) from state `first` on; (pairs written, the state to go on with).

    A pair counts when the cheapest completion stays below the ceiling and all nodes fit. Columns are taken in
    ascending order, from `last[i]` on. `twin[j]` is the place in `uses` of the running column that a new column
    j repeats: the running copies are taken first, since they do the same for less; -1 where there is none.
    """
    grid = len(table) - 1
    columns, width, room = len(part), uses.shape[1], len(state)
    count = 0
    for i in range(first, len(left)):
        if count + columns > room:
            return count, i
        for j in range(last[i], columns):
            rest = left[i] - part[j]
            units = math.ceil(rest * grid - 1e-6) if rest > 0.0 else 0
            if paid[i] + price[j] + table[max(units, 0)] > ceiling:
                continue
            if twin[j] >= 0 and uses[i, twin[j]] < limit[twin[j]]:
                continue
            fits = True
            for c in range(width):
                if uses[i, c] + step[j, c] > limit[c]:
                    fits = False
                    break
            if fits:
                state[count] = i
                column[count] = j
                count += 1
    return count, len(left)
