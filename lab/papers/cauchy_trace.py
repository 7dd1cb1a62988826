"""CAUCHY end to end on Azure's trace (its 4.2 and 4.6; Figures 6, 7 and 10), in simulation.

Requests come as in Azure's conversation trace of an hour, minute by minute, scaled to its 54, 50 and 6 requests/s on
average; lengths are the workload's. All systems are planned for that average from the same profiled goodputs:

    Mélange                single GPUs, as they were planned
    CAUCHY*                the same, scaled by Algorithm 1
    CAUCHY, not scaled     its combos by CO-LP
    CAUCHY                 the same, scaled by Algorithm 1 over all candidates

Nobody is refused. Nodes are paid from when they are asked for until they are given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np

from papers import fleets
from papers.cauchy import Load, problem_of
from papers.cauchy_programs import RATES_PER_S, Goodputs, deploy, factory_of
from papers.cronus import OLD_HOST, TRACE
from papers.rows import Row, Rows
from potluck.catalog import named_workloads
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.plan.current_problem import with_candidates
from potluck.sim.load.arrivals import curve, draw
from potluck.sim.load.workload import Workload, workload
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate
from potluck.spec.traces import load_trace

STEP_S = 60.0
STILL = "CAUCHY, not scaled"
BASE, PEAK, SINGLE, WHOLE = "Mélange", "Mélange, for the peak", "CAUCHY*", "CAUCHY"
SYSTEMS = {
    BASE: ("Mélange", False),
    PEAK: ("Mélange", False),
    SINGLE: ("Mélange", True),
    STILL: ("CO-LP", False),
    WHOLE: ("CO-LP", True),
}
"""To its program, and whether it is scaled."""
MOST_MINUTES = 40  # Of the trace's hour: from before its rise to after its fall.
FIGURE_7 = {SINGLE: (0.078, 0.171), WHOLE: (0.164, 0.383)}  # Tokens per USD above Mélange, over workloads.
FIGURE_6 = {"e2e_s": (0.212, 0.591), "ttft_s": (0.285, 0.951), "tbt_s": (0.189, 0.615)}  # Below Mélange.
FIGURE_10_S = {"dailymail": (25.57, 21.88), "sharegpt": (11.16, 10.68), "longwriter": (36.77, 32.83)}
"""E2E p90 without and with scaling."""


@dataclass(frozen=True, slots=True)
class Outcome:
    ktokens_per_usd: float
    e2e_s: float  # Means, and the 90th percentile.
    ttft_s: float
    tbt_s: float
    e2e_p90_s: float
    attainment: float


def minute_rates(folder: Path | None) -> np.ndarray | None:
    """Requests in each whole minute of the trace over the mean; None where it is not at hand."""
    if folder is None or not (folder / TRACE).is_file():
        return None
    arrival_s = load_trace(folder / TRACE).time_s
    counts = np.bincount(((arrival_s - arrival_s[0]) // STEP_S).astype(int))[:-1]
    spare = max(0, len(counts) - MOST_MINUTES) // 2
    counts = counts[spare : spare + MOST_MINUTES]
    return np.asarray(counts / counts.mean())


def requests_of(load: Load, rates: np.ndarray, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    when_s = curve(rng, (rates * RATES_PER_S[load.name]).tolist(), STEP_S)
    return workload(
        fleets.MODEL, when_s, *draw(rng, named_workloads.workload(load.name).lengths, len(when_s))
    )


def serve(load: Load, goodputs: Goodputs, requests: Workload, system: str, times: float = 1.0) -> Outcome:
    """`times`: of the average, what the first plan is for."""
    program, scaled = SYSTEMS[system]
    factory = factory_of(load, times * RATES_PER_S[load.name], goodputs)
    plan = deploy(factory, program).plan

    def again(rate_per_s: float) -> Plan:
        return deploy(factory_of(load, rate_per_s, goodputs), program).plan

    fleet = [(item, 0) for item, _ in goodputs.values()]
    resolved = replace(
        problem_of(load, fleet, OLD_HOST),
        plan=with_candidates(factory, plan) if scaled else plan,
        regions=factory.problem.regions,
    )
    policy = Policy(
        balance="goodput",
        admission=False,
        max_wait_s=inf,
        headroom=1.0,
        scaling="cauchy" if scaled else "none",
    )
    result = simulate(
        resolved,
        requests,
        policy,
        planner=lambda plan_question: again(dict(plan_question.rates_per_s)[fleets.MODEL]),
    )
    summary = summarise(result)
    total_summary = summary.total
    assert total_summary.e2e_s is not None
    assert total_summary.ttft_s is not None
    assert total_summary.tbt_s is not None
    tokens = total_summary.prompt_tokens + total_summary.output_tokens
    return Outcome(
        tokens / 1e3 / summary.cost_usd,
        total_summary.e2e_s.mean,
        total_summary.ttft_s.mean,
        total_summary.tbt_s.mean,
        total_summary.e2e_s.p90,
        summary.models[0].attainment or 0.0,
    )


def measure(load: Load, goodputs: Goodputs, rates: np.ndarray, seed: int) -> dict[str, Outcome]:
    requests = requests_of(load, rates, seed)
    peak = float(np.convolve(rates, [0.5, 0.5], "valid").max())
    return {
        system: serve(load, goodputs, requests, system, peak if system == PEAK else 1.0) for system in SYSTEMS
    }


def figures(found: Mapping[str, Mapping[str, Outcome]]) -> list[Row]:
    """Of each workload."""
    return [*_figure_6(found), *_figure_7(found), *_figure_10(found)]


def _figure_6(found: Mapping[str, Mapping[str, Outcome]]) -> list[Row]:
    made = Rows("Figure 6", "drawn; the text has ranges over workloads, whose ends stand in the last rows")
    changes: dict[tuple[str, str], list[float]] = {}
    for load, by_system in found.items():
        for system, item in by_system.items():
            for figure in FIGURE_6:
                label = f"mean {figure.removesuffix('_s').upper()}, s"
                made.add(f"{load}, {system}", label, None, getattr(item, figure))
                below = 1.0 - getattr(by_system[WHOLE], figure) / getattr(item, figure)
                changes.setdefault((system, figure), []).append(below)
    for against in (BASE, PEAK):
        for figure, (least, most) in FIGURE_6.items():
            label = f"mean {figure.removesuffix('_s').upper()}, CAUCHY against {against}"
            made.add("all workloads", f"{label}, at least, change", -least, -min(changes[against, figure]))
            made.add("all workloads", f"{label}, up to, change", -most, -max(changes[against, figure]))
    return made


def _figure_7(found: Mapping[str, Mapping[str, Outcome]]) -> list[Row]:
    note = (
        "Mélange planned for the average is late in busy minutes (see what it keeps), so its tokens are cheap; "
        "planned for the peak it keeps its promise more often and costs more. So CAUCHY is cheaper than a Mélange "
        "that keeps its promise and sooner than one that does not, not both at once as in the paper"
        "; the one for the peak was added after seeing the one for the average"
    )
    made = Rows("Figure 7", note)
    for load, by_system in found.items():
        for system, item in by_system.items():
            made.add(
                f"{load}, {system}",
                "tokens for the rent, thousand tokens/USD",
                None,
                item.ktokens_per_usd,
            )
            made.add(f"{load}, {system}", "requests within the objective, share", None, item.attainment)
    for system, ends in FIGURE_7.items():
        for against in (BASE, PEAK):
            above = [
                items[system].ktokens_per_usd / items[against].ktokens_per_usd - 1.0
                for items in found.values()
            ]
            for label, theirs, ours in (("at least", ends[0], min(above)), ("up to", ends[1], max(above))):
                made.add(
                    "all workloads",
                    f"tokens per USD, {system} against {against}, {label}, change",
                    theirs,
                    ours,
                )
    return made


def _figure_10(found: Mapping[str, Mapping[str, Outcome]]) -> list[Row]:
    note = (
        "where whole copies leave room, scaling takes some away: dearer seconds are cheaper tokens (Figure 7)"
    )
    made = Rows("Figure 10", note)
    for load, by_system in found.items():
        for theirs, system in zip(FIGURE_10_S[load], (STILL, WHOLE), strict=True):
            made.add(f"{load}, {system}", "E2E p90, s", theirs, by_system[system].e2e_p90_s)
        before, after = (by_system[system].e2e_p90_s for system in (STILL, WHOLE))
        stated = FIGURE_10_S[load][1] / FIGURE_10_S[load][0] - 1.0
        made.add(load, "E2E p90, scaled against not, change", stated, after / before - 1.0)
    return made
