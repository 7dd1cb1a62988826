"""`potluck cordon`, `uncordon`: nothing new for a replica or a host, while it keeps what it has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from potluck.cli.common import render
from potluck.cli.serving.operate.orders import meant
from potluck.cli.serving.operate.which_service import at_options, client_at, nothing, opened, state_option

if TYPE_CHECKING:
    from potluck.control.gateway_client import GatewayClient

_json = click.option("--json", "as_json", is_flag=True, help="For machines.")


@click.command()
@click.argument("name", metavar="REPLICA|HOST")
@at_options
@state_option
@_json
def cordon(
    name: str, at: str | None, key_file: Path | None, ca: Path | None, state: Path | None, as_json: bool
) -> None:
    """Send nothing new to a REPLICA, or to all on a HOST; what is there ends, and no other is started instead.

    It holds until `potluck uncordon`, also for engines that are started again at the same address. A HOST is named as
    engines' addresses name it, or as the spec's pool does. To empty and replace one use `potluck drain`.

    \b
    Examples:
      potluck cordon 'east#1/0'
      potluck cordon 10.0.0.5 --at https://10.0.0.9:8001 --key-file admin.key --ca ca.pem
    """
    _told(name, at, key_file, ca, state, as_json, lift=False)


@click.command()
@click.argument("name", metavar="REPLICA|HOST")
@at_options
@state_option
@_json
def uncordon(
    name: str, at: str | None, key_file: Path | None, ca: Path | None, state: Path | None, as_json: bool
) -> None:
    """Send to a REPLICA or a HOST again that was cordoned."""
    _told(name, at, key_file, ca, state, as_json, lift=True)


def _told(
    name: str,
    at: str | None,
    key_file: Path | None,
    ca: Path | None,
    state: Path | None,
    as_json: bool,
    *,
    lift: bool,
) -> None:
    if at is not None:
        said = _ask(client_at(at, key_file, ca, state), {}, name, lift)
    else:
        with opened(state) as service:
            if not service.gateway_lives:
                raise nothing(f"no gateway runs in {service.folder}; `potluck status` says what does")
            engines = {each.name: each.replica for each in service.store.instances() if each.replica}
            said = _ask(service.client, engines, name, lift)
    if as_json:
        render.emit_json(said)
        return
    for each in said["changed"]:
        click.echo(f"{each} is sent {'requests again' if lift else 'nothing new'}")
    if not said["changed"]:
        click.echo("no replica changes by that now")
    click.echo(f"cordoned: {', '.join(said['cordoned']) or 'nothing'}")


def _ask(client: GatewayClient, engines: dict[str, str], name: str, lift: bool) -> dict[str, Any]:
    """A host or a mark that is there by its whole name; else a replica by a part of its own, or by its engine's."""
    snapshot = client.snapshot()
    marks = snapshot.get("wanted", {}).get("cordoned", ())
    hosts = {urlsplit(str(each["url"])).hostname for each in snapshot.get("engines", ())}
    if name in hosts or name in marks:
        return client.cordon(name, node=True, lift=lift)
    names = [str(each["replica"]) for each in snapshot.get("replicas", ())]
    if name not in engines and not any(name in each for each in names):
        return client.cordon(name, node=True, lift=lift)
    return client.cordon(engines.get(name) or meant("REPLICA", name, names), node=False, lift=lift)
