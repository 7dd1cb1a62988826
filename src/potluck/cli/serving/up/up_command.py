"""`potluck up`: from a spec to a running service on this machine."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from potluck.cli.planning.rehearsal_options import SHORT_RUNS
from potluck.cli.serving.up.before_start import must_be_nobodys, planner_of, prepared_for, start_s, told_slow
from potluck.cli.serving.up.clusters import ClusterTarget, elsewhere_options
from potluck.cli.serving.up.gpus import prepared_for_gpus
from potluck.cli.serving.up.up_output import (
    ServiceSummary,
    ask,
    own_key,
    ready_json,
    show_answer,
    show_ready,
    startup,
)
from potluck.cli.serving.up.up_plan import PlanChoices, PreparedPlan, with_offers, workshop_of
from potluck.cli.simulating.simulation import policy_of
from potluck.cli.supervisor import SUPERVISED
from potluck.control.launchers.process import last_lines, must_be_free
from potluck.core.errors import CapacityError, InputError, PotluckError

if TYPE_CHECKING:
    from potluck.control.controller import ControllerTurn
    from potluck.control.local_stack import LocalStack
    from potluck.control.reconciler import StuckReplica

STATE = Path.home() / ".local" / "state" / "potluck"
CHECK_S = 300.0
LOG_LINES = 10
"""Of an engine that cannot be started, as they are shown."""
REMIND_S = 30.0
"""Between two lines about the same thing that is waited for."""
_file = click.Path(dir_okay=False, path_type=Path)


def demo() -> Path:
    """The spec that is served when none is named."""
    return Path(str(resources.files("potluck.cli") / "data" / "demo.yaml"))


@click.command()
@click.argument("paths", metavar="[PLAN] [SPEC]", nargs=-1, type=_file)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Clients'; 8000, or the next free one. The page has the one after it. 0: any free ones.",
)
@click.option(
    "--state", type=click.Path(path_type=Path), help="A folder for state and logs; else one by the spec."
)
@click.option(
    "--engine",
    "style",
    default="emulated",
    show_default=True,
    type=click.Choice(["emulated", "pretended", "gpu", "vllm"]),
    help="emulated: the small model at the planned GPUs' pace; pretended: made-up tokens at that pace; "
    "gpu: the models' own weights on this machine's GPUs; vllm: the same in stock vLLM.",
)
@click.option(
    "--vllm-python", default=sys.executable, help="With --engine vllm: of the environment it is in."
)
@click.option("--vllm-flags", default="", metavar="TEXT", help="With --engine vllm: further flags of vLLM's.")
@click.option(
    "--model",
    type=click.Path(file_okay=False, path_type=Path),
    help="Serve this model on the GPUs of this machine; without PLAN and SPEC.",
)
@click.option(
    "--measure/--no-measure", default=True, show_default=True, help="With --model: each kind of GPU."
)
@click.option("--device", default="cuda", hidden=True, help="Where engines compute that should on GPUs.")
@click.option(
    "--attach",
    type=_file,
    help="Servers that somebody else started, vLLM or any of plain OpenAI: a gateway over those; see docs/vllm.md.",
)
@click.option("--averages", is_flag=True, help="Take the plan as it is, without a rehearsal.")
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
@click.option("--check", is_flag=True, help="Ask one question once it is ready, and stop.")
@click.option(
    "--within",
    "within_s",
    type=click.FloatRange(1.0),
    default=CHECK_S,
    show_default=True,
    help="With --check: seconds in which all must be ready.",
)
@elsewhere_options
@click.option("--json", "as_json", is_flag=True, help="Say where it listens as JSON.")
def up(paths: tuple[Path, ...], attach: Path | None, **options: Any) -> None:
    """Plan, rehearse, start engines and a gateway, and look after them until Ctrl-C.

    Engines are processes of this machine, or with --on of a cluster; docs/deploy.md tells what that needs.

    \b
    Examples:
      potluck up                     a small mixed fleet that needs no GPU
      potluck up potluck.yaml        your own
      potluck up --model DIR         a model on the GPUs that this machine has
      potluck up --attach servers.yaml potluck.yaml    servers that somebody else started
      potluck up potluck.yaml --on ray --engine pretended      on the nodes of a Ray cluster
      potluck up --check             the same for scripts: start, ask one question, stop
    """
    elsewhere = ClusterTarget.of(options)
    if attach is None:
        _up(paths, elsewhere, **options)
        return
    from potluck.cli.serving.up.attach import attach as attached

    attached(attach, paths, *(options[name] for name in ("port", "policy", "time_limit_s", "as_json")))


def _up(
    paths: tuple[Path, ...],
    elsewhere: ClusterTarget,
    port: int | None,
    state: Path | None,
    style: str,
    vllm_python: str,
    vllm_flags: str,
    model: Path | None,
    measure: bool,
    device: str,
    averages: bool,
    advise: bool,
    market: Path | None,
    policy: tuple[str, ...],
    time_limit_s: float,
    check: bool,
    within_s: float,
    as_json: bool,
) -> None:
    from potluck.control.local_stack import LocalStack, LocalStackSettings, nursery_of
    from potluck.control.market import MarketFile

    began_s, here = time.monotonic(), elsewhere.on == "here"
    if model is not None and (paths or not here):
        raise InputError("--model", "is for a spec that is made here; leave PLAN, SPEC and --on out")
    spec_path = paths[-1] if paths else demo()
    folder = state or STATE / (spec_path.stem if model is None else model.resolve().name)
    must_be_nobodys(folder)
    if port and not (folder / "state.db").is_file():  # else its own gateway may be there
        must_be_free(port)
    with ExitStack() as whole, ExitStack() as until_ready:
        said = until_ready.enter_context(startup(2 * SHORT_RUNS + 12))
        # It loads while the plan is made.
        fork_server = nursery_of(folder, style if model is None and here else "gpu")
        if fork_server is not None:
            whole.callback(fork_server.close)
        wishes = PlanChoices(time_limit_s, averages)
        if model is not None:
            ready = prepared_for_gpus(model, folder, wishes, device, said, measure=measure)
        else:
            below = (vllm_python, vllm_flags)
            ready = prepared_for(paths, spec_path, style, device, below, wishes, policy, said, elsewhere)
        spec = ready.prepared.inputs.spec
        rules = policy_of(policy, spec.policy)
        if fork_server is not None:
            said("loading the engine")
            fork_server = fork_server if fork_server.wait_ready() else None
        ruled = (*policy, "advise=true") if advise else policy
        settings = LocalStackSettings(
            folder,
            ready.spec_path.resolve(),
            port,
            ready.maker,
            (*ready.maker.gateway_words(), *(f"--policy={each}" for each in ruled)),
            advise,
            None if market is None else MarketFile(market, spec.regions),
            profiles=ready.profiles,
            start_s=start_s(ready),
            host=elsewhere.host,
            held=SUPERVISED.held,
            why="; ".join((f"potluck up {ready.spec_path.name}", *ready.prepared.lines)),
        )
        settings = elsewhere.settled(settings, spec)
        shop = partial(workshop_of, wishes=ready.wishes)
        found = told_slow(with_offers(ready.prepared, rules, shop), fork_server)
        planner = planner_of(found.inputs, rules, time_limit_s, shop)
        stand = LocalStack(settings, found.inputs.plan, planner, fork_server)
        elsewhere.remembered(stand.store)
        _run(_Show(stand, found, as_json, began_s, check, within_s, said, until_ready.close))


@dataclass(slots=True)
class _Show:
    """A service that starts, as it is told about; `seen` is its one mutator."""

    stand: LocalStack
    prepared: PreparedPlan
    as_json: bool
    began_s: float
    check: bool
    within_s: float
    said: Callable[[str], None]
    quiet: Callable[[], None]
    """Ends the bar."""
    told: bool = False
    failed: str = ""
    last: str = ""
    last_s: float = 0.0
    again: bool = field(default_factory=lambda: SUPERVISED.again)
    """Whether all of it was told before, by one that was killed."""
    stop: threading.Event = field(default_factory=threading.Event)

    def seen(self, turn: ControllerTurn) -> None:
        """One turn of the controller."""
        if self.told:
            return
        line = f"{turn.up} of {turn.wanted} engines are up"
        now_s = time.monotonic()
        if line != self.last:
            self.last, self.last_s = line, now_s
            self.said(line)
        elif now_s - self.last_s > REMIND_S:
            self.last_s = now_s
            click.echo(f"still {line}: {self._lacking(turn)}", err=True)
        if turn.wanted and turn.up == turn.wanted and self.stand.ready:
            self.told = True
            self.quiet()
            self._ready(now_s)
        elif self.stand.fresh and (
            failed := next((each for each in turn.stuck if each.failures.in_vain), None)
        ):
            self.failed = self._in_vain(failed)
            self.stop.set()
        elif self.check and now_s - self.began_s > self.within_s:
            self.failed = f"not ready within {self.within_s:g} s: {line}; {self._lacking(turn)}"
            self.stop.set()

    def _in_vain(self, stuck: StuckReplica) -> str:
        """What an engine said that cannot be started."""
        failures, log = stuck.failures, self.stand.launcher.log_of(stuck.failures.engine)
        lines = last_lines(log, LOG_LINES)
        shown = [f"its log ends with ({log}):", *(f"  {line}" for line in lines)] if lines else []
        head = f"{stuck.replica}: {failures.alike} starts failed in the same way: {failures.why}"
        return "\n".join((head, *shown))

    def _lacking(self, turn: ControllerTurn) -> str:
        """Why something is not there, and where its log is."""
        for line in turn.waiting:
            return line
        for each in self.stand.store.instances():
            if each.state != "up":
                since = time.time() - each.since_s
                log = self.stand.launcher.log_of(each.name)
                return f"{each.name} is {each.state} since {since:.0f} s (its log: {log})"
        return turn.problem or "`potluck status` says what is missing"

    def _ready(self, now_s: float) -> None:
        models = tuple(model.name for model in self.prepared.inputs.spec.models)
        lines = (*self.stand.said, *self.prepared.lines)
        keyed = self.stand.keyed
        served = ServiceSummary(
            self.stand.url,
            models,
            self.stand.plan,
            lines,
            now_s - self.began_s,
            keyed,
            self.stand.client.url,
            str(self.stand.key_file),
        )
        if self.again:
            return
        if not self.check:
            click.echo(json.dumps(ready_json(served))) if self.as_json else show_ready(served)
            return
        self.stop.set()
        try:
            with own_key(self.stand.store, self.stand.folder) if keyed else nullcontext("") as key:
                answers = [ask(served.url, model, key) for model in models]
        except PotluckError as error:
            self.failed = str(error)
            return
        if self.as_json:
            click.echo(json.dumps(ready_json(served) | {"answers": [asdict(each) for each in answers]}))
            return
        show_ready(served)
        for each in answers:
            show_answer(each)


def _run(show: _Show) -> None:
    stand, stop = show.stand, show.stop
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        stand.must_have_room()
        try:
            stand.run(stop.is_set, show.seen)
        except PotluckError as error:
            show.quiet()
            if show.check:  # nobody asked for something that stays
                with suppress(PotluckError):
                    stand.down()
            raise CapacityError(f"{error}\n{_kept(stand)}") from error
        show.quiet()
        click.echo("draining", err=True)
        made = stand.down()
        click.echo("stopped" + (f"; {made} processes had to be made to end" if made else ""), err=True)
        if show.failed:
            raise CapacityError(f"{show.failed}\nall was stopped; state and logs are kept in {stand.folder}")
    finally:
        with suppress(PotluckError):  # what went wrong first is what counts; a lease ends by itself
            stand.close()


def _kept(stand: LocalStack) -> str:
    """What is there after the controller could not go on, and how to go on with it."""
    running = stand.running()
    if not running:
        return f"nothing is left running; state and logs are kept in {stand.folder}"
    what = ", ".join(running)
    return f"on without a controller: {what}; `potluck up` takes over, `potluck down` stops all"
