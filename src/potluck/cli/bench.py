"""`potluck bench`: load for any server that speaks OpenAI's API, and what came of it."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from itertools import repeat
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.cli.common import render
from potluck.cli.common.files import FILE
from potluck.cli.common.inputs import UNSAID_S, slo_option, written_slo
from potluck.cli.common.render import missed
from potluck.cli.fleet.service import running_url
from potluck.core import figures
from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.types import Slo

if TYPE_CHECKING:
    from potluck.loadgen.load_client import LoadResult, Style, TimedRequest


DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_REQUESTS = 100
MOST_REQUESTS = 1_000_000
KEY_VARIABLE = "OPENAI_API_KEY"
ASK_S = 10.0
LATE_S = 0.05
"""A client that was later than this is said to have been."""
Row = tuple[float, str, int, int]


@click.command()
@argument("url", required=False)
@option("--model", help="Which one; else the server's first.")
@option("--rate", "rate_per_s", type=float, help="Open loop: requests/s, with times of chance.")
@option("--workload", metavar="NAME|FILE", help="Open loop: a trace, or a workload of the catalog.")
@option("--concurrency", type=click.IntRange(1, 10_000), help="Closed loop: so many at once (1 unless told).")
@option(
    "--requests",
    type=click.IntRange(1, MOST_REQUESTS),
    help=f"How many ({DEFAULT_REQUESTS}; of a trace all).",
)
@option("--seconds", type=click.FloatRange(0.1, 86_400), help="Send nothing new after this.")
@option("--input", "prompt", type=click.IntRange(1, 1_000_000), default=256)
@option("--output", type=click.IntRange(1, 1_000_000), default=64)
@option(
    "--prompts",
    "style",
    type=click.Choice(["ids", "text", "chat"]),
    default="ids",
    help="Token ids (exact lengths), text or a chat.",
)
@option("--until-eos", is_flag=True, help="Let answers end by themselves; not all servers know ignore_eos.")
@option("--ttft", "ttft_s", type=float, help="Objective, in s; counts how many requests keep it.")
@option("--tpot", "tpot_s", type=float, help="Objective, in s per token after the first.")
@option("--e2e", "e2e_s", type=float, help="Objective, in s, for the whole answer.")
@slo_option
@option("--timeout", "within_s", type=click.FloatRange(0.1), default=600.0)
@option("--seed", type=int, default=0)
@option("--key", help=f"API key; else ${KEY_VARIABLE}.")
@option("--plot", type=FILE, help="FILE.html with distributions.")
@option("--json", "as_json", is_flag=True, help="For machines.")
def bench(
    url: str | None,
    model: str | None,
    rate_per_s: float | None,
    workload: str | None,
    concurrency: int | None,
    requests: int | None,
    seconds: float | None,
    prompt: int,
    output: int,
    style: Style,
    until_eos: bool,
    ttft_s: float | None,
    tpot_s: float | None,
    e2e_s: float | None,
    slo_text: str | None,
    within_s: float,
    seed: int,
    key: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Send requests to the OpenAI server at URL and measure TTFT, TPOT and the whole time of each.

    Without a URL it is the service that runs here, or port 8000.

    In an open loop (--rate, --workload) requests come when they come, and times count from when each should have
    been sent. In a closed loop (--concurrency) a slow server is asked less: latencies then look better than users
    would find them.

    Exits with 1 where no request at all was answered, with 3 where a promise of --slo is not kept.

    \b
    Examples:
      potluck bench --concurrency 8 --requests 200
      potluck bench http://host:8000 --rate 20 --seconds 60 --input 512 --output 64 --ttft 1 --tpot 0.05
      potluck bench --rate 5 --slo ttft=2s,tpot=50ms,attainment=0.95
      potluck bench --workload trace.jsonl --rate 5 --requests 500 --plot bench.html
    """
    from potluck.loadgen import load_client

    if plot is not None and plot.suffix != ".html":
        raise InputError("--plot", f"{plot.name} must end in .html")
    if concurrency is not None and (rate_per_s is not None or workload is not None):
        raise InputError("--concurrency", "is a closed loop, --rate and --workload an open one: give either")
    slo = _slo(slo_text, ttft_s, tpot_s, e2e_s)
    traced = () if workload is None else _traced(workload, rate_per_s, requests, seconds, seed)
    url = url or running_url() or DEFAULT_URL
    load_client.server_of(url)
    model = _model(url, model, key := key or os.environ.get(KEY_VARIABLE, ""))
    open_loop = rate_per_s is not None or workload is not None
    rows: Iterable[Row] = ((at_s, model, sent, wanted) for at_s, sent, wanted in traced)
    if workload is None:
        rows = load_client.same(_times(rate_per_s, requests, seconds, seed), model, prompt, output)
    made = load_client.shots(rows, seed=seed, style=style, key=key, until_eos=until_eos)
    if open_loop:
        load_client.shoot(url, shots := list(made), within_s=within_s)
    else:
        shots = load_client.shoot_in_turns(url, made, concurrency or 1, seconds=seconds, within_s=within_s)
    load_result = load_client.measured(shots, slo)
    if plot is not None:
        _write(plot, _page(url, shots, load_result, slo))
    if as_json:
        render.emit_json(_json(url, model, load_result, slo, open_loop, concurrency))
    else:
        _show(url, model, load_result, slo, None if open_loop else concurrency or 1)
    _keep(load_result, slo if slo_text else None, as_json)
    if not load_result.answered:
        raise click.exceptions.Exit(1)


def _keep(load_result: LoadResult, slo: Slo | None, as_json: bool) -> None:
    """A promise that is not kept is an exit code, and the last line."""
    attained = load_result.attainment or 0.0
    if slo is None or attained >= slo.attainment:
        return
    if not as_json:
        kept, promised = render.percent(attained, slo.attainment), render.percent(slo.attainment)
        click.echo(f"promise missed: {kept} of all requests in time, {promised} promised")
    missed()


def _slo(text: str | None, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None) -> Slo | None:
    if text is not None:
        if not (ttft_s is None and tpot_s is None and e2e_s is None):
            raise InputError("--slo", "has the objectives in it; leave --ttft, --tpot and --e2e out")
        return written_slo(text)
    if ttft_s is None and tpot_s is None and e2e_s is None:
        return None
    return Slo(UNSAID_S if ttft_s is None else ttft_s, UNSAID_S if tpot_s is None else tpot_s, e2e_s=e2e_s)


def _model(url: str, model: str | None, key: str) -> str:
    """The model to ask for, known to the server."""
    base = url.rstrip("/").removesuffix("/v1")
    asked = urllib.request.Request(f"{base}/v1/models")
    if key:
        asked.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(asked, timeout=ASK_S) as answer:
            names = [str(item["id"]) for item in json.load(answer)["data"]]
    except urllib.error.HTTPError as error:
        if model is not None and error.code in (404, 405):
            return model
        if error.code == 401:
            wrong = f"{base} does not take this one" if key else f"{base} asks for one"
            raise InputError(
                "--key", f"{wrong} (or ${KEY_VARIABLE}); `potluck keys add NAME` makes one"
            ) from error
        raise InputError("URL", f"{base}/v1/models was answered with {error.code} {error.reason}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(getattr(error, "reason", error)).split())[:200]
        raise InputError("URL", f"no OpenAI server answers at {base} ({why})") from error
    if not names:
        raise InputError("--model", f"{base} serves none at present")
    if model is not None and model not in names:
        raise UnknownNameError("--model", model, names)
    return model or names[0]


def _times(
    rate_per_s: float | None, requests: int | None, seconds: float | None, seed: int
) -> Iterable[float]:
    """When requests are sent: at times of chance, or in a closed loop all at once, by turns."""
    from potluck.loadgen.load_client import poisson

    count = requests or (None if seconds is not None else DEFAULT_REQUESTS)
    if rate_per_s is not None:
        return poisson(Random(seed), rate_per_s, count, seconds)
    return repeat(0.0) if count is None else repeat(0.0, count)


def _traced(
    what: str, rate_per_s: float | None, count: int | None, seconds: float | None, seed: int
) -> list[tuple[float, int, int]]:
    """A trace is sent whole unless told otherwise; what is drawn by chance has no end of its own."""
    from potluck.cli.common.workloads import WorkloadOptions, is_file, load

    if count is None and not is_file(what):
        count = DEFAULT_REQUESTS if seconds is None else MOST_REQUESTS
    made = load(what, "", WorkloadOptions(rate_per_s, count, seed))
    columns = (made.arrival_s.tolist(), made.prompt_tokens.tolist(), made.output_tokens.tolist())
    return [row for row in zip(*columns, strict=True) if seconds is None or row[0] <= seconds]


def _show(url: str, model: str, load_result: LoadResult, slo: Slo | None, at_once: int | None) -> None:
    times = (("TTFT", load_result.ttft_s), ("TPOT", load_result.tpot_s), ("E2E", load_result.e2e_s))
    rows = [
        (name, *(figures.seconds(value) for value in asdict(percentiles).values()))
        for name, percentiles in times
        if percentiles is not None
    ]
    if rows:
        render.table(f"{model} at {url}", ("", "mean", "p50", "p90", "p99", "most"), rows)
    click.echo(
        f"{load_result.answered:,} of {load_result.requests:,} requests answered "
        f"in {figures.seconds(load_result.span_s)}: "
        f"{render.count(load_result.requests_per_s)} requests/s, "
        f"{render.count(load_result.output_tokens_per_s)} output tokens/s"
    )
    if load_result.attainment is not None:
        click.echo(
            f"objective kept by {render.percent(load_result.attainment)} of all requests ({_said(slo)})"
        )
    examples = dict(load_result.examples)
    for kind, count in load_result.errors:
        click.echo(f"  {count:,} x {kind}" + (f": {examples[kind]}" if examples[kind] else ""))
    if at_once is None:
        click.echo("open loop: times count from when each request should have been sent")
        if load_result.late_s > LATE_S:
            click.echo(
                f"note: this client was late by up to {figures.seconds(load_result.late_s)}; that is counted in"
            )
    else:
        line = "a slow server was asked less, so users would wait longer than this says"
        click.echo(f"closed loop, {at_once} at once: {line}")


def _said(slo: Slo | None) -> str:
    parts = [] if slo is None else _parts(slo)
    return ", ".join(f"{name} <= {figures.seconds(s)}" for name, s in parts if s is not None)


def _parts(slo: Slo) -> list[tuple[str, float | None]]:
    """Its times; None where nothing was said."""
    text = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    return [(name, limit_s if limit_s is not None and limit_s < UNSAID_S else None) for name, limit_s in text]


def _json(
    url: str, model: str, load_result: LoadResult, slo: Slo | None, open_loop: bool, concurrency: int | None
) -> dict[str, Any]:
    return {
        "url": url,
        "model": model,
        "loop": "open" if open_loop else "closed",
        "times_count_from": "when it should have been sent" if open_loop else "when it was sent",
        "concurrency": None if open_loop else concurrency or 1,
        **asdict(load_result),
        "errors": dict(load_result.errors),
        "examples": dict(load_result.examples),
        "attainment": load_result.attainment,
        "objective": None
        if slo is None
        else {
            **{f"{name.lower()}_s": limit_s for name, limit_s in _parts(slo)},
            "attainment": slo.attainment,
        },
        "requests_per_s": load_result.requests_per_s,
        "output_tokens_per_s": load_result.output_tokens_per_s,
    }


def _page(url: str, shots: Sequence[TimedRequest], load_result: LoadResult, slo: Slo | None) -> str:
    """Distributions as one page that needs nothing else."""
    import numpy as np

    from potluck.loadgen.load_client import tpot_of, whole
    from potluck.sim.results.report import THEME, charts, sheet
    from potluck.sim.results.series import LatencyCurve, curve

    answered = [shot for shot in shots if whole(shot)]
    columns = (
        ("TTFT", [shot.ttft_s for shot in answered], slo.ttft_s if slo else None),
        (
            "TPOT",
            [tpot for shot in answered if (tpot := tpot_of(shot)) is not None],
            slo.tpot_s if slo else None,
        ),
        ("End to end", [shot.last_s - shot.at_s for shot in answered], slo.e2e_s if slo else None),
    )
    drawn = "".join(
        charts.distribution(
            (
                LatencyCurve(
                    name, curve(np.asarray(values)), limit_s if limit_s and limit_s < UNSAID_S else None
                ),
            ),
            f"{name}: share of requests",
        )
        for name, values, limit_s in columns
        if values
    )
    span = figures.seconds(load_result.span_s)
    words = f"{load_result.answered:,} of {load_result.requests:,} requests answered in {span}"
    return sheet(
        f"Potluck bench of {url}",
        f"<header><h1>{escape(url)}</h1><p>{words}</p>{THEME}</header>\n"
        f'<main><section><div class="trio">{drawn}</div></section></main>\n',
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise InputError("--plot", f"{path} cannot be written ({error.strerror})") from error
