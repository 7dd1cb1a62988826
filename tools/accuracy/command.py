"""`potluck accuracy`: how far the performance model is off, one's own runs beside it; `potluck calibrate`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accuracy.report import METRIC_WORDS, report
from potluck.cli.common.render import emit_json, percent, progress, table
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from accuracy.runs import MeasuredRun
    from accuracy.serving import Placed
    from accuracy.study import Score
    from accuracy.verdict import RunVerdict

RUNS = "aic_h100_sxm_serving_runs.parquet"
SUFFIX = re.compile(
    r"-(fp8|bf16|fp16|nvfp4|mxfp4|fp4|awq|gptq|int8|int4|w8a8|w4a16)(-dynamic|-block)?$", re.I
)
"""Formats that names of checkpoints end in."""
GPU = click.option("--gpu", help="Of runs in files that do not say.")
TP = click.option("--tp", type=click.IntRange(1), help="Tensor-parallel degree, the same.")
MOST_SHOWN = 40
"""Runs of a table that are shown one by one; --json has all."""
STEPS = 18
"""Roughly how many stages a study has, for the progress bar."""


@click.command()
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of measurements: study them afresh instead of showing the stored figures.",
)
@click.option("--calibrate", is_flag=True, help="With --data: fit anew and store calibration and figures.")
@click.option(
    "--score",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Table of serving runs that you measured (CSV, JSON, Parquet): how far predictions are from them.",
)
@GPU
@TP
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the report (Markdown).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def accuracy(
    data: Path | None,
    calibrate: bool,
    score: Path | None,
    gpu: str | None,
    tp: int | None,
    write: Path | None,
    as_json: bool,
) -> None:
    """How far predictions are off from measurements they have not seen.

    \b
    Examples:
      potluck accuracy                                     the stored figures
      potluck accuracy --write report.md                   the report
      potluck accuracy --score runs.csv                    your own runs; exit code 1 where bars do not hold
      potluck accuracy --data measured --calibrate         fit anew from measurements
    """
    from accuracy.scores import stored_scores
    from potluck.core.codec import encode

    if calibrate and data is None:
        raise click.UsageError("--calibrate needs --data")
    if score is not None:
        if data is not None or write is not None:
            raise click.UsageError("--score goes with --json alone")
        raise SystemExit(score_table(score, as_json, gpu, tp))
    scores = stored_scores() if data is None else _study(data, calibrate)
    if write is not None:
        write.write_text(report(scores), encoding="utf-8")
    if as_json:
        emit_json({"scores": [encode(score) for score in scores]})
        return
    _show(scores)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@GPU
@TP
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write it there instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def calibrate(
    runs: tuple[Path, ...], gpu: str | None, tp: int | None, out: Path | None, as_json: bool
) -> None:
    """Fit an engine's host and the GPUs' links to serving runs of your own; every command uses them from then on.

    Runs are as `accuracy --score` takes them: a table, vLLM's `bench serve --save-result` or aiperf's JSON, 30 or so,
    with few and many requests under way. The fit is kept in ~/.config/potluck/cluster.json; remove that to forget it.

    \b
    Examples:
      potluck calibrate runs.csv
      potluck calibrate results/*.json --gpu H200 --tp 4
    """
    from accuracy.own_cluster import fit_cluster
    from accuracy.scores import save_cluster, stored_runs
    from accuracy.verdict import usual_fit
    from potluck.core.codec import encode
    from potluck.perf.timers.engine_host import own_path

    placed_runs = [item for path in runs for item in _placed_runs(path, gpu, tp)[0]]
    found = fit_cluster(placed_runs, usual_fit(placed_runs[0], stored_runs().engines))
    path = save_cluster(found.cluster, out)
    if as_json:
        emit_json({"file": str(path), "found": encode(found)})
        return
    host = found.cluster.host
    rows = [
        (METRIC_WORDS[m], percent(found.before[m]), percent(found.after[m]))
        for m in METRIC_WORDS
        if m in found.after
    ]
    table(f"{len(placed_runs)} runs: median error of runs left out", ("figure", "before", "calibrated"), rows)
    click.echo(
        f"Host: {host.fixed_s * 1e3:.2f} ms a step, {host.sequence_s * 1e6:.0f} µs a sequence, "
        f"{host.request_s * 1e3:.0f} ms a request."
    )
    for kind, times in found.cluster.links.items():
        click.echo(f"Collectives over {kind}: {times:.2f} times as long as measured elsewhere.")
    click.echo(
        f"Kept in {path}; {'every command uses it' if out is None else f'used once it is {own_path()}'}."
    )


def _placed_runs(path: Path, gpu: str | None, tp: int | None) -> tuple[list[Placed], int]:
    """A file's runs with what their names mean, and how many rows were left out."""
    from accuracy.runs import read_runs
    from potluck.core.errors import InputError

    told = {name: value for name, value in (("gpu", gpu), ("tp", tp)) if value is not None}
    read = read_runs(path, told)
    result = []
    for run in read.runs:
        try:
            result.append(placed(run))
        except InputError as error:
            raise InputError(f"{path.name}: {error.field}", error.problem) from error
    return result, read.left_out


def _study(folder: Path, save: bool) -> tuple[Score, ...]:
    from accuracy.calibrate import calibrate
    from accuracy.scores import save_calibration, save_scores
    from accuracy.study import StepCheck, expected_errors, study
    from potluck.catalog import gpus, models, nodes

    sheet = {name: gpus.gpu(name) for name in gpus.names()}
    check = StepCheck(models.model("Llama-3.1-8B"), nodes.node_type("RTX4090"))
    with progress(STEPS) as text:
        scores = study(folder, sheet, check, text)
        if save:
            text("fitting")
            save_calibration(calibrate(folder, sheet, expected_errors(scores)))
            save_scores(scores)
        runs = folder / RUNS
        if runs.is_file():
            study_table(runs, scores, save, text)
    return scores


def _show(scores: tuple[Score, ...]) -> None:
    for question in ("calibrated", "GPU left out", "model left out"):
        rows = [
            (s.kind, s.gpu, s.harness, s.group, f"{s.rows:,}", percent(s.median), percent(s.p90))
            for s in scores
            if s.question == question
        ]
        columns = ("work", "GPU", "measured by", "model", "rows", "median error", "9 in 10 within")
        table(f"Prediction error, {question}", columns, rows)
    _show_whole_runs()


def _show_whole_runs() -> None:
    """Throughput and times of serving runs, left out by configuration and by GPU, and how often bars hold."""
    from accuracy.scores import stored_runs

    study, rows = stored_runs(), []
    for score in (s for s in study.scores if s.kind and not s.engine):
        name, held = f"{score.kind}, {score.metric}", study.coverage[f"{score.metric}, {score.kind}"]
        rows.append(
            (
                METRIC_WORDS[score.metric],
                score.kind,
                score.runs,
                percent(score.median),
                percent(held),
                percent(study.carried[name]),
                percent(study.carried[f"{name}: within"]),
            )
        )
    left = ("configurations left out", "within bars", "GPU's operators left out", "within bars")
    table("Median error of whole serving runs on H100", ("figure", "models", "runs", *left), rows)
    choices = [(name, f"{value:.3f}") for name, value in study.ranking.items()]
    table("Choosing by cost per token, configurations left out", ("measure", "mean"), choices)


def placed(run: MeasuredRun) -> Placed:
    """A run with its model and node; an unknown name is an error."""
    from accuracy.runs import stored_as
    from accuracy.serving import Placed
    from potluck.catalog import gpus, models, nodes
    from potluck.perf.timers.roofline import check_tp

    named = SUFFIX.search(run.model)
    text = run.format or (named[0] if named else "")
    if named and named[1].lower() == "fp8" and "qwen" in run.model.lower():
        text = "fp8_block"  # as Qwen publishes them, whatever a table calls it
    model = stored_as(models.model(SUFFIX.sub("", run.model)), text)
    node = nodes.node_type(f"{8 if run.tp <= 8 else run.tp}x{gpus.canonical(run.gpu)}")
    check_tp(model, node, run.tp, run.ep)
    return Placed(run, model, node)


def study_table(path: Path, scores: tuple[Score, ...], save: bool, said: Callable[[str], None]) -> None:
    """Fit hosts and clients to a table of runs, score what was left out, and keep it."""
    from accuracy.runs import read_runs
    from accuracy.scores import save_runs
    from accuracy.serving import carried_over, possible, study_runs
    from accuracy.study import deviations
    from potluck.perf.error_bars import ErrorBars

    table_read = read_runs(path)
    result = [item for item in map(placed, table_read.runs) if possible(item)]
    study, errors = study_runs(result, table_read.left_out + len(table_read.runs) - len(result), said)
    if save:
        bars = ErrorBars(result[0].node.gpu.name, errors, deviations(scores))
        save_runs(replace(study, carried=carried_over(result, study.engines, bars)), bars)


def score_table(path: Path, as_json: bool, gpu: str | None = None, tp: int | None = None) -> int:
    """Print how far predictions are from a file's runs; 1 where bars do not hold there."""
    from accuracy.scores import stored_runs
    from accuracy.verdict import verdict
    from potluck.core.codec import encode

    result, left_out = _placed_runs(path, gpu, tp)
    text = verdict(result, stored_runs().engines)
    if as_json:
        emit_json({"file": path.name, "left_out": left_out, "holds": text.holds, "found": encode(text)})
    else:
        _show_runs(result, text)
        _show_verdict(path, left_out, text)
    return 0 if text.holds else 1


def _show_runs(runs: list[Placed], said: RunVerdict) -> None:
    """Each run with its bars, where there are not too many; ! is outside."""
    if len(runs) > MOST_SHOWN:
        return
    cells: list[dict[str, str]] = [{} for _ in runs]
    for each in said.figures:
        shown = _per_s if each.metric == "rate" else seconds
        text = f"{shown(each.measured)}: {shown(each.predicted)} ({shown(each.low)} to {shown(each.high)})"
        cells[each.run][each.metric] = text if each.inside else f"{text} !"
    rows = [
        (
            item.run.model,
            f"{item.run.tp} x {item.node.gpu.name}",
            f"{item.run.input_tokens} + {item.run.output_tokens}",
            item.run.concurrency,
            *(cells[i].get(metric, "-") for metric in METRIC_WORDS),
        )
        for i, item in enumerate(runs)
    ]
    words = [f"{name}: predicted" for name in METRIC_WORDS.values()]
    table("Measured: predicted (bar of 80 %)", ("model", "GPUs", "tokens", "under way", *words), rows)


def _per_s(value: float) -> str:
    return f"{value:.3g}/s"


def _show_verdict(path: Path, left_out: int, said: RunVerdict) -> None:
    rows = [
        (
            METRIC_WORDS[s.metric],
            s.kind,
            s.gpu,
            s.engine,
            f"{s.bits} bit",
            s.tp,
            s.runs,
            percent(s.median),
            f"{s.bias:+.1%}",
        )
        for s in said.scores
        if s.engine
    ]
    columns = ("figure", "model", "GPU", "engine", "weights", "tp", "runs", "median error", "bias")
    table(f"{path.name}: {said.runs} runs", columns, rows)
    if left_out:
        click.echo(
            f"{left_out} rows were left out: no concurrency, no time, several nodes, or prefill elsewhere."
        )
    if said.beyond:
        rows_of = ", ".join(str(i + 1) for i in said.beyond)
        click.echo(
            f"Not counted, as memory does not allow them (cached prefixes, failed requests?): run {rows_of}."
        )
    if said.unmeasured:
        click.echo(f"Measured nowhere, so guessed from other formats: {', '.join(said.unmeasured)}.")
    for metric, share in said.within.items():
        name, bias = METRIC_WORDS[metric], said.bias[metric]
        click.echo(f"{name}: {share:.0%} of runs are within their bars of 80 %, bias {bias:+.1%}.")
    click.echo(advice(said))


def advice(said: RunVerdict) -> str:
    """How far to trust plans on this hardware, in a sentence."""
    from accuracy.verdict import ASTRAY

    bias = said.bias["rate"]
    if said.holds and abs(bias) <= ASTRAY:
        return "Plans for this hardware can be trusted as far as their bars say."
    side = (
        "promise too much: plan with --confidence 0.9"
        if bias > 0
        else "promise too little: cheaper ones may do"
    )
    if said.holds:
        return f"Bars hold, but plans {side}; `potluck calibrate` takes that out."
    return f"Bars do not hold here, and plans {side}; `potluck calibrate` fits host and links to such runs."
