"""`potluck goodput`: the highest rate at which a plan still keeps every model's objective, in simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from potluck.cli.common.progress import progress
from potluck.cli.common.render import emit_json, paragraph, percent, table
from potluck.cli.simulating.simulate import options, require_positive
from potluck.cli.simulating.simulation import offered, planner_of, policy_of, read_inputs, requests, scene_of
from potluck.core.errors import InputError
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from potluck.sim.load.workload import Workload
    from potluck.sim.results.metrics import RunSummary

MOST_DOUBLINGS = 12


@dataclass(frozen=True, slots=True)
class RateTrial:
    """One rate that was tried."""

    scale: float
    rate_per_s: float
    holds: bool
    attainment: float
    """Of the model that is worst off against its own promise."""
    promised: float
    """To that model."""
    model: str
    ttft_p99_s: float
    tpot_p99_s: float


@click.command()
@click.argument("paths", metavar="[PLAN] [SPEC]", nargs=-1, type=click.Path(path_type=Path))
@options
@click.option("--rate", "rate_per_s", type=float, help="Requests a second to begin at.")
@click.option("--tolerance", type=float, default=0.02, show_default=True, help="Relative, of the rate found.")
def goodput(
    paths: tuple[Path, ...],
    workload: tuple[str, ...],
    logs: tuple[Path, ...],
    rate_per_s: float | None,
    count: int | None,
    seed: int,
    cv: float | None,
    tolerance: float,
    policy: tuple[str, ...],
    profile_paths: tuple[Path, ...],
    slo_scale: float,
    stepwise: bool,
    bulk: bool,
    time_limit_s: float,
    as_json: bool,
) -> None:
    """The highest rate that meets every model's objective: a binary search over simulations.

    The same requests come faster or slower; the mix of models and lengths stays. Nobody is refused for overload: a
    rate that holds because every tenth user is turned away is not one that the plan serves.

    \b
    Examples:
      potluck goodput plan.json potluck.yaml
      potluck goodput plan.json potluck.yaml --workload sharegpt --requests 20000
    """
    from potluck.sim.results.metrics import summarise
    from potluck.sim.run import simulate
    from potluck.sim.sim_settings import SimSettings

    require_positive("rate", rate_per_s)
    if not 0 < tolerance < 1:
        raise InputError("--tolerance", f"must be above 0 and below 1, is {tolerance:g}")
    policy_of(policy)
    with progress(20) as said:
        inputs, load = read_inputs(
            paths,
            time_limit_s,
            said,
            lambda spec: requests(spec, workload, rate_per_s, count, seed, cv, logs, said),
            profile_paths,
            slo_scale=slo_scale,
        )
        rules = replace(policy_of(policy, inputs.spec.policy), admission=False)
        inputs = offered(inputs, rules)
        problem, planner = scene_of(inputs), planner_of(inputs, rules, time_limit_s)
        how = SimSettings(fast_forward=not stepwise, overlap=not bulk, tick_s=rules.tick_s)
        base_per_s = len(load) / float(load.arrival_s[-1]) if load.arrival_s[-1] > 0 else 0.0
        if base_per_s <= 0:
            raise InputError("--workload", "all requests come at one moment, so there is no rate to vary")

        def tried(scale: float) -> RateTrial:
            said(f"{base_per_s * scale:.3g} requests/s")
            result = simulate(problem, faster(load, scale), rules, seed=seed, settings=how, planner=planner)
            return step_of(summarise(result), scale, base_per_s)

        steps, best = search(tried, tolerance)
    rate = 0.0 if best is None else best.rate_per_s
    if as_json:
        from potluck.core.codec import encode

        emit_json({"goodput_per_s": rate, "steps": [encode(step) for step in steps]})
        return
    _show(steps, best)


def search(tried: Callable[[float], RateTrial], tolerance: float) -> tuple[list[RateTrial], RateTrial | None]:
    """Double or halve until one rate holds and one does not, then halve the gap between them.

    Returns all steps, and the fastest that holds.
    """
    steps = [tried(1.0)]
    low = steps[0] if steps[0].holds else None
    high = None if steps[0].holds else steps[0]
    while (low is None or high is None) and len(steps) <= MOST_DOUBLINGS:
        last = steps[-1]
        step = tried(last.scale * (2.0 if high is None else 0.5))
        steps.append(step)
        if step.holds:
            low = step
        else:
            high = step
    while low is not None and high is not None and high.scale / low.scale > 1.0 + tolerance:
        step = tried((low.scale * high.scale) ** 0.5)
        steps.append(step)
        if step.holds:
            low = step
        else:
            high = step
    return steps, low


def faster(load: Workload, scale: float) -> Workload:
    """The same requests at so many times the rate."""
    from dataclasses import replace

    return replace(load, arrival_s=np.asarray(load.arrival_s / scale))


def step_of(summary: RunSummary, scale: float, base_per_s: float) -> RateTrial:
    """What a run at a scaled rate shows of the model that is worst off."""
    judged = [m for m in summary.models if m.slo is not None and m.attainment is not None]
    if not judged:
        raise InputError("slo", "no model has an objective to keep")
    worst = min(judged, key=lambda m: (m.attainment or 0.0) - (m.slo.attainment if m.slo else 0.0))
    return RateTrial(
        scale,
        base_per_s * scale,
        all(model.holds for model in judged),
        worst.attainment or 0.0,
        worst.slo.attainment if worst.slo else 0.0,
        worst.model,
        worst.ttft_s.p99 if worst.ttft_s else float("nan"),
        worst.tpot_s.p99 if worst.tpot_s else float("nan"),
    )


def _show(steps: list[RateTrial], best: RateTrial | None) -> None:
    rows = [
        (
            f"{step.rate_per_s:.4g}",
            "holds" if step.holds else "misses",
            percent(step.attainment, step.promised),
            percent(step.promised),
            step.model,
            seconds(step.ttft_p99_s),
            seconds(step.tpot_p99_s),
        )
        for step in steps
    ]
    columns = ("requests/s", "objective", "attained", "promised", "worst model", "TTFT p99", "TPOT p99")
    table("Rates tried", columns, rows)
    if best is None:
        click.echo("No rate that was tried keeps the objective.")
        return
    attained, promised = percent(best.attainment), percent(best.promised)
    kept = f"there {best.model} is in time for {attained} of requests, {promised} promised"
    above = min((step for step in steps if not step.holds), key=lambda step: step.rate_per_s, default=None)
    if above is None:
        paragraph(
            f"Goodput: at least {best.rate_per_s:.4g} requests/s; {kept}. Every rate that was tried holds."
        )
        return
    late = percent(above.attainment, above.promised)
    paragraph(
        f"Goodput: {best.rate_per_s:.4g} requests/s; {kept}. At {above.rate_per_s:.4g} requests/s "
        f"{above.model} would be in time for {late} only."
    )
