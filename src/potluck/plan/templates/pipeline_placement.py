"""The best placement of one multiset of nodes: which nodes and how many layers each stage has.

`plan.templates.pipeline` keeps only the throughput and the number of stages of its many templates; this finds
the placement of a chosen one again. It tries every partition of the nodes and divides the layers by a
recursion over stages that supposes nothing of T̂, so it also is a second opinion on the compiled search:

    F_s(l) = max_j min(F_{s-1}(l - j), Σ_{g in stage s} T̂_j(g)),    F_0(0) = ∞,    T = F_S(L)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from potluck.plan.templates.pipeline_partitions import partitions, pattern_of

Ints = NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages as (layers, types of their nodes), and the throughput of the slowest one."""

    units: int
    stages: tuple[tuple[int, tuple[int, ...]], ...]


def best_placement(
    units: Ints, types: tuple[int, ...], *, stages: int | None = None, target: int | None = None
) -> Placement | None:
    """The best placement of these node types (ascending); None when they cannot hold the model.

    `units` is T̂ as in `StageRates`. With `stages`, only with so many; the search ends early at `target`.
    """
    best: Placement | None = None
    most = min(len(types), units.shape[0], units.shape[2])
    for count in range(1, most + 1) if stages is None else (stages,):
        for masks in partitions(len(types)).of(len(types), pattern_of(types), count):
            groups = [tuple(t for i, t in enumerate(types) if mask >> i & 1) for mask in masks]
            rates = np.stack([units[count - 1, list(group)].sum(axis=0) for group in groups])
            reached, layers = divide(rates)
            if reached > (best.units if best else 0):
                best = Placement(reached, tuple(zip(layers, groups, strict=True)))
            if best and target is not None and best.units >= target:
                return best
    return best


def divide(rates: Ints) -> tuple[int, tuple[int, ...]]:
    """(T, layers of each stage) for stages with these rates: (S, L), [s, j-1] is stage s with j layers."""
    layers = rates.shape[1]
    total = np.arange(layers + 1)
    before = total[:, None] - np.arange(1, layers + 1)[None, :]  # l - j
    reached = np.where(total == 0, NEVER, 0)
    choices = []
    for row in rates:
        options = np.where(before >= 0, np.minimum(reached[before], row), 0)
        choice = options.argmax(axis=1)
        reached = options[total, choice]
        choices.append(choice + 1)
    split: list[int] = []
    left = layers
    for choice in reversed(choices):
        split.append(int(choice[left]))
        left -= split[-1]
        if left < 0:  # only where nothing is reached at all
            return 0, ()
    return int(reached[layers]), tuple(reversed(split))
