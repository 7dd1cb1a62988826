"""Helix's flow: ranges of layers on unlike nodes, and requests routed through them as a maximum flow.

No template can be it: a request may enter a node in the middle of its layers, and goes on from their end to any node
that holds the next one. Helix's program, with like nodes counted together and links that never bind:

    n_taj   nodes of type t that hold layers [a, a + j)         whole
    x_ptaj  requests a second that enter them at layer p        a <= p < a + j

    maximise   Σ x_0taj
    nodes_t    Σ_aj n_taj <= N_t
    work_taj   Σ_p x_ptaj <= r_tj n_taj                         r: what a node of j layers does, whatever its part
    layer_p    Σ_{a + j = p} x_qtaj = Σ x_ptaj                  0 < p < L

A node computes both phases in turn, and is rated as one of L / j stages, without objectives (Helix has none).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from potluck.core.values.model import Model
from potluck.core.values.types import NodeType, Slo
from potluck.plan.allocate.highs import Milp, solve_milp
from potluck.plan.timing.stage_rates import UNITS_PER_TOKEN, stage_rates

NO_OBJECTIVE = Slo(1e4, 1e3)
Range = tuple[int, int, int]  # Type, first layer, layers; layers are counted in steps of the grid.


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests a second, what no placement exceeds, and how many nodes hold which layers."""

    per_s: float
    bound_per_s: float
    placed: Mapping[Range, int]


def node_rates(model: Model, nodes: Sequence[NodeType], lengths: tuple[int, int], step: int) -> np.ndarray:
    """[types, layers / step]: requests a second of a node that holds so many layers."""
    stages = model.layer_count // step
    prefill, decode = stage_rates(model, nodes, NO_OBJECTIVE, *lengths, max_stages=stages)
    made = np.zeros((len(nodes), stages))
    for j in range(1, stages + 1):
        of = -(-stages // j) - 1
        for phase, tokens in ((prefill, lengths[0]), (decode, lengths[1])):
            with np.errstate(divide="ignore"):
                made[:, j - 1] += tokens * UNITS_PER_TOKEN / phase.units[of, :, j * step - 1]
    return 1.0 / made


def best_flow(rates: np.ndarray, counts: Sequence[int], time_limit_s: float = 30.0) -> Flow:
    """The most requests that nodes of these rates [types, layers] can serve."""
    layers = rates.shape[1]
    ranges = [
        (t, a, j)
        for t in range(len(counts))
        for j in range(1, layers + 1)
        for a in range(layers - j + 1)
        if rates[t, j - 1] > 0
    ]
    size, inside = len(ranges), [j for _, _, j in ranges]
    first = [size, *accumulate(inside, initial=size)][1:]  # Where the flows of each range begin.
    entries = list[tuple[int, int, float]]()  # Rows: types, ranges, layers.
    for place, (t, a, j) in enumerate(ranges):
        entries += [(t, place, 1.0), (len(counts) + place, place, -rates[t, j - 1])]
        for p in range(a, a + j):
            column = first[place] + p - a
            entries.append((len(counts) + place, column, 1.0))
            entries += [(len(counts) + size + p, column, -1.0)] if p else []
            entries += [(len(counts) + size + a + j, column, 1.0)] if a + j < layers else []
    columns = size + sum(inside)
    cost = np.zeros(columns)
    cost[[first[place] for place, (_, a, _) in enumerate(ranges) if a == 0]] = -1.0
    rows, places, values = (np.array(part) for part in zip(*entries, strict=True))
    most = np.array([counts[t] for t, _, _ in ranges], float)
    answer = solve_milp(
        Milp(
            cost=cost,
            lower=np.zeros(columns),
            upper=np.concatenate([most, np.full(columns - size, np.inf)]),
            integer=np.arange(columns) < size,
            row_lower=np.concatenate([np.full(len(counts) + size, -np.inf), np.zeros(layers)]),
            row_upper=np.concatenate([np.array(counts, float), np.zeros(size + layers)]),
            row=rows.astype(np.int64),
            column=places.astype(np.int64),
            value=values.astype(np.float64),
        ),
        time_limit_s=time_limit_s,
        gap_rel=1e-6,
    )
    if answer.x is None:
        return Flow(0.0, -answer.bound, {})
    held = {one: round(n) for one, n in zip(ranges, answer.x[:size].tolist(), strict=True) if n > 0.5}
    return Flow(-float(cost @ answer.x), -answer.bound, held)
