"""A plan as Compose files: one for each machine, since Compose knows one machine; the first has the gateway too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.export.placement import (
    CommandOptions,
    ExportedProcess,
    HostOf,
    PlacedPlan,
    RentedMachine,
    WeightsSource,
    label,
    pull_words,
    roster,
    yaml_text,
)

SECRET = "engine.key"
MOUNTED_SECRET = {"source": SECRET, "target": f"/etc/potluck/{SECRET}"}
SHARED_MEMORY = "8gb"
"""Of a container that does not have the machine's own: workers of one engine speak through it."""


@dataclass(frozen=True, slots=True)
class ComposeOptions:
    image: str
    """Of the gateway ..."""
    engine_image: str
    """... and of engines."""
    weights: Mapping[str, WeightsSource] = field(default_factory=dict)
    """Models that are pulled before their engines start."""


def files(
    placed_plan: PlacedPlan,
    command_options: CommandOptions,
    addresses: Mapping[str, str],
    options: ComposeOptions,
    served: Iterable[str],
) -> dict[str, str]:
    """File name to text; `served` are the files that the gateway reads."""

    def host_of(machine: RentedMachine) -> str:
        return addresses.get(machine.name, machine.name)

    texts: dict[str, str] = {}
    for number, machine in enumerate(placed_plan.boxes):
        services = _services(placed_plan, machine, command_options, host_of, options)
        if not number:
            for model, item in options.weights.items():
                words = pull_words(item, command_options.folders[model], tokenizer=True)
                services.setdefault(
                    f"pull-{label(model)}", _pull(options, command_options.folders[model], words)
                )
            services["gateway"] = _gateway(options, command_options, served) | _after_pull(
                options, options.weights
            )
        texts[f"compose-{machine.name}.yaml"] = _text(machine, services, options)
    texts["engines.yaml"] = roster(
        placed_plan, lambda one: f"http://{host_of(one.box)}:{one.port}", command_options.key_file
    )
    return texts


def _text(machine: RentedMachine, services: dict[str, Any], options: ComposeOptions) -> str:
    used = any(service.get("secrets") for service in services.values())
    data = {
        "name": "potluck",
        "services": services,
        "secrets": {SECRET: {"file": f"./{SECRET}"}} if used else {},
    }
    images = dict.fromkeys((options.image, options.engine_image))
    where = f"{machine.name}: {machine.node.name} in {machine.region}"
    head = f"# {where}; images {', '.join(images)} of Potluck's deploy/\n"
    return head + yaml_text(data)


def _services(
    placed_plan: PlacedPlan,
    machine: RentedMachine,
    command_options: CommandOptions,
    host_of: HostOf,
    options: ComposeOptions,
) -> dict[str, dict[str, Any]]:
    started = command_options.on(machine, placed_plan.placements, host_of, host_of)
    models = dict.fromkeys(process.placement.model for process in started)
    services = {
        f"pull-{label(model)}": _pull(
            options,
            command_options.folders[model],
            pull_words(options.weights[model], command_options.folders[model]),
        )
        for model in models
        if model in options.weights
    }
    for process in started:
        service = _service(process, command_options, options.engine_image, host_of(machine))
        services[process.name] = service | _after_pull(options, [process.placement.model])
    return services


def _after_pull(options: ComposeOptions, models: Iterable[str]) -> dict[str, Any]:
    """Started once these models are there, as far as they are pulled."""
    done = {"condition": "service_completed_successfully"}
    awaited = {f"pull-{label(model)}": done for model in models if model in options.weights}
    return {"depends_on": awaited} if awaited else {}


def _pull(options: ComposeOptions, folder: str, words: list[str]) -> dict[str, Any]:
    first, *rest = words
    return {
        "image": options.image,
        "entrypoint": [first],
        "command": rest,
        "environment": {"HF_TOKEN": "${HF_TOKEN:-}"},
        "restart": "on-failure",
        "volumes": [f"{folder}:{folder}"],
    }


def _models(folders: Iterable[str]) -> list[str]:
    return [f"{folder}:{folder}:ro" for folder in sorted(set(folders))]


def _service(
    process: ExportedProcess, command_options: CommandOptions, image: str, host: str
) -> dict[str, Any]:
    """Compose puts `command` behind an image's own entry point, which is vLLM's: both are written."""
    placement, words = process.placement, process.words
    service: dict[str, Any] = {
        "image": image,
        "entrypoint": [words[0]],
        "command": list(words[1:]),
        "network_mode": "host",
        "ipc": "host",
        "shm_size": SHARED_MEMORY,
        "restart": "unless-stopped",
        "stop_grace_period": "120s",
        "volumes": _models([command_options.folders[placement.model]]),
        **({"secrets": [MOUNTED_SECRET]} if process.part == "engine" else {}),
    }
    if process.part == "engine":
        service["healthcheck"] = _health(f"http://{host}:{placement.port}/health", "30m")
    return service | (_gpus(process) if process.gpus else {})


def _health(url: str, start_period: str) -> dict[str, Any]:
    ask = f"import urllib.request as r; r.urlopen('{url}', timeout=5)"
    return {
        "test": ["CMD", "python3", "-c", ask],
        "interval": "10s",
        "timeout": "6s",
        "start_period": start_period,
    }


def _gpus(process: ExportedProcess) -> dict[str, Any]:
    numbers = [str(gpu) for gpu in process.gpus]
    if process.box.node.gpu.architecture.startswith("cdna"):
        devices = ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"]
        chosen = {"ROCR_VISIBLE_DEVICES": ",".join(numbers)}
        return {"devices": devices, "group_add": ["video"], "environment": chosen}
    device = {"driver": "nvidia", "device_ids": numbers, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _gateway(
    options: ComposeOptions, command_options: CommandOptions, served: Iterable[str]
) -> dict[str, Any]:
    files = (*served, "engines.yaml", "keys.jsonl")
    first, *rest = command_options.gateway("/srv/", "/srv/keys.jsonl")
    service: dict[str, Any] = {
        "image": options.image,
        "entrypoint": [first],
        "command": rest,
        "network_mode": "host",
        "restart": "unless-stopped",
        "stop_grace_period": "120s",
        "volumes": [f"./{name}:/srv/{name}:ro" for name in files] + _models(command_options.folders.values()),
        "secrets": [MOUNTED_SECRET],
        "healthcheck": _health("http://127.0.0.1:8000/ready", "30m"),
    }
    return service
