"""`potluck keys new`: an API key for the gateway, shown once, and its line for the file of keys."""

from __future__ import annotations

from pathlib import Path

import click

from potluck.core.errors import InputError


@click.group()
def keys() -> None:
    """Make API keys for the gateway (docs/gateway.md)."""


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
    """Make a key called NAME. The key itself is kept nowhere: only its SHA-256 goes into the file."""
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
