"""The fleets, requests and yardsticks of benchmarks/stress.py.

Llama-3.1-8B on H100s unless a scenario says otherwise, lengths of Azure's chat trace (1155 / 211 tokens on average),
Poisson arrivals, an objective of 2 s to the first token and 60 ms a token after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from parts import simulate_fleets as fleets
from potluck.catalog import named_workloads as named
from potluck.catalog import nodes
from potluck.core.state.policy import Policy
from potluck.core.values import plan as plans
from potluck.core.values.types import Link, Role, Slo
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.goodput import RateTrial, highest_rate, trial_of, with_rate_scaled
from potluck.sim.load import arrivals
from potluck.sim.load.workload import Workload, merge, synthetic, workload
from potluck.sim.results.metrics import judge, summarise
from potluck.sim.results.records import REFUSED, RequestRecords, SimResult
from potluck.sim.run import simulate
from potluck.sim.world.faults import Fault, Faults

MODEL = fleets.MODEL
SEED = 11
SLO = fleets.SLO
FAST, SMALL = "1xH100-SXM", "1xL4"
TOLERANCE = 0.02
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rules:
    policy: Policy
    quick: bool

    def span_s(self, whole_s: float, quick_s: float) -> float:
        return quick_s if self.quick else whole_s

    def run(self, problem: ResolvedPlan, workload: Workload, faults: Sequence[Fault] = ()) -> SimResult:
        every = Faults(tuple(faults)) if faults else None
        return simulate(problem, workload, self.policy, seed=SEED, faults=every)


def per_s(node: str, role: Role = "mixed") -> float:
    return fleets.per_s(role, nodes.node_type(node))


def alike(replicas: int) -> ResolvedPlan:
    """So many H100s that each do the whole work. Prompts of any length belong to the one bucket."""
    return closed([(mixed(FAST), "east", replicas)])


def mixed(node: str, weight: float = 1.0) -> plans.Template:
    """One replica on a node; its planned rate is `weight` times what it can do."""
    return fleets.template(f"chat: {node}", "homogeneous", [("mixed", node)], (0, 0, weight * per_s(node)))


def closed(fleet: Sequence[tuple[plans.Template, str, int]], slo: Slo = SLO) -> ResolvedPlan:
    """(template, region, copies): each serves by itself."""
    shares = tuple(
        plans.PlannedShare(t.name, region, 0, "closed", n * t.capacity[0].closed_per_s)
        for t, region, n in fleet
    )
    return fleets.planned(fleet, shares, sum(share.rate_per_s for share in shares), slo=slo)


def apart(prefills: Sequence[tuple[str, int]], decodes: tuple[str, int], gbps: float) -> ResolvedPlan:
    """(region, replicas): prefill in some regions, decode in one, with a link from each of the former."""
    first = fleets.template("prefill", "homogeneous", [("prefill", FAST)], (per_s(FAST, "prefill"), 0, 0))
    last = fleets.template("chat: decode", "homogeneous", [("decode", FAST)], (0, per_s(FAST, "decode"), 0))
    place, count = decodes
    rates = {region: n * first.capacity[0].prefill_per_s for region, n in prefills}
    shares = [plans.PlannedShare(first.name, region, 0, "prefill", rate) for region, rate in rates.items()]
    shares.append(plans.PlannedShare(last.name, place, 0, "decode", count * last.capacity[0].decode_per_s))
    flows = tuple(plans.PlannedFlow(MODEL, 0, region, place, rate) for region, rate in rates.items())
    links = [
        Link(*ends, gbps, 0.01)
        for region in rates
        if region != place
        for ends in ((region, place), (place, region))
    ]
    fleet = [*((first, region, n) for region, n in prefills), (last, place, count)]
    rate_per_s = sum(share.rate_per_s for share in shares)
    return fleets.planned(fleet, shares, rate_per_s, flows=flows, links=links)


def chat(rate_per_s: float, span_s: float, seed: int = SEED, start_s: float = 0.0) -> Workload:
    lengths = named.workload("azure-conv").lengths
    workload = synthetic(MODEL, lengths, rate_per_s, int(rate_per_s * span_s * 1.2) + 50, seed)
    workload = workload.take(np.flatnonzero(workload.arrival_s < span_s))
    return replace(workload, arrival_s=workload.arrival_s + start_s)


def alike_requests(rate_per_s: float, span_s: float, prompt: int, output: int, seed: int = SEED) -> Workload:
    rng, count = np.random.default_rng(seed), int(rate_per_s * span_s * 1.5) + 50
    arrival_s = arrivals.gamma(rng, rate_per_s, 1.0, count)
    arrival_s = arrival_s[arrival_s < span_s]
    lengths = np.ones(len(arrival_s), dtype=np.int64)
    return workload(MODEL, arrival_s, prompt * lengths, output * lengths)


def phases(*parts: tuple[float, float]) -> Workload:
    """(rate, seconds) one after another."""
    loads, start_s = [], 0.0
    for place, (rate_per_s, span_s) in enumerate(parts):
        loads.append(chat(rate_per_s, span_s, SEED + place, start_s))
        start_s += span_s
    return merge(loads)


def capacity_per_s(make: Callable[[], ResolvedPlan], rules: Rules) -> float:
    """What `potluck goodput` finds for a fleet: the highest rate that keeps the objective, with nobody refused."""
    return _capacity(make, replace(rules.policy, admission=False), rules.span_s(120.0, 60.0))


@cache
def _capacity(make: Callable[[], ResolvedPlan], policy: Policy, span_s: float) -> float:
    problem = make()
    base = chat(problem.plan.predictions[0].capacity_per_s, span_s)
    base_per_s = len(base) / float(base.arrival_s[-1])

    def tried(scale: float) -> RateTrial:
        result = simulate(problem, with_rate_scaled(base, scale), policy, seed=SEED)
        return trial_of(summarise(result), scale, base_per_s)

    _, best_trial = highest_rate(tried, TOLERANCE)
    if best_trial is None:
        raise SystemExit("stress: no rate that was tried keeps the objective")
    return best_trial.rate_per_s


def good(result: SimResult) -> Mask:
    return judge(result.records, result.slos, result.end_s).met


def between(records: RequestRecords, from_s: float, to_s: float) -> Mask:
    mask: Mask = (records.arrival_s >= from_s) & (records.arrival_s < to_s)
    return mask


def good_per_s(result: SimResult, from_s: float, to_s: float) -> float:
    return float((good(result) & between(result.records, from_s, to_s)).sum()) / (to_s - from_s)


def attainment(result: SimResult, from_s: float, to_s: float) -> float:
    inside = between(result.records, from_s, to_s)
    return float((good(result) & inside).sum()) / max(1, int(inside.sum()))


def refused(result: SimResult) -> Mask:
    mask: Mask = result.records.outcome == REFUSED
    return mask


def broken_promises(result: SimResult, tick_s: float) -> int:
    """Requests that were refused after they had been sent, or had been let wait for longer than a tick."""
    records = result.records
    kept = (records.attempts > 0) | (records.finish_s - records.arrival_s > tick_s)
    return int((refused(result) & kept).sum())


def slowest_refusal_s(result: SimResult) -> float:
    waits_s = (result.records.finish_s - result.records.arrival_s)[refused(result)]
    return float(waits_s.max(initial=0.0))
