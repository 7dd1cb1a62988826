"""`potluck keys`: API keys for clients, of a service's state or for a file of one's own."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click import argument, option

from potluck.cli.common import render
from potluck.cli.common.files import option_group
from potluck.cli.engine.listening import LOOPBACK
from potluck.cli.fleet.service import json_option, nothing, opened, state_option
from potluck.core.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from potluck.control.accounts import KeptKey
    from potluck.control.service_view import ServiceView


HOUR_S = 3600.0
SHUT = "from now on every client of this service needs a key; `potluck keys open` lets those without one in again"
NOBODY = (
    "no key holds any more: nobody gets in; `potluck keys add NAME` makes a key, "
    "`potluck keys open` lets clients in without one"
)


@click.group()
def keys() -> None:
    """API keys for clients: kept with a service, or for a gateway's own file (docs/gateway.md).

    \b
    Examples:
      potluck keys add ann --tenant research     the service that runs here asks for keys from now on
      potluck keys add bob --requests-per-min 60 --tokens-per-min 90000 --classes batch
      potluck keys rotate ann                    another key; the one before holds for a day
      potluck keys open                          clients without a key are let in again
      potluck keys new ann >> keys.jsonl         for `potluck serve --keys keys.jsonl`
    """


key_options = option_group(
    option("--tenant", help="Whose share of the fleet it uses; else one of the key's name."),
    option("--requests-per-min", type=click.FloatRange(0, min_open=True), help="Requests per minute."),
    option(
        "--tokens-per-min",
        type=click.FloatRange(0, min_open=True),
        help="Tokens per minute, of prompts and answers.",
    ),
    option("--concurrent", type=click.IntRange(1), help="Requests at once."),
    option(
        "--classes",
        multiple=True,
        metavar="NAME[,NAME...]",
        help="Classes that its requests may have, such as standard,batch; else all. "
        "The first is that of requests that name none, unless standard is among them.",
    ),
    option("--expires", help="A day or a time, such as 2031-01-31."),
)


@keys.command()
@argument("name")
@key_options
@option("--yes", is_flag=True, help="Do not ask whether clients without a key are to be locked out.")
@state_option
@json_option
def add(
    name: str,
    tenant: str | None,
    classes: tuple[str, ...],
    expires: str | None,
    yes: bool,
    state: Path | None,
    as_json: bool,
    **limits: object,
) -> None:
    """Make a key called NAME; the gateway knows it within a second.

    The first one locks out all clients without a key: it says so, and asks first on a terminal. `potluck keys open`
    lets them in again. The key is shown once and kept nowhere.
    """
    from potluck.control.accounts import KeptKey, add_key, is_open, kept_keys
    from potluck.gateway.openai.keys import new_key, read_expiry

    key, line = new_key(name, tenant, **_given(limits, classes))
    ends_s = None if expires is None else read_expiry(expires)
    rest = json.loads(line)
    with _store(state, make=True) as (service, note):
        _check_classes(service, rest.get("classes", ()))
        sha256 = rest.pop("sha256")
        rest.pop("name")
        shuts = is_open(service.store) and not any(
            kept_key.name == name and kept_key.holds(time.time()) for kept_key in kept_keys(service.store)
        )
        if shuts:
            _say_shut(service.gateway_lives and not yes)
        add_key(service.store, service.folder, KeptKey(sha256, name, rest, time.time(), ends_s))
    _show_key({"name": name, **rest, "sha256": sha256, "key": key, "first": shuts}, note, as_json)


def _given(limits: dict[str, object], classes: tuple[str, ...]) -> dict[str, object]:
    """Limits as a key's line has them, without those that were not given."""
    given = {name: value for name, value in limits.items() if value is not None}
    names = [name.strip() for item in classes for name in item.split(",")]
    return {**given, "classes": list(dict.fromkeys(names))} if names else given


def _check_classes(service: ServiceView, names: Sequence[str]) -> None:
    """Refuse classes that the service does not have, as far as its spec can be read."""
    from potluck.core.values.service import CLASSES
    from potluck.spec.load_spec import load_spec

    unknown = set(names) - {request_class.name for request_class in CLASSES}
    if not unknown:
        return
    path = (service.store.get("spec files") or {}).get("path", "")
    try:
        known = [request_class.name for request_class in load_spec(path).policy.classes]
    except InputError:
        line = f"class {min(unknown)} is not checked: the spec of this service cannot be read"
        click.echo(f"potluck: {line}", err=True)
        return
    for name in sorted(unknown):
        if name not in known:
            raise UnknownNameError("--classes", name, known)


def _say_shut(ask: bool) -> None:
    """Before clients without a key are locked out; a person at a terminal is asked."""
    click.echo(f"potluck: {SHUT}", err=True)
    if ask and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm("Go on?", abort=True, err=True)


@keys.command()
@argument("name")
@option("--grace-h", type=click.FloatRange(0), default=24.0, help="Hours for which the key before holds.")
@state_option
@json_option
def rotate(name: str, grace_h: float, state: Path | None, as_json: bool) -> None:
    """Another key for NAME, with the same tenant and limits."""
    from potluck.control.accounts import rotate_key
    from potluck.gateway.openai.keys import new_key

    key, line = new_key(name)
    sha256 = json.loads(line)["sha256"]
    with _store(state) as (service, note):
        rotate_key(service.store, service.folder, name, sha256, time.time(), grace_h * HOUR_S)
    _show_key({"name": name, "sha256": sha256, "key": key, "grace_h": grace_h}, note, as_json)


@keys.command()
@argument("name")
@state_option
@json_option
def revoke(name: str, state: Path | None, as_json: bool) -> None:
    """Let nobody in with a key called NAME any more, within a second."""
    from potluck.control.accounts import is_open, kept_keys, revoke_key

    with _store(state) as (service, note):
        count = revoke_key(service.store, service.folder, name, time.time())
        left = sum(key.holds(time.time()) for key in kept_keys(service.store))
        shut = not left and not is_open(service.store)
    if as_json:
        render.emit_json({"name": name, "revoked": count, "left": left, "nobody_gets_in": shut})
    else:
        click.echo(f"{count} key{'s' if count > 1 else ''} of {name} revoked{note}")
    if shut:
        click.echo(f"potluck: {NOBODY}", err=True)


@keys.command("open")
@state_option
@json_option
def open_(state: Path | None, as_json: bool) -> None:
    """Let clients without a key in again; those that show one are still known by it.

    It holds until `potluck keys close` or the next `potluck keys add`. A gateway that other hosts can reach is never
    opened.
    """
    with _store(state) as (service, note):
        host = (service.store.get("gateway") or {}).get("host", LOOPBACK[0])
        if service.gateway_lives and host not in LOOPBACK:
            raise nothing(
                f"the gateway listens at {host}, where others can reach it; it always asks for keys"
            )
        _set_open(service, True, note, as_json)


@keys.command()
@state_option
@json_option
def close(state: Path | None, as_json: bool) -> None:
    """Let only clients with a key in, after `potluck keys open`."""
    with _store(state) as (service, note):
        _set_open(service, False, note, as_json)


def _set_open(service: ServiceView, opened: bool, note: str, as_json: bool) -> None:
    from potluck.control.accounts import set_open

    changed = set_open(service.store, service.folder, opened, time.time())
    what = "clients without a key are let in" if opened else "every client needs a key"
    until = "; `potluck keys close` ends that" if opened else "; `potluck keys open` ends that"
    if as_json:
        render.emit_json({"open": opened, "changed": changed})
    else:
        click.echo(f"{what}{until if changed else ' already; nothing changed'}{note}")


@keys.command("list")
@state_option
@json_option
def listed(state: Path | None, as_json: bool) -> None:
    """Show all keys that there are or were, without the keys themselves."""
    from potluck.control.accounts import is_open, kept_keys

    with _store(state) as (service, _note):
        result, without = kept_keys(service.store), is_open(service.store)
    now_s = time.time()
    rows = [_row(kept_key, now_s) for kept_key in result]
    if as_json:
        render.emit_json({"open": without, "keys": rows})
    elif not rows:
        click.echo("no keys: the gateway asks for none; `potluck keys add NAME` makes one")
    else:
        names = ("name", "tenant", "holds", "made", "ends", "limits", "sha256")
        cells = [[*(row[name] for name in names[:-1]), str(row["sha256"])[:12]] for row in rows]
        render.table("", names, cells)
        if without:
            click.echo("clients without a key are let in; `potluck keys close` ends that")
        elif not any(kept_key.holds(now_s) for kept_key in result):
            click.echo(NOBODY)


@keys.command()
@argument("name")
@key_options
@json_option
def new(
    name: str,
    tenant: str | None,
    classes: tuple[str, ...],
    expires: str | None,
    as_json: bool,
    **limits: object,
) -> None:
    """Make a key called NAME: its line for a file of `potluck serve --keys` goes to stdout, the key to stderr.

    The key itself is kept nowhere: only its SHA-256 is in the line.
    """
    from potluck.gateway.openai.keys import new_key

    key, line = new_key(name, tenant, **_given({**limits, "expires": expires}, classes))
    if as_json:
        render.emit_json({"key": key, **json.loads(line)})
        return
    click.echo(f"key, shown only now:  {key}", err=True)
    click.echo(line)


@contextmanager
def _store(state: Path | None, *, make: bool = False) -> Iterator[tuple[ServiceView, str]]:
    """The state, and what to say of its gateway; with `make`, a folder that has none yet gets one."""
    from potluck.control.state_store import StateStore

    if make and state is not None and not (state / "state.db").is_file():
        StateStore(state / "state.db").close()
    with opened(state, running=False) as service:
        place = service.store.get("gateway") or {}
        old = service.gateway_lives and not place.get("keyed")
        note = "; the gateway that runs was started without keys: it counts after `potluck down` and `up`"
        yield service, note if old else ""


def _show_key(said: dict[str, object], note: str, as_json: bool) -> None:
    if as_json:
        render.emit_json(said)
    else:
        click.echo(f"key, shown only now:  {said['key']}{note}")


def _row(key: KeptKey, now_s: float) -> dict[str, object]:
    limits = {name: value for name, value in key.line.items() if name != "tenant"}
    shown = {
        name: "+".join(map(str, value)) if isinstance(value, list) else value
        for name, value in limits.items()
    }
    return {
        **limits,
        "name": key.name,
        "tenant": key.line.get("tenant"),
        "holds": "yes" if key.holds(now_s) else "revoked" if key.revoked_s is not None else "expired",
        "made": _day(key.made_s),
        "ends": None if key.ends_s is None else _day(key.ends_s),
        "limits": ", ".join(f"{name} {value}" for name, value in shown.items()),
        "sha256": key.sha256,
    }


def _day(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%MZ")


USUAL = ("key", "tenant", "model")
UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"([0-9]{1,6})([mhd])\Z")


@click.command()
@state_option
@option("--since", help="A day or time (UTC), such as 2031-01-31, or a span: 24h, 30d. Else all.")
@option("--until", help="The same; the hour in which it lies is counted.")
@option(
    "--by",
    multiple=True,
    metavar="NAME",
    help="One row for each of: hour, day, key, tenant, model, class, outcome; may be given several times. "
    f"Else {', '.join(USUAL)}.",
)
@json_option
def usage(
    state: Path | None, since: str | None, until: str | None, by: tuple[str, ...], as_json: bool
) -> None:
    """Show requests and tokens of each key, tenant and model, in whole hours (UTC).

    Tokens are those of requests that were answered, or that their client left; with `--by outcome`, of all.
    """
    from potluck.control.accounts import count_all, used

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
    elif not rows:
        click.echo("no requests were recorded" + (f" since {since}" if since else ""))
    else:
        render.table("", list(rows[0]), [list(row.values()) for row in rows])


def moment(text: str, now_s: float, field: str) -> float:
    span = _SPAN.match(text)
    if span is not None:
        return max(0.0, now_s - int(span[1]) * UNITS_S[span[2]])
    try:
        result = datetime.fromisoformat(text)
        return max(0.0, (result if result.tzinfo else result.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise InputError(
            field, f"{text!r} is no day, time or span, such as 2031-01-31, 2031-01-31T12:00, 24h or 30d"
        ) from None
