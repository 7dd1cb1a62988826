"""`potluck bench`: load for any server that speaks OpenAI's API, and what came of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import repeat
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import click
from click import argument, option

from potluck.cli.common import render
from potluck.cli.common.render import missed
from potluck.cli.fleet.service import running_url
from potluck.control.http_client import HttpClient
from potluck.core import figures
from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.types import Slo

if TYPE_CHECKING:
    from potluck.loadgen.load_client import LoadResult


DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_REQUESTS = 100
MAX_REQUESTS = 1_000_000
KEY_VARIABLE = "OPENAI_API_KEY"
MODELS_TIMEOUT_S = 10.0
REPORTED_LATENESS_S = 0.05  # Lateness of the client that is reported.
UNLIMITED_S = 1e9  # A latency limit that is always met.
TIMES, SHARES = ("ttft", "tpot", "e2e"), ("attainment", "share")
_TIME = re.compile(r"(?P<figure>\d+(\.\d*)?|\.\d+)(?P<unit>ms|s)\Z")
_SHARE = re.compile(r"(?P<figure>\d+(\.\d*)?|\.\d+)(?P<percent>%?)\Z")

Row = tuple[float, str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of `bench` that describe the load."""

    model: str | None
    rate_per_s: float | None
    workload: str | None
    concurrency: int | None
    requests: int | None
    seconds: float | None
    prompt: int
    output: int
    style: Literal["ids", "text", "chat"]
    until_eos: bool
    within_s: float
    seed: int
    key: str | None


@click.command()
@argument("url", required=False)
@option("--model", help="Model name. Default: the server's first.")
@option("--rate", "rate_per_s", type=float, help="Open loop: Poisson arrivals at this rate in req/s.")
@option("--workload", metavar="NAME|FILE", help="Open loop: a trace file or a catalog workload.")
@option("--concurrency", type=click.IntRange(1, 10_000), help="Closed loop: concurrent requests. Default: 1.")
@option(
    "--requests",
    type=click.IntRange(1, MAX_REQUESTS),
    help=f"Number of requests. Default: {DEFAULT_REQUESTS}, or the whole trace.",
)
@option("--seconds", type=click.FloatRange(0.1, 86_400), help="Send no new requests after this time.")
@option("--input", "prompt", type=click.IntRange(1, 1_000_000), default=256, help="Prompt tokens.")
@option("--output", type=click.IntRange(1, 1_000_000), default=64, help="Output tokens.")
@option(
    "--prompts",
    "style",
    type=click.Choice(["ids", "text", "chat"]),
    default="ids",
    help="Send token ids (exact lengths), text or chat messages.",
)
@option("--until-eos", is_flag=True, help="Do not send ignore_eos, which some servers lack.")
@option(
    "--slo",
    "slo_text",
    metavar="ttft=2s,tpot=50ms,attainment=0.95",
    help="SLO of TTFT, TPOT or E2E; attainment is the target share (default 0.9). Exit code 3 if missed.",
)
@option("--timeout", "within_s", type=click.FloatRange(0.1), default=600.0, help="Seconds per request.")
@option("--seed", type=int, default=0, help="Random seed.")
@option("--key", help=f"API key. Default: ${KEY_VARIABLE}.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(url: str | None, slo_text: str | None, as_json: bool, **options: Any) -> None:
    """Send requests to the OpenAI server at URL and measure TTFT, TPOT and E2E latency.

    The default URL is that of the running service, or port 8000.

    Open loop (--rate, --workload): latencies count from the scheduled send time. Closed loop (--concurrency): a slow
    server gets fewer requests, so latencies look better than users would see them.

    Exit code 1: no request was answered. Exit code 3: the SLO of --slo is missed.

    \b
    Examples:
      potluck bench --concurrency 8 --requests 200
      potluck bench http://host:8000 --rate 20 --seconds 60 --input 512 --output 64
      potluck bench --rate 5 --slo ttft=2s,tpot=50ms,attainment=0.95
      potluck bench --workload trace.jsonl --rate 5 --requests 500
    """
    from potluck.loadgen import load_client

    asked = BenchOptions(**options)
    open_loop = asked.rate_per_s is not None or asked.workload is not None
    if asked.concurrency is not None and open_loop:
        raise InputError("--concurrency", "is a closed loop, --rate and --workload an open one: give either")
    at_once = None if open_loop else asked.concurrency or 1
    slo = None if slo_text is None else written_slo(slo_text)
    traced = () if asked.workload is None else _traced(asked.workload, asked)
    url = url or running_url() or DEFAULT_URL
    load_client.server_of(url)
    key = asked.key or os.environ.get(KEY_VARIABLE, "")
    model = _model(url, asked.model, key)
    rows: Iterable[Row] = ((at_s, model, sent, wanted) for at_s, sent, wanted in traced)
    if asked.workload is None:
        rows = load_client.same(_times(asked), model, asked.prompt, asked.output)
    made = load_client.shots(rows, seed=asked.seed, style=asked.style, key=key, until_eos=asked.until_eos)
    if at_once is None:
        load_client.shoot(url, shots := list(made), within_s=asked.within_s)
    else:
        shots = load_client.shoot_in_turns(url, made, at_once, seconds=asked.seconds, within_s=asked.within_s)
    result = load_client.measured(shots, slo)
    if as_json:
        render.emit_json(_json(url, model, result, slo, at_once))
    else:
        _show(url, model, result, slo, at_once)
    _keep(result, slo, as_json)
    if not result.answered:
        raise click.exceptions.Exit(1)


def _keep(result: LoadResult, slo: Slo | None, as_json: bool) -> None:
    """Exit with 3 where the SLO is missed, after a last line that says so."""
    attained = result.attainment or 0.0
    if slo is None or attained >= slo.attainment:
        return
    if not as_json:
        attainment = render.percent(attained, slo.attainment)
        click.echo(f"SLO missed: attainment {attainment}, target {100 * slo.attainment:g} %")
    missed()


def _model(url: str, model: str | None, key: str) -> str:
    base = url.rstrip("/").removesuffix("/v1")

    def no_server(error: Exception) -> InputError:
        return InputError("URL", f"no OpenAI server answers at {base} ({' '.join(str(error).split())[:200]})")

    try:
        client = HttpClient(base, lambda: key, None, no_server)
        with client.call("GET", "/v1/models", MODELS_TIMEOUT_S) as answer:
            status, reason, data = answer.status, answer.reason, answer.read()
        if status == 200:
            names = [str(item["id"]) for item in json.loads(data)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise no_server(error) from error
    if status in (404, 405) and model is not None:
        return model
    if status == 401:
        wrong = f"{base} does not take this one" if key else f"{base} asks for one"
        raise InputError("--key", f"{wrong} (or ${KEY_VARIABLE}); `potluck keys add NAME` makes one")
    if status != 200:
        raise InputError("URL", f"{base}/v1/models was answered with {status} {reason}")
    if not names:
        raise InputError("--model", f"{base} serves none at present")
    if model is not None and model not in names:
        raise UnknownNameError("--model", model, names)
    return model or names[0]


def _times(asked: BenchOptions) -> Iterable[float]:
    """Send times: Poisson arrivals, or all 0 for a closed loop."""
    from potluck.loadgen.load_client import poisson

    count = asked.requests or (None if asked.seconds is not None else DEFAULT_REQUESTS)
    if asked.rate_per_s is not None:
        return poisson(Random(asked.seed), asked.rate_per_s, count, asked.seconds)
    return repeat(0.0) if count is None else repeat(0.0, count)


def _traced(source: str, asked: BenchOptions) -> list[tuple[float, int, int]]:
    """Requests of a trace or workload; a synthetic workload is cut to the number or time asked for."""
    from potluck.cli.common.workloads import WorkloadOptions, is_file, load

    count, seconds = asked.requests, asked.seconds
    if count is None and not is_file(source):
        count = DEFAULT_REQUESTS if seconds is None else MAX_REQUESTS
    workload = load(source, "", WorkloadOptions(asked.rate_per_s, count, asked.seed))
    columns = (workload.arrival_s.tolist(), workload.prompt_tokens.tolist(), workload.output_tokens.tolist())
    return [row for row in zip(*columns, strict=True) if seconds is None or row[0] <= seconds]


def _show(url: str, model: str, result: LoadResult, slo: Slo | None, at_once: int | None) -> None:
    times = (("TTFT", result.ttft_s), ("TPOT", result.tpot_s), ("E2E", result.e2e_s))
    rows = [
        (name, *(figures.seconds(value) for value in asdict(percentiles).values()))
        for name, percentiles in times
        if percentiles is not None
    ]
    if rows:
        render.table(f"{model} at {url}", ("", "mean", "p50", "p90", "p99", "max"), rows)
    click.echo(
        f"{result.answered:,} of {result.requests:,} requests answered "
        f"in {figures.seconds(result.span_s)}: "
        f"{render.count(result.requests_per_s)} req/s, "
        f"{render.count(result.output_tokens_per_s)} output tokens/s"
    )
    if result.attainment is not None and slo is not None:
        limits = ", ".join(f"{name} <= {figures.seconds(s)}" for name, s in _parts(slo) if s is not None)
        click.echo(f"SLO attainment {render.percent(result.attainment)} of all requests ({limits})")
    examples = dict(result.examples)
    for kind, count in result.errors:
        click.echo(f"  {count:,} x {kind}" + (f": {examples[kind]}" if examples[kind] else ""))
    if at_once is None:
        click.echo("open loop: latencies count from the scheduled send times")
        if result.late_s > REPORTED_LATENESS_S:
            click.echo(
                f"note: the client sent up to {figures.seconds(result.late_s)} late; latencies include that"
            )
    else:
        click.echo(f"closed loop, {at_once} concurrent requests: latencies are lower than in an open loop")


def _parts(slo: Slo) -> list[tuple[str, float | None]]:
    text = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    return [
        (name, limit_s if limit_s is not None and limit_s < UNLIMITED_S else None) for name, limit_s in text
    ]


def _json(url: str, model: str, result: LoadResult, slo: Slo | None, at_once: int | None) -> dict[str, Any]:
    return {
        "url": url,
        "model": model,
        "loop": "open" if at_once is None else "closed",
        "times_count_from": "when it should have been sent" if at_once is None else "when it was sent",
        "concurrency": at_once,
        **asdict(result),
        "errors": dict(result.errors),
        "examples": dict(result.examples),
        "attainment": result.attainment,
        "objective": slo
        and {f"{name.lower()}_s": limit_s for name, limit_s in _parts(slo)} | {"attainment": slo.attainment},
        "requests_per_s": result.requests_per_s,
        "output_tokens_per_s": result.output_tokens_per_s,
    }


def written_slo(text: str) -> Slo:
    """The SLO of `--slo`; latencies that it does not name are unlimited."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (item.strip() for item in part.partition("="))
        if not equals:
            raise InputError(
                "--slo", f"{part.strip()!r} is not NAME=VALUE, such as ttft=2s or attainment=0.95"
            )
        if name not in (*TIMES, *SHARES):
            raise UnknownNameError("--slo", name, (*TIMES, *SHARES))
        name = SHARES[0] if name in SHARES else name
        if name in values:
            raise InputError("--slo", f"{name} is given twice")
        values[name] = _share(value, name) if name in SHARES else _time_s(value, name)
    if not any(name in values for name in TIMES):
        raise InputError("--slo", "must have one of ttft, tpot, e2e, such as ttft=2s")
    ttft_s, tpot_s = (values.get(name, UNLIMITED_S) for name in ("ttft", "tpot"))
    return Slo(ttft_s, tpot_s, values.get(SHARES[0], Slo(1.0, 1.0).attainment), values.get("e2e"))


def _time_s(value: str, name: str) -> float:
    match = _TIME.match(value)
    if match is None or not float(match["figure"]) > 0:
        raise InputError("--slo", f"{name}={value} must be a time with its unit, such as 2s or 50ms")
    return float(match["figure"]) / (1000 if match["unit"] == "ms" else 1)


def _share(value: str, name: str) -> float:
    match = _SHARE.match(value)
    share = -1.0 if match is None else float(match["figure"]) / (100 if match["percent"] else 1)
    if not 0 < share <= 1:
        raise InputError("--slo", f"{name}={value} must be above 0 and at most 1, such as 0.95 or 95%")
    return share
