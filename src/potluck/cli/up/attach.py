"""`potluck up --attach FILE [SPEC]`: the gateway over servers that somebody else started, and looks after.

Nothing is started or stopped. The spec says on which nodes they run and what they cost; without one the servers are
asked. A server of plain OpenAI computes whole requests: replicas are whole unless every server runs segments.
"""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from secrets import token_bytes
from typing import Any, cast

import click
import yaml

from potluck.cli.common.files import read_text
from potluck.cli.serve import announced, files_of
from potluck.cli.simulating import simulation
from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.layout import single
from potluck.core.values.plan import (
    BucketCapacity,
    Deployment,
    LengthBucket,
    NodeCount,
    Plan,
    PlannedReplica,
    PlannedShare,
    Template,
    TemplateKind,
)
from potluck.core.values.types import Role
from potluck.gateway.registry.engine_list import EngineEntry, read_engines

_say = partial(click.echo, err=True)
WHOLE, ANY = "melange", "auto"  # Strategies: whole replicas of whatever GPUs; whatever is cheapest.


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
    from potluck.gateway.values import GatewaySettings, ListenAddresses

    entries = read_entries(file)
    with tempfile.TemporaryDirectory(prefix="potluck-attach-") as folder:
        if paths:
            inputs = planned_for(entries, paths, time_limit_s, _say)
        else:
            inputs, file = asked(entries, file, Path(folder))
        rules = simulation.policy_of(policy, inputs.spec.policy)
        clients = next_free(USUAL_PORT) if port is None else port
        admin = 0 if port == 0 else next_free(clients + 1)
        places = ListenAddresses(LOOPBACK, clients, LOOPBACK, admin, 1)
        files = files_of(inputs.spec, ())
        settings = GatewaySettings(places, engines=file, files=files, secret=token_bytes(32))
        serve_forever(simulation.scene_of(inputs), rules, settings, announced(as_json))


def asked(
    entries: tuple[EngineEntry, ...], file: Path, folder: Path
) -> tuple[simulation.SimulationInputs, Path]:
    from potluck.cli.common.inputs import load_problem

    servers = tuple(map(_asked, entries))
    for server in servers:
        kind = "an engine" if server.kind == "segments" else "plain OpenAI"
        _say(f"{server.entry.url} serves {server.model} ({kind})")
    spec_path, engine_list = folder / "spec.yaml", folder / "servers.yaml"
    spec_path.write_text(spec_text(servers), "utf-8")
    engine_list.write_text(roster_text(servers, file.resolve().parent, read_text(file, "--attach")), "utf-8")
    spec = simulation.read_one_spec((spec_path,))
    plan = plan_of(servers, {model.name: len(model.model.layers) for model in spec.models})
    return simulation.SimulationInputs(spec, load_problem(spec, 0.8, None, (), 0.0), plan), engine_list


def read_entries(file: Path) -> tuple[EngineEntry, ...]:
    entries = read_engines(read_text(file, "--attach"), file.name, file.parent)
    if not entries:
        raise InputError("--attach", f"{file} names no server")
    return entries


def planned_for(
    entries: tuple[EngineEntry, ...],
    paths: tuple[Path, ...],
    time_limit_s: float,
    said: Callable[[str], None],
) -> simulation.SimulationInputs:
    """The plan that was named, or one that these servers can carry out."""
    from potluck.cli.planning.plan import require_service
    from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory

    if len(paths) == 2:
        return simulation.read_inputs(paths, time_limit_s, said, lambda spec: None)[0]
    from potluck.cli.common.inputs import load_problem

    spec = simulation.read_one_spec(paths)
    plain = any(entry.kind == "openai" for entry in entries)
    spec = replace(spec, engine="openai") if plain else spec
    problem = load_problem(spec, 0.8, None, (), 0.0)
    said("planning")
    outcome = STRATEGIES[WHOLE if plain else ANY](
        TemplateFactory(problem, said=said), SolveSettings(time_limit_s=time_limit_s)
    )
    require_service(problem, outcome, time_limit_s)
    return simulation.SimulationInputs(spec, problem, outcome.plan)


WITHIN_S = 10.0
REGION, NODE, STAND_IN = "here", "1xL40S", "Llama-3.1-8B"
SLO = {"ttft_ms": 10_000, "tpot_ms": 200}
TRAFFIC = {"rate_per_s": 1, "input": 500, "output": 150}
LONGEST_TOKENS = 10_000_000
CONFIG, TOKENIZER = "config.json", "tokenizer.json"


@dataclass(frozen=True, slots=True)
class FoundServer:
    entry: EngineEntry
    kind: str
    model: str
    served_model: str
    role: str = "mixed"
    directory: str = ""  # Where its model lies, if that is on this machine.
    token_ids: bool = False


def _asked(entry: EngineEntry) -> FoundServer:
    status = None if entry.kind == "openai" else _get(entry, "/status")
    if status is not None and "fingerprint" in status:
        served, role = str(status.get("model", "")), str(status.get("role", "mixed"))
        directory = _listed(entry)[1]
        # Whoever tokenises for it must have its tokenizer; without that it does so itself.
        kind = "segments" if directory or role != "mixed" else "openai"
        return FoundServer(entry, kind, entry.model or served, served, role, directory)
    served, directory, vllm = _listed(entry)
    if not served:
        raise InputError(
            entry.url, "names no model at /v1/models, and is no engine; is it a server of OpenAI's API?"
        )
    model, token_ids = entry.model or served, vllm or entry.token_ids
    return FoundServer(entry, "openai", model, served, "mixed", directory, token_ids)


def _listed(entry: EngineEntry) -> tuple[str, str, bool]:
    """A server's first model, where that lies, and whether the server is vLLM."""
    listed = (_get(entry, "/v1/models") or {}).get("data")
    first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
    root = str(first.get("root") or "")
    there = root if root and (Path(root) / CONFIG).is_file() else ""
    return str(first.get("id") or ""), there, first.get("owned_by") == "vllm"


def _get(entry: EngineEntry, path: str) -> dict[str, Any] | None:
    """None where there is nothing of the kind; an error where nobody answers."""
    headers = {"Authorization": f"Bearer {entry.key}"} if entry.key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(entry.url + path, headers=headers), timeout=WITHIN_S
        ) as answer:
            document = json.loads(answer.read(1 << 20))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise InputError(entry.url, "wants a key; say its key_file in the roster") from error
        return None
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError):
            return None
        raise InputError(entry.url, f"does not answer ({getattr(error, 'reason', error)})") from error
    return document if isinstance(document, dict) else None


def spec_text(servers: Sequence[FoundServer]) -> str:
    models = []
    for name in dict.fromkeys(server.model for server in servers):
        mine = [server for server in servers if server.model == name]
        directory = next((server.directory for server in mine if server.directory), "")
        made: dict[str, object] = {"model": directory or _catalog_name(name), "name": name}
        if directory and (Path(directory) / TOKENIZER).is_file():
            made["files"] = directory
        models.append({**made, "slo": SLO, "traffic": TRAFFIC})
    nodes = [{"node": NODE, "available": len(servers), "price_usd_per_h": 1.0}]
    body = {"models": models, "fleet": {"regions": [{"name": REGION, "nodes": nodes}]}}
    return yaml.safe_dump(body, sort_keys=False)


def _catalog_name(name: str) -> str:
    from potluck.catalog import models

    try:
        models.model(name)
        return name
    except UnknownNameError:
        return STAND_IN


def plan_of(servers: Sequence[FoundServer], layers: dict[str, int]) -> Plan:
    """Every server a copy of its own; engines that prefill and decode apart are one copy together."""
    templates: list[Template] = []
    for name in layers:
        mine = [server for server in servers if server.model == name]
        apart = [server for server in mine if server.role != "mixed"]
        if len({server.role for server in apart}) == 2:
            roles = sorted((server.role for server in apart), reverse=True)
            templates.append(_template(name, f"{name}: apart", roles, layers[name]))
        else:
            apart = []
        alone = range(len(mine) - len(apart))
        templates += [_template(name, f"{name}: {place}", ["mixed"], layers[name]) for place in alone]
    return Plan(
        "attached",
        tuple(templates),
        tuple(Deployment(template.name, REGION, 1) for template in templates),
        tuple(LengthBucket(name, 0, LONGEST_TOKENS, 1.0) for name in layers),
        tuple(PlannedShare(template.name, REGION, 0, "closed", 1.0) for template in templates),
        (),
        (),
        float(len(servers)),
        0.0,
    )


def _template(model: str, name: str, roles: Sequence[str], layers: int) -> Template:
    replicas = tuple(PlannedReplica(cast(Role, role), single(NODE, 1, layers)) for role in roles)
    kind: TemplateKind = "homogeneous" if len(roles) == 1 else "combo"
    capacity = (BucketCapacity(0, 0.0, 0.0, 1.0, 1.0, 0.05),)
    return Template(name, kind, model, (NodeCount(NODE, len(roles)),), replicas, capacity, "assumed")


def roster_text(servers: Sequence[FoundServer], folder: Path, given: str) -> str:
    """The roster with what was learned: which kind each is, and whose model."""
    data = yaml.safe_load(given)
    listed = data["engines"] if isinstance(data, dict) else data
    made = []
    for server, text in zip(servers, listed, strict=True):
        learned = {"kind": server.kind, "model": server.model, "served_model": server.served_model}
        entry = {**text, **learned}
        if server.kind == "openai":
            entry["token_ids"] = server.token_ids
        else:
            entry.pop("served_model")
        if "key_file" in entry:
            entry["key_file"] = str((folder / entry["key_file"]).resolve())
        made.append(entry)
    return yaml.safe_dump({"engines": made}, sort_keys=False)
