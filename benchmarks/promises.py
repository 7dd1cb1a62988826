"""Do first plans keep their promise? Plans on averages, and the cheapest that rehearsal finds to hold.

The bundled example, all of `examples/`, the kinds of `planned_specs.py` in turn and the random specs of `rehearse.py`
(lognormal lengths, one or two models), each by `auto`, with gaps whose coefficient of variation is 1, 2 and 3.5. A
plan holds when evidence supports what was promised to every model. Specs whose fleet is
too small for them are left out. `rehearse/queueing_margins.py` was fitted to the first 33 of these specs.

    --specs 12      so many random specs of either sort (18 unless said; 2 with --quick, without the examples)
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from parts.common import ROOT, options, run, say
from parts.planned_specs import random_specs
from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.planning.rehearsal import RehearsalOptions, judge_of, trial_of
from potluck.core.errors import PotluckError
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.plan.problem import CODECS, PlanningProblem
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.rehearse.evidence import TrialSetup
from potluck.rehearse.rehearsal import RehearsalRules, rehearse
from potluck.rehearse.rehearsal import tried as tried_by_model
from potluck.rehearse.request_sources import made_up
from potluck.spec.spec_values import Spec
from rehearse import Case, case

CVS = (1.0, 2.0, 3.5)
LIMIT_S = 12.0
Maker = Callable[[Plan, float], TrialSetup]


def of_spec(spec: Spec, problem: PlanningProblem) -> Maker:
    return lambda plan, cv: trial_of(spec, problem, plan, RehearsalOptions(cv=cv))


def of_case(each: Case) -> Maker:
    return lambda plan, cv: each.trial(plan, made_up(each.traffic, cv), Policy())


def specs(count: int, folder: Path, quick: bool) -> Iterator[tuple[str, PlanningProblem, Maker]]:
    paths = list(random_specs(count, folder))
    if not quick:
        paths = [None, *sorted((ROOT / "examples").glob("*.yaml")), *paths]  # None: the bundled example
    for path in paths:
        spec = read_spec(path)
        problem = replace(load_problem(spec, 0.8, None, (), 0.0), codecs=CODECS)
        yield path.stem if path else "bundled", problem, of_spec(spec, problem)
    for seed in range(1, count + 1):
        item = case(seed)
        yield f"random-{seed}", item.problem, of_case(item)


def tried(name: str, problem: PlanningProblem, trial: Maker) -> Iterator[dict[str, object]]:
    settings, planner = SolveSettings(LIMIT_S), STRATEGIES["auto"]
    factory = TemplateFactory(problem)
    start_s = time.process_time()
    first = planner(factory, settings)
    plan_s = time.process_time() - start_s
    if first.plan.fraction < 1 or not first.plan.deployments:
        return
    for cv in CVS:
        start_s = time.process_time()
        judge = judge_of(trial(first.plan, cv))
        result = rehearse(factory, planner, settings, judge, RehearsalRules(cv=cv), first)
        search_s = time.process_time() - start_s
        plain, best = first.plan, result.best.plan
        held = _holds(trial(plain, cv), plain)
        yield {
            "spec": name,
            "cv": cv,
            "held": held,
            "held_rehearsed": result.chosen is not None,
            "usd_per_h": plain.cost_usd_per_h,
            "usd_per_h_rehearsed": best.cost_usd_per_h,
            "plans": len(result.steps),
            "plan_cpu_s": plan_s,
            "search_cpu_s": search_s,
        }


def _holds(trial: TrialSetup, plan: Plan) -> bool:
    return all(item.holds for item in tried_by_model(judge_of(trial), plan, trial.traffic))


def measure(count: int, quick: bool) -> dict[str, float]:
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, problem, trial in specs(count, Path(folder), quick):
            try:
                result = list(tried(name, problem, trial))
            except PotluckError as error:
                say(f"{name}: {error}")
                continue
            rows += result
            for row in result:
                say(json.dumps(row))
    figures: dict[str, float] = {}
    for cv in CVS:
        mine = [row for row in rows if row["cv"] == cv]
        before, after = (sum(bool(row[key]) for row in mine) for key in ("held", "held_rehearsed"))
        costs = [sum(float(str(row[key])) for row in mine) for key in ("usd_per_h", "usd_per_h_rehearsed")]
        figures |= {
            f"cv_{cv:g}_specs": len(mine),
            f"cv_{cv:g}_held": before,
            f"cv_{cv:g}_held_rehearsed": after,
            f"cv_{cv:g}_rehearsal_loses": before - after,
            f"cv_{cv:g}_cost_ratio": costs[1] / max(costs[0], 1e-9),
        }
    return figures


if __name__ == "__main__":
    given = options(specs=0)
    run(
        "promises",
        lambda quick: measure(given.specs or (2 if quick else 18), quick),
        {f"cv_{cv:g}_rehearsal_loses": ("<=", 0.0) for cv in CVS},
        quick_without="the examples and most random specs",
    )
