"""`potluck reproduce`: a paper's experiments in simulation, from a checkout's `tools/papers`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import click

from potluck.core.errors import InputError

TOOLS = Path(__file__).parents[4] / "tools"


@click.command()
@click.argument("paper", type=click.Choice(("cauchy", "cronus")))
@click.option(
    "--data",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="POTLUCK_DATA",
    help="Folder with the Azure conversation trace; without it requests are made up.",
)
@click.option("--quick", is_flag=True, help="Shorter runs: coarser figures.")
@click.option("--seed", default=0, show_default=True, help="Of requests that are made up.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reproduce(paper: str, folder: Path | None, quick: bool, seed: int, as_json: bool) -> None:
    """Run a paper's experiments and put its figures beside ours; needs a checkout of Potluck.

    \b
    Examples:
      potluck reproduce cronus --data traces
      potluck reproduce cauchy --json
    """
    if not (TOOLS / "papers").is_dir():
        raise InputError("reproduce", "the papers' experiments come with a checkout, run it from one")
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    import_module("papers.command").reproduce(paper, folder, quick, seed, as_json)
