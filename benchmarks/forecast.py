"""A week of real arrival rates: scaling by forecast against reacting, fleets that stay, and an oracle.

ServeGen's language models cover 14 days (../shared/data, servegen_client_rates.parquet). The first week is the
history that the forecaster learns from; the second is served, in simulation, set up as in benchmarks/autoscale.py.

    oracle           for every ten minutes the cheapest plan that serves them; no start-up, nothing to be drained
    static peak      one plan for the week's highest ten minutes; static mean: for its mean
    replan           re-allocation every six minutes at the rates now seen
    ahead            re-allocation at the rates forecast (core/scaling/replan.py)

The oracle's plans are served too: all the ten minutes that have the same plan, one after another, on that plan.
`POTLUCK_PACED=0` gives all engines 2048 tokens a step.

A reversal is a start and a drain of one template within 30 minutes. `--quick` serves the first hour of the week with
`replan` and `ahead`.
`POTLUCK_SOURCE` names another of the models (m-large, m-mid, m-small), `POTLUCK_DAYS` another number of days, and
`POTLUCK_FROM` the day that is served first (7 unless said); all before it is history.
"""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autoscale import DATA, NAME, RATE_PER_S, RUNNING, SEED, SLO, STEP_S, lengths, the_problem
from parts.common import run, skip
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.rehearse.queueing_margins import scaled
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load import arrivals
from potluck.sim.load.arrivals import draw
from potluck.sim.load.workload import Workload, workload
from potluck.sim.results.metrics import judge, summarise
from potluck.sim.results.records import ANSWERED, REFUSED, ReplicaRecord, SimResult
from potluck.sim.run import simulate
from potluck.sim.world.sim_fleet import PlanQuestion

SOURCE = os.environ.get("POTLUCK_SOURCE", "m-large")
DAYS = int(os.environ.get("POTLUCK_DAYS", "7"))
FROM = int(os.environ.get("POTLUCK_FROM", "7"))
PACED = os.environ.get("POTLUCK_PACED", "1") != "0"
DAY, WEEK = 144, 1008
QUICK_STEPS = 6
REVERSAL_S = 1800.0
START_S = 135.0
"""About what a copy takes to start (113 to 157 s)."""
STEP_PER_S = 0.02
"""Rates are looked up at multiples of this, rounded up."""
LIMIT_S = 60.0
"""For a plan, in seconds on the clock. It takes about one on a machine that is free; on a busy one a short limit ends
with a plan for part of the demand, and the fleet is blamed for it."""
LIFE_S = 3600.0
"""Over which the planner spreads the price of starting a copy: CORAL's K is START_S / LIFE_S."""


def two_weeks() -> np.ndarray | None:
    """Requests a second in each ten minutes of both weeks, scaled to the mean; None without the data."""
    path = DATA / "servegen_client_rates.parquet"
    if not path.exists():
        return None
    import pyarrow.parquet as parquet

    mine = parquet.read_table(path, columns=["t_s", "rate_rps"], filters=[("model", "==", SOURCE)])
    step = (mine["t_s"].to_numpy() // STEP_S).astype(int)
    rates = mine["rate_rps"].to_numpy().astype(float)
    inside = step < 2 * WEEK
    total = np.bincount(step[inside], rates[inside], minlength=2 * WEEK)
    return np.asarray(total * RATE_PER_S / total.mean())


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
        """Of rates that hold for so long each."""
        values, counts = np.unique(np.asarray(rates_per_s), return_counts=True)
        # The ends first: then what lies between is often known.
        order = sorted(range(len(values)), key=lambda i: min(i, len(values) - 1 - i))
        prices = {i: self.at(float(values[i])) for i in order}
        return sum(prices[i] * int(counts[i]) for i in prices) * each_s / 3600


class Planner:
    """Plans for any rate, from what runs: starting a copy has its price. Templates are made once."""

    def __init__(self, factory: TemplateFactory) -> None:
        self._factory = factory
        self._running: Plan | None = None
        self._known: dict[float, Plan] = {}

    def fresh(self, rate_per_s: float) -> Plan:
        """The cheapest plan for a rate, whatever runs."""
        rate_per_s = max(round(rate_per_s, 2), 0.05)
        if rate_per_s not in self._known:
            self._known[rate_per_s] = self._plan(rate_per_s, None)
        return self._known[rate_per_s]

    def begin(self, rate_per_s: float) -> Plan:
        self._running = self.fresh(rate_per_s)
        return self._running

    def next(self, moment: PlanQuestion) -> Plan:
        rate_per_s = max(dict(moment.rates_per_s)[NAME], 0.05)
        self._running = self._plan(rate_per_s, self._running)
        return self._running

    def _plan(self, rate_per_s: float, running: Plan | None) -> Plan:
        base = self._factory.problem
        problem = scaled(base, {NAME: rate_per_s / base.asks[0].rate_per_s})
        if running is not None:
            problem = replace(problem, init_penalty=START_S / LIFE_S)
        factory = replace(self._factory, problem=problem)
        return STRATEGIES["auto"](factory, SolveSettings(time_limit_s=LIMIT_S, running=running)).plan


def served(
    policy: Policy, planner: Planner, problem: ResolvedPlan, load: Workload, react: Callable[..., Plan]
) -> tuple[dict[str, float], SimResult]:
    start_s = time.process_time()
    result = simulate(
        problem, load, policy, seed=SEED, settings=replace(RUNNING, tick_s=policy.tick_s), planner=react
    )
    summary = summarise(result)
    model = summary.models[0]
    days = len(load) and float(load.arrival_s[-1]) / 86_400
    return {
        "usd": summary.cost_usd,
        "attainment": model.attainment or 0.0,
        "ttft_p99_s": model.ttft_s.p99 if model.ttft_s else 0.0,
        "refused": model.outcomes.refused,
        "plans_asked": result.counts["plans asked for"],
        "copies_ever": len({replica.unit for replica in result.replicas}),
        "reversals_per_day": reversals(result.replicas) / max(days, 1e-9),
        "cpu_s": time.process_time() - start_s,
    }, result


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


def oracle_kept(
    planner: Planner, factory: TemplateFactory, stairs: Stairs, week: np.ndarray, load: Workload
) -> dict[str, float]:
    """The oracle's plans at work: its attainment and what it misses. Plans that cost the same are the same."""
    bins: dict[float, list[int]] = {}
    for place, rate in enumerate(week):
        bins.setdefault(round(stairs.at(float(rate)), 3), []).append(place)
    edges = np.searchsorted(load.arrival_s, np.arange(len(week) + 1) * STEP_S)
    outcome = {"attainment": 0.0, "refused_share": 0.0, "late_share": 0.0, "slow_share": 0.0}
    for places in bins.values():
        plan = planner.fresh(float(week[places].max()))
        parts = [np.arange(edges[i], edges[i + 1]) for i in places]
        when = [
            load.arrival_s[p] + (k - i) * STEP_S for k, (i, p) in enumerate(zip(places, parts, strict=True))
        ]
        rows = np.concatenate(parts)
        if not len(rows):
            continue
        mine = workload(NAME, np.concatenate(when), load.prompt_tokens[rows], load.output_tokens[rows])
        policy = Policy(tick_s=RUNNING.tick_s)
        result = simulate(resolved(plan, factory, load, ()), mine, policy, seed=SEED, settings=RUNNING)
        kept = {"attainment": summarise(result).models[0].attainment or 0.0} | missed(result)
        for name, value in kept.items():
            outcome[name] += value * len(rows) / len(load)
    return outcome


def resolved(plan: Plan, factory: TemplateFactory, load: Workload, history: Sequence[float]) -> ResolvedPlan:
    problem = factory.problem
    return ResolvedPlan(
        plan,
        {NAME: problem.asks[0].model},
        problem.by_name,
        problem.regions,
        (),
        {NAME: SLO},
        {NAME: (float(load.prompt_tokens.mean()), float(load.output_tokens.mean()))},
        history={NAME: tuple(float(rate) for rate in history)},
        paced=PACED,
    )


def measure(rates: np.ndarray, quick: bool) -> dict[str, float]:
    first = FROM * DAY
    history, week = rates[:first], rates[first : first + (QUICK_STEPS if quick else DAY * DAYS)]
    rng = np.random.default_rng(SEED)
    when = arrivals.curve(rng, list(week), STEP_S)
    load = workload(NAME, when, *draw(rng, lengths(), len(when)))
    factory = TemplateFactory(the_problem(RATE_PER_S))
    planner = Planner(factory)
    stairs = Stairs(lambda rate_per_s: planner.fresh(rate_per_s).cost_usd_per_h)
    oracle_usd = stairs.usd(week, STEP_S)
    figures = {"requests": float(len(load)), "hours": len(week) / 6, "oracle_usd": oracle_usd}
    oracle = oracle_kept(planner, factory, stairs, week, load)
    figures |= {f"oracle_{name}": value for name, value in oracle.items()}
    say(
        f"  oracle       {oracle_usd:8.2f} USD  {oracle['attainment']:7.2%} within the objective{causes(oracle)}"
    )
    base = Policy(tick_s=RUNNING.tick_s)
    rows = [
        ("static mean", base, float(week.mean())),
        ("static peak", base, float(week.max())),
        ("replan", replace(base, scaling="replan"), float(week[0])),
        ("ahead", replace(base, scaling="ahead"), float(week[0])),
    ]
    if quick:
        say(f"left out: all but {len(week) / 6:g} h, the fleets that stay")
    for name, policy, start in rows[2:] if quick else rows:
        plan = planner.begin(start)
        problem = resolved(plan, factory, load, history)
        outcome, result = served(policy, planner, problem, load, planner.next)
        key = name.replace(" ", "_")
        lost = missed(result)
        figures |= {f"{key}_{what}": value for what, value in (outcome | lost).items()}
        over = figures[f"{key}_over_oracle"] = outcome["usd"] / oracle_usd - 1
        figures[f"{key}_attainment_over_oracle"] = outcome["attainment"] - oracle["attainment"]
        say(
            f"  {name:<12} {outcome['usd']:8.2f} USD ({over:+.1%} of the oracle's)"
            f"  {outcome['attainment']:7.2%} within the objective{causes(lost)}, {outcome['reversals_per_day']:.1f}"
            f" reversals a day, {outcome['copies_ever']:.0f} copies ever, {outcome['cpu_s']:.0f} CPU-s"
        )
    return figures


def causes(lost: dict[str, float]) -> str:
    shares = ", ".join(f"{name} {lost[f'{name}_share']:.2%}" for name in ("refused", "late", "slow"))
    return f" ({shares})"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


TARGETS = {
    "ahead_over_oracle": ("<=", 0.025),
    "ahead_attainment": (">=", 0.995),
    "ahead_reversals_per_day": ("<=", 4.0),
}


def main() -> int:
    rates = two_weeks()
    if rates is None:
        return skip("forecast", f"{DATA} has no servegen_client_rates.parquet")
    return run(
        "forecast",
        lambda quick: measure(rates, quick),
        {} if "--quick" in sys.argv else TARGETS,
        seeds=[SEED],
    )


if __name__ == "__main__":
    sys.exit(main())
