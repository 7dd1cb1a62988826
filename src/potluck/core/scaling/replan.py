"""Re-allocation by the planner: periodic for the observed rates, or ahead of time for forecast rates.

Ahead of time, each model's `Forecaster` predicts

    soon   the rate until a copy asked for now would serve, exceeded in at most 1 - `forecast_share` of all cases
    later  the rate expected within `keep_s`
    need = max(soon, later), or its maximum within the last `keep_s`

So fleets grow ahead of a rise, and shrink only when copies are not needed for a while. `need` includes the forecast's
error, so the planner's headroom is not applied on top of it; the planner is asked for

    (need + sqrt(need / BURST_S)) x headroom / busiest

with one standard deviation of the random arrivals within BURST_S on top."""

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

INTERVAL_S = 30.0
COPY_START_S = 300.0  # Time from asking for a plan until its copies serve.
BURST_S = 25.0
"""Copies must take random bursts of this length (about an answer's duration); longer ones average out."""
MIN_NEED_CHANGE = 0.02  # Smaller relative changes of a need are ignored.


class PredictiveReplan(rule.Scaler):
    """State: each model's forecaster and recent needs, and the rates that the planner was last asked for."""

    def __init__(self, policy: Policy, facts: FleetFacts) -> None:
        super().__init__()
        self._policy = policy
        self._facts = facts
        self._forecasters: dict[str, Forecaster] = {}
        self._peaks: dict[str, deque[tuple[float, float]]] = {}
        """Needs of the last `keep_s` that no later one exceeds: (time, need), the largest first."""
        self._asked: dict[str, float] = {}
        self._asked_s: float | None = None
        self._checked_s: float | None = None
        self._market_changed = False

    def market_changed(self, regions: tuple[Region, ...]) -> None:
        self._market_changed = True

    def on_tick(
        self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan
    ) -> rule.Decisions:
        for traffic in observed.models:
            self._forecaster(traffic.model).count(at_s, traffic.arrivals_ever)
        if self._asked_s is None:
            self._asked_s = at_s
        if self._checked_s is not None and at_s - self._checked_s < INTERVAL_S and not self._market_changed:
            self._notes.wait("ahead", f"looks again in {INTERVAL_S - (at_s - self._checked_s):.0f} s")
            return ()
        if (
            any(traffic.span_s < self._policy.window_s for traffic in observed.models)
            and not self._market_changed
        ):
            # Just started: few arrivals so far are no reason to remove planned copies.
            self._notes.say("ahead", "has not seen a window of requests yet")
            return ()
        self._checked_s = at_s
        needs = {traffic.model: self._need(at_s, traffic, fleet) for traffic in observed.models}
        reasons = [
            self._rate_change(model, need) for model, need in needs.items() if self._rate_change(model, need)
        ]
        since_s = at_s - self._asked_s
        missing = rule.missing_copies(fleet, plan) if since_s >= self._policy.replan_s else 0
        if missing:
            reasons.append(f"{missing} copies of the plan are not there")
        if self._market_changed:
            reasons.append(rule.MARKET_CHANGED_REASON)
        if not reasons and since_s >= self._policy.global_window_s:
            reasons.append("prices and nodes may have changed")
        if not reasons or not needs:
            self._notes.say("ahead", "what is needed is what was asked for")
            return ()
        self._asked_s, self._market_changed = at_s, False
        self._asked.update(needs)
        reason = ", ".join(reasons)
        self._notes.say("ahead", f"asks for a plan: {reason}")
        return (rule.AskReplan(tuple(needs.items()), reason),)

    def _forecaster(self, model: str) -> Forecaster:
        forecaster = self._forecasters.get(model)
        if forecaster is None:
            forecaster = self._forecasters[model] = Forecaster(self._facts.history.get(model, ()))
        return forecaster

    def _need(self, at_s: float, traffic: ModelTraffic, fleet: FleetState) -> float:
        """The rate to plan for; never 0, or the model's last copy would go."""
        policy, forecaster = self._policy, self._forecaster(traffic.model)
        noise = traffic.error_per_s / max(traffic.rate_per_s, traffic.error_per_s, 1e-9)
        soon = forecaster.outlook(traffic.rate_per_s, noise, COPY_START_S, policy.forecast_share)
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

    def _rate_change(self, model: str, need: float) -> str:
        old_need = self._asked.get(model, 0.0)
        if abs(need - old_need) > MIN_NEED_CHANGE * old_need:
            return f"{model} needs {need:.3g} requests/s, was {old_need:.3g}"
        return ""


MIN_RATE_CHANGE = 0.05
MIN_LENGTH_CHANGE = 0.2
"""Relative change of a mean prompt or answer from which plans use the observed lengths instead of the spec's."""
RATE_MARGIN = 0.05
NOISE_DEVIATIONS = 3.0


class PeriodicReplan(rule.Scaler):
    """CORAL's periodic re-allocation (its 5.1): every `replan_s` the planner is asked again for the observed rates,
    with a margin for noise and queues. It is skipped while rates changed less than MIN_RATE_CHANGE, lengths less
    than MIN_LENGTH_CHANGE and no copy is missing, except after the global window and when prices or nodes change
    (`MarketReported`)."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        self._asked_s: float | None = None
        self._checked_s: float | None = None
        self._rates: dict[str, float] = {}
        self._mean_lengths: dict[str, tuple[float, float]] = {}
        """Mean prompts and answers when a model was first observed or the planner last asked."""
        self._first_s: dict[str, float] = {}
        self._market_changed = False  # Prices or nodes changed since the planner was last asked.

    def market_changed(self, regions: tuple[Region, ...]) -> None:
        self._market_changed = True

    def on_tick(
        self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan
    ) -> rule.Decisions:
        if self._checked_s is None:
            self._checked_s = self._asked_s = at_s
            self._rates = {prediction.model: prediction.demand_per_s for prediction in plan.predictions}
        assert self._asked_s is not None
        for traffic in observed.models:
            if traffic.arrivals or traffic.arrivals_ever:
                self._first_s.setdefault(traffic.model, at_s)
        left_s = self._policy.replan_s - (at_s - self._checked_s)
        if left_s > 0 and not self._market_changed:
            self._notes.wait("replan", f"looks again in {left_s:.0f} s")
            return ()
        self._checked_s = at_s
        observed_models = [traffic for traffic in observed.models if self._has_full_window(at_s, traffic)]
        reasons = [
            change
            for traffic in observed_models
            for change in (self._rate_change(traffic), self._length_change(traffic))
            if change
        ]
        missing = rule.missing_copies(fleet, plan)
        if missing:
            reasons.append(f"{missing} copies of the plan are not there")
        if self._market_changed:
            reasons.append(rule.MARKET_CHANGED_REASON)
        if not reasons and at_s - self._asked_s >= self._policy.global_window_s:
            reasons.append("prices and nodes may have changed")
        if not reasons or not observed.models:
            limits = f"no rate moved by {MIN_RATE_CHANGE:.0%}, no length by {MIN_LENGTH_CHANGE:.0%}"
            explanation = f"{limits}, or not beyond noise"
            self._notes.say("replan", explanation)
            return ()
        self._asked_s, self._market_changed = at_s, False
        rates = tuple((traffic.model, self._with_margin(traffic, fleet)) for traffic in observed.models)
        self._rates.update({traffic.model: traffic.rate_per_s for traffic in observed.models})
        self._mean_lengths.update(
            {traffic.model: _mean_lengths(traffic) for traffic in observed.models if _has_lengths(traffic)}
        )
        reason = ", ".join(reasons)
        self._notes.say("replan", f"asks for a plan: {reason}")
        return (rule.AskReplan(rates, reason),)

    def _has_full_window(self, at_s: float, traffic: ModelTraffic) -> bool:
        """Whether a full window was observed; before that, few arrivals are no reason to remove copies."""
        return at_s - self._first_s.get(traffic.model, at_s) >= self._policy.window_s

    def _rate_change(self, traffic: ModelTraffic) -> str:
        old_per_s = self._rates.get(traffic.model, 0.0)
        if abs(traffic.rate_per_s - old_per_s) > max(
            MIN_RATE_CHANGE * old_per_s, NOISE_DEVIATIONS * traffic.error_per_s
        ):
            return f"requests for {traffic.model} {moved(old_per_s, traffic.rate_per_s, '.2g')} a second"
        return ""

    def _length_change(self, traffic: ModelTraffic) -> str:
        if not _has_lengths(traffic):
            return ""
        old_lengths = self._mean_lengths.setdefault(traffic.model, _mean_lengths(traffic))
        errors = (traffic.prompt_error_tokens, traffic.output_error_tokens)
        for name, old_tokens, new_tokens, error in zip(
            ("prompts", "answers"), old_lengths, _mean_lengths(traffic), errors, strict=True
        ):
            if abs(new_tokens - old_tokens) > max(MIN_LENGTH_CHANGE * old_tokens, NOISE_DEVIATIONS * error):
                return f"{name} of {traffic.model} {moved(old_tokens, new_tokens)} tokens"
        return ""

    def _with_margin(self, traffic: ModelTraffic, fleet: FleetState) -> float:
        """The rate to plan for, with its margin; never 0, or the model's last copy would go."""
        queued = traffic.held + rule.queued_requests(fleet, traffic.model)
        rate = traffic.rate_per_s + max(RATE_MARGIN * traffic.rate_per_s, traffic.error_per_s)
        within_s = max(self._policy.replan_s, self._policy.window_s)
        return max(rate + queued / within_s, 1.0 / max(traffic.long_span_s, 1.0))


def _has_lengths(traffic: ModelTraffic) -> bool:
    """Whether enough answers ended to give the planner their lengths."""
    return traffic.finished >= rule.MIN_FINISHED_FOR_LENGTHS


def _mean_lengths(traffic: ModelTraffic) -> tuple[float, float]:
    return traffic.mean_prompt_tokens, traffic.mean_output_tokens
