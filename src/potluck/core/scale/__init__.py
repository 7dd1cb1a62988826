"""Who changes the fleet, and by which rule: one file per rule, `scaler_of` picks by the policy."""

from __future__ import annotations

from potluck.core.brain.facts import Facts
from potluck.core.brain.policy import Policy
from potluck.core.scale.ahead import ReplanAhead
from potluck.core.scale.base import (
    AskReplan,
    FlipRole,
    NoScaling,
    Resize,
    ScaleDecision,
    Scaler,
    SetLengths,
    SetThreshold,
)
from potluck.core.scale.cauchy import Cauchy
from potluck.core.scale.inside import Inside, WithInside
from potluck.core.scale.prfaas import PrfaasSplit
from potluck.core.scale.replan import PeriodicReplan
from potluck.core.scale.shift import ShiftFlips

__all__ = [
    "AskReplan",
    "FlipRole",
    "NoScaling",
    "Resize",
    "ScaleDecision",
    "Scaler",
    "SetLengths",
    "SetThreshold",
    "scaler_of",
]


def scaler_of(policy: Policy, facts: Facts) -> Scaler:
    """The rule that the policy names, set up with its knobs."""
    if policy.scaling == "cauchy":
        return WithInside(Cauchy(policy, facts.regions, facts.models), Inside(policy, facts))
    if policy.scaling == "flips":
        return WithInside(ShiftFlips(policy, facts), Inside(policy, facts))
    if policy.scaling == "prfaas":
        return PrfaasSplit(policy, facts)
    if policy.scaling == "replan":
        return PeriodicReplan(policy)
    if policy.scaling == "ahead":
        return ReplanAhead(policy, facts)
    return NoScaling()
