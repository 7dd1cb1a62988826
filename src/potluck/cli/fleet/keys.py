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
KEYS_REQUIRED = (
    "from now on every client of this service needs a key; `potluck keys open` allows requests without one"
)
NO_VALID_KEY = (
    "no key is valid: all requests are refused; `potluck keys add NAME` makes a key, "
    "`potluck keys open` allows requests without one"
)


@click.group()
def keys() -> None:
    """Manage API keys of a service, or of a gateway's own key file (docs/gateway.md).

    \b
    Examples:
      potluck keys add ann --tenant research     the running service requires keys from now on
      potluck keys add bob --requests-per-min 60 --tokens-per-min 90000 --classes batch
      potluck keys rotate ann                    new key; the old one stays valid for a day
      potluck keys open                          allow requests without a key
      potluck keys new ann >> keys.jsonl         for `potluck serve --keys keys.jsonl`
    """


key_options = option_group(
    option("--tenant", help="Tenant for fair shares and usage. Default: the key's name."),
    option(
        "--requests-per-min", type=click.FloatRange(0, min_open=True), help="Limit of requests per minute."
    ),
    option(
        "--tokens-per-min",
        type=click.FloatRange(0, min_open=True),
        help="Limit of prompt and output tokens per minute.",
    ),
    option("--concurrent", type=click.IntRange(1), help="Limit of concurrent requests."),
    option(
        "--classes",
        multiple=True,
        metavar="NAME[,NAME...]",
        help="Allowed request classes, such as standard,batch. Default: all. "
        "Requests without a class get standard if allowed, else the first.",
    ),
    option("--expires", help="Expiry date or time, such as 2031-01-31."),
)


@keys.command()
@argument("name")
@key_options
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
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
    """Create a key called NAME; it is valid within a second.

    The first key makes keys required for all clients; on a terminal this asks for confirmation. `potluck keys open`
    reverts that. The key is shown once and not stored.
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
    """Refuse classes that the service's spec does not have."""
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
    """Warn that keys become required; asks for confirmation on a terminal."""
    click.echo(f"potluck: {KEYS_REQUIRED}", err=True)
    if ask and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm("Go on?", abort=True, err=True)


@keys.command()
@argument("name")
@option("--grace-h", type=click.FloatRange(0), default=24.0, help="Hours for which the old key stays valid.")
@state_option
@json_option
def rotate(name: str, grace_h: float, state: Path | None, as_json: bool) -> None:
    """Create a new key for NAME with the same tenant and limits."""
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
    """Invalidate all keys called NAME, within a second."""
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
        click.echo(f"potluck: {NO_VALID_KEY}", err=True)


@keys.command("open")
@state_option
@json_option
def open_(state: Path | None, as_json: bool) -> None:
    """Allow requests without a key.

    It lasts until `potluck keys close` or the next `potluck keys add`. Requests with a key keep their tenant and
    limits. A gateway that other hosts can reach always requires keys.
    """
    with _store(state) as (service, note):
        host = (service.store.get("gateway") or {}).get("host", LOOPBACK[0])
        if service.gateway_lives and host not in LOOPBACK:
            raise nothing(
                f"the gateway listens at {host}, which other hosts can reach; it always requires keys"
            )
        _set_open(service, True, note, as_json)


@keys.command()
@state_option
@json_option
def close(state: Path | None, as_json: bool) -> None:
    """Require keys again after `potluck keys open`."""
    with _store(state) as (service, note):
        _set_open(service, False, note, as_json)


def _set_open(service: ServiceView, opened: bool, note: str, as_json: bool) -> None:
    from potluck.control.accounts import set_open

    changed = set_open(service.store, service.folder, opened, time.time())
    what = "requests without a key are allowed" if opened else "every client needs a key"
    until = "; `potluck keys close` ends that" if opened else "; `potluck keys open` ends that"
    if as_json:
        render.emit_json({"open": opened, "changed": changed})
    else:
        click.echo(f"{what}{until if changed else ' already; nothing changed'}{note}")


@keys.command("list")
@state_option
@json_option
def listed(state: Path | None, as_json: bool) -> None:
    """List valid, expired and revoked keys, without the secrets."""
    from potluck.control.accounts import is_open, kept_keys

    with _store(state) as (service, _note):
        result, without = kept_keys(service.store), is_open(service.store)
    now_s = time.time()
    rows = [_row(kept_key, now_s) for kept_key in result]
    if as_json:
        render.emit_json({"open": without, "keys": rows})
    elif not rows:
        click.echo("no keys: none are required; `potluck keys add NAME` makes one")
    else:
        names = ("name", "tenant", "valid", "created", "expires", "limits", "sha256")
        fields = ("name", "tenant", "holds", "made", "ends", "limits")
        cells = [[*(row[name] for name in fields), str(row["sha256"])[:12]] for row in rows]
        render.table("", names, cells)
        if without:
            click.echo("requests without a key are allowed; `potluck keys close` ends that")
        elif not any(kept_key.holds(now_s) for kept_key in result):
            click.echo(NO_VALID_KEY)


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
    """Create a key called NAME for a key file of `potluck serve --keys`.

    The line for the file, with the key's SHA-256, goes to stdout; the key goes to stderr and is not stored.
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
    """The service and a note on its gateway; `make` creates the state of a new folder."""
    from potluck.control.state_store import StateStore

    if make and state is not None and not (state / "state.db").is_file():
        StateStore(state / "state.db").close()
    with opened(state, running=False) as service:
        place = service.store.get("gateway") or {}
        old = service.gateway_lives and not place.get("keyed")
        note = "; the running gateway was started without keys: valid after `potluck down` and `up`"
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


DEFAULT_GROUPING = ("key", "tenant", "model")
UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"([0-9]{1,6})([mhd])\Z")


@click.command()
@state_option
@option("--since", help="Start: date or time (UTC), such as 2031-01-31, or a span: 24h, 30d.")
@option("--until", help="End, in the same format; its hour is included.")
@option(
    "--by",
    multiple=True,
    metavar="NAME",
    help="Group by hour, day, key, tenant, model, class or outcome; repeatable. "
    f"Default: {', '.join(DEFAULT_GROUPING)}.",
)
@json_option
def usage(
    state: Path | None, since: str | None, until: str | None, by: tuple[str, ...], as_json: bool
) -> None:
    """Show requests and tokens of each key, tenant and model, in whole hours (UTC).

    Tokens of failed requests count only with `--by outcome`; those of requests that clients cancelled always count.
    """
    from potluck.control.accounts import count_all, used

    now_s = time.time()
    since_s = 0.0 if since is None else moment(since, now_s, "--since")
    until_s = None if until is None else moment(until, now_s, "--until")
    if until_s is not None and until_s < since_s:
        raise InputError("--until", f"{until} is before --since {since}")
    chosen = tuple(dict.fromkeys(by)) or DEFAULT_GROUPING
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
