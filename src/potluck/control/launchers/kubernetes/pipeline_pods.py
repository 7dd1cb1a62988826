"""The pods of an engine over several machines: a worker on each, and the engine's own once all of them listen.

No LeaderWorkerSet, for the reason there is no StatefulSet: whose copy goes is the Brain's to say. A worker that dies
is started again in its pod, and the engine takes it back; one whose pod is gone takes the engine with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from potluck.control.control_values import EngineSpec
from potluck.control.launchers.kubernetes.pods import POD_IP, Manifest, ManifestOptions, mounts
from potluck.core.errors import InputError

STAGE_PORT = 7100
SECRET_FILE = "/etc/potluck/pipeline.secret"
WORKER = ["python3", "-m", "potluck.engine.pipeline"]


def worker_container(port: int, gpus: int, cluster: ManifestOptions) -> Manifest:
    """A stage's worker, which reads the pipeline's secret from its standard input."""
    line = f"exec {' '.join(WORKER)} --listen $POD_IP:{port} --stay < {SECRET_FILE}"
    return {
        "name": "worker",
        "image": cluster.image,
        "command": ["sh", "-c", line],
        "env": [POD_IP],
        "ports": [{"name": "stage", "containerPort": port}],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "volumeMounts": mounts(),
        "readinessProbe": {"tcpSocket": {"port": "stage"}, "periodSeconds": 5},
    }


def worker_names(lead: str, make: EngineSpec) -> list[str]:
    """One for each machine of the layout, in its order."""
    count = sum(len(stage.nodes) for stage in make.layout.stages)
    return [f"{lead}-w{number}" for number in range(count)]


def over_machines(words: Sequence[str], make: EngineSpec) -> list[str]:
    """An engine's command with its workers elsewhere, where they are not known yet: `%0%`, `%1%`, ..."""
    if "--stages" not in words:
        raise InputError(
            "layout", "pipelines over several machines run with --engine gpu, or plan without them"
        )
    numbers = iter(range(sum(len(stage.nodes) for stage in make.layout.stages)))
    parts = [
        f"{stage.layers}@{'+'.join(f'%{next(numbers)}%' for _ in stage.nodes)}"
        for stage in make.layout.stages
    ]
    found = list(words)
    found[found.index("--stages") + 1] = ",".join(parts)
    return [*found, "--secret-file", SECRET_FILE]


def with_addresses(lead: Manifest, addresses: Sequence[str]) -> Manifest:
    """The engine's pod, with where its workers listen."""
    spec = lead["spec"]
    (engine,) = spec["containers"]
    words = list(engine["command"])
    for number, address in enumerate(addresses):
        words = [word.replace(f"%{number}%", f"{address}:{STAGE_PORT}") for word in words]
    return {**lead, "spec": {**spec, "containers": [{**engine, "command": words}]}}


def workers_of(place: Mapping[str, object]) -> list[str]:
    found: Any = place.get("workers")
    return [str(each) for each in found] if isinstance(found, list) else []
