"""`potluck up`: from a spec to a running service on this machine."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.cli.common.files import FILE, FOLDER, PATH
from potluck.cli.common.inputs import for_style, weights_in
from potluck.cli.common.render import paragraph, progress, unstyled
from potluck.cli.supervisor import SUPERVISED
from potluck.cli.up.clusters import ClusterTarget, cluster_options
from potluck.cli.up.run_service import (
    QUESTION,
    STATE,
    FirstAnswer,
    ServiceSummary,
    ask,
    curl,
    own_key,
    require_unused_state,
    run_stack,
)
from potluck.cli.up.up_options import UpOptions
from potluck.control.launchers.local_capacity import find_chips
from potluck.control.launchers.process import last_lines, require_free_port
from potluck.core.errors import InputError, PotluckError
from potluck.core.figures import seconds
from potluck.core.values.kv import lossy_notices

if TYPE_CHECKING:
    from potluck.cli.simulating.simulation import SimulationInputs
    from potluck.cli.up.gpus import GpuSetup
    from potluck.cli.up.prepare import PlanChoices, PreparedPlan
    from potluck.cli.up.resume import Loaded
    from potluck.control.controller import ControllerTurn
    from potluck.control.launchers.local_launcher import ForkServer
    from potluck.control.local_stack import LocalStack
    from potluck.control.plan_requests import Planner
    from potluck.control.reconciler import StuckReplica
    from potluck.core.state.policy import Policy
    from potluck.core.values.plan import Plan
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.strategies import TemplateFactory


@contextmanager
def startup(total: int) -> Iterator[Callable[[str], None]]:
    """Reports start-up stages: a progress bar on a terminal, else a line per stage."""
    with progress(total) as bar:
        yield bar if sys.stderr.isatty() and not unstyled() else _lines()


def _lines() -> Callable[[str], None]:
    last = ""

    def report_stage(stage: str) -> None:
        nonlocal last
        kind = "planning" if " templates of " in stage else stage.partition(",")[0]
        if kind != last:
            last = kind
            click.echo(kind, err=True)

    return report_stage


def show_ready(served: ServiceSummary) -> None:
    plan = served.plan
    cost = f"${plan.total_usd_per_h:.2f}/h as planned"
    click.echo(f"Serving {', '.join(served.models)} at {served.url}")
    click.echo(f"ready after {seconds(served.ready_s)}; {cost}; Ctrl-C drains and stops it")
    for line in lossy_notices(plan):
        click.echo(line)
    for deployment in plan.deployments:
        click.echo(f"  {deployment.count} x {deployment.template} in {deployment.region}")
    for flow in sorted({(item.prefill_region, item.decode_region) for item in plan.flows}):
        if flow[0] != flow[1]:
            click.echo(f"  KV transfers: prefill in {flow[0]}, decode in {flow[1]}")
    for line in served.lines:
        paragraph(line, "  ")
    if served.page:
        click.echo(f"Operator page: {served.page}/")
        click.echo(f"  (changes there need the key in {served.key_file})")
    click.echo(
        f"Send a request, or run `potluck top`, `status` or `bench` in another terminal:\n{curl(served)}"
    )


def ready_json(served: ServiceSummary) -> dict[str, object]:
    return {
        "url": served.url,
        "page": served.page,
        "models": list(served.models),
        "cost_usd_per_h": served.plan.total_usd_per_h,
        "ready_s": round(served.ready_s, 2),
        "lines": list(served.lines),
        "notices": list(lossy_notices(served.plan)),
    }


CHECK_TIMEOUT_S = 300.0
FAILED_ENGINE_LOG_LINES = 10
REMINDER_INTERVAL_S = 30.0  # Between two lines about the same missing engines.


def demo() -> Path:
    return Path(str(resources.files("potluck.cli") / "data" / "demo.yaml"))


@click.command()
@argument("paths", metavar="[PLAN] [SPEC]", nargs=-1, type=FILE)
@option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port for clients. Default: 8000 or the next free one; 0: any.",
)
@option("--state", type=PATH, help="Folder for state and logs. Default: one per spec.")
@option(
    "--engine",
    "style",
    default="emulated",
    type=click.Choice(["emulated", "mock", "gpu", "vllm"]),
    help="emulated: a small model at the speed of the planned GPUs; mock: random tokens at that speed; "
    "gpu: the models' weights on this machine's GPUs; vllm: the same in stock vLLM.",
)
@option(
    "--vllm-python",
    default=sys.executable,
    show_default=False,
    help="With --engine vllm: Python interpreter of vLLM.",
)
@option("--vllm-flags", default="", metavar="TEXT", help="With --engine vllm: further vLLM options.")
@option("--model", type=FOLDER, help="Serve this model on this machine's GPUs, without a SPEC.")
@option(
    "--measure/--no-measure", default=True, help="With --model: measure step times of each GPU type first."
)
@option(
    "--shares",
    default="",
    metavar="50,25,12",
    help="With --model: split this machine's GPU, percent per part.",
)
@option("--device", default="cuda", hidden=True, help="Where engines compute that should on GPUs.")
@option(
    "--attach", type=FILE, help="Start only a gateway, over running servers; see docs/existing-servers.md."
)
@option("--engine-ca", type=FILE, help="With --attach: CA certificate of the servers.")
@option("--averages", is_flag=True, help="Plan for mean traffic only; skip the simulation.")
@option("--advise", is_flag=True, help="Recommend new plans instead of applying them.")
@option("--market", type=FILE, help="File of prices and preemption notices to watch; see docs/operating.md.")
@option("--schedule", type=FOLDER, help="Plans by time of day, from `potluck schedule --out`.")
@option("--policy", multiple=True, help="NAME=VALUE: override a policy of the spec.")
@option("--time-limit", "time_limit_s", type=float, default=30.0, help="Planning time limit in CPU-seconds.")
@option("--check", is_flag=True, help="Send one request when ready, then stop.")
@option(
    "--within",
    "within_s",
    type=click.FloatRange(1.0),
    default=CHECK_TIMEOUT_S,
    help="Time limit of --check in s.",
)
@cluster_options
@option("--json", "as_json", is_flag=True, help="Print addresses as JSON.")
def up(paths: tuple[Path, ...], attach: Path | None, **options: Any) -> None:
    """Plan, start engines and a gateway, and operate them until Ctrl-C.

    Engines run on this machine, or with --on in a cluster; see docs/deploy.md.

    \b
    Examples:
      potluck up                     a demo fleet that needs no GPU
      potluck up potluck.yaml        the fleet of a spec
      potluck up --model DIR         a model on this machine's GPUs
      potluck up --attach servers.yaml potluck.yaml    servers that run already
      potluck up potluck.yaml --on ray --engine mock   on the nodes of a Ray cluster
      potluck up --check             start, send one request, stop
    """
    remote_target, asked = ClusterTarget.of(options), UpOptions(**options)
    if attach is None:
        if asked.engine_ca is not None:
            raise InputError("--engine-ca", "is for --attach")
        _up(paths, remote_target, asked)
        return
    if remote_target.on != "here":
        raise InputError("--on", "is for engines that `up` starts itself; leave --attach out")
    from potluck.cli.up.attach import attach as attached

    attached(attach, paths, asked, remote_target.host)


def _up(paths: tuple[Path, ...], remote_target: ClusterTarget, asked: UpOptions) -> None:
    began_s, here, model = time.monotonic(), remote_target.on == "here", asked.model
    if SUPERVISED.again and _resumed(paths, remote_target, asked, began_s):
        return
    # What plans is loaded only here: a controller that resumes another's work must not wait for it.
    from potluck.cli.simulating.simulation import policy_of
    from potluck.cli.up import gpus
    from potluck.cli.up.prepare import PlanChoices, factory_for, scheduled, with_offers
    from potluck.cli.up.resume import remember
    from potluck.control.local_stack import LocalStack, LocalStackSettings, fork_server_of
    from potluck.control.market import MarketFile

    if model is not None and (paths or not here):
        raise InputError("--model", "is for a spec that is made here; leave PLAN, SPEC and --on out")
    if asked.shares and model is None:
        raise InputError("--shares", "is for --model DIR")
    day = None
    if asked.schedule is not None:
        day, paths = scheduled(asked.schedule, paths)
    spec_path = paths[-1] if paths else demo()
    folder = asked.state or STATE / (spec_path.stem if model is None else model.resolve().name)
    require_unused_state(folder)
    if asked.port and not (folder / "state.db").is_file():  # else its own gateway may be there
        require_free_port(asked.port)
    with ExitStack() as whole, ExitStack() as until_ready:
        report = until_ready.enter_context(startup(18))
        # It loads while the plan is made.
        fork_server = fork_server_of(folder, asked.style if model is None and here else "gpu")
        if fork_server is not None:
            whole.callback(fork_server.close)
        choices = PlanChoices(asked.time_limit_s, asked.averages)
        if model is not None:
            local = whole.enter_context(gpus.local_gpus(folder, asked.device, asked.measure, asked.shares))
            gpu_setup = gpus.prepared_for_gpus(model, folder, choices, local, report)
        else:
            gpu_setup = prepared_for(paths, spec_path, asked, choices, report, remote_target)
        spec = gpu_setup.prepared.inputs.spec
        rules = policy_of(asked.policy, spec.policy)
        if fork_server is not None:
            report("loading the engine")
            fork_server = fork_server if fork_server.wait_ready() else None
        policy = (*asked.policy, "advise=true") if asked.advise else asked.policy
        settings = LocalStackSettings(
            folder,
            gpu_setup.spec_path.resolve(),
            asked.port,
            gpu_setup.maker,
            (*gpu_setup.maker.gateway_words(), *(f"--policy={item}" for item in policy)),
            asked.advise,
            None if asked.market is None else MarketFile(asked.market, spec.regions),
            profiles=gpu_setup.profiles,
            start_s=start_s(gpu_setup),
            host=remote_target.host,
            held=SUPERVISED.held,
            why="; ".join((f"potluck up {gpu_setup.spec_path.name}", *gpu_setup.prepared.lines)),
        )
        if day is not None:
            settings = replace(settings, day=replace(day, lead_s=longest_start_s(gpu_setup)))
        settings = remote_target.settled(settings, spec)
        make_factory = partial(factory_for, choices=gpu_setup.choices)
        prepared_plan = with_slowness_note(with_offers(gpu_setup.prepared, rules, make_factory), fork_server)
        planner = planner_of(prepared_plan.inputs, rules, asked.time_limit_s, make_factory)
        stack = LocalStack(settings, prepared_plan.inputs.plan, planner, fork_server)
        remote_target.remembered(stack.store)
        remember(stack.store, settings)
        check = asked.check, asked.within_s
        run_stack(_Show(stack, prepared_plan, asked.as_json, began_s, *check, report, until_ready.close))


def _resumed(paths: tuple[Path, ...], remote_target: ClusterTarget, asked: UpOptions, began_s: float) -> bool:
    """Go on where a controller was killed, if its state has all that this takes."""
    if remote_target.on != "here" or asked.model is not None or asked.schedule is not None:
        return False
    from potluck.cli.up.resume import resumed

    spec_path = paths[-1] if paths else demo()
    folder = asked.state or STATE / spec_path.stem

    def load(plan: Plan) -> Loaded:
        from potluck.cli.simulating.simulation import policy_of
        from potluck.cli.up.prepare import PlanChoices, factory_for

        choices = PlanChoices(asked.time_limit_s, averages=True)
        gpu_setup = prepared_for(paths, spec_path, asked, choices, lambda line: None, remote_target, plan)
        inputs = gpu_setup.prepared.inputs
        policy = policy_of(asked.policy, inputs.spec.policy)
        make_factory = partial(factory_for, choices=gpu_setup.choices)
        return gpu_setup.maker, planner_of(inputs, policy, asked.time_limit_s, make_factory)

    stack = resumed(folder, spec_path.resolve(), asked.style, asked.port, SUPERVISED.held, load)
    if stack is None:
        return False
    check = asked.check, asked.within_s
    run_stack(
        _Show(stack, None, asked.as_json, began_s, *check, lambda line: None, lambda: None), check_room=False
    )
    return True


@dataclass(slots=True)
class _Show:
    """Progress of a starting service; only `seen` changes it."""

    stack: LocalStack
    prepared: PreparedPlan | None
    """None: the service of a killed controller is resumed."""
    as_json: bool
    began_s: float
    check: bool
    within_s: float
    said: Callable[[str], None]
    end_progress: Callable[[], None]
    told: bool = False
    failed: str = ""
    last: str = ""
    last_s: float = 0.0
    again: bool = field(default_factory=lambda: SUPERVISED.again)
    """Whether a killed predecessor has printed that the service is ready."""
    stop: threading.Event = field(default_factory=threading.Event)

    def quiet(self) -> None:
        self.end_progress()

    def seen(self, turn: ControllerTurn) -> None:
        if self.told:
            return
        line = f"{turn.up} of {turn.wanted} engines are up"
        now_s = time.monotonic()
        if line != self.last:
            self.last, self.last_s = line, now_s
            self.said(line)
        elif now_s - self.last_s > REMINDER_INTERVAL_S:
            self.last_s = now_s
            click.echo(f"still {line}: {self._lacking(turn)}", err=True)
        if turn.wanted and turn.up == turn.wanted and self.stack.ready:
            self.told = True
            self.quiet()
            self._ready(now_s)
        elif self.stack.fresh and (
            failed := next((item for item in turn.stuck if item.failures.in_vain), None)
        ):
            self.failed = self._in_vain(failed)
            self.stop.set()
        elif self.check and now_s - self.began_s > self.within_s:
            self.failed = f"not ready within {self.within_s:g} s: {line}; {self._lacking(turn)}"
            self.stop.set()

    def _in_vain(self, stuck: StuckReplica) -> str:
        failures, log = stuck.failures, self.stack.launcher.log_of(stuck.failures.engine)
        lines = last_lines(log, FAILED_ENGINE_LOG_LINES)
        shown = [f"its log ends with ({log}):", *(f"  {line}" for line in lines)] if lines else []
        head = f"{stuck.replica}: {failures.alike} starts failed in the same way: {failures.why}"
        return "\n".join((head, *shown))

    def _lacking(self, turn: ControllerTurn) -> str:
        """Why an engine is missing, and where its log is."""
        for line in turn.waiting:
            return line
        for instance in self.stack.store.instances():
            if instance.state != "up":
                since = time.time() - instance.since_s
                log = self.stack.launcher.log_of(instance.name)
                return f"{instance.name} is {instance.state} since {since:.0f} s (its log: {log})"
        return turn.problem or "`potluck status` says what is missing"

    def _ready(self, now_s: float) -> None:
        if self.again or self.prepared is None:
            return
        stack, models = self.stack, tuple(model.name for model in self.prepared.inputs.spec.models)
        served = ServiceSummary(
            stack.url,
            models,
            stack.plan,
            (*stack.said, *self.prepared.lines),
            now_s - self.began_s,
            stack.keyed,
            stack.client.url,
            str(stack.key_file),
        )
        answers: list[FirstAnswer] = []
        if self.check:
            self.stop.set()
            try:
                with own_key(stack.store, stack.folder) if stack.keyed else nullcontext("") as key:
                    answers = [ask(served.url, model, key) for model in models]
            except PotluckError as error:
                self.failed = str(error)
                return
        if self.as_json:
            asked = {"answers": [asdict(answer) for answer in answers]} if self.check else {}
            click.echo(json.dumps(ready_json(served) | asked))
            return
        show_ready(served)
        for answer in answers:
            took = f"first token after {seconds(answer.ttft_s)}, all after {seconds(answer.e2e_s)}"
            click.echo(f"{answer.model}, asked {QUESTION!r}: {took}\n  {' '.join(answer.text.split())[:200]}")


START_TIME_MARGIN = 3.0  # Times the start-up that is reckoned with, after which an engine is given up.


def prepared_for(
    paths: tuple[Path, ...],
    spec_path: Path,
    asked: UpOptions,
    choices: PlanChoices,
    said: Callable[[str], None],
    remote_target: ClusterTarget,
    plan: Plan | None = None,
) -> GpuSetup:
    from potluck.cli.simulating.simulation import policy_of, read_one_spec
    from potluck.cli.up import gpus
    from potluck.cli.up.prepare import prepared
    from potluck.control.launchers.engine_command import EngineCommands
    from potluck.engine import shipped_model

    spec, style = read_one_spec(paths or (spec_path,)), asked.style
    policy_of(asked.policy, spec.policy)  # what is wrong with it is said before anything long is done
    here = remote_target.on == "here"
    spec = for_style(remote_target.spec_there(spec), style)
    if style == "gpu":
        engine_commands = gpus.maker_of(spec, gpus.found_chips() if here else None, asked.device)
        choices = replace(choices, here=True)
    elif style == "vllm":
        from potluck.vllm.adapter.vllm_process import must_have_vllm

        if here:
            must_have_vllm(asked.vllm_python, "--vllm-python")
        flags = tuple(shlex.split(asked.vllm_flags))
        engine_commands = gpus.vllm_maker(spec, find_chips() if here else (), asked.vllm_python, flags)
    else:
        files = tuple((model.name, shipped_model()) for model in spec.models)
        names = tuple((model.name, model.model.name) for model in spec.models)
        engine_commands = EngineCommands(
            style, files, names, links=() if spec.pool is None else spec.pool.links
        )
    prepared_plan = prepared(paths, spec, choices, said, plan)
    if here:
        gpus.require_gpus(prepared_plan.inputs.plan, engine_commands)
    engine_commands = replace(engine_commands, weights=weights_in(spec, prepared_plan.inputs.plan))
    if style == "vllm":
        engine_commands = replace(
            engine_commands,
            flags=gpus.vllm_flags(spec, prepared_plan.inputs.plan, here and not engine_commands.chips),
        )
    if style == "mock":
        engine_commands = replace(engine_commands, flags=gpus.mock_flags(spec, prepared_plan.inputs.plan))
    return gpus.GpuSetup(spec_path, prepared_plan, engine_commands, (), choices)


def start_s(gpu_setup: GpuSetup) -> float:
    """In which an engine must be ready: more where much is read from a slow place."""
    from potluck.control.reconciler import START_S

    if gpu_setup.maker.style not in ("gpu", "vllm"):
        return START_S
    return max(START_S, START_TIME_MARGIN * longest_start_s(gpu_setup))


def longest_start_s(gpu_setup: GpuSetup) -> float:
    from potluck.cli.simulating.simulation import startups_of
    from potluck.plan import current_problem

    inputs = gpu_setup.prepared.inputs
    return current_problem.longest_start_s(inputs.problem, startups_of(inputs.spec))


def with_slowness_note(prepared_plan: PreparedPlan, fork_server: ForkServer | None) -> PreparedPlan:
    """With a line, before anything is served, where this machine is too slow for the plan's GPUs."""
    from potluck.control.launchers.local_capacity import cpu_count, slow_line

    if fork_server is None or fork_server.cpu is None:
        return prepared_plan
    traffic = [model.traffic for model in prepared_plan.inputs.spec.models]
    line = slow_line(prepared_plan.inputs.plan, traffic, fork_server.cpu, cpu_count())
    return replace(prepared_plan, lines=(*prepared_plan.lines, line)) if line else prepared_plan


def planner_of(
    inputs: SimulationInputs,
    policy: Policy,
    time_limit_s: float,
    make_factory: Callable[[PlanningProblem], TemplateFactory],
) -> Planner | None:
    from potluck.cli.planning.rehearsal import rehearsing, simulated_briefly
    from potluck.cli.simulating.simulation import startups_of
    from potluck.control.replanner import PlanEvidence, Replanner

    if policy.scaling == "none":
        return None
    spec = inputs.spec

    def holds(problem: PlanningProblem, plan: Plan) -> bool:
        return all(item.verdict == "holds" for item in simulated_briefly(spec, problem, plan))

    return Replanner(
        inputs.problem,
        time_limit_s,
        candidates=policy.scaling == "cauchy",
        startups=startups_of(inputs.spec),
        factory_of=make_factory,
        evidence=PlanEvidence(lambda planner: rehearsing(planner, spec), holds),
    )
