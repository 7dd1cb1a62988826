"""CAUCHY's combos at run time: scale-out over all that is on offer, and roles that change inside a combo.

Half of its cluster (3.3.3): 4 H800, 4 A800 and 4 H20, one GPU a node, at its Table 1's prices; Llama-3.1-8B with
LongWriter's lengths (337 / 1330), TTFT 1 s, TPOT 30 ms. Requests come by chance (Poisson); copies take 90 s to start,
and cost from when they are asked for.

    out     planned for 10 requests/s; from 300 s on 40 come. `own`: only templates that the plan has may be started;
            `offer`: all combos of the strategy
    spike   DailyMail's lengths (1155 / 77), TTFT 2 s, TPOT 50 ms, three combos of two H20 that prefill for one, 39/s;
            from 300 to 600 s answers are 16 times as long. `stay`: roles stay; `change`: they change (scaling=flips)
    loss    one such combo at 13/s; at 300 s a prefill replica, or its decode replica, is gone, and back 91 s later
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from parts.common import run, say
from parts.problems import resolved
from potluck.catalog import models, nodes
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Deployment, Plan
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.current_problem import with_candidates
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import solve_over
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load import arrivals
from potluck.sim.load.workload import Workload, workload
from potluck.sim.results.metrics import summarise
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate
from potluck.sim.world.faults import Fault, Faults

USD_PER_H = {"1xH800": 2.69, "1xA800-PCIe": 1.19, "1xH20": 1.50}
SLO = Slo(1.0, 0.03)
LENGTHS = (337, 1330)
NEWS, NEWS_SLO = (1155, 77), Slo(2.0, 0.05)
SEED = 3


def the_problem(
    rate_per_s: float, available: int = 4, lengths: tuple[int, int] = LENGTHS, slo: Slo = SLO
) -> PlanningProblem:
    traffic = Traffic("m", rate_per_s, (LengthBin(*lengths, 1.0),))
    offers = tuple(NodeOffer(node, usd, available) for node, usd in USD_PER_H.items())
    types = tuple(nodes.node_type(name) for name in USD_PER_H)
    asks = (model_demand("m", models.model("Llama-3.1-8B"), slo, traffic),)
    return PlanningProblem(asks, (Region("cluster", offers),), types, codecs=CODECS)


def world(plan: Plan, problem: PlanningProblem, lengths: tuple[int, int] = LENGTHS) -> ResolvedPlan:
    return resolved(problem, plan, {"m": (float(lengths[0]), float(lengths[1]))})


def load_of(rates_per_s: Sequence[float], step_s: float, lengths: tuple[int, int] = LENGTHS) -> Workload:
    when = arrivals.curve(np.random.default_rng(SEED), list(rates_per_s), step_s)
    return workload("m", when, np.full(len(when), lengths[0]), np.full(len(when), lengths[1]))


def kept(result: SimResult, from_s: float, to_s: float, slo: Slo = SLO) -> float:
    records = result.records
    received = (records.arrival_s >= from_s) & (records.arrival_s < to_s)
    ttft_s = records.first_token_s - records.arrival_s
    tpot_s = (records.finish_s - records.first_token_s) / np.maximum(records.output_tokens - 1, 1)
    within = (ttft_s <= slo.ttft_s) & (tpot_s <= slo.tpot_s)
    return float((within & received).sum() / max(1, received.sum()))


def out(strategy: str) -> dict[str, float]:
    problem = the_problem(10.0)
    factory = TemplateFactory(problem)
    plan = STRATEGIES[strategy](factory, SolveSettings(time_limit_s=10)).plan
    workload = load_of([10.0, 40.0, 40.0, 40.0], 300.0)
    policy = Policy(scaling="cauchy")
    figures = {}
    for name, item in (("own", plan), ("offer", with_candidates(factory, plan))):
        result = simulate(world(item, problem), workload, policy, seed=SEED)
        key = f"out_{strategy}_{name}"
        figures[f"{key}_kept_after"] = kept(result, 600.0, 1200.0)
        figures[f"{key}_usd"] = summarise(result).cost_usd
        figures[f"{key}_usd_per_h_last"] = result.cost_rates[-1][1]
        started = dict(Counter(template for _, template in {(r.unit, r.template) for r in result.replicas}))
        say(f"  {key}: {figures[f'{key}_kept_after']:.1%} kept, copies ever {started}")
    return figures


def combos_of(copies: int, rate_per_s: float) -> tuple[PlanningProblem, Plan]:
    """So many combos of three H20, whatever a strategy would have chosen."""
    problem = the_problem(rate_per_s, 16, NEWS, NEWS_SLO)
    made = {combo.name: combo for combo in TemplateFactory(problem).combos(problem.demands[0])}
    chosen = (Deployment("m: combo 2 1xH20 -> 1 1xH20", "cluster", copies),)
    templates = {"m": [made[chosen[0].template]]}
    pinned = SolveSettings(time_limit_s=5, pins=chosen)
    return problem, solve_over(TemplateFactory(problem), pinned, "cauchy", templates).plan


def roles() -> dict[str, float]:
    rng, figures = np.random.default_rng(SEED), {}
    lost = {name: Faults((Fault(300.0, "replica", replica=f"*#0/{i}"),)) for i, name in ((0, "p"), (2, "d"))}
    cases = [("spike", 3, 39.0, 16, None, 300.0)]
    cases += [(f"loss_{name}", 1, 13.0, 1, fault, 90.0) for name, fault in lost.items()]
    for name, copies, rate, longer, fault, lasts_s in cases:
        problem, plan = combos_of(copies, rate)
        when = np.cumsum(rng.exponential(1 / rate, int(rate * 900)))
        answers = np.where((when > 300) & (when < 600), NEWS[1] * longer, NEWS[1])
        load = workload("m", when, np.full(len(when), NEWS[0]), answers)
        for way, scaling in (("stay", "none"), ("change", "flips")):
            policy = Policy(scaling=scaling)
            result = simulate(world(plan, problem, NEWS), load, policy, seed=SEED, faults=fault)
            figures[f"{name}_{way}_kept"] = kept(result, 300.0, 300.0 + lasts_s, NEWS_SLO)
            figures[f"{name}_{way}_kept_after"] = kept(result, 300.0 + lasts_s, 900.0, NEWS_SLO)
    return figures


def measure(quick: bool) -> dict[str, float]:
    figures = roles()
    for strategy in ("cauchy",) if quick else ("cauchy", "cauchy-ce"):
        figures |= out(strategy)
    return figures


if __name__ == "__main__":
    run("combos", measure, {}, seeds=[SEED])
