"""Is what is planned what runs? Every strategy on every example and on random specs, simulated at the planned rate.

Arrivals are smooth (gaps with a variation of 0.1) and lengths just as often as was planned for, in random order:
nothing but the plan, the routing and the hardware decides.
A run passes when (`sim/results/plan_comparison.py` has the rules)

    served      the answered share is within 2 points of the planned one
    attained    as many are within the objective as was promised
    busy        every replica's busy time is within 10 points of what the plan's requests take
    bytes       every link's bytes are within 10 % of the plan's
    worked      no replica that the plan counts on got nothing

Beside the strategies, `aggregated` has pipelines that do both phases and nothing else: columns of `auto`, which
seldom takes them.

Specs: the examples, and 40 at random, the kinds of `planned_specs.py` in turn. A strategy that cannot plan a spec (no
pairs there, several models), or finds nothing to deploy, is left out of it. Where a fleet does not suffice, as much
is asked for as the plan serves. Every model has 500 requests or more. A quick run has the examples and as many random
specs as there is time for.

    --only two-regions,pair-*     these specs alone
    --strategy auto,coral         these strategies alone
    --poisson                     plans that were rehearsed, with Poisson arrivals that the rehearsal has not seen

With `--poisson` a plan is what `potluck plan --rehearse --cv 1` settles on; where that finds none that holds, the run
counts as `no plan` and nothing else. It then serves RUNS runs with seeds of their own and the spec's policy, and
`attained` means: of all their requests as many are within the objective as were promised, less what chance may take,

    attained >= promise - 2.33 sqrt(promise (1 - promise) / requests)          one-sided 99 %
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from math import sqrt
from pathlib import Path

from parts.common import ROOT, Budget, run
from parts.planned_specs import KINDS, spec_text
from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.planning.rehearsal import RehearsalOptions, trial_of
from potluck.cli.simulating.simulation import SimulationInputs, scene_of
from potluck.core.errors import PotluckError
from potluck.core.values.plan import Plan
from potluck.plan.problem import CODECS
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import PlanOutcome, allocated
from potluck.rehearse.rehearsal import rehearse
from potluck.rehearse.request_sources import made_up
from potluck.sim.load.workload import Workload, at_rate, of_traffic
from potluck.sim.results.metrics import summarise
from potluck.sim.results.plan_comparison import (
    PlanDeviation,
    ValueRange,
    Verdict,
    compared,
    described,
    disagreements,
)
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate
from potluck.spec.spec_values import Spec

SPECS = 40
QUICK_PER_KIND = 1
SMOOTH = 0.1
SPAN_S, LEAST, MOST, MOST_OF_ALL = 400.0, 500, 4000, 16_000
"""How long requests come; how many there are of every model at least, at most for that long, and at most."""
RUNS, SEED = 3, 50_000_000
"""Of a rehearsed plan, and where their seeds begin: no rehearsal has such a number."""
Z = 2.326
PARTS = {"served": "served", "attainment": "attained", "busy": "busy", "link": "bytes", "work": "worked"}


def aggregated(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """Pipelines that do both phases alone."""
    templates = {ask.name: factory.aggregated(ask) for ask in factory.problem.asks}
    return allocated(factory, settings, "aggregated", templates)


PLANNERS = {**STRATEGIES, "aggregated": aggregated}


@dataclass(frozen=True, slots=True)
class Run:
    """One strategy on one spec."""

    spec: str
    strategy: str
    plan: Plan
    found: tuple[PlanDeviation, ...]

    def wrong(self, part: str) -> list[PlanDeviation]:
        return [
            disagreement for disagreement in disagreements(self.found) if PARTS.get(disagreement.what) == part
        ]

    @property
    def passes(self) -> bool:
        return not any(self.wrong(part) for part in PARTS.values())


def specs(quick: bool, folder: Path) -> Iterator[tuple[str, Path]]:
    """Names and files: the examples, then random ones, the kinds in turn."""
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        yield path.stem, path
    count = QUICK_PER_KIND * len(KINDS) if quick else SPECS
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        path = folder / f"{kind}-{number // len(KINDS)}.yaml"
        path.write_text(spec_text(kind, number // len(KINDS)), encoding="utf-8")
        yield path.stem, path


def smooth(spec: Spec, fraction: float) -> Workload:
    """The spec's traffic, as far as it is planned for."""
    total = sum(model.traffic.rate_per_s for model in spec.models) * fraction
    rarest = min(model.traffic.rate_per_s for model in spec.models if model.traffic.rate_per_s > 0) * fraction
    count = min(MOST_OF_ALL, max(round(LEAST * total / rarest), min(MOST, round(total * SPAN_S))))
    made = of_traffic([model.traffic for model in spec.models], count, 0, SMOOTH, even=True)
    return made if fraction >= 1 else at_rate(made, len(made) / made.span_s * fraction)


def tried(name: str, path: Path, strategies: tuple[str, ...], time_limit_s: float) -> Iterator[Run]:
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
        yield Run(name, strategy, plan, compared(resolved, result, spec.policy.balance))


def rehearsed(name: str, path: Path, strategies: tuple[str, ...], time_limit_s: float) -> Iterator[Run | str]:
    """Rehearse, then serve Poisson arrivals that nobody has seen; the name of a strategy for which nothing held."""
    spec = read_spec(path)
    problem = replace(load_problem(spec, 0.8, None, (), 0.0), codecs=CODECS)
    traffic = [model.traffic for model in spec.models if model.traffic.rate_per_s > 0]
    factory = TemplateFactory(problem)
    for strategy in strategies:
        settings = SolveSettings(time_limit_s=time_limit_s)
        try:
            first = PLANNERS[strategy](factory, settings)
            if not first.plan.deployments or first.plan.fraction < 1:
                continue
            trial, _ = trial_of(spec, problem, first.plan, RehearsalOptions(True, 1.0, None, 5))
            result = rehearse(factory, PLANNERS[strategy], settings, trial)
        except PotluckError:
            continue
        if result.chosen is None:
            yield strategy
            continue
        resolved, source = replace(trial.world, plan=result.chosen.plan), made_up(traffic)
        results = [
            simulate(resolved, source(SEED + run), spec.policy, seed=SEED + run) for run in range(RUNS)
        ]
        parts = tuple(compared(resolved, results[0], spec.policy.balance))
        parts = tuple(part for part in parts if part.what != "attainment")
        yield Run(name, strategy, result.chosen.plan, (*parts, *kept(results)))


def kept(results: Sequence[SimResult]) -> Iterator[PlanDeviation]:
    """Of all runs together, by model: whether as many were in time as was promised, but for chance."""
    counts: dict[str, tuple[float, int]] = {}
    for result in results:
        for model in summarise(result).models:
            if model.attainment is not None:
                met, judged = counts.get(model.model, (0.0, 0))
                more = model.requests - model.outcomes.cancelled
                counts[model.model] = (met + model.attainment * more, judged + more)
    for name, (met, judged) in counts.items():
        promise = results[0].slos[name].attainment
        least = promise - Z * sqrt(promise * (1 - promise) / judged)
        verdict: Verdict = "agrees" if met / judged >= least else "differs"
        yield PlanDeviation("attainment", name, ValueRange(least, 1.0), met / judged, verdict)


def measure(quick: bool, *, only: Sequence[str], chosen: Sequence[str], poisson: bool) -> dict[str, float]:
    strategies = tuple(name for name in PLANNERS if not chosen or name in chosen)
    budget = Budget(quick)
    runs: list[Run] = []
    none = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, path in specs(quick, Path(folder)):
            if only and not any(fnmatch(name, entry) for entry in only):
                continue
            if not budget.allows(f"{name} and what follows", 5.0):
                break
            limit_s = 3.0 if quick else 8.0
            made = rehearsed if poisson else tried
            for item in made(name, path, strategies, limit_s):
                if isinstance(item, str):
                    none += 1
                    print(f"{name:<12} {item:<13} no plan holds", file=sys.stderr, flush=True)
                    continue
                runs.append(item)
                say(item)
    figures: dict[str, float] = {
        "runs": float(len(runs)),
        "pass": share(runs, [entry.passes for entry in runs]),
    }
    if poisson:
        figures["no plan"] = float(none)
    for part in PARTS.values():
        figures[part] = share(runs, [not entry.wrong(part) for entry in runs])
    for strategy in strategies:
        mine = [entry for entry in runs if entry.strategy == strategy]
        figures[f"pass, {strategy}"] = share(mine, [entry.passes for entry in mine])
    return figures


def share(runs: list[Run], passed: list[bool]) -> float:
    return sum(passed) / len(runs) if runs else 1.0


def say(each: Run) -> None:
    """What disagrees, one line for each run, while it goes on."""
    wrong = [one for one in disagreements(each.found) if one.what in PARTS]
    text = "; ".join(f"{one.what} {one.name[-40:]} {' / '.join(described(one))}" for one in wrong[:3])
    verdict = "ok" if each.passes else f"{len(wrong)} wrong: {text}"
    print(
        f"{each.spec:<12} {each.strategy:<13} {each.plan.fraction:>5.0%}  {verdict}",
        file=sys.stderr,
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", default="")
    parser.add_argument("--strategy", default="")
    parser.add_argument("--poisson", action="store_true")
    options, rest = parser.parse_known_args()
    only, chosen = (tuple(filter(None, item.split(","))) for item in (options.only, options.strategy))
    unknown = set(chosen) - set(PLANNERS)
    if unknown:
        print(f"--strategy: has no {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    return run(
        "planned",
        partial(measure, only=only, chosen=chosen, poisson=options.poisson),
        {"worked": (">=", 1.0), "served": (">=", 1.0), "attained": (">=", 1.0), "pass": (">=", 1.0)},
        arguments=rest,
        quick_without="most random specs",
    )


if __name__ == "__main__":
    sys.exit(main())
