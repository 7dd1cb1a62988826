"""Who changes the fleet, and by which rule: one file per rule, `scaler_of` picks by the policy."""

from __future__ import annotations

from potluck.core.scaling.cauchy_scaling import CauchyScaling
from potluck.core.scaling.copy_roles import CopyRoles, WithCopyRoles
from potluck.core.scaling.periodic_replan import PeriodicReplan
from potluck.core.scaling.predictive import PredictiveReplan
from potluck.core.scaling.prfaas_scaling import PrfaasScaling
from potluck.core.scaling.role_shift import ShiftFlips
from potluck.core.scaling.rule import (
    AskReplan,
    FlipRole,
    NoScaling,
    Resize,
    ScaleDecision,
    Scaler,
    SetLengths,
    SetThreshold,
)
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy

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


def scaler_of(policy: Policy, facts: FleetFacts) -> Scaler:
    """The rule that the policy names, set up with its knobs."""
    if policy.scaling == "cauchy":
        return WithCopyRoles(CauchyScaling(policy, facts.regions, facts.models), CopyRoles(policy, facts))
    if policy.scaling == "flips":
        return WithCopyRoles(ShiftFlips(policy, facts), CopyRoles(policy, facts))
    if policy.scaling == "prfaas":
        return PrfaasScaling(policy, facts)
    if policy.scaling == "replan":
        return PeriodicReplan(policy)
    if policy.scaling == "ahead":
        return PredictiveReplan(policy, facts)
    return NoScaling()
