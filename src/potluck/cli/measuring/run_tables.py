"""Tables of measured serving runs: their names looked up in the catalog, and what `potluck accuracy --score` says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.common.render import emit_json, percent, table

if TYPE_CHECKING:
    from accuracy.runs import MeasuredRun
    from accuracy.serving import Placed
    from accuracy.study import Score
    from accuracy.verdict import RunVerdict

    from potluck.core.values.precision import Format

SUFFIX = re.compile(
    r"-(fp8|bf16|fp16|nvfp4|mxfp4|fp4|awq|gptq|int8|int4|w8a8|w4a16)(-dynamic|-block)?$", re.I
)
"""Formats that names of checkpoints end in."""
METRIC_WORDS = {"rate": "throughput", "ttft": "TTFT", "tpot": "TPOT"}


def placed(run: MeasuredRun) -> Placed:
    """A run with its model and node; an unknown name is an error."""
    from accuracy.serving import Placed

    from potluck.catalog import gpus, models, nodes
    from potluck.perf.timers.roofline import check_tp

    named = SUFFIX.search(run.model)
    model = models.model(SUFFIX.sub("", run.model))
    said = run.format.lower() or (named[1].lower() if named else "")
    if "fp8" in said or "int8" in said or "w8a8" in said:
        kind: Format = "fp8_block" if "block" in said else "fp8" if "fp8" in said else "int8"
        experts = kind if model.expert_bits > 8.0 else model.expert_format
        bits = min(model.expert_bits, 8.0)
        model = replace(model, weight_bits=8.0, expert_bits=bits, weight_format=kind, expert_format=experts)
    node = nodes.node_type(f"{8 if run.tp <= 8 else run.tp}x{gpus.canonical(run.gpu)}")
    check_tp(model, node, run.tp, run.ep)
    return Placed(run, model, node)


def study_table(path: Path, scores: tuple[Score, ...], save: bool, said: Callable[[str], None]) -> None:
    """Fit hosts and clients to a table of runs, score what was left out, and keep it."""
    from accuracy.runs import read_runs
    from accuracy.scores import save_runs
    from accuracy.serving import study_runs
    from accuracy.study import deviations

    from potluck.perf.fits.error_bars import ErrorBars

    table_read = read_runs(path)
    found = [placed(run) for run in table_read.runs]
    study, errors = study_runs(found, table_read.left_out, said)
    if save:
        save_runs(study, ErrorBars(found[0].node.gpu.name, errors, deviations(scores)))


def score(path: Path, as_json: bool) -> int:
    """Print how far predictions are from a file's runs; 1 where bars do not hold there."""
    from accuracy.runs import read_runs
    from accuracy.scores import stored_runs
    from accuracy.verdict import verdict

    from potluck.core.codec import encode
    from potluck.core.errors import InputError

    read = read_runs(path)
    found = []
    for run in read.runs:
        try:
            found.append(placed(run))
        except InputError as error:
            raise InputError(f"{path.name}: {error.field}", error.problem) from error
    said = verdict(found, stored_runs().engines)
    if as_json:
        emit_json({"file": path.name, "left_out": read.left_out, "holds": said.holds, "found": encode(said)})
    else:
        _show(path, read.left_out, said)
    return 0 if said.holds else 1


def _show(path: Path, left_out: int, said: RunVerdict) -> None:
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
        return f"Bars hold, but plans {side}."
    return f"Bars do not hold here, and plans {side}; `potluck profile` measures an engine for them."
