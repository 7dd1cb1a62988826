"""What a fleet's owner asks of the allocation beside demand: rows over counts, and losses that must be survived.

    limit_i    low_i <= sum_j A_ij n_j + sum_h B_ih y_h - t_i theta <= high_i      y_h: a helper, whole or not

Everything is such a row: at most so many copies (A = 1), at most so many kinds of GPU (y says whether a kind is
used), what is left after a loss. The last is not written down at once: `outages.py` adds, of all rows that a loss
asks for, those that some plan would break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExtraVariable:
    """A variable beside counts, shares and flows."""

    name: str
    upper: float = 1.0
    whole: bool = True
    usd_per_h: float = 0.0
    """What is paid where it is 1 ..."""
    row: int = -1
    """... which the copies in this limit call for."""


@dataclass(frozen=True, slots=True, eq=False)
class CountLimit:
    """One row over counts."""

    name: str
    low: float
    high: float
    copies: tuple[Floats | None, ...]
    """A: per model [templates, regions]; None: all 0."""
    helpers: tuple[tuple[int, float], ...] = ()
    """(helper, B)"""
    theta: float = 0.0
    """t: for rows that ask for so much of the demand."""

    def scaled(self, fraction: float) -> CountLimit:
        return self if not self.theta else replace(self, theta=self.theta * fraction)


@dataclass(frozen=True, slots=True, eq=False)
class Outage:
    """Nodes that may go all at once, and the share of each model's demand that must still be served without them."""

    name: str
    gone: NDArray[np.bool_]
    """[regions, node types]; a copy with a node of these goes with it."""
    shares: tuple[float, ...]
    """Per model; 0: nothing is asked."""


def check_limits(
    limits: Sequence[CountLimit],
    helpers: Sequence[ExtraVariable],
    outages: Sequence[Outage],
    spare: Sequence[float],
    shapes: Sequence[tuple[int, int]],
    fleet: tuple[int, int],
) -> None:
    """Raises where tables do not fit the program they are for."""
    for limit in limits:
        if len(limit.copies) != len(shapes) or any(
            table is not None and table.shape != shape
            for table, shape in zip(limit.copies, shapes, strict=False)
        ):
            raise InputError(f"limit {limit.name}", "needs a table of templates and regions for every model")
        if any(not 0 <= place < len(helpers) for place, _ in limit.helpers):
            raise InputError(f"limit {limit.name}", "names a helper that is not there")
    for outage in outages:
        if outage.gone.shape != fleet or len(outage.shares) != len(shapes):
            raise InputError(
                f"outage {outage.name}", "needs a table of regions and nodes, and a share per model"
            )
    if spare and len(spare) != len(shapes):
        raise InputError("spare", "needs a share per model")
    for share in (*spare, *(each for outage in outages for each in outage.shares)):
        if not 0 <= share <= 1:
            raise InputError("share", f"must be between 0 and 1, is {share}")
