"""Goodput of a plan: the highest request rate that meets every SLO, by bisection over simulations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from potluck.core.errors import InputError
from potluck.sim.load.workload import Workload
from potluck.sim.results.metrics import RunSummary

MAX_DOUBLINGS = 12


@dataclass(frozen=True, slots=True)
class RateTrial:
    """A simulation at one request rate."""

    scale: float
    rate_per_s: float
    holds: bool
    attainment: float
    """Of the model that is furthest below its target."""
    promised: float
    """That model's target."""
    model: str
    ttft_p99_s: float
    tpot_p99_s: float


def highest_rate(
    simulate_at: Callable[[float], RateTrial], tolerance: float
) -> tuple[list[RateTrial], RateTrial | None]:
    """All trials, and the one with the highest rate that meets the SLOs.

    Doubles or halves the scale until one trial meets the SLOs and one does not, then bisects.
    """
    trials: list[RateTrial] = []
    low_trial: RateTrial | None = None
    high_trial: RateTrial | None = None
    scale = 1.0
    while True:
        trials.append(simulate_at(scale))
        if trials[-1].holds:
            low_trial = trials[-1]
        else:
            high_trial = trials[-1]
        if low_trial is not None and high_trial is not None:
            if high_trial.scale / low_trial.scale <= 1.0 + tolerance:
                return trials, low_trial
            scale = (low_trial.scale * high_trial.scale) ** 0.5
        elif len(trials) > MAX_DOUBLINGS:
            return trials, low_trial
        else:
            scale *= 2.0 if high_trial is None else 0.5


def with_rate_scaled(workload: Workload, scale: float) -> Workload:
    """The same requests with all inter-arrival times divided by `scale`."""
    return replace(workload, arrival_s=np.asarray(workload.arrival_s / scale))


def trial_of(summary: RunSummary, scale: float, base_per_s: float) -> RateTrial:
    judged = [model for model in summary.models if model.slo is not None and model.attainment is not None]
    if not judged:
        raise InputError("slo", "no model has an SLO")
    worst = min(judged, key=lambda m: (m.attainment or 0.0) - (m.slo.attainment if m.slo else 0.0))
    return RateTrial(
        scale,
        base_per_s * scale,
        all(model.holds for model in judged),
        worst.attainment or 0.0,
        worst.slo.attainment if worst.slo else 0.0,
        worst.model,
        worst.ttft_s.p99 if worst.ttft_s else float("nan"),
        worst.tpot_s.p99 if worst.tpot_s else float("nan"),
    )
