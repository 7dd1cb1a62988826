"""A plan as Compose files: one for each machine, since Compose knows one machine; the first has the gateway too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from potluck.export.placement import CommandOptions, HostOf, PlacedPlan, RentedMachine, roster

SECRETS = ("engine.key", "pipeline.secret")


def files(
    fleet: PlacedPlan,
    wording: CommandOptions,
    addresses: Mapping[str, str],
    image: str,
    served: Iterable[str],
) -> dict[str, str]:
    """File name to text; `served` are the files that the gateway reads."""

    def host_of(box: RentedMachine) -> str:
        return addresses.get(box.name, box.name)

    texts: dict[str, str] = {}
    for number, box in enumerate(fleet.boxes):
        services = _services(fleet, box, wording, host_of, image)
        if not number:
            services["gateway"] = _gateway(image, wording, served)
        texts[f"compose-{box.name}.yaml"] = _text(box, services)
    texts["engines.yaml"] = roster(
        fleet, lambda one: f"http://{host_of(one.box)}:{one.port}", wording.key_file
    )
    return texts


def _text(box: RentedMachine, services: dict[str, Any]) -> str:
    used = {item["source"] for service in services.values() for item in service.get("secrets", ())}
    data = {
        "name": "potluck",
        "services": services,
        "secrets": {name: {"file": f"./{name}"} for name in SECRETS if name in used},
    }
    head = f"# {box.name}: {box.node.name} in {box.region}\n"
    return head + yaml.safe_dump(data, sort_keys=False, width=120)


def _services(
    fleet: PlacedPlan, box: RentedMachine, wording: CommandOptions, host_of: HostOf, image: str
) -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = {}
    here = host_of(box)
    for one in fleet.placements:
        for number, footing in enumerate(() if one.alone else one.footings):
            if footing.box == box:
                line = f"exec {' '.join(wording.worker(one, here))} < {wording.secret_file}"
                worker = _service(image, ["sh", "-c", line], wording, SECRETS[1:])
                services[f"{one.name}-worker{number}"] = worker | _gpus(footing.gpus)
        if one.box == box:
            command, secrets = wording.engine(one, here, host_of), SECRETS[:1] if one.alone else SECRETS
            services[one.name] = _service(image, command, wording, secrets, one.port, here)
            if one.alone:
                services[one.name] |= _gpus(tuple(gpu for footing in one.footings for gpu in footing.gpus))
    return services


def _models(wording: CommandOptions) -> list[str]:
    return [f"{folder}:{folder}:ro" for folder in sorted(set(wording.folders.values()))]


def _secrets(*names: str) -> list[dict[str, str]]:
    return [{"source": name, "target": f"/etc/potluck/{name}"} for name in names]


def _service(
    image: str,
    command: list[str],
    wording: CommandOptions,
    secrets: tuple[str, ...],
    port: int = 0,
    host: str = "",
) -> dict[str, Any]:
    service: dict[str, Any] = {
        "image": image,
        "command": command,
        "network_mode": "host",
        "ipc": "host",
        "restart": "unless-stopped",
        "stop_grace_period": "120s",
        "volumes": _models(wording),
        "secrets": _secrets(*secrets),
    }
    if port:
        ask = f"import urllib.request as r; r.urlopen('http://{host}:{port}/health', timeout=5)"
        service["healthcheck"] = {
            "test": ["CMD", "python3", "-c", ask],
            "interval": "10s",
            "timeout": "6s",
            "start_period": "15m",
        }
    return service


def _gpus(gpus: tuple[int, ...]) -> dict[str, Any]:
    device = {"driver": "nvidia", "device_ids": [str(gpu) for gpu in gpus], "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _gateway(image: str, wording: CommandOptions, served: Iterable[str]) -> dict[str, Any]:
    files = (*served, "engines.yaml", "keys.jsonl")
    return {
        "image": image,
        "command": wording.gateway("/srv/", "/srv/keys.jsonl"),
        "network_mode": "host",
        "restart": "unless-stopped",
        "stop_grace_period": "120s",
        "volumes": [f"./{name}:/srv/{name}:ro" for name in files] + _models(wording),
        "secrets": _secrets("engine.key"),
    }
