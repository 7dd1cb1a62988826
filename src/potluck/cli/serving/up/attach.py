"""`potluck up --attach FILE [SPEC]`: the gateway over servers that somebody else started, and looks after.

Nothing is started or stopped here. The spec says on which nodes they run and what they cost; without one the servers
are asked what they are (`up_asked.py`). A server of plain OpenAI computes whole requests, so the plan has whole
replicas alone unless every server has an engine's face.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from secrets import token_bytes

import click

from potluck.cli.common.files import read_text
from potluck.cli.serving.serve_command import announced, files_of
from potluck.cli.simulating.simulation import (
    SimulationInputs,
    policy_of,
    read_inputs,
    read_one_spec,
    scene_of,
)
from potluck.core.errors import InputError
from potluck.gateway.registry.engine_list import EngineEntry, read_roster

WHOLE, ANY = "melange", "auto"
"""Strategies: whole replicas of whatever GPUs; whatever is cheapest."""


def attach(
    file: Path,
    paths: tuple[Path, ...],
    port: int | None,
    policy: tuple[str, ...],
    time_limit_s: float,
    as_json: bool,
) -> None:
    from potluck.control.launchers.process import LOOPBACK, next_free
    from potluck.control.local_stack import USUAL_PORT
    from potluck.gateway.serve import serve_forever
    from potluck.gateway.settings import GatewaySettings, ListenAddresses

    entries = read_entries(file)
    with tempfile.TemporaryDirectory(prefix="potluck-attach-") as folder:
        if paths:
            inputs = planned_for(entries, paths, time_limit_s, _said)
        else:
            inputs, file = asked(entries, file, Path(folder))
        rules = policy_of(policy, inputs.spec.policy)
        clients = next_free(USUAL_PORT) if port is None else port
        admin = 0 if port == 0 else next_free(clients + 1)
        places = ListenAddresses(LOOPBACK, clients, LOOPBACK, admin, 1)
        files = files_of(inputs.spec, ())
        settings = GatewaySettings(places, engines=file, files=files, secret=token_bytes(32))
        serve_forever(scene_of(inputs), rules, settings, announced(as_json))


def _said(line: str) -> None:
    click.echo(line, err=True)


def asked(entries: tuple[EngineEntry, ...], file: Path, folder: Path) -> tuple[SimulationInputs, Path]:
    """A spec and a plan of what the servers say they are, and the roster with it."""
    from potluck.cli.common.problem_options import load_problem
    from potluck.cli.serving.up.discover import ask_all, plan_of, roster_text, spec_text

    found = ask_all(entries)
    for each in found:
        _said(
            f"{each.entry.url} serves {each.model} ({'an engine' if each.kind == 'face' else 'plain OpenAI'})"
        )
    spec_path, engine_list = folder / "spec.yaml", folder / "servers.yaml"
    spec_path.write_text(spec_text(found), "utf-8")
    engine_list.write_text(roster_text(found, file.resolve().parent, read_text(file, "--attach")), "utf-8")
    spec = read_one_spec((spec_path,))
    plan = plan_of(found, {model.name: len(model.model.layers) for model in spec.models})
    return SimulationInputs(spec, load_problem(spec, 0.8, None, (), 0.0), plan), engine_list


def read_entries(file: Path) -> tuple[EngineEntry, ...]:
    text = read_text(file, "--attach")
    entries = read_roster(text, file.name, file.parent)
    if not entries:
        raise InputError("--attach", f"{file} names no server")
    return entries


def planned_for(
    entries: tuple[EngineEntry, ...],
    paths: tuple[Path, ...],
    time_limit_s: float,
    said: Callable[[str], None],
) -> SimulationInputs:
    """The plan that was named, or one that these servers can carry out."""
    from potluck.cli.planning.plan_command import require_service
    from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory

    if len(paths) == 2:
        return read_inputs(paths, time_limit_s, said, lambda spec: None)[0]
    from potluck.cli.common.problem_options import load_problem

    spec = read_one_spec(paths)
    problem = load_problem(spec, 0.8, None, (), 0.0)
    plain = any(entry.kind == "openai" for entry in entries)
    said("planning")
    outcome = STRATEGIES[WHOLE if plain else ANY](
        TemplateFactory(problem, said=said), SolveSettings(time_limit_s=time_limit_s)
    )
    require_service(problem, outcome, time_limit_s)
    return SimulationInputs(spec, problem, outcome.plan)
