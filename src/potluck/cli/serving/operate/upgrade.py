"""`potluck upgrade`: every engine of a fleet replaced, one copy at a time, while it serves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from potluck.cli.serving.operate.which_service import at_options, client_at, nothing, opened, state_option
from potluck.core.errors import PotluckError

if TYPE_CHECKING:
    from potluck.control.gateway_client import GatewayClient

LOOK_S = 0.2


@click.command()
@at_options
@click.option(
    "--within", default=600.0, show_default=True, type=click.FloatRange(1), help="For each copy, in s."
)
@state_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="One JSON object per line: each copy once it is replaced, the sum.",
)
def upgrade(
    at: str | None, key_file: Path | None, ca: Path | None, within: float, state: Path | None, as_json: bool
) -> None:
    """Empty every copy in turn, and wait for the engines that take its place: no request is lost.

    Install the new release first. Engines of `potluck up` are replaced by its controller; those of other hosts by
    whatever starts them again (systemd, a container's restart policy), if they run with --end-when-drained.

    \b
    Examples:
      potluck upgrade
      potluck upgrade --at https://10.0.0.9:8001 --key-file admin.key --ca ca.pem
    """
    if at is not None:
        client = client_at(at, key_file, ca, state)
        _all(client, client.drain, within, as_json)
        return
    with opened(state) as service:
        if not service.gateway_lives or not service.controller_lives:
            raise nothing(f"gateway and controller must run in {service.folder}; `potluck up` starts them")
        from potluck.control.manual_changes import leave

        def drain(replica: str) -> None:
            engines = {each.replica: each.name for each in service.store.instances() if each.replica}
            unit = replica.rpartition("/")[0]
            leave(service.store, (name for of, name in engines.items() if of.rpartition("/")[0] == unit))
            service.client.drain(replica)

        _all(service.client, drain, within, as_json)


def _all(
    client: GatewayClient, drain: Callable[[str], object], within_s: float, as_json: bool = False
) -> None:
    """Copy by copy. A gateway that does not answer, or a copy that is not ready to be drained, is asked again."""
    from potluck.control.gateway_client import KeyRefused
    from potluck.control.manual_changes import due, lacks

    start_s, done = time.monotonic(), 0
    if not due(client.snapshot(), 0.0):
        raise nothing("no replica serves; nothing was changed")
    while True:
        before = _within(client.snapshot, within_s)
        left = due(before, time.monotonic() - start_s)
        if not left:
            line = f"{done} {'copy was' if done == 1 else 'copies were'} replaced"
            click.echo(json.dumps({"copies": done}) if as_json else line)
            return
        turn, began_s = left[0], time.monotonic()
        problem = "it cannot be drained"
        drained = False
        while problem:
            try:
                if not drained:
                    drain(turn.replicas[0])
                    drained = True
                problem = lacks(client.snapshot(), before, turn, time.monotonic() - began_s)
            except KeyRefused:
                raise
            except PotluckError as error:
                problem = str(error)
            if problem and time.monotonic() - began_s > within_s:
                raise nothing(f"{problem} after {within_s:g} s; {len(left) - 1} copies were left as they are")
            time.sleep(LOOK_S if problem else 0.0)
        done += 1
        took_s = time.monotonic() - began_s
        shown = {"replicas": list(turn.replicas), "took_s": round(took_s, 3), "left": len(left) - 1}
        line = f"{', '.join(turn.replicas)} replaced after {took_s:.1f} s; {len(left) - 1} to go"
        click.echo(json.dumps(shown) if as_json else line)


def _within(ask: Callable[[], dict[str, Any]], within_s: float) -> dict[str, Any]:
    """An answer, asked for again while there is none."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            return ask()
        except PotluckError:
            if time.monotonic() > until_s:
                raise
        time.sleep(LOOK_S)
