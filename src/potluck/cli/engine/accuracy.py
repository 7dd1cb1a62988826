"""`potluck accuracy`: runs of one's own beside what is predicted for them; from a checkout all of the study."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from potluck.cli.common.render import emit_json, percent, table
from potluck.cli.engine.own_runs import METRIC_WORDS, RUN_FILES, RunVerdict, read_placed, verdict
from potluck.cli.engine.run_tables import Placed
from potluck.core.codec import encode
from potluck.core.errors import InputError
from potluck.core.figures import seconds

TOOLS = Path(__file__).parents[4] / "tools"
"""Where a checkout has the study that figures come from."""
MOST_SHOWN = 40
"""Runs of a table that are shown one by one; --json has all."""
ASTRAY = 0.15
"""A bias beyond which it should be taken out of plans."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option(
    "--score",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Table of serving runs that you measured (CSV, JSON, Parquet): how far predictions are from them.",
)
@RUN_FILES
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def accuracy(
    context: click.Context, score: Path | None, gpu: str | None, tp: int | None, as_json: bool
) -> None:
    """How far predictions are off from measurements they have not seen.

    \b
    Examples:
      potluck accuracy --score runs.csv                    your own runs; exit code 1 where bars do not hold
      potluck accuracy                                     from a checkout: the stored figures
      potluck accuracy --write report.md                   the report
      potluck accuracy --data measured --calibrate         fit anew from measurements
    """
    if score is None:
        if not (TOOLS / "accuracy").is_dir():
            raise InputError("--score", "is needed: other figures come with a checkout of Potluck")
        sys.path.append(str(TOOLS))
        from accuracy.command import study_figures

        study_figures.main(
            [*context.args, *(["--json"] if as_json else [])], "accuracy", standalone_mode=False
        )
        return
    if context.args:
        raise click.UsageError(f"--score goes with --gpu, --tp and --json alone, not {context.args[0]}")
    runs, left_out = read_placed(score, gpu, tp)
    run_verdict = verdict(runs)
    if as_json:
        emit_json(
            {
                "file": score.name,
                "left_out": left_out,
                "holds": run_verdict.holds,
                "found": encode(run_verdict),
            }
        )
    else:
        _show(score, runs, left_out, run_verdict)
    raise SystemExit(0 if run_verdict.holds else 1)


def _show(path: Path, runs: list[Placed], left_out: int, verdict: RunVerdict) -> None:
    """Each run with its bars, where there are not too many (! is outside), and what follows of all."""
    if len(runs) <= MOST_SHOWN:
        _show_runs(runs, verdict)
    if left_out:
        click.echo(
            f"{left_out} rows were left out: no concurrency, no time, several nodes, or prefill elsewhere."
        )
    if verdict.unmeasured:
        click.echo(f"Measured nowhere, so guessed from other formats: {', '.join(verdict.unmeasured)}.")
    rows = [
        (METRIC_WORDS[m], percent(verdict.median[m]), f"{verdict.bias[m]:+.1%}", f"{share:.0%}")
        for m, share in verdict.within.items()
    ]
    table(
        f"{path.name}: {verdict.runs} runs", ("figure", "median error", "bias", "within bars of 80 %"), rows
    )
    click.echo(advice(verdict))


def _show_runs(runs: list[Placed], verdict: RunVerdict) -> None:
    cells: list[dict[str, str]] = [{} for _ in runs]
    for each in verdict.figures:
        shown = _per_s if each.metric == "rate" else seconds
        text = f"{shown(each.measured)}: {shown(each.predicted)} ({shown(each.low)} to {shown(each.high)})"
        cells[each.run][each.metric] = text if each.inside else f"{text} !"
    rows = [
        (
            placed.run.model,
            f"{placed.run.tp} x {placed.node.gpu.name}",
            f"{placed.run.input_tokens} + {placed.run.output_tokens}",
            placed.run.concurrency,
            *(cells[i].get(metric, "-") for metric in METRIC_WORDS),
        )
        for i, placed in enumerate(runs)
    ]
    words = [f"{name}: predicted" for name in METRIC_WORDS.values()]
    table("Measured: predicted (bar of 80 %)", ("model", "GPUs", "tokens", "under way", *words), rows)


def _per_s(value: float) -> str:
    return f"{value:.3g}/s"


def advice(verdict: RunVerdict) -> str:
    """How far to trust plans on this hardware, in a sentence."""
    bias = verdict.bias["rate"]
    if verdict.holds and abs(bias) <= ASTRAY:
        return "Plans for this hardware can be trusted as far as their bars say."
    less, more = "too little: cheaper ones may do", "too much: plan with --confidence 0.9"
    side = f"promise {more if bias > 0 else less}"
    if verdict.holds:
        return f"Bars hold, but plans {side}; `potluck calibrate` takes that out."
    return f"Bars do not hold here, and plans {side}; `potluck calibrate` fits host and links to such runs."
