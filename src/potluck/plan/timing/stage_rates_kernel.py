"""The compiled inner loop of `plan.timing.stage_rates`; letters as there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck.plan.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@compiled
def best_rates(
    layer_s: Floats, rest_s: Floats, wire_s: Floats, most: Ints, within_s: Floats, units: float, found: Floats
) -> None:
    """found[S-1, j-1] = max B·units / τ_j(B) over the batches B that S stages of j layers allow.

    `most` (S_max, L) is the largest B whose KV fits, `within_s` (S_max) what a stage may take. From two stages on,
    what S allows is also allowed with fewer stages, so a batch is noted at the largest S that allows it and carried
    down at the end.
    """
    max_stages, layers = found.shape
    for j in range(1, layers + 1):
        widest = most[0, j - 1]
        if max_stages > 1:
            widest = max(widest, most[1, j - 1])
        for b in range(1, min(widest, layer_s.shape[0]) + 1):
            step_s = j * layer_s[b - 1] + rest_s[b - 1]
            rate = b * units / step_s
            if step_s <= within_s[0] and b <= most[0, j - 1] and rate > found[0, j - 1]:
                found[0, j - 1] = rate
            stages = max_stages
            while stages > 1 and (
                step_s + 2.0 * wire_s[b - 1] > within_s[stages - 1] or b > most[stages - 1, j - 1]
            ):
                stages -= 1
            if stages > 1 and rate > found[stages - 1, j - 1]:
                found[stages - 1, j - 1] = rate
        for stages in range(max_stages - 1, 1, -1):
            found[stages - 1, j - 1] = max(found[stages - 1, j - 1], found[stages, j - 1])
