"""How the simulated world runs; nothing of it is known to the Brain."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from potluck.core.errors import InputError


@dataclass(frozen=True, slots=True)
class SimSettings:
    fast_forward: bool = True
    overlap: bool = True  # Send KV layer by layer while the prefill runs; otherwise in one piece after it.
    reports: bool | None = None
    """Whether replicas and links report; None: when some rule of the policy reads what they say."""
    first_tokens: bool | None = None
    """Whether the Brain hears of first tokens; None: when some rule reads them, or a log is written."""
    report_period_s: float = 0.25
    report_delay_s: float = 0.05
    caches: bool = True  # Keep prefixes, where requests carry blocks.
    warm: bool = True  # The first plan's replicas are ready at once.
    tick_s: float = 1.0
    planner_s: float = 10.0  # From asking the planner to its answer.
    heartbeat_s: float = 0.0
    """How long nothing must be heard of a replica until it counts as lost (THUNDERSERVE 3.4); 0: known at once."""
    samples: int = 0  # How many times to look at every replica, for plots.
    end_s: float = inf  # Stop here whatever is open.

    def __post_init__(self) -> None:
        for name in ("report_period_s", "tick_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"settings: {name}", f"must be positive, is {getattr(self, name)}")
        for name in ("report_delay_s", "planner_s", "samples", "heartbeat_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"settings: {name}", f"must not be negative, is {getattr(self, name)}")
