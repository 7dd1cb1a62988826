"""`potluck up`: from a spec to a running service on this machine."""

from __future__ import annotations

import json
import signal
import threading
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.trying.simulation import Inputs, policy_of, read_inputs

if TYPE_CHECKING:
    from potluck.control.loop import Turn
    from potluck.control.planning import Planner
    from potluck.core.brain.policy import Policy
    from potluck.core.values.plan import Plan

STATE = Path.home() / ".local" / "state" / "potluck"
_file = click.Path(dir_okay=False, path_type=Path)


def demo() -> Path:
    """The spec that is served when none is named."""
    return Path(str(resources.files("potluck.cli") / "data" / "demo.yaml"))


@click.command()
@click.argument("paths", metavar="[PLAN] [SPEC]", nargs=-1, type=_file)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: a free one.")
@click.option(
    "--state", type=click.Path(path_type=Path), help="A folder for state and logs; else one by the spec."
)
@click.option(
    "--engine",
    "style",
    default="emulated",
    show_default=True,
    type=click.Choice(["emulated", "pretended"]),
    help="emulated: the small model at the planned GPUs' pace; pretended: made-up tokens at that pace.",
)
@click.option("--advise", is_flag=True, help="Only recommend other plans; change nothing by itself.")
@click.option(
    "--market",
    type=_file,
    help="Prices, availability and notices in a file that is watched; see docs/operating.md.",
)
@click.option("--policy", multiple=True, help="NAME=VALUE of a run-time rule, over the spec's.")
@click.option(
    "--time-limit", "time_limit_s", type=float, default=30.0, show_default=True, help="To plan, in s."
)
@click.option("--json", "as_json", is_flag=True, help="Say where it listens as JSON.")
def up(
    paths: tuple[Path, ...],
    port: int,
    state: Path | None,
    style: str,
    advise: bool,
    market: Path | None,
    policy: tuple[str, ...],
    time_limit_s: float,
    as_json: bool,
) -> None:
    """Plan, start engines and a gateway on this machine, and look after them until Ctrl-C.

    \b
    Examples:
      potluck up                     a small mixed fleet that needs no GPU
      potluck up potluck.yaml        your own
    """
    from potluck.control.launch.command import EngineMaker
    from potluck.control.market import MarketFile
    from potluck.control.stand import Stand, StandSettings
    from potluck.engine.shipped import shipped_model

    spec_path = paths[-1] if paths else demo()
    chosen = paths if paths else (spec_path,)
    inputs, rules = read_inputs(chosen, time_limit_s, _say, lambda spec: policy_of(policy, spec.policy))
    folder = state or STATE / spec_path.stem
    names = tuple((model.name, model.model.name) for model in inputs.spec.models)
    files = tuple((name, shipped_model()) for name, _ in names)
    settings = StandSettings(
        folder,
        spec_path.resolve(),
        port,
        EngineMaker(style, files, names),
        (
            *(f"--files={name}={path}" for name, path in files),
            *(f"--policy={each}" for each in (*policy, *(["advise=true"] if advise else []))),
        ),
        advise,
        None if market is None else MarketFile(market, inputs.spec.regions),
    )
    stand = Stand(settings, inputs.plan, _planner(inputs, rules, time_limit_s))
    _run(stand, stand.plan, [name for name, _ in names], as_json)


def _planner(inputs: Inputs, rules: Policy, time_limit_s: float) -> Planner | None:
    from potluck.control.replanner import Replanner

    return None if rules.scaling == "none" else Replanner(inputs.problem, time_limit_s)


def _run(stand: object, plan: Plan, models: list[str], as_json: bool) -> None:
    from potluck.control.stand import Stand

    assert isinstance(stand, Stand)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    told = False
    last = ""

    def seen(turn: Turn) -> None:
        nonlocal told, last
        line = f"{turn.up} of {turn.wanted} engines are up" + (f"; {turn.waiting[0]}" if turn.waiting else "")
        if line != last and not told:
            _say(line)
        last = line
        if not told and turn.wanted and turn.up == turn.wanted and stand.ready:
            told = True
            _ready(stand.url, plan, models, as_json)

    try:
        stand.run(stop.is_set, seen)
        _say("draining")
        made = stand.down()
        _say("stopped" + (f"; {made} processes had to be made to end" if made else ""))
    finally:
        stand.close()


def _ready(url: str, plan: Plan, models: list[str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"url": url, "models": models, "cost_usd_per_h": plan.cost_usd_per_h}))
        return
    click.echo(
        f"Serving {', '.join(models)} at {url}  (${plan.cost_usd_per_h:.2f}/h as planned; Ctrl-C drains)"
    )
    for each in plan.deployments:
        click.echo(f"  {each.count} x {each.template} in {each.region}")
    body = json.dumps(
        {
            "model": models[0],
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": True,
            "max_tokens": 40,
        }
    )
    click.echo(
        f"Try it:\n  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    )


def _say(line: str) -> None:
    click.echo(line, err=True)
