"""A day of real arrival rates: what autoscaling costs and keeps, against fleets that stay as they were planned.

Rates are ServeGen's m-large, scaled to a mean; lengths are Azure's conversations. Fleets planned by `auto` (for the
day's mean, for its peak, re-planned), CAUCHY's combos (mean, peak, scaled out), and phases apart with and without
flips of roles. Flips do not change how many GPUs there are, and lengths stay the same: little is to be expected.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from parts.common import DATA, Budget, prefixed, run, say, skip
from parts.problems import length_bins, mean_tokens, one_region, resolved
from potluck.catalog import models
from potluck.catalog import named_workloads as named
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Slo, Traffic
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.rehearse.queueing_margins import scaled
from potluck.sim.load import arrivals
from potluck.sim.load.arrivals import draw
from potluck.sim.load.workload import Workload, workload
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings as Running

RATES = "servegen_client_rates.parquet"
STEP_S, DAY_BINS = 600.0, 144
RATE_PER_S = 5.0
NAME = "chat"
LENGTHS = named.workload("azure-conv").lengths
NODES, AVAILABLE = ("2xL40S", "1xA100-80GB", "1xH100"), 60
QUICK_H = 1
RUNNING = Running(tick_s=5.0, report_period_s=1.0)
SEED = 1


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    policy: Policy
    strategy: str
    rate_per_s: float  # What the first plan is for.


def recorded_rates(source: str, steps: int) -> np.ndarray | None:
    """Requests a second in each of the first ten minutes, scaled to the mean; None without the data."""
    if not (DATA / RATES).exists():
        return None
    import pyarrow.parquet as parquet

    mine = parquet.read_table(DATA / RATES, columns=["t_s", "rate_rps"], filters=[("model", "==", source)])
    step = (mine["t_s"].to_numpy() // STEP_S).astype(int)
    inside = (step >= 0) & (step < steps)
    total = np.bincount(step[inside], mine["rate_rps"].to_numpy().astype(float)[inside], minlength=steps)
    return np.asarray(total * RATE_PER_S / total.mean())


def the_problem(rate_per_s: float) -> PlanningProblem:
    traffic = Traffic(NAME, rate_per_s, length_bins(LENGTHS, 20))
    demand = model_demand(NAME, models.model("Qwen3-32B"), Slo(2.5, 0.1, 0.9), traffic)
    return PlanningProblem((demand,), *one_region(NODES, AVAILABLE), codecs=CODECS)


def load_of(rates: np.ndarray) -> Workload:
    rng = np.random.default_rng(SEED)
    when = arrivals.curve(rng, list(rates), STEP_S)
    return workload(NAME, when, *draw(rng, LENGTHS, len(when)))


def planner(factory: TemplateFactory, strategy: str) -> Callable[[float], Plan]:
    """Plans for any rate; templates are made once."""
    base = factory.problem

    def plan(rate_per_s: float) -> Plan:
        mine = replace(factory, problem=scaled(base, {NAME: rate_per_s / base.demands[0].rate_per_s}))
        return STRATEGIES[strategy](mine, SolveSettings(time_limit_s=5.0)).plan

    return plan


def served(row: Row, factory: TemplateFactory, workload: Workload) -> dict[str, float]:
    start_s = time.process_time()
    plan = planner(factory, row.strategy)
    result = simulate(
        resolved(factory.problem, plan(row.rate_per_s), mean_tokens(workload)),
        workload,
        row.policy,
        seed=SEED,
        settings=replace(RUNNING, tick_s=row.policy.tick_s),
        planner=lambda plan_question: plan(dict(plan_question.rates_per_s)[NAME]),
    )
    summary = summarise(result)
    model = summary.models[0]
    return {
        "usd": summary.cost_usd,
        "attainment": model.attainment or 0.0,
        "ttft_p99_s": model.ttft_s.p99 if model.ttft_s else 0.0,
        "copies_ever": len({replica.unit for replica in result.replicas}),
        "refused": model.outcomes.refused,
        "plans_asked": result.counts["plans asked for"],
        "cpu_s": time.process_time() - start_s,
    }


def measure(rates: np.ndarray, quick: bool) -> dict[str, float]:
    if quick:
        say(f"left out: all but the {QUICK_H} h in which rates move most")
        steps = QUICK_H * 6
        start = int(np.argmax([np.ptp(rates[i : i + steps]) for i in range(len(rates) - steps + 1)]))
        rates = rates[start : start + steps]
    workload, factory = load_of(rates), TemplateFactory(the_problem(RATE_PER_S))
    mean, peak, first = float(rates.mean()), float(rates.max()), float(rates[0])
    base_policy = Policy(tick_s=RUNNING.tick_s)
    rows = [
        Row("static_average", base_policy, "auto", mean),
        Row("static_peak", base_policy, "auto", peak),
        Row("replan", replace(base_policy, scaling="replan"), "auto", first),
        Row("combos_average", base_policy, "cauchy", mean),
        Row("combos_peak", base_policy, "cauchy", peak),
        Row("combos_cauchy", replace(base_policy, scaling="cauchy"), "cauchy", first),
        Row("phases_average", base_policy, "prfaas", mean),
        Row("phases_flips", replace(base_policy, scaling="flips"), "prfaas", mean),
    ]
    figures = {
        "requests": float(len(workload)),
        "hours": len(rates) / 6,
        "mean_per_s": mean,
        "peak_per_s": peak,
    }
    budget = Budget(quick)
    for row in rows:
        if budget.allows(row.name, 4.0):
            figures |= prefixed(row.name, served(row, factory, workload))
    for kind, one, other in (("replan", "replan", "static_peak"), ("cauchy", "combos_cauchy", "combos_peak")):
        if f"{one}_usd" in figures and f"{other}_usd" in figures:
            ratio = figures[f"{one}_usd"] / figures[f"{other}_usd"]
            figures[f"{kind}_cost_over_{other}"] = ratio
    return figures


if __name__ == "__main__":
    rates = recorded_rates("m-large", DAY_BINS)
    if rates is None:
        skip("autoscale", f"{DATA} has no {RATES}")
    run("autoscale", lambda quick: measure(rates, quick), {}, seeds=[SEED])
