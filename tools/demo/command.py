"""`make demo`: two minutes of a service's life on this machine, told on the page."""

from __future__ import annotations

import json
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click import option

from demo.acts import the_day
from demo.play import ActOutcome
from demo.traffic import RequestCounts
from potluck.cli.common.render import emit_json, table
from potluck.core.errors import PotluckError

if TYPE_CHECKING:
    from demo.play import Player
    from potluck.cli.simulating.simulation import SimulationInputs
    from potluck.control.controller import ControllerTurn
    from potluck.control.local_stack import LocalStack


FORMAT, VERSION = "potluck.demo", 2


def told(outcomes: Sequence[ActOutcome], day_counts: RequestCounts, as_json: bool) -> int:
    """Print the day; the exit code is 0 if every act of it showed its answer and no request was lost.

    `day_counts` has all requests of the day, also those sent between two acts.
    """
    lost = day_counts.lost
    whole = len(outcomes) == len(the_day()) and all(outcome.shown for outcome in outcomes)
    if as_json:
        emit_json(
            {
                "format": FORMAT,
                "version": VERSION,
                "acts": [_row(outcome) for outcome in outcomes],
                "requests": day_counts.requests,
                "lost": lost,
                "shown": whole,
            }
        )
    elif outcomes:
        _table(outcomes)
        in_acts = sum(outcome.counts.requests for outcome in outcomes)
        between = (
            f", {day_counts.requests - in_acts} of them between acts" if day_counts.requests > in_acts else ""
        )
        missing = "" if whole else "; not every act showed its answer"
        click.echo(f"{day_counts.requests} requests{between}, {lost} lost{missing}")
    return 0 if whole and not lost else 1


def summary(outcomes: Sequence[ActOutcome], day_counts: RequestCounts) -> str:
    """The day in a few sentences, for the page."""
    again = "Start again with `make demo`."
    if not outcomes:
        return again
    first, last = outcomes[0].usd_per_h[0], outcomes[-1].usd_per_h[1]
    return (
        f"{day_counts.requests:,} requests in {len(outcomes)} acts and between them, {day_counts.lost or 'none'} "
        f"lost, SLO attainment {day_counts.attained:.0%}. "
        f"The fleet cost ${first:.2f} an hour at first and ${last:.2f} at the end. {again}"
    )


def _row(each: ActOutcome) -> dict[str, object]:
    counts = each.counts
    return {
        "act": each.act.name,
        "shown": each.shown,
        "requests": counts.requests,
        "in_time": counts.in_time,
        "refused": counts.refused,
        "lost": counts.lost,
        "why_lost": counts.why_lost,
        "moved": each.moved,
        "replicas": list(each.replicas),
        "usd_per_h": [round(usd, 3) for usd in each.usd_per_h],
        "lasted_s": round(each.lasted_s, 1),
        "result": each.result,
        "saved_usd_per_h": round(each.saved_usd_per_h, 3),
        "chosen": each.chosen,
    }


def _table(outcomes: Sequence[ActOutcome]) -> None:
    table(
        "The day",
        (
            "act",
            "requests",
            "SLO attainment",
            "refused",
            "lost",
            "moved",
            "replicas",
            "USD/h",
            "what it showed",
        ),
        [
            (
                outcome.act.name,
                outcome.counts.requests,
                f"{outcome.counts.attained:.0%}",
                outcome.counts.refused,
                outcome.counts.lost,
                outcome.moved,
                f"{outcome.replicas[0]} > {outcome.replicas[1]}",
                f"${outcome.usd_per_h[0]:.2f} > ${outcome.usd_per_h[1]:.2f}",
                outcome.result if outcome.shown else f"NOT SHOWN: {outcome.result}",
            )
            for outcome in outcomes
        ],
    )


SECONDS = 120.0
STRATEGY = "prfaas"
PLAN_S = 10.0
WINDOW_SHARE, LOOK_SHARE = 1 / 12, 1 / 30
"""Of the day: the window over which rates and lengths are watched, and how often a plan may be asked for."""
LEAST_WINDOW_S, LEAST_LOOK_S = 9.0, 2.0  # Fewer requests would not say what their lengths are.
INTERRUPTED = 130


def day() -> Path:
    return Path(str(resources.files("demo") / "data" / "day.yaml"))


@click.command()
@option(
    "--seconds",
    type=click.FloatRange(8.0, 86_400.0),
    default=SECONDS,
    help="How long the day takes, at least; an act waits until its answer shows.",
)
@option("--port", type=click.IntRange(0, 65535), default=0, help="Where clients ask; else a free one.")
@option("--stay", is_flag=True, help="Serve on after the last act, until Ctrl-C.")
@option("--json", "as_json", is_flag=True, help="What each act showed, as JSON.")
def demo(seconds: float, port: int, stay: bool, as_json: bool) -> None:
    """Play a day on a small fleet that needs no GPU: a burst, a shift, a dead node, a thin link, a flood, a sale.

    Everything but the GPUs is real: gateway, controller, planner, and engines that take the planned GPUs' time and
    make their tokens up. Its page tells what happens, what was chosen and why, and what came of it. The exit
    code is 0 if every act showed its answer, and no request was lost.

    \b
    Examples:
      make demo
      make demo ARGS='--seconds 300 --stay'
    """
    with tempfile.TemporaryDirectory(prefix="potluck-demo-") as folder:
        raise click.exceptions.Exit(_play(Path(folder), seconds, port, stay, as_json))


@dataclass(slots=True)
class _Day:
    """A service that starts, is played with and ends; `seen` and `_story` are its mutators."""

    stand: LocalStack
    inputs: SimulationInputs
    seconds: float
    stay: bool
    quiet: bool
    keys: dict[str, str]
    market: Path
    near_usd_per_h: float  # What the cheapest fleet in the region near costs alone.
    window_s: float  # After so long the service has seen only the traffic of now, and looked at it.
    stop: threading.Event = field(default_factory=threading.Event)
    interrupted: bool = False
    ready: bool = False
    story: threading.Thread | None = None
    player: Player | None = None
    failed: str = ""

    def say(self, line: str) -> None:
        click.echo(line, err=self.quiet)

    def seen(self, turn: ControllerTurn) -> None:
        """One turn of the controller."""
        if self.ready or not turn.wanted or turn.up < turn.wanted or not self.stand.ready:
            return
        self.ready = True
        self.say(f"A day in {self.seconds:g} s or a little more. Operator page: {self.stand.client.url}/")
        self.say(f"  (changes there need the key in {self.stand.key_file})")
        self.story = threading.Thread(target=self._story, name="potluck-demo", daemon=True)
        self.story.start()

    def interrupt(self) -> None:
        self.interrupted = True
        self.stop.set()

    def _story(self) -> None:
        from demo.acts import DemoControls, the_day
        from demo.play import Player
        from demo.traffic import DemoTraffic
        from potluck.control.gateway_client import GatewayClient

        acts, model = the_day(), self.inputs.spec.models[0]
        client = GatewayClient(self.stand.client.url, self.stand.key_file.read_text("utf-8"))
        assert model.slo is not None
        self.player = Player(
            DemoControls(client, self.market),
            DemoTraffic(self.stand.url, model.name, self.keys),
            model.slo,
            self.seconds / len(acts),
            self.say,
            self.stop.is_set,
            self.near_usd_per_h,
            self.window_s,
        )
        try:
            self.player.play(acts)
        except PotluckError as error:
            self.failed = str(error)
        what = "The demo was stopped." if self.interrupted or self.failed else "The demo is over."
        with suppress(PotluckError):
            client.note(what, summary(self.player.outcomes, self.player.day_counts()), "end")
        if self.stay and not self.stop.is_set():
            self.say("The day is over; it serves on until Ctrl-C.")
        else:
            self.stop.set()


def _play(folder: Path, seconds: float, port: int, stay: bool, as_json: bool) -> int:
    stood = _stood(folder, seconds, port, stay, as_json)
    stand = stood.stand
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stood.interrupt())
    try:
        stand.must_have_room()
        stand.run(stood.stop.is_set, stood.seen)
        if stood.story is not None:
            stood.story.join()
        stand.down()
    finally:
        with suppress(PotluckError):
            stand.down()
            stand.close()
    outcomes, day_counts = [], RequestCounts()
    if stood.player is not None:
        outcomes, day_counts = stood.player.outcomes, stood.player.day_counts()
    if stood.failed:
        click.echo(f"potluck: {stood.failed}", err=True)
    code = told(outcomes, day_counts, as_json)
    return INTERRUPTED if stood.interrupted else max(code, int(bool(stood.failed)))


def _stood(folder: Path, seconds: float, port: int, stay: bool, as_json: bool) -> _Day:
    """All that a day needs, planned and not yet started."""
    from demo.acts import LAB, NEAR, SHOP
    from potluck.cli.common.inputs import load_problem
    from potluck.cli.simulating.simulation import SimulationInputs, read_one_spec
    from potluck.cli.up.prepare import HEADROOM
    from potluck.control.launchers.engine_command import EngineCommands
    from potluck.control.local_stack import LocalStack, LocalStackSettings, fork_server_of
    from potluck.control.market import MarketFile
    from potluck.control.replanner import Replanner
    from potluck.engine import shipped_model
    from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory

    fork_server = fork_server_of(folder, "mock")
    click.echo("planning", err=True)
    spec = read_one_spec((day(),))
    problem = load_problem(spec, HEADROOM, None, (), 0.0)
    alone = replace(
        problem, regions=tuple(region for region in problem.regions if region.name == NEAR), links=()
    )
    plan, near = (
        STRATEGIES[STRATEGY](TemplateFactory(planning_problem), SolveSettings(time_limit_s=PLAN_S)).plan
        for planning_problem in (problem, alone)
    )
    files = tuple((model.name, shipped_model()) for model in spec.models)
    engine_commands = EngineCommands(
        "mock", files, tuple((model_spec.name, model_spec.model.name) for model_spec in spec.models)
    )
    market = folder / "market.yaml"
    rules = {
        "window_s": max(LEAST_WINDOW_S, seconds * WINDOW_SHARE),
        "replan_s": max(LEAST_LOOK_S, seconds * LOOK_SHARE),
        "grace_s": 15,
        "tick_s": 0.5,
    }
    settings = LocalStackSettings(
        folder / "state",
        day(),
        port,
        engine_commands,
        (*engine_commands.gateway_words(), *(f"--policy={name}={value:g}" for name, value in rules.items())),
        market=MarketFile(market, spec.regions),
        why=f"the demo: the cheapest fleet of {STRATEGY} for {spec.models[0].traffic.rate_per_s:g} requests/s",
    )
    ready = fork_server if fork_server is not None and fork_server.wait_ready() else None
    stand = LocalStack(settings, plan, Replanner(problem, PLAN_S), ready)
    keys = {tenant: _key(stand, tenant) for tenant in (SHOP, LAB)}
    inputs = SimulationInputs(spec, problem, plan)
    seen_s = rules["window_s"] + rules["replan_s"]
    return _Day(stand, inputs, seconds, stay, as_json, keys, market, near.cost_usd_per_h, seen_s)


def _key(stand: LocalStack, tenant: str) -> str:
    from potluck.control.accounts import KeptKey, add_key
    from potluck.gateway.openai.keys import new_key

    key, line = new_key(tenant, tenant)
    kept = KeptKey(json.loads(line)["sha256"], tenant, {"tenant": tenant}, time.time())
    add_key(stand.store, stand.folder, kept)
    return key
