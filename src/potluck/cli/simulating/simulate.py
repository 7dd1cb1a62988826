"""`potluck simulate` and `goodput`: run a workload on a plan's fleet in simulation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.cli.common.files import FILE, PATH, OutputFiles, option_group, positive, require_writable
from potluck.cli.common.inputs import scale_option
from potluck.cli.common.render import ProgressBar, emit_json, missed, paragraph, percent, progress, table_of
from potluck.cli.planning.estimate import profile_option
from potluck.cli.simulating import simulation
from potluck.cli.simulating.simulation import RunOptions
from potluck.core.codec import encode
from potluck.core.errors import InputError
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from potluck.plan.load import ModelLoad
    from potluck.sim.goodput import RateTrial
    from potluck.sim.load.workload import Workload
    from potluck.sim.results.metrics import RunSummary, ScaleScan
    from potluck.sim.results.plan_comparison import PlanDeviation
    from potluck.sim.results.records import SimResult


SAMPLES = 200


options = option_group(
    argument("paths", metavar="[PLAN] [SPEC]", nargs=-1, type=PATH),
    option(
        "--workload", multiple=True, help="Catalog workload NAME or trace FILE; MODEL=NAME for one model."
    ),
    option(
        "--from-log",
        "logs",
        multiple=True,
        type=click.Path(exists=True, path_type=Path),
        help="Replay the requests of a gateway log, or of the brain.log in a folder; repeatable, in order.",
    ),
    option("--rate", "rate_per_s", type=float, help="Total request rate of all models, req/s."),
    option("--requests", "count", type=click.IntRange(min=1), help="Number of requests."),
    option("--seed", type=click.IntRange(min=0), default=0, help="Random seed."),
    option("--cv", type=float, help="Coefficient of variation of synthetic inter-arrival times; 1: Poisson."),
    option(
        "--time-limit", "time_limit_s", type=float, default=30.0, help="Planning time limit in CPU-seconds."
    ),
    option(
        "--policy", multiple=True, help="NAME=VALUE: override a policy of the spec, such as balance=goodput."
    ),
    scale_option,
    profile_option,
    option("--json", "as_json", is_flag=True, help="Print JSON."),
)


def _read(
    asked: RunOptions, bar: ProgressBar, market: Path | None = None
) -> tuple[simulation.SimulationInputs, Workload]:
    return simulation.read_inputs(
        asked.paths,
        asked.time_limit_s,
        bar,
        lambda spec: simulation.requests(spec, asked, bar),
        asked.profile_paths,
        market,
        asked.slo_scale,
    )


@click.command()
@options
@option(
    "--faults", "faults_path", type=FILE, help="YAML file of faults and their times; see docs/simulation.md."
)
@option("--market", type=FILE, help="YAML file of prices and node counts over time; see docs/simulation.md.")
@option(
    "--heartbeat",
    "heartbeat_s",
    type=float,
    default=0.0,
    help="Seconds until the loss of a node is detected.",
)
@option("--slo-scan", "scans", is_flag=True, help="Also print SLO attainment by SLO scale.")
@option("--report", type=FILE, help="Write an HTML report.")
@option("--records", type=FILE, help="Write one JSON line per request.")
@option("--log", type=FILE, help="Write every policy event and action as JSON lines, for `potluck replay`.")
def simulate(
    faults_path: Path | None,
    market: Path | None,
    heartbeat_s: float,
    scans: bool,
    report: Path | None,
    records: Path | None,
    log: Path | None,
    **options: Any,
) -> None:
    """Simulate the fleet of PLAN under the traffic of SPEC. A SPEC alone is planned first.

    --workload or --from-log replace the traffic of the spec. Exit code 3: an SLO is missed.

    \b
    Examples:
      potluck simulate potluck.yaml --report run.html
      potluck simulate plan.json potluck.yaml --workload azure-conv --rate 20 --requests 100000 --seed 1
      potluck simulate plan.json potluck.yaml --faults faults.yaml --policy scaling=replan
      potluck simulate plan.json potluck.yaml --from-log gateway.log
      potluck simulate potluck.yaml --market day.yaml --policy scaling=replan
      potluck simulate plan.json potluck.yaml --slo-scan --policy admission=false
    """
    from potluck.cli.simulating.simulate_output import simulated_loads, write_records
    from potluck.sim.results.metrics import scan, summarise
    from potluck.sim.results.plan_comparison import compared
    from potluck.sim.results.report.html_report import html
    from potluck.sim.run import simulate as run
    from potluck.sim.sim_settings import SimSettings

    asked = RunOptions(**options)
    if asked.rate_per_s is not None:
        positive("--rate", asked.rate_per_s)
    for name, path in (("--report", report), ("--records", records), ("--log", log)):
        require_writable(name, path)
    policy, saves, faults = (
        simulation.policy_of(asked.policy),
        OutputFiles(),
        simulation.read_faults(faults_path),
    )
    with progress(100) as progress_bar, ExitStack() as stack:
        inputs, workload = _read(asked, progress_bar, market)
        policy = simulation.policy_of(asked.policy, inputs.spec.policy)
        resolved = simulation.scene_of(simulation.offered(inputs, policy))
        samples = SAMPLES if report is not None else 0
        result = run(
            resolved,
            workload,
            policy,
            seed=asked.seed,
            settings=SimSettings(tick_s=policy.tick_s, heartbeat_s=heartbeat_s, samples=samples),
            faults=simulation.with_market(faults, inputs.market),
            planner=simulation.planner_of(inputs, policy, asked.time_limit_s),
            log=None if log is None else stack.enter_context(log.open("w", encoding="utf-8")),
            progress=_counting(progress_bar),
        )
        progress_bar("computing statistics")
        summary = summarise(result)
        loads = simulated_loads(inputs.problem, inputs.plan, result, summary)
        saves("--records", records, lambda to: write_records(to, result))
        saves.text("--report", report, lambda: html(summary, result))
    plan_deviations = compared(resolved, result, policy.balance)
    _show(summary, result, plan_deviations, scan(result) if scans else None, loads, asked.as_json)
    saves.complain()
    _complain(plan_deviations, summary)


def _counting(bar: ProgressBar) -> Callable[[int, int], None] | None:
    def report_progress(done: int, total: int) -> None:
        bar(f"{done:,} of {total:,} requests")
        bar.far(done, total)

    return report_progress if sys.stderr.isatty() else None


def _complain(plan_deviations: tuple[PlanDeviation, ...], summary: RunSummary) -> None:
    """Exit with 1 where a planned replica got no request, with 3 where an SLO is missed."""
    idle = [plan_deviation.name for plan_deviation in plan_deviations if plan_deviation.verdict == "broken"]
    if idle:
        others = f", and {len(idle) - 1} more" if len(idle) > 1 else ""
        click.echo(f"potluck: error: planned replicas got no request: {idle[0]}{others}", err=True)
        sys.exit(1)
    if any(model.holds is False for model in summary.models):
        missed()


def _show(
    summary: RunSummary,
    result: SimResult,
    plan_deviations: tuple[PlanDeviation, ...],
    scanned: ScaleScan | None,
    loads: tuple[ModelLoad, ...],
    as_json: bool,
) -> None:
    if as_json:
        load = [{**asdict(item), "load": item.load} for item in loads]
        body = {**json.loads(summary.to_json())["value"], "planned": encode(plan_deviations), "load": load}
        emit_json(body if scanned is None else body | {"slo_scan": encode(scanned)})
        return
    from potluck.cli.simulating.simulate_output import show_loads, show_planned, show_scan, show_summary

    show_summary(summary, result)
    show_loads(loads)
    if scanned is not None:
        show_scan(scanned)
    show_planned(plan_deviations)


@click.command()
@options
@option("--tolerance", type=float, default=0.02, help="Relative precision of the rate.")
def goodput(tolerance: float, **options: Any) -> None:
    """Find the highest request rate at which a plan meets every SLO, by bisection over simulations.

    The search starts at --rate. It scales the arrival times of the same requests, so the mix of models and lengths
    stays. Admission control is off: no request is refused for overload.

    \b
    Examples:
      potluck goodput plan.json potluck.yaml
      potluck goodput plan.json potluck.yaml --workload sharegpt --requests 20000
    """
    from potluck.sim.goodput import highest_rate, trial_of, with_rate_scaled
    from potluck.sim.results.metrics import summarise
    from potluck.sim.run import simulate
    from potluck.sim.sim_settings import SimSettings

    asked = RunOptions(**options)
    if asked.rate_per_s is not None:
        positive("--rate", asked.rate_per_s)
    if not 0 < tolerance < 1:
        raise InputError("--tolerance", f"must be above 0 and below 1, is {tolerance:g}")
    simulation.policy_of(asked.policy)
    with progress(20) as progress_bar:
        inputs, workload = _read(asked, progress_bar)
        policy = replace(simulation.policy_of(asked.policy, inputs.spec.policy), admission=False)
        inputs = simulation.offered(inputs, policy)
        resolved, planner = (
            simulation.scene_of(inputs),
            simulation.planner_of(inputs, policy, asked.time_limit_s),
        )
        settings = SimSettings(tick_s=policy.tick_s)
        base_per_s = len(workload) / float(workload.arrival_s[-1]) if workload.arrival_s[-1] > 0 else 0.0
        if base_per_s <= 0:
            raise InputError("--workload", "all requests come at one moment, so there is no rate to vary")

        def simulate_at(scale: float) -> RateTrial:
            progress_bar(f"simulating {base_per_s * scale:.3g} req/s")
            result = simulate(
                resolved,
                with_rate_scaled(workload, scale),
                policy,
                seed=asked.seed,
                settings=settings,
                planner=planner,
            )
            return trial_of(summarise(result), scale, base_per_s)

        steps, best_trial = highest_rate(simulate_at, tolerance)
    if asked.as_json:
        rate = 0.0 if best_trial is None else best_trial.rate_per_s
        emit_json({"goodput_per_s": rate, "steps": [encode(step) for step in steps]})
    else:
        _show_goodput(steps, best_trial)


def _show_goodput(steps: list[RateTrial], best_trial: RateTrial | None) -> None:
    columns: dict[str, Callable[[RateTrial], object]] = {
        "req/s": lambda step: f"{step.rate_per_s:.4g}",
        "SLO": lambda step: "met" if step.holds else "missed",
        "SLO attainment": lambda step: percent(step.attainment, step.promised),
        "target": lambda step: f"{100 * step.promised:g} %",
        "worst model": lambda step: step.model,
        "TTFT p99": lambda step: seconds(step.ttft_p99_s),
        "TPOT p99": lambda step: seconds(step.tpot_p99_s),
    }
    table_of("Rates simulated", steps, columns)
    if best_trial is None:
        click.echo("Goodput: none; no simulated rate meets the SLOs.")
        return
    above = min((step for step in steps if not step.holds), key=lambda step: step.rate_per_s, default=None)
    least = "at least " if above is None else ""
    attained = f"SLO attainment of {best_trial.model} {percent(best_trial.attainment)}"
    target = f"target {100 * best_trial.promised:g} %"
    end = "All simulated rates meet the SLOs."
    if above is not None:
        missed_share = percent(above.attainment, above.promised)
        end = f"At {above.rate_per_s:.4g} req/s that of {above.model} is {missed_share}."
    paragraph(f"Goodput: {least}{best_trial.rate_per_s:.4g} req/s; {attained} ({target}). {end}")


@click.command()
@argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def replay(context: click.Context, logs: tuple[Path, ...], as_json: bool) -> None:
    """Feed every event of a LOG, live or simulated, to a fresh Brain and compare what it asks for.

    Several files are one log, in this order; those ending in .gz are unpacked. A folder stands for all pieces of the
    brain.log in it. Where a gateway was started again a new Brain begins, as it did then. Exit code 0 when all is the
    same, 1 when not; the first difference is shown.

    \b
    Examples:
      potluck simulate potluck.yaml --log run.jsonl && potluck replay run.jsonl
      potluck replay STATE                   the log of a service, in the folder that --state named
      potluck replay gateway.log.1.gz gateway.log --json
    """
    from potluck.core.brain.brain import Brain
    from potluck.runtime.replay import log_lines
    from potluck.runtime.replay import replay as run

    with progress(1000) as progress_bar, log_lines(logs) as lines:
        completed = run(lines, Brain, lambda events: progress_bar(f"{events:,} events"))
    if as_json:
        body = {name: getattr(completed, name) for name in ("events", "actions", "runs", "since_s")}
        difference = completed.difference or None
        cuts = list(completed.cuts)
        emit_json({"same": not difference, "difference": difference, "cut_lines": cuts} | body)
    else:
        simulation.show_cuts(completed.cuts)
        if completed.since_s:
            since = f"the log begins {completed.since_s:,.0f} s into its first run"
            click.echo(f"potluck: note: {since}; older pieces were dropped", err=True)
        runs = f"{completed.runs} runs" if completed.runs > 1 else "1 run"
        verdict = completed.difference or "all the same"
        click.echo(f"{completed.events:,} events and {completed.actions:,} actions in {runs}: {verdict}")
    context.exit(1 if completed.difference else 0)
