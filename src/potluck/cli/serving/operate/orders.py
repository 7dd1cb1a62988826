"""`potluck drain`, `flip`, `scale`, `down`: what a person wants of a running service. Each is noted as by hand."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from potluck.cli.common import render
from potluck.cli.serving.operate.which_service import nothing, opened, state_option
from potluck.core.errors import InputError, PotluckError, UnknownNameError

if TYPE_CHECKING:
    from potluck.control.service_view import ServiceView
    from potluck.core.values.plan import Plan

CONTROLLER_S = 90.0
"""In which a controller that was asked to end has drained all."""


def _with_gateway(service: ServiceView) -> ServiceView:
    if not service.gateway_lives:
        raise nothing(f"no gateway runs in {service.folder}; `potluck status` says what does")
    return service


def _replica(service: ServiceView, text: str) -> str:
    """The replica that is meant: its name, a part that only it has (`east#1/0`), or its engine's name."""
    names = [str(each["replica"]) for each in _with_gateway(service).client.snapshot().get("replicas", ())]
    engines = {each.name: each.replica for each in service.store.instances() if each.replica}
    if text in engines:
        return engines[text]
    return meant("REPLICA", text, names)


def meant(field: str, text: str, names: list[str]) -> str:
    """The only name that has this as a part of it."""
    if not text:
        raise InputError(field, f"is empty; there are {', '.join(names) or 'none'}")
    found = [text] if text in names else [name for name in names if text in name]
    if len(found) > 1:
        raise InputError(field, f"{text!r} is a part of several: {', '.join(found)}")
    if not found:
        raise UnknownNameError(field, text, names)
    return found[0]


def _note(service: ServiceView, kind: str, what: str) -> None:
    from potluck.control.manual_changes import BY_HAND

    service.store.note(time.time(), kind, what, BY_HAND)


@click.command()
@click.argument("replica")
@state_option
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def drain(replica: str, state: Path | None, as_json: bool) -> None:
    """Let REPLICA finish what it has, stop its engine, and have a fresh one take its place.

    Replicas that work with it in one copy (a pair, a combo) go with it. To have fewer for good use `potluck scale`.
    A part of the name will do where only one replica has it: 'east#1/0'; or the name of its engine.
    """
    from potluck.control.manual_changes import leave, stay

    with opened(state) as service:
        replica = _replica(service, replica)
        engines = {each.replica: each.name for each in service.store.instances() if each.replica}
        client, mine = service.client, [engines[replica]] if replica in engines else []
        leave(service.store, mine)  # before it is empty, which it may be at once
        try:
            said = client.drain(replica)
        except PotluckError:
            stay(service.store, mine)
            raise
        leave(service.store, (engines[each] for each in said.get("with_it", ()) if each in engines))
        _note(service, "drain", replica)
        lives = service.controller_lives
    if as_json:
        render.emit_json(said)
        return
    click.echo(f"{replica} drains; {said.get('open_requests', 0)} requests are open there")
    for each in said.get("with_it", ()):
        click.echo(f"  with it {each}, of the same copy")
    _unless(lives, "its engine is stopped and replaced")


@click.command()
@click.argument("replica")
@click.argument("role", type=click.Choice(["prefill", "decode"]))
@state_option
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def flip(replica: str, role: str, state: Path | None, as_json: bool) -> None:
    """Give REPLICA another ROLE, weights and requests kept.

    The role stays, whatever plans and scaling say, until it is flipped back to the planned one.
    """
    with opened(state) as service:
        replica = _replica(service, replica)
        said = service.client.flip(replica, role)
        _note(service, "flip", f"{replica} from {said.get('before')} to {said.get('role')}")
    if as_json:
        render.emit_json(said)
    elif said.get("role") == said.get("planned"):
        click.echo(f"{replica} is {said['role']}, as planned; rules may change that again")
    else:
        click.echo(f"{replica} is {said.get('role')} until you flip it back to {said.get('planned')}")


@click.command()
@click.argument("what", metavar="TEMPLATE@REGION=COUNT", required=False)
@state_option
@click.option(
    "--auto",
    is_flag=True,
    help="Hand the fleet back: the planner's last plan holds again, and its next ones.",
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def scale(what: str | None, state: Path | None, auto: bool, as_json: bool) -> None:
    """Have COUNT copies of a plan's TEMPLATE in a REGION: a new version of the plan, made by hand.

    It holds until `potluck scale --auto`: plans that the planner makes meanwhile are only noted as advice. A part of
    the template's name will do where only one has it. More copies than there are nodes for are refused.

    \b
    Examples:
      potluck scale 'L40S@west=2'
      potluck scale --auto
    """
    if auto == (what is not None):
        raise InputError("TEMPLATE@REGION=COUNT", "is needed, or --auto, and not both")
    with opened(state) as service:
        said = _handed_back(service) if what is None else _scaled(_with_gateway(service), what)
        lives = service.controller_lives
    if as_json:
        render.emit_json(said)
        return
    click.echo(said["line"])
    for model in said.get("unserved", ()):
        click.echo(f"note: nothing is left to serve {model}")
    if what is not None:
        _unless(lives, "engines are started and stopped")
        if said["scaling"] not in (None, "none"):
            click.echo(
                f"note: scaling ({said['scaling']}) goes on from there, and says so in `potluck events`"
            )


def _scaled(service: ServiceView, what: str) -> dict[str, Any]:
    from potluck.control.manual_changes import BY_HAND, put_plan, scaled

    key, _, number = what.rpartition("=")
    template, _, region = key.rpartition("@")
    if not template or not region or not number.isdecimal():
        raise InputError("TEMPLATE@REGION=COUNT", f"{what!r} is not of that form, such as 'L40S@west=2'")
    newest = service.store.plan()
    if newest is None:
        raise nothing(f"there is no plan in {service.folder} yet")
    template = meant("TEMPLATE", template, [each.name for each in newest.plan.templates])
    what = f"{template}@{region}={number}"
    snapshot = service.client.snapshot()
    costs = {
        each["region"]: each["usd_per_h"]
        for each in snapshot.get("copies", ())
        if each["template"] == template
    }
    available: Counter[tuple[str, str]] = Counter()
    for place in snapshot.get("regions", ()):
        for offer in place["offers"]:
            available[place["name"], offer["node"]] += offer["available"]
    plan = scaled(newest.plan, template, region, int(number), costs, available)
    if plan.deployments == newest.plan.deployments:
        return {
            "version": newest.version,
            "scaling": None,
            "line": f"there are to be {number} already; nothing changed",
        }
    reason = f"{BY_HAND}: {what}"
    version = put_plan(service.store, service.client.set_plan, plan, reason, time.time())
    _note(service, "plan", f"version {version}, ${plan.cost_usd_per_h:.2f}/h, {what}")
    return {
        "version": version,
        "cost_usd_per_h": plan.cost_usd_per_h,
        "scaling": snapshot.get("scaling"),
        "unserved": _unserved(plan),
        "line": f"plan {version}: {what}, ${plan.cost_usd_per_h:.2f}/h (was ${newest.plan.cost_usd_per_h:.2f}/h)",
    }


def _unserved(plan: Plan) -> list[str]:
    """Models of the plan without any copy."""
    served = {plan.template(each.template).model for each in plan.deployments if each.count}
    return sorted({each.model for each in plan.templates} - served)


def _handed_back(service: ServiceView) -> dict[str, Any]:
    from potluck.control.manual_changes import is_by_hand, planned_last, put_plan

    newest = service.store.plan()
    if newest is None or not is_by_hand(newest):
        return {
            "version": newest.version if newest else None,
            "line": "no plan made by hand holds; nothing changed",
        }
    last = planned_last(service.store) or newest
    reason = f"handed back: as version {last.version}"
    tell = service.client.set_plan if service.gateway_lives else _tell_nobody
    version = put_plan(service.store, tell, last.plan, reason, time.time())
    _note(service, "plan", f"version {version}, ${last.plan.cost_usd_per_h:.2f}/h, as version {last.version}")
    return {
        "version": version,
        "as_version": last.version,
        "cost_usd_per_h": last.plan.cost_usd_per_h,
        "line": f"plan {version}: the planner's plan {last.version} holds again, "
        f"${last.plan.cost_usd_per_h:.2f}/h (was ${newest.plan.cost_usd_per_h:.2f}/h), and so do its next ones",
    }


def _tell_nobody(plan: Plan, reason: str, version: int) -> None:
    """No gateway runs; the next one begins with what is written down."""


def _unless(controller_lives: bool, what: str) -> None:
    if not controller_lives:
        click.echo(f"note: no controller runs there; {what} once `potluck up` does")


@click.command()
@state_option
@click.option(
    "--timeout",
    "within_s",
    default=CONTROLLER_S,
    show_default=True,
    type=click.FloatRange(1.0),
    help="Seconds in which a controller that runs must have stopped all.",
)
@click.option("--json", "as_json", is_flag=True, help="For machines: one JSON object.")
def down(state: Path | None, within_s: float, as_json: bool) -> None:
    """Drain a service and stop all of it: gateway, engines, controller."""
    from potluck.cli.serving.up.clusters import launcher_of
    from potluck.control.local_stack import pid_of, stop_all, wait
    from potluck.control.state_store import LASTS_S, Lease

    with opened(state, running=False, left=True) as service:
        controller = pid_of(service.store.get("controller"))
        if service.controller_lives and controller is not None:
            _note(service, "down", "the controller is asked to end")
            click.echo("draining", err=True)
            os.kill(controller.number, signal.SIGTERM)
            if wait([controller], within_s):
                raise nothing(
                    f"process {controller.number} still drains after {within_s:g} s; `potluck events`"
                )
            _say_stopped(service, None, as_json)  # how, its own output says
            return
        if not service.gateway_lives and not service.store.instances():
            raise nothing(f"nothing runs in {service.folder}")
        lease, until_s = Lease(service.store), time.monotonic() + LASTS_S + 1.0
        while not lease.renew():  # one that was killed a moment ago
            if time.monotonic() > until_s:
                raise nothing("another controller acts on this state; ask it to end first")
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
        click.echo("stopped" + (f"; {made} processes had to be made to end" if made else ""))
