"""Is what is planned what runs? Every strategy on every example and on random specs, simulated at the planned rate.

Arrivals are smooth and lengths just as often as was planned for, in random order: nothing but the plan, the routing
and the hardware decides. `sim/results/plan_comparison.py` has the rules:

    served      the answered share is within 2 points of the planned one
    attained    as many are within the objective as was promised
    busy        every replica's busy time is within 10 points of what the plan's requests take
    bytes       every link's bytes are within 10 % of the plan's
    worked      no replica that the plan counts on got nothing

`aggregated` has pipelines that do both phases and nothing else. Strategies that cannot plan a spec are left out of
it. Where a fleet does not suffice, as much is asked for as the plan serves.

    --only two-regions,pair-*     these specs alone
    --strategy auto               this strategy alone; may be repeated
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from parts.common import ROOT, Budget, options, run, say
from parts.planned_specs import KINDS, random_specs
from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.simulating.simulation import SimulationInputs, scene_of
from potluck.core.errors import PotluckError
from potluck.core.values.plan import Plan
from potluck.plan.problem import CODECS
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import PlanOutcome, solve_over
from potluck.sim.load.workload import Workload, at_rate, of_traffic
from potluck.sim.results import plan_comparison as comparison
from potluck.sim.run import simulate
from potluck.spec.spec_values import Spec

SPECS = 40
SMOOTH = 0.1
SPAN_S, LEAST, MOST, MOST_OF_ALL = 400.0, 500, 4000, 16_000
"""How long requests come; how many there are of every model at least, at most for that long, and at most."""
PARTS = {"served": "served", "attainment": "attained", "busy": "busy", "link": "bytes", "work": "worked"}


def aggregated(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    templates = {demand.name: factory.aggregated(demand) for demand in factory.problem.demands}
    return solve_over(factory, settings, "aggregated", templates)


PLANNERS = {**STRATEGIES, "aggregated": aggregated}


@dataclass(frozen=True, slots=True)
class Run:
    spec: str
    strategy: str
    plan: Plan
    deviations: tuple[comparison.PlanDeviation, ...]

    def wrong(self, part: str) -> list[comparison.PlanDeviation]:
        return [one for one in comparison.disagreements(self.deviations) if PARTS.get(one.what) == part]

    @property
    def passes(self) -> bool:
        return not any(self.wrong(part) for part in PARTS.values())


def smooth(spec: Spec, fraction: float) -> Workload:
    """The spec's traffic, as far as it is planned for."""
    total = sum(model.traffic.rate_per_s for model in spec.models) * fraction
    rarest = min(model.traffic.rate_per_s for model in spec.models if model.traffic.rate_per_s > 0) * fraction
    count = min(MOST_OF_ALL, max(round(LEAST * total / rarest), min(MOST, round(total * SPAN_S))))
    workload = of_traffic([model.traffic for model in spec.models], count, 0, SMOOTH, even=True)
    return workload if fraction >= 1 else at_rate(workload, len(workload) / workload.span_s * fraction)


def tried(name: str, path: Path, strategies: Sequence[str], time_limit_s: float) -> Iterator[Run]:
    """Plan and simulate; strategies that cannot plan it are passed over."""
    spec = read_spec(path)
    problem = replace(load_problem(spec, 0.8, None, (), 0.0), codecs=CODECS)
    factory = TemplateFactory(problem)
    for strategy in strategies:
        try:
            plan = PLANNERS[strategy](factory, SolveSettings(time_limit_s=time_limit_s)).plan
        except PotluckError:
            continue
        if not plan.deployments or plan.fraction < 0.02:
            continue
        resolved = scene_of(SimulationInputs(spec, problem, plan))
        result = simulate(resolved, smooth(spec, plan.fraction), spec.policy)
        yield Run(name, strategy, plan, comparison.compared(resolved, result, spec.policy.balance))


def measure(quick: bool, *, only: Sequence[str], strategies: Sequence[str]) -> dict[str, float]:
    budget = Budget(quick)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        drawn = random_specs(len(KINDS) if quick else SPECS, Path(folder))
        for path in (*sorted((ROOT / "examples").glob("*.yaml")), *drawn):
            if only and not any(fnmatch(path.stem, entry) for entry in only):
                continue
            if not budget.allows(f"{path.stem} and what follows", 5.0):
                break
            for item in tried(path.stem, path, strategies, 3.0 if quick else 8.0):
                runs.append(item)
                tell(item)
    figures = {"runs": float(len(runs)), "pass": share([entry.passes for entry in runs])}
    for part in PARTS.values():
        figures[part] = share([not entry.wrong(part) for entry in runs])
    for strategy in strategies:
        figures[f"pass, {strategy}"] = share([run.passes for run in runs if run.strategy == strategy])
    return figures


def share(passed: list[bool]) -> float:
    return sum(passed) / len(passed) if passed else 1.0


def tell(item: Run) -> None:
    wrong = [one for one in comparison.disagreements(item.deviations) if one.what in PARTS]
    text = "; ".join(f"{x.what} {x.name[-40:]} {' / '.join(comparison.described(x))}" for x in wrong[:3])
    verdict = "ok" if item.passes else f"{len(wrong)} wrong: {text}"
    say(f"{item.spec:<12} {item.strategy:<13} {item.plan.fraction:>5.0%}  {verdict}")


if __name__ == "__main__":
    given = options(only="", strategy=tuple(PLANNERS))
    only = tuple(filter(None, given.only.split(",")))
    run(
        "planned",
        partial(measure, only=only, strategies=given.strategy),
        dict.fromkeys(("worked", "served", "attained", "pass"), (">=", 1.0)),
        quick_without="most random specs",
    )
