"""A day of changing prices and nodes: what re-allocating costs and keeps, against plans that stay and an oracle.

    kept         the first plan; what of it loses its machines comes back when there are nodes again
    on_demand    a plan on nodes that never go, at their fixed prices
    replan       CORAL's periodic re-allocation, and at once where prices or nodes change; K is start-up over 6 min
    replan_hour  the same with K over an hour, as CORAL amortises starts
    oracle       for every stretch between two changes the cheapest plan for it, at once and for nothing: a bound

Two models at a steady rate on a recorded market: AWS's spot prices in two regions, the last 24 days on record, each
played for an hour, with how many of 16 spot machines could be had every five minutes (V100s' record), which go with
two minutes of notice; and the same nodes on demand. Fleets start warm; later copies take `perf.moves.startup`.
"""

from __future__ import annotations

import csv
import gzip
import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from parts.common import DATA, Budget, prefixed, run, say, skip
from parts.problems import length_bins, mean_tokens, resolved
from potluck.catalog import models, nodes
from potluck.catalog import named_workloads as named
from potluck.core.errors import CapacityError
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import NodeOffer, Region, Slo, Traffic
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

FILES = ("aws_gpu_spot_price_history_daily.parquet", "spot_v100_k80_traces_rle.csv.gz")
INSTANCES = {"g6.xlarge": "1xL4", "g5.xlarge": "1xA10G", "g6e.xlarge": "1xL40S"}
NODES = tuple(INSTANCES.values())
ZONES = {"us-east-2": "use2-az1", "ap-northeast-2": "apne2-az1"}
COUNTS = {"us-east-2": ("us-east-2b", (3, 0, 1)), "ap-northeast-2": ("us-west-2a", (1, 0, 5))}
"""Region to whose record its counts are, and which days of it its node types have: of each record's first week those
three in which counts changed most, the most restless for the dearest."""
CAMPAIGN = "aws-08-27-2023"
COLUMNS = "date availability_zone region instance_type price_usd_per_h spot_price_usd_per_h"
ON_DEMAND = "us-east-2 on demand"
AMPLE = 16
HOUR_S, TICK_S, TICKS = 3600.0, 300.0, 288
NOTICE_S = 120.0  # What AWS gives.
Key = tuple[str, str]


@dataclass(frozen=True)
class Change:
    """From a moment on: another price, or another count, of a node type in a region."""

    at_s: float
    region: str
    node: str
    usd_per_h: float | None = None
    available: int | None = None


@dataclass(frozen=True)
class Market:
    changes: tuple[Change, ...]  # In order of time; those at 0 say how it begins.

    @cached_property
    def times(self) -> tuple[float, ...]:
        return tuple(sorted({change.at_s for change in self.changes}))

    def after(self, at_s: float) -> Market:
        return Market(tuple(replace(item, at_s=max(0.0, item.at_s - at_s)) for item in self.changes))

    def regions(self, at_s: float) -> tuple[Region, ...]:
        offers: dict[Key, NodeOffer] = {}
        for change in self.changes:
            if change.at_s > at_s:
                break
            key = (change.region, change.node)
            old = offers.get(key, NodeOffer(change.node, 0.0, 0, spot=change.region != ON_DEMAND))
            price = old.price_usd_per_h if change.usd_per_h is None else change.usd_per_h
            count = old.available if change.available is None else change.available
            offers[key] = NodeOffer(old.node, price, count, old.spot)
        names = dict.fromkeys(region for region, _ in offers)
        return tuple(Region(n, tuple(o for (region, _), o in offers.items() if region == n)) for n in names)


def the_market() -> Market:
    hourly, steady = recorded_prices()
    counts = recorded_counts()
    changes = [Change(0.0, ON_DEMAND, node, price, AMPLE) for node, price in steady.items()]
    for (region, node), prices in hourly.items():
        changes += [Change(h * HOUR_S, region, node, usd_per_h=p) for h, p in _changes(prices)]
    for (region, node), ticks in counts.items():
        changes += [Change(t * TICK_S, region, node, available=int(n)) for t, n in _changes(ticks)]
    return Market(tuple(sorted(changes, key=lambda change: change.at_s)))


def _changes(values: list[float]) -> list[tuple[int, float]]:
    """The first value, and every one that differs from the one before, with their places."""
    return [(0, values[0]), *((i, b) for i, (a, b) in enumerate(pairwise(values), 1) if a != b)]


def recorded_prices() -> tuple[dict[Key, list[float]], dict[str, float]]:
    import pyarrow.parquet as parquet

    rows = parquet.read_table(
        DATA / FILES[0],
        columns=COLUMNS.split(),
        filters=[("instance_type", "in", list(INSTANCES)), ("region", "in", list(ZONES))],
    ).to_pylist()
    spot: dict[Key, dict[str, float]] = {}
    steady: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: str(row["date"])):
        if row["availability_zone"] != ZONES[row["region"]] or not row["spot_price_usd_per_h"]:
            continue
        node = INSTANCES[row["instance_type"]]
        spot.setdefault((row["region"], node), {})[str(row["date"])] = round(row["spot_price_usd_per_h"], 3)
        if row["region"] in ON_DEMAND and row["price_usd_per_h"]:
            steady[node] = round(row["price_usd_per_h"], 3)
    return {key: list(days.values())[-24:] for key, days in sorted(spot.items())}, steady


def recorded_counts() -> dict[Key, list[float]]:
    ticks: dict[str, list[float]] = {}
    with gzip.open(DATA / FILES[1], "rt") as file:
        for row in csv.DictReader(file):
            if row["campaign"] == CAMPAIGN and row["kind"] == "availability":
                run = [float(row["value"])] * int(row["run_length_ticks"])
                ticks.setdefault(row["zone"], []).extend(run)
    return {
        (region, node): ticks[zone][day * TICKS : (day + 1) * TICKS]
        for region, (zone, days) in COUNTS.items()
        for node, day in zip(NODES, days, strict=True)
    }


ASKED = (
    ("chat", "Llama-3.1-8B", "azure-conv", 3.0, Slo(2.0, 0.08)),
    ("code", "Phi-4", "azure-code", 1.0, Slo(3.0, 0.1)),
)
"""Name, model, lengths, requests a second, objective."""
QUICK_FROM_H, QUICK_H = 2.75, 0.5  # The cheapest nodes go at three o'clock.
REPLAN_S = 360.0
LIMIT_S = 20.0
SEED = 1


ROWS = {"kept": 0.0, "on_demand": 0.0, "replan": REPLAN_S, "replan_hour": INTERVAL_S}
"""To over how long K spreads a start; 0 where nothing is re-planned."""


class Planners:
    """Plans for any moment of the market; templates are made once for a set of prices."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self._factories = TemplateFactories()
        self.cpu_s = 0.0

    def plan(self, problem: PlanningProblem, running_plan: Plan | None = None) -> Plan:
        start_s = time.process_time()
        settings = SolveSettings(time_limit_s=LIMIT_S, gap_target=1e-3, running=running_plan)
        plan = STRATEGIES["coral"](self._factories.at(problem), settings).plan
        self.cpu_s += time.process_time() - start_s
        return plan

    def at(self, regions: tuple[Region, ...]) -> Plan:
        """The cheapest there is at a moment, whatever runs."""
        return self.plan(replace(self.problem, regions=regions))

    def again(self, interval_s: float) -> Planner:
        def answer(plan_question: PlanQuestion) -> Plan | None:
            try:
                rates = dict(plan_question.rates_per_s)
                now = problem_now(
                    self.problem, rates, plan_question.lengths, plan_question.regions, interval_s
                )
            except CapacityError:
                return None
            plan = self.plan(now, plan_question.running)
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


def served(
    name: str, planners: Planners, market: Market, workload: Workload, hours: float
) -> dict[str, float]:
    regions = market.regions(0.0)
    offered = tuple(region for region in regions if name != "on_demand" or region.name == ON_DEMAND)
    world = resolved(planners.problem, planners.at(offered), mean_tokens(workload), regions=regions)
    policy = Policy(tick_s=5.0, scaling="replan" if ROWS[name] else "none", replan_s=REPLAN_S)
    result = simulate(
        world,
        workload,
        policy,
        seed=SEED,
        settings=Running(tick_s=5.0, report_period_s=1.0),
        faults=faults_of(market, hours * HOUR_S),
        planner=planners.again(ROWS[name]) if ROWS[name] else None,
    )
    summary = summarise(result)
    within = sum((item.attainment or 0.0) * item.requests for item in summary.models)
    starts = [replica for replica in result.replicas if replica.changes[0][0] > 0]
    return {
        "usd": summary.cost_usd,
        "attainment": within / len(workload),
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
    workload, planners, budget = the_load(hours), Planners(the_problem(market)), Budget(quick)
    figures: dict[str, float] = {
        "hours": hours,
        "requests": float(len(workload)),
        "market_is_recorded": 1.0,
        "changes": float(sum(0 < at_s < hours * HOUR_S for at_s in market.times)),
    }
    figures |= prefixed("oracle", oracle(planners, market, hours * HOUR_S))
    for name, interval_s in ROWS.items():
        if budget.allows(name, 12.0 if interval_s else 4.0):
            figures |= prefixed(name, served(name, planners, market, workload, hours))
    figures["planning_cpu_s"] = planners.cpu_s
    for name in ROWS:  # the oracle serves all that can be served and pays for no switch
        if f"{name}_usd" in figures:
            figures[f"{name}_cost_over_oracle"] = figures[f"{name}_usd"] / figures["oracle_usd"]
    if "replan_hour_usd" in figures and "on_demand_usd" in figures:
        figures["replan_hour_cost_over_on_demand"] = figures["replan_hour_usd"] / figures["on_demand_usd"]
    return figures


if __name__ == "__main__":
    if not all((DATA / name).exists() for name in FILES):
        skip("prices", f"{DATA} has not all of {', '.join(FILES)}")
    run("prices", measure, {}, seeds=[SEED])
