"""Re-allocation by the planner: every so often with the rates now seen, or ahead of time for those that are coming.

Ahead of time, each model's `Forecaster` says

    soon   the rate until a copy asked for now would serve, exceeded in no more than 1 - `forecast_share` of all cases
    later  the rate expected within `keep_s`
    need = max(soon, later), or what it was at any time within the last `keep_s`

So fleets grow ahead of a rise, and shrink only when what would go is not needed for a while. The forecast's error is
in `need` already, so the planner's headroom is not asked for twice; it is asked for

    (need + sqrt(need / BURST_S)) x headroom / busiest

with one standard deviation of what comes by chance within BURST_S on top."""

from __future__ import annotations

from collections import deque
from math import sqrt

from potluck.core.figures import moved
from potluck.core.scaling import rule
from potluck.core.scaling.forecast import Forecaster
from potluck.core.scaling.traffic_window import ModelTraffic, ObservedTraffic
from potluck.core.state.facts import FleetFacts
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region

LOOK_S = 30.0
SOON_S = 300.0  # From a plan asked for to copies that serve.
BURST_S = 25.0
"""What chance brings within so long, copies must take; over longer times it evens out. Answers take about as long."""
LEAST_NEED = 0.02  # Needs that differ by less are the same.


class PredictiveReplan(rule.Scaler):
    """State: each model's forecaster and its needs of late, and for what the planner was last asked."""

    def __init__(self, policy: Policy, facts: FleetFacts) -> None:
        super().__init__()
        self._policy = policy
        self._facts = facts
        self._forecasters: dict[str, Forecaster] = {}
        self._peaks: dict[str, deque[tuple[float, float]]] = {}
        """Needs of the last `keep_s` that no later one exceeds: (when, how much), the largest first."""
        self._asked: dict[str, float] = {}
        self._asked_s: float | None = None
        self._looked_s: float | None = None
        self._quoted = False

    def market_changed(self, regions: tuple[Region, ...]) -> None:
        self._quoted = True

    def on_tick(
        self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan
    ) -> rule.Decisions:
        for traffic in observed.models:
            self._forecaster(traffic.model).count(at_s, traffic.arrivals_ever)
        if self._asked_s is None:
            self._asked_s = at_s
        if self._looked_s is not None and at_s - self._looked_s < LOOK_S and not self._quoted:
            self._notes.wait("ahead", f"looks again in {LOOK_S - (at_s - self._looked_s):.0f} s")
            return ()
        if any(traffic.span_s < self._policy.window_s for traffic in observed.models) and not self._quoted:
            # Just started: that nobody has come yet is no reason to let copies go that were planned.
            self._notes.say("ahead", "has not seen a window of requests yet")
            return ()
        self._looked_s = at_s
        needs = {traffic.model: self._need(at_s, traffic, fleet) for traffic in observed.models}
        moved = [self._moved(model, need) for model, need in needs.items() if self._moved(model, need)]
        since_s = at_s - self._asked_s
        missing = rule.missing_copies(fleet, plan) if since_s >= self._policy.replan_s else 0
        if missing:
            moved.append(f"{missing} copies of the plan are not there")
        if self._quoted:
            moved.append(rule.MARKET_CHANGED_REASON)
        if not moved and since_s >= self._policy.global_window_s:
            moved.append("prices and nodes may have changed")
        if not moved or not needs:
            self._notes.say("ahead", "what is needed is what was asked for")
            return ()
        self._asked_s, self._quoted = at_s, False
        self._asked.update(needs)
        reason = ", ".join(moved)
        self._notes.say("ahead", f"asks for a plan: {reason}")
        return (rule.AskReplan(tuple(needs.items()), reason),)

    def _forecaster(self, model: str) -> Forecaster:
        forecaster = self._forecasters.get(model)
        if forecaster is None:
            forecaster = self._forecasters[model] = Forecaster(self._facts.history.get(model, ()))
        return forecaster

    def _need(self, at_s: float, traffic: ModelTraffic, fleet: FleetState) -> float:
        """The rate to plan for; never nothing, or the model's last copy would go."""
        policy, forecaster = self._policy, self._forecaster(traffic.model)
        noise = traffic.error_per_s / max(traffic.rate_per_s, traffic.error_per_s, 1e-9)
        soon = forecaster.outlook(traffic.rate_per_s, noise, SOON_S, policy.forecast_share)
        later = forecaster.outlook(traffic.rate_per_s, noise, policy.keep_s, 0.5)
        queued = traffic.held + rule.queued_requests(fleet, traffic.model)
        rate_per_s = max(soon.high_per_s, later.mean_per_s)
        need = (rate_per_s + sqrt(rate_per_s / BURST_S)) * policy.headroom / policy.busiest
        need += queued / policy.replan_s
        peaks = self._peaks.setdefault(traffic.model, deque())
        while peaks and peaks[-1][1] <= need:
            peaks.pop()
        peaks.append((at_s, need))
        while peaks[0][0] < at_s - policy.keep_s:
            peaks.popleft()
        self._notes.say(
            traffic.model,
            f"{traffic.rate_per_s:.3g} requests/s now, at most {soon.high_per_s:.3g} soon,"
            f" {later.mean_per_s:.3g} within {policy.keep_s / 60:.0f} min ({later.reason})",
        )
        return max(peaks[0][1], 1.0 / max(traffic.long_span_s, 1.0))

    def _moved(self, model: str, need: float) -> str:
        old = self._asked.get(model, 0.0)
        if abs(need - old) > LEAST_NEED * old:
            return f"{model} needs {need:.3g} requests/s, was {old:.3g}"
        return ""


LEAST_MOVE = 0.05
LENGTHS_MOVE = 0.2
"""Of a mean prompt or answer: from there on plans are made for the lengths that were seen, not for the spec's."""
MARGIN = 0.05
NOISE = 3.0


class PeriodicReplan(rule.Scaler):
    """CORAL's periodic re-allocation (its 5.1): every `replan_s` the planner is asked again, with the rates now seen
    and a margin for noise and queues. It is spared while rates moved less than LEAST_MOVE, lengths than LENGTHS_MOVE
    and no copy is missing; not after the global window, nor when prices or nodes change (`MarketReported`)."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        self._asked_s: float | None = None
        self._looked_s: float | None = None
        self._rates: dict[str, float] = {}
        self._tokens: dict[str, tuple[float, float]] = {}
        """Mean prompts and answers when a model was first seen, or the planner last asked."""
        self._first_s: dict[str, float] = {}
        self._quoted = False  # Prices or nodes changed since the planner was asked.

    def market_changed(self, regions: tuple[Region, ...]) -> None:
        self._quoted = True

    def on_tick(
        self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan
    ) -> rule.Decisions:
        if self._looked_s is None:
            self._looked_s = self._asked_s = at_s
            self._rates = {prediction.model: prediction.demand_per_s for prediction in plan.predictions}
        assert self._asked_s is not None
        for traffic in observed.models:
            if traffic.arrivals or traffic.arrivals_ever:
                self._first_s.setdefault(traffic.model, at_s)
        left_s = self._policy.replan_s - (at_s - self._looked_s)
        if left_s > 0 and not self._quoted:
            self._notes.wait("replan", f"looks again in {left_s:.0f} s")
            return ()
        self._looked_s = at_s
        known = [traffic for traffic in observed.models if self._known(at_s, traffic)]
        reasons = [
            text for traffic in known for text in (self._moved(traffic), self._shifted(traffic)) if text
        ]
        missing = rule.missing_copies(fleet, plan)
        if missing:
            reasons.append(f"{missing} copies of the plan are not there")
        if self._quoted:
            reasons.append(rule.MARKET_CHANGED_REASON)
        if not reasons and at_s - self._asked_s >= self._policy.global_window_s:
            reasons.append("prices and nodes may have changed")
        if not reasons or not observed.models:
            why = f"no rate moved by {LEAST_MOVE:.0%}, no length by {LENGTHS_MOVE:.0%}, or not beyond noise"
            self._notes.say("replan", why)
            return ()
        self._asked_s, self._quoted = at_s, False
        asked = tuple((traffic.model, self._with_margin(traffic, fleet)) for traffic in observed.models)
        self._rates.update({traffic.model: traffic.rate_per_s for traffic in observed.models})
        self._tokens.update(
            {traffic.model: _tokens(traffic) for traffic in observed.models if _told(traffic)}
        )
        reason = ", ".join(reasons)
        self._notes.say("replan", f"asks for a plan: {reason}")
        return (rule.AskReplan(asked, reason),)

    def _known(self, at_s: float, traffic: ModelTraffic) -> bool:
        """A window of requests was seen: that nobody has come yet is no reason to let go what was planned."""
        return at_s - self._first_s.get(traffic.model, at_s) >= self._policy.window_s

    def _moved(self, traffic: ModelTraffic) -> str:
        old = self._rates.get(traffic.model, 0.0)
        if abs(traffic.rate_per_s - old) > max(LEAST_MOVE * old, NOISE * traffic.error_per_s):
            return f"requests for {traffic.model} {moved(old, traffic.rate_per_s, '.2g')} a second"
        return ""

    def _shifted(self, traffic: ModelTraffic) -> str:
        if not _told(traffic):
            return ""
        before = self._tokens.setdefault(traffic.model, _tokens(traffic))
        errors = (traffic.prompt_error_tokens, traffic.output_error_tokens)
        for what, old, new, error in zip(
            ("prompts", "answers"), before, _tokens(traffic), errors, strict=True
        ):
            if abs(new - old) > max(LENGTHS_MOVE * old, NOISE * error):
                return f"{what} of {traffic.model} {moved(old, new)} tokens"
        return ""

    def _with_margin(self, traffic: ModelTraffic, fleet: FleetState) -> float:
        """Never nothing, or the model's last copy would go."""
        queued = traffic.held + rule.queued_requests(fleet, traffic.model)
        rate = traffic.rate_per_s + max(MARGIN * traffic.rate_per_s, traffic.error_per_s)
        within_s = max(self._policy.replan_s, self._policy.window_s)
        return max(rate + queued / within_s, 1.0 / max(traffic.long_span_s, 1.0))


def _told(traffic: ModelTraffic) -> bool:
    """Whether so many answers ended that the planner would be told their lengths."""
    return traffic.finished >= rule.MIN_FINISHED_FOR_LENGTHS


def _tokens(traffic: ModelTraffic) -> tuple[float, float]:
    return traffic.mean_prompt_tokens, traffic.mean_output_tokens
