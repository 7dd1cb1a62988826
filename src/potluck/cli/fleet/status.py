"""`potluck status`, `top`, `logs` and `events`: the state and history of a running service."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import chain
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.cli.common import render
from potluck.cli.fleet.orders import meant
from potluck.cli.fleet.service import json_option, nothing, opened, state_option, with_gateway
from potluck.core import figures
from potluck.core.errors import PotluckError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from potluck.control.gateway_client import RecentMetrics
    from potluck.control.service_view import ServiceView
    from potluck.control.state_store import RecordedEvent


POLL_INTERVAL_S = 0.3
EVENT_SETTLE_S = 2.0
"""Older events are complete: the controller reads the gateway's decisions once per turn."""
LOG_TAIL_BYTES = 1_000_000  # Read from the end of a log.


@click.command()
@state_option
@json_option
def status(state: Path | None, as_json: bool) -> None:
    """Show the plan, models, replicas, missing engines with the reason, and recent events.

    Exit code 1: nothing runs.
    """
    with opened(state) as service:
        now_s = time.time()
        result = service.status(now_s)
    if as_json:
        render.emit_json(result)
    else:
        _show(result, now_s)


def _show(result: dict[str, Any], now_s: float) -> None:
    plan = result["plan"]
    lives = ", ".join(f"{name} {'up' if result[name] else 'DOWN'}" for name in ("gateway", "controller"))
    click.echo(f"{result['url'] or 'no address yet'}  ({lives}; state in {result['state']})")
    if plan is not None:
        ago = figures.seconds(max(0.0, now_s - plan["since_s"]))
        cost = plan["cost_usd_per_h"]
        price = "hardware and price unknown" if cost is None else f"${cost:.2f}/h"
        click.echo(f"plan {plan['version']} ({plan['strategy']}), {price}, since {ago}: {plan['reason']}")
        for line in plan["notices"]:
            click.echo(f"notice: {line}")
        for item in plan["deployments"]:
            click.echo(f"  {item['count']} x {item['template']} in {item['region']}")
    for name, model in result["models"].items():
        slo = model.get("slo")
        aim = ""
        if slo:
            aim = f"; TTFT <= {figures.seconds(slo['ttft_s'])}, TPOT <= {figures.seconds(slo['tpot_s'])}"
            if slo.get("e2e_s"):
                aim += f", E2E <= {figures.seconds(slo['e2e_s'])}"
        click.echo(f"model {name}: {'ready' if model['ready'] else model['why']}{aim}")
    for line in result["notices"]:
        render.paragraph(f"notice: {line}")
    click.echo()
    if result["replicas"]:
        columns = ("replica", "role", "state", "engine", "pace", "open", "KV")
        only = next(iter(result["models"])) if len(result["models"]) == 1 else None
        render.table("", columns, [_row(one_item, only) for one_item in result["replicas"]])
    for element in result["lacking"]:
        click.echo(f"missing: {element['what']}: {element['why']}")
        for line in element.get("log", ()):
            click.echo(f"    {line}")
        if element.get("log"):
            click.echo(f"    (all of it: `potluck logs {element['engine']}`)")
    for line in result["problems"]:
        click.echo(f"problem: {line}")
    for note in result["notes"]:
        click.echo(_line(note["at_s"], note["kind"], note["what"], note["why"]))


def _row(each: dict[str, Any], only: str | None) -> tuple[object, ...]:
    """A table row; the name of the only model is left out, so that rows fit 80 columns."""
    return (
        str(each["replica"]).removeprefix(f"{only}: "),
        f"{each['role']}{' (by hand)' if each['by_hand'] else ''}",
        ", ".join([each["state"], *(word for word in ("doubted", "cordoned") if each[word])]),
        each["engine"] or "-",
        "-" if each["pace"] is None else f"{each['pace']:.2f}",
        each["open_requests"],
        f"{each['kv_used']:.0%}",
    )


def _line(at_s: float, kind: str, what: str, why: str) -> str:
    at = datetime.fromtimestamp(at_s).strftime("%H:%M:%S")
    return f"{at}  {kind:<8} {what}" + (f"  ({why})" if why else "")


@click.command()
@state_option
@option("--lines", default=50, type=click.IntRange(1, 100_000))
@option("--follow", "-f", is_flag=True, help="Print new events until Ctrl-C.")
@option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def events(state: Path | None, lines: int, follow: bool, as_json: bool) -> None:
    """Show changes of the service with their reasons, oldest first."""
    with opened(state, running=follow) as service:
        _past(service, lines, follow, as_json)


def _past(service: ServiceView, lines: int, follow: bool, as_json: bool) -> None:
    """Print past events, oldest first; with `follow` also new ones, in order."""
    last, waiting = 0, list(service.store.happenings(most=lines))
    while True:
        settled_s = time.time() - EVENT_SETTLE_S if follow else inf
        for recorded_event in sorted(
            waiting, key=lambda recorded_event: (recorded_event.at_s, recorded_event.id)
        ):
            last = max(last, recorded_event.id)
            if recorded_event.at_s <= settled_s:
                click.echo(_happening(recorded_event, as_json))
        if not follow:
            return
        waiting = [event for event in waiting if event.at_s > settled_s]
        time.sleep(POLL_INTERVAL_S)
        waiting += service.store.happenings(after=last)


def _happening(recorded_event: RecordedEvent, as_json: bool) -> str:
    if not as_json:
        return _line(recorded_event.at_s, recorded_event.kind, recorded_event.what, recorded_event.why)
    return json.dumps(
        {
            "at_s": recorded_event.at_s,
            "kind": recorded_event.kind,
            "what": recorded_event.what,
            "why": recorded_event.why,
        }
    )


@click.command()
@argument("name", required=False)
@state_option
@option("--lines", default=50, type=click.IntRange(1, 100_000))
@option("--follow", "-f", is_flag=True, help="Print new lines until Ctrl-C.")
@option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def logs(name: str | None, state: Path | None, lines: int, follow: bool, as_json: bool) -> None:
    """Show the log of NAME: an engine, a replica or `gateway`. Without NAME, list the logs.

    NAME may be a unique part of a name. The controller's actions are in `potluck events`.

    \b
    Examples:
      potluck logs gateway --follow
      potluck logs words-7b9a4ecf
    """
    with opened(state, running=False) as service:
        files = _files(service)
        if name is None:
            _list(files, as_json)
            return
        path = _log_of(service, files, name)
    for line in chain(_last(path, lines), _follow(path) if follow else ()):
        click.echo(json.dumps({"name": path.stem, "line": line}) if as_json else line)


def _list(files: dict[str, Path], as_json: bool) -> None:
    for name, path in files.items():
        size = path.stat().st_size
        click.echo(json.dumps({"name": name, "bytes": size}) if as_json else f"{name}  {render.bytes_(size)}")


def _files(service: ServiceView) -> dict[str, Path]:
    paths = [path for path in (service.folder / "logs").glob("*.log") if path.is_file()]
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stat().st_mtime)}


def _log_of(service: ServiceView, files: dict[str, Path], name: str) -> Path:
    replicas = {instance.replica: instance.name for instance in service.store.instances() if instance.replica}
    text = meant("NAME", name, [*files, *replicas])
    path = files.get(replicas.get(text, text))
    if path is None:
        raise nothing(f"{text} has no log yet")
    return path


def _last(path: Path, lines: int) -> list[str]:
    """The last lines of a log, including those of the rotated file before it."""
    from potluck.control.launchers.process import last_lines

    logs = (path.with_name(f"{path.name}.1"), path)
    return [line for log in logs for line in last_lines(log, lines, LOG_TAIL_BYTES)][-lines:]


def _follow(path: Path) -> Iterator[str]:
    """New lines of a log, as they are written."""
    at, rest = path.stat().st_size, ""
    while path.is_file():
        size = path.stat().st_size
        if size < at:
            at = 0  # it was rotated
        if size > at:
            with path.open("rb") as file:
                file.seek(at)
                received = file.read()
            at += len(received)
            *lines, rest = (rest + received.decode("utf-8", "replace")).split("\n")
            yield from lines
        time.sleep(POLL_INTERVAL_S)


WIDTH = 80
MODEL_NAME_MAX_WIDTH = 14  # Its figures take the rest of 80 columns.
MAX_ROWS = 40  # Replicas and links that are shown; the busiest first.
TTFT, TPOT = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"


@click.command()
@state_option
@option("--every", "every_s", default=1.0, type=click.FloatRange(0.2, 60.0))
@option("--once", is_flag=True, help="Print one frame and end; for scripts.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object per frame.")
def top(state: Path | None, every_s: float, once: bool, as_json: bool) -> None:
    """Show rates, latencies, replicas, links and cost of the last 10 s, live. Ctrl-C ends the display only."""
    from rich.console import Console
    from rich.live import Live

    from potluck.control.gateway_client import RecentMetrics

    with opened(state) as service:
        with_gateway(service)
        recent, codes = RecentMetrics(), False if render.unstyled() else None
        _look(service, recent)
        console = Console(highlight=False, force_terminal=codes)
        with suppress(KeyboardInterrupt):
            if once or as_json or not console.is_terminal:
                plain = Console(width=WIDTH, highlight=False, force_terminal=codes)
                while True:
                    time.sleep(every_s)
                    shown = _figures(service, _look(service, recent), recent)
                    click.echo(json.dumps(shown)) if as_json else plain.print(_frame(shown))
                    if once:
                        return
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(_frame(_figures(service, _look(service, recent), recent)), refresh=True)
                    time.sleep(every_s)


def _look(service: ServiceView, recent: RecentMetrics) -> dict[str, Any]:
    """Add a reading of the metrics; returns the gateway's snapshot."""
    from potluck.control.gateway_client import read

    try:
        recent.add(read(service.client.metrics(), time.monotonic()))
        return service.client.snapshot()
    except PotluckError as error:
        raise nothing(str(error)) from error


def _figures(service: ServiceView, snapshot: dict[str, Any], recent: RecentMetrics) -> dict[str, Any]:
    plan = snapshot.get("plan", {})
    return {
        "at_s": time.time(),
        "url": service.url,
        "plan": {"version": plan.get("version"), "strategy": plan.get("strategy")},
        "usd_per_h": None
        if plan.get("cost_usd_per_h", 0.0) is None
        else sum(value for _, value in recent.now.of("potluck_usd_per_hour")),
        "open_requests": snapshot.get("open_requests", 0),
        "span_s": recent.span_s,
        "controller": service.controller_lives,
        "models": {name: _model(name, recent) for name in snapshot.get("models", {})},
        "replicas": [_replica(item) for item in snapshot.get("replicas", ())],
        "links": list(snapshot.get("links") or ()),
    }


def _model(name: str, recent: RecentMetrics) -> dict[str, Any]:
    latencies = {
        f"{short}_p{round(100 * share)}_s": recent.quantile(family, share, model_name=name)
        for short, family in (("ttft", TTFT), ("tpot", TPOT))
        for share in (0.5, 0.9)
    }
    return {
        "requests_per_s": recent.per_s("vllm:request_success_total", model_name=name),
        "prompt_tokens_per_s": recent.per_s("vllm:prompt_tokens_total", model_name=name),
        "output_tokens_per_s": recent.per_s("vllm:generation_tokens_total", model_name=name),
        **latencies,
        "running": recent.now.sum("vllm:num_requests_running", model_name=name),
        "waiting": recent.now.sum("vllm:num_requests_waiting", model_name=name),
        "usd_per_million_tokens": recent.now.sum("potluck_usd_per_million_tokens", model=name) or None,
    }


def _replica(each: dict[str, Any]) -> dict[str, Any]:
    status = each.get("status") or {}
    total = status.get("total_blocks") or 0
    return {
        **{name: each[name] for name in ("replica", "role", "state", "doubted", "open_requests", "pace")},
        "waiting": status.get("queued", 0),
        "kv_used": 1.0 - status["free_blocks"] / total if total else None,
        "step_s": status.get("step_s") or None,
    }


def _frame(shown: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.text import Text

    plan, usd_per_h = shown["plan"], shown["usd_per_h"]
    price = "price unknown" if usd_per_h is None else f"${usd_per_h:.2f}/h"
    head = (
        f"{shown['url']}  plan {plan['version']} ({plan['strategy']})  {price}  "
        f"{shown['open_requests']} open requests  last {shown['span_s']:.0f} s"
    )
    if not shown["controller"]:
        head += "  controller DOWN"
    grids = (_models(shown["models"]), _replicas(shown["replicas"]), _links(shown["links"]))
    parts = [(Text(""), grid) for grid in grids if grid is not None]
    return Group(Text(head, style="bold"), *(item for part in parts for item in part))


def _grid(items: Iterable[Any], columns: dict[str, Callable[[Any], object]], gap: int = 2) -> Table:
    from rich.table import Table

    grid = Table(box=None, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    for place, column in enumerate(columns):
        left = place == 0 or column in ("role", "state")
        grid.add_column(
            column.strip(), justify="left" if left else "right", no_wrap=True, overflow="ellipsis", ratio=None
        )
    for item in items:
        grid.add_row(*(str(cell(item)) for cell in columns.values()))
    return grid


def _models(models: dict[str, Any]) -> Table:
    columns: dict[str, Callable[[Any], object]] = {
        "model": lambda item: _short(item[0], MODEL_NAME_MAX_WIDTH),
        "req/s": lambda item: f"{item[1]['requests_per_s']:.1f}",
        "prompt\ntok/s": lambda item: _tokens_per_s(item[1]["prompt_tokens_per_s"]),
        "output\ntok/s": lambda item: _tokens_per_s(item[1]["output_tokens_per_s"]),
        "TTFT\np50": lambda item: _seconds(item[1]["ttft_p50_s"]),
        "TTFT\np90": lambda item: _seconds(item[1]["ttft_p90_s"]),
        "TPOT\np50": lambda item: _seconds(item[1]["tpot_p50_s"]),
        "TPOT\np90": lambda item: _seconds(item[1]["tpot_p90_s"]),
        "run": lambda item: f"{item[1]['running']:.0f}",
        "wait": lambda item: f"{item[1]['waiting']:.0f}",
        "$/Mtok": lambda item: "-" if (usd := item[1]["usd_per_million_tokens"]) is None else render.usd(usd),
    }
    return _grid(models.items(), columns, gap=1)


def _replicas(replicas: list[dict[str, Any]]) -> Table:
    columns: dict[str, Callable[[Any], object]] = {
        "replica": lambda item: _short(item["replica"]),
        "role": lambda item: item["role"],
        "state": lambda item: item["state"] + ("?" if item["doubted"] else ""),
        "open": lambda item: item["open_requests"],
        "queue": lambda item: item["waiting"],
        "KV used": lambda item: "-" if item["kv_used"] is None else f"{item['kv_used']:.0%}",
        "pace": lambda item: "-" if item["pace"] is None else f"{item['pace']:.2f}",
        "step": lambda item: _seconds(item["step_s"]),
    }
    shown = sorted(replicas, key=lambda each: -each["open_requests"])[:MAX_ROWS]
    return _grid(sorted(shown, key=lambda each: str(each["replica"])), columns, gap=1)


def _links(links: list[dict[str, Any]]) -> Table | None:
    """The busiest links between regions; None without links."""
    columns: dict[str, Callable[[Any], object]] = {
        "link": lambda link: f"{_short(link['source'], 26)} > {_short(link['target'], 26)}",
        "utilization": lambda link: f"{link['utilisation']:.0%}",
        "Gbit/s": lambda link: f"{link['gbps']:.3g}",
        "KV queued": lambda link: render.bytes_(link["queued_bytes"]),
    }
    busiest = sorted(links, key=lambda each: -each["utilisation"])[:MAX_ROWS]
    return _grid(busiest, columns) if links else None


def _seconds(value_s: float | None) -> str:
    return "-" if value_s is None else figures.seconds(value_s).replace(" ", "")


def _tokens_per_s(value: float) -> str:
    return render.short(round(value)).replace(" ", "") if value >= 10_000 else str(round(value))


def _short(name: str, most: int = 35) -> str:
    """A name shortened in its middle, as names differ at their ends."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most - most // 2) :]}"
