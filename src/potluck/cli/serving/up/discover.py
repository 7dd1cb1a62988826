"""`potluck up --attach FILE` without a spec: servers are asked what they are, and the rest is guessed.

What a server runs on it does not say. So all of a model count alike, as one kind of GPU with a model of the catalog:
by its name, by the directory that the server names, or as a stand-in. Requests are spread by what each server has to
do and how fast it proves to be; what is priced and predicted means little, and a spec says it better.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

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
from potluck.gateway.registry.engine_list import EngineEntry

WITHIN_S = 10.0
REGION, NODE, STAND_IN = "here", "1xL40S", "Llama-3.1-8B"
SLO = {"ttft_ms": 10_000, "tpot_ms": 200}
TRAFFIC = {"rate_per_s": 1, "input": 500, "output": 150}
LONGEST_TOKENS = 10_000_000
CONFIG, TOKENIZER = "config.json", "tokenizer.json"


@dataclass(frozen=True, slots=True)
class FoundServer:
    """One server, as it says."""

    entry: EngineEntry
    kind: str
    model: str
    served_model: str
    role: str = "mixed"
    directory: str = ""
    """Where its model lies, if that is on this machine."""
    token_ids: bool = False


def ask_all(entries: Sequence[EngineEntry]) -> tuple[FoundServer, ...]:
    return tuple(map(_asked, entries))


def _asked(entry: EngineEntry) -> FoundServer:
    status = None if entry.kind == "openai" else _get(entry, "/status")
    if status is not None and "fingerprint" in status:
        served, role = str(status.get("model", "")), str(status.get("role", "mixed"))
        directory = _listed(entry)[1]
        # Whoever tokenises for it must have its tokenizer; without that it does so itself.
        kind = "face" if directory or role != "mixed" else "openai"
        return FoundServer(entry, kind, entry.model or served, served, role, directory)
    served, directory, vllm = _listed(entry)
    if not served:
        raise InputError(
            entry.url, "names no model at /v1/models, and is no engine; is it a server of OpenAI's API?"
        )
    return FoundServer(
        entry, "openai", entry.model or served, served, "mixed", directory, vllm or entry.token_ids
    )


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
            found = json.loads(answer.read(1 << 20))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise InputError(entry.url, "wants a key; say its key_file in the roster") from error
        return None
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError):
            return None
        raise InputError(entry.url, f"does not answer ({getattr(error, 'reason', error)})") from error
    return found if isinstance(found, dict) else None


def spec_text(found: Sequence[FoundServer]) -> str:
    models = []
    for name in dict.fromkeys(each.model for each in found):
        mine = [each for each in found if each.model == name]
        directory = next((each.directory for each in mine if each.directory), "")
        made: dict[str, object] = {"model": directory or _catalog_name(name), "name": name}
        if directory and (Path(directory) / TOKENIZER).is_file():
            made["files"] = directory
        models.append({**made, "slo": SLO, "traffic": TRAFFIC})
    nodes = [{"node": NODE, "available": len(found), "price_usd_per_h": 1.0}]
    body = {"models": models, "fleet": {"regions": [{"name": REGION, "nodes": nodes}]}}
    return yaml.safe_dump(body, sort_keys=False)


def _catalog_name(name: str) -> str:
    from potluck.catalog import models

    try:
        models.model(name)
        return name
    except UnknownNameError:
        return STAND_IN


def plan_of(found: Sequence[FoundServer], layers: dict[str, int]) -> Plan:
    """Every server a copy of its own; engines that prefill and decode apart are one copy together."""
    templates: list[Template] = []
    for name in layers:
        mine = [each for each in found if each.model == name]
        apart = [each for each in mine if each.role != "mixed"]
        if len({each.role for each in apart}) == 2:
            roles = sorted((each.role for each in apart), reverse=True)
            templates.append(_template(name, f"{name}: apart", roles, layers[name]))
        else:
            apart = []
        alone = range(len(mine) - len(apart))
        templates += [_template(name, f"{name}: {place}", ["mixed"], layers[name]) for place in alone]
    return Plan(
        "attached",
        tuple(templates),
        tuple(Deployment(each.name, REGION, 1) for each in templates),
        tuple(LengthBucket(name, 0, LONGEST_TOKENS, 1.0) for name in layers),
        tuple(PlannedShare(each.name, REGION, 0, "closed", 1.0) for each in templates),
        (),
        (),
        float(len(found)),
        0.0,
    )


def _template(model: str, name: str, roles: Sequence[str], layers: int) -> Template:
    replicas = tuple(PlannedReplica(cast(Role, role), single(NODE, 1, layers)) for role in roles)
    kind: TemplateKind = "homogeneous" if len(roles) == 1 else "combo"
    capacity = (BucketCapacity(0, 0.0, 0.0, 1.0, 1.0, 0.05),)
    return Template(name, kind, model, (NodeCount(NODE, len(roles)),), replicas, capacity, "assumed")


def roster_text(found: Sequence[FoundServer], folder: Path, given: str) -> str:
    """The roster with what was learned: which kind each is, and whose model."""
    data = yaml.safe_load(given)
    listed = data["engines"] if isinstance(data, dict) else data
    made = []
    for each, said in zip(found, listed, strict=True):
        entry = {**said, "kind": each.kind, "model": each.model, "served_model": each.served_model}
        if each.kind == "openai":
            entry["token_ids"] = each.token_ids
        else:
            entry.pop("served_model")
        if "key_file" in entry:
            entry["key_file"] = str((folder / entry["key_file"]).resolve())
        made.append(entry)
    return yaml.safe_dump({"engines": made}, sort_keys=False)
