"""The result of solving the program: counts, shares, flows, proven gap, dual prices, and the shortfall if any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from potluck.plan.allocate.program import ColumnCount, ColumnKey, Floats

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
"""optimal: proven to rounding; feasible: a plan with its gap; infeasible: proven; unknown: time ran out with neither
a plan nor a proof.
"""

Phase = Literal["prefill", "decode", "closed"]


@dataclass(frozen=True, slots=True)
class ColumnShare:
    """Time of a column's copies spent on one phase of one bucket, and the request rate that it serves."""

    key: ColumnKey
    bucket: int
    phase: Phase
    copies: float
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class FlowRate:
    """Requests of a bucket prefilled in `source` and decoded in `target`."""

    model: int
    bucket: int
    source: int
    target: int
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The largest fraction of all demands that can be met together, and the binding resources."""

    fraction: float
    fraction_bound: float  # Proven upper bound on the fraction.
    binding: tuple[str, ...]  # Resources that limit how much can be met, dearest first.
    unserved: tuple[str, ...] = ()  # Demands that no template in any region can serve at all.
    overpinned: tuple[str, ...] = ()  # Resources that the pinned copies alone exceed.
    unkept: tuple[str, ...] = ()  # Limits that conflict, even in a plan that serves nothing.

    def __str__(self) -> str:
        if self.overpinned:
            return f"the pinned copies need more than is available of {', '.join(self.overpinned)}"
        if self.unkept:
            return f"these terms conflict: {'; '.join(self.unkept[:4])}"
        if self.unserved:
            return f"no template that fits the fleet can serve {', '.join(self.unserved)}"
        names = ", ".join(self.binding[:4]) or "whole copies, not any one resource"
        return f"at most {max(self.fraction, 0.0) + 0.0:.1%} of the demand can be met; limited by: {names}"


@dataclass(frozen=True, slots=True)
class OrderingCost:
    """Cost of the rule that requests which cross a link are no shorter than those that stay."""

    models: tuple[int, ...]  # Models whose cheapest routing breaks the rule.
    usd_per_h: float | None  # Extra rent; None where not all demand is met.
    fraction: float  # Fraction of the demand that only routing without the rule serves.


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """The best solution found, with the proven bound on its distance from the cheapest.

    When infeasible, counts, shares and flows are those of a solution that meets `shortfall.fraction` of every demand.
    """

    status: Status
    counts: tuple[ColumnCount, ...]
    shares: tuple[ColumnShare, ...]
    flows: tuple[FlowRate, ...]
    cost_usd_per_h: float  # The objective: rent, initialisation penalty and egress.
    rent_usd_per_h: float
    lower_bound_usd_per_h: float
    gap: float  # (cost - lower bound) / cost; infinite without a plan.
    node_prices_usd_per_h: Floats  # Shadow prices [regions, node types]: saving per additional node.
    shortfall: Shortfall | None = None
    order: OrderingCost | None = None  # None where the rule does not apply or costs nothing.

    @property
    def fraction(self) -> float:
        return 1.0 if self.shortfall is None else self.shortfall.fraction

    @property
    def found(self) -> bool:
        return self.status in ("optimal", "feasible")
