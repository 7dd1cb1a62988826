"""Is what is planned what runs? Every strategy on every example and on random specs, simulated at the planned rate.

Arrivals are smooth (gaps with a variation of 0.1): nothing but the plan, the routing and the hardware decides.
A run passes when (`sim/results/planned.py` has the rules)

    served      the answered share is within 2 points of the planned one
    attained    as many are within the objective as was promised
    busy        every replica's busy time is within 10 points of what the plan's requests take
    bytes       every link's bytes are within 10 % of the plan's
    worked      no replica that the plan counts on got nothing

Specs: the examples, and 40 at random, the kinds of `planned_specs.py` in turn. A strategy that cannot plan a spec (no
pairs there, several models), or finds nothing to deploy, is left out of it. Where a fleet does not suffice, as much
is asked for as the plan serves. A quick run has the examples and as many random specs as there is time for.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Budget, run
from planned_specs import KINDS, spec_text
from potluck.cli.common.problems import load_problem, read_spec
from potluck.cli.trying.simulation import Inputs, scene_of
from potluck.core.errors import PotluckError
from potluck.core.values.plan import Plan
from potluck.plan.strategies import STRATEGIES, Settings, Workshop
from potluck.sim.load.workload import Workload, at_rate, of_traffic
from potluck.sim.results.planned import Comparison, compared, described, disagreements
from potluck.sim.run import simulate
from potluck.spec.values import Spec

SPECS = 40
QUICK_PER_KIND = 1
SMOOTH = 0.1
SPAN_S, LEAST, MOST = 400.0, 500, 4000
"""How long requests come, and how many there are at least and at most."""
PARTS = {"served": "served", "attainment": "attained", "busy": "busy", "link": "bytes", "work": "worked"}


@dataclass(frozen=True, slots=True)
class Run:
    """One strategy on one spec."""

    spec: str
    strategy: str
    plan: Plan
    found: tuple[Comparison, ...]

    def wrong(self, part: str) -> list[Comparison]:
        return [each for each in disagreements(self.found) if PARTS.get(each.what) == part]

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
    count = max(LEAST, min(MOST, round(total * SPAN_S)))
    made = of_traffic([model.traffic for model in spec.models], count, 0, SMOOTH)
    return made if fraction >= 1 else at_rate(made, len(made) / made.span_s * fraction)


def tried(name: str, path: Path, strategies: tuple[str, ...], time_limit_s: float) -> Iterator[Run]:
    """Plan and simulate; strategies that cannot plan it are passed over."""
    spec = read_spec(path)
    problem = load_problem(spec, 0.8, None, (), 0.0)
    workshop = Workshop(problem)
    for strategy in strategies:
        try:
            plan = STRATEGIES[strategy](workshop, Settings(time_limit_s=time_limit_s)).plan
        except PotluckError:
            continue
        if not plan.deployments or plan.fraction < 0.02:
            continue
        scene = scene_of(Inputs(spec, problem, plan))
        result = simulate(scene, smooth(spec, plan.fraction), spec.policy)
        yield Run(name, strategy, plan, compared(scene, result, spec.policy.balance))


def measure(quick: bool) -> dict[str, float]:
    strategies = tuple(STRATEGIES)
    budget = Budget(quick)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in specs(quick, Path(folder)):
            if not budget.allows(f"{name} and what follows", 5.0):
                break
            for each in tried(name, path, strategies, 3.0 if quick else 8.0):
                runs.append(each)
                say(each)
    figures: dict[str, float] = {
        "runs": float(len(runs)),
        "pass": share(runs, [each.passes for each in runs]),
    }
    for part in PARTS.values():
        figures[part] = share(runs, [not each.wrong(part) for each in runs])
    for strategy in strategies:
        mine = [each for each in runs if each.strategy == strategy]
        figures[f"pass, {strategy}"] = share(mine, [each.passes for each in mine])
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


if __name__ == "__main__":
    sys.exit(
        run(
            "planned",
            measure,
            {"worked": (">=", 1.0), "served": (">=", 1.0), "attained": (">=", 1.0), "pass": (">=", 1.0)},
            quick_without="most random specs",
        )
    )
