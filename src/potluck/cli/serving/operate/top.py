"""`potluck top`: a running service in the terminal, renewed every second."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from potluck.cli.common import render
from potluck.cli.serving.operate.which_service import nothing, opened, state_option
from potluck.core import figures
from potluck.core.errors import PotluckError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from potluck.control.gateway_client import RecentMetrics
    from potluck.control.service_view import ServiceView

WIDTH = 80
MOST_ROWS = 40
"""Replicas and links that are shown; the busiest first."""
TTFT, TPOT = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"


@click.command()
@state_option
@click.option("--every", "every_s", default=1.0, show_default=True, type=click.FloatRange(0.2, 60.0))
@click.option("--once", is_flag=True, help="Print one frame and end; for scripts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, each a frame.")
def top(state: Path | None, every_s: float, once: bool, as_json: bool) -> None:
    """Rates, latencies, replicas, links and dollars of the last 10 s, live. Ctrl-C ends it; the service goes on."""
    from rich.console import Console
    from rich.live import Live

    from potluck.control.gateway_client import RecentMetrics

    with opened(state) as service:
        if not service.gateway_lives:
            raise nothing(f"no gateway runs in {service.folder}; `potluck status` says what does")
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
    """One more reading; the snapshot beside it."""
    from potluck.control.gateway_client import read

    try:
        recent.add(read(service.client.metrics(), time.monotonic()))
        return service.client.snapshot()
    except PotluckError as error:
        raise nothing(str(error)) from error


def _figures(service: ServiceView, snapshot: dict[str, Any], recent: RecentMetrics) -> dict[str, Any]:
    """All that a frame shows, as plain JSON."""
    plan = snapshot.get("plan", {})
    return {
        "at_s": time.time(),
        "url": service.url,
        "plan": {"version": plan.get("version"), "strategy": plan.get("strategy")},
        "usd_per_h": sum(value for _, value in recent.now.of("potluck_usd_per_hour")),
        "open_requests": snapshot.get("open_requests", 0),
        "span_s": recent.span_s,
        "controller": service.controller_lives,
        "models": {name: _model(name, recent) for name in snapshot.get("models", {})},
        "replicas": [_replica(each) for each in snapshot.get("replicas", ())],
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

    plan = shown["plan"]
    head = (
        f"{shown['url']}  plan {plan['version']} ({plan['strategy']})  ${shown['usd_per_h']:.2f}/h  "
        f"{shown['open_requests']} open  last {shown['span_s']:.0f} s"
    )
    if not shown["controller"]:
        head += "  no controller"
    grids = (_models(shown["models"]), _replicas(shown["replicas"]), _links(shown["links"]))
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


def _models(models: dict[str, Any]) -> Table:
    grid = _grid("model", "req/s", "tok/s", "TTFT p50", "p90", "TPOT p50", "p90", "run", "wait", "$/Mtok")
    for name, each in models.items():
        usd = each["usd_per_million_tokens"]
        grid.add_row(
            name,
            f"{each['requests_per_s']:.1f}",
            render.count(round(each["output_tokens_per_s"])),
            *(_seconds(each[f"{what}_s"]) for what in ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")),
            f"{each['running']:.0f}",
            f"{each['waiting']:.0f}",
            "-" if usd is None else render.usd(usd),
        )
    return grid


def _replicas(replicas: list[dict[str, Any]]) -> Table:
    grid = _grid("replica", "role", "state", "busy", "wait", "KV", "pace", "step", gap=1)
    shown = sorted(replicas, key=lambda each: -each["open_requests"])[:MOST_ROWS]
    for each in sorted(shown, key=lambda each: str(each["replica"])):
        grid.add_row(
            _short(each["replica"]),
            each["role"],
            each["state"] + ("?" if each["doubted"] else ""),
            str(each["open_requests"]),
            str(each["waiting"]),
            "-" if each["kv_used"] is None else f"{each['kv_used']:.0%}",
            f"{each['pace']:.2f}",
            _seconds(each["step_s"]),
        )
    return grid


def _links(links: list[dict[str, Any]]) -> Table | None:
    """Between regions; None where there is but one."""
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
