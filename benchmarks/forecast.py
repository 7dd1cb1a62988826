"""A week of real arrival rates: scaling by forecast against reacting, fleets that stay, and an oracle.

ServeGen's first week is the history that the forecaster learns from; the second is simulated as in autoscale.py.

    oracle           for every ten minutes the cheapest plan for them, without start-up; its plans are served too
    static peak      one plan for the week's highest ten minutes; static mean: for its mean
    replan           re-allocation every six minutes at the rates now seen
    ahead            re-allocation at the rates forecast (core/scaling/replan.py)

A reversal is a start and a drain of one template within 30 minutes. `--quick`: an hour with `replan` and `ahead`.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autoscale import NAME, RATE_PER_S, RATES, RUNNING, SEED, STEP_S, load_of, recorded_rates, the_problem
from parts.common import DATA, prefixed, run, say, skip
from parts.problems import mean_tokens, resolved
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.rehearse.queueing_margins import scaled
from potluck.sim.load.workload import Workload, workload
from potluck.sim.results.metrics import judge, summarise
from potluck.sim.results.records import ANSWERED, REFUSED, ReplicaRecord, SimResult
from potluck.sim.run import simulate
from potluck.sim.world.sim_fleet import PlanQuestion

WEEK = 7 * 144
QUICK_STEPS = 6
REVERSAL_S = 1800.0
START_S = 135.0  # About what a copy takes to start (113 to 157 s).
STEP_PER_S = 0.02  # Rates are looked up at multiples of this, rounded up.
LIMIT_S = 60.0
"""For a plan, in seconds on the clock. It takes about one on a machine that is free; on a busy one a short limit ends
with a plan for part of the demand, and the fleet is blamed for it."""
LIFE_S = 3600.0  # Over which the planner spreads the price of starting a copy: CORAL's K is START_S / LIFE_S.


class Stairs:
    """USD an hour of the cheapest plan for a rate: a staircase, as more demand never costs less."""

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
        cost = self._known[place] = self._cost(place * STEP_PER_S)
        insort(self._places, place)
        return cost

    def usd(self, rates_per_s: Sequence[float] | np.ndarray, each_s: float) -> float:
        values, counts = np.unique(np.asarray(rates_per_s), return_counts=True)
        # The ends first: then what lies between is often known.
        order = sorted(range(len(values)), key=lambda i: min(i, len(values) - 1 - i))
        prices = {i: self.at(float(values[i])) for i in order}
        return sum(prices[i] * int(counts[i]) for i in prices) * each_s / 3600


class Planner:
    """Plans for any rate, from what runs: starting a copy has its price. Templates are made once."""

    def __init__(self) -> None:
        self.problem = the_problem(RATE_PER_S)
        self._factory = TemplateFactory(self.problem)
        self._running: Plan | None = None
        self._known: dict[float, Plan] = {}

    def fresh(self, rate_per_s: float) -> Plan:
        rate_per_s = max(round(rate_per_s, 2), 0.05)
        if rate_per_s not in self._known:
            self._known[rate_per_s] = self._plan(rate_per_s, None)
        return self._known[rate_per_s]

    def begin(self, rate_per_s: float) -> Plan:
        self._running = self.fresh(rate_per_s)
        return self._running

    def next(self, plan_question: PlanQuestion) -> Plan:
        rate_per_s = max(dict(plan_question.rates_per_s)[NAME], 0.05)
        self._running = self._plan(rate_per_s, self._running)
        return self._running

    def _plan(self, rate_per_s: float, running_plan: Plan | None) -> Plan:
        problem = scaled(self.problem, {NAME: rate_per_s / RATE_PER_S})
        if running_plan is not None:
            problem = replace(problem, init_penalty=START_S / LIFE_S)
        factory = replace(self._factory, problem=problem)
        return STRATEGIES["auto"](factory, SolveSettings(time_limit_s=LIMIT_S, running=running_plan)).plan


def served(
    policy: Policy, planner: Planner, rate_per_s: float, workload: Workload, history: Sequence[float]
) -> dict[str, float]:
    start_s = time.process_time()
    past = {NAME: tuple(float(rate) for rate in history)}
    world = resolved(planner.problem, planner.begin(rate_per_s), mean_tokens(workload), history=past)
    settings = replace(RUNNING, tick_s=policy.tick_s)
    result = simulate(world, workload, policy, seed=SEED, settings=settings, planner=planner.next)
    summary = summarise(result)
    model = summary.models[0]
    days = len(workload) and float(workload.arrival_s[-1]) / 86_400
    return {
        "usd": summary.cost_usd,
        "attainment": model.attainment or 0.0,
        "ttft_p99_s": model.ttft_s.p99 if model.ttft_s else 0.0,
        "refused": model.outcomes.refused,
        "plans_asked": result.counts["plans asked for"],
        "copies_ever": len({replica.unit for replica in result.replicas}),
        "reversals_per_day": reversals(result.replicas) / max(days, 1e-9),
        "cpu_s": time.process_time() - start_s,
        **missed(result),
    }


def reversals(replicas: Sequence[ReplicaRecord]) -> int:
    """Starts of a copy within half an hour of a drain of the same template, before or after; each drain once."""
    starts: dict[str, set[float]] = {}
    drains: dict[str, set[float]] = {}
    for replica in replicas:
        for at_s, state, _ in replica.changes:
            if state == "starting" and at_s > 0:
                starts.setdefault(replica.template, set()).add(at_s)
            elif state == "draining":
                drains.setdefault(replica.template, set()).add(at_s)
    result = 0
    for template, when in drains.items():
        left = sorted(starts.get(template, ()))
        for at_s in sorted(when):
            near = [start_s for start_s in left if abs(start_s - at_s) <= REVERSAL_S]
            if near:
                left.remove(near[0])
                result += 1
    return result


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
    return {name: int(cause.sum()) / count for name, cause in causes.items()}


def oracle_kept(planner: Planner, stairs: Stairs, week: np.ndarray, load: Workload) -> dict[str, float]:
    """The oracle's plans at work: its attainment and what it misses. Plans that cost the same are the same."""
    bins: dict[float, list[int]] = {}
    for place, rate in enumerate(week):
        bins.setdefault(round(stairs.at(float(rate)), 3), []).append(place)
    edges = np.searchsorted(load.arrival_s, np.arange(len(week) + 1) * STEP_S)
    outcome = {"attainment": 0.0, "refused_share": 0.0, "late_share": 0.0, "slow_share": 0.0}
    for places in bins.values():
        plan = planner.fresh(float(week[places].max()))
        parts = [np.arange(edges[i], edges[i + 1]) for i in places]
        pairs = zip(places, parts, strict=True)
        when = [load.arrival_s[p] + (k - i) * STEP_S for k, (i, p) in enumerate(pairs)]
        rows = np.concatenate(parts)
        if not len(rows):
            continue
        mine = workload(NAME, np.concatenate(when), load.prompt_tokens[rows], load.output_tokens[rows])
        world = resolved(planner.problem, plan, mean_tokens(load))
        result = simulate(world, mine, Policy(tick_s=RUNNING.tick_s), seed=SEED, settings=RUNNING)
        kept = {"attainment": summarise(result).models[0].attainment or 0.0} | missed(result)
        for name, value in kept.items():
            outcome[name] += value * len(rows) / len(load)
    return outcome


def measure(rates: np.ndarray, quick: bool) -> dict[str, float]:
    history, week = rates[:WEEK], rates[WEEK : WEEK + (QUICK_STEPS if quick else WEEK)]
    load, planner = load_of(week), Planner()
    stairs = Stairs(lambda rate_per_s: planner.fresh(rate_per_s).cost_usd_per_h)
    oracle_usd = stairs.usd(week, STEP_S)
    oracle = {"usd": oracle_usd, **oracle_kept(planner, stairs, week, load)}
    figures = {"requests": float(len(load)), "hours": len(week) / 6, **prefixed("oracle", oracle)}
    base_policy = Policy(tick_s=RUNNING.tick_s)
    rows = [
        ("static_mean", base_policy, float(week.mean())),
        ("static_peak", base_policy, float(week.max())),
        ("replan", replace(base_policy, scaling="replan"), float(week[0])),
        ("ahead", replace(base_policy, scaling="ahead"), float(week[0])),
    ]
    if quick:
        say(f"left out: all but {len(week) / 6:g} h, the fleets that stay")
    for name, policy, start in rows[2:] if quick else rows:
        outcome = served(policy, planner, start, load, history)
        outcome["over_oracle"] = outcome["usd"] / oracle_usd - 1
        outcome["attainment_over_oracle"] = outcome["attainment"] - oracle["attainment"]
        figures |= prefixed(name, outcome)
    return figures


TARGETS = {
    "ahead_over_oracle": ("<=", 0.025),
    "ahead_attainment": (">=", 0.995),
    "ahead_reversals_per_day": ("<=", 4.0),
}

if __name__ == "__main__":
    rates = recorded_rates("m-large", 2 * WEEK)
    if rates is None:
        skip("forecast", f"{DATA} has no {RATES}")
    targets = {} if "--quick" in sys.argv else TARGETS
    run("forecast", lambda quick: measure(rates, quick), targets, seeds=[SEED])
