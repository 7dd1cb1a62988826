"""A day of changing prices and nodes: what re-allocating costs and keeps, against plans that stay and an oracle.

    kept         the first plan; what of it loses its machines comes back when there are nodes again
    on demand    a plan on nodes that never go, at their fixed prices
    replan       CORAL's periodic re-allocation, and at once where prices or nodes change; K is start-up over 6 min
    replan hour  the same with K over an hour, as CORAL amortises starts
    oracle       for every stretch between two changes the cheapest plan for it, at once and for nothing: a bound

Two models at a steady rate on a recorded market (`prices_market.py`): spot machines, which go with two minutes of
notice, and the same nodes on demand. Fleets start warm; copies started later take what `perf.moves.startup` says.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from parts.common import DATA, Budget, run, say, skip
from parts.prices_market import FILES, NODES, NOTICE_S, ON_DEMAND, Market, the_market
from parts.problems import length_bins, mean_tokens, resolved
from potluck.catalog import models, nodes
from potluck.catalog import named_workloads as named
from potluck.core.errors import CapacityError
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region, Slo, Traffic
from potluck.plan.current_problem import INTERVAL_S, TemplateFactories, problem_now
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings
from potluck.sim.load import arrivals
from potluck.sim.load.arrivals import draw
from potluck.sim.load.workload import Workload, merge, workload
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings as Running
from potluck.sim.world.faults import Faults, PriceChange, SupplyChange
from potluck.sim.world.sim_fleet import Planner, PlanQuestion

ASKED = (
    ("chat", "Llama-3.1-8B", "azure-conv", 3.0, Slo(2.0, 0.08)),
    ("code", "Phi-4", "azure-code", 1.0, Slo(3.0, 0.1)),
)
"""Name, model, lengths, requests a second, objective."""
HOUR_S = 3600.0
QUICK_FROM_H, QUICK_H = 2.75, 0.5
"""The cheapest nodes go at three o'clock."""
REPLAN_S = 360.0
LIMIT_S = 20.0
SEED = 1


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    scaling: bool = False
    interval_s: float = REPLAN_S
    """Over which K spreads a start."""
    on_demand: bool = False


ROWS = (
    Row("kept"),
    Row("on demand", on_demand=True),
    Row("replan", scaling=True),
    Row("replan hour", scaling=True, interval_s=INTERVAL_S),
)


class Planners:
    """Plans for any moment of the market; templates are made once for a set of prices."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self._factories = TemplateFactories()
        self.cpu_s = 0.0

    def plan(self, problem: PlanningProblem, running: Plan | None = None) -> Plan:
        start_s = time.process_time()
        settings = SolveSettings(time_limit_s=LIMIT_S, gap_target=1e-3, running=running)
        plan = STRATEGIES["coral"](self._factories.at(problem), settings).plan
        self.cpu_s += time.process_time() - start_s
        return plan

    def at(self, regions: tuple[Region, ...]) -> Plan:
        """The cheapest there is at a moment, whatever runs."""
        return self.plan(replace(self.problem, regions=regions))

    def again(self, interval_s: float) -> Planner:
        def answer(moment: PlanQuestion) -> Plan | None:
            try:
                rates = dict(moment.rates_per_s)
                now = problem_now(self.problem, rates, moment.lengths, moment.regions, interval_s)
            except CapacityError:
                return None
            plan = self.plan(now, moment.running)
            return plan if plan.deployments else None

        return answer


def the_problem(market: Market) -> PlanningProblem:
    asks = []
    for name, model, lengths, rate_per_s, slo in ASKED:
        traffic = Traffic(name, rate_per_s, length_bins(named.workload(lengths).lengths, 10))
        asks.append(model_demand(name, models.model(model), slo, traffic))
    types = tuple(nodes.node_type(node) for node in NODES)
    return PlanningProblem(tuple(asks), market.regions(0.0), types, codecs=CODECS)


def the_load(hours: float) -> Workload:
    parts = []
    for place, (name, _, lengths, rate_per_s, _) in enumerate(ASKED):
        rng = np.random.default_rng((SEED, place))
        when = arrivals.curve(rng, [rate_per_s] * round(hours * 6), HOUR_S / 6)
        parts.append(workload(name, when, *draw(rng, named.workload(lengths).lengths, len(when))))
    return merge(parts)


def served(row: Row, planners: Planners, market: Market, load: Workload, hours: float) -> dict[str, float]:
    regions = market.regions(0.0)
    offered = tuple(region for region in regions if region.name == ON_DEMAND) if row.on_demand else regions
    world = resolved(planners.problem, planners.at(offered), mean_tokens(load), regions=regions)
    policy = Policy(tick_s=5.0, scaling="replan" if row.scaling else "none", replan_s=REPLAN_S)
    result = simulate(
        world,
        load,
        policy,
        seed=SEED,
        settings=Running(tick_s=5.0, report_period_s=1.0),
        faults=faults_of(market, hours * HOUR_S),
        planner=planners.again(row.interval_s) if row.scaling else None,
    )
    summary = summarise(result)
    within = sum((item.attainment or 0.0) * item.requests for item in summary.models)
    starts = [replica for replica in result.replicas if replica.began_s > 0]
    return {
        "usd": summary.cost_usd,
        "attainment": within / len(load),
        "worst_attainment": min(item.attainment or 0.0 for item in summary.models),
        "usd_per_1000_within": 1000 * summary.cost_usd / max(within, 1),
        "copies_started": len({start.unit for start in starts}),
        "plans_asked": result.counts["plans asked for"],
    }


def faults_of(market: Market, end_s: float) -> Faults:
    later = [change for change in market.changes if 0 < change.at_s < end_s]
    return Faults(
        prices=tuple(
            PriceChange(c.at_s, c.region, c.node, c.usd_per_h) for c in later if c.usd_per_h is not None
        ),
        availability=tuple(
            SupplyChange(c.at_s, c.region, c.node, c.available, NOTICE_S)
            for c in later
            if c.available is not None
        ),
    )


def oracle(planners: Planners, market: Market, end_s: float) -> dict[str, float]:
    """The cheapest plan of every stretch; what it serves of the demand where nodes are too few."""
    times = [0.0, *(at_s for at_s in market.times if 0 < at_s < end_s), end_s]
    known: dict[tuple[Region, ...], Plan] = {}
    usd = met = 0.0
    for begin_s, stop_s in pairwise(times):
        regions = market.regions(begin_s)
        if regions not in known:
            known[regions] = planners.at(regions)
        usd += known[regions].cost_usd_per_h * (stop_s - begin_s) / HOUR_S
        met += known[regions].fraction * (stop_s - begin_s) / end_s
    return {"usd": usd, "served_fraction": met, "stretches": float(len(times) - 1)}


def measure(quick: bool) -> dict[str, float]:
    market = the_market()
    hours = QUICK_H if quick else 24.0
    if quick:
        market = market.after(QUICK_FROM_H * HOUR_S)
        say(f"left out: all but {QUICK_H} h from {QUICK_FROM_H} h on")
    load, planners, budget = the_load(hours), Planners(the_problem(market)), Budget(quick)
    figures: dict[str, float] = {
        "hours": hours,
        "requests": float(len(load)),
        "market_is_recorded": 1.0,
        "changes": float(sum(0 < at_s < hours * HOUR_S for at_s in market.times)),
    }
    _tell("oracle", oracle(planners, market, hours * HOUR_S), figures)
    for row in ROWS:
        if budget.allows(row.name, 12.0 if row.scaling else 4.0):
            _tell(row.name, served(row, planners, market, load, hours), figures)
    figures["planning_cpu_s"] = planners.cpu_s
    for row in ROWS:  # the oracle serves all that can be served and pays for no switch
        name = row.name.replace(" ", "_")
        if f"{name}_usd" in figures:
            figures[f"{name}_cost_over_oracle"] = figures[f"{name}_usd"] / figures["oracle_usd"]
    if "replan_hour_usd" in figures and "on_demand_usd" in figures:
        figures["replan_hour_cost_over_on_demand"] = figures["replan_hour_usd"] / figures["on_demand_usd"]
    return figures


def _tell(name: str, result: dict[str, float], figures: dict[str, float]) -> None:
    figures |= {f"{name.replace(' ', '_')}_{key}": value for key, value in result.items()}
    text = ", ".join(f"{key} {value:.4g}" for key, value in result.items())
    say(f"  {name:<12} {text}")


if __name__ == "__main__":
    if not all((DATA / name).exists() for name in FILES):
        sys.exit(skip("prices", f"{DATA} has not all of {', '.join(FILES)}"))
    sys.exit(run("prices", measure, {}, seeds=[SEED]))
