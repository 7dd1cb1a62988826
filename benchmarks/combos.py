"""CAUCHY's combos at run time: scale-out over all that is on offer, and roles that change inside a combo.

Half of its cluster (3.3.3): 4 H800, 4 A800 and 4 H20, one GPU a node, at its Table 1's prices; Llama-3.1-8B with
LongWriter's lengths (337 / 1330), TTFT 1 s, TPOT 30 ms. Requests come by chance (Poisson); copies take 90 s to start,
and cost from when they are asked for.

    out     planned for 10 requests/s; from 300 s on 40 come. `own`: only templates that the plan has may be started;
            `offer`: all combos of the strategy
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from common import run
from potluck.catalog import models, nodes
from potluck.core.brain.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import LengthBin, Offer, Region, Slo, Traffic
from potluck.plan.candidates import with_candidates
from potluck.plan.problem import Problem, ask
from potluck.plan.strategies import STRATEGIES, Settings, Workshop
from potluck.sim.load import arrivals
from potluck.sim.load.workload import Workload, workload
from potluck.sim.results.metrics import summarise
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate
from potluck.worlds.scene import Scene

USD_PER_H = {"1xH800": 2.69, "1xA800-PCIe": 1.19, "1xH20": 1.50}
SLO = Slo(1.0, 0.03)
LENGTHS = (337, 1330)
SEED = 3


def the_problem(rate_per_s: float, available: int = 4) -> Problem:
    traffic = Traffic("m", rate_per_s, (LengthBin(*LENGTHS, 1.0),))
    offers = tuple(Offer(node, usd, available) for node, usd in USD_PER_H.items())
    types = tuple(nodes.node_type(name) for name in USD_PER_H)
    return Problem(
        (ask("m", models.model("Llama-3.1-8B"), SLO, traffic),), (Region("cluster", offers),), types
    )


def scene(plan: Plan, problem: Problem) -> Scene:
    return Scene(
        plan,
        {"m": problem.asks[0].model},
        problem.by_name,
        problem.regions,
        slos={"m": SLO},
        mean_tokens={"m": (float(LENGTHS[0]), float(LENGTHS[1]))},
    )


def load_of(rates_per_s: Sequence[float], step_s: float, lengths: tuple[int, int] = LENGTHS) -> Workload:
    when = arrivals.curve(np.random.default_rng(SEED), list(rates_per_s), step_s)
    return workload("m", when, np.full(len(when), lengths[0]), np.full(len(when), lengths[1]))


def kept(result: SimResult, from_s: float, to_s: float) -> float:
    """Share of those who came in that time that were served within the objective."""
    records = result.records
    came = (records.arrival_s >= from_s) & (records.arrival_s < to_s)
    ttft_s = records.first_token_s - records.arrival_s
    tpot_s = (records.finish_s - records.first_token_s) / np.maximum(records.output_tokens - 1, 1)
    within = (ttft_s <= SLO.ttft_s) & (tpot_s <= SLO.tpot_s)
    return float((within & came).sum() / max(1, came.sum()))


def out(strategy: str) -> dict[str, float]:
    problem = the_problem(10.0)
    workshop = Workshop(problem)
    plan = STRATEGIES[strategy](workshop, Settings(time_limit_s=10)).plan
    load = load_of([10.0, 40.0, 40.0, 40.0], 300.0)
    policy = Policy(scaling="cauchy")
    figures = {}
    for name, each in (("own", plan), ("offer", with_candidates(workshop, plan))):
        result = simulate(scene(each, problem), load, policy, seed=SEED)
        key = f"out_{strategy}_{name}"
        figures[f"{key}_kept_after"] = kept(result, 600.0, 1200.0)
        figures[f"{key}_usd"] = summarise(result).cost_usd
        figures[f"{key}_usd_per_h_last"] = result.cost_rates[-1][1]
        started = {r.template: 0 for r in result.replicas}
        for _, template in {(r.unit, r.template) for r in result.replicas}:
            started[template] += 1
        print(f"  {key}: {figures[f'{key}_kept_after']:.1%} kept, copies ever {started}", file=sys.stderr)
    return figures


def measure(quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    for strategy in ("cauchy", "cauchy-ce"):
        figures |= out(strategy)
    return figures


if __name__ == "__main__":
    sys.exit(run("combos", measure, {}, seeds=[SEED]))
