"""A day of real arrival rates: what autoscaling costs and keeps, against fleets that stay as they were planned.

Rates are those of ServeGen's m-large, ten minutes apart, on its first day: real traffic, its clients' rates added
up (../shared/data, servegen_client_rates.parquet), scaled down to a mean of RATE_PER_S so that a day takes
minutes. Within ten minutes arrivals are Poisson; lengths are those of Azure's conversation trace, the same all day.
Fleets start warm; copies started later take what `perf.moves.startup` says, and are paid for once asked for.

    static average, static peak    one plan for the day's mean rate, or for its highest ten minutes
    replan                         CORAL's periodic re-allocation: a new plan every six minutes when a rate moved
    combos average, combos peak    the same with CAUCHY's planner
    combos cauchy                  its Algorithm 1: combos come and go with the rate
    phases average, phases flips   prefill and decode apart, at the mean rate: as planned, and with role flips

What scales starts from the plan of the first ten minutes. Flips do not change how many GPUs there are, and lengths
stay the same here, so little is to be expected of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from parts.common import Budget, run, skip
from potluck.catalog import models, nodes, prices
from potluck.catalog import named_workloads as named
from potluck.core.state.policy import Policy
from potluck.core.values.length_laws import Lengths
from potluck.core.values.plan import Plan
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.rehearse.queueing_margins import scaled
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load import arrivals
from potluck.sim.load.arrivals import draw
from potluck.sim.load.workload import Workload, workload
from potluck.sim.results.metrics import RunSummary, summarise
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings as Running

DATA = Path(os.environ.get("POTLUCK_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
SOURCE, DAY = "m-large", 0
STEP_S = 600.0
RATE_PER_S = 5.0
MODEL, NAME, LENGTHS = "Qwen3-32B", "chat", "azure-conv"
SLO = Slo(2.5, 0.1, 0.9)
NODES, AVAILABLE = ("2xL40S", "1xA100-80GB", "1xH100"), 60
QUICK_H = 1
RUNNING = Running(tick_s=5.0, report_period_s=1.0)
SEED = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One way to provide the day."""

    name: str
    policy: Policy
    strategy: str
    rate_per_s: float
    """What the first plan is for."""


def day_rates() -> np.ndarray | None:
    """Requests a second in each ten minutes of the day, scaled to the mean; None without the data."""
    path = DATA / "servegen_client_rates.parquet"
    if not path.exists():
        return None
    import pyarrow.parquet as parquet

    mine = parquet.read_table(path, columns=["t_s", "rate_rps"], filters=[("model", "==", SOURCE)])
    step = (mine["t_s"].to_numpy() // STEP_S).astype(int) - DAY * 144
    rates = mine["rate_rps"].to_numpy().astype(float)
    inside = (step >= 0) & (step < 144)
    total = np.bincount(step[inside], rates[inside], minlength=144)
    return np.asarray(total * RATE_PER_S / total.mean())


def lengths() -> Lengths:
    return named.workload(LENGTHS).lengths


def the_problem(rate_per_s: float) -> PlanningProblem:
    """Demand in bins drawn from the workload's lengths, so that the planner knows their spread."""
    prompt, output = draw(np.random.default_rng(0), lengths(), 4000)
    order = np.argsort(prompt)
    bins = [
        LengthBin(float(prompt[part].mean()), float(output[part].mean()), len(part) / len(order))
        for part in np.array_split(order, 20)
    ]
    traffic = Traffic(NAME, rate_per_s, tuple(bins))
    types = [nodes.node_type(item) for item in NODES]
    offers = tuple(
        NodeOffer(node.name, prices.price_usd_per_h(node.name).price_usd_per_h, AVAILABLE) for node in types
    )
    asked = model_demand(NAME, models.model(MODEL), SLO, traffic)
    return PlanningProblem((asked,), (Region("here", offers),), tuple(types), codecs=CODECS)


def planner(factory: TemplateFactory, strategy: str) -> Callable[[float], Plan]:
    """Plans for any rate; templates are made once."""
    base = factory.problem

    def plan(rate_per_s: float) -> Plan:
        shop = replace(factory, problem=scaled(base, {NAME: rate_per_s / base.asks[0].rate_per_s}))
        return STRATEGIES[strategy](shop, SolveSettings(time_limit_s=5.0)).plan

    return plan


def served(row: Row, factory: TemplateFactory, load: Workload) -> tuple[RunSummary, SimResult]:
    """The day with one way to provide for it."""
    plan = planner(factory, row.strategy)
    problem = factory.problem
    world = ResolvedPlan(
        plan(row.rate_per_s),
        {NAME: problem.asks[0].model},
        problem.by_name,
        problem.regions,
        (),
        {NAME: SLO},
        {NAME: (float(load.prompt_tokens.mean()), float(load.output_tokens.mean()))},
    )
    result = simulate(
        world,
        load,
        row.policy,
        seed=SEED,
        settings=replace(RUNNING, tick_s=row.policy.tick_s),
        planner=lambda moment: plan(dict(moment.rates_per_s)[NAME]),
    )
    return summarise(result), result


def measure(rates: np.ndarray, quick: bool) -> dict[str, float]:
    if quick:
        rates = _busiest(rates, QUICK_H * 6)
    rng = np.random.default_rng(SEED)
    when = arrivals.curve(rng, list(rates), STEP_S)
    load = workload(NAME, when, *draw(rng, lengths(), len(when)))
    factory = TemplateFactory(the_problem(RATE_PER_S))
    mean, peak, first = float(rates.mean()), float(rates.max()), float(rates[0])
    base = Policy(tick_s=RUNNING.tick_s)
    rows = [
        Row("static average", base, "auto", mean),
        Row("static peak", base, "auto", peak),
        Row("replan", replace(base, scaling="replan"), "auto", first),
        Row("combos average", base, "cauchy", mean),
        Row("combos peak", base, "cauchy", peak),
        Row("combos cauchy", replace(base, scaling="cauchy"), "cauchy", first),
        Row("phases average", base, "prfaas", mean),
        Row("phases flips", replace(base, scaling="flips"), "prfaas", mean),
    ]
    figures = {"requests": float(len(load)), "hours": len(rates) / 6, "mean_per_s": mean, "peak_per_s": peak}
    budget = Budget(quick)
    if quick:
        print(f"left out: all but the {QUICK_H} h in which rates move most", file=sys.stderr)
    for row in rows:
        if not budget.allows(row.name, 4.0):
            continue
        start_s = time.process_time()
        summary, result = served(row, factory, load)
        key = row.name.replace(" ", "_")
        model = summary.models[0]
        figures[f"{key}_usd"] = summary.cost_usd
        figures[f"{key}_attainment"] = model.attainment or 0.0
        figures[f"{key}_ttft_p99_s"] = model.ttft_s.p99 if model.ttft_s else 0.0
        figures[f"{key}_copies_ever"] = len({replica.unit for replica in result.replicas})
        figures[f"{key}_refused"] = model.outcomes.refused
        figures[f"{key}_plans_asked"] = result.counts["plans asked for"]
        figures[f"{key}_cpu_s"] = time.process_time() - start_s
        print(
            f"  {row.name:<16} {summary.cost_usd:8.2f} USD  {model.attainment or 0:7.2%} within the objective,"
            f" {figures[f'{key}_copies_ever']:.0f} copies ever, {figures[f'{key}_cpu_s']:.0f} CPU-s",
            file=sys.stderr,
            flush=True,
        )
    for name, one, other in (
        ("replan_cost_over_static_peak", "replan", "static_peak"),
        ("cauchy_cost_over_combos_peak", "combos_cauchy", "combos_peak"),
    ):
        if f"{one}_usd" in figures and f"{other}_usd" in figures:
            figures[name] = figures[f"{one}_usd"] / figures[f"{other}_usd"]
    return figures


def _busiest(rates: np.ndarray, steps: int) -> np.ndarray:
    """The stretch in which rates move most."""
    spans = [np.ptp(rates[i : i + steps]) for i in range(len(rates) - steps + 1)]
    start = int(np.argmax(spans))
    return rates[start : start + steps]


def main() -> int:
    rates = day_rates()
    if rates is None:
        return skip("autoscale", f"{DATA} has no servegen_client_rates.parquet")
    return run("autoscale", lambda quick: measure(rates, quick), {}, seeds=[SEED])


if __name__ == "__main__":
    sys.exit(main())
