"""What an allocation answers: counts, shares, flows, the proven gap, prices, and why not when it cannot."""

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
    """How many copies' time of a column go to one phase of one bucket, and the rate that gives."""

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
    """The largest fraction of all demands that can be met together, and what stands in the way."""

    fraction: float
    fraction_bound: float  # Proven: no plan meets more than this.
    binding: tuple[str, ...]  # Resources that limit how much can be met, dearest first.
    unserved: tuple[str, ...] = ()  # Demands that no template in any region can serve at all.
    overpinned: tuple[str, ...] = ()  # Resources that the pinned copies alone exceed.
    unkept: tuple[str, ...] = ()  # Limits that no plan keeps together, even one that serves nothing.

    def __str__(self) -> str:
        if self.overpinned:
            return f"the pinned copies need more than there is of {', '.join(self.overpinned)}"
        if self.unkept:
            return f"nothing keeps all of what is asked: {'; '.join(self.unkept[:4])}"
        if self.unserved:
            return f"no template that fits can serve {', '.join(self.unserved)}"
        names = ", ".join(self.binding[:4]) or "whole copies, not any one resource"
        return f"at most {max(self.fraction, 0.0) + 0.0:.1%} of the demand can be met; what binds: {names}"


@dataclass(frozen=True, slots=True)
class OrderPrice:
    """What it takes that who crosses a link is no shorter than who stays."""

    models: tuple[int, ...]  # Those that would not be in order by themselves.
    usd_per_h: float | None  # Rent; None where not all demand is met.
    fraction: float  # Of the demand, what more would be served in any order.


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """The best plan found and how far from the cheapest it can be.

    When infeasible, counts, shares and flows are those of a plan that meets `shortfall.fraction` of every demand.
    """

    status: Status
    counts: tuple[ColumnCount, ...]
    shares: tuple[ColumnShare, ...]
    flows: tuple[FlowRate, ...]
    cost_usd_per_h: float  # The objective: rent, initialisation penalty and egress.
    rent_usd_per_h: float
    lower_bound_usd_per_h: float
    gap: float  # (cost - lower bound) / cost; infinite without a plan.
    node_prices_usd_per_h: Floats  # Shadow prices [regions, node types]: saved per further node.
    shortfall: Shortfall | None = None
    order: OrderPrice | None = None  # None where lengths are in order, or need not be, without asking.

    @property
    def fraction(self) -> float:
        return 1.0 if self.shortfall is None else self.shortfall.fraction

    @property
    def found(self) -> bool:
        return self.status in ("optimal", "feasible")
