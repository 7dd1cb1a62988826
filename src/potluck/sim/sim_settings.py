"""Settings of the simulated world; the Brain does not know them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from potluck.core.errors import InputError


@dataclass(frozen=True, slots=True)
class SimSettings:
    """How a run is simulated."""

    fast_forward: bool = True
    overlap: bool = True  # Send KV layer by layer while the prefill runs; otherwise in one piece after it.
    reports: bool | None = None
    """Whether replicas and links report; None: if a rule of the policy reads reports."""
    first_tokens: bool | None = None
    """Whether first tokens are events; None: if a rule reads them or a log is written."""
    report_period_s: float = 0.25
    report_delay_s: float = 0.05
    caches: bool = True  # Simulate prefix caches, where requests have block hashes.
    warm: bool = True  # The first plan's replicas are ready at once.
    tick_s: float = 1.0
    planner_s: float = 10.0  # Duration of a replan.
    heartbeat_s: float = 0.0
    """Heartbeat timeout after which a failed replica counts as lost (THUNDERSERVE 3.4); 0: known at once."""
    samples: int = 0  # Number of samples of every replica's state, for plots.
    end_s: float = inf  # The run stops here, even with open requests.

    def __post_init__(self) -> None:
        for name in ("report_period_s", "tick_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"settings: {name}", f"must be positive, is {getattr(self, name)}")
        for name in ("report_delay_s", "planner_s", "samples", "heartbeat_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"settings: {name}", f"must not be negative, is {getattr(self, name)}")
