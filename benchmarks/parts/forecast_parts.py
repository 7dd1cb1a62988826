"""Where a fleet's money goes beside the oracle's, and why answers are not in time; for benchmarks/forecast.py.

What a run paid over the oracle is a sum of differences, each between two things that could have been had:

    headroom   the cheapest plans for what the rule would ask at the true rates, over those for the rates themselves
    keeping    the same with each rate the highest of the last `keep_s`, known without error
    knowing    the plans for what was asked in fact, over those: forecasts, noise, the share that should suffice
    planner    the plans that were in force, over the cheapest for what was asked: what runs is dear to exchange
    start-up   copies that were paid for and not ready
    drain      copies that were to go and still answered
    other      what is left: two fleets side by side, both ready; failed or late exchanges; the minutes at the end

Costs of rates are a staircase. It is found as it is needed: between two rates whose plans cost the same, all do.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from potluck.core.values.types import Region
from potluck.sim.results.metrics import judge
from potluck.sim.results.records import ANSWERED, REFUSED, SimResult

GRID_S = 30.0
STEP_PER_S = 0.02
"""Rates are looked up at multiples of this, rounded up."""


class Stairs:
    """USD an hour of the cheapest plan for a rate. More demand never costs less."""

    def __init__(self, cost: Callable[[float], float]) -> None:
        self._cost = cost
        self._places: list[int] = []
        self._known: dict[int, float] = {}

    def at(self, rate_per_s: float) -> float:
        place = max(1, int(np.ceil(rate_per_s / STEP_PER_S - 1e-9)))
        if place in self._known:
            return self._known[place]
        after = bisect_left(self._places, place)
        if 0 < after < len(self._places):
            below, above = (self._known[self._places[i]] for i in (after - 1, after))
            if abs(below - above) <= 1e-4 * above:
                return above
        found = self._known[place] = self._cost(place * STEP_PER_S)
        insort(self._places, place)
        return found

    def usd(self, rates_per_s: Sequence[float] | np.ndarray, each_s: float) -> float:
        """Of rates that hold for so long each."""
        values, counts = np.unique(np.asarray(rates_per_s), return_counts=True)
        # The ends first: then what lies between is often known.
        order = sorted(range(len(values)), key=lambda i: min(i, len(values) - 1 - i))
        prices = {i: self.at(float(values[i])) for i in order}
        return sum(prices[i] * int(counts[i]) for i in prices) * each_s / 3600


def paid(
    result: SimResult,
    regions: Sequence[Region],
    week: np.ndarray,
    step_s: float,
    asked: Sequence[tuple[float, float, float]],
    asks: Callable[[np.ndarray], np.ndarray],
    keep_s: float,
    stairs: Stairs,
) -> dict[str, float]:
    """Shares of the oracle's cost, as above. `asked` has (when, rate asked for, USD an hour of the answer), the first
    at 0; `asks` is what the rule asks for at a rate that it knows."""
    oracle_usd = stairs.usd(week, step_s)
    grid_s = np.arange(0.0, len(week) * step_s, GRID_S)
    true = week[(grid_s // step_s).astype(int)]
    back = int(keep_s / GRID_S)
    kept = np.array([true[max(0, i - back) : i + 1].max() for i in range(len(true))])
    force = np.searchsorted([each[0] for each in asked], grid_s, side="right") - 1
    rates = np.array([each[1] for each in asked])[force]
    plans = float(np.array([each[2] for each in asked])[force].sum()) * GRID_S / 3600
    levels = [
        oracle_usd,
        stairs.usd(asks(true), GRID_S),
        stairs.usd(asks(kept), GRID_S),
        stairs.usd(rates, GRID_S),
        plans,
    ]
    parts = dict(zip(("headroom", "keeping", "knowing", "planner"), np.diff(levels), strict=True))
    spent = states(result, regions)
    parts |= {"start_up": spent["starting"], "drain": spent["draining"]}
    parts["other"] = result.cost_usd - oracle_usd - sum(parts.values())
    return {name: float(usd) / oracle_usd for name, usd in parts.items()}


def states(result: SimResult, regions: Sequence[Region]) -> dict[str, float]:
    """USD paid for replicas while they were in each state."""
    places = {region.name: region for region in regions}
    found = {"starting": 0.0, "ready": 0.0, "draining": 0.0}
    for replica in result.replicas:
        offers = [places[replica.region].offer(node) for node in replica.nodes]
        usd_per_h = sum(offer.price_usd_per_h for offer in offers if offer is not None)
        changes = [(at_s, state) for at_s, state, _ in replica.changes]
        for (from_s, state), (to_s, _) in pairwise([*changes, (replica.ended_s(result.end_s), "")]):
            part = "draining" if state == "leaving" else state
            if part in found:
                found[part] += usd_per_h * max(0.0, min(to_s, result.end_s) - from_s) / 3600
    return found


def missed(result: SimResult) -> dict[str, float]:
    """Shares of requests: refused, late to begin, in time but with slow tokens."""
    verdict, records = judge(result.records, result.slos, result.end_s), result.records
    count = max(1, int(verdict.judged.sum()))
    answered = verdict.judged & (records.outcome == ANSWERED)
    causes = {
        "refused_share": verdict.judged & (records.outcome == REFUSED),
        "late_share": answered & ~verdict.ttft_ok,
        "slow_share": answered & verdict.ttft_ok & ~verdict.tpot_ok,
    }
    return {name: int(each.sum()) / count for name, each in causes.items()}
