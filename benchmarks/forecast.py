"""A week of real arrival rates: scaling by forecast against reacting, fleets that stay, and an oracle.

ServeGen's language models cover 14 days (../shared/data, servegen_client_rates.parquet). The first week is the
history that the forecaster learns from; the second is served, in simulation, set up as in benchmarks/autoscale.py.

    oracle           for every ten minutes the cheapest plan that serves them; no start-up, nothing to be drained
    static peak      one plan for the week's highest ten minutes; static mean: for its mean
    replan           re-allocation every six minutes at the rates now seen
    ahead            re-allocation at the rates forecast (core/scale/ahead.py)

A reversal is a start and a drain of one template within 30 minutes. `--quick` serves the first hour of the week with
`replan` and `ahead`.
`POTLUCK_SOURCE` names another of the models (m-large, m-mid, m-small), `POTLUCK_DAYS` another number of days.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autoscale import DATA, NAME, RATE_PER_S, RUNNING, SEED, SLO, STEP_S, lengths, the_problem
from common import run, skip
from potluck.core.brain.policy import Policy
from potluck.core.values.plan import Plan
from potluck.plan.strategies import STRATEGIES, Settings, Workshop
from potluck.rehearse.factors import scaled
from potluck.sim.load import arrivals
from potluck.sim.load.lengths import draw
from potluck.sim.load.workload import Workload, workload
from potluck.sim.results.metrics import summarise
from potluck.sim.results.records import ReplicaRecord, SimResult
from potluck.sim.run import simulate
from potluck.worlds.scene import Scene

SOURCE = os.environ.get("POTLUCK_SOURCE", "m-large")
DAYS = int(os.environ.get("POTLUCK_DAYS", "7"))
WEEK = 1008
QUICK_STEPS = 6
REVERSAL_S = 1800.0
START_S = 135.0
"""About what a copy takes to start (113 to 157 s)."""
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


class Planner:
    """Plans for any rate, from what runs: starting a copy has its price. Templates are made once."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
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

    def next(self, rates: Sequence[tuple[str, float]], at_s: float) -> Plan:
        self._running = self._plan(max(dict(rates)[NAME], 0.05), self._running)
        return self._running

    def _plan(self, rate_per_s: float, running: Plan | None) -> Plan:
        base = self._workshop.problem
        problem = scaled(base, {NAME: rate_per_s / base.asks[0].rate_per_s})
        if running is not None:
            problem = replace(problem, init_penalty=START_S / LIFE_S)
        shop = replace(self._workshop, problem=problem)
        return STRATEGIES["auto"](shop, Settings(time_limit_s=5.0, running=running)).plan


def served(
    policy: Policy, planner: Planner, problem: Scene, load: Workload, react: Callable[..., Plan]
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
    found = 0
    for template, when in drains.items():
        left = sorted(starts.get(template, ()))
        for at_s in sorted(when):
            near = [start_s for start_s in left if abs(start_s - at_s) <= REVERSAL_S]
            if near:
                left.remove(near[0])
                found += 1
    return found


def measure(rates: np.ndarray, quick: bool) -> dict[str, float]:
    history, week = rates[:WEEK], rates[WEEK : WEEK + (QUICK_STEPS if quick else 144 * DAYS)]
    rng = np.random.default_rng(SEED)
    when = arrivals.curve(rng, list(week), STEP_S)
    load = workload(NAME, when, *draw(rng, lengths(), len(when)))
    workshop = Workshop(the_problem(RATE_PER_S))
    planner = Planner(workshop)
    oracle_usd = sum(planner.fresh(float(rate)).cost_usd_per_h for rate in week) * STEP_S / 3600
    figures = {"requests": float(len(load)), "hours": len(week) / 6, "oracle_usd": oracle_usd}
    base = Policy(tick_s=RUNNING.tick_s)
    rows = [
        ("static mean", base, float(week.mean())),
        ("static peak", base, float(week.max())),
        ("replan", replace(base, scaling="replan"), float(week[0])),
        ("ahead", replace(base, scaling="ahead"), float(week[0])),
    ]
    if quick:
        print(f"left out: all but {len(week) / 6:g} h, the fleets that stay", file=sys.stderr)
    for name, policy, first in rows[2:] if quick else rows:
        plan = planner.begin(first)
        asks = workshop.problem.asks
        problem = Scene(
            plan,
            {NAME: asks[0].model},
            workshop.problem.by_name,
            workshop.problem.regions,
            (),
            {NAME: SLO},
            {NAME: (float(load.prompt_tokens.mean()), float(load.output_tokens.mean()))},
            history={NAME: tuple(float(rate) for rate in history)},
        )
        found, _ = served(policy, planner, problem, load, planner.next)
        key = name.replace(" ", "_")
        figures |= {f"{key}_{what}": value for what, value in found.items()}
        figures[f"{key}_over_oracle"] = found["usd"] / oracle_usd - 1
        print(
            f"  {name:<12} {found['usd']:8.2f} USD ({figures[f'{key}_over_oracle']:+.1%} of the oracle's)"
            f"  {found['attainment']:7.2%} within the objective, {found['reversals_per_day']:.1f} reversals a day,"
            f" {found['copies_ever']:.0f} copies ever, {found['cpu_s']:.0f} CPU-s",
            file=sys.stderr,
            flush=True,
        )
    return figures


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
