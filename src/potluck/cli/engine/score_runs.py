"""`potluck calibrate --score`: predictions beside one's own serving runs, and how far plans there can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import click

from potluck.cli.common.render import emit_json, percent, table
from potluck.cli.engine.own_runs import METRIC_WORDS, RunVerdict, verdict
from potluck.cli.engine.run_tables import Placed
from potluck.core.codec import encode
from potluck.core.figures import seconds

MAX_RUNS_SHOWN = 40
"""Longer tables show no single runs; --json has all of them."""
MAX_TRUSTED_BIAS = 0.15
"""A larger bias of throughput should be taken out of plans."""


def score_runs(names: Sequence[str], runs: list[Placed], left_out: int, as_json: bool) -> bool:
    """Print predictions beside runs from the named files; return whether the error bars hold for them."""
    run_verdict = verdict(runs)
    if as_json:
        emit_json(
            {"files": names, "left_out": left_out, "holds": run_verdict.holds, "found": encode(run_verdict)}
        )
    else:
        _show(", ".join(names), runs, left_out, run_verdict)
    return run_verdict.holds


def _show(title: str, runs: list[Placed], left_out: int, verdict: RunVerdict) -> None:
    """Each run with its error bars (! marks values outside), unless there are many; then a summary."""
    if len(runs) <= MAX_RUNS_SHOWN:
        _show_runs(runs, verdict)
    if left_out:
        click.echo(
            f"{left_out} rows were left out: no concurrency, no time, several nodes, or prefill elsewhere."
        )
    if verdict.unmeasured:
        click.echo(f"Not measured on any GPU, estimated from other formats: {', '.join(verdict.unmeasured)}.")
    rows = [
        (METRIC_WORDS[m], percent(verdict.median[m]), f"{verdict.bias[m]:+.1%}", f"{share:.0%}")
        for m, share in verdict.within.items()
    ]
    table(f"{title}: {verdict.runs} runs", ("figure", "median error", "bias", "within bars of 80 %"), rows)
    click.echo(advice(verdict))


def _show_runs(runs: list[Placed], verdict: RunVerdict) -> None:
    cells: list[dict[str, str]] = [{} for _ in runs]
    for figure in verdict.figures:
        as_text = _per_s if figure.metric == "rate" else seconds
        error_bar = f"({as_text(figure.low)} to {as_text(figure.high)})"
        text = f"{as_text(figure.measured)}: {as_text(figure.predicted)} {error_bar}"
        cells[figure.run][figure.metric] = text if figure.inside else f"{text} !"
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
    if verdict.holds and abs(bias) <= MAX_TRUSTED_BIAS:
        return "Plans for this hardware can be trusted as far as their bars say."
    less, more = "too little: cheaper ones may do", "too much: plan with --confidence 0.9"
    side = f"promise {more if bias > 0 else less}"
    if verdict.holds:
        return f"Bars hold, but plans {side}; `potluck calibrate` takes that out."
    return f"Bars do not hold here, and plans {side}; `potluck calibrate` fits host and links to such runs."
