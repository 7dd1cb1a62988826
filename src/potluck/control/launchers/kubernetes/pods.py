"""Pods of engines: the same whether they are exported or started by a controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
GPU_LABEL, REGION_LABEL = "nvidia.com/gpu.product", "topology.kubernetes.io/region"
GRACE_S = 300
"""In which what is under way may end."""


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """What the manifests are made for."""

    image: str
    namespace: str = "potluck"
    models_claim: str = "potluck-models"
    gpu_label: str = GPU_LABEL
    """Which label of a node names its GPUs ..."""
    gpu_names: Mapping[str, str] | None = None
    """... and what it says, for a GPU of the catalog; else the catalog's name."""
    region_label: str = REGION_LABEL
    secret: str = "potluck"
    """Its files are in /etc/potluck of every pod."""


def engine_container(
    command: list[str], ports: tuple[int, int], gpus: int, cluster: ManifestOptions
) -> Manifest:
    """An engine that listens at these ports, for HTTP and for KV, and is emptied before it ends."""
    health = {"httpGet": {"path": "/health", "port": "http"}}
    drain = (
        "import os,time,urllib.request as r;"
        f"u='http://%s:{ports[0]}'%os.environ['POD_IP'];"
        "h={'Authorization':'Bearer '+open('/etc/potluck/engine.key').read().strip()};"
        "r.urlopen(r.Request(u+'/drain',method='POST',headers=h),timeout=5);time.sleep(5)"
    )
    return {
        "name": "engine",
        "image": cluster.image,
        "command": command,
        "env": [POD_IP],
        "ports": [
            {"name": "http", "containerPort": ports[0]},
            {"name": "kv", "containerPort": ports[1]},
        ],
        **({"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}),
        "volumeMounts": [*mounts(), {"name": "shm", "mountPath": "/dev/shm"}],
        # Weights may take long to load; whoever never answers is started again after half an hour.
        "startupProbe": health | {"periodSeconds": 5, "failureThreshold": 360},
        "readinessProbe": health | {"periodSeconds": 5, "timeoutSeconds": 3},
        "livenessProbe": health | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": ["python3", "-c", drain]}}},
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def mounts() -> list[Manifest]:
    """Where containers find models and secrets."""
    return [
        {"name": "models", "mountPath": "/models", "readOnly": True},
        {"name": "secret", "mountPath": "/etc/potluck", "readOnly": True},
    ]


def pod_template(
    labels: dict[str, str], gpu: str, region: str, containers: list[Manifest], cluster: ManifestOptions
) -> Manifest:
    """Containers on a node with such GPUs, as its label names them, in a region; any where it has no name."""
    selector = {cluster.gpu_label: gpu, **({cluster.region_label: region} if region else {})}
    spec: Manifest = {
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "nodeSelector": selector,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containers": containers,
        "volumes": [
            {
                "name": "models",
                "persistentVolumeClaim": {"claimName": cluster.models_claim, "readOnly": True},
            },
            {"name": "secret", "secret": {"secretName": cluster.secret, "defaultMode": 0o440}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {"metadata": {"labels": labels}, "spec": spec}
