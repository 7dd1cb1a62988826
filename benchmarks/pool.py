"""`examples/pool.yaml` when something happens: a machine is lost, or conversations become code. Roles flip, or not.

The plan is THUNDERSERVE's with the paper's two phases (with a third, both at once, there is little to flip); arrivals
are Poisson, times are those of the simulation. A loss is noticed when heartbeats are missing for HEARTBEAT_S. Nothing
is started in any run: flips change the roles of what is loaded.

    kept, WHAT            share within the objective in the last 5 minutes, without flips
    kept with flips       the same with `scaling=flips`
    flipped, WHAT         seconds from what happened to the first change of a role
    recovered, WHAT       seconds from then until 90 % of every 30 s are within the objective for good
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from parts.common import ROOT, run
from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.simulating.simulation import SimulationInputs, scene_of
from potluck.core.state.policy import Policy
from potluck.plan.search.search_templates import to_templates
from potluck.plan.search.tabu import SearchLimits, search
from potluck.plan.search.tabu import SearchSettings as Searching
from potluck.plan.search.workload import workload_of
from potluck.plan.strategies import SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import solve_over
from potluck.plan.timing.named_machines import region_pool
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load import arrivals
from potluck.sim.load.workload import Workload, workload
from potluck.sim.results.metrics import judge
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings as Running
from potluck.sim.world.faults import Fault, Faults

HAPPENS_S, SPAN_S, LAST_S, BIN_S = 400.0, 1200.0, 300.0, 30.0
HEARTBEAT_S = 5.0
PROMISE = 0.9
LOSSES: Mapping[str, float] = {"a40": 5.0, "a6000-b": 8.0}
"""Machine that is lost, and requests a second, which the rest should serve."""
SHIFT_PER_S = 7.0
STEPS = 40  # Of the search.
CHAT, CODE = (1155, 211), (2000, 28)  # Mean prompts and answers of the Azure trace.


def planned() -> ResolvedPlan:
    spec = read_spec(ROOT / "examples" / "pool.yaml")
    problem = load_problem(spec, 0.8, None, (), 0.0)
    demand, pool = problem.demands[0], region_pool(problem, problem.regions[0].name)
    assert pool is not None
    work = workload_of(demand, problem.codecs[-1], problem.headroom)
    # A walk that is counted, not timed: the same plan on every machine.
    limits = SearchLimits(walks=2, steps=STEPS, time_limit_s=600.0)
    result = search(pool, work, Searching(phases=("prefill", "decode"), limits=limits))
    templates = {demand.name: to_templates(problem, demand, pool, result)}
    plan = solve_over(TemplateFactory(problem), SolveSettings(20.0), "thunderserve", templates).plan
    return scene_of(SimulationInputs(spec, problem, plan))


def asked(rate_per_s: float, shifts: bool = False) -> Workload:
    """Conversations, which become code where it shifts."""
    count = round(rate_per_s * SPAN_S)
    arrival_s = arrivals.gamma(np.random.default_rng(7), rate_per_s, 1.0, count)
    code = shifts & (arrival_s >= HAPPENS_S)
    return workload("llama", arrival_s, np.where(code, CODE[0], CHAT[0]), np.where(code, CODE[1], CHAT[1]))


def served(resolved: ResolvedPlan, workload: Workload, lost: str, flips: bool) -> SimResult:
    policy = Policy(scaling="flips" if flips else "none")
    faults = Faults((Fault(HAPPENS_S, "node", node=lost),)) if lost else None
    return simulate(
        resolved, workload, policy, seed=1, settings=Running(heartbeat_s=HEARTBEAT_S), faults=faults
    )


def kept(result: SimResult) -> tuple[float, float]:
    """(in the last minutes, seconds from what happened until it is well for good)"""
    verdict = judge(result.records, result.slos, result.end_s)
    arrival_s = result.records.arrival_s
    last = verdict.judged & (arrival_s >= SPAN_S - LAST_S)
    recovered_s = 0.0
    for start_s in np.arange(HAPPENS_S, SPAN_S, BIN_S):
        rows = verdict.judged & (arrival_s >= start_s) & (arrival_s < start_s + BIN_S)
        if rows.any() and verdict.met[rows].mean() < PROMISE:
            recovered_s = start_s + BIN_S - HAPPENS_S
    return float(verdict.met[last].mean()), recovered_s


def first_flip_s(result: SimResult) -> float:
    """From what happened; infinite without one."""
    times = [
        after
        for replica in result.replicas
        for (_, _, before_role), (after, state, role) in pairwise(replica.changes)
        if role != before_role and state == "ready" and after >= HAPPENS_S
    ]
    return min(times, default=SPAN_S) - HAPPENS_S


def measure(quick: bool) -> dict[str, float]:
    resolved = planned()
    figures: dict[str, float] = {}
    cases = [(f"{name} lost", asked(rate), name) for name, rate in LOSSES.items()]
    cases.append(("code", asked(SHIFT_PER_S, shifts=True), ""))
    for what, asked_workload, lost in cases[-2:] if quick else cases:
        still, moved = (served(resolved, asked_workload, lost, flips) for flips in (False, True))
        figures[f"kept, {what}"] = kept(still)[0]
        figures[f"kept with flips, {what}"], recovered_s = kept(moved)
        figures[f"flipped, {what}"] = first_flip_s(moved)
        figures[f"recovered, {what}"] = recovered_s
    return figures


if __name__ == "__main__":
    names = [*(f"{name} lost" for name in LOSSES), "code"]
    run(
        "pool",
        measure,
        {f"kept with flips, {item}": (">=", PROMISE) for item in names},
        quick_without="one of two lost machines",
    )
