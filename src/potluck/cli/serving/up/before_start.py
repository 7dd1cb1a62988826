"""`potluck up`, before anything is started: whether something may be, the plan, and who makes further ones."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.cli.common.plan_formats import weights_in
from potluck.cli.serving.up.gpus import (
    GpuSetup,
    for_this_machine,
    found_chips,
    maker_of,
    must_have_chips,
    must_run_here,
    vllm_maker,
)
from potluck.cli.serving.up.up_plan import PlanChoices, prepared
from potluck.cli.simulating.simulation import SimulationInputs, policy_of, read_one_spec, startups_of
from potluck.control.launchers.local_capacity import find_chips
from potluck.core.errors import CapacityError, InputError

if TYPE_CHECKING:
    from potluck.cli.serving.up.clusters import ClusterTarget
    from potluck.cli.serving.up.up_plan import PreparedPlan
    from potluck.control.launchers.local_launcher import ForkServer
    from potluck.control.plan_requests import Planner
    from potluck.core.state.policy import Policy
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.strategies import TemplateFactory

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
        names = tuple((each.name, each.model.name) for each in spec.models)
        maker = EngineCommands(style, files, names, links=() if spec.pool is None else spec.pool.links)
    chosen = replace(wishes, here=True, single=True) if style == "emulated" else wishes
    try:
        found = prepared(paths, spec, chosen, said)
    except CapacityError:
        if chosen != wishes:  # would it do with what cannot be emulated?
            must_run_here(prepared(paths, spec, replace(wishes, averages=True), said).inputs.plan, style)
        raise
    must_run_here(found.inputs.plan, style)
    if here:
        must_have_chips(found.inputs.plan, maker)
    maker = replace(maker, weights=weights_in(spec, found.inputs.plan))
    return GpuSetup(spec_path, found, maker, (), chosen)


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
    from potluck.plan.replan.current_problem import longest_start_s

    inputs = ready.prepared.inputs
    if ready.maker.style not in ("gpu", "vllm"):
        return START_S
    return max(START_S, SLACK * longest_start_s(inputs.problem, startups_of(inputs.spec)))


def told_slow(found: PreparedPlan, fork_server: ForkServer | None) -> PreparedPlan:
    """With a line, before anything is served, where this machine is too slow for the plan's GPUs."""
    from potluck.control.launchers.local_capacity import cpu_count, slow_line

    if fork_server is None or fork_server.cpu is None:
        return found
    traffic = [model.traffic for model in found.inputs.spec.models]
    line = slow_line(found.inputs.plan, traffic, fork_server.cpu, cpu_count())
    return replace(found, lines=(*found.lines, line)) if line else found


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
