"""`potluck simulate`: serve a workload with a plan's fleet, in simulation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from potluck.cli.common.exits import missed
from potluck.cli.common.files import OutputFiles, require_writable
from potluck.cli.common.progress import ProgressBar, progress
from potluck.cli.common.render import emit_json
from potluck.cli.common.slo_scale import scale_option
from potluck.cli.planning.estimate_command import profile_option
from potluck.cli.simulating.simulation import (
    offered,
    planner_of,
    policy_of,
    read_faults,
    read_inputs,
    requests,
    scene_of,
    with_schedule,
)
from potluck.core.codec import encode
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.core.state.policy import Policy
    from potluck.sim.load.workload import Workload
    from potluck.sim.results.metrics import RunSummary
    from potluck.sim.results.plan_comparison import PlanDeviation
    from potluck.sim.results.records import SimResult
    from potluck.sim.results.slo_scales import ScaleScan
    from potluck.sim.sim_settings import SimSettings
    from potluck.spec.spec_values import Spec

Command = TypeVar("Command", bound=Callable[..., object])
SAMPLES = 200
_out = click.Path(dir_okay=False, path_type=Path)


def options(command: Command) -> Command:
    """The options that every command which simulates has."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        profile_option,
        scale_option,
        click.option("--bulk", is_flag=True, help="Send KV in one piece, not layer by layer."),
        click.option(
            "--no-fast-forward", "stepwise", is_flag=True, help="Go step by step; same results, slow."
        ),
        click.option(
            "--policy", multiple=True, help="NAME=VALUE of a run-time rule, such as balance=least-work."
        ),
        click.option(
            "--time-limit", "time_limit_s", type=float, default=30.0, show_default=True, help="To plan, in s."
        ),
        click.option(
            "--cv", type=float, help="Variation of made-up arrivals' gaps: 1 is Poisson, above it bursts."
        ),
        click.option(
            "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all chance."
        ),
        click.option("--requests", "count", type=click.IntRange(min=1), help="How many."),
        click.option(
            "--from-log",
            "logs",
            multiple=True,
            type=click.Path(exists=True, path_type=Path),
            help="Serve the requests of this LOG again, live or simulated, or of the brain.log in this folder; again "
            "for further files, in order.",
        ),
        click.option(
            "--workload",
            multiple=True,
            help="NAME of the catalog or a trace FILE; MODEL=NAME where there are several.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("paths", metavar="[PLAN] [SPEC]", nargs=-1, type=click.Path(path_type=Path))
@options
@click.option("--rate", "rate_per_s", type=float, help="Requests a second, all models together.")
@click.option(
    "--faults", "faults_path", type=_out, help="What goes wrong when (YAML); see docs/simulation.md."
)
@click.option("--market", type=_out, help="Prices and nodes over time (YAML); see docs/simulation.md.")
@click.option(
    "--warm-up", "warm_up_s", type=float, default=0.0, help="Leave out who arrives in the first seconds."
)
@click.option("--cold", is_flag=True, help="Replicas start at time 0 instead of being up.")
@click.option(
    "--paced/--unpaced",
    default=True,
    help="Engines take steps that fit the objective, as planned; else 2048 tokens at most.",
)
@click.option(
    "--heartbeat",
    "heartbeat_s",
    type=float,
    default=0.0,
    help="What is lost is noticed after so many seconds.",
)
@click.option(
    "--slo-scan", "scans", is_flag=True, help="Attainment against SLO scale, and the least for 90 and 99 %."
)
@click.option("--report", type=_out, help="Write an HTML report here.")
@click.option("--records", type=_out, help="Write one row per request here (.jsonl or .parquet).")
@click.option("--log", type=_out, help="Write every event and action here (JSON lines); it replays.")
def simulate(
    paths: tuple[Path, ...],
    workload: tuple[str, ...],
    logs: tuple[Path, ...],
    rate_per_s: float | None,
    count: int | None,
    seed: int,
    cv: float | None,
    faults_path: Path | None,
    market: Path | None,
    warm_up_s: float,
    paced: bool,
    policy: tuple[str, ...],
    profile_paths: tuple[Path, ...],
    slo_scale: float,
    scans: bool,
    time_limit_s: float,
    report: Path | None,
    records: Path | None,
    log: Path | None,
    as_json: bool,
    **running: Any,
) -> None:
    """Serve a workload with a plan's fleet, in simulation. A SPEC alone is planned first.

    The requests are the spec's own unless --workload or --from-log says so. Exit code 3: an objective is missed.

    \b
    Examples:
      potluck simulate potluck.yaml --report run.html
      potluck simulate plan.json potluck.yaml --workload azure-conv --rate 20 --requests 100000 --seed 1
      potluck simulate plan.json potluck.yaml --faults faults.yaml --policy scaling=replan
      potluck simulate plan.json potluck.yaml --from-log gateway.log
      potluck simulate potluck.yaml --market day.yaml --policy scaling=replan
      potluck simulate plan.json potluck.yaml --slo-scan --policy admission=false
    """
    from potluck.sim.results.metrics import summarise
    from potluck.sim.results.plan_comparison import compared
    from potluck.sim.results.slo_scales import scan
    from potluck.sim.run import simulate as run

    _require_sound(rate_per_s, report, records, log)
    rules, saves, faults = policy_of(policy), OutputFiles(), read_faults(faults_path)
    with progress(100) as said, ExitStack() as stack:
        asked = workload, rate_per_s, count, seed, cv, logs, said

        def make(spec: Spec) -> Workload:
            return requests(spec, *asked)

        inputs, load = read_inputs(paths, time_limit_s, said, make, profile_paths, market, slo_scale)
        rules = policy_of(policy, inputs.spec.policy)
        resolved = replace(scene_of(offered(inputs, rules)), paced=paced)
        result = run(
            resolved,
            load,
            rules,
            seed=seed,
            settings=_settings(rules, report is not None, **running),
            faults=with_schedule(faults, inputs.schedule),
            planner=planner_of(inputs, rules, time_limit_s),
            log=None if log is None else stack.enter_context(log.open("w", encoding="utf-8")),
            progress=_counting(said),
        )
        said("summing up")
        summary = summarise(result, warm_up_s)
        _write(saves, summary, result, report, records)
    found = compared(resolved, result, rules.balance)
    _show(summary, result, found, scan(result, warm_up_s) if scans else None, as_json)
    saves.complain()
    _complain(found, summary)


def _require_sound(
    rate_per_s: float | None, report: Path | None, records: Path | None, log: Path | None
) -> None:
    from potluck.cli.common.record_files import require_kind

    require_positive("rate", rate_per_s)
    for option, path in (("--report", report), ("--records", records), ("--log", log)):
        require_writable(option, path)
    if records is not None:
        require_kind(records)


def _write(
    saves: OutputFiles, summary: RunSummary, result: SimResult, report: Path | None, records: Path | None
) -> None:
    from potluck.cli.common.record_files import write_records
    from potluck.sim.results.report import html

    saves("--records", records, lambda to: write_records(to, result))
    saves.text("--report", report, lambda: html(summary, result))


def _counting(bar: ProgressBar) -> Callable[[int, int], None] | None:
    """Say how far it is, where somebody looks."""

    def told(done: int, total: int) -> None:
        bar(f"{done:,} of {total:,} requests")
        bar.far(done, total)

    return told if sys.stderr.isatty() else None


def _settings(
    rules: Policy, samples: bool, *, stepwise: bool, bulk: bool, cold: bool, heartbeat_s: float
) -> SimSettings:
    from potluck.sim.sim_settings import SimSettings

    return SimSettings(
        not stepwise,
        not bulk,
        warm=not cold,
        tick_s=rules.tick_s,
        heartbeat_s=heartbeat_s,
        samples=SAMPLES if samples else 0,
    )


def _complain(found: tuple[PlanDeviation, ...], summary: RunSummary) -> None:
    """Replicas that the plan counts on and that got nothing are an error; objectives that are missed are told."""
    idle = [each.name for each in found if each.verdict == "broken"]
    if idle:
        others = f" (nor did {len(idle) - 1} more)" if len(idle) > 1 else ""
        click.echo(f"potluck: error: the plan counts on {idle[0]}, which got no request{others}", err=True)
        sys.exit(1)
    if any(model.holds is False for model in summary.models):
        missed()


def _show(
    summary: RunSummary,
    result: SimResult,
    found: tuple[PlanDeviation, ...],
    scanned: ScaleScan | None,
    as_json: bool,
) -> None:
    if as_json:
        body = {**json.loads(summary.to_json())["value"], "planned": encode(found)}
        emit_json(body if scanned is None else body | {"slo_scan": encode(scanned)})
        return
    from potluck.cli.simulating.simulate_show import show_planned, show_scan, show_summary

    show_summary(summary, result)
    if scanned is not None:
        show_scan(scanned)
    show_planned(found)


def require_positive(field: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise InputError(f"--{field}", f"must be positive, is {value:g}")
