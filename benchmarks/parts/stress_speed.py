"""What the rules cost: CPU per request in very large fleets, and with prefixes looked up; for benchmarks/stress.py.

Fleets and requests are those of benchmarks/simulate.py, at a load of 0.7.
"""

from __future__ import annotations

import gc

from parts import simulate_fleets as fleets
from parts.common import cpu_s
from parts.stress_fleets import SEED, Rules
from parts.stress_scenarios import Figures, Scenario
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import Workload
from potluck.sim.replicas import step_table
from potluck.sim.run import simulate

COMPILED = not step_table.__file__.endswith(".py")


def growth(rules: Rules) -> Figures:
    """CPU per request with 1,000 and 10,000 replicas, over that with one; from the plan to the records."""
    count, repeats = (20_000, 1) if rules.quick else (50_000, 3)
    each_s = {
        n: _least_s(rules, fleets.aggregated(n), count, repeats + (n == 1)) / count for n in (1, 1000, 10_000)
    }
    return {
        "growth_1_us": 1e6 * each_s[1],
        _named("growth_1_to_1000"): each_s[1000] / each_s[1],
        _named("growth_1_to_10000"): each_s[10_000] / each_s[1],
    }


def lookup(rules: Rules) -> Figures:
    """Speed with caches of blocks of 512 tokens and prefix-aware routing, over that of the same eight without."""
    count, repeats = (10_000, 2) if rules.quick else (50_000, 3)
    problem = fleets.aggregated(8)
    plain_s = _least_s(rules, problem, count, repeats)
    return {
        "lookup_requests_per_cpu_s": count / _least_s(rules, problem, count, repeats, 512),
        "lookup_without_requests_per_cpu_s": count / plain_s,
        _named("lookup_over_without"): plain_s / _least_s(rules, problem, count, repeats, 512),
    }


def _least_s(rules: Rules, problem: ResolvedPlan, count: int, repeats: int, block_tokens: int = 0) -> float:
    made: Workload = fleets.requests(problem, count, SEED, block_tokens)

    def once() -> None:
        gc.collect()
        simulate(problem, made, rules.policy, seed=SEED)

    return cpu_s(once, repeats)


def _named(figure: str) -> str:
    """The targets are for compiled code; figures of interpreted code have another name."""
    return figure if COMPILED else f"interpreted_{figure}"


def _targets(**targets: tuple[str, float]) -> dict[str, tuple[str, float]]:
    return targets if COMPILED else {}


SCENARIOS = (
    Scenario("growth", growth, _targets(growth_1_to_1000=("<=", 2.0), growth_1_to_10000=("<=", 3.0))),
    Scenario("lookup", lookup, _targets(lookup_over_without=(">=", 0.5))),
)
