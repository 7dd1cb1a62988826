"""A plan as SkyPilot tasks: one for each machine, and a script that launches them and tells the gateway of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from potluck.core.values.vllm_version import VLLM_VERSION
from potluck.export.placement import (
    EVERYWHERE,
    CommandOptions,
    ExportedProcess,
    PlacedPlan,
    RentedMachine,
    WeightsSource,
    disk_bytes,
    pull_words,
    roster,
    tokenizers_of,
    yaml_text,
)
from potluck.export.shell import line_of, process_line

GPU_NAMES = {
    "A100-40": "A100",
    "A100-80": "A100-80GB",
    "A100-80-PCIe": "A100-80GB",
    "A100-40-PCIe": "A100",
    "H100-SXM": "H100",
    "H100-PCIe": "H100",
    "A800-SXM": "A800",
    "RTX3090Ti": "RTX3090-Ti",
    "A6000": "RTXA6000",
    "A5000": "RTXA5000",
    "V100-16": "V100",
    "V100-32": "V100-32GB",
}
"""A GPU of the catalog to the name that SkyPilot has for it, where they differ."""
DEFAULT_DISK_GB = 256  # SkyPilot's own choice: a task says something only where it needs more.
ADDRESS = "$(hostname -I | cut -d' ' -f1)"
CLOUD_REGIONS = (
    ("aws", r"(us|eu|ap|ca|sa|me|af|il|mx)(-gov)?-(north|south|east|west|central)+-\d"),
    (
        "gcp",
        r"(us|europe|asia|australia|northamerica|southamerica|me|africa)-(north|south|east|west|central)+\d+",
    ),
    (
        "azure",
        r"(east|west|central|northcentral|southcentral|westcentral)us\d?|(north|west)europe|(uk|japan|canada|"
        r"australia|brazil|india|korea|france|germany|sweden|switzerland|norway)(north|south|east|west|central)+\d?",
    ),
)
"""How each cloud names its regions; names alone tell them apart."""


@dataclass(frozen=True, slots=True)
class SkyOptions:
    infra: Mapping[str, str]  # Region to what SkyPilot calls it, such as aws/us-east-2.
    setup: str  # How machines get Potluck.
    models: str = "/models"
    weights: Mapping[str, WeightsSource] = field(default_factory=dict)


def infra_of(region: str) -> str:
    """CLOUD/REGION of a region that is named as a cloud does; empty where none does."""
    return next((f"{cloud}/{region}" for cloud, names in CLOUD_REGIONS if re.fullmatch(names, region)), "")


def files(placed_plan: PlacedPlan, command_options: CommandOptions, options: SkyOptions) -> dict[str, str]:
    """File name to text."""
    texts = {
        f"{machine.name}.yaml": _task(placed_plan, machine, command_options, options)
        for machine in placed_plan.boxes
    }
    texts["engines.yaml.in"] = roster(
        placed_plan, lambda one: f"http://@{one.box.name}@:{one.port}", "./engine.key"
    )
    texts["launch.sh"] = _launch(placed_plan, command_options, options)
    return texts


def _on(
    placed_plan: PlacedPlan, machine: RentedMachine, command_options: CommandOptions
) -> list[ExportedProcess]:
    return command_options.on(
        machine, placed_plan.placements, lambda _: EVERYWHERE, lambda other: f"${_variable(other)}"
    )


def _variable(machine: RentedMachine) -> str:
    """For its address, which is known once it was launched."""
    return "POTLUCK_HOST_" + re.sub(r"\W", "_", machine.name).upper()


def _named(placed_plan: PlacedPlan, processes: list[ExportedProcess]) -> list[RentedMachine]:
    """Machines whose address these processes are told."""
    words = [word for process in processes for word in process.words]
    return [
        machine
        for machine in placed_plan.boxes
        if any(word.startswith(f"${_variable(machine)}:") for word in words)
    ]


def _task(
    placed_plan: PlacedPlan, machine: RentedMachine, command_options: CommandOptions, options: SkyOptions
) -> str:
    processes = _on(placed_plan, machine, command_options)
    models = list(dict.fromkeys(process.placement.model for process in processes))
    pulled = {model: options.weights[model] for model in models if model in options.weights}
    mounted = {command_options.folders[model]: item.source for model, item in pulled.items() if not item.hub}
    named = _named(placed_plan, processes)
    secrets = {"POTLUCK_API_KEY": None} | ({"HF_TOKEN": None} if any(w.hub for w in pulled.values()) else {})
    task: dict[str, Any] = {
        "name": machine.name,
        "resources": _resources(machine, processes, command_options, options),
        "num_nodes": 1,
        **({"envs": {_variable(other): "" for other in named}} if named else {}),
        "secrets": secrets,
        **({"file_mounts": mounted} if mounted else {}),
        "setup": _setup(command_options, options, {m: item for m, item in pulled.items() if item.hub}),
        "run": _run(processes, command_options, machine, named),
    }
    head = f"# {machine.node.name} in {machine.region}: {', '.join(process.name for process in processes)}\n"
    return head + yaml_text(task)


def _resources(
    machine: RentedMachine,
    processes: list[ExportedProcess],
    command_options: CommandOptions,
    options: SkyOptions,
) -> dict[str, Any]:
    ports = {port for process in processes for port in _kv_ports(process)}
    ports |= {process.placement.port for process in processes if process.part == "engine"}
    ports |= {
        process.footing.stage_port
        for process in processes
        if process.part == "engine" and not process.placement.alone
    }
    gpu = machine.node.gpu.name
    resources: dict[str, Any] = {"accelerators": f"{GPU_NAMES.get(gpu, gpu)}:{machine.node.gpus}"}
    infra = options.infra.get(machine.region) or infra_of(machine.region)
    if infra:
        resources = {"infra": infra, **resources}
    if machine.spot:
        resources["use_spot"] = True
    limits = [command_options.limits_of(process.placement) for process in processes]
    needs_gb = ceil(disk_bytes([sum(item.weight_bytes) for item in limits if item]) / 1e9) + 100
    if needs_gb > DEFAULT_DISK_GB:
        resources["disk_size"] = needs_gb
    resources["ports"] = sorted(ports)
    return resources


def _kv_ports(process: ExportedProcess) -> range:
    """Each worker of a vLLM has one, counted over all its machines; the embedded engine has one in all."""
    if process.words[2:3] != ("vllm",):
        return range(process.footing.kv_port, process.footing.kv_port + 1)
    first = process.footing.kv_port + process.footing.stage * len(process.gpus) * (
        not process.placement.alone
    )
    return range(first, first + len(process.gpus))


def _setup(command_options: CommandOptions, options: SkyOptions, pulled: Mapping[str, WeightsSource]) -> str:
    lines = ["set -e"]
    if command_options.style == "vllm":
        lines.append(f"pip install vllm=={VLLM_VERSION}")
    lines.append(options.setup)
    if pulled:
        lines.append(f'sudo mkdir -p {options.models} && sudo chown "$USER" {options.models}')
    lines += [line_of(pull_words(item, command_options.folders[model])) for model, item in pulled.items()]
    return "\n".join(lines) + "\n"


def _run(
    processes: list[ExportedProcess],
    command_options: CommandOptions,
    machine: RentedMachine,
    named: list[RentedMachine],
) -> str:
    lines = ["set -euo pipefail"]
    for other in named:
        if other == machine:
            lines.append(f"{_variable(machine)}={ADDRESS}")
        else:
            lines.append(
                f'[ -n "${_variable(other)}" ] || exit 0  # it is not known yet; launch.sh runs it later'
            )
    return "\n".join([*lines, *(process_line(process) for process in processes), "wait -n", ""])


def _launch(placed_plan: PlacedPlan, command_options: CommandOptions, options: SkyOptions) -> str:
    """All at once; machines that must be told of others run their processes when all are there."""
    later = {
        machine.name: [
            other
            for other in _named(placed_plan, _on(placed_plan, machine, command_options))
            if other != machine
        ]
        for machine in placed_plan.boxes
    }
    names = " ".join(machine.name for machine in placed_plan.boxes)
    serve = " ".join(command_options.gateway("", "keys.jsonl"))
    hub = any(item.hub for item in options.weights.values())
    token = 'export HF_TOKEN="${HF_TOKEN:-}"  # opens gated models\n' if hub else ""
    tokens = " --secret HF_TOKEN" if hub else ""
    pulls = "".join(
        f"{line_of(words)}\n" for words in tokenizers_of(options.weights, command_options.folders)
    )
    secrets = f"--detach-run --secret POTLUCK_API_KEY{tokens}"
    runs = "".join(
        f"sky exec {secrets}"
        + "".join(f' --env {_variable(other)}="$(ssh {other.name} {ADDRESS[2:-1]})"' for other in others)
        + f" {name} {name}.yaml &\n"
        for name, others in later.items()
        if others
    )
    return f"""#!/usr/bin/env bash
# Rents what the plan says, then serves it from here, with the models' tokenizers and keys.jsonl that lie here.
# Ends nothing: `sky down {names}` does.
set -euo pipefail
: "${{POTLUCK_API_KEY:?the key that engines and gateway share}}"
{token}for box in {names}; do sky launch --yes {secrets} --cluster "$box" "$box.yaml" & done
wait
{runs + "wait" + chr(10) if runs else ""}cp engines.yaml.in engines.yaml
for box in {names}; do sed -i "s/@$box@/$(sky status --ip "$box")/" engines.yaml; done
umask 077; printf %s "$POTLUCK_API_KEY" > engine.key
{pulls}exec {serve} "$@"
"""
