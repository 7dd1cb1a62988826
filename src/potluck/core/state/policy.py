"""Which rules decide: the few knobs of the run-time policies, with defaults that hold for most fleets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal

from potluck.core.errors import InputError
from potluck.core.values.service import CLASSES, PrefixSharing, RequestClass, Tenant

SplitRule = Literal["series", "printed"]
"""CRONUS's balancer: by the sum over iterations (equation 1), or as its Algorithm 1 is printed."""


LISTS: Final = frozenset({"tenants", "classes", "shared_prefixes"})
"""Rules that are no plain values: only a spec has them."""


@dataclass(frozen=True, slots=True)
class Policy:
    balance: str = "learned"
    """How requests are spread over targets: a name in `BALANCES` (`core/routing/balance.py`)."""
    opportunistic: bool = True
    """Run a request in place on an idle replica of its unit (CAUCHY 3.4.2)."""
    split: bool = True
    """Let pairs share a prompt's prefill (CRONUS); otherwise the low-end GPU takes it whole."""
    split_rule: SplitRule = "series"
    """How a pair's share is worked out; `printed` is for comparison with the paper."""
    adapt_threshold: bool = True
    """Move length thresholds between regions with the link's load (PrfaaS 3.4.3)."""
    home: str = ""
    """The region of this gateway, where several serve a plan: others' replicas are for when its own are behind."""
    affinity: float = 1.0
    """Seconds of waiting that a second of saved prefill is worth; 0 ignores caches."""
    pool_caches: bool = True
    """Fetch a prefix from another replica of the region, where that is sooner than computing it (PrfaaS 3.2)."""
    split_overflow: bool = True
    """In pairs, a prompt that finds the low-end GPU full goes whole to the high-end one if sooner; CRONUS waits."""
    low_decodes: bool = True
    """In pairs, keep some decodes on the low-end GPU while the high-end one is over its batch (beyond CRONUS)."""
    scaling: str = "none"
    """Who changes the fleet: a name in `SCALERS` (`core/scaling/autoscaler.py`)."""
    retries: int = 2
    """How often a request may be sent again after failures that may be its own fault."""
    max_wait_s: float = 60.0
    """Requests wait so long for a replica, or for their turn, before they are refused."""
    admission: bool = True
    """Send replicas only what they begin soon, let the rest wait, refuse what would be late; only with an SLO."""
    queue_requests: int = 1000
    """Requests of one tenant for one model that may wait for their turn."""
    disturbance: float = 0.08
    """How much slower, on average, other tenants' tokens may get for one tenant's long prompts; 0: not at all."""
    set_apart: bool = True
    """Set replicas apart for tenants that send little but long prompts; others' prompts are handed over there."""
    tenants: tuple[Tenant, ...] = ()
    """Tenants with weights; any other weighs 1."""
    classes: tuple[RequestClass, ...] = CLASSES
    shared_prefixes: tuple[PrefixSharing, ...] = ()
    """Who uses whose cached prefixes, beside one's own; told apart by a salt where requests come in."""
    tick_s: float = 1.0
    window_s: float = 120.0
    """Sliding window over which rates and lengths are watched (CAUCHY Algorithm 1)."""
    ratio: float = 0.2
    """Deviation of the rate from the capacity that calls for scaling (CAUCHY Algorithm 1)."""
    global_window_s: float = 1800.0
    """A rate that held so long calls for a refinement of the whole fleet (CAUCHY 3.5.2)."""
    grace_s: float = 600.0
    """From a drain until the replica is stopped, done or not (CORAL 5.1 waits about a minute, CAUCHY 3.5 30 s)."""
    replan_s: float = 360.0
    """Between two periodic re-allocations (CORAL 5.1)."""
    forecast_share: float = 0.7
    """Share of cases in which the rate forecast for the next minutes should suffice (`ahead`)."""
    keep_s: float = 1800.0
    """A copy that will be needed again within so long, or was needed, is kept (`ahead`)."""
    busiest: float = 0.95
    """How busy copies may be when the forecast's worst comes; headroom is not counted on top of it (`ahead`)."""
    headroom: float = 0.8
    """Share of a template's capacity that scaling counts on, as the planner does."""
    dip: float = 0.0
    """Share of the capacity that may be missing while copies are exchanged on nodes that are all taken."""
    advise: bool = False
    """Scaling only says what it would do."""

    def __post_init__(self) -> None:
        for bounded, fine, must in BOUNDS:
            for name in bounded.split():
                value = getattr(self, name)
                if not fine(value):
                    raise InputError(f"policy: {name}", f"must {must}, is {value}")
        for kind, names in (
            ("tenants", [tenant.name for tenant in self.tenants]),
            ("classes", [request_class.name for request_class in self.classes]),
        ):
            if len(set(names)) < len(names):
                raise InputError(f"policy: {kind}", "must have names of their own")
        for first, second in combinations(self.shared_prefixes, 2):
            if first.meets(second):
                problem = "has two entries for the same tenant and model; make them one"
                raise InputError("policy: shared_prefixes", problem)


BOUNDS: Final[tuple[tuple[str, Callable[[float], bool], str], ...]] = (
    (
        "affinity max_wait_s grace_s disturbance retries",
        lambda value: value >= 0,
        "not be negative",
    ),
    ("tick_s window_s ratio global_window_s replan_s keep_s", lambda value: value > 0, "be positive"),
    ("headroom busiest", lambda value: 0 < value <= 1, "be above 0 and at most 1"),
    ("forecast_share", lambda value: 0 < value < 1, "be between 0 and 1"),
    ("dip", lambda value: 0 <= value <= 1, "be from 0 to 1"),
    ("queue_requests", lambda value: value >= 1, "be at least 1"),
)
