"""`potluck replay`: feed a log to a fresh Brain and see whether it decides the same."""

from __future__ import annotations

from pathlib import Path

import click

from potluck.cli.common.progress import progress
from potluck.cli.common.render import emit_json


@click.command()
@click.argument(
    "logs",
    metavar="LOG...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, path_type=Path),
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def replay(context: click.Context, logs: tuple[Path, ...], as_json: bool) -> None:
    """Feed every event of a LOG, live or simulated, to a fresh Brain and compare what it asks for.

    Several files are one log, in this order; those ending in .gz are unpacked. A folder stands for all pieces of the
    brain.log in it. Where a gateway was started again a new Brain begins, as it did then. Exit code 0 when all is the
    same, 1 when not; the first difference is shown.

    \b
    Examples:
      potluck simulate potluck.yaml --log run.jsonl && potluck replay run.jsonl
      potluck replay STATE                   the log of a service, in the folder that --state named
      potluck replay gateway.log.1.gz gateway.log --json
    """
    from potluck.core.brain.brain import Brain
    from potluck.runtime.replay import log_lines
    from potluck.runtime.replay import replay as run

    with progress(1000) as said, log_lines(logs) as lines:
        found = run(lines, Brain, lambda events: said(f"{events:,} events"))
    if as_json:
        emit_json(
            {
                "same": not found.difference,
                "events": found.events,
                "actions": found.actions,
                "runs": found.runs,
                "difference": found.difference or None,
                "cut_lines": list(found.cuts),
                "since_s": found.since_s,
            }
        )
    else:
        for number in found.cuts:
            click.echo(f"potluck: note: line {number} of the log is cut off and was passed over", err=True)
        if found.since_s:
            click.echo(
                f"potluck: note: the log begins {found.since_s:,.0f} s into its first run; older pieces were dropped",
                err=True,
            )
        runs = f"{found.runs} runs" if found.runs > 1 else "1 run"
        verdict = found.difference or "all the same"
        click.echo(f"{found.events:,} events and {found.actions:,} actions in {runs}: {verdict}")
    context.exit(1 if found.difference else 0)
