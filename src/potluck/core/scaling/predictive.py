"""Re-allocation ahead of time: the planner is asked for the rates that are coming, not for those that were.

A copy takes minutes to start, so whoever waits for a rise is late; and a copy that is drained in a dip is started
again right after it. Here each model's `Forecaster` says what is to be expected:

    soon   the rate until a copy asked for now would serve, exceeded in no more than 1 - `forecast_share` of all cases
    later  the rate expected within `keep_s`
    need = max(soon, later), or what it was at any time within the last `keep_s`

So fleets grow at once and ahead of a rise, and shrink only when what would go was not needed for a while and is not
expected to be soon. The planner leaves a share of every copy idle, its headroom, for what averages do not show. The
forecast's own error is in `need` already, so that headroom is not asked for twice; the planner is asked for

    (need + sqrt(need / BURST_S)) x headroom / busiest

with `busiest` the share of a copy that may be used when things come as expected at the worst, and one standard
deviation of what comes by chance within BURST_S on top: a rate of 1 a second needs 20 % for that, one of 10 only 6 %.
"""

from __future__ import annotations

from collections import deque
from math import sqrt

from potluck.core.scaling.forecast import Forecaster
from potluck.core.scaling.rule import (
    QUOTED,
    AskReplan,
    RuleNotes,
    ScaleDecision,
    missing_copies,
    queued_requests,
)
from potluck.core.scaling.traffic_window import ModelTraffic, ObservedTraffic
from potluck.core.state.facts import FleetFacts
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region

LOOK_S = 30.0
SOON_S = 300.0
"""From a plan asked for to copies that serve."""
BURST_S = 25.0
"""What chance brings within so long, copies must take; over longer times it evens out. Answers take about as long."""
LEAST_MOVE = 0.02
"""Needs that differ by less are the same."""


class PredictiveReplan:
    """State: each model's forecaster and its needs of late, and for what the planner was last asked."""

    def __init__(self, policy: Policy, facts: FleetFacts) -> None:
        self._policy = policy
        self._facts = facts
        self._forecasters: dict[str, Forecaster] = {}
        self._peaks: dict[str, deque[tuple[float, float]]] = {}
        """Needs of the last `keep_s` that no later one exceeds: (when, how much), the largest first."""
        self._asked: dict[str, float] = {}
        self._asked_s: float | None = None
        self._looked_s: float | None = None
        self._quoted = False
        self._notes = RuleNotes()

    def why(self) -> str:
        return self._notes.text()

    def quoted(self, regions: tuple[Region, ...]) -> None:
        self._quoted = True

    def on_tick(
        self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan
    ) -> tuple[ScaleDecision, ...]:
        for seen in observed.models:
            self._forecaster(seen.model).count(at_s, seen.arrivals_ever)
        if self._asked_s is None:
            self._asked_s = at_s
        if self._looked_s is not None and at_s - self._looked_s < LOOK_S and not self._quoted:
            self._notes.wait("ahead", f"looks again in {LOOK_S - (at_s - self._looked_s):.0f} s")
            return ()
        if any(seen.span_s < self._policy.window_s for seen in observed.models) and not self._quoted:
            # Just started: that nobody has come yet is no reason to let copies go that were planned.
            self._notes.say("ahead", "has not seen a window of requests yet")
            return ()
        self._looked_s = at_s
        needs = {seen.model: self._need(at_s, seen, fleet) for seen in observed.models}
        moved = [self._moved(model, need) for model, need in needs.items() if self._moved(model, need)]
        since_s = at_s - self._asked_s
        missing = missing_copies(fleet, plan) if since_s >= self._policy.replan_s else 0
        if missing:
            moved.append(f"{missing} copies of the plan are not there")
        if self._quoted:
            moved.append(QUOTED)
        if not moved and since_s >= self._policy.global_window_s:
            moved.append("prices and nodes may have changed")
        if not moved or not needs:
            self._notes.say("ahead", "what is needed is what was asked for")
            return ()
        self._asked_s, self._quoted = at_s, False
        self._asked.update(needs)
        reason = ", ".join(moved)
        self._notes.say("ahead", f"asks for a plan: {reason}")
        return (AskReplan(tuple(needs.items()), reason),)

    def _forecaster(self, model: str) -> Forecaster:
        found = self._forecasters.get(model)
        if found is None:
            found = self._forecasters[model] = Forecaster(self._facts.history.get(model, ()))
        return found

    def _need(self, at_s: float, seen: ModelTraffic, fleet: FleetState) -> float:
        """The rate to plan for; never nothing, or the model's last copy would go."""
        policy, forecaster = self._policy, self._forecaster(seen.model)
        noise = seen.error_per_s / max(seen.rate_per_s, seen.error_per_s, 1e-9)
        soon = forecaster.outlook(seen.rate_per_s, noise, SOON_S, policy.forecast_share)
        later = forecaster.outlook(seen.rate_per_s, noise, policy.keep_s, 0.5)
        queued = seen.held + queued_requests(fleet, seen.model)
        rate_per_s = max(soon.high_per_s, later.mean_per_s)
        need = (rate_per_s + sqrt(rate_per_s / BURST_S)) * policy.headroom / policy.busiest
        need += queued / policy.replan_s
        peaks = self._peaks.setdefault(seen.model, deque())
        while peaks and peaks[-1][1] <= need:
            peaks.pop()
        peaks.append((at_s, need))
        while peaks[0][0] < at_s - policy.keep_s:
            peaks.popleft()
        self._notes.say(
            seen.model,
            f"{seen.rate_per_s:.3g} requests/s now, at most {soon.high_per_s:.3g} soon,"
            f" {later.mean_per_s:.3g} within {policy.keep_s / 60:.0f} min ({later.reason})",
        )
        return max(peaks[0][1], 1.0 / max(seen.long_span_s, 1.0))

    def _moved(self, model: str, need: float) -> str:
        old = self._asked.get(model, 0.0)
        if abs(need - old) > LEAST_MOVE * old:
            return f"{model} needs {need:.3g} requests/s, was {old:.3g}"
        return ""
