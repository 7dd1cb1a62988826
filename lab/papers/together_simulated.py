"""Do plans that are better on averages run better, too? Two plans of a setting under the same requests.

Requests come at random (Poisson) with the lengths that were planned for, and are served as the product does by
default. A demand that is given is asked for as it is. Given machines are asked for ever more, until fewer requests
than promised are within the objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from papers.together import Compared, compare_all
from potluck.core.values.plan import Plan
from potluck.core.values.types import LengthBin, Traffic
from potluck.plan.problem import PlanningProblem
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import Workload, at_rate, of_traffic
from potluck.sim.results.metrics import RunSummary, summarise
from potluck.sim.run import simulate

REQUESTS, LEAST_S, MOST, WARM_UP, SEED = 3_000, 60.0, 6_000, 0.25, 1
CLOSE, STEP = 1.01, 1.1  # Rates nearer than this are one; the first tries are this far apart.


@dataclass(frozen=True, slots=True)
class Ran:
    """What one plan did: USD an hour, the share in time of the model that is worst off, and requests in time."""

    usd_per_h: float
    kept: float
    holds: bool
    met_per_s: float

    @property
    def usd_per_1000(self) -> float:
        return self.usd_per_h / 3.6 / max(self.met_per_s, 1e-9)


def traffic_of(problem: PlanningProblem) -> list[Traffic]:
    """The lengths that a problem was planned for, each as often."""
    return [
        Traffic(
            demand.name,
            demand.rate_per_s,
            tuple(
                LengthBin(d.input_tokens, d.output_tokens, d.rate_per_s / demand.rate_per_s)
                for d in demand.buckets
            ),
        )
        for demand in problem.demands
    ]


def resolved(problem: PlanningProblem, plan: Plan) -> ResolvedPlan:
    asked, pool = {one.model: one for one in traffic_of(problem)}, problem.pool
    links = () if pool is None else pool.links
    return ResolvedPlan(
        plan,
        {demand.name: demand.model for demand in problem.demands},
        problem.by_name,
        problem.regions,
        problem.links,
        {demand.name: demand.slo for demand in problem.demands},
        {name: (one.mean_input_tokens, one.mean_output_tokens) for name, one in asked.items()},
        {(source, target): (gbps, rtt_s) for source, target, gbps, rtt_s in links},
        {} if pool is None else {node.name: node.zone for node in pool.nodes if node.zone},
    )


def ran(resolved_plan: ResolvedPlan, workload: Workload) -> Ran:
    found = summarise(simulate(resolved_plan, workload), workload.last_s * WARM_UP)
    return Ran(found.cost_usd_per_h, _kept(found), all(one.holds for one in found.models), _met(found))


def _kept(found: RunSummary) -> float:
    return min(one.attainment or 0.0 for one in found.models)


def _met(found: RunSummary) -> float:
    return sum(one.goodput_per_s or 0.0 for one in found.models)


def simulated(
    problem: PlanningProblem, plans: Sequence[Plan], most: bool, least: int = REQUESTS
) -> tuple[list[Ran], bool]:
    """What two plans do under the same requests, and whether the second is better than the first here too.

    At a demand: it keeps every objective and costs less. At the most: its highest rate that does is higher.
    """
    per_s = sum(demand.rate_per_s for demand in problem.demands)
    count = min(MOST, max(least, round(LEAST_S * per_s * (plans[1].fraction if most else 1.0))))
    workload = of_traffic(traffic_of(problem), count, SEED)
    if not most:
        done = [ran(resolved(problem, plan), workload) for plan in plans]
        return done, done[1].holds and done[1].usd_per_h < done[0].usd_per_h
    done = [
        _highest(resolved(problem, plan), workload, plan.fraction * per_s / problem.headroom)
        for plan in plans
    ]
    return done, done[1].met_per_s > done[0].met_per_s * CLOSE


def _highest(resolved_plan: ResolvedPlan, workload: Workload, rate_per_s: float) -> Ran:
    """At the highest rate within the objective: first more or less by steps, then between two that are near.

    Nothing where not even a sixteenth of the first rate is.
    """
    low, high, best, least = 0.0, 0.0, Ran(0.0, 0.0, False, 0.0), rate_per_s / 16
    while not (low and high and high / low <= CLOSE) and rate_per_s > least:
        tried = ran(resolved_plan, at_rate(workload, rate_per_s))
        if tried.holds:
            low, best = rate_per_s, tried
        else:
            high = rate_per_s
        rate_per_s = sqrt(low * high) if low and high else STEP * low or high / STEP
    return best


HEADS = {
    False: "| paper | setting | best single | USD/h | in time | USD for 1,000 in time | `auto`, USD/h | in time | "
    "USD for 1,000 in time | holds |",
    True: "| paper | setting | best single | in time, requests/s | in time | `auto`, in time, requests/s | in time | "
    "`auto` over best | holds |",
}


Settled = tuple[Compared, tuple[list[Ran], bool] | None]
"""A setting, and what became of it in simulation where `auto` is better on averages."""


def settled(setting: tuple[str, str, PlanningProblem], quick: bool) -> Settled:
    """Planned by every strategy, and run if there is something to see."""
    (one,) = compare_all([setting])
    if not one.better(one.best):
        return one, None
    plans, least = [one.plans[one.best], one.plans["auto"]], REQUESTS // 4 if quick else REQUESTS
    return one, simulated(one.problem, plans, one.most, least)


def section(found: Sequence[Settled]) -> str:
    """Every setting on which `auto` is better on averages, run."""
    parts, held, theirs = [], dict[bool, list[bool]](), 0
    for most, head in HEADS.items():
        rows = [head, "|" + "---|" * (head.count("|") - 1)]
        for one, done in found:
            if done is None or one.most != most:
                continue
            (best, auto), holds = done
            held.setdefault(most, []).append(holds)
            theirs += best.holds and not most
            cells = [one.paper, one.name, one.best]
            for each in (best, auto):
                figures = [each.met_per_s] if most else [each.usd_per_h]
                cells += [f"{figure:,.2f}" for figure in figures] + [f"{each.kept:.1%}"]
                cells += [] if most else [f"{each.usd_per_1000:.3f}"]
            cells += [f"{auto.met_per_s / best.met_per_s:.3f}" if best.met_per_s else "-"] if most else []
            rows.append(f"| {' | '.join(cells)} | {'yes' if holds else 'no'} |")
        parts += ["\n".join(rows)] if most in held else []
    kept = {most: f"{sum(held.get(most, []))} of {len(held.get(most, []))}" for most in HEADS}
    told = (
        f"**Of the settings on which `auto` costs less on averages it does so in simulation on {kept[False]}, and of "
        f"those on which it serves more on {kept[True]}.** Both plans serve the same requests, Poisson arrivals with "
        "the lengths that were planned for, as the product serves by default. For a given demand a win holds if "
        "`auto`'s plan keeps the objective of every model (in time: the share of the model that is worst off; 90 % "
        "is promised) and costs less; on given machines, if the highest rate at which that is so is higher by more "
        f"than {CLOSE - 1:.0%}, which is how near it is looked for. At the given demand the best single "
        f"strategy's own plan keeps the objective on {theirs} of {len(held.get(False, []))}: plans on averages, "
        "as these are, are what a rehearsal is for."
    )
    return "\n\n".join(["## When it runs", told, *parts])
