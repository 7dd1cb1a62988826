"""`potluck up`: from a spec to a running service on this machine."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.cli.common.files import FILE, FOLDER, PATH
from potluck.cli.common.inputs import weights_in
from potluck.cli.common.render import paragraph, progress, unstyled
from potluck.cli.planning.rehearsal import SHORT_RUNS
from potluck.cli.simulating.simulation import SimulationInputs, policy_of, read_one_spec, startups_of
from potluck.cli.supervisor import SUPERVISED
from potluck.cli.up.clusters import ClusterTarget, elsewhere_options
from potluck.cli.up.gpus import (
    GpuSetup,
    for_this_machine,
    found_chips,
    maker_of,
    must_have_chips,
    must_run_here,
    prepared_for_gpus,
    vllm_maker,
)
from potluck.cli.up.prepare import PlanChoices, PreparedPlan, prepared, with_offers, workshop_of
from potluck.control.launchers.local_capacity import find_chips
from potluck.control.launchers.process import last_lines, must_be_free
from potluck.core.errors import CapacityError, InputError, PotluckError
from potluck.core.figures import seconds
from potluck.core.values.kv import lossy_notices

if TYPE_CHECKING:
    from pathlib import Path

    from potluck.control.controller import ControllerTurn
    from potluck.control.launchers.local_launcher import ForkServer
    from potluck.control.local_stack import LocalStack
    from potluck.control.plan_requests import Planner
    from potluck.control.reconciler import StuckReplica
    from potluck.control.state_store import StateStore
    from potluck.core.state.policy import Policy
    from potluck.core.values.plan import Plan
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.strategies import TemplateFactory


QUESTION = "Hello"
MOST_TOKENS = 40
ANSWER_S = 120.0
OWN_NAME = "potluck up --check"


@dataclass(frozen=True, slots=True)
class ServiceSummary:
    """What there is to say of a service that is ready."""

    url: str
    models: tuple[str, ...]
    plan: Plan
    lines: tuple[str, ...]
    ready_s: float
    """Since the command was given."""
    keyed: bool = False
    """Whether clients must show a key."""
    page: str = ""
    """Where operators look."""
    key_file: str = ""
    """What they need to change something."""


@contextmanager
def startup(total: int) -> Iterator[Callable[[str], None]]:
    """Says what is being done: a bar on a terminal, else a line for each kind of thing."""
    with progress(total) as bar:
        yield bar if sys.stderr.isatty() and not unstyled() else _lines()


def _lines() -> Callable[[str], None]:
    last = ""

    def said(stage: str) -> None:
        nonlocal last
        kind = "planning" if " templates of " in stage else stage.partition(",")[0]
        if kind != last:
            last = kind
            click.echo(kind, err=True)

    return said


def show_ready(served: ServiceSummary) -> None:
    plan = served.plan
    cost = f"${plan.cost_usd_per_h:.2f}/h as planned"
    click.echo(f"Serving {', '.join(served.models)} at {served.url}")
    click.echo(f"ready after {seconds(served.ready_s)}; {cost}; Ctrl-C drains")
    for line in lossy_notices(plan):
        click.echo(line)
    for deployment in plan.deployments:
        click.echo(f"  {deployment.count} x {deployment.template} in {deployment.region}")
    for flow in sorted({(item.prefill_region, item.decode_region) for item in plan.flows}):
        if flow[0] != flow[1]:
            click.echo(f"  prompts computed in {flow[0]} are answered in {flow[1]}")
    for line in served.lines:
        paragraph(line, "  ")
    if served.page:
        click.echo(f"Watch it at {served.page}/")
        click.echo(f"  (orders there need the key in {served.key_file})")
    click.echo(f"Try it, or see `potluck top`, `status`, `bench` in another terminal:\n{curl(served)}")


def curl(served: ServiceSummary) -> str:
    """A command that streams an answer, in lines of 80 columns."""
    head, tail = json.dumps(body_of(served.models[0])).split(' "messages"')
    shown = '    -H "Authorization: Bearer $OPENAI_API_KEY" \\\n' if served.keyed else ""
    return (
        f"  curl -N {served.url}/v1/chat/completions \\\n{shown}"
        f"    -H 'Content-Type: application/json' -d '{head}\n    \"messages\"{tail}'"
    )


def ready_json(served: ServiceSummary) -> dict[str, object]:
    return {
        "url": served.url,
        "page": served.page,
        "models": list(served.models),
        "cost_usd_per_h": served.plan.cost_usd_per_h,
        "ready_s": round(served.ready_s, 2),
        "lines": list(served.lines),
        "notices": list(lossy_notices(served.plan)),
    }


def body_of(model: str) -> dict[str, object]:
    return {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MOST_TOKENS,
    }


@contextmanager
def own_key(store: StateStore, folder: Path) -> Iterator[str]:
    """A key for one question of our own, which ends with it."""
    from potluck.control.accounts import KeptKey, add_key, revoke_key
    from potluck.gateway.openai.keys import LOOK_S, new_key

    key, line = new_key(OWN_NAME)
    add_key(store, folder, KeptKey(json.loads(line)["sha256"], OWN_NAME, {"tenant": OWN_NAME}, time.time()))
    try:
        time.sleep(1.5 * LOOK_S)  # by then the gateway has read it
        yield key
    finally:
        revoke_key(store, folder, OWN_NAME, time.time())


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """What came back for one question."""

    model: str
    text: str
    ttft_s: float
    e2e_s: float


def ask(url: str, model: str, key: str = "") -> FirstAnswer:
    """One streamed answer; none at all is an error."""
    data = json.dumps(body_of(model)).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    began_s, first_s, text = time.monotonic(), 0.0, ""
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            for line in answer:
                piece = _piece(line)
                if piece and not text:
                    first_s = time.monotonic() - began_s
                text += piece
    except urllib.error.HTTPError as error:
        message = " ".join(error.read(500).decode("utf-8", "replace").split())
        raise CapacityError(f"{model} answered with {error.code}: {message}") from error
    except OSError as error:
        raise CapacityError(f"{url} did not answer ({error})") from error
    if not text:
        raise CapacityError(f"{model} answered with no text; `potluck logs gateway` may say why")
    return FirstAnswer(model, text, first_s, time.monotonic() - began_s)


def _piece(line: bytes) -> str:
    """The text of one event of a stream."""
    name, _, data = line.decode("utf-8", "replace").strip().partition(": ")
    if name != "data" or data == "[DONE]":
        return ""
    choices = json.loads(data).get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


def show_answer(answer: FirstAnswer) -> None:
    click.echo(
        f"{answer.model}, asked {QUESTION!r}: first token after {seconds(answer.ttft_s)}, "
        f"all after {seconds(answer.e2e_s)}\n  {' '.join(answer.text.split())[:200]}"
    )


STATE = Path.home() / ".local" / "state" / "potluck"
CHECK_S = 300.0
LOG_LINES = 10
"""Of an engine that cannot be started, as they are shown."""
REMIND_S = 30.0
"""Between two lines about the same thing that is waited for."""


def demo() -> Path:
    """The spec that is served when none is named."""
    return Path(str(resources.files("potluck.cli") / "data" / "demo.yaml"))


@click.command()
@argument("paths", metavar="[PLAN] [SPEC]", nargs=-1, type=FILE)
@option("--port", type=click.IntRange(0, 65535), help="Clients'; else 8000 or the next free one. 0: any.")
@option("--state", type=PATH, help="A folder for state and logs; else one by the spec.")
@option(
    "--engine",
    "style",
    default="emulated",
    type=click.Choice(["emulated", "pretended", "gpu", "vllm"]),
    help="emulated: the small model at the planned GPUs' pace; pretended: made-up tokens at that pace; "
    "gpu: the models' own weights on this machine's GPUs; vllm: the same in stock vLLM.",
)
@option(
    "--vllm-python",
    default=sys.executable,
    show_default=False,
    help="With --engine vllm: of the environment it is in.",
)
@option("--vllm-flags", default="", metavar="TEXT", help="With --engine vllm: further flags of vLLM's.")
@option("--model", type=FOLDER, help="Serve this model on this machine's GPUs; without SPEC.")
@option("--measure/--no-measure", default=True, help="With --model: each kind of GPU.")
@option("--device", default="cuda", hidden=True, help="Where engines compute that should on GPUs.")
@option("--attach", type=FILE, help="Only a gateway, over servers that run already; see docs/vllm.md.")
@option("--averages", is_flag=True, help="Take the plan as it is, without a rehearsal.")
@option("--advise", is_flag=True, help="Only recommend other plans; change nothing by itself.")
@option("--market", type=FILE, help="Prices and notices in a file that is watched; see docs/operating.md.")
@option("--policy", multiple=True, help="NAME=VALUE of a run-time rule, over the spec's.")
@option("--time-limit", "time_limit_s", type=float, default=30.0, help="To plan, in s.")
@option("--check", is_flag=True, help="Ask one question once it is ready, and stop.")
@option("--within", "within_s", type=click.FloatRange(1.0), default=CHECK_S, help="With --check, in s.")
@elsewhere_options
@option("--json", "as_json", is_flag=True, help="Say where it listens as JSON.")
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
    from potluck.cli.up.attach import attach as attached

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
    from potluck.control.local_stack import LocalStack, LocalStackSettings, fork_server_of
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
        report = until_ready.enter_context(startup(2 * SHORT_RUNS + 12))
        # It loads while the plan is made.
        fork_server = fork_server_of(folder, style if model is None and here else "gpu")
        if fork_server is not None:
            whole.callback(fork_server.close)
        wishes = PlanChoices(time_limit_s, averages)
        if model is not None:
            ready = prepared_for_gpus(model, folder, wishes, device, report, measure=measure)
        else:
            below = (vllm_python, vllm_flags)
            ready = prepared_for(paths, spec_path, style, device, below, wishes, policy, report, elsewhere)
        spec = ready.prepared.inputs.spec
        rules = policy_of(policy, spec.policy)
        if fork_server is not None:
            report("loading the engine")
            fork_server = fork_server if fork_server.wait_ready() else None
        ruled = (*policy, "advise=true") if advise else policy
        settings = LocalStackSettings(
            folder,
            ready.spec_path.resolve(),
            port,
            ready.maker,
            (*ready.maker.gateway_words(), *(f"--policy={item}" for item in ruled)),
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
        slow = told_slow(with_offers(ready.prepared, rules, shop), fork_server)
        planner = planner_of(slow.inputs, rules, time_limit_s, shop)
        stand = LocalStack(settings, slow.inputs.plan, planner, fork_server)
        elsewhere.remembered(stand.store)
        _run(_Show(stand, slow, as_json, began_s, check, within_s, report, until_ready.close))


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
            failed := next(
                (stuck_replica for stuck_replica in turn.stuck if stuck_replica.failures.in_vain), None
            )
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
        for instance in self.stand.store.instances():
            if instance.state != "up":
                since = time.time() - instance.since_s
                log = self.stand.launcher.log_of(instance.name)
                return f"{instance.name} is {instance.state} since {since:.0f} s (its log: {log})"
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
            click.echo(
                json.dumps(
                    ready_json(served) | {"answers": [asdict(first_answer) for first_answer in answers]}
                )
            )
            return
        show_ready(served)
        for answer in answers:
            show_answer(answer)


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


FIND_S = 60.0
"""In which a Python must say whether it has vLLM."""
SLACK = 3.0
"""Times the start-up that is reckoned with, after which an engine is given up."""


def prepared_for(
    paths: tuple[Path, ...],
    spec_path: Path,
    style: str,
    device: str,
    below: tuple[str, str],
    wishes: PlanChoices,
    policy: tuple[str, ...],
    said: Callable[[str], None],
    elsewhere: ClusterTarget,
) -> GpuSetup:
    """For a spec that somebody wrote, on this machine or elsewhere."""
    from potluck.control.launchers.engine_command import EngineCommands
    from potluck.engine.shipped_model import shipped_model

    spec = read_one_spec(paths or (spec_path,))
    policy_of(policy, spec.policy)  # what is wrong with it is said before anything long is done
    here = elsewhere.on == "here"
    spec = elsewhere.spec_there(spec)
    if style == "gpu":
        chips = found_chips() if here else None
        maker, wishes = maker_of(spec, chips, device), for_this_machine(wishes, spec)
    elif style == "vllm":
        if here:
            must_have_vllm(below[0])
        maker = vllm_maker(spec, find_chips() if here else (), below[0], tuple(shlex.split(below[1])))
    else:
        files = tuple((model.name, shipped_model()) for model in spec.models)
        names = tuple((model_spec.name, model_spec.model.name) for model_spec in spec.models)
        maker = EngineCommands(style, files, names, links=() if spec.pool is None else spec.pool.links)
    chosen = replace(wishes, here=True, single=True) if style == "emulated" else wishes
    try:
        prepared_plan = prepared(paths, spec, chosen, said)
    except CapacityError:
        if chosen != wishes:  # would it do with what cannot be emulated?
            must_run_here(prepared(paths, spec, replace(wishes, averages=True), said).inputs.plan, style)
        raise
    must_run_here(prepared_plan.inputs.plan, style)
    if here:
        must_have_chips(prepared_plan.inputs.plan, maker)
    maker = replace(maker, weights=weights_in(spec, prepared_plan.inputs.plan))
    return GpuSetup(spec_path, prepared_plan, maker, (), chosen)


def must_have_vllm(python: str) -> None:
    """Refuse to start engines of a vLLM that is not there."""
    from potluck.vllm import TESTED

    code = "import importlib.util as u, sys; s = u.find_spec('vllm'); sys.exit(s is None or s.origin is None)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=FIND_S, check=False)
    except OSError as error:
        raise InputError("--vllm-python", f"{python} cannot be run ({error.strerror or error})") from error
    except subprocess.TimeoutExpired as error:
        raise InputError("--vllm-python", f"{python} did not answer within {FIND_S:g} s") from error
    if done.returncode:
        raise InputError(
            "--engine",
            f"vllm: {python} has no vLLM; `{python} -m pip install vllm=={TESTED[-1]}`, or name the Python "
            "that has it with --vllm-python",
        )


def start_s(ready: GpuSetup) -> float:
    """In which an engine must be ready: more where much is read from a slow place."""
    from potluck.control.reconciler import START_S
    from potluck.plan.current_problem import longest_start_s

    inputs = ready.prepared.inputs
    if ready.maker.style not in ("gpu", "vllm"):
        return START_S
    return max(START_S, SLACK * longest_start_s(inputs.problem, startups_of(inputs.spec)))


def told_slow(prepared_plan: PreparedPlan, fork_server: ForkServer | None) -> PreparedPlan:
    """With a line, before anything is served, where this machine is too slow for the plan's GPUs."""
    from potluck.control.launchers.local_capacity import cpu_count, slow_line

    if fork_server is None or fork_server.cpu is None:
        return prepared_plan
    traffic = [model.traffic for model in prepared_plan.inputs.spec.models]
    line = slow_line(prepared_plan.inputs.plan, traffic, fork_server.cpu, cpu_count())
    return replace(prepared_plan, lines=(*prepared_plan.lines, line)) if line else prepared_plan


def must_be_nobodys(folder: Path) -> None:
    """Somebody who looks after this already is found before a plan is made for nothing."""
    from potluck.control.service_view import ServiceView

    if (folder / "state.db").is_file():
        service = ServiceView(folder)
        lives = service.controller_lives
        service.close()
        if lives:
            raise InputError("--state", f"{folder}: another controller runs it; `potluck status` shows it")


def planner_of(
    inputs: SimulationInputs,
    rules: Policy,
    time_limit_s: float,
    shop: Callable[[PlanningProblem], TemplateFactory],
) -> Planner | None:
    from potluck.control.replanner import Replanner

    if rules.scaling == "none":
        return None
    return Replanner(
        inputs.problem,
        time_limit_s,
        candidates=rules.scaling == "cauchy",
        startups=startups_of(inputs.spec),
        shop=shop,
    )
