"""`potluck top`: a running service in the terminal, renewed every second."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from potluck.cli.common import render
from potluck.cli.serving.operate.service import nothing, opened, state_option
from potluck.core import figures
from potluck.core.errors import PotluckError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from potluck.control.recent import Recent
    from potluck.control.view import Service

WIDTH = 80
MOST_ROWS = 40
"""Replicas and links that are shown; the busiest first."""
TTFT, TPOT = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"


@click.command()
@state_option
@click.option("--every", "every_s", default=1.0, show_default=True, type=click.FloatRange(0.2, 60.0))
@click.option("--once", is_flag=True, help="Print one frame and end; for scripts.")
def top(state: Path | None, every_s: float, once: bool) -> None:
    """Rates, latencies, replicas, links and dollars of the last 10 s, live. Ctrl-C ends it; the service goes on."""
    from rich.console import Console
    from rich.live import Live

    from potluck.control.recent import Recent

    with opened(state) as service:
        if not service.gateway_lives:
            raise nothing(f"no gateway runs in {service.folder}; `potluck status` says what does")
        recent = Recent()
        _look(service, recent)
        if once:
            time.sleep(every_s)
            Console(width=WIDTH, highlight=False).print(_frame(service, _look(service, recent), recent))
            return
        console = Console(highlight=False)
        with (
            suppress(KeyboardInterrupt),
            Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
        ):
            while True:
                live.update(_frame(service, _look(service, recent), recent), refresh=True)
                time.sleep(every_s)


def _look(service: Service, recent: Recent) -> dict[str, Any]:
    """One more reading; the snapshot beside it."""
    from potluck.control.recent import read

    try:
        recent.add(read(service.client.metrics(), time.monotonic()))
        return service.client.snapshot()
    except PotluckError as error:
        raise nothing(str(error)) from error


def _frame(service: Service, snapshot: dict[str, Any], recent: Recent) -> Group:
    from rich.console import Group
    from rich.text import Text

    plan = snapshot.get("plan", {})
    usd = sum(value for _, value in recent.now.of("potluck_usd_per_hour"))
    head = (
        f"{service.url}  plan {plan.get('version')} ({plan.get('strategy')})  ${usd:.2f}/h  "
        f"{snapshot.get('open_requests', 0)} open  last {recent.span_s:.0f} s"
    )
    if not service.controller_lives:
        head += "  no controller"
    grids = (_models(snapshot, recent), _replicas(snapshot), _links(snapshot))
    parts = [(Text(""), grid) for grid in grids if grid is not None]
    return Group(Text(head, style="bold"), *(each for part in parts for each in part))


def _grid(*columns: str, gap: int = 2) -> Table:
    from rich.table import Table

    grid = Table(box=None, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    for place, column in enumerate(columns):
        left = place == 0 or column in ("role", "state")
        grid.add_column(
            column, justify="left" if left else "right", no_wrap=True, overflow="ellipsis", ratio=None
        )
    return grid


def _models(snapshot: dict[str, Any], recent: Recent) -> Table:
    grid = _grid("model", "req/s", "tok/s", "TTFT p50", "p90", "TPOT p50", "p90", "run", "wait", "$/Mtok")
    for name in snapshot.get("models", {}):
        latencies = [
            _seconds(recent.quantile(family, share, model_name=name))
            for family in (TTFT, TPOT)
            for share in (0.5, 0.9)
        ]
        per_million = recent.now.sum("potluck_usd_per_million_tokens", model=name)
        grid.add_row(
            name,
            f"{recent.per_s('vllm:request_success_total', model_name=name):.1f}",
            render.count(round(recent.per_s("vllm:generation_tokens_total", model_name=name))),
            *latencies,
            f"{recent.now.sum('vllm:num_requests_running', model_name=name):.0f}",
            f"{recent.now.sum('vllm:num_requests_waiting', model_name=name):.0f}",
            render.usd(per_million) if per_million else "-",
        )
    return grid


def _replicas(snapshot: dict[str, Any]) -> Table:
    grid = _grid("replica", "role", "state", "busy", "wait", "KV", "pace", "step", gap=1)
    shown = sorted(snapshot.get("replicas", ()), key=lambda each: -each["open_requests"])[:MOST_ROWS]
    for each in sorted(shown, key=lambda each: str(each["replica"])):
        status = each.get("status") or {}
        total = status.get("total_blocks") or 0
        grid.add_row(
            _short(each["replica"]),
            each["role"],
            each["state"] + ("?" if each["doubted"] else ""),
            str(each["open_requests"]),
            str(status.get("queued", 0)),
            f"{1.0 - status['free_blocks'] / total:.0%}" if total else "-",
            f"{each['pace']:.2f}",
            _seconds(status.get("step_s") or None),
        )
    return grid


def _links(snapshot: dict[str, Any]) -> Table | None:
    """Between regions; None where there is but one."""
    links = snapshot.get("links") or ()
    if not links:
        return None
    grid = _grid("link", "used", "Gbit/s", "KV that waits")
    for each in sorted(links, key=lambda each: -each["utilisation"])[:MOST_ROWS]:
        grid.add_row(
            f"{_short(each['source'], 26)} > {_short(each['target'], 26)}",
            f"{each['utilisation']:.0%}",
            f"{each['gbps']:.3g}",
            render.bytes_(each["queued_bytes"]),
        )
    return grid


def _seconds(value_s: float | None) -> str:
    return "-" if value_s is None else figures.seconds(value_s).replace(" ", "")


def _short(name: str, most: int = 35) -> str:
    """A replica's name with its end, which tells them apart."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most - most // 2) :]}"
