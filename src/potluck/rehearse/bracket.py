"""The search for one model's factor: grow until it holds, then halve the gap, while a cheaper plan may be in it.

The cheapest plan for more demand never costs less, so the least factor that holds gives the cheapest plan of this
kind. Whether a plan holds is only nearly monotone in the factor (another factor may bring other GPUs), so what was
measured always counts for more than what the order would suggest: only a factor whose own plan held is ever taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, sqrt

GROWTH = 1.5
SMALL_GROWTH = 1.1
"""From a factor that held in the search and did not in the end, or that nearly does."""
SAME_COST = 0.005
"""Relative; a gap between costs that is not worth a round."""


@dataclass(frozen=True, slots=True)
class FactorBracket:
    """Where the factor lies. `factor` is the one to plan for next."""

    floor: float
    """No factor below it: 1 x the planner's headroom is a fleet that is busy all the time on averages alone."""
    ceiling: float
    factor: float = 1.0
    missed: float | None = None
    """The largest known to miss."""
    held: float | None = None
    """The smallest known to hold."""
    missed_usd_per_h: float = 0.0
    held_usd_per_h: float = 0.0
    done: bool = False
    """Nothing is left to try; `factor` is `held`, or all there is."""


def told(
    bracket: FactorBracket, at: float, usd_per_h: float, holds: bool, tolerance: float, growth: float = GROWTH
) -> FactorBracket:
    """What a trial at a factor means; until one holds, the next is `growth` times as much."""
    if holds:
        if bracket.held is None or at <= bracket.held:
            bracket = replace(bracket, held=at, held_usd_per_h=usd_per_h)
        if bracket.missed is not None and bracket.missed >= at:
            bracket = replace(bracket, missed=None)
    elif at < (bracket.held or inf) and at >= (bracket.missed or 0.0):
        bracket = replace(bracket, missed=at, missed_usd_per_h=usd_per_h)
    return _aimed(bracket, tolerance, growth)


def refuted(bracket: FactorBracket, at: float, usd_per_h: float) -> FactorBracket:
    """A factor that held does not after all: beside other models, or with fresh runs."""
    nearby = at * SMALL_GROWTH
    missed = replace(bracket, held=None, missed=at, missed_usd_per_h=usd_per_h, done=at >= bracket.ceiling)
    return replace(missed, factor=min(nearby, bracket.ceiling))


def _aimed(bracket: FactorBracket, tolerance: float, growth: float) -> FactorBracket:
    missed, held = bracket.missed, bracket.held
    if held is None:
        assert missed is not None
        if missed >= bracket.ceiling:
            return replace(bracket, factor=bracket.ceiling, done=True)
        return replace(bracket, factor=min(missed * growth, bracket.ceiling), done=False)
    if missed is None:
        if held <= bracket.floor * (1 + 1e-9):
            return replace(bracket, factor=held, done=True)
        return replace(bracket, factor=max(held / GROWTH, bracket.floor), done=False)
    cheaper = bracket.missed_usd_per_h < bracket.held_usd_per_h * (1 - SAME_COST)
    if held / missed <= 1 + tolerance or not cheaper:
        return replace(bracket, factor=held, done=True)
    return replace(bracket, factor=sqrt(missed * held), done=False)
