"""`potluck trace`: statistics, conversion and generation of request traces."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click import argument, option

from potluck.cli.common.files import PATH
from potluck.cli.common.render import count, emit_json, percent, table
from potluck.core.errors import InputError, UnknownNameError
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from potluck.sim.load.workload import Scaling
    from potluck.spec.traces import Format, Trace, TraceStats


_file = argument("file", type=PATH)
_out = option("--out", required=True, type=PATH, help="File to write; .gz compresses it.")
_to = option("--to", "to", type=click.Choice(["azure", "mooncake", "burstgpt"]), help="Format to write.")
_seed = option("--seed", default=0, help="Random seed.")
_json = option("--json", "as_json", is_flag=True, help="Print JSON.")
_positive = click.FloatRange(min=0, min_open=True, max=1e9)


@click.group()
def trace() -> None:
    """Request traces: Azure, BurstGPT, Mooncake, ShareGPT; plain or gzipped."""


@trace.command("stats")
@_file
@option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def stats_command(file: Path, as_json: bool) -> None:
    """Show rate, burstiness and lengths of the requests in FILE."""
    from potluck.spec.traces import load_trace, trace_stats

    stats = trace_stats(load_trace(file))
    if as_json:
        emit_json({"file": file.name} | asdict(stats))
    else:
        _show(file.name, stats)


@trace.command("convert")
@_file
@option("--rate", type=_positive, help="Target mean rate in req/s. Default: unchanged.")
@option(
    "--how",
    type=click.Choice(["stretch", "superpose"]),
    default="stretch",
    help="stretch: scale inter-arrival times. superpose: keep times; drop requests or add shifted copies.",
)
@_to
@_seed
@_out
@_json
def convert_command(
    file: Path, rate: float | None, how: Scaling, to: str | None, seed: int, out: Path, as_json: bool
) -> None:
    """Write FILE in another format or at another rate. A file without times gets Poisson arrivals of that rate."""
    from potluck.cli.common.workloads import WorkloadOptions, of_trace, to_trace
    from potluck.spec.traces import load_trace

    loaded = load_trace(file, blocks=True)
    timeless = loaded.format_name == "sharegpt"
    if rate is None:
        if timeless:
            raise InputError(file.name, "has no arrival times; make them with --rate")
        _write(loaded, out, to, as_json)
        return
    workload = of_trace(loaded, "", WorkloadOptions(rate_per_s=rate, seed=seed, how=how))
    if not len(workload):
        raise click.UsageError(f"at {rate:g} requests/s nothing is left of {file.name}")
    start_s = float(loaded.time_s[0]) if loaded.format_name == "azure" else 0.0
    own = None if timeless else loaded.format_name
    _write(to_trace(workload, loaded.format_name, start_s), out, to or own, as_json)


@trace.command("make")
@argument("name")
@option("--rate", type=_positive, help="Rate in req/s. [default: the workload's]")
@option("--requests", default=10_000, type=click.IntRange(1, 20_000_000))
@option(
    "--cv",
    type=click.FloatRange(0, 1000),
    help="CV of inter-arrival times; 1: Poisson. [default: the workload's]",
)
@_to
@_seed
@_out
@_json
def make_command(
    name: str,
    rate: float | None,
    requests: int,
    cv: float | None,
    to: str | None,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Generate requests of a catalog workload; `potluck catalog workloads` lists them."""
    from potluck.cli.common.workloads import WorkloadOptions, of_name, to_trace

    try:
        workload = of_name(name, "", WorkloadOptions(rate, requests, seed, cv))
    except UnknownNameError as error:
        raise InputError("NAME", f"{error.problem} (`potluck catalog workloads` lists them)") from error
    _write(to_trace(workload), out, to, as_json)


def _write(trace: Trace, out: Path, to: str | None, as_json: bool) -> None:
    from potluck.spec.traces import FORMATS, format_of, write_trace

    wanted: list[Format] = [known for known in FORMATS if known == to] or [format_of(out)]
    chosen = wanted[0]
    write_trace(trace, out, chosen)
    blocks_left_out = trace.block_ids is not None and chosen != "mooncake"
    if as_json:
        summary = {"file": str(out), "format": chosen, "requests": len(trace), "rate_per_s": trace.rate_per_s}
        emit_json(summary | {"blocks_left_out": blocks_left_out})
        return
    rate = f", {trace.rate_per_s:.4g} requests/s" if trace.rate_per_s else ""
    click.echo(f"{out}: {len(trace):,} requests{rate}, {chosen}", err=True)
    if blocks_left_out:
        click.echo(f"{out}: prefix block ids are left out, {chosen} has no column for them", err=True)


def _show(name: str, stats: TraceStats) -> None:
    shared = "-" if stats.prefix_hit_share is None else percent(stats.prefix_hit_share)
    rows = [
        ("format", stats.format_name),
        ("requests", count(stats.requests)),
        ("span", seconds(stats.span_s) if stats.span_s else "-"),
        ("rate", f"{stats.rate_per_s:.4g} requests/s" if stats.rate_per_s else "-"),
        ("CV of gaps", _figure(stats.gap_cv), "1 is Poisson, above it bursts"),
        ("CV of counts in 60 s", _figure(stats.window_cv)),
        ("peak to mean in 60 s", _figure(stats.window_peak_to_mean)),
        ("dispersion in 60 s", _figure(stats.dispersion), "variance to mean of the counts; 1 is Poisson"),
        ("prefix-hit share", shared, "prompt tokens that an endless cache would have held"),
    ]
    if stats.empty_outputs:
        rows.append(("without output", count(stats.empty_outputs), "counted as one token each"))
    if stats.format_name == "sharegpt":
        rows.append(("passed over", count(stats.passed_over), "no question with an answer"))
        rows.append(("token counts", "estimated", "4 bytes of text each, where the file has no counts"))
    table(name, ("", "", ""), [(*row, "")[:3] for row in rows])
    lengths = [
        (label, *(count(round(value, 1)) for value in (one.mean, one.p50, one.p90, one.p99, one.max)))
        for label, one in (("prompt", stats.input_tokens), ("answer", stats.output_tokens))
    ]
    table("Tokens", ("", "mean", "p50", "p90", "p99", "max"), lengths)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
