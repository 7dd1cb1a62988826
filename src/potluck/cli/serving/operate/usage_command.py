"""`potluck usage`: who used what, to bill from."""

from __future__ import annotations

import csv
import io
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from potluck.cli.common import render
from potluck.cli.serving.operate.which_service import opened, state_option
from potluck.core.errors import InputError

USUAL = ("key", "tenant", "model")
UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"([0-9]{1,6})([mhd])\Z")


@click.command()
@state_option
@click.option("--since", help="A day or time (UTC), such as 2031-01-31, or a span: 24h, 30d. Else all.")
@click.option("--until", help="The same; the hour in which it lies is counted.")
@click.option(
    "--by",
    multiple=True,
    metavar="NAME",
    help="One row for each of: hour, day, key, tenant, model, class, outcome; may be given several times. "
    f"Else {', '.join(USUAL)}.",
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--csv", "as_csv", is_flag=True, help="For a spreadsheet.")
def usage(
    state: Path | None,
    since: str | None,
    until: str | None,
    by: tuple[str, ...],
    as_json: bool,
    as_csv: bool,
) -> None:
    """Show requests and tokens of each key, tenant and model, in whole hours (UTC).

    Tokens are those of requests that were answered, or that their client left; with `--by outcome`, of all.
    """
    from potluck.control.accounts import count_all, used

    if as_json and as_csv:
        raise InputError("--csv", "and --json exclude each other")
    now_s = time.time()
    since_s = 0.0 if since is None else moment(since, now_s, "--since")
    until_s = None if until is None else moment(until, now_s, "--until")
    if until_s is not None and until_s < since_s:
        raise InputError("--until", f"{until} is before --since {since}")
    chosen = tuple(dict.fromkeys(by)) or USUAL
    with opened(state, running=False) as service:
        count_all(service.store, service.folder, now_s)
        rows = used(service.store, chosen, since_s, until_s)
    if as_json:
        render.emit_json(rows)
    elif as_csv:
        click.echo(_csv(rows), nl=False)
    elif not rows:
        click.echo("no requests were recorded" + (f" since {since}" if since else ""))
    else:
        render.table("", list(rows[0]), [list(row.values()) for row in rows])


def moment(text: str, now_s: float, field: str) -> float:
    """A day, a time or a span before now."""
    span = _SPAN.match(text)
    if span is not None:
        return max(0.0, now_s - int(span[1]) * UNITS_S[span[2]])
    try:
        found = datetime.fromisoformat(text)
        return max(0.0, (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise InputError(
            field, f"{text!r} is no day, time or span, such as 2031-01-31, 2031-01-31T12:00, 24h or 30d"
        ) from None


def _csv(rows: list[dict[str, object]]) -> str:
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([{name: _plain(cell) for name, cell in row.items()} for row in rows])
    return out.getvalue()


def _plain(cell: object) -> object:
    """A name that a spreadsheet would take for a formula is text."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@") else cell
