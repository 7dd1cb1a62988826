"""`potluck fleet` and `down`: changes of a running service by an operator, recorded as made by hand."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
from click import argument, option

from potluck.cli.common import render
from potluck.cli.fleet.service import (
    at_options,
    client_at,
    json_option,
    nothing,
    opened,
    state_option,
    with_gateway,
)
from potluck.core.errors import InputError, PotluckError, UnknownNameError

if TYPE_CHECKING:
    from potluck.control.gateway_client import GatewayClient
    from potluck.control.service_view import ServiceView
    from potluck.core.values.plan import Plan


STOP_TIMEOUT_S = 90.0  # For the controller to drain all engines.


def _engines(service: ServiceView) -> dict[str, str]:
    """Replica name to engine name."""
    return {instance.replica: instance.name for instance in service.store.instances() if instance.replica}


def _replica(service: ServiceView, text: str) -> str:
    """The replica of this name, unique part of a name (`east#1/0`), or engine name."""
    names = [str(item["replica"]) for item in with_gateway(service).client.snapshot().get("replicas", ())]
    by_engine = {name: replica for replica, name in _engines(service).items()}
    return by_engine.get(text) or meant("REPLICA", text, names)


def meant(field: str, text: str, names: list[str]) -> str:
    """The only name that contains `text`."""
    if not text:
        raise InputError(field, f"is empty; there are {', '.join(names) or 'none'}")
    texts = [text] if text in names else [name for name in names if text in name]
    if len(texts) > 1:
        raise InputError(field, f"{text!r} is a part of several: {', '.join(texts)}")
    if not texts:
        raise UnknownNameError(field, text, names)
    return texts[0]


def _note(service: ServiceView, kind: str, what: str) -> None:
    from potluck.control.manual_changes import BY_HAND

    service.store.note(time.time(), kind, what, BY_HAND)


@click.group()
def fleet() -> None:
    """Change the replicas of a running service."""


@fleet.command()
@argument("replica")
@state_option
@json_option
def drain(replica: str, state: Path | None, as_json: bool) -> None:
    """Replace the engine of REPLICA after its requests have finished.

    The other replicas of its copy (of a pair or combo) are replaced too. To reduce the number of copies use
    `potluck fleet scale`. REPLICA is a unique part of its name, such as 'east#1/0', or the name of its engine.
    """
    from potluck.control.manual_changes import leave, stay

    with opened(state) as service:
        replica = _replica(service, replica)
        engines = _engines(service)
        client, mine = service.client, [engines[replica]] if replica in engines else []
        leave(service.store, mine)  # before it is empty, which it may be at once
        try:
            text = client.drain(replica)
        except PotluckError:
            stay(service.store, mine)
            raise
        leave(service.store, (engines[entry] for entry in text.get("with_it", ()) if entry in engines))
        _note(service, "drain", replica)
        lives = service.controller_lives
    if as_json:
        render.emit_json(text)
        return
    click.echo(f"{replica} is draining; {text.get('open_requests', 0)} open requests")
    for item in text.get("with_it", ()):
        click.echo(f"  {item} of the same copy is draining too")
    _unless(lives, "its engine is stopped and replaced")


@fleet.command()
@argument("replica")
@argument("role", type=click.Choice(["prefill", "decode"]))
@state_option
@json_option
def flip(replica: str, role: str, state: Path | None, as_json: bool) -> None:
    """Change the role of REPLICA to prefill or decode.

    Weights stay loaded and running requests finish. Plans and scaling do not change the role again until the
    replica is flipped back to its planned role.
    """
    with opened(state) as service:
        replica = _replica(service, replica)
        text = service.client.flip(replica, role)
        _note(service, "flip", f"{replica} from {text.get('before')} to {text.get('role')}")
    if as_json:
        render.emit_json(text)
    elif text.get("role") == text.get("planned"):
        click.echo(f"{replica} is {text['role']}, as planned; scaling may change the role again")
    else:
        click.echo(f"{replica} is {text.get('role')} until it is flipped back to {text.get('planned')}")


@fleet.command()
@argument("what", metavar="TEMPLATE@REGION=COUNT", required=False)
@state_option
@option("--auto", is_flag=True, help="Return to the planner's last plan.")
@json_option
def scale(what: str | None, state: Path | None, auto: bool, as_json: bool) -> None:
    """Set the number of copies of TEMPLATE in REGION.

    This makes a new version of the plan. Until `potluck fleet scale --auto`, new plans of the planner are recorded
    as advice only. TEMPLATE is a unique part of the template's name. More copies than there are nodes for are
    refused.

    \b
    Examples:
      potluck fleet scale 'L40S@west=2'
      potluck fleet scale --auto
    """
    if auto == (what is not None):
        raise InputError("TEMPLATE@REGION=COUNT", "is needed, or --auto, and not both")
    with opened(state) as service:
        handed_back = _handed_back(service) if what is None else _scaled(with_gateway(service), what)
        lives = service.controller_lives
    if as_json:
        render.emit_json(handed_back)
        return
    click.echo(handed_back["line"])
    for model in handed_back.get("unserved", ()):
        click.echo(f"note: no copy is left for {model}")
    if what is not None:
        _unless(lives, "engines are started and stopped")
        if (scaling := handed_back["scaling"]) not in (None, "none"):
            click.echo(f"note: scaling ({scaling}) continues from there; see `potluck events`")


def _scaled(service: ServiceView, what: str) -> dict[str, Any]:
    from potluck.control.manual_changes import BY_HAND, put_plan, scaled
    from potluck.core.codec import decode
    from potluck.core.values.fleet_cost import offers_in
    from potluck.core.values.types import Region

    key, _, number = what.rpartition("=")
    template, _, region = key.rpartition("@")
    if not template or not region or not number.isdecimal():
        raise InputError("TEMPLATE@REGION=COUNT", f"{what!r} is not of that form, such as 'L40S@west=2'")
    newest = service.store.plan()
    if newest is None:
        raise nothing(f"there is no plan in {service.folder} yet")
    template = meant("TEMPLATE", template, [item.name for item in newest.plan.templates])
    what = f"{template}@{region}={number}"
    snapshot = service.client.snapshot()
    costs = {
        item["region"]: item["usd_per_h"]
        for item in snapshot.get("copies", ())
        if item["template"] == template
    }
    regions = tuple(decode(Region, place) for place in snapshot.get("regions", ()))
    available = {key: offer.available for key, offer in offers_in(regions).items()}
    plan = scaled(newest.plan, template, region, int(number), costs, available, regions)
    if plan.deployments == newest.plan.deployments:
        line = f"the plan already has {number} copies; nothing changed"
        return {"version": newest.version, "scaling": None, "line": line}
    reason = f"{BY_HAND}: {what}"
    version = put_plan(service.store, service.client.set_plan, plan, reason, time.time())
    _note(service, "plan", f"version {version}, ${plan.total_usd_per_h:.2f}/h, {what}")
    return {
        "version": version,
        "cost_usd_per_h": plan.total_usd_per_h,
        "scaling": snapshot.get("scaling"),
        "unserved": _unserved(plan),
        "line": f"plan {version}: {what}, ${plan.total_usd_per_h:.2f}/h (was ${newest.plan.total_usd_per_h:.2f}/h)",
    }


def _unserved(plan: Plan) -> list[str]:
    served = {plan.template(deployment.template).model for deployment in plan.deployments if deployment.count}
    return sorted({item.model for item in plan.templates} - served)


def _handed_back(service: ServiceView) -> dict[str, Any]:
    from potluck.control.manual_changes import is_by_hand, planned_last, put_plan

    newest = service.store.plan()
    if newest is None or not is_by_hand(newest):
        return {
            "version": newest.version if newest else None,
            "line": "no plan made by hand is in force; nothing changed",
        }
    last = planned_last(service.store) or newest
    reason = f"handed back: as version {last.version}"
    # A gateway that starts later reads the plan from the store.
    tell = service.client.set_plan if service.gateway_lives else lambda plan, reason, version: None
    version = put_plan(service.store, tell, last.plan, reason, time.time())
    _note(
        service, "plan", f"version {version}, ${last.plan.total_usd_per_h:.2f}/h, as version {last.version}"
    )
    return {
        "version": version,
        "as_version": last.version,
        "cost_usd_per_h": last.plan.total_usd_per_h,
        "line": f"plan {version}: back to the planner's plan {last.version}, "
        f"${last.plan.total_usd_per_h:.2f}/h (was ${newest.plan.total_usd_per_h:.2f}/h); its next plans apply again",
    }


def _unless(controller_lives: bool, what: str) -> None:
    if not controller_lives:
        click.echo(f"note: no controller is running; {what} after `potluck up`")


@click.command()
@state_option
@option("--timeout", "within_s", default=STOP_TIMEOUT_S, type=click.FloatRange(1.0), help="Time limit in s.")
@json_option
def down(state: Path | None, within_s: float, as_json: bool) -> None:
    """Drain a service and stop its gateway, engines and controller."""
    from potluck.cli.up.clusters import launcher_of
    from potluck.control.local_stack import pid_of, stop_all, wait
    from potluck.control.state_store import CONTROLLER_LEASE_S, Lease

    with opened(state, running=False, left=True) as service:
        controller = pid_of(service.store.get("controller"))
        if service.controller_lives and controller is not None:
            _note(service, "down", "the controller was told to stop")
            click.echo("draining", err=True)
            os.kill(controller.number, signal.SIGTERM)
            if wait([controller], within_s):
                raise nothing(
                    f"process {controller.number} is still draining after {within_s:g} s; see `potluck events`"
                )
            _say_stopped(service, None, as_json)  # how, its own output says
            return
        if not service.gateway_lives and not service.store.instances():
            raise nothing(f"nothing runs in {service.folder}")
        lease, until_s = Lease(service.store), time.monotonic() + CONTROLLER_LEASE_S + 1.0
        while not lease.renew():  # one that was killed a moment ago
            if time.monotonic() > until_s:
                raise nothing("another controller uses this state folder; stop it first")
            time.sleep(0.2)
        try:
            made = stop_all(service.store, "by hand; no controller ran", launcher=launcher_of(service.store))
        finally:
            lease.release()
        _say_stopped(service, made, as_json)


def _say_stopped(service: ServiceView, made: int | None, as_json: bool) -> None:
    if as_json:
        render.emit_json({"state": str(service.folder), "stopped": True, "made_to_end": made})
    else:
        click.echo("stopped" + (f"; {made} processes had to be killed" if made else ""))


@fleet.command()
@argument("name", metavar="REPLICA|HOST")
@at_options
@state_option
@json_option
def cordon(name: str, **options: Any) -> None:
    """Send no new requests to a replica or host.

    No replacement is started. It lasts until `potluck fleet uncordon`, also for engines restarted at the same
    address. HOST is the host name in engine addresses or of the spec's pool. To replace a replica use `potluck
    fleet drain`.

    \b
    Examples:
      potluck fleet cordon 'east#1/0'
      potluck fleet cordon 10.0.0.5 --at https://10.0.0.9:8001 --key-file admin.key --ca ca.pem
    """
    _cordon(name, lift=False, **options)


@fleet.command()
@argument("name", metavar="REPLICA|HOST")
@at_options
@state_option
@json_option
def uncordon(name: str, **options: Any) -> None:
    """Send new requests to a cordoned REPLICA or HOST again."""
    _cordon(name, lift=True, **options)


def _cordon(name: str, lift: bool, at: str | None, state: Path | None, as_json: bool, **access: Any) -> None:
    if at is not None:
        answer = _ask(client_at(at, state=state, **access), {}, name, lift)
    else:
        with opened(state) as service:
            engines = {engine: replica for replica, engine in _engines(service).items()}
            answer = _ask(with_gateway(service).client, engines, name, lift)
    if as_json:
        render.emit_json(answer)
        return
    for item in answer["changed"]:
        click.echo(f"{item} gets {'new requests again' if lift else 'no new requests'}")
    if not answer["changed"]:
        click.echo("no replica is affected now")
    click.echo(f"cordoned: {', '.join(answer['cordoned']) or 'nothing'}")


def _ask(client: GatewayClient, engines: dict[str, str], name: str, lift: bool) -> dict[str, Any]:
    """Cordon or lift: a host by its full name, else a replica by a unique part of its name or its engine's."""
    snapshot = client.snapshot()
    marks = snapshot.get("wanted", {}).get("cordoned", ())
    hosts = {urlsplit(str(item["url"])).hostname for item in snapshot.get("engines", ())}
    if name in hosts or name in marks:
        return client.cordon(name, node=True, lift=lift)
    names = [str(item["replica"]) for item in snapshot.get("replicas", ())]
    if name not in engines and not any(name in item for item in names):
        return client.cordon(name, node=True, lift=lift)
    return client.cordon(engines.get(name) or meant("REPLICA", name, names), node=False, lift=lift)


POLL_INTERVAL_S = 0.2


@fleet.command()
@at_options
@option("--within", default=600.0, type=click.FloatRange(1), help="Time limit per copy in s.")
@state_option
@option("--json", "as_json", is_flag=True, help="One JSON object per copy, then the total.")
def upgrade(at: str | None, within: float, state: Path | None, as_json: bool, **access: Any) -> None:
    """Replace all engines, one copy at a time. No request is lost.

    Install the new release first. The controller of `potluck up` restarts its own engines; engines on other hosts
    need --end-when-drained and a supervisor that restarts them (systemd, a container's restart policy).

    \b
    Examples:
      potluck fleet upgrade
      potluck fleet upgrade --at https://10.0.0.9:8001 --key-file admin.key --ca ca.pem
    """
    if at is not None:
        client = client_at(at, state=state, **access)
        _all(client, client.drain, within, as_json)
        return
    with opened(state) as service:
        if not service.gateway_lives or not service.controller_lives:
            raise nothing(f"gateway and controller must run in {service.folder}; `potluck up` starts them")
        from potluck.control.manual_changes import leave

        def drain(replica: str) -> None:
            engines = _engines(service)
            unit = replica.rpartition("/")[0]
            leave(service.store, (name for of, name in engines.items() if of.rpartition("/")[0] == unit))
            service.client.drain(replica)

        _all(service.client, drain, within, as_json)


def _all(client: GatewayClient, drain: Callable[[str], object], within_s: float, as_json: bool) -> None:
    """Replace every copy in turn; retries while the gateway does not answer or a copy cannot be drained yet."""
    from potluck.control.gateway_client import KeyRefused
    from potluck.control.manual_changes import due, lacks

    start_s, done = time.monotonic(), 0
    if not due(client.snapshot(), 0.0):
        raise nothing("no replica is serving; nothing was changed")
    while True:
        before = _within(client.snapshot, within_s)
        left = due(before, time.monotonic() - start_s)
        if not left:
            line = f"{done} {'copy' if done == 1 else 'copies'} replaced"
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
                raise nothing(f"{problem} after {within_s:g} s; {len(left) - 1} copies were not replaced")
            time.sleep(POLL_INTERVAL_S if problem else 0.0)
        done += 1
        took_s = time.monotonic() - began_s
        shown = {"replicas": list(turn.replicas), "took_s": round(took_s, 3), "left": len(left) - 1}
        line = f"{', '.join(turn.replicas)} replaced after {took_s:.1f} s; {len(left) - 1} to go"
        click.echo(json.dumps(shown) if as_json else line)


def _within(ask: Callable[[], dict[str, Any]], within_s: float) -> dict[str, Any]:
    """The answer of `ask`, retried until the time limit."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            return ask()
        except PotluckError:
            if time.monotonic() > until_s:
                raise
        time.sleep(POLL_INTERVAL_S)
