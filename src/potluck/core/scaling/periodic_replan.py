"""CORAL's periodic re-allocation (its 5.1): every so often the planner is asked again, with the rates now seen.

Every `replan_s` all models' rates are asked for, each with a margin for the noise of its window and for requests
that queue. If no rate moved by more than `LEAST_MOVE`, no mean length by more than `LENGTHS_MOVE` (or their noise)
since the last plan, and every copy is there, the planner is spared; but after the global window it is asked all the
same, since prices and availability, which it knows and the core does not, move too. Where such a change is told
(`Quoted`), it is asked at once. The answer comes as `Planned`; reconciling starts new copies before old ones leave.
"""

from __future__ import annotations

from potluck.core.figures import moved
from potluck.core.scaling.rule import (
    LEAST_SEEN,
    QUOTED,
    AskReplan,
    RuleNotes,
    ScaleDecision,
    missing_copies,
    queued_requests,
)
from potluck.core.scaling.traffic_window import ModelTraffic, ObservedTraffic
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region

LEAST_MOVE = 0.05
LENGTHS_MOVE = 0.2
"""Of a mean prompt or answer: from there on plans are made for the lengths that were seen, not for the spec's."""
MARGIN = 0.05
NOISE = 3.0


class PeriodicReplan:
    """State: when the planner was last asked, and for which rates and lengths the present fleet is."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._asked_s: float | None = None
        self._looked_s: float | None = None
        self._rates: dict[str, float] = {}
        self._tokens: dict[str, tuple[float, float]] = {}
        """Mean prompts and answers when a model was first seen, or the planner last asked."""
        self._first_s: dict[str, float] = {}
        """When the first request for a model was seen."""
        self._quoted = False
        """Prices or nodes changed since the planner was asked."""
        self._notes = RuleNotes()

    def why(self) -> str:
        return self._notes.text()

    def quoted(self, regions: tuple[Region, ...]) -> None:
        self._quoted = True

    def on_tick(
        self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan
    ) -> tuple[ScaleDecision, ...]:
        if self._looked_s is None:
            self._looked_s = self._asked_s = at_s
            self._rates = {each.model: each.demand_per_s for each in plan.predictions}
        assert self._asked_s is not None
        for seen in observed.models:
            if seen.arrivals or seen.arrivals_ever:
                self._first_s.setdefault(seen.model, at_s)
        left_s = self._policy.replan_s - (at_s - self._looked_s)
        if left_s > 0 and not self._quoted:
            self._notes.wait("replan", f"looks again in {left_s:.0f} s")
            return ()
        self._looked_s = at_s
        known = [seen for seen in observed.models if self._known(at_s, seen)]
        reasons = [said for seen in known for said in (self._moved(seen), self._shifted(seen)) if said]
        missing = missing_copies(fleet, plan)
        if missing:
            reasons.append(f"{missing} copies of the plan are not there")
        if self._quoted:
            reasons.append(QUOTED)
        if not reasons and at_s - self._asked_s >= self._policy.global_window_s:
            reasons.append("prices and nodes may have changed")
        if not reasons or not observed.models:
            self._notes.say(
                "replan",
                f"no rate moved by {LEAST_MOVE:.0%}, no length by {LENGTHS_MOVE:.0%}, or not beyond noise",
            )
            return ()
        self._asked_s, self._quoted = at_s, False
        asked = tuple((seen.model, self._with_margin(seen, fleet)) for seen in observed.models)
        self._rates.update({seen.model: seen.rate_per_s for seen in observed.models})
        self._tokens.update({seen.model: _tokens(seen) for seen in observed.models if _told(seen)})
        reason = ", ".join(reasons)
        self._notes.say("replan", f"asks for a plan: {reason}")
        return (AskReplan(asked, reason),)

    def _known(self, at_s: float, seen: ModelTraffic) -> bool:
        """A window of requests was seen: that nobody has come yet is no reason to let go what was planned."""
        return at_s - self._first_s.get(seen.model, at_s) >= self._policy.window_s

    def _moved(self, seen: ModelTraffic) -> str:
        old = self._rates.get(seen.model, 0.0)
        if abs(seen.rate_per_s - old) > max(LEAST_MOVE * old, NOISE * seen.error_per_s):
            return f"requests for {seen.model} {moved(old, seen.rate_per_s, '.2g')} a second"
        return ""

    def _shifted(self, seen: ModelTraffic) -> str:
        """Whether prompts or answers are of other lengths than the fleet is for."""
        if not _told(seen):
            return ""
        before = self._tokens.setdefault(seen.model, _tokens(seen))
        errors = (seen.prompt_error_tokens, seen.output_error_tokens)
        for what, old, new, error in zip(("prompts", "answers"), before, _tokens(seen), errors, strict=True):
            if abs(new - old) > max(LENGTHS_MOVE * old, NOISE * error):
                return f"{what} of {seen.model} {moved(old, new)} tokens"
        return ""

    def _with_margin(self, seen: ModelTraffic, fleet: FleetState) -> float:
        """Never nothing, or the model's last copy would go."""
        queued = seen.held + queued_requests(fleet, seen.model)
        rate = seen.rate_per_s + max(MARGIN * seen.rate_per_s, seen.error_per_s)
        within_s = max(self._policy.replan_s, self._policy.window_s)
        return max(rate + queued / within_s, 1.0 / max(seen.long_span_s, 1.0))


def _told(seen: ModelTraffic) -> bool:
    """Whether so many answers ended that the planner would be told their lengths."""
    return seen.finished >= LEAST_SEEN


def _tokens(seen: ModelTraffic) -> tuple[float, float]:
    return seen.mean_prompt_tokens, seen.mean_output_tokens
