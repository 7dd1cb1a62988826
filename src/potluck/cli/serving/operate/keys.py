"""`potluck keys`: API keys for clients, of a service's state or for a file of one's own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.common import render
from potluck.cli.serving.operate.service import opened, state_option
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.control.store.keys import KeptKey
    from potluck.control.store.store import Store

HOUR_S = 3600.0


@click.group()
def keys() -> None:
    """API keys for clients: kept with a service, or for a gateway's own file (docs/gateway.md).

    \b
    Examples:
      potluck keys add ann --tenant research     the service that runs here asks for keys from now on
      potluck keys rotate ann                    another key; the one before holds for a day
      potluck keys new ann --file keys.jsonl     for `potluck serve --keys keys.jsonl`
    """


@keys.command()
@click.argument("name")
@click.option("--tenant", help="Whose share of the fleet it uses; else one of the key's name.")
@click.option("--requests-per-min", type=click.FloatRange(0, min_open=True))
@click.option("--tokens-per-min", type=click.FloatRange(0, min_open=True))
@click.option("--concurrent", type=click.IntRange(1), help="Requests at once.")
@click.option("--class", "classes", multiple=True, help="Of requests that it may send; else all.")
@click.option("--expires", help="A day or a time, such as 2031-01-31.")
@state_option
def add(
    name: str, state: Path | None, expires: str | None, classes: tuple[str, ...], **given: object
) -> None:
    """Make a key called NAME; the gateway knows it within a second.

    The first one ends the time in which no key is asked for. The key is shown once and kept nowhere.
    """
    from potluck.control.store.keys import KeptKey, add_key
    from potluck.gateway.door.keys import new_key, read_expiry

    tenant = given.pop("tenant")
    limits = {key: value for key, value in given.items() if value is not None}
    key, line = new_key(
        name,
        None if tenant is None else str(tenant),
        **limits,
        **({"classes": list(classes)} if classes else {}),
    )
    ends_s = None if expires is None else read_expiry(expires)
    rest = json.loads(line)
    with _store(state) as (store, folder, note):
        sha256 = rest.pop("sha256")
        rest.pop("name")
        add_key(store, folder, KeptKey(sha256, name, rest, time.time(), ends_s))
    _show_key(key, note)


@keys.command()
@click.argument("name")
@click.option(
    "--grace-h",
    type=click.FloatRange(0),
    default=24.0,
    show_default=True,
    help="Hours for which the key before holds.",
)
@state_option
def rotate(name: str, grace_h: float, state: Path | None) -> None:
    """Another key for NAME, with the same tenant and limits."""
    from potluck.control.store.keys import rotate_key
    from potluck.gateway.door.keys import new_key

    key, line = new_key(name)
    with _store(state) as (store, folder, note):
        rotate_key(store, folder, name, json.loads(line)["sha256"], time.time(), grace_h * HOUR_S)
    _show_key(key, note)


@keys.command()
@click.argument("name")
@state_option
def revoke(name: str, state: Path | None) -> None:
    """Let nobody in with a key called NAME any more, within a second."""
    from potluck.control.store.keys import revoke_key

    with _store(state) as (store, folder, note):
        count = revoke_key(store, folder, name, time.time())
    click.echo(f"{count} key{'s' if count > 1 else ''} of {name} revoked{note}")


@keys.command("list")
@state_option
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def listed(state: Path | None, as_json: bool) -> None:
    """Show all keys that there are or were, without the keys themselves."""
    from potluck.control.store.keys import kept_keys

    with _store(state) as (store, _, _note):
        found = kept_keys(store)
    now_s = time.time()
    rows = [_row(each, now_s) for each in found]
    if as_json:
        render.emit_json({"open": not rows, "keys": rows})
    elif not rows:
        click.echo("no keys: the gateway asks for none; `potluck keys add NAME` makes one")
    else:
        names = ("name", "tenant", "holds", "made", "ends", "limits", "sha256")
        table = [[*(row[each] for each in names[:-1]), str(row["sha256"])[:12]] for row in rows]
        render.narrow(names, [["" if cell is None else str(cell) for cell in row] for row in table])


@keys.command()
@click.argument("name")
@click.option("--tenant", help="Whose share of the fleet it uses; else one of the key's name.")
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Add the line to this file instead of printing it.",
)
def new(name: str, tenant: str | None, path: Path | None) -> None:
    """Make a key called NAME for a file of `potluck serve --keys`.

    The key itself is kept nowhere: only its SHA-256 goes into the file.
    """
    from potluck.gateway.door.keys import new_key

    key, line = new_key(name, tenant)
    click.echo(f"key, shown only now:  {key}")
    if path is None:
        click.echo(f"line for the file of --keys:\n{line}")
        return
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        path.touch(mode=0o600)
        with path.open("a", encoding="utf-8") as file:
            file.write(("" if not text or text.endswith("\n") else "\n") + line + "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"cannot be written ({error})") from error
    click.echo(f"its line was added to {path}")


@contextmanager
def _store(state: Path | None) -> Iterator[tuple[Store, Path, str]]:
    """The state, made where a folder is named that has none yet; and what to say of its gateway."""
    from potluck.control.store.store import Store

    if state is not None and not (state / "state.db").is_file():
        Store(state / "state.db").close()
    with opened(state, running=False) as service:
        place = service.store.get("gateway") or {}
        old = service.gateway_lives and not place.get("keyed")
        note = "; the gateway that runs was started without keys: it counts after `potluck down` and `up`"
        yield service.store, service.folder, note if old else ""


def _show_key(key: str, note: str) -> None:
    click.echo(f"key, shown only now:  {key}{note}")


def _row(key: KeptKey, now_s: float) -> dict[str, object]:
    limits = {name: value for name, value in key.line.items() if name != "tenant"}
    return {
        "name": key.name,
        "tenant": key.line.get("tenant"),
        "holds": "yes" if key.holds(now_s) else "revoked" if key.revoked_s is not None else "expired",
        "made": _day(key.made_s),
        "ends": None if key.ends_s is None else _day(key.ends_s),
        "limits": ", ".join(f"{name} {value}" for name, value in limits.items()),
        "sha256": key.sha256,
    }


def _day(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%MZ")
