"""`potluck init`: a commented example spec."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import click

from potluck.core.errors import InputError


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path("potluck.yaml"))
@click.option("--force", is_flag=True, help="Overwrite a file that exists.")
@click.option("--json", "as_json", is_flag=True, help="Say what was written as JSON.")
def init(path: Path, force: bool, as_json: bool) -> None:
    """Write a commented example spec to PATH (potluck.yaml when left out).

    \b
    Examples:
      potluck init
      potluck init fleet/prod.yaml --force
    """
    text = resources.files("potluck.spec").joinpath("data", "example.yaml").read_text(encoding="utf-8")
    if path.is_dir():
        path = path / "potluck.yaml"
    try:
        # "x" leaves the decision to the system, so that a file made meanwhile is safe too.
        with path.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise InputError(str(path), "exists already; use --force to overwrite it") from error
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror}") from error
    if as_json:
        from potluck.cli.common.render import emit_json

        emit_json({"written": str(path)})
    else:
        click.echo(f"Wrote {path}. Edit it, then run: potluck check {path}")
