"""The plans of a day, as `potluck schedule --out` writes them: which is due at what time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from datetime import datetime

from potluck.core.values.plan import Plan

DAY_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class DayPlans:
    plans: tuple[tuple[int, Plan], ...]
    """(second of the day from which on, plan), by time."""
    lead_s: float = 0.0
    """How long engines take to start: a plan that costs more begins so much earlier, and is ready on time."""

    def due(self, now_s: float) -> tuple[str, Plan]:
        """The plan for a moment in this machine's own time of day, and its name."""
        at = datetime.fromtimestamp(now_s)
        second = at.hour * 3600 + at.minute * 60 + at.second
        place = bisect_right([begin_s for begin_s, _ in self.plans], second) - 1
        following = (place + 1) % len(self.plans)
        begin_s, plan = self.plans[following]
        soon = (begin_s - second) % DAY_S <= self.lead_s
        if soon and plan.cost_usd_per_h > self.plans[place][1].cost_usd_per_h:
            place = following
        begin_s, plan = self.plans[place]
        return f"{begin_s // 3600:02d}:{begin_s // 60 % 60:02d}", plan
